"""What drafters are compared on: replies with their states, and greedy held-out paths.

`anchor` reads replies with exact ids from two JSONL files (id, source, prompt_ids, reply_ids): the
first is trained on, never the second. `anchor_split` reads the first alone, in two parts.
`finished_run` reads the store and the held-out prompts of a run's folder. States and greedy paths
are computed once and kept under var/drafters/.

Legend: T tokens, L aux layers, D hidden size, V target vocabulary.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.desk.params import read_params
from eyas.drafter import acceptance as ac
from eyas.drafter.config import DrafterConfig, make_config
from eyas.drafter.layers import unit_rms
from eyas.drafter.packing import Document, Documents, number_replies
from eyas.drafter.verifier import Target
from eyas.drafter.vocabulary import choose_vocabulary, count_tokens
from eyas.errors import EyasError
from eyas.files import read_json, read_jsonl, replacing, sha256_of
from eyas.records import Span
from eyas.settings import Drafter as DrafterSettings
from eyas.settings import Evaluate, Runtime
from eyas.stages import evaluate
from eyas.stages.train import MANIFEST, StoredDocuments, read_inputs
from eyas.states.capture_hf import batches, capture
from eyas.states.folder import SIDECAR
from eyas.states.store import open_store
from eyas.states.target import TargetHead, aux_layers, load_head, load_model
from eyas.tokens.codecs import load_codec

TARGET = Path("models/target")
KEPT = Path("var/drafters")
_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """A held-out prompt with the target's greedy reply, and the aux states along it."""

    source: str
    prompt_tokens: int
    ids: list[int]
    aux_TLD: Tensor  # of all but the last token, or of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Everything that a drafter is made from and judged on."""

    name: str
    digest: str
    documents: Documents
    paths: list[Heldout]
    head: TargetHead
    config: DrafterConfig
    t2d_V: Tensor
    stop_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Captured:
    """Documents whose states lie in memory, in bfloat16 as the default store keeps them."""

    tensors: dict[str, Tensor]
    spans: list[Span]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every document."""
        return self.tensors["lengths"].tolist()

    def read(self, index: int) -> Document:
        """Return a document."""
        begin = int(self.tensors["lengths"][:index].sum())
        rows = slice(begin, begin + int(self.tensors["lengths"][index]))
        return Document(
            input_ids_T=self.tensors["ids"][rows],
            reply_T=number_replies(rows.stop - rows.start, [self.spans[index]], truncated=False),
            aux_TLD=self.tensors["aux"][rows].float(),
            final_TD=self.tensors["final"][rows].float(),
        )


class Some:
    """Chosen documents of others."""

    def __init__(self, documents: Documents, chosen: Sequence[int]) -> None:
        self._documents, self._chosen = documents, chosen
        self.lengths = [documents.lengths[index] for index in chosen]

    def read(self, index: int) -> Document:
        """Return a document."""
        return self._documents.read(self._chosen[index])


class Normed:
    """Documents as a drafter with `fc_norm` is trained on them: aux states have an RMS of one."""

    def __init__(self, documents: Documents, eps: float) -> None:
        self._documents, self._eps, self.lengths = documents, eps, documents.lengths

    def read(self, index: int) -> Document:
        """Return a document."""
        document = self._documents.read(index)
        return dataclasses.replace(document, aux_TLD=unit_rms(document.aux_TLD, self._eps))


def with_fc_norm(data: Data) -> Data:
    """Return the same for drafters with `fc_norm`."""
    config = dataclasses.replace(data.config, fc_norm=True)
    normed = Normed(data.documents, config.rms_norm_eps)
    return dataclasses.replace(data, config=config, documents=normed)


def plain_shape() -> DrafterSettings:
    """Return the drafter's shape.

    Raises: EyasError with fc_norm, since documents and paths are read as the target gave them.
    """
    shape = read_params().section("drafter", DrafterSettings)
    if shape.fc_norm:
        raise EyasError(
            "drafter.fc_norm: expected false for this benchmark, got true",
            hint="drafters.py has recipes fc_norm_*, which norm the states of both",
        )
    return shape


def anchor_split(folder: Path) -> Data:
    """Read the first file alone: a fifth of its replies, as sampled, is judged on, not trained on.

    For choosing among recipes; the second file is for the recipe chosen.
    """
    whole = anchor(folder)
    rows = list(read_jsonl(folder / "train.jsonl"))
    judged = range(2, len(rows), 5)
    found = {row: whole.documents.read(row) for row in judged}
    paths = [
        Heldout(
            source=rows[row]["source"],
            prompt_tokens=len(rows[row]["prompt_ids"]),
            ids=document.input_ids_T.tolist(),
            aux_TLD=document.aux_TLD,
        )
        for row, document in found.items()
    ]
    others = [row for row in range(len(rows)) if row not in found]
    return dataclasses.replace(
        whole,
        name="anchor_split",
        digest=f"{whole.digest}-split",
        documents=Some(whole.documents, others),
        paths=paths,
    )


def anchor(folder: Path) -> Data:
    """Read train.jsonl and heldout.jsonl of a folder; the states are the target's own."""
    revision = read_json(TARGET / SIDECAR, hint="run `dvc repro target`")["revision"]
    files = [folder / name for name in ("train.jsonl", "heldout.jsonl")]
    digest = _digest([revision, *map(sha256_of, files)])
    rows, heldout = (list(read_jsonl(path)) for path in files)
    head = load_head(TARGET)
    layers = aux_layers(head.config["num_hidden_layers"])
    spans = [(len(r["prompt_ids"]), len(r["prompt_ids"] + r["reply_ids"])) for r in rows]
    kept = KEPT / f"anchor-{digest}"
    seen = [
        _states_of([r["prompt_ids"] + r["reply_ids"] for r in part], layers, kept / f"{name}.st")
        for name, part in (("train", rows), ("heldout", heldout))
    ]
    documents = Captured(tensors=seen[0], spans=spans)
    aux = seen[1]["aux"].float().split(seen[1]["lengths"].tolist())
    paths = [
        Heldout(
            source=r["source"],
            prompt_tokens=len(r["prompt_ids"]),
            ids=r["prompt_ids"] + r["reply_ids"],
            aux_TLD=aux_TLD,
        )
        for r, aux_TLD in zip(heldout, aux, strict=True)
    ]
    config = make_config(
        plain_shape(),
        head.config,
        aux_layers=layers,
        target_name=head.config.get("_name_or_path", ""),
        target_revision=revision,
    )
    counted = ((d.input_ids_T, d.reply_T) for d in map(documents.read, range(len(rows))))
    t2d_V = _vocabulary(count_tokens(counted, config.vocab_size), config)
    return Data(
        name="anchor",
        digest=digest,
        documents=documents,
        paths=paths,
        head=head,
        config=config,
        t2d_V=t2d_V,
        stop_ids=load_codec(read_params().section("target.codec", str), TARGET).stop_ids,
    )


