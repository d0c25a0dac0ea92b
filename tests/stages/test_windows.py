"""Capture and training in turns over a bounded disk, by the stages extract and train."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.desk import turns
from eyas.desk.exchange import exchange
from eyas.desk.params import Params, read_params
from eyas.drafter import ridge, training
from eyas.drafter.training import Run
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_text
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.settings import Extract, Train
from eyas.stages import extract, train
from eyas.states import capture_hf, shards
from eyas.states.capturing import read_job
from eyas.states.job import Job
from eyas.states.shards import Shard
from eyas.states.store import verify
from eyas.status import Status

STATES = Path("var/states")
WINDOW_GB = 0.00007  # three of its shards of two samples
NUM_TRAIN, NUM_VAL = 12, 2
EXTRACT = {"backend": "transformers", "layers": None, "codec": "bf16", "shard_tokens": 60}
EXTRACT |= {"batch_tokens": 100, "window_gb": WINDOW_GB}
TRAIN = {"start": "ridge", "ridge_strength": 0.01, "norm_scale": 0.7, "lr": 1e-3}
TRAIN |= {"dtype": "float32", "tokens_per_step": 40, "epochs": 2, "ttt_steps": 2, "ttt_decay": 0.8}
TRAIN |= {"warmup_ratio": 0.1, "clip_norm": 0.5, "weight_decay": 0.0, "seed": 0}
TRAIN |= {"micro_tokens": None, "recompute": False}
SHAPE = {"family": "eagle3", "draft_vocab_size": 40, "num_attention_heads": None}
SHAPE |= {"num_key_value_heads": None, "intermediate_size": None}


def params(*, keep: bool = False, extract: dict[str, Any] | None = None, **training: Any) -> Params:
    runtime = read_params(Path(__file__).parents[2] / "params.yaml").value("runtime")
    runtime |= {"tracking": "off", "threads": 1}
    runtime["train"] = {"checkpoint_every_s": 1e9, "log_every_steps": 1}
    runtime["extract"] = runtime["extract"] | {"keep_windows": keep}
    states = EXTRACT | (extract or {})
    tree = {"extract": states, "drafter": SHAPE, "train": TRAIN | training, "runtime": runtime}
    return Params(tree | {"select": None})


def sample(number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    length = 20 + number % 5
    return Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(torch.randint(0, 60, (length,), generator=generator).tolist()),
        spans=((5, 9), (12, length)),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=None,
    )


def write_mixture(samples: list[Sample]) -> None:
    write_samples(Path("data/mixture/train.parquet"), samples[:NUM_TRAIN])
    write_samples(Path("data/mixture/val.parquet"), samples[NUM_TRAIN:])


@pytest.fixture
def home(random_target: Path) -> Path:
    """Stand in a folder with a random target and a mixture of six shards and validation."""
    write_mixture([sample(n) for n in range(NUM_TRAIN + NUM_VAL)])
    return random_target


def job_of(params: Params) -> Job:
    return read_job(params.section("extract", Extract), STATES)


@pytest.fixture
def peak(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capture in this process; give the store's bytes after each shard."""
    true_write, found = capture_hf.write_shard, list[int]()

    def here(work: Any, arguments: Any, tick: Any) -> list[Any]:
        results = [work(*given) for given in arguments]
        tick()
        return results

    def watched(path: Path, *arguments: Any) -> Shard:
        shard = true_write(path, *arguments)
        found.append(sum(p.stat().st_size for p in path.parent.iterdir()))
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert not re.search(r"shard-.*\(deleted\)", mapped), "a deleted shard keeps its room"
        return shard

    monkeypatch.setattr(turns, "alongside", here)
    monkeypatch.setattr(capture_hf, "write_shard", watched)
    return found


def outs() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("models/drafter").iterdir()}


def run(**options: Any) -> dict[str, float]:
    """Extract, train; return the numbers of training."""
    extract.work(params(**{k: v for k, v in options.items() if k in ("keep", "extract")}))
    return dict(train.work(params(**options)).metrics)


