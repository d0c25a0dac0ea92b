import dataclasses
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.desk.params import Params, read_params
from eyas.drafter.config import load_config
from eyas.drafter.export import read_export, write_export
from eyas.drafter.inference import DraftRunner
from eyas.drafter.packing import predictions
from eyas.errors import EyasError
from eyas.files import read_json, read_jsonl, write_json
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.stages import extract, train
from eyas.states.store import Store, read_manifest

RUNTIME = read_params().value("runtime") | {
    "tracking": "off",
    "threads": 1,
    "train": {"checkpoint_every_s": 0.0, "log_every_steps": 1},  # a checkpoint a step
}
NUM_TRAIN = 6


def params(*, drafter: dict[str, Any] | None = None, **changes: Any) -> Params:
    shape = {"family": "eagle3", "draft_vocab_size": 40, "num_attention_heads": None}
    shape |= {"num_key_value_heads": None, "intermediate_size": None, **(drafter or {})}
    settings = {
        "start": "ridge",
        "ridge_strength": 0.01,
        "norm_scale": 0.7,
        "lr": 1e-3,
        "dtype": "float32",
    }
    settings |= {"tokens_per_step": 40, "epochs": 2, "ttt_steps": 2, "ttt_decay": 0.8}
    settings |= {"warmup_ratio": 0.1, "clip_norm": 0.5, "weight_decay": 0.0, "seed": 0}
    settings |= {"micro_tokens": None, "recompute": False}
    return Params({"drafter": shape, "train": settings | changes, "runtime": RUNTIME})


def sample(number: int, **changes: Any) -> Sample:
    generator = torch.Generator().manual_seed(number)
    length = 20 + number
    made = Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(torch.randint(0, 60, (length,), generator=generator).tolist()),
        spans=((5, 9), (12, length)),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=None,
    )
    return dataclasses.replace(made, **changes)


def write_mixture(samples: list[Sample]) -> None:
    write_samples(Path("data/mixture/train.parquet"), samples[:NUM_TRAIN])
    write_samples(Path("data/mixture/val.parquet"), samples[NUM_TRAIN:])


@pytest.fixture
def home(random_target: Path) -> Path:
    """Stand in a folder with a random target, a mixture of 6 + 2 samples and their states."""
    flags = {2: {"flags": ("truncated",)}, 3: {"spans": ()}}
    write_mixture([sample(n, **flags.get(n, {})) for n in range(NUM_TRAIN + 2)])
    store_states()
    return random_target


def store_states(**changes: Any) -> None:
    states = {"backend": "transformers", "layers": None, "codec": "bf16"}
    states |= {"shard_tokens": 100, "batch_tokens": 100, **changes}
    extract.work(Params({"extract": states, "runtime": RUNTIME}))


def outs() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("models/drafter").iterdir()}


def test_the_stage_writes_a_whole_drafter_and_its_numbers(home: Path) -> None:
    report = train.work(params())
    assert set(outs()) == {
        "config.json",
        "curves.jsonl",
        "drafter.safetensors",
        "start.safetensors",
        "training.json",
    }
    config = load_config(home / "models/drafter/config.json")
    assert (config.aux_layers, config.target_name, config.target_revision) == (
        (1, 3, 4),
        "random",
        "r0",
    )
    start = load_file(home / "models/drafter/start.safetensors")
    end = load_file(home / "models/drafter/drafter.safetensors")
    assert set(start) == set(end)
    assert torch.equal(start["t2d"], end["t2d"])
    assert bool(start["t2d"][[0, 1, 2, 95, 96]].all()), "stop and special ids are forced"
    assert not torch.equal(start["fc.weight"], end["fc.weight"])
    facts = read_json(home / "models/drafter/training.json")
    assert facts["documents"] == NUM_TRAIN - 1, "the sample without a reply is left out"
    assert report.metrics["steps"] == len([r for r in read_curve() if r["split"] == "train"])
    assert report.metrics["train_cpu_s"] > 0
    assert report.metrics["tokens_per_s"] > 0
    shares = {key: value for key, value in report.metrics.items() if key.endswith("_share")}
    kinds = ["fetch", "forward", "backward", "exchange", "optimiser", "evaluate", "save"]
    assert list(shares) == [f"{kind}_share" for kind in kinds]
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert re.search(r"time: fetch \d+ %, forward \d+ %, backward \d+ %", report.summary)
    assert "with the bonus token" in report.summary
    assert ("val_accuracy_step1", 0) in {(name, at) for name, at, _ in report.curves}
    assert not list((home / "var/checkpoints").iterdir()), "a finished run leaves no checkpoint"