def finished_run() -> Data:
    """Read this folder's run: its store and mixture, its held-out prompts decoded plainly."""
    params = read_params()
    inputs = read_inputs(params, open_store(MANIFEST, Path(params.knob("runtime", Runtime).store)))
    meta, settings = inputs.store.meta, params.section("evaluate", Evaluate)
    codec = load_codec(params.section("target.codec", str), TARGET)
    sources = params.section("merge.sources", tuple[str, ...])
    prompts = evaluate.read_prompts(sources, settings)
    config = make_config(
        plain_shape(),
        inputs.head.config,
        aux_layers=meta.layers,
        target_name=meta.target_name,
        target_revision=meta.target_revision,
    )
    rendered = [codec.render_prompt(prompt.messages, prompt.tools) for prompt in prompts]
    stop = settings.max_new_tokens, tuple(sorted(codec.stop_ids))
    paths = [
        Heldout(
            source=prompt.dataset,
            prompt_tokens=len(ids),
            ids=[*ids, *tensors["ids"].tolist()],
            aux_TLD=tensors["aux"],
        )
        for prompt, ids, tensors in zip(
            prompts,
            rendered,
            _greedy(rendered, meta.target_revision, meta.layers, stop),
            strict=True,
        )
    ]
    documents: StoredDocuments = inputs.train
    counts_V = count_tokens(
        zip(documents.input_ids, documents.replies, strict=True), config.vocab_size
    )
    return Data(
        name="run",
        digest=_digest([sha256_of(Path("data/hidden_states/manifest.json"))]),
        documents=documents,
        paths=paths,
        head=inputs.head,
        config=config,
        t2d_V=_vocabulary(counts_V, config),
        stop_ids=codec.stop_ids,
    )


def _greedy(
    prompts: Sequence[list[int]],
    revision: str,
    layers: tuple[int, ...],
    stop: tuple[int, tuple[int, ...]],
) -> list[dict[str, Tensor]]:
    """Return each prompt's greedy reply and the aux states along both; computed once."""
    kept = KEPT / f"greedy-{_digest([revision, str([prompts, layers, stop])])}.st"
    if not kept.is_file():
        target, found = Target(load_model(TARGET), layers), dict[str, Tensor]()
        for number, ids in enumerate(prompts):
            (plain,) = ac.decode_plain(target, [ids], max_new_tokens=stop[0], stop_ids=stop[1])
            assert plain.aux_TLD is not None
            found[f"ids.{number}"] = torch.tensor(plain.ids)
            found[f"aux.{number}"] = plain.aux_TLD.contiguous()
        with replacing(kept) as temporary:
            save_file(found, temporary)
    found = load_file(kept)
    return [{name: found[f"{name}.{n}"] for name in ("ids", "aux")} for n in range(len(prompts))]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _vocabulary(counts_V: Tensor, config: DrafterConfig) -> Tensor:
    codec = load_codec(read_params().section("target.codec", str), TARGET)
    forced = {*codec.special_ids, *codec.stop_ids, *codec.markup_ids}
    return choose_vocabulary(counts_V, config.draft_vocab_size, forced)


def _states_of(rows: Sequence[list[int]], layers: tuple[int, ...], kept: Path) -> dict[str, Tensor]:
    """Return ids, lengths, aux and final states of rows laid end to end; computed once."""
    if not kept.is_file():
        model, lengths = load_model(TARGET), [len(row) for row in rows]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for batch in batches(lengths, _BATCH_TOKENS):
            states = capture(model, [rows[row] for row in batch], layers)
            for row, one in zip(batch, states, strict=True):
                found[row] = (one.aux_TLD.bfloat16(), one.final_TD.bfloat16())
        tensors = {
            "ids": torch.tensor([i for row in rows for i in row]),
            "lengths": torch.tensor(lengths),
            "aux": torch.cat([found[row][0] for row in range(len(rows))]),
            "final": torch.cat([found[row][1] for row in range(len(rows))]),
        }
        with replacing(kept) as temporary:
            save_file(tensors, temporary)
    return load_file(kept)