def start_over() -> None:
    for folder in ("var/states", "var/checkpoints", "models/drafter"):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def whole(peak: list[int]) -> dict[str, bytes]:
    """Train over the stored windows; return the drafter's files and leave none of them."""
    metrics = run(keep=True)
    assert metrics["captured_tokens"] == sum(map(job_of(params()).tokens, range(3, 6)))
    assert len(list(STATES.glob("*/*.safetensors"))) == 7
    made = outs()
    start_over()
    peak.clear()
    return made


def test_a_bounded_disk_gives_the_bits_of_the_stored_run(
    whole: dict[str, bytes], peak: list[int]
) -> None:
    metrics = run()
    assert outs() == whole
    job = job_of(params())
    assert [len(window) for window in job.windows] == [3, 3]
    kept = job.disk_bytes(job.kept)
    assert len(peak) > 7, "shards are made again"
    assert max(peak) <= WINDOW_GB * 1e9 + kept
    assert metrics["captured_tokens"] > 2 * metrics["tokens"], "in the first pass and both epochs"
    assert metrics["capture_s"] > 0
    assert verify(extract.MANIFEST, STATES) == []


def test_heads_that_look_back_and_a_second_regression_see_every_window(peak: list[int]) -> None:
    more = {"induction": True, "feedback_rounds": 1}
    run(keep=True, **more)
    made = outs()
    start_over()
    metrics = run(**more)
    assert outs() == made
    # of the start's passes, two for the heads, and both epochs; a pass may begin where one ended
    assert metrics["captured_tokens"] > 4 * metrics["tokens"]


@pytest.mark.parametrize("start", ["ridge", "random"])
def test_one_window_is_the_stored_run(peak: list[int], start: str) -> None:
    run(extract={"window_gb": None}, start=start)
    stored = outs()
    metrics = run(extract={"window_gb": 1.0}, start=start)
    assert metrics["captured_tokens"] == 0, "what extract made is there"
    assert outs() == stored


def kill_after(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    """Let the call of this number be the last thing that is done."""
    true, done = getattr(owner, name), itertools.count(1)

    def dying(*arguments: Any, **named: Any) -> Any:
        result = true(*arguments, **named)
        if next(done) == calls:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (capture_hf, "write_shard", 2),  # in the first pass, a window half made
        (ridge.NormalEquations, "save", 1),
        (ridge.NormalEquations, "add", 9),  # in the second window of the first pass
        (Run, "advance", 2),  # a step in the middle of a window
        (Run, "advance", 9),
        (training, "save_checkpoint", 1),  # a window is about to be left
        (capture_hf, "write_shard", 8),  # in an epoch, a window half made
    ],
)
def test_a_kill_anywhere_changes_no_bit(
    whole: dict[str, bytes],
    peak: list[int],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    calls: int,
) -> None:
    extract.work(params())
    with monkeypatch.context() as patch:
        kill_after(patch, owner, name, calls)
        with pytest.raises(KeyboardInterrupt):
            train.work(params())
    train.work(params())
    assert outs() == whole
    job = job_of(params())
    assert max(peak) <= WINDOW_GB * 1e9 + job.disk_bytes(job.kept)


def test_a_kill_that_leaves_a_window_half_deleted_changes_no_bit(
    whole: dict[str, bytes], peak: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract.work(params())
    true_unlink = Path.unlink

    def dying(path: Path, **named: bool) -> None:
        true_unlink(path, **named)
        if path.name == "shard-00001.safetensors":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dying)
        with pytest.raises(KeyboardInterrupt):
            train.work(params())
    left = {path.name for path in STATES.glob("*/shard-*.safetensors")}
    assert left == {"shard-00002.safetensors", "shard-00006.safetensors"}
    train.work(params())
    assert outs() == whole


@pytest.mark.parametrize(
    ("owner", "name", "done"),
    # before the second window of the first pass, and of the first epoch
    [(ridge.NormalEquations, "save", 0), (training, "save_checkpoint", 2)],
)
def test_a_run_killed_in_a_later_window_makes_no_earlier_one_again(
    whole: dict[str, bytes],
    peak: list[int],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    done: int,
) -> None:
    extract.work(params())
    with monkeypatch.context() as patch:
        kill_after(patch, owner, name, 1)
        with pytest.raises(KeyboardInterrupt):
            train.work(params())
    again = train.work(params())
    job = job_of(params())
    windows, lengths = job.windows_of_samples(), [len(s.input_ids) for s in job.samples]
    plan = training.plan_run(lengths[:NUM_TRAIN], params().section("train", Train), windows)
    steps = [windows[documents[0]] for _, documents in plan]
    passes = [0, 1, *(window for window, _ in itertools.groupby(steps))]
    left = [now for before, now in itertools.pairwise(passes[done:]) if before != now]
    assert (", resumed)" in again.summary) == (owner is training)
    assert again.metrics["captured_tokens"] == sum(
        sum(map(job.tokens, job.windows[window])) for window in left
    )
    assert outs() == whole


