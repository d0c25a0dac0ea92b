"""Train one drafter within a budget of CPU time, with our step or with SpecForge's.

Both get the same documents and the same held-out prompts. A run's CPU time is counted from the
start's regression to the last optimiser step, reading of states included, capturing them not: that
is the same for all. Ours trains whole epochs, at most as many as fit; SpecForge's trains as many
steps as fit, by the rate of a short run before it. The peer runs in an environment of its own.

Legend: D hidden size, N draft vocabulary, V target vocabulary.
"""

import dataclasses
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from drafter_data import Data, Some
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.export import check_tensors, read_tensors, served_tensors
from eyas.drafter.feedback import refine
from eyas.drafter.induction import look_back
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Packer, aux_scale, plan_epoch
from eyas.drafter.profiles import serving_config
from eyas.drafter.ridge import ridge_start, sum_equations
from eyas.drafter.training import Corpus, Progress, Saving, train
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.settings import Train

CALIBRATION_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a drafter is made. Settings are those of conf/train but for `settings`."""

    trainer: str  # eyas | specforge | none
    settings: Mapping[str, Any] = field(default_factory=dict)  # epochs: null takes what fits
    fc_rate: float = 1.0  # learning rate of fc, relative to the others
    temperature: float = 1.0  # of the teacher
    fc_norm: bool = False  # drafter.fc_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run works, its budget, and the peer's kit and interpreter."""

    folder: Path
    budget_cpu_s: float
    peer_kit: Path
    peer_python: Path


def build(data: Data, recipe: Recipe, base: Train, place: Place) -> dict[str, Any]:
    """Make a drafter in `place.folder`, drafter.safetensors; return what it took."""
    changed: dict[str, Any] = {"epochs": 1, **recipe.settings}
    settings = dataclasses.replace(base, **changed)
    place.folder.mkdir(parents=True, exist_ok=True)
    began_cpu_s = time.process_time()
    start = started(data, settings)
    start_cpu_s = time.process_time() - began_cpu_s if settings.start != "random" else 0.0
    if recipe.trainer == "specforge":
        facts = _by_specforge(data, start, settings, place, start_cpu_s)
    else:
        facts = {"cpu_s": start_cpu_s, "epochs": 0}
        if recipe.trainer == "eyas":
            facts = _by_eyas(data, start, recipe, settings, place, start_cpu_s)
        tensors = {k: v.detach().contiguous() for k, v in start.state_dict().items()}
        save_file(served_tensors(tensors), place.folder / "drafter.safetensors")
    check_tensors(
        read_tensors(place.folder / "drafter.safetensors"), data.config, str(place.folder)
    )
    return {"start_cpu_s": round(start_cpu_s, 1)} | facts


def started(data: Data, settings: Train) -> Drafter:
    """Return the drafter before training."""
    drafter, head = Drafter(data.config, data.t2d_V), data.head
    if settings.start == "random":
        random_start(drafter, settings.seed)
        return drafter
    ridge_start(
        drafter,
        sum_equations(data.documents, head.embed_VD, head.norm_weight_D, head.norm_eps),
        strength=settings.ridge_strength,
        norm_scale=settings.norm_scale,
        norm_weight_D=head.norm_weight_D,
        head_ND=head.lm_head_VD[data.t2d_V],
        seed=settings.seed,
    )
    look_back(drafter, data.documents, head.embed_VD, head.norm_weight_D, settings)
    refine(drafter, data.documents, head.embed_VD, head.norm_weight_D, settings)
    return drafter


def corpus_of(data: Data, recipe: Recipe) -> Corpus:
    """Return what our trainer reads; a teacher of another temperature is another head."""
    head, t2d_V = data.head, data.t2d_V

    def favourites(final_PD: Tensor) -> Tensor:
        return (final_PD @ head.lm_head_VD.T).argmax(-1)

    return Corpus(
        train=Packer(data.documents, favourites, t2d_V),
        val=Packer(_Nothing(), favourites, t2d_V),
        embed_VD=head.embed_VD,
        head_ND=head.lm_head_VD[t2d_V] / recipe.temperature,
        # fc is trained in units of the scale: a step of lr there is one of lr / scale here
        aux_scale_LD=aux_scale(data.documents) / recipe.fc_rate,
    )


class _Nothing:
    """No validation: every document is trained on."""

    lengths: Sequence[int] = ()

    def read(self, index: int) -> Any:
        raise IndexError(index)


def _by_eyas(
    data: Data,
    drafter: Drafter,
    recipe: Recipe,
    settings: Train,
    place: Place,
    start_cpu_s: float,
) -> dict[str, Any]:
    meter, checkpoint = place.folder / "spent.json", place.folder / "checkpoint.safetensors"
    spent = read_json(meter) if meter.is_file() else {"epochs": None, "cpu_s": start_cpu_s}
    epochs = recipe.settings.get("epochs") or spent["epochs"]
    if epochs is None:
        epoch_cpu_s = _epoch_cpu_s(data, recipe, settings)
        epochs = max(int((place.budget_cpu_s - start_cpu_s) / epoch_cpu_s), 1)
    before_cpu_s, begun_cpu_s = spent["cpu_s"], time.process_time()

    def on_step(_: Progress) -> None:
        used_cpu_s = before_cpu_s + time.process_time() - begun_cpu_s
        write_json(meter, {"epochs": epochs, "cpu_s": used_cpu_s})

    curve = train(
        drafter,
        corpus_of(data, recipe),
        dataclasses.replace(settings, epochs=epochs),
        Saving(path=checkpoint, every_s=30.0),
        on_step=on_step,
    )
    cpu_s = read_json(meter)["cpu_s"]
    checkpoint.unlink()
    meter.unlink()
    return {"cpu_s": round(cpu_s, 1), "epochs": epochs, "steps": len(curve)} | {
        key: round(curve[-1][key], 4) for key in ("loss", "lr")
    }


