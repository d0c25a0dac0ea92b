"""Train the drafter on the stored hidden states.

Reads: data/hidden_states/manifest.json and its shards, data/mixture, models/target.
Writes: models/drafter/ (config.json, drafter.safetensors, start.safetensors, curves.jsonl,
training.json) and, while it runs, var/checkpoints/<digest>. Run: python -m eyas.stages.train, or on
several cores or GPUs: torchrun --nproc-per-node N -m eyas.stages.train.
Source: EAGLE-3, arXiv 2503.01840. A killed run goes on from its checkpoint: run it again. With
extract.window_gb its shards are made and deleted as it goes (desk/turns.py).
"""

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_beside, run_stage
from eyas.desk.training import build_report
from eyas.desk.turns import Windows, taking_turns
from eyas.desk.workers import end_with_parent
from eyas.drafter import ranks
from eyas.drafter.checkpoint import digest_of, keep_start, save_drafter
from eyas.drafter.clock import Clock
from eyas.drafter.config import DrafterConfig, make_config, save_config
from eyas.drafter.feedback import refine
from eyas.drafter.induction import look_back
from eyas.drafter.layers import unit_rms
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Document, Packer, aux_scale, number_replies, predictions
from eyas.drafter.progress import reporting, summarise
from eyas.drafter.ridge import ridge_start, sum_equations
from eyas.drafter.schedule import dtype_of, with_dtype
from eyas.drafter.training import Corpus, Saving, check_settings, train
from eyas.drafter.vocabulary import choose_vocabulary, count_tokens, coverage
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_jsonl
from eyas.parquet import read_samples
from eyas.records import Sample
from eyas.settings import Drafter as DrafterSettings
from eyas.settings import Runtime, Train
from eyas.states.folder import SIDECAR
from eyas.states.layout import ALL
from eyas.states.store import POST_NORM, Store, read_manifest
from eyas.states.target import TargetHead, load_head
from eyas.tokens.codecs import load_codec

TARGET = Path("models/target")
MIXTURE = Path("data/mixture")
MANIFEST = Path("data/hidden_states/manifest.json")
OUT = Path("models/drafter")
CHECKPOINTS = Path("var/checkpoints")
_FAVOURITE_ROWS = 256  # logits of the target at a time
_ROWS_A_FEATURE = 6  # of the ridge start: 7.3 cost 0.4 % of its tau, 3.7 cost 1.2 (RESULTS.md)
log = logging.getLogger("eyas")


class StoredDocuments:
    """The mixture's samples with their states; a sample without a prediction is left out.

    With `turns`, reading a sample brings its window, and the one before is gone. With `fc_norm_eps`
    aux states come with an RMS of one: all that trains the drafter sees what its fc_norm makes, but
    for its weights.
    """

    def __init__(
        self,
        store: Store,
        samples: Sequence[Sample],
        turns: Windows | None = None,
        fc_norm_eps: float | None = None,
    ) -> None:
        replies = [_replies(sample) for sample in samples]
        useful = [i for i, reply_T in enumerate(replies) if len(predictions(reply_T))]
        self._store, self._turns, self._window = store, turns, 0 if turns is None else None
        self._fc_norm_eps = fc_norm_eps
        windows = turns.job.windows_of_samples() if turns else [0] * len(samples)
        self.windows = [windows[i] for i in useful]
        self._ids = [samples[i].id for i in useful]
        self.replies = [replies[i] for i in useful]
        self.lengths = [len(reply_T) for reply_T in self.replies]
        self.input_ids = [torch.tensor(samples[i].input_ids) for i in useful]

    def read(self, index: int) -> Document:
        """Return a document.

        Raises: EyasError if the store holds other tokens under its id.
        """
        if self._turns and self.windows[index] != self._window:
            self._enter(self._turns, self.windows[index])
        states = self._store.read(self._ids[index])
        if not torch.equal(states.input_ids, self.input_ids[index]):
            raise EyasError(
                f"{MANIFEST}: sample {self._ids[index]} has other tokens than the mixture",
                hint="re-run extract",
            )
        aux_TLD, eps = states.aux_TLD, self._fc_norm_eps
        return Document(
            input_ids_T=states.input_ids,
            reply_T=self.replies[index],
            aux_TLD=aux_TLD if eps is None else unit_rms(aux_TLD, eps),
            final_TD=states.final_TD,
            top_T2K=states.top_T2K,
        )

    def _enter(self, turns: Windows, window: int) -> None:
        """Let the leading rank bring a window, once no rank maps a shard of the last."""
        self._store.close()
        ranks.wait_for_all()
        if ranks.leads():
            turns.bring(window)
        self._store, self._window = turns.store_of(window), window


