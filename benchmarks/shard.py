"""What a rank of training holds, with and without `runtime.train.shard`: bytes and seconds a step.

A random drafter of the given width takes a few steps on noise, as `train` does. Rank 0 prints a
JSON line, in bytes a parameter: weights and moments that it keeps between steps; its memory then,
and at its highest, above the level before the drafter was made. glibc keeps freed blocks below
32 MB; the matrices of a large drafter are above, those of this one are to be so too.

Run: MALLOC_MMAP_THRESHOLD_=1000000 torchrun --nproc-per-node 2 benchmarks/shard.py [--shard]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eyas.desk.params import read_params
from eyas.drafter import ranks
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Document, Packer
from eyas.drafter.training import Corpus, Run
from eyas.settings import Train

VOCABULARY, DOCUMENTS, TOKENS = 8192, 8, 128


class Noise:
    """Documents of random states, the same on every rank."""

    def __init__(self, width: int) -> None:
        self.lengths, self._width = [TOKENS] * DOCUMENTS, width

    def read(self, index: int) -> Document:
        """Return a document that is one reply."""
        generator = torch.Generator().manual_seed(index)
        return Document(
            input_ids_T=torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
            reply_T=torch.ones(TOKENS, dtype=torch.int32),
            aux_TLD=torch.randn(TOKENS, 3, self._width, generator=generator),
            final_TD=torch.randn(TOKENS, self._width, generator=generator),
        )


def main() -> None:
    """Read the arguments, step, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--width", type=int, default=1024, help="at least 256")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ranks.joined():
        found = measure(given.width, given.steps, shard=given.shard)
        if ranks.leads():
            print(json.dumps(found))


def measure(width: int, steps: int, *, shard: bool) -> dict[str, object]:
    """Take the steps; return what this rank held."""
    corpus, before = corpus_of(width), memory()
    drafter = Drafter(config_of(width), torch.ones(VOCABULARY, dtype=torch.bool))
    random_start(drafter, 0)
    sizes = {"tokens_per_step": TOKENS * DOCUMENTS, "epochs": steps, "soup": 1, "dtype": "float32"}
    settings = Train(**read_params().value("train") | sizes)
    run = Run(drafter, corpus, settings)
    parameters = sum(p.numel() for p in drafter.parameters())
    if shard:
        run.shard()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the highest so far
    run.advance(0)
    begun_s = time.monotonic()
    for step in range(1, steps):
        run.advance(step)
    step_s = (time.monotonic() - begun_s) / (steps - 1)
    held = [t for p in run.held.parameters for t in (p, *run.optimizer.state[p].values())]
    after = memory()
    return {
        "ranks": ranks.size(),
        "shard": shard,
        "parameters": parameters,
        "held_bytes_a_parameter": round(sum(map(own_bytes, held)) / parameters, 2),
        "rss_between_steps_bytes_a_parameter": round((after[0] - before[0]) / parameters, 2),
        "rss_highest_bytes_a_parameter": round((after[1] - before[0]) / parameters, 2),
        "step_s": round(step_s, 3),
    }


def own_bytes(tensor: Tensor) -> int:
    """Return the bytes that lie on this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def memory() -> tuple[int, int]:
    """Return resident memory, and the highest, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    now, highest = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, highest


def corpus_of(width: int) -> Corpus:
    """Return noise to train on, and a noisy target."""
    head_VD = torch.randn(VOCABULARY, width)

    def favourites(final_PD: Tensor) -> Tensor:
        return (final_PD @ head_VD.T).argmax(-1)

    packer = Packer(Noise(width), favourites, torch.ones(VOCABULARY, dtype=torch.bool))
    return Corpus(
        train=packer,
        val=packer,
        embed_VD=torch.randn(VOCABULARY, width),
        head_ND=head_VD,
        aux_scale_LD=torch.ones(3, width),
    )


def config_of(width: int) -> DrafterConfig:
    """Return a drafter like Llama's."""
    return DrafterConfig(
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        head_dim=64,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=2048,
        aux_layers=(1, 2, 3),
        target_name="noise",
        target_revision="0",
        bos_token_id=None,
        eos_token_id=None,
    )


if __name__ == "__main__":
    main()
