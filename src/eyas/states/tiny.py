"""Train a Llama of 1.7 million parameters from scratch on the project's own text, for tests.

Reads: data/sources/*.jsonl, README.md, docs/*.md. Writes: var/cache/tiny/<digest> (a target).
Source: the shape and rate measured for this size: AdamW 2.5e-3 cosine, 8 rows of 96 tokens a step.

Legend: B batch, T tokens, V vocabulary.
"""

import hashlib
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.files import read_jsonl, write_json
from eyas.records import canonical_json
from eyas.states.folder import save_configs, save_weights

DONE = "done.json"
CACHE = Path("var/cache/tiny")
_ROWS, _TOKENS = 8, 96
_LR, _WARMUP_STEPS, _CLIP_NORM = 2.5e-3, 20, 1.0
_PARAGRAPH_CHARS = 40  # shorter ones are headings and code fences
log = logging.getLogger("eyas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the weights, beside the text."""

    steps: int
    seed: int
    dtype: torch.dtype
    vocab_size: int = 2048
    hidden_size: int = 128
    layers: int = 8
    max_length: int = 4096


def project_texts(root: Path) -> list[str]:
    """Return the training text as ChatML documents, in a fixed order.

    Conversations keep their turns; a paragraph becomes a question (its first words) and an answer.
    """
    texts = []
    for path in sorted((root / "data/sources").glob("*.jsonl")):
        texts += [_chatml(row["messages"]) for row in read_jsonl(path) if row.get("messages")]
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if path.is_file():
            texts += _paragraphs(path.read_text(encoding="utf-8"))
    return texts


def cache_folder(plan: Plan, texts: list[str]) -> Path:
    """Return the folder of this training run; its name is the digest of plan and text."""
    settings = {**asdict(plan), "dtype": str(plan.dtype)}
    return CACHE / hashlib.sha256(canonical_json([settings, texts])).hexdigest()


def train(rows: list[list[int]], plan: Plan, folder: Path, *, vocab_size: int) -> float:
    """Train on documents given as ids and save into `folder`, DONE last; return the loss (nats)."""
    started = time.monotonic()
    stream = torch.tensor([i for row in rows for i in row])
    if len(stream) <= _TOKENS + 1:
        stream = stream.repeat(_TOKENS)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        model = _build(plan, vocab_size)
        loss = _optimise(model, stream, plan.steps)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    state = {
        k: v.to(plan.dtype)
        for k, v in model.state_dict().items()
        if not (tied and k == "lm_head.weight")
    }
    save_weights(state, folder)
    save_configs(model.config, folder)
    seconds = time.monotonic() - started
    log.info("tiny target: %d steps, loss %.2f, %.0f s", plan.steps, loss, seconds)
    write_json(folder / DONE, {"loss_nats": loss, "seconds": seconds, "tokens": len(stream)})
    return loss


def _chatml(messages: list[dict[str, Any]]) -> str:
    turns = (f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in messages)
    return "".join(turns)


def _paragraphs(text: str) -> list[str]:
    found = []
    for block in text.split("\n\n"):
        words = block.split()
        if len(block) >= _PARAGRAPH_CHARS:
            turns = [
                {"role": "user", "content": " ".join(words[:4])},
                {"role": "assistant", "content": block.strip()},
            ]
            found.append(_chatml(turns))
    return found


def _build(plan: Plan, vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.hidden_size * 8 // 3,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=plan.max_length,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        dtype=plan.dtype,
    )
    return LlamaForCausalLM(config).float().train()


def _optimise(model: Any, stream_T: torch.Tensor, steps: int) -> float:
    optimiser = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min((step + 1) / _WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    loss = torch.tensor(0.0)
    for _ in range(steps):
        starts_B = torch.randint(0, len(stream_T) - _TOKENS, (_ROWS,))
        ids_BT = torch.stack([stream_T[s : s + _TOKENS] for s in starts_B.tolist()])
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return float(loss.detach())