def _replies(sample: Sample) -> Tensor:
    truncated = "truncated" in sample.flags
    return number_replies(len(sample.input_ids), sample.spans, truncated=truncated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the stage has read."""

    shape: DrafterSettings
    settings: Train
    head: TargetHead
    store: Store
    train: StoredDocuments
    val: StoredDocuments
    turns: Windows | None


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Train the drafter."""
    if ranks.launched():
        end_with_parent()
    (run_stage if ranks.leads() else run_beside)("train", work, config)


def work(params: Params) -> Report:
    """Make the start, train it from the last checkpoint on, write the drafter and its curves."""
    runtime, index = params.knob("runtime", Runtime), read_manifest(MANIFEST)
    leads = ranks.leads()
    with ranks.joined(), taking_turns(MANIFEST, index, runtime, leads=leads) as turns:
        store = Store(index, Path(runtime.store))
        return train_together(params, read_inputs(params, store, turns))


def train_together(params: Params, inputs: Inputs) -> Report:
    """Do a rank's work; only the leading one writes."""
    check_settings(inputs.settings, inputs.shape.family, len(inputs.val.lengths))
    runtime = params.knob("runtime", Runtime)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    counts_V = count_tokens(
        zip(inputs.train.input_ids, inputs.train.replies, strict=True), len(inputs.head.lm_head_VD)
    )
    codec = load_codec(inputs.store.meta.template, TARGET)
    forced = {*codec.special_ids, *codec.stop_ids, *codec.markup_ids}
    config = build_config(inputs)
    t2d_V = choose_vocabulary(counts_V, config.draft_vocab_size, forced)
    drafter = Drafter(config, t2d_V)
    checkpoint = CHECKPOINTS / digest_of(*identity(inputs)) / "checkpoint.safetensors"
    folder = checkpoint.parent
    scale_LD = keep_start(
        folder,
        drafter,
        lambda: aux_scale(inputs.train),
        lambda: build_start(drafter, inputs, folder / "equations.safetensors"),
    )
    if ranks.leads():
        OUT.mkdir(parents=True, exist_ok=True)
        save_config(OUT / "config.json", drafter.config)
        save_drafter(OUT / "start.safetensors", drafter)
    drafter.to("cuda" if torch.cuda.is_available() else "cpu")
    start_cpu_s = time.process_time() - started_cpu_s
    resumed = checkpoint.is_file()
    if resumed:
        log.info("train: going on from %s", checkpoint)
    knobs, clock = runtime.train, Clock(cuda=torch.cuda.is_available())
    with reporting(knobs.log_every_steps, clock) as on_step:
        curve = train(
            drafter,
            build_corpus(drafter, inputs, scale_LD),
            inputs.settings,
            Saving(path=checkpoint, every_s=knobs.checkpoint_every_s, shard=knobs.shard),
            on_step=on_step,
            clock=clock,
        )
    train_cpu_s = time.process_time() - started_cpu_s - start_cpu_s
    costs = {"wall_s": round(time.monotonic() - started_s, 1)}
    costs |= clock.figures() | add_costs(start_cpu_s, train_cpu_s, inputs.turns)
    facts = summarise(inputs.train.replies, inputs.settings, curve, coverage(counts_V, t2d_V))
    if ranks.leads():
        save_drafter(OUT / "drafter.safetensors", drafter)
        write_jsonl(OUT / "curves.jsonl", curve)
        write_json(OUT / "training.json", facts | {"dtype": inputs.settings.dtype})
        shutil.rmtree(checkpoint.parent)
    shares, dtype = clock.shares(), inputs.settings.dtype
    report = build_report(facts | costs, curve, knobs.log_every_steps, shares, (dtype, resumed))
    return dataclasses.replace(
        report,
        inputs=(MANIFEST, MIXTURE / "train.parquet", MIXTURE / "val.parquet"),
        artifacts=(OUT / "config.json", OUT / "curves.jsonl", OUT / "training.json"),
    )


def add_costs(start_cpu_s: float, train_cpu_s: float, turns: Windows | None) -> dict[str, float]:
    """Return the CPU time of all ranks, and what capturing took."""
    used_s = ranks.all_sum(torch.tensor([start_cpu_s, train_cpu_s], dtype=torch.float64)).tolist()
    costs = {"start_cpu_s": round(used_s[0], 1), "train_cpu_s": round(used_s[1], 1)}
    if turns:
        costs |= {"captured_tokens": turns.tokens, "capture_s": round(turns.wall_s, 1)}
    return costs


def read_inputs(params: Params, store: Store, turns: Windows | None = None) -> Inputs:
    """Read settings, mixture and target head, and refuse what does not belong together."""
    check_target(store)
    samples = {name: list(read_samples(MIXTURE / f"{name}.parquet")) for name in ("train", "val")}
    for sample in ([] if turns else samples["train"]) + samples["val"]:
        if sample.id not in store.entries:
            raise EyasError(f"{MANIFEST}: no states for sample {sample.id}", hint="re-run extract")
        got = store.entries[sample.id].spans
        if got != sample.spans and (store.meta.final_rows != ALL or store.meta.teacher_k):
            raise EyasError(
                f"{MANIFEST}: sample {sample.id}: expected replies {sample.spans}, got {got}",
                hint="re-run extract",
            )
    shape, head = params.section("drafter", DrafterSettings), load_head(TARGET)
    eps = head.norm_eps if shape.fc_norm else None
    return Inputs(
        shape=shape,
        settings=with_dtype(params.section("train", Train)),
        head=head,
        store=store,
        train=StoredDocuments(store, samples["train"], turns, eps),
        val=StoredDocuments(store, samples["val"], None, eps),
        turns=turns,
    )


def check_target(store: Store) -> None:
    """Refuse states of another target, of layers no server names so, or without the final norm."""
    meta = store.meta
    revision = read_json(TARGET / SIDECAR, hint="re-run target")["revision"]
    for what, expected, got in (
        ("target revision", revision, meta.target_revision),
        ("first aux layer", 1, meta.layers[0]),
        ("final state", POST_NORM, meta.final),
    ):
        if expected != got:
            raise EyasError(
                f"{MANIFEST}: {what}: expected {expected}, got {got}", hint="re-run extract"
            )


def build_config(inputs: Inputs) -> DrafterConfig:
    """Return the drafter's shape.

    Raises: EyasError if the shape is impossible.
    """
    meta = inputs.store.meta
    config = make_config(
        inputs.shape,
        inputs.head.config,
        aux_layers=meta.layers,
        target_name=meta.target_name,
        target_revision=meta.target_revision,
    )
    if config.mla and config.mla.q_lora_rank is None:
        log.warning("drafter.mla.q_lora_rank: null: no server loads such a drafter, nor exports it")
    return config


def build_start(drafter: Drafter, inputs: Inputs, sums: Path) -> None:
    """Fill the drafter as train.start says; sums over windows are kept at `sums` meanwhile."""
    settings, head, seed = inputs.settings, inputs.head, inputs.settings.seed
    if settings.start == "random":
        random_start(drafter, seed)
        return
    states = inputs.train, head.embed_VD, head.norm_weight_D
    equations = sum_equations(*states, head.norm_eps, windows=inputs.train.windows, path=sums)
    wanted = _ROWS_A_FEATURE * len(equations.gram_FF)
    if inputs.store.meta.final_every > 1 and equations.rows < wanted:
        words = "train.start=ridge: expected %d final states for a good start, got %d"
        log.warning(f"{words}: lower extract.final_every", wanted, equations.rows)
    ridge_start(
        drafter,
        equations,
        strength=settings.ridge_strength,
        norm_scale=settings.norm_scale,
        norm_weight_D=head.norm_weight_D,
        head_ND=head.lm_head_VD[drafter.t2d],
        seed=seed,
    )
    look_back(drafter, *states, settings)
    refine(drafter, *states, settings, final_every=inputs.store.meta.final_every)


def build_corpus(drafter: Drafter, inputs: Inputs, aux_scale_LD: Tensor) -> Corpus:
    """Put both splits and the target's frozen parts together."""
    head, t2d_V = inputs.head, drafter.t2d.cpu()
    head_VD = head.lm_head_VD.to(drafter.t2d.device, dtype_of(inputs.settings))

    def favourites(final_PD: Tensor) -> Tensor:
        chunks = final_PD.to(head_VD.device, head_VD.dtype).split(_FAVOURITE_ROWS)
        return torch.cat([(rows @ head_VD.T).float().argmax(-1) for rows in chunks]).cpu()

    return Corpus(
        train=Packer(inputs.train, favourites, t2d_V, inputs.train.windows),
        val=Packer(inputs.val, favourites, t2d_V),
        embed_VD=head.embed_VD,
        head_ND=head.lm_head_VD[t2d_V],
        aux_scale_LD=aux_scale_LD,
    )


def identity(inputs: Inputs) -> tuple[dict[str, object], dict[str, Path]]:
    """Return the settings and files that a checkpoint belongs to."""
    settings: dict[str, object] = {
        "drafter": dataclasses.asdict(inputs.shape),
        "train": dataclasses.asdict(inputs.settings),
    }
    files = {
        "manifest": MANIFEST,
        "train": MIXTURE / "train.parquet",
        "val": MIXTURE / "val.parquet",
        "target": TARGET / SIDECAR,
    }
    return settings, files


if __name__ == "__main__":
    main()
