"""Parameters: composed from conf/, written to params.yaml, read back strictly.

Reads: conf/. Writes: params.yaml. Run: eyas params [--check].
Source: https://hydra.cc/docs/advanced/compose_api/ (DVC gives the same bytes, a test asserts it).
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eyas.errors import EyasError

S = TypeVar("S")
PARAMS_FILE = Path("params.yaml")
CONF_FOLDER = Path("conf")


class Params:
    """The composed configuration, handing out sections and remembering which were asked for.

    `section` is for what changes a stage's output and so must stand in its `params:` list in
    dvc.yaml; `knob` is for what does not (threads, addresses, folders) and must not stand there.
    A test compares.
    """

    def __init__(self, config: DictConfig | Mapping[str, Any]) -> None:
        value = (
            OmegaConf.to_container(config, resolve=True)
            if isinstance(config, DictConfig)
            else dict(config)
        )
        self._tree = typing.cast("dict[str, Any]", value)
        self.sections: set[str] = set()
        self.knobs: set[str] = set()

    def section(self, path: str, kind: type[S]) -> S:
        """Return the declared section at a dotted path, checked against `kind`."""
        self.sections.add(path)
        return fill(kind, self.value(path), path)

    def knob(self, path: str, kind: type[S]) -> S:
        """Return a section that changes no output."""
        self.knobs.add(path)
        return fill(kind, self.value(path), path)

    def value(self, path: str) -> Any:
        """Return the raw value at a dotted path."""
        value: Any = self._tree
        for depth, key in enumerate(path.split("."), start=1):
            if not isinstance(value, Mapping) or key not in value:
                missing = ".".join(path.split(".")[:depth])
                raise EyasError(
                    f"{PARAMS_FILE}: no key '{missing}'",
                    hint="add it under conf/, then run `eyas params`",
                )
            value = value[key]
        return value

    def tree(self) -> dict[str, Any]:
        """Return the whole configuration as plain values."""
        return self._tree


def fill(kind: Any, value: Any, path: str) -> Any:
    """Turn plain values into `kind`: dataclass, scalar, optional, tuple or dict.

    Raises: EyasError naming the key that does not fit.
    """
    if dataclasses.is_dataclass(kind):
        return _fill_dataclass(typing.cast("type", kind), value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return fill(next(a for a in arguments if a is not type(None)), value, path)
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(fill(arguments[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {k: fill(arguments[1], v, f"{path}.{k}") for k, v in value.items()}
    return _fill_scalar(kind, value, path)


def _fill_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise EyasError(f"params: '{path}' must be a mapping, got {value!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(value) - set(fields)):
        raise EyasError(
            f"params: unknown key '{path}.{unknown[0]}'",
            hint=f"{path} knows {', '.join(sorted(fields))}",
        )
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING:
            raise EyasError(
                f"params: missing key '{path}.{name}'", hint="every option stands in conf/"
            )
    hints = typing.get_type_hints(kind)
    return kind(**{name: fill(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _fill_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        typing.get_origin(kind) is None
        and isinstance(value, kind)
        and (kind is bool or not isinstance(value, bool))
    ):
        return value
    expected = getattr(kind, "__name__", str(kind))
    raise EyasError(f"params: '{path}' must be {expected}, got {value!r} ({type(value).__name__})")


def compose(overrides: Sequence[str] = (), folder: Path = CONF_FOLDER) -> str:
    """Return the text of params.yaml that conf/ gives under these Hydra overrides.

    Raises: EyasError naming the file or override that Hydra refused.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    if not (folder / "config.yaml").is_file():
        raise EyasError(
            f"{folder}/config.yaml: no such file", hint="run from the repository's top folder"
        )
    try:
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            config = hydra_compose("config", overrides=list(overrides))
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise EyasError(
            f"conf: {' '.join(str(error).split())}", hint="see the groups and keys under conf/"
        ) from error
    return OmegaConf.to_yaml(config)


def check(text: str) -> Params:
    """Parse params text and fill every section once, so that a typo is told before any work."""
    params = Params(typing.cast("DictConfig", OmegaConf.create(text)))
    for path, kind in all_sections(params):
        params.section(path, kind)
    return params


def all_sections(params: Params) -> list[tuple[str, Any]]:
    """Return every section with what it is filled into, one for each data set."""
    from eyas import settings as s

    fixed: list[tuple[str, Any]] = [
        ("target", s.Target),
        ("endpoint", s.Endpoint),
        ("partition", dict[str, s.PartitionRule]),
        ("generate", s.Sampling),
        ("heldout", s.Heldout),
        ("validate", s.Validate),
        ("merge", s.Merge),
        ("extract", s.Extract),
        ("drafter", s.Drafter),
        ("train", s.Train),
        ("export", s.Export),
        ("evaluate", s.Evaluate),
        ("runtime", s.Runtime),
    ]
    return [*fixed, *((f"datasets.{name}", s.Dataset) for name in params.value("datasets"))]


def flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and leaf values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(f"{path}.{key}" if path else key, item)
    else:
        yield path, value


def read_params(path: Path = PARAMS_FILE) -> Params:
    """Read params.yaml as it stands, experiment overrides included."""
    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint="run `eyas params` (or `make run`)")
    return Params(typing.cast("DictConfig", OmegaConf.load(path)))


def drift(text: str, path: Path = PARAMS_FILE) -> str:
    """Return the unified diff from params.yaml to what conf/ gives; empty when they are in step."""
    current = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = difflib.unified_diff(
        current.splitlines(),
        text.splitlines(),
        str(path),
        f"{CONF_FOLDER}/ composed",
        lineterm="",
        n=2,
    )
    return "\n".join(lines)
