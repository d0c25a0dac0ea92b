"""Every option as a table: docs/options.md, and `eyas options [SECTION]`.

Reads: the source of eyas.settings (fields and the comments beside them), conf/ (values and the
comments beside them, which win), dvc.yaml (who reads what). Run: make options.
"""

import dataclasses
import inspect
import io
import re
import tokenize
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from eyas.desk.params import CONF_FOLDER, all_sections, check, compose

HEAD = """# Options

Made by `make options` from `src/eyas/settings.py` and `conf/`; a test keeps it current. Edit
`conf/`, or give an option to DVC (`dvc exp run -S train.lr=1e-4`) or to a stage run by hand
(`python -m eyas.stages.train train.lr=1e-4`). An option that is unknown, missing or of another type
is an error that names it. The values are those of the default run; `DS` stands for a data set.
"""
_COMMENT = re.compile(r"^(?P<indent> *)(?P<key>[\w]+):(?:.*?)\s#\s(?P<text>.+)$")


def render(section: str = "") -> str:
    """Return the tables as Markdown: all of them, or those whose path begins with `section`."""
    params = check(compose())
    _, *others = (f"datasets.{name}" for name in params.value("datasets"))
    tables = [
        (name, text)
        for path, kind in all_sections(params)
        if path not in others  # one stands for all
        for name, text in _tables(path, kind, params.value(path))
        if name.startswith(section)
    ]
    head = [] if section else [HEAD.rstrip(), _groups()]
    return "\n\n".join([*head, *(text for _, text in tables)]) + "\n"


def describe(kind: type) -> dict[str, str]:
    """Return what the comment beside each field of a settings class says."""
    found: dict[str, str] = {}
    source = inspect.getsource(kind)
    names = {f.name for f in dataclasses.fields(kind)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = token.line.strip().partition(":")[0]
        if token.type == tokenize.COMMENT and name in names:
            found[name] = token.string.removeprefix("#").strip()
    return found


def _groups() -> str:
    """Return what may be chosen whole, as `target=tiny` or in an experiment."""
    lines = ["| group | choices |", "|---|---|"]
    for folder in sorted(path for path in CONF_FOLDER.iterdir() if path.is_dir()):
        names = sorted(f"`{path.stem}`" for path in folder.glob("*.yaml"))
        lines.append(f"| `{folder.name}` | {', '.join(names)} |")
    return "## Groups\n\n" + "\n".join(lines)


def _tables(path: str, kind: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and table of a section and of the sections inside it."""
    if typing.get_origin(kind) is dict:
        path, value = f"{path}.NAME", next(iter(value.values()))
    value = value if isinstance(value, Mapping) else {}
    name = re.sub(r"^datasets\.\w+", "datasets.DS", path)
    for section in _sections_in(kind):
        meanings = describe(section) | _conf_comments(path)
        rows = ["| option | type | value | meaning |", "|---|---|---|---|"]
        for f in dataclasses.fields(section):
            meaning = meanings.get(f.name, "").replace("|", "\\|")
            rows.append(f"| `{f.name}` | {_type(f.type)} | {_value(value, f)} | {meaning} |")
        head = [f"## {name}", inspect.getdoc(section), _readers(name)]
        yield name, "\n\n".join([*filter(None, head), "\n".join(rows)])
        for f in dataclasses.fields(section):
            if typing.get_origin(f.type) is not dict:
                yield from _tables(f"{path}.{f.name}", f.type, value.get(f.name))


def _sections_in(hint: Any) -> list[type]:
    parts = typing.get_args(hint) or (hint,)
    return [part for part in parts if dataclasses.is_dataclass(part) and isinstance(part, type)]


def _value(values: Mapping[str, Any], field: dataclasses.Field[Any]) -> str:
    """Return a field's value in the default run, or the one it has if left out there."""
    left_out = None if field.default is dataclasses.MISSING else field.default
    value = values.get(field.name, left_out)
    if value is not None and _sections_in(field.type):
        return "see below"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("\n...")
    return f"`{text}`" if len(text) <= 40 else f"`{text[:37]}...`"


def _type(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"(eyas\.settings|typing)\.", "", text).replace(" | ", " or ")


def _conf_comments(path: str) -> dict[str, str]:
    """Return the comments beside the keys of a section's own file in conf/."""
    file = CONF_FOLDER / path / "default.yaml"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    matches = (_COMMENT.match(line) for line in lines)
    return {m["key"]: m["text"] for m in matches if m and not m["indent"]}


def _readers(name: str) -> str:
    """Return which stages depend on a section, by dvc.yaml."""
    stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    key = name.replace("datasets.DS", "datasets.${key}")
    found = [
        f"`{stage}`"
        for stage, block in stages.items()
        for param in block.get("do", block).get("params", [])
        if param == key or param.startswith(f"{key}.")
    ]
    return f"Read by {', '.join(dict.fromkeys(found))}." if found else ""
