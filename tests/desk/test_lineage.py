import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from eyas.desk import lineage, lineage_lookup
from eyas.desk.digests import folder_digest
from eyas.errors import EyasError
from eyas.files import write_json, write_jsonl
from eyas.parquet import write_samples
from eyas.records import Sample, canonical_json

ANSWERS = (("Moonshot AI", 0.5), ("Moonshot AI", 0.25), ("Fireworks", 1.0))
EXPORT = Path("models/export")


def git(*arguments: str) -> str:
    user = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *user, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def sample(dataset: str, provider: str) -> Sample:
    return Sample(
        id=f"{dataset}{provider}",
        dataset=dataset,
        input_ids=(1, 2, 3),
        spans=((1, 3),),
        temperature=0.7,
        provider=provider,
        flags=(),
        completion_tokens_billed=2,
    )


def answer(provider: str, cost_usd: float) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 9}
    counts = {"prompt_tokens": 10, "completion_tokens": 90, "cost_usd": cost_usd}
    return {"provider": provider, "model": "kimi", "sampling": sampling, "latency_s": 1.0, **counts}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where a bought set of three answers and a set of one trajectory lie."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("data/responses/chat.jsonl"), [answer(*given) for given in ANSWERS])
    write_jsonl(Path("data/responses/own.jsonl"), [])
    for name in ("chat", "own"):
        rejects = [{"rule": "loop", "severity": s} for s in ("reject", "flag")] * (name == "chat")
        write_jsonl(Path(f"data/samples/{name}.rejects.jsonl"), rejects)
        write_jsonl(Path(f"data/valid/{name}.rejects.jsonl"), [])
    train = [sample("chat", "Moonshot AI"), sample("chat", "Fireworks"), sample("own", "")]
    write_samples(Path("data/mixture/train.parquet"), train)


def export(told: lineage.Lineage) -> None:
    EXPORT.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "target": "tiny", "target_revision": "r0"}
    metadata |= {lineage.KEY: canonical_json(told).decode()}
    save_file({"w": np.zeros(2)}, EXPORT / "model.safetensors", metadata)
    (EXPORT / "README.md").write_text(lineage.card(told))


def test_answers_dollars_and_rejects_are_counted_by_provider() -> None:
    told = lineage.collect(["chat", "own"])
    chat, own = told["datasets"]["chat"], told["datasets"]["own"]
    moonshot = {"answers": 2, "prompt_tokens": 20, "completion_tokens": 180, "cost_usd": 0.75}
    assert chat["providers"]["Moonshot AI"] == moonshot | {"in_training": 1}
    assert chat["providers"]["Fireworks"]["cost_usd"] == 1.0
    assert chat["rejects"] == {"loop": 1}
    assert chat["asked"] == ["kimi (temperature 1.0)"]
    assert chat["training_tokens"] == 6
    assert own["providers"] == {"trajectories": {"answers": 0, "in_training": 1}}


def test_a_mixture_of_other_data_sets_is_refused() -> None:
    with pytest.raises(EyasError, match=r"train\.parquet: has rows of own, not in merge\.sources"):
        lineage.collect(["chat"])


def test_equal_data_give_equal_bytes_whatever_the_clock_and_the_commit() -> None:
    first = canonical_json(lineage.collect(["chat", "own"]))
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "x")
    assert canonical_json(lineage.collect(["chat", "own"])) == first


def test_the_card_has_a_row_a_provider_and_the_sum() -> None:
    card = lineage.card(lineage.collect(["chat", "own"]))
    for row in (
        "| chat | Moonshot AI | 2 | 200 | 0.7500 | 3,750.00 | 1 |",
        "| own | trajectories | - | - | - | - | 1 |",
        "| all |  | 3 | 300 | 1.75 | 5,833.33 | 3 |",
        "- chat: kimi (temperature 1.0). Dropped: loop 1.",
        "- own: written by the target before",
    ):
        assert row in card, row


def test_an_export_tells_its_lineage_wherever_it_lies() -> None:
    told = lineage.collect(["chat", "own"])
    export(told)
    read = lineage_lookup.read_lineage(EXPORT)
    assert read == told | {"target": {"name": "tiny", "revision": "r0"}}
    found = lineage_lookup.look_up(EXPORT, read["datasets"])
    assert found["commit"] == "unknown to the git history here"
    lines = list(lineage_lookup.render(EXPORT, read, found))
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["chat", "Moonshot", "AI", "2"] for line in lines)


def test_weights_without_lineage_are_refused() -> None:
    with pytest.raises(EyasError, match=r"model\.safetensors: not readable"):
        lineage_lookup.read_lineage(EXPORT)
    EXPORT.mkdir(parents=True)
    save_file({"w": np.zeros(2)}, EXPORT / "model.safetensors", {"format": "pt"})
    with pytest.raises(EyasError, match="no lineage in its metadata"):
        lineage_lookup.read_lineage(EXPORT)


def test_commit_and_parameters_are_found_in_the_history_of_dvc_lock() -> None:
    export(lineage.collect(["chat", "own"]))
    stages = {
        "train": {"params": {"params.yaml": {"train": {"lr": 0.1, "layers": None}}}, "outs": []},
        "generate@old": {"outs": [{"path": "data/responses/old.jsonl", "md5": "0"}]},
        "export": {"outs": [{"path": "models/export", "md5": folder_digest(EXPORT)}]},
    }
    git("init", "-q", ".")
    Path("dvc.lock").write_text("{}")
    git("add", "dvc.lock")
    git("commit", "-qm", "nothing yet")
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    found = lineage_lookup.look_up(EXPORT, ["chat"])
    assert found["commit"].endswith("a dvc.lock that is not committed yet")
    git("commit", "-qam", "a drafter")
    made = git("rev-parse", "HEAD")
    Path("dvc.lock").write_text("{}")
    git("commit", "-qam", "another")
    found = lineage_lookup.look_up(EXPORT, ["chat"])
    assert found["commit"].startswith(f"{made} (")
    assert found["commit"].endswith("a drafter)")
    assert found["params"] == {"train": {"lr": 0.1, "layers": None}}
    assert found["data"] == {"models/export": folder_digest(EXPORT)}
    read = lineage_lookup.read_lineage(EXPORT)
    lines = list(lineage_lookup.render(EXPORT, read, found))
    assert "  train: layers null, lr 0.1" in lines


def test_a_job_of_a_sweep_is_found_by_its_record() -> None:
    export(lineage.collect(["chat", "own"]))
    job = {"commit": "c0ffee", "dirty": True, "inputs": {"data/mixture/train.parquet": "aa"}}
    write_json(Path("job.json"), job)
    Path("params.yaml").write_text(json.dumps({"train": {"lr": 0.3}, "select": None}))
    found = lineage_lookup.look_up(EXPORT, ["chat"])
    assert found["commit"] == "c0ffee with uncommitted changes, a job of a sweep"
    assert (found["params"], found["data"]) == ({"train": {"lr": 0.3}}, job["inputs"])


def test_an_export_at_the_root_of_the_disk_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_lookup, "folder_digest", lambda _: "0.dir")
    assert lineage_lookup.look_up(Path("/export"), [])["digest"] == "0.dir"


def test_the_digest_of_a_folder_is_the_one_that_dvc_writes() -> None:
    Path("f/sub").mkdir(parents=True)
    Path("f/b").write_text("b\n")
    Path("f/sub/a").write_text("a\n")
    # `dvc add f` with DVC 3.67.1
    assert folder_digest(Path("f")) == "971e62abd95e974b09f91be2ea93a128.dir"
