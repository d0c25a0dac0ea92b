import shutil
from pathlib import Path

import pytest

from eyas.desk.params import compose
from eyas.stages.compose import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree("conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    return tmp_path


def test_params_are_composed_and_an_equal_file_is_not_touched(folder: Path) -> None:
    main()
    params = folder / "params.yaml"
    assert params.read_text(encoding="utf-8") == compose()
    written = params.stat().st_mtime_ns
    main()
    assert params.stat().st_mtime_ns == written


def test_what_dvc_composed_for_an_experiment_survives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "wild-owl")
    text = compose(["train.lr=0.5"])
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    main()
    assert (folder / "params.yaml").read_text(encoding="utf-8") == text


def test_a_typo_ends_it_before_params_are_replaced(folder: Path) -> None:
    (folder / "params.yaml").write_text("old", encoding="utf-8")
    train = folder / "conf/train/default.yaml"
    train.write_text(train.read_text(encoding="utf-8") + "lrr: 1\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"compose: error: .*unknown key 'train\.lrr'"):
        main()
    assert (folder / "params.yaml").read_text(encoding="utf-8") == "old"
