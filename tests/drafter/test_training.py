import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from eyas.drafter import checkpoint
from eyas.drafter.checkpoint import (
    digest_of,
    load_checkpoint,
    load_drafter,
    save_checkpoint,
    save_drafter,
)
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Packer
from eyas.drafter.schedule import (
    Row,
    best_epoch,
    check_length,
    has_stalled,
    plan_run,
    rate_at,
    with_dtype,
)
from eyas.drafter.sharding import Sharded, gathered
from eyas.drafter.training import Corpus, Progress, Run, Saving, train
from eyas.errors import EyasError
from eyas.settings import Train

SETTINGS = Train(
    start="random",
    ridge_strength=0.01,
    norm_scale=1.0,
    lr=1e-3,
    tokens_per_step=16,
    epochs=3,
    ttt_steps=2,
    ttt_decay=0.8,
    warmup_ratio=0.1,
    clip_norm=1.0,
    weight_decay=0.01,
    dtype="float64",
    micro_tokens=None,
    recompute=False,
    seed=0,
)


class KilledError(Exception):
    pass


def no_word(progress: Progress) -> None:
    pass


def make_corpus(tiny) -> Corpus:
    packer = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d)
    return Corpus(
        train=packer,
        val=packer,
        embed_VD=tiny.embed_VD,
        head_ND=tiny.draft_head(),
        aux_scale_LD=torch.full((3, 16), 4.0),
    )


def make_drafter(tiny) -> Drafter:
    drafter = Drafter(tiny.config, tiny.drafter.t2d)
    random_start(drafter, seed=1)
    return drafter.double()


@pytest.mark.parametrize("soup", [1, 3])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tiny, tmp_path: Path, soup: int) -> None:
    settings = dataclasses.replace(SETTINGS, epochs=3 // soup, soup=soup)
    whole = make_drafter(tiny)
    saving = Saving(path=tmp_path / "whole" / "c.safetensors", every_s=0.0)
    whole_curve = train(whole, make_corpus(tiny), settings, saving, on_step=no_word)

    saving = Saving(path=tmp_path / "killed" / "c.safetensors", every_s=0.0)

    def kill(progress: Progress) -> None:
        if progress.step in (2, 5):
            raise KilledError

    for _ in range(2):
        with pytest.raises(KilledError):
            train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=kill)
        torch.rand(7)  # whatever runs between must not matter
    resumed = make_drafter(tiny)
    steps: list[int] = []
    curve = train(
        resumed, make_corpus(tiny), settings, saving, on_step=lambda p: steps.append(p.step)
    )
    assert steps[0] == 6
    assert curve == whole_curve
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_soup_is_the_mean_of_runs_from_the_same_start(tiny, tmp_path: Path) -> None:
    def trained(epochs: int, seed: int, soup: int = 1) -> tuple[Drafter, list[Row]]:
        settings = dataclasses.replace(SETTINGS, epochs=epochs, seed=seed, soup=soup)
        saving = Saving(path=tmp_path / str(len(list(tmp_path.iterdir()))), every_s=1e9)
        drafter = make_drafter(tiny)
        return drafter, train(drafter, make_corpus(tiny), settings, saving, on_step=no_word)

    soup, curve = trained(2, SETTINGS.seed, soup=2)
    runs = [trained(2, SETTINGS.seed + past) for past in (0, 2)]
    for (name, got), *each in zip(
        soup.named_parameters(), *(run.parameters() for run, _ in runs), strict=True
    ):
        assert not torch.equal(*each), name
        torch.testing.assert_close(got, sum(each) / 2, rtol=1e-12, atol=1e-12, msg=name)
    first, second = (its for _, its in runs)
    # the same losses and rates, and each run validated as it ended, the soup after all
    for rows, its in ((curve[: len(first)], first), (curve[len(first) : -1], second[1:-1])):
        assert [row["loss_step1"] for row in rows] == [row["loss_step1"] for row in its]
        assert [row.get("lr") for row in rows] == [row.get("lr") for row in its]
    assert curve[-1]["loss_step1"] != second[-1]["loss_step1"]


