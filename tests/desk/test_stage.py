import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from eyas.desk import stage
from eyas.desk.params import Params, read_params
from eyas.desk.stage import Report, run_stage
from eyas.errors import EyasError

RUNTIME = read_params().value("runtime") | {"tracking": "off", "threads": 1}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    monkeypatch.chdir(tmp_path)
    return OmegaConf.create({"select": "chat", "runtime": RUNTIME})


def test_a_stage_writes_its_metrics_and_says_one_line(
    config: DictConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage("prepare", lambda _: Report(summary="3 rows", metrics={"rows_in": 3}), config)
    assert json.loads(Path("metrics/prepare-chat.json").read_text()) == {"rows_in": 3}
    assert capsys.readouterr().out == "prepare@chat: 3 rows\n"
    status = json.loads(Path("var/status/prepare-chat.json").read_text())
    assert (status["stage"], status["dataset"]) == ("prepare", "chat")
    assert (status["state"], status["reason"]) == ("done", "3 rows")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EyasError("rows.jsonl:7: no role", hint="mend it"), "rows.jsonl:7: no role\n  hint: mend"),
        (OSError(28, "No space left on device", "x.bin"), "No space left on device"),
        (KeyboardInterrupt(), "run the same command again"),
    ],
)
def test_an_error_of_the_user_is_one_line_and_no_metrics(
    config: DictConfig, error: BaseException, words: str
) -> None:
    def work(_: Params) -> Report:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_stage("prepare", work, config)
    assert words in str(caught.value)
    assert not Path("metrics").exists()
    assert json.loads(Path("var/status/prepare-chat.json").read_text())["state"] == "failed"


def test_a_stage_at_work_gives_signs_of_life(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_BEAT_S", 0.01)
    path = Path("var/status/merge-chat.json")
    heard = set()

    def work(_: Params) -> Report:
        assert json.loads(path.read_text())["state"] == "run"
        while len(heard) < 3:
            heard.add(json.loads(path.read_text())["heartbeat_s"])
        return Report(summary="merged", metrics={})

    run_stage("merge", work, config)
    assert json.loads(path.read_text())["state"] == "done"


def test_a_defect_of_ours_keeps_its_traceback(config: DictConfig) -> None:
    def broken(_: Params) -> Report:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_stage("prepare", broken, config)
    assert json.loads(Path("var/status/prepare-chat.json").read_text())["state"] == "failed"


def test_a_stage_is_tracked_unless_it_is_off(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    tracking = pytest.importorskip("eyas.desk.tracking")
    monkeypatch.setattr(tracking, "record", lambda title, *_, **__: seen.append(title))
    report = Report(summary="", metrics={})
    run_stage("prepare", lambda _: report, config)
    config.runtime.tracking = "mlflow"
    run_stage("prepare", lambda _: report, config)
    assert seen == ["prepare@chat"]


ORPHAN = """
import os, sys, time
os.environ["DVC_STAGE"] = "x"
from eyas.desk import stage
stage._end_with_dvc()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_stage_ends_when_dvc_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, ORPHAN], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs([child], timeout=20)[0]
