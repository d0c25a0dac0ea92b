import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml
from dvc.utils.hydra import compose_and_dump

from eyas.desk.params import Params, check, compose, drift, read_params
from eyas.errors import EyasError
from eyas.settings import Dataset, PartitionRule, Sampling, Train


def params_of(text: str) -> Params:
    return Params(yaml.safe_load(text))


OVERRIDES = [[], ["experiment=tiny"], ["train.lr=3e-4", "target=tiny"], ["endpoint=openrouter"]]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda o: ",".join(o) or "none")
def test_dvc_composes_the_same_bytes(tmp_path: Path, overrides: list[str]) -> None:
    theirs = tmp_path / "params.yaml"
    compose_and_dump(theirs, str(Path("conf").resolve()), None, "config", "", overrides)
    assert theirs.read_text(encoding="utf-8") == compose(overrides)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda o: ",".join(o) or "none")
def test_every_section_of_a_composition_fits_its_dataclass(overrides: list[str]) -> None:
    assert check(compose(overrides)).section("train", Train).lr > 0


def test_the_committed_params_are_in_step_with_conf() -> None:
    assert drift(compose()) == ""


def test_broken_yaml_in_conf_is_named(tmp_path: Path) -> None:
    shutil.copytree("conf", tmp_path / "conf")
    (tmp_path / "conf" / "train" / "default.yaml").write_text("lr: [1,", encoding="utf-8")
    with pytest.raises(EyasError, match=r"train/default\.yaml"):
        compose(folder=tmp_path / "conf")


def test_drift_shows_the_line_that_differs(tmp_path: Path) -> None:
    old = tmp_path / "params.yaml"
    old.write_text(compose(["train.lr=0.5"]), encoding="utf-8")
    assert "-  lr: 0.5" in drift(compose(), old)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+train.lrr=1", "unknown key 'train.lrr'"),
        ("~train.lr", "missing key 'train.lr'"),
        ("train.lr=fast", "'train.lr' must be float, got 'fast'"),
        ("train.epochs=1.5", "'train.epochs' must be int, got 1.5"),
        ("validate.keep_near=1", "'validate.keep_near' must be bool, got 1"),
        (
            "datasets.chat.generate.budget_tokens=lots",
            "'datasets.chat.generate.budget_tokens' must be int",
        ),
        ("evaluate.draft_steps=[1,x]", "'evaluate.draft_steps[1]' must be int"),
        ("+merge.caps.chat=many", "'merge.caps.chat' must be int"),
        ("train=7", "conf: "),
        ("experiment=nosuch", "conf: "),
    ],
)
def test_a_wrong_value_is_one_error_that_names_the_key(override: str, words: str) -> None:
    with pytest.raises(EyasError) as caught:
        check(compose([override]))
    assert words in str(caught.value)


def test_a_section_that_is_no_mapping_is_named() -> None:
    with pytest.raises(EyasError, match="'train' must be a mapping, got 3"):
        Params({"train": 3}).section("train", Train)


def test_a_missing_section_names_the_first_absent_key() -> None:
    with pytest.raises(EyasError, match=r"no key 'datasets\.b9'"):
        params_of(compose()).section("datasets.b9.generate", Dataset)


def test_missing_files_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="eyas params"):
        read_params(tmp_path / "params.yaml")
    with pytest.raises(EyasError, match="top folder"):
        compose(folder=tmp_path)


def test_reads_are_remembered_apart_from_knobs() -> None:
    params = params_of(compose())
    params.section("generate", Sampling)
    params.section("partition", dict[str, PartitionRule])
    params.knob("runtime.threads", int | None)
    assert params.sections == {"generate", "partition"}
    assert params.knobs == {"runtime.threads"}


def test_filled_dataclasses_hold_tuples_and_are_frozen() -> None:
    train, name = params_of(compose()).section("train", Train), "lr"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(train, name, 1.0)