def test_training_ends_where_it_gains_no_more_and_keeps_the_best_epoch(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.0, 1.3, 1.2, 1.3, 1.1, 9.9])  # start, then each epoch; an equal is no gain
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def validate(run: Run, step: int, epoch: int) -> list[Row]:
        kept[epoch] = {k: v.detach().clone() for k, v in run.drafter.state_dict().items()}
        length = next(lengths)
        return [
            {"split": "val", "step": step, "epoch": epoch, "simulated_acceptance_length": length}
        ]

    monkeypatch.setattr(Run, "validate", validate)
    settings = dataclasses.replace(SETTINGS, epochs=9, patience=3)
    saving = Saving(path=tmp_path / "c.safetensors", every_s=0.0)

    def kill(progress: Progress) -> None:
        if progress.row["epoch"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=kill)
    drafter = make_drafter(tiny)
    curve = train(drafter, make_corpus(tiny), settings, saving, on_step=no_word)
    assert [row["epoch"] for row in curve if row["split"] == "val"] == [0, 1, 2, 3, 4]
    assert curve[-1]["epoch"] == 4
    scale = {"fc.weight": 0.25}  # while it trains, fc is in other units
    for name, tensor in drafter.state_dict().items():
        expected = kept[1][name] * scale[name] if name in scale else kept[1][name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("lengths", "best", "stalled_after"),
    [([1.0], 0, 1), ([1.0, 1.5, 1.4], 1, 2), ([2.0, 1.0, 1.0], 0, 3), ([1.0, 1.2, 1.2], 1, 2)],
)
def test_the_best_epoch_is_the_first_of_the_longest(
    lengths: list[float], best: int, stalled_after: int
) -> None:
    curve: list[Row] = [
        {"split": "val", "epoch": epoch, "simulated_acceptance_length": length}
        for epoch, length in enumerate(lengths)
    ]
    assert best_epoch(curve) == best
    since = len(lengths) - 1 - best
    assert has_stalled(curve, max(since, 1)) == (since >= 1)
    assert not has_stalled(curve, stalled_after + 1)
    assert not has_stalled(curve, None)
    assert best_epoch([]) == 0
    assert not has_stalled([], 1)


def test_patience_without_a_validation_split_is_refused() -> None:
    settings = dataclasses.replace(SETTINGS, patience=2)
    check_length(settings, num_val=1)
    expected = r"train.patience: got 2, and the validation split is empty"
    with pytest.raises(EyasError, match=expected):
        check_length(settings, num_val=0)