def _epoch_cpu_s(data: Data, recipe: Recipe, settings: Train) -> float:
    """Return the CPU time of an epoch by that of its first steps, done to a throwaway drafter."""
    plan = plan_epoch(data.documents.lengths, settings.tokens_per_step, settings.seed + 1)
    some = Some(data.documents, [i for step in plan[:CALIBRATION_STEPS] for i in step])
    drafter = Drafter(data.config, data.t2d_V)
    random_start(drafter, 0)
    corpus = corpus_of(dataclasses.replace(data, documents=some), recipe)
    with tempfile.TemporaryDirectory(prefix="eyas-rate-") as name:
        begun_cpu_s = time.process_time()
        saving = Saving(path=Path(name) / "checkpoint.safetensors", every_s=float("inf"))
        once = dataclasses.replace(settings, epochs=1)
        train(drafter, corpus, once, saving, on_step=lambda _: None)
        cpu_s = time.process_time() - begun_cpu_s
    return cpu_s * sum(data.documents.lengths) / sum(some.lengths)


def _by_specforge(
    data: Data, start: Drafter, settings: Train, place: Place, start_cpu_s: float
) -> dict[str, Any]:
    batches = place.folder / "batches"
    steps = _write_batches(data, start, settings, batches)
    write_json(place.folder / "config.json", _peer_config(data.config, settings.ttt_steps))
    probe = _run_peer(place, settings, min(CALIBRATION_STEPS, len(steps)))
    rate = probe["tokens"] / probe["cpu_s"]
    left_tokens, count = rate * (place.budget_cpu_s - start_cpu_s), 0
    while left_tokens > 0:
        left_tokens -= steps[count % len(steps)]
        count += 1
    facts = _run_peer(place, settings, count)
    shutil.rmtree(batches)
    (place.folder / "peer/model.safetensors").replace(place.folder / "drafter.safetensors")
    return {
        "cpu_s": round(start_cpu_s + facts["cpu_s"], 1),
        "epochs": round(count / len(steps), 2),
        "steps": count,
        "loss": round(facts["loss_last"], 4),
    }


def _write_batches(data: Data, start: Drafter, settings: Train, folder: Path) -> list[int]:
    """Write the kit's batch files, one an optimiser step, and return their tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_epoch(data.documents.lengths, settings.tokens_per_step, settings.seed + 1)
    tokens = []
    for number, indices in enumerate(plan):
        documents = [data.documents.read(index) for index in indices]
        sizes = [len(d.input_ids_T) for d in documents]
        batch = {
            "input_ids": torch.cat([d.input_ids_T for d in documents]).long(),
            "loss_mask": torch.cat([d.reply_T for d in documents]).ne(0).to(torch.uint8),
            "aux_hidden_states": torch.cat([d.aux_TLD.flatten(1) for d in documents]).bfloat16(),
            "last_hidden_state": torch.cat([d.final_TD for d in documents]).bfloat16(),
            "document_ids": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
            "position_ids": torch.cat([torch.arange(size) for size in sizes]),
        }
        save_file(
            {k: v[None].contiguous() for k, v in batch.items()}, folder / f"{number:05}.safetensors"
        )
        tokens.append(sum(sizes))
    shared = {
        "target.lm_head.weight": data.head.lm_head_VD.clone(),
        "target.embed_tokens.weight": data.head.embed_VD.clone(),
        "d2t": start.d2t,
        "t2d": start.t2d,
    }
    if settings.start == "ridge":  # its own start is drawn by itself
        shared |= {f"draft.{k}": v.detach().contiguous() for k, v in start.named_parameters()}
    save_file(shared, folder / "shared.safetensors")
    return tokens


def _peer_config(config: DrafterConfig, ttt_steps: int) -> dict[str, Any]:
    return serving_config(config) | {"name": "drafter", "ttt_length": ttt_steps}


def _run_peer(place: Place, settings: Train, steps: int) -> dict[str, Any]:
    command = {
        "config": place.folder / "config.json",
        "batches": place.folder / "batches",
        "out": place.folder / "peer",
        "steps": steps,
        "lr": settings.lr,
        "seed": settings.seed,
        "warmup-ratio": settings.warmup_ratio,
        "max-grad-norm": settings.clip_norm,
        "decay": settings.ttt_decay,
    }
    arguments = [f"--{name}={value}" for name, value in command.items()]
    program = [str(place.peer_python), str(place.peer_kit / "train_run.py"), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        end = done.stderr.splitlines()[-10:]
        raise EyasError("\n".join(["SpecForge's step failed:", *end]))
    return json.loads(done.stdout.splitlines()[-1])
