"""What `dvc repro` and `dvc exp run` rerun, in a real copy of the repository (tiny target)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

Shell = Callable[[str], CompletedProcess[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AFTER_MERGE = {"merge", "extract", "train", "export", "evaluate", "report"}
CODE_BRANCH = {"generate@code", "reconstruct@code", "validate@code"}


def stages_run(result: CompletedProcess[str]) -> set[str]:
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return set(re.findall(r"Running stage '([^']+)'", result.stdout))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_ids_are_those_really_sampled_where_text_alone_has_others(
    tiny_repository: Path,
) -> None:
    paths = [tiny_repository / f"metrics/reconstruct-{name}.json" for name in ("chat", "code")]
    for metrics in (json.loads(path.read_text()) for path in paths):
        assert metrics["witnessed_share"] == metrics["identical_share"] == 1.0
        assert metrics["text_identical_share"] < 0.99
        assert metrics["witness_refused"] == 0


def test_a_second_repro_runs_nothing(shell: Shell) -> None:
    result = shell("dvc repro")
    assert stages_run(result) == set()
    assert "up to date" in result.stdout


def test_a_budget_reruns_its_branch_and_its_revert_runs_nothing(
    tiny_repository: Path, shell: Shell
) -> None:
    conf = tiny_repository / "conf/datasets/tiny.yaml"
    code = (
        "schema: humaneval, max_rows: 12, partition: null, seed: 0}\n  generate: {budget_tokens: "
    )
    change(conf, code + "20000", code + "1500")
    assert stages_run(shell("dvc repro")) == {"compose"} | CODE_BRANCH | AFTER_MERGE
    metrics = yaml.safe_load((tiny_repository / "metrics/generate-code.json").read_text())
    assert metrics["skipped_for_budget"] > 0
    change(conf, code + "1500", code + "20000")
    assert stages_run(shell("dvc repro")) <= {"compose"}
    metrics = yaml.safe_load((tiny_repository / "metrics/generate-code.json").read_text())
    assert metrics["skipped_for_budget"] == 0


def test_overrides_of_an_experiment_reach_the_stages_and_are_told_as_drift(shell: Shell) -> None:
    ran = stages_run(shell("dvc exp run -S train.lr=0.0003"))
    assert ran == {"compose", "train", "export", "evaluate", "report"}
    drift = shell("eyas params --check")
    assert drift.returncode == 1
    assert "-  lr: 0.0003" in drift.stdout
    assert shell("eyas params").returncode == 0
    assert stages_run(shell("dvc repro")) <= {"compose"}


def cached(repository: Path, out: str) -> str:
    """Return where DVC keeps an out: answers in there count as held, too."""
    stages = yaml.safe_load((repository / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    outs = {o["path"]: o["md5"] for stage in stages.values() for o in stage.get("outs", [])}
    return f".dvc/cache/files/md5/{outs[out][:2]}/{outs[out][2:]}"


@pytest.mark.parametrize(
    ("stage", "traces", "begun", "resumed"),
    [
        (
            "generate@chat",
            "var/journal/chat data/responses/chat.jsonl {cached}",
            "test -s var/journal/chat/responses.jsonl",
            r"[1-9]\d* held",
        ),
        ("extract", "var/states", "compgen -G 'var/states/*/*.safetensors'", ""),
        (
            "train",
            "var/checkpoints",
            "compgen -G 'var/checkpoints/*/checkpoint.safetensors'",
            "going on from",
        ),
    ],
)
def test_a_killed_stage_goes_on_and_the_weights_are_those_of_a_quiet_run(
    tiny_repository: Path, shell: Shell, stage: str, traces: str, begun: str, resumed: str
) -> None:
    before = shell("sha256sum models/drafter/drafter.safetensors").stdout
    traces = traces.format(cached=cached(tiny_repository, "data/responses/chat.jsonl"))
    killed = shell(
        f"rm -rf {traces}; dvc repro -f -s {stage} & pid=$!; "
        f"until {begun} > /dev/null || ! kill -0 $pid; do sleep 0.02; done; "
        "kill -9 $pid && echo killed; wait $pid"
    )
    assert "killed" in killed.stdout, killed.stdout + killed.stderr
    again = shell(f"dvc repro -f -s {stage}")
    assert stages_run(again) == {stage}
    assert re.search(resumed, again.stdout + again.stderr), again.stdout + again.stderr
    stages_run(shell("dvc repro"))
    assert shell("sha256sum models/drafter/drafter.safetensors").stdout == before
