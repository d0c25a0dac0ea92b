"""The training loop: packed steps, AdamW, warm-up and cosine, validation, exact resume.

A step is a function of the weights, the optimizer's state and the step's number alone, so a run
that was killed and resumed ends with the same bits as one that was not (same threads, torch, number
of ranks). Ranks (ranks.py) share the documents of a step, then all take the same step.

Raw aux states are large and uneven (median RMS 2.7, 6.2 and 22 in the three layers of SmolLM2), so
fc's entries are 0.001 to 0.006 and one Adam step of 1e-4 would swamp them. While training, aux
states are divided by `aux_scale_LD` and fc's columns multiplied by it: the same function in units
that Adam fits. Simulated acceptance length on the anchor data, all else equal: 1.642 -> 1.665.

Legend: V target vocabulary, N draft vocabulary, D hidden size, L aux layers.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.drafter import ranks
from eyas.drafter.checkpoint import load_checkpoint, load_drafter, save_checkpoint, save_drafter
from eyas.drafter.clock import Clock
from eyas.drafter.families import FAMILIES
from eyas.drafter.induction import can_look_back
from eyas.drafter.losses import Tally, check_loss, figures, pack_loss, trained_rows
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Pack, Packer, fill, plan_epoch
from eyas.drafter.schedule import (
    Row,
    best_epoch,
    check_length,
    dtype_of,
    has_stalled,
    parts_of,
    plan_run,
    rate_at,
)
from eyas.drafter.sharding import Sharded, Whole, gathered
from eyas.errors import EyasError
from eyas.settings import Train

log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What is trained and validated on, and the frozen parts of the target."""

    train: Packer
    val: Packer  # may hold nothing
    embed_VD: Tensor
    head_ND: Tensor  # rows of lm_head for the draft vocabulary
    aux_scale_LD: Tensor  # powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and how often the state is saved."""

    path: Path
    every_s: float
    shard: bool = False  # each rank keeps a part of weights and moments (sharding.py)

    @property
    def best(self) -> Path:
        """Return where the weights of the best epoch lie, with `train.patience`."""
        return self.path.with_name("best.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, for the eye."""

    step: int  # steps done
    total: int
    tokens: int  # of this step
    row: Row  # of the curve


class Run:
    """One training run: what stays the same from step to step."""

    def __init__(
        self, drafter: Drafter, corpus: Corpus, settings: Train, clock: Clock | None = None
    ) -> None:
        self.drafter, self.settings, self.clock = drafter, settings, clock or Clock()
        check_loss(settings.loss)
        dtype, self.device = dtype_of(settings), drafter.fc.weight.device  # all follows the drafter
        self.corpus = dataclasses.replace(
            corpus,
            embed_VD=corpus.embed_VD.to(self.device, dtype),
            head_ND=corpus.head_ND.to(self.device, dtype),
            aux_scale_LD=corpus.aux_scale_LD.to(self.device),
        )
        self.plan = plan_run(corpus.train.lengths, settings, corpus.train.windows)
        self.parts = parts_of([epoch for epoch, _ in self.plan], settings)
        self.weights = tuple(settings.ttt_decay**k for k in range(settings.ttt_steps))
        self.held: Whole | Sharded = Whole(drafter)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        rates = {"lr": self.settings.lr, "weight_decay": self.settings.weight_decay}
        return torch.optim.AdamW(self.held.parameters, **rates, fused=True)

    def shard(self) -> None:
        """Let this rank keep its rows alone of weights and moments, from where they are."""
        states = [self.optimizer.state[parameter] for parameter in self.held.parameters]
        self.held = held = Sharded(self.drafter)
        self.optimizer = self._optimizer()
        for parameter, state in zip(held.parameters, states, strict=True):
            rows = {name: held.cut(tensor) for name, tensor in state.items()}
            self.optimizer.state[parameter].update(rows)
        log.info("train: each of %d ranks keeps a part of weights and moments", ranks.size())

    def scale_fc(self, scale_LD: Tensor) -> None:
        """Multiply fc's columns; exact, as the factors are powers of two."""
        with torch.no_grad():
            self.drafter.fc.weight.mul_(scale_LD.flatten())

    def measure(self, packer: Packer, documents: list[int]) -> tuple[Tensor, Tally, int]:
        """Return loss, tally and tokens of a step; add its gradients where they are wanted.

        The documents run in packs of at most `micro_tokens`, on all ranks; a row weighs the same in
        any of them. Loss and tally are of all ranks, gradients of this one.
        """
        timed, tokens = self.clock.timed, sum(packer.lengths[index] for index in documents)
        with timed("fetch"):
            packer.enter(documents[0])
            mine = ranks.share(documents, packer.lengths)
            parts = fill(mine, packer.lengths, self.settings.micro_tokens or tokens)
            packs = [packer.pack(part) for part in parts]
            rows = [trained_rows(pack, len(self.weights)) for pack in packs]
        rows_KS = torch.tensor(rows, dtype=torch.long).view(-1, len(self.weights))
        with timed("exchange"):
            total = ranks.all_sum(rows_KS.sum(0)).clamp(min=1).tolist()
        losses, tallies = [], []
        for pack, own in zip(packs, rows, strict=True):
            weights = tuple(
                w * (n / all_n) for w, n, all_n in zip(self.weights, own, total, strict=True)
            )
            with timed("forward"):
                loss, tally = self._measure(pack, weights)
            if loss.requires_grad:
                with timed("backward"):
                    loss.backward()
            losses.append(loss.detach())
            tallies.append(tally)
        with timed("exchange"):
            return *self._sum(losses, tallies), tokens

    def _sum(self, losses: list[Tensor], tallies: list[Tally]) -> tuple[Tensor, Tally]:
        """Return loss and tally of all packs of all ranks."""
        empty_S = torch.zeros(len(self.weights), dtype=torch.float64)
        tally = reduce(Tally.plus, tallies, Tally(*[empty_S] * len(Tally._fields)))
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        sums_F = ranks.all_sum(torch.cat([loss.double().cpu().view(1), *tally]))
        return sums_F[0], Tally(*sums_F[1:].view(len(tally), -1))

    def _measure(self, pack: Pack, weights: tuple[float, ...]) -> tuple[Tensor, Tally]:
        corpus, pack = self.corpus, pack.to(self.device)
        pack = dataclasses.replace(pack, aux_TLD=pack.aux_TLD / corpus.aux_scale_LD)
        embed_TD = corpus.embed_VD[pack.input_ids_T]
        recompute, loss = self.settings.recompute, self.settings.loss
        return pack_loss(
            self.drafter,
            pack,
            embed_TD,
            corpus.head_ND,
            weights,
            recompute=recompute,
            loss=loss,
        )

    def leaves_window(self, step: int) -> bool:
        """Tell whether a step, which is not the first, reads another window than the last."""
        before, now = (self.plan[number][1][0] for number in (step - 1, step))
        return self.corpus.train.windows[before] != self.corpus.train.windows[now]

    def validate(self, step: int, epoch: int) -> list[Row]:
        """Return the validation row, none where there is nothing to validate on."""
        val, total = self.corpus.val, None
        with torch.no_grad(), self.clock.timed("evaluate"):
            self.held.gather()
            for documents in plan_epoch(val.lengths, self.settings.tokens_per_step, seed=0):
                _, tally, _ = self.measure(val, documents)
                total = tally if total is None else total.plus(tally)
            self.held.release()
        if total is None:
            return []
        return [{"split": "val", "step": step, "epoch": epoch, **figures(total)}]

    def advance(self, step: int) -> tuple[Row, int]:
        """Do one optimiser step; return its row of the curve and its tokens.

        Raises: EyasError if loss or gradient are not finite; the weights are then untouched.
        """
        settings = self.settings
        part = self.part_of(step)
        lr = settings.lr * rate_at(step - part.start, len(part), settings.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        epoch, documents = self.plan[step]
        self.optimizer.zero_grad()
        with self.clock.timed("exchange"):
            self.held.gather()
        loss, tally, tokens = self.measure(self.corpus.train, documents)
        with self.clock.timed("exchange"):
            self.held.reduce()
        with self.clock.timed("optimiser"):
            norm = self._take_step(step, loss)
        self.clock.tokens += tokens
        head = {"split": "train", "step": step + 1, "epoch": epoch, "lr": lr}
        total = {"loss": float(loss.detach()), "gradient_norm": float(norm)}
        return {**head, **total, **figures(tally)}, tokens

    def _take_step(self, step: int, loss: Tensor) -> Tensor:
        """Let the optimiser step along the clipped gradient, and return its norm before that."""
        parameters = self.held.parameters
        norm = gathered(nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm))
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise EyasError(
                f"train: step {step + 1} of {len(self.plan)}: expected a finite loss and gradient, "
                f"got {float(loss.detach())} and {float(norm)}",
                hint="lower train.lr; at a first step look at the states (`eyas verify`) and the "
                "target's weights; the last checkpoint before this is kept",
            )
        first = step == 0 and len(self.parts) > 1
        begin = [p.detach().clone() for p in parameters] if first else []
        self.optimizer.step()
        for parameter, kept in zip(parameters, begin, strict=False):
            self.optimizer.state[parameter] |= {"begin": kept, "mean": torch.zeros_like(kept)}
        return norm

    def part_of(self, step: int) -> range:
        """Return the steps of the run of the soup that this step belongs to."""
        return next(part for part in self.parts if step in part)

    @torch.no_grad()
    def stir(self, step: int) -> None:
        """At the end of a run of a soup add its weights to the mean; begin again, or take the mean.

        Mean and start lie with Adam's moments, which are saved and resumed.
        """
        if len(self.parts) == 1 or step != self.part_of(step)[-1]:
            return
        for parameter in self.held.parameters:
            state = self.optimizer.state[parameter]
            state["mean"].add_(parameter, alpha=1.0 / len(self.parts))
            over = step + 1 == len(self.plan)
            parameter.copy_(state["mean" if over else "begin"])
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                state[moment].zero_()

    def keep_best(self, curve: list[Row], path: Path) -> None:
        """Write the weights if the last validation is the best so far and may end the run."""
        if self.settings.patience is None or curve[-1]["epoch"] != best_epoch(curve):
            return
        with self.clock.timed("save"):
            self.held.gather()
            if ranks.leads():
                save_drafter(path, self.drafter)
            self.held.release()


def train(
    drafter: Drafter,
    corpus: Corpus,
    settings: Train,
    saving: Saving,
    *,
    on_step: Callable[[Progress], None],
    clock: Clock | None = None,
) -> list[Row]:
    """Train in place, going on from the checkpoint if there is one; return the curve.

    Validates before the first step and after each epoch. A soup (schedule.py) is validated as such
    after its last epoch only, before that the run in work. With `settings.patience` training ends
    once so many epochs brought no gain on the validation split, and the best epoch's weights are
    kept.

    Raises: EyasError if there is nothing to train on, or loss or gradient are not finite.
    """
    run = Run(drafter, corpus, settings, clock)
    if saving.path.is_file():
        step, curve = load_checkpoint(saving.path, drafter, run.optimizer)
    else:
        run.scale_fc(run.corpus.aux_scale_LD)
        step, curve = 0, []
    ranks.agree(list(drafter.parameters()), step)
    if saving.shard and ranks.size() > 1:
        run.shard()
    if not step:
        curve = run.validate(0, 0)
        run.keep_best(curve, saving.best)
    saved_s, names = time.monotonic(), [name for name, _ in drafter.named_parameters()]
    while step < len(run.plan) and not has_stalled(curve, settings.patience):
        row, tokens = run.advance(step)
        curve.append(row)
        step += 1
        last = step == len(run.plan)
        if last:
            run.stir(step - 1)
        if last or run.plan[step][0] != row["epoch"]:
            curve += run.validate(step, row["epoch"])
            run.keep_best(curve, saving.best)
        if not last:
            run.stir(step - 1)
        due = last or run.leaves_window(step) or time.monotonic() - saved_s >= saving.every_s
        if ranks.leader_says(due):
            with run.clock.timed("save"):
                save_checkpoint(saving.path, names, run.optimizer, step=step, curve=curve)
            saved_s = time.monotonic()
        on_step(Progress(step=step, total=len(run.plan), tokens=tokens, row=row))
    run.held.gather()
    if settings.patience is not None:
        log.info("train: of %d epochs, number %d is kept", curve[-1]["epoch"], best_epoch(curve))
        ranks.wait_for_all()
        load_drafter(saving.best, drafter)
    run.scale_fc(1.0 / run.corpus.aux_scale_LD)
    return curve


def check_settings(settings: Train, family: str, num_val: int) -> None:
    """Refuse, before any work, what only a later part would stumble over; say what is not read.

    Raises: EyasError.
    """
    if family not in FAMILIES:
        raise EyasError(f"drafter.family: expected {' | '.join(FAMILIES)}, got '{family}'")
    if settings.start not in ("ridge", "random"):
        raise EyasError(f"train.start: expected ridge | random, got '{settings.start}'")
    check_loss(settings.loss)
    dtype_of(settings)
    check_length(settings, num_val)
    if settings.induction and not can_look_back(family):
        log.info("train.induction: heads of family %s cannot look back, left out", family)
    if settings.start == "random" and (settings.induction or settings.feedback_rounds):
        log.warning("train.start=random: train.induction and train.feedback_rounds do nothing")