def test_a_shard_that_comes_out_otherwise_is_refused_but_not_of_sglang(
    peak: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    extract.work(params())
    job = job_of(params())
    turns.clear(job, [])
    assert {p.suffix for p in job.folder.glob("shard-*")} == {turns.SEEN}
    note = job.path(1).with_suffix(turns.SEEN)
    write_json(note, read_json(note) | {"sha256": "0" * 64})
    with pytest.raises(EyasError, match=r"shard-00001.*made again: expected sha256 0000.*, got"):
        extract.work(params())
    assert not job.is_there(1)
    served = dataclasses.replace(job, settings=dataclasses.replace(job.settings, backend="sglang"))
    write_json(job.path(1).with_suffix(".json"), read_json(note) | {"sha256": "1" * 64})
    turns.check_again(served, [1])
    assert "a server may round otherwise" in caplog.text


def test_a_window_that_holds_no_shard_is_refused_with_the_least_that_does(peak: list[int]) -> None:
    with pytest.raises(
        EyasError, match=r"window_gb: expected (\S+) at least, for shard-00004"
    ) as e:
        extract.work(params(extract={"window_gb": 0.00002}))
    assert "longest sample (s9: 24 tokens; merge.max_tokens)" in str(e.value)
    least = float(str(e.value).split("expected ")[1].split()[0])
    assert len(job_of(params(extract={"window_gb": least + 1e-9})).windows) == 6


def test_another_run_at_the_store_and_another_mixture_are_refused(peak: list[int]) -> None:
    extract.work(params())
    with turns.alone(job_of(params())):
        for work in (extract.work, train.work):
            with pytest.raises(EyasError, match="another run makes and deletes shards here"):
                work(params())
    write_mixture([sample(n) for n in range(1, NUM_TRAIN + NUM_VAL + 1)])
    with pytest.raises(EyasError, match=r"expected windows of \w+, this mixture and target, got"):
        train.work(params())


def test_room_for_the_largest_window_is_asked_before_the_first(
    peak: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(shards, "check_space", lambda _folder, size_bytes: asked.append(size_bytes))
    extract.work(params())
    job = job_of(params())
    assert asked[0] == max(map(job.disk_bytes, job.windows)) + job.disk_bytes(job.kept)


def test_status_tells_that_training_waits_for_states(
    peak: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    true_tell = Status.tell

    def tell(self: Status, state: str, facts: Any, *, reason: str = "") -> None:
        told.append((self._head["stage"], reason))
        true_tell(self, state, facts, reason=reason)

    monkeypatch.setattr(Status, "tell", tell)
    run()
    assert ("extract", "captures window 1 of 2") in told
    assert ("train", "captures window 2 of 2") in told
    assert ("train", "") in told


@pytest.mark.slow
def test_two_ranks_take_turns_with_processes_that_capture(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "alone.safetensors").write_bytes(whole["drafter.safetensors"])
    extract.work(params())
    script = Path(__file__).with_name("train_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), json.dumps(params().tree()), "-1", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert len(list(STATES.glob("*/*.safetensors"))) == 4, "one window, and validation"
    alone = load_file(tmp_path / "alone.safetensors")
    for name, tensor in load_file("models/drafter/drafter.safetensors").items():
        # Sums in another order, as in test_train.py.
        torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_store_that_comes_and_goes_is_not_exported(peak: list[int]) -> None:
    extract.work(params())
    write_text(Path("params.yaml"), json.dumps(params().tree()))
    with pytest.raises(EyasError, match="shards of training come and go"):
        exchange("export", "speculators", "out", None, "bf16")
