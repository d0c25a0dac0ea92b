"""The pages under docs/: every name in them exists, and the examples of adding.md run."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from eyas import cli
from eyas.desk.params import check, compose
from eyas.errors import EyasError
from eyas.files import sha256_of
from eyas.prompts.rows import ParsedRow
from eyas.prompts.schemas import SCHEMAS, parse_row
from eyas.prompts.tasks import question
from eyas.tokens import codecs
from eyas.tokens.codecs import ReplyParts, load_codec

PAGES = sorted([*Path("docs").glob("*.md"), Path("CONTRIBUTING.md")])
MADE_BY_A_RUN = ("models/", "data/", "reports/", "var/", "metrics/", ".venv")
ADDING = Path("docs/adding.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", ADDING, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_and_command_it_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`([\w.-]+/[\w./-]*[\w/]\.?\w*)`", text)
    for name in named + [str(page.parent / link) for link in links]:
        places = (Path(name), Path("src/eyas", name), page.parent / name)
        here = any(place.exists() for place in places)
        assert here or name.startswith(MADE_BY_A_RUN) or not Path(name).suffix, name
    makefile = Path("Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    verbs = set(getattr(get_command(cli.app), "commands", {}))
    assert set(re.findall(r"`eyas ([a-z]+)", text)) <= verbs


def known_options() -> set[str]:
    """Return every section and option by its dotted name."""
    names: set[str] = set()
    section = ""
    for line in Path("docs/options.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            names.add(section)
        elif option := re.match(r"\| `(\w+)` \|", line):
            names.add(f"{section}.{option[1]}")
    return names


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_option_it_names_exists(page: Path) -> None:
    known = known_options()
    sections = "|".join({name.partition(".")[0] for name in known})
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{sections})(?:\.\w+)+)", text)
    files = ("py", "md", "yaml", "json", "safetensors")
    for name in named:
        assert name in known or name.endswith(files), name


def test_every_stage_has_its_section() -> None:
    stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    found = re.findall(r"^## (\w+)", Path("docs/stages.md").read_text(), flags=re.MULTILINE)
    assert found == list(stages)


def test_the_data_set_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row], [schema] = blocks("json"), [b for b in blocks("python") if "SCHEMAS" in b]
    conf = shutil.copytree("conf", tmp_path / "conf")
    with (conf / "datasets/default.yaml").open("a", encoding="utf-8") as file:
        file.write(blocks("yaml")[0])
    before = sha256_of(Path("conf/datasets/default.yaml"))
    params = check(compose([], conf))
    assert params.value("merge.sources")[-1] == "support"
    assert sha256_of(Path("conf/datasets/default.yaml")) == before
    monkeypatch.setattr("eyas.prompts.schemas.SCHEMAS", dict(SCHEMAS))
    from eyas.prompts import schemas

    exec(schema, {"SCHEMAS": schemas.SCHEMAS, "question": question})
    parsed = parse_row(params.value("datasets.support.prepare.schema"), yaml.safe_load(row))
    assert isinstance(parsed, ParsedRow)
    assert parsed.upstream_id == "7"
    assert parsed.messages[0]["content"] == "How do I change my address?"


def test_the_target_of_the_page_is_one(tmp_path: Path) -> None:
    conf = shutil.copytree("conf", tmp_path / "conf")
    (conf / "target/mine.yaml").write_text(blocks("yaml")[1], encoding="utf-8")
    params = check(compose(["target=mine"], conf))
    assert params.value("target.source") == {"kind": "folder", "path": "/models/mine"}


def test_the_codec_of_the_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_LOADERS", dict(codecs._LOADERS))
    names = {"EyasError": EyasError, "ReplyParts": ReplyParts, "_LOADERS": codecs._LOADERS}
    exec(blocks("python")[1], names)
    codec = load_codec("plain", Path())
    prompt = codec.render_prompt([{"role": "user", "content": "Hi"}], ())
    assert bytes(prompt) == b"user: Hi\nassistant: "
    ids = codec.reply_ids(codec.normalise(ReplyParts(content="Grüße")), "stop")
    assert ids[-1:] == list(codec.stop_ids)
    assert codec.reply_ids(codec.parse_reply(ids), "stop") == ids
    assert [codec.id_of(codec.bytes_of(i)) for i in ids] == ids
    assert codec.reply_ids(codec.parse_reply(ids), "length") == ids[:-1]
    with pytest.raises(EyasError, match="no place for tools"):
        codec.render_prompt([], ({"type": "function"},))