@pytest.mark.parametrize(("start", "lr", "bar"), [("random", 3e-3, 0.9), ("ridge", 1e-4, 0.995)])
def test_latent_attention_learns_and_its_export_drafts(
    home: Path, start: str, lr: float, bar: float
) -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "v_head_dim": 6}
    shape = {"family": "eagle3_mla", "mla": sizes | {"qk_rope_head_dim": 4}}
    train.work(params(drafter=shape, start=start, epochs=6, lr=lr))
    losses = [r["loss_step1"] for r in read_curve() if r["split"] == "train"]
    an_epoch = len(losses) // 6
    assert sum(losses[-an_epoch:]) < bar * sum(losses[:an_epoch]), losses
    config = load_config(home / "models/drafter/config.json")
    assert (config.family, config.head_dim, config.value_dim) == ("eagle3_mla", 14, 6)
    tensors = load_file(home / "models/drafter/drafter.safetensors")
    write_export(home / "models/export", tensors, config, "card")
    served = read_export(home / "models/export", config)
    runner = DraftRunner(served, config, torch.randn(97, 48))
    drafts = runner.propose([3, 4, 5], torch.randn(3, 3, 48), 3)
    assert all(served["t2d"][token] for token in drafts)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_all_that_is_trained_on_has_normed_states_where_fc_does(home: Path, fc_norm: bool) -> None:
    store = Store(read_manifest(train.MANIFEST), Path(RUNTIME["store"]))
    inputs = train.read_inputs(params(drafter={"fc_norm": fc_norm}), store)
    for documents in (inputs.train, inputs.val):
        aux_TLD = documents.read(0).aux_TLD
        sizes_TL = aux_TLD.square().mean(-1).sqrt()
        assert torch.allclose(sizes_TL, torch.ones(()), atol=1e-3) == fc_norm


@pytest.mark.parametrize("family", ["eagle3", "eagle3_mla"])
def test_normed_aux_states_are_learnt_from_a_start_of_their_own(home: Path, family: str) -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "v_head_dim": 6}
    shape = {"family": family, "fc_norm": True, "mla": sizes | {"qk_rope_head_dim": 4}}
    report = train.work(params(drafter=shape, feedback_rounds=1, epochs=6))
    losses = [r["loss_step1"] for r in read_curve() if r["split"] == "train"]
    an_epoch = len(losses) // 6
    assert sum(losses[-an_epoch:]) < sum(losses[:an_epoch]), losses
    end = load_file(home / "models/drafter/drafter.safetensors")
    assert all(bool((end[f"fc_norm.{i}.weight"] != 1.0).any()) for i in range(3)), "all are trained"
    config = load_config(home / "models/drafter/config.json")
    assert config.fc_norm
    write_export(home / "models/export", end, config, "card")
    assert read_json(home / "models/export/config.json")["fc_norm"] is True
    served = read_export(home / "models/export", config)
    drafts = DraftRunner(served, config, torch.randn(97, 48)).propose(
        [3, 4, 5], torch.randn(3, 3, 48), 3
    )
    assert all(served["t2d"][token] for token in drafts)
    assert report.metrics["steps"] > 0


