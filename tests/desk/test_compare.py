import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.desk.compare import build_comparison, differing, lead, lineage_rows, warnings
from eyas.desk.runs import difference, read_run
from eyas.errors import EyasError
from eyas.files import read_json, write_json

PARAMS = {
    "select": None,
    "runtime": {"threads": 2},
    "target": {"name": "tiny", "codec": "chatml"},
    "endpoint": {
        "name": "local",
        "model": "tiny",
        "provider": {"only": ["A"]},
        "prices": {"prompt": 0.1, "completion": 0.4},
    },
    "generate": {"temperature": 0.7, "top_p": 0.95},
    "merge": {"sources": ["chat", "tools", "code", "trajectories"]},
    "train": {"lr": 0.1},
    "evaluate": {"headline_steps": 3},
}
LOCK = {
    "stages": {
        "merge": {"outs": [{"path": "data/mixture/train.parquet", "md5": "aa" * 16}]},
        "generate@old": {"outs": [{"path": "data/responses/old.jsonl", "md5": "bb" * 16}]},
    }
}


def git(*arguments: str) -> str:
    user = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *user, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def give_prompts(folder: Path, verifications: int) -> None:
    """Give the evaluation ten prompts, each of 21 tokens."""
    evaluation = read_json(folder / "data/evaluation.json")
    evaluation["prompts"] = [
        {
            "id": f"p{n}",
            "dataset": "chat",
            "reply_tokens": 21,
            "verifications": verifications + n % 2,
        }
        for n in range(10)
    ]
    write_json(folder / "data/evaluation.json", evaluation)


