"""Every name in the README exists, so that a renamed file or option is noticed here."""

import re
from pathlib import Path

import yaml

README = Path("README.md").read_text(encoding="utf-8")
MADE_BY_A_RUN = ("models/", "data/", "reports/", "var/", "metrics/", ".venv")


def test_the_readme_is_at_most_250_lines() -> None:
    assert README.count("\n") <= 250


def test_every_file_it_links_or_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|yaml|toml))`", README)
    for name in links + named:
        assert Path(name).exists() or name.startswith(MADE_BY_A_RUN), name


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", Path("Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets | {"it"}


def test_every_stage_of_the_pipeline_is_in_its_table() -> None:
    for stage in yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]:
        assert re.search(rf"^\| {stage}(@ds)? \|", README, flags=re.MULTILINE), stage


def test_every_option_it_names_is_in_the_parameters() -> None:
    tree = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    tree["datasets"]["DS"] = next(iter(tree["datasets"].values()))
    for name in re.findall(r"`((?:runtime|datasets|train|heldout|endpoint)(?:\.\w+)+)`", README):
        value = tree
        for key in name.split("."):
            assert key in value, name
            value = value[key]