def test_a_plain_query_is_trained_and_told_that_no_server_loads_it(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
    train.work(params(drafter={"family": "eagle3_mla", "mla": sizes}, epochs=1))
    assert "drafter.mla.q_lora_rank: null: no server loads such a drafter" in caplog.text


@pytest.mark.parametrize("start", ["random", "ridge"])
def test_final_states_of_supervised_rows_are_all_that_the_loss_reads(
    home: Path, start: str
) -> None:
    train.work(params(start=start))
    everything = outs()
    store_states(final_rows="supervised")
    train.work(params(start=start))
    assert (outs() == everything) == (start == "random"), "only the ridge start reads other rows"


@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_training_on_coded_states_stays_near(home: Path, codec: str) -> None:
    exact = train.work(params()).metrics["val_loss_step1"]
    store_states(codec=codec, final_codec="fp8", final_rows="supervised")
    report = train.work(params())
    assert report.metrics["val_loss_step1"] == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("start", ["random", "ridge"])
def test_a_teacher_of_all_tokens_trains_what_final_states_train(home: Path, start: str) -> None:
    exact = {"final_codec": "fp32", "final_rows": "supervised"}
    store_states(**exact)
    train.work(params(start=start))
    wanted = load_file("models/drafter/drafter.safetensors"), read_curve()
    store_states(**exact, teacher_k=97)
    train.work(params(start=start))
    # float32's rounding of a softmax, which Adam divides by a gradient's own size
    for name, tensor in load_file("models/drafter/drafter.safetensors").items():
        torch.testing.assert_close(tensor, wanted[0][name], rtol=1e-4, atol=1e-5, msg=name)
    for one, two in zip(wanted[1], read_curve(), strict=True):
        assert two.pop("split") == one.pop("split")
        assert two == pytest.approx(one, rel=1e-4)


def test_a_few_likeliest_tokens_stay_near_and_need_no_final_state(home: Path) -> None:
    exact = train.work(params(start="random")).metrics
    store_states(final_rows="supervised", teacher_k=48, final_every=1000)
    report = train.work(params(start="random"))
    assert report.metrics["predictions"] == exact["predictions"]
    got, wanted = (metrics["val_loss_step1"] for metrics in (report.metrics, exact))
    assert got == pytest.approx(wanted, rel=0.1)
    assert got != wanted, "the tail is left out"


def test_too_few_final_states_for_a_ridge_start_are_told_and_none_refused(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_states(final_rows="supervised", teacher_k=8, final_every=4)
    train.work(params())
    assert "expected 1152 final states for a good start, got" in caplog.text
    store_states(final_rows="supervised", teacher_k=8, final_every=1000)
    with pytest.raises(EyasError, match=r"got none\n  hint: .*lower extract.final_every, or set"):
        train.work(params())


@pytest.mark.parametrize("options", [{"final_rows": "supervised"}, {"teacher_k": 8}])
def test_other_replies_than_the_store_kept_rows_of_are_refused(
    home: Path, options: dict[str, Any]
) -> None:
    store_states(**options)
    samples = [sample(n, spans=((6, 9),)) for n in range(NUM_TRAIN + 2)]
    write_mixture(samples)
    with pytest.raises(EyasError, match=r"sample s0: expected replies \(\(6, 9\),\), got"):
        train.work(params())


def read_curve() -> list[dict[str, Any]]:
    return list(read_jsonl(Path("models/drafter/curves.jsonl")))


def num_steps() -> int:
    return sum(row["split"] == "train" for row in read_curve())


def test_a_run_killed_in_the_middle_goes_on_and_ends_with_the_same_files(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train.work(params())
    whole = outs()
    kill_at(monkeypatch, step=3)
    with pytest.raises(KeyboardInterrupt):
        train.work(params())
    monkeypatch.undo()
    monkeypatch.chdir(home)
    codec = SimpleNamespace(special_ids=frozenset({96}), stop_ids=(95,), markup_ids=frozenset())
    monkeypatch.setattr(train, "load_codec", lambda name, folder: codec)
    with caplog.at_level(logging.INFO, logger="eyas"):
        report = train.work(params())
    assert "going on from" in caplog.text
    assert ", resumed)" in report.summary
    assert outs() == whole


def kill_at(monkeypatch: pytest.MonkeyPatch, *, step: int) -> None:
    true_train = train.train

    def dying(*arguments: Any, on_step: Any, **others: Any) -> Any:
        def watch(progress: Any) -> None:
            if progress.step == step:
                raise KeyboardInterrupt

        return true_train(*arguments, on_step=watch, **others)

    monkeypatch.setattr(train, "train", dying)


def test_other_settings_do_not_go_on_from_the_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, step=2)
        with pytest.raises(KeyboardInterrupt):
            train.work(params())
    with caplog.at_level(logging.INFO, logger="eyas"):
        train.work(params(lr=2e-3))
    assert "going on from" not in caplog.text


def test_a_random_start_is_trained_too_and_tells_what_it_does_not_read(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train.work(params(start="random", epochs=1)).metrics["steps"] > 0
    assert "train.start=random" not in caplog.text
    train.work(params(start="random", epochs=1, induction=True))
    assert "train.start=random: train.induction and train.feedback_rounds do nothing" in caplog.text


def test_a_truncated_answer_carries_no_loss_on_its_last_two_tokens(home: Path) -> None:
    whole, cut = sample(2), sample(2, flags=("truncated",))
    last = [int(predictions(train._replies(s))[-1]) for s in (whole, cut)]
    assert last == [len(whole.input_ids) - 2, len(whole.input_ids) - 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": "warm"}, "train.start: expected ridge | random, got 'warm'"),
        (
            {"drafter": {"family": "medusa"}},
            "drafter.family: expected eagle3 | eagle3_mla, got 'medusa'",
        ),
        ({"drafter": {"draft_vocab_size": 2}}, "to 97 (the target's vocabulary), got 2"),
        ({"loss": "kll"}, "train.loss: expected one of kl, "),
        ({"dtype": "float16"}, "train.dtype: expected one of auto, float32, "),
        ({"soup": 0}, "train.soup: expected at least 1, got 0"),
        ({"epochs": 0}, "train.epochs: expected at least 1, got 0"),
        ({"patience": 0}, "train.patience: expected null or at least 1, got 0"),
        ({"patience": 1, "soup": 2}, "train.patience: expected null with train.soup 2, got 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_start_is_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: dict, message: str
) -> None:
    monkeypatch.delattr(train, "keep_start")
    with pytest.raises(EyasError) as caught:
        train.work(params(**change))
    assert message in str(caught.value)


def test_states_of_another_target_are_refused(home: Path) -> None:
    about = read_json(Path("models/target/eyas_target.json"))
    write_json(Path("models/target/eyas_target.json"), about | {"revision": "r1"})
    with pytest.raises(EyasError, match="target revision: expected r1, got r0"):
        train.work(params())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers", [2, 3, 4], "first aux layer: expected 1, got 2"),
        ("final", "pre_norm", "final state: expected post_norm, got pre_norm"),
    ],
)
def test_states_of_another_kind_are_refused(
    home: Path, key: str, value: object, message: str
) -> None:
    manifest = read_json(train.MANIFEST)
    manifest["meta"][key] = value
    write_json(train.MANIFEST, manifest)
    with pytest.raises(EyasError, match=message):
        train.work(params())


def test_a_sample_without_states_and_one_with_other_tokens_are_named(home: Path) -> None:
    samples = [sample(n) for n in range(NUM_TRAIN + 2)]
    write_mixture([dataclasses.replace(samples[0], id="new"), *samples[1:]])
    with pytest.raises(EyasError, match="no states for sample new"):
        train.work(params())
    write_mixture([dataclasses.replace(samples[1], id="s0"), *samples[1:]])
    with pytest.raises(EyasError, match="sample s0 has other tokens than the mixture"):
        train.work(params())


def test_a_mixture_without_replies_is_told(home: Path) -> None:
    write_mixture([sample(n, spans=()) for n in range(NUM_TRAIN + 2)])
    with pytest.raises(EyasError, match="got none"):
        train.work(params())


SHARED: dict[str, Any] = {
    "tokens_per_step": 50
}  # steps of two documents, and of one: a rank has none


def launch(
    num_ranks: int, *, victim: int = -1, at_step: int = 0, shard: bool = False, **changes: Any
) -> Any:
    """Run the stage by torchrun; kill a rank at a step."""
    knobs = RUNTIME | {"train": RUNTIME["train"] | {"shard": shard}}
    tree = params(**SHARED, **changes)._tree | {"select": None, "runtime": knobs}
    settings = json.dumps(tree)
    script = Path(__file__).with_name("train_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(script), settings, str(victim), str(at_step)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def weights() -> dict[str, torch.Tensor]:
    return load_file("models/drafter/drafter.safetensors")


def assert_near(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        # Sums in another order: float32's 6e-8 of a gradient, which Adam divides by its own size.
        # Measured 2.7e-7 at most, where training moved weights by 4e-3 (RESULTS.md).
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_two_ranks_cook_the_soup_of_one_and_resume_it(home: Path) -> None:
    train.work(params(**SHARED, soup=2))
    alone, steps = weights(), num_steps()
    killed = launch(2, victim=1, at_step=steps - 1, soup=2)
    assert killed.returncode != 0
    again = launch(2, soup=2)
    assert "going on from" in again.stderr, again.stderr
    together, start = weights(), load_file("models/drafter/start.safetensors")
    for name in set(alone) - {"d2t", "t2d"}:
        # Each run begins anew where Adam divides gradients of nearly nothing by their own size:
        # one entry of gate_proj was off by 2.5e-5, where training moved it by 1.2e-3.
        moved = float((alone[name] - start[name]).norm())
        assert float((together[name] - alone[name]).norm()) < 0.01 * moved, name


@pytest.mark.slow
def test_two_ranks_train_what_one_trains_and_survive_a_kill(home: Path) -> None:
    train.work(params(**SHARED))
    alone, curve = weights(), read_curve()
    shutil.rmtree("models/drafter")
    first = launch(2)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("train: ") == 1, "rank 0 alone tells"
    together, files = weights(), outs()
    assert_near(together, alone)
    for one, two in zip(curve, read_curve(), strict=True):
        assert two.pop("split") == one.pop("split")
        assert two == pytest.approx(one, rel=1e-5)
    shutil.rmtree("models/drafter")
    killed = launch(2, victim=1, at_step=3)
    assert killed.returncode != 0
    assert re.search(r"exitcode\s*: -9", killed.stderr), "torchrun names the killed rank"
    assert not Path("models/drafter/drafter.safetensors").exists()
    shutil.copytree("var/checkpoints", "kept")
    train.work(params(**SHARED))
    assert [row["step"] for row in read_curve()] == [row["step"] for row in curve]
    assert_near(weights(), alone)
    shutil.copytree("kept", "var/checkpoints", dirs_exist_ok=True)
    again = launch(2)
    assert "going on from" in again.stderr
    assert outs() == files, "resumed with as many ranks: the same bits"


@pytest.mark.slow
def test_two_ranks_with_half_of_the_weights_each_train_what_one_trains(home: Path) -> None:
    train.work(params(**SHARED))
    alone, curve = weights(), read_curve()
    whole = launch(2, shard=True)
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr.count("each of 2 ranks keeps a part of weights and moments") == 1
    assert_near(weights(), alone)
    files = outs()
    for one, two in zip(curve, read_curve(), strict=True):
        assert two.pop("split") == one.pop("split")
        assert two == pytest.approx(one, rel=1e-5)
    killed = launch(2, victim=1, at_step=3, shard=True)
    assert killed.returncode != 0
    shutil.copytree("var/checkpoints", "kept")
    train.work(params(**SHARED))
    assert [row["step"] for row in read_curve()] == [row["step"] for row in curve]
    assert_near(weights(), alone)
    shutil.copytree("kept", "var/checkpoints", dirs_exist_ok=True)
    again = launch(2, shard=True)
    assert "going on from" in again.stderr, again.stderr
    assert outs() == files, "resumed with as many ranks: the same bits"


@pytest.mark.slow
def test_a_sharded_soup_in_bfloat16_is_that_of_ranks_that_hold_all(home: Path) -> None:
    changes = {"soup": 2, "dtype": "bfloat16"}
    assert launch(2, **changes).returncode == 0
    expected, steps = weights(), num_steps()
    killed = launch(2, victim=1, at_step=steps - 1, shard=True, **changes)
    assert killed.returncode != 0
    again = launch(2, shard=True, **changes)
    assert "keeps a part" in again.stderr
    assert "going on from" in again.stderr, again.stderr
    assert_near(weights(), expected)