def lay(run: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(run, folder, dirs_exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(PARAMS | changes, sort_keys=False))
    (folder / "dvc.lock").write_text(yaml.safe_dump(LOCK))
    config = {"target_revision": "r0" * 20, "aux_layers": [1, 3, 4]}
    write_json(folder / "models/drafter/config.json", config)
    give_prompts(folder, 15)
    return folder


@pytest.fixture
def here(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a repository with a run in its one commit."""
    lay(finished_run, tmp_path)
    monkeypatch.chdir(tmp_path)
    git("init", "-q", ".")
    git("add", "params.yaml", "dvc.lock", "metrics")
    git("commit", "-qm", "a run")
    return tmp_path


@pytest.fixture
def other(finished_run: Path, here: Path) -> Path:
    """Return the folder of a job with another rate and fewer verifications."""
    folder = lay(finished_run, here / "var/sweeps/jobs/abc", train={"lr": 0.3})
    give_prompts(folder, 12)
    about = {"commit": git("rev-parse", "HEAD"), "dirty": False, "inputs": {"data/x": "1"}}
    write_json(folder / "job.json", about)
    return folder


def test_a_folder_a_job_and_a_revision_are_read_alike(here: Path, other: Path) -> None:
    tree, job, revision = read_run("."), read_run(str(other)), read_run("HEAD")
    assert [r.name for r in (tree, job, revision)] == ["working tree", "job abc", "HEAD"]
    assert {r.commit for r in (tree, job, revision)} == {git("rev-parse", "HEAD")}
    assert tree.results.metrics == revision.results.metrics == job.results.metrics
    assert "runtime" not in tree.params
    assert tree.digests == {"data/mixture/train.parquet": "aa" * 16}  # none of the old data set
    assert job.digests["data/x"] == "1"
    assert tree.missing == ()
    assert revision.missing == ("data/evaluation.json", "models/drafter/config.json")


def test_outs_that_dvc_knows_but_does_not_have_are_missing(here: Path) -> None:
    stages = {
        "train": {"cmd": "true", "outs": ["models/drafter"]},
        "evaluate": {"cmd": "true", "outs": ["data/evaluation.json"]},
    }
    outs = [{"path": "models/drafter", "hash": "md5", "md5": f"{'ab' * 16}.dir", "nfiles": 1}]
    outs += [{"path": "data/evaluation.json", "hash": "md5", "md5": "cd" * 16}]
    locked = {n: {"cmd": "true", "outs": [o]} for n, o in zip(stages, outs, strict=True)}
    (here / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (here / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": locked}))
    subprocess.run(["dvc", "init", "-q"], check=True)
    git("add", "dvc.yaml", "dvc.lock", ".dvc")
    git("commit", "-qm", "outs of a colleague, not pulled")
    assert read_run("HEAD").missing == ("data/evaluation.json", "models/drafter/config.json")


def test_an_experiment_of_dvc_is_found_by_its_name(here: Path) -> None:
    git("update-ref", "refs/exps/12/34/brave-owl", "HEAD")
    assert read_run("brave-owl").commit == git("rev-parse", "HEAD")
    with pytest.raises(EyasError, match="'rave-owl': neither a folder"):
        read_run("rave-owl")


def test_a_revision_without_a_run_says_so(here: Path) -> None:
    git("rm", "-rq", "--cached", "metrics")
    git("commit", "-qm", "no run")
    with pytest.raises(EyasError, match="'HEAD': no run has been here"):
        read_run("HEAD")


def test_the_gap_and_its_interval_are_paired_over_prompts(here: Path, other: Path) -> None:
    a, b = read_run("."), read_run(str(other))
    gap = difference(a.results, b.results)
    assert gap is not None
    tau = {15: 200 / 155, 12: 200 / 125}  # 10 prompts of 20 gained tokens; 5 take one more
    assert gap[0] < tau[12] - tau[15] < gap[1]
    assert gap[1] - gap[0] < 0.1
    assert difference(b.results, a.results) == pytest.approx((-gap[1], -gap[0]), abs=1e-9)
    assert difference(a.results, a.results) == (0.0, 0.0)
    assert difference(a.results, b.results, "code") is None  # has no such prompt


def test_the_lead_tells_what_the_prompts_can_tell(here: Path, other: Path) -> None:
    a, b = read_run("."), read_run(str(other))
    assert lead(a, b).endswith("paired): better.")
    assert lead(b, a).endswith("paired): worse.")
    assert lead(a, a).endswith("no difference that the prompts show.")
    assert "no drafter can be called better" in lead(a, read_run("HEAD"))
    give_prompts(other, 12)
    evaluation = read_json(other / "data/evaluation.json")
    evaluation["prompts"][0]["reply_tokens"] = 5
    write_json(other / "data/evaluation.json", evaluation)
    assert "not decoded on the same replies" in lead(a, read_run(str(other)))


def test_the_page_answers_the_four_questions(
    here: Path, other: Path, check_page: Callable[[str], str]
) -> None:
    words = check_page(build_comparison(read_run("."), read_run(str(other))))
    for told in (
        "job abc against working tree",
        "What did it cost?",
        "data_cost_usd",
        "Was the data clean?",
        "data_rejects_ends_in_loop",
        "Which drafter is better?",
        "What changed between the two?",
        "train.lr",
        "r0r0r0r0r0r0r0r0",
        "only ['A']",
        "0.1 / 0.4",
    ):
        assert told in words, told


def test_a_page_without_an_evaluation_says_what_is_missing(here: Path) -> None:
    a, b = read_run("."), read_run("HEAD")
    assert "HEAD: `data/evaluation.json` is not here, try `dvc fetch`." in warnings(a, b)
    assert "An evaluation is missing" in build_comparison(a, b)


def test_other_settings_of_the_evaluation_are_told(here: Path, other: Path) -> None:
    a = read_run(".")
    assert warnings(a, read_run(str(other))) == []
    changed = replace(a, params={"evaluate": {"headline_steps": 5}})
    assert "different settings" in warnings(a, changed)[0]


def test_sources_that_no_commit_tells_are_told(here: Path, other: Path) -> None:
    (here / "dvc.yaml").write_text("stages: {}")
    git("add", "dvc.yaml")
    git("commit", "-qm", "a pipeline")
    assert warnings(read_run("."), read_run(".")) == []
    (here / "dvc.yaml").write_text("stages: {a: {cmd: b}}")
    write_json(other / "job.json", {"commit": "f" * 40, "dirty": True, "inputs": {}})
    tree, job = read_run("."), read_run(str(other))
    told = [f"{run.name}: made with uncommitted changes, not shown here." for run in (tree, job)]
    assert warnings(tree, job) == told
    assert "Sources cannot be compared" in build_comparison(tree, job)


def test_only_leaves_that_differ_are_told() -> None:
    assert differing({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": None}) == [
        ("a.c", "2", "4"),
        ("d", "3", "-"),
        ("e", "-", "None"),
    ]


def test_a_data_set_is_told_by_price_provider_and_rejects(here: Path) -> None:
    write_json(
        here / "metrics/validate-code.json",
        {"rows_out": 80, "rejects_loop": 2, "provider_moonshot_ai_replies": 90},
    )
    run = read_run(".")
    row = next(row for row in lineage_rows(run) if row[0] == "code")
    # 90 answers of 165 tokens at $0.0000495 each: $0.30 a million
    assert row == (
        *("code", "90", "14,850", "0.0045", "0.3000", "80"),
        *("loop 2", "moonshot_ai", "-"),
    )
