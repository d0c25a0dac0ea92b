"""The batch of a training-step comparison: a made-up one of a config's sizes, or a batch file.

Reads: a config (JSON, sizes of the drafter and of the batch) and maybe a batch (safetensors;
`shared.safetensors` beside it, if there, holds the tensors that many batches have in common).

Legend: B rows, T tokens, D hidden size, V target vocabulary, N draft vocabulary.
Source: the batch format is that of the kit that the peers' steps were first run with.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

Config = dict[str, Any]
_DRAFT = "draft."


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One conversation; `mask_T` is True where the token belongs to a reply."""

    input_ids_T: Tensor
    mask_T: Tensor
    aux_TE: Tensor  # three layers, side by side
    final_TD: Tensor  # after the target's last norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Documents, the frozen parts of the target, and the drafter's start by SGLang's names."""

    documents: list[Document]
    embed_VD: Tensor
    head_VD: Tensor
    d2t_N: Tensor
    t2d_V: Tensor
    start: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        """Real tokens, padding left out."""
        return sum(len(document.input_ids_T) for document in self.documents)


class Step(Protocol):
    """A training step of some project."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Return what is trained, by SGLang's names."""
        ...

    def gradients(self) -> float:
        """Do forward and backward under SpecForge's convention; return the loss."""
        ...

    def advance(self) -> None:
        """Do one whole optimiser step: forward, backward, clip, AdamW."""
        ...


StepMaker = Callable[[Config, Batch, str], Step]


def read_config(path: Path) -> Config:
    """Return a config; the name is the file's where it has none."""
    return {"name": path.stem} | json.loads(path.read_text(encoding="utf-8"))


def read_batch(path: Path) -> Batch:
    """Return the batch of a file, floats in float32."""
    shared = path.with_name("shared.safetensors")
    tensors = (load_file(shared) if shared.is_file() else {}) | load_file(path)
    return _batch({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})


def start_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every trained tensor, in the order in which they are drawn."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "hidden_norm": (width,),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, 2 * width),
        "self_attn.k_proj": (keys, 2 * width),
        "self_attn.v_proj": (keys, 2 * width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 3 * width)}
    shapes |= {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (width,), "lm_head.weight": (config["draft_vocab_size"], width)}


def made_up(config: Config) -> Batch:
    """Return a seeded batch that can be learnt: final states follow token and previous state."""
    generator = torch.Generator().manual_seed(config["seed"])
    tensors = _target(config, generator)
    rows, length, width = config["batch_size"], config["seq_len"], config["hidden_size"]
    used_N = tensors["t2d"].nonzero().flatten()
    drawn_BT = torch.randint(0, len(used_N), (rows, length), generator=generator)
    rare_BT = torch.rand(rows, length, generator=generator) < 0.03
    other_BT = torch.randint(0, config["vocab_size"], (rows, length), generator=generator)
    ids_BT = torch.where(rare_BT, other_BT, used_N[drawn_BT])
    aux = torch.randn(rows, length, 3 * width, generator=generator)
    embedded = tensors["target.embed_tokens.weight"][ids_BT]
    final = 2 * embedded + aux[..., -width:].roll(1, dims=1)
    final = final + 0.3 * torch.randn(rows, length, width, generator=generator)
    final = final / final.square().mean(-1, keepdim=True).sqrt()
    final[..., 0] += 3.0  # with _target's head: the favourite mostly lies in the draft vocabulary
    return _batch(
        {
            **tensors,
            "input_ids": ids_BT,
            "loss_mask": _reply_mask(config).repeat(rows, 1),
            "aux_hidden_states": aux,
            "last_hidden_state": final,
        }
    )


def _target(config: Config, generator: torch.Generator) -> dict[str, Tensor]:
    vocab, width = config["vocab_size"], config["hidden_size"]
    used_N = torch.randperm(vocab, generator=generator)[: config["draft_vocab_size"]].sort().values
    t2d_V = torch.zeros(vocab, dtype=torch.bool)
    t2d_V[used_N] = True
    head_VD = torch.randn(vocab, width, generator=generator) * (2 / math.sqrt(width))
    head_VD[t2d_V, 0] += 1.0
    tensors = {
        "target.lm_head.weight": head_VD,
        "target.embed_tokens.weight": torch.randn(vocab, width, generator=generator) * 0.5,
        "d2t": used_N - torch.arange(len(used_N)),
        "t2d": t2d_V,
    }
    for name, shape in start_shapes(config).items():
        ones = len(shape) == 1
        drawn = torch.ones(shape) if ones else torch.randn(shape, generator=generator) * 0.02
        tensors[_DRAFT + name] = drawn
    return tensors


def _reply_mask(config: Config) -> Tensor:
    """Return [T]: equal turns, the last part of each is the reply."""
    turn_T = torch.arange(config["seq_len"]) * config["supervised_spans"] / config["seq_len"]
    return turn_T - turn_T.floor() >= 1 - config["supervised_fraction"] - 1e-9


def _batch(tensors: dict[str, Tensor]) -> Batch:
    return Batch(
        documents=list(_documents(tensors)),
        embed_VD=tensors["target.embed_tokens.weight"],
        head_VD=tensors["target.lm_head.weight"],
        d2t_N=tensors["d2t"],
        t2d_V=tensors["t2d"].bool(),
        start={k.removeprefix(_DRAFT): v for k, v in tensors.items() if k.startswith(_DRAFT)},
    )


def _documents(tensors: dict[str, Tensor]) -> Iterator[Document]:
    """Yield the rows, or the documents packed in them (number -1 is padding)."""
    ids_BT = tensors["input_ids"]
    numbers_BT = tensors.get("document_ids", torch.zeros_like(ids_BT))
    for row, numbers_T in enumerate(numbers_BT):
        for number in numbers_T.unique().tolist():
            if number < 0:
                continue
            at = (numbers_T == number).nonzero().flatten()
            yield Document(
                input_ids_T=ids_BT[row, at],
                mask_T=tensors["loss_mask"][row, at].bool(),
                aux_TE=tensors["aux_hidden_states"][row, at],
                final_TD=tensors["last_hidden_state"][row, at],
            )


def specforge_counts(document: Document, batch: Batch) -> Tensor:
    """Return SpecForge's mask, bool [T]: the rows of a document that carry loss at TTT step 0.

    Row t counts iff x[t] is in a reply, x[t+1] exists, and the target's favourite there is in the
    draft vocabulary. At step k it counts iff row t+k does here.
    """
    chunks = [(rows @ batch.head_VD.T).argmax(-1) for rows in document.final_TD[1:].split(256)]
    counts_T = document.mask_T.clone()
    counts_T[:-1] &= batch.t2d_V[torch.cat(chunks)]
    counts_T[-1] = False
    return counts_T