@pytest.fixture
def group() -> Iterator[None]:
    """Be a group of one rank; what two do is in tests/stages/test_train.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_between_steps_a_sharded_drafter_has_no_weights_and_a_rank_its_rows(tiny, group) -> None:
    drafter, before = make_drafter(tiny), make_drafter(tiny).state_dict()
    held = Sharded(drafter)
    assert sum(p.untyped_storage().nbytes() for p in drafter.parameters()) == 0
    assert all(isinstance(rows.data, DTensor) for rows in held.parameters)
    held.gather()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    drafter.fc.weight.grad = torch.full_like(drafter.fc.weight, 2.0)
    held.reduce()
    assert drafter.fc.weight.grad is None
    first, *others = (gathered(rows.grad) for rows in held.parameters if rows.grad is not None)
    assert torch.equal(first, torch.full_like(before["fc.weight"], 2.0))
    assert len(others) == len(held.parameters) - 1, "a weight without a gradient has zeros"
    assert not any(bool(gradient.any()) for gradient in others)


def begin(tiny, *, sharded: bool, checkpoint: Path | None = None) -> Run:
    settings = dataclasses.replace(SETTINGS, epochs=1, soup=2)
    run = Run(make_drafter(tiny), make_corpus(tiny), settings)
    if checkpoint:
        load_checkpoint(checkpoint, run.drafter, run.optimizer)
    if sharded:
        run.shard()
    return run


def go_on(run: Run, steps: range) -> list[Row]:
    rows = []
    for step in steps:
        rows += [run.advance(step)[0], *run.validate(step, 1)]
        run.stir(step)
    return rows


def keep(run: Run, path: Path) -> Path:
    names = [name for name, _ in run.drafter.named_parameters()]
    save_checkpoint(path, names, run.optimizer, step=2, curve=[])
    return path


def ended(run: Run) -> dict[str, torch.Tensor]:
    run.held.gather()
    return run.drafter.state_dict()


def test_a_sharded_run_steps_as_a_whole_one_from_a_checkpoint_of_either(
    tiny, group, tmp_path: Path
) -> None:
    whole, sharded = begin(tiny, sharded=False), begin(tiny, sharded=True)
    steps = range(2, len(whole.plan))
    rows = [go_on(run, range(2)) for run in (whole, sharded)]
    files = [keep(whole, tmp_path / "whole"), keep(sharded, tmp_path / "sharded")]
    resumed = [begin(tiny, sharded=True, checkpoint=file) for file in files]
    for its, run in zip([*rows, [], []], (whole, sharded, *resumed), strict=True):
        its += go_on(run, steps)
    for one, two in zip(*rows, strict=True):
        assert two.pop("split") == one.pop("split")
        assert two == pytest.approx(one, rel=1e-10)
    wanted = ended(whole)
    for run in (sharded, *resumed):
        for name, tensor in ended(run).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=1e-12, msg=name)
    for name, tensor in ended(sharded).items():
        assert torch.equal(ended(resumed[1])[name], tensor), name


def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dataclasses.replace(SETTINGS, dtype="auto")
    for able, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: {"avx512_bf16": able})
        assert with_dtype(settings).dtype == expected
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_bf16_supported", lambda able=able: not able)
            assert with_dtype(settings).dtype != expected
    assert with_dtype(SETTINGS).dtype == "float64"


def test_a_kill_between_checkpoints_repeats_the_steps_after_the_last(tiny, tmp_path: Path) -> None:
    saving = Saving(path=tmp_path / "c.safetensors", every_s=1e9)

    def kill(progress: Progress) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        train(make_drafter(tiny), make_corpus(tiny), SETTINGS, saving, on_step=kill)
    assert not saving.path.exists()


def test_the_curve_tells_validation_before_the_first_step_and_after_each_epoch(
    tiny, tmp_path: Path
) -> None:
    saving = Saving(path=tmp_path / "c.safetensors", every_s=1e9)
    curve = train(make_drafter(tiny), make_corpus(tiny), SETTINGS, saving, on_step=no_word)
    plan = plan_run([14, 9, 7], SETTINGS)
    ends = [sum(1 for e, _ in plan if e <= epoch) for epoch in range(4)]
    assert [row["step"] for row in curve if row["split"] == "val"] == ends
    assert [row["step"] for row in curve if row["split"] == "train"] == list(
        range(1, len(plan) + 1)
    )


def test_a_few_documents_are_learnt_by_heart(tiny, tmp_path: Path) -> None:
    settings = dataclasses.replace(
        SETTINGS, lr=1e-2, epochs=60, weight_decay=0.0, tokens_per_step=100
    )
    saving = Saving(path=tmp_path / "c.safetensors", every_s=1e9)
    curve = train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=no_word)
    checks = [row for row in curve if row["split"] == "val"]
    assert (
        checks[-1]["simulated_acceptance_length"] > checks[0]["simulated_acceptance_length"] + 0.3
    )
    assert checks[-1]["loss_step1"] < 0.5 * checks[0]["loss_step1"]


def test_training_units_leave_no_trace(tiny, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, lr=0.0, weight_decay=0.0, epochs=1)
    drafter, saving = make_drafter(tiny), Saving(path=tmp_path / "c.safetensors", every_s=1e9)
    train(drafter, make_corpus(tiny), settings, saving, on_step=no_word)
    for name, tensor in make_drafter(tiny).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    tiny, tmp_path: Path
) -> None:
    saving = Saving(path=tmp_path / "c.safetensors", every_s=0.0)
    corpus = make_corpus(tiny)

    def spoil(progress: Progress) -> None:
        corpus.head_ND[0] = torch.nan

    with pytest.raises(EyasError, match=r"step 2 of 7: expected a finite loss.*\n.*lower train.lr"):
        train(make_drafter(tiny), corpus, SETTINGS, saving, on_step=spoil)
    steps: list[int] = []
    train(
        make_drafter(tiny),
        make_corpus(tiny),
        SETTINGS,
        saving,
        on_step=lambda p: steps.append(p.step),
    )
    assert steps[0] == 2


def test_nothing_supervised_is_told() -> None:
    with pytest.raises(EyasError, match="supervised tokens, got none"):
        plan_run([], SETTINGS)


def test_the_rate_warms_up_then_falls_as_a_half_cosine() -> None:
    rates = [rate_at(step, 40, 0.1) for step in range(40)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[22] == pytest.approx(0.5)
    assert 0.0 < rates[39] < 0.01
    assert rate_at(0, 10, 0.0) == 1.0


def test_saved_weights_read_back_and_foreign_ones_are_refused(tiny, tmp_path: Path) -> None:
    path = tmp_path / "drafter.safetensors"
    save_drafter(path, make_drafter(tiny))
    other = Drafter(tiny.config, tiny.drafter.t2d).double()
    load_drafter(path, other)
    assert torch.equal(other.fc.weight, make_drafter(tiny).fc.weight)
    single = Drafter(tiny.config, tiny.drafter.t2d)
    with pytest.raises(EyasError, match=r"drafter\.safetensors: 'fc\.weight' expected .*float32"):
        load_drafter(path, single)
    path.write_bytes(b"not a tensor")
    with pytest.raises(EyasError, match="not a readable safetensors file"):
        load_drafter(path, other)


def test_the_digest_changes_with_settings_and_files(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("a")
    first = digest_of({"lr": 1.0}, {"manifest": file})
    assert first == digest_of({"lr": 1.0}, {"manifest": file})
    assert first != digest_of({"lr": 2.0}, {"manifest": file})
    file.write_text("b")
    assert first != digest_of({"lr": 1.0}, {"manifest": file})


def test_the_digest_names_the_source_of_all_that_makes_a_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested = list[str]()
    monkeypatch.setattr(checkpoint, "sha256_of", lambda path: digested.append(path.stem) or "")
    digest_of({}, {})
    reached, open_ends = set[str](), ["eyas.stages.train"]
    while open_ends:
        spec = importlib.util.find_spec(open_ends.pop())
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        names = re.findall(r"^from eyas\.drafter\.(\w+) import", source, re.MULTILINE)
        open_ends += [f"eyas.drafter.{name}" for name in names if name not in reached]
        reached |= set(names)
    # nothing in a drafter's weights depends on these
    assert reached - set(digested) == {"checkpoint", "clock", "progress", "trees"}


def test_a_type_that_does_not_work_is_told(tiny, tmp_path: Path) -> None:
    saving = Saving(path=tmp_path / "c.safetensors", every_s=1e9)
    settings = dataclasses.replace(SETTINGS, dtype="float8")
    with pytest.raises(
        EyasError, match=r"train.dtype: expected one of auto, float32.* got 'float8'"
    ):
        train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=no_word)


def test_a_loss_that_there_is_not_is_told_and_one_that_there_is_is_trained(tiny, tmp_path) -> None:
    rows = []
    for name in ("kl", "tv", "kll"):
        settings, saving = (
            dataclasses.replace(SETTINGS, loss=name),
            Saving(path=tmp_path / name, every_s=1e9),
        )
        if name == "kll":
            with pytest.raises(EyasError, match=r"train.loss: expected one of kl, .* got 'kll'"):
                train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=no_word)
        else:
            curve = train(make_drafter(tiny), make_corpus(tiny), settings, saving, on_step=no_word)
            rows.append(next(row for row in curve if row["split"] == "train"))
    kl, tv = rows
    assert kl["loss_step1"] == tv["loss_step1"]  # cross-entropy of the same start
    steps = range(1, SETTINGS.ttt_steps + 1)
    assert kl["loss"] == pytest.approx(
        sum(SETTINGS.ttt_decay ** (k - 1) * kl[f"loss_step{k}"] for k in steps)
    )
    assert tv["loss"] < sum(SETTINGS.ttt_decay ** (k - 1) for k in steps)


def test_steps_in_parts_are_whole_steps(tiny, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, tokens_per_step=100)
    curves, drafters = [], []
    for name, micro_tokens in (("whole", None), ("parts", 10)):
        drafter, saving = make_drafter(tiny), Saving(path=tmp_path / name, every_s=1e9)
        part = dataclasses.replace(settings, micro_tokens=micro_tokens)
        curves.append(train(drafter, make_corpus(tiny), part, saving, on_step=no_word))
        drafters.append(drafter.state_dict())
    for whole, parts in zip(*curves, strict=True):
        assert parts.pop("split") == whole.pop("split")
        assert parts == pytest.approx(whole, rel=1e-9)
    for name, tensor in drafters[0].items():
        # Adam divides by the root of the squares: 1e-16 of a gradient near 0 is more of its step
        torch.testing.assert_close(drafters[1][name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_activations_made_again_have_the_same_bits(tiny, tmp_path: Path) -> None:
    drafters = []
    for recompute in (False, True):
        drafter, saving = make_drafter(tiny), Saving(path=tmp_path / str(recompute), every_s=1e9)
        settings = dataclasses.replace(SETTINGS, recompute=recompute, ttt_steps=3)
        train(drafter, make_corpus(tiny), settings, saving, on_step=no_word)
        drafters.append(drafter.state_dict())
    for name, tensor in drafters[0].items():
        assert torch.equal(drafters[1][name], tensor), name
