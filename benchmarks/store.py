"""Measure the hidden-state store: bytes a token, error, speed of each codec, speed of reading.

Reads: models/target and data/mixture of a working folder, or data/hidden_states/manifest.json and
its shards, for states of a real target; without either the error lines say that they were skipped.
Writes: a store in a temporary folder. Prints JSON lines; every time is CPU time of one thread.

Run: python benchmarks/store.py [--folder WORKING_FOLDER]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from eyas.parquet import read_samples
from eyas.records import Sample
from eyas.states import shards
from eyas.states.capture_hf import capture
from eyas.states.codecs import StateCodec, state_codec
from eyas.states.layout import Captured, Layout, make_layout
from eyas.states.size import bytes_per_token
from eyas.states.store import POST_NORM, Manifest, Store, StoredSample, StoreMeta, open_store
from eyas.states.target import aux_layers, load_model

CODECS = ("bf16", "fp8", "int4")
# (codec, final_codec, final_rows), and the share of 8 H + 16 bytes it may take at 30 % supervised
LAYOUTS = (
    (("bf16", "bf16", "all"), None),
    (("bf16", "bf16", "supervised"), None),
    (("fp8", "fp8", "supervised"), 0.5),
    (("int4", "fp8", "supervised"), 0.25),
)
SIZES = (576, 7168)
LAYERS = (1, 14, 26)


def bytes_lines() -> Iterator[dict[str, object]]:
    """Compare a token with 8 H + 16 bytes: four bf16 vectors and what goes with them."""
    for hidden_size in SIZES:
        for share in (0.3, 1.0):
            for options, bar in LAYOUTS:
                layout = make_layout(*options)
                kept = 1.0 if layout.final_rows == "all" else share
                size = bytes_per_token(
                    layout, num_layers=3, hidden_size=hidden_size, final_share=kept
                )
                ratio = size / (8 * hidden_size + 16)
                line = {"what": "bytes", "hidden_size": hidden_size, "supervised": share}
                line |= named(options) | {"bytes_per_token": round(size, 1)}
                line |= {"ratio": round(ratio, 4)}
                yield line | ({"bar": bar, "met": ratio <= bar} if bar and share < 1 else {})


def error_lines(folder: Path, tokens: int) -> Iterator[dict[str, object]]:
    """Give each codec's mean error of a vector, relative to its norm, layer by layer."""
    found = real_states(folder, tokens)
    if found is None:
        reason = f"neither models/target and data/mixture nor a bf16 store in {folder.name or '.'}"
        yield {"what": "error", "skipped": reason}
        return
    source, states_TLD = found
    for name in CODECS:
        codec = state_codec(name)
        got_TLD = codec.decode(codec.encode(states_TLD), states_TLD.shape[-1])
        error_L = ((got_TLD - states_TLD).norm(dim=-1) / states_TLD.norm(dim=-1)).mean(0)
        errors = [round(error, 5) for error in error_L.tolist()]
        yield {
            "what": "error",
            "codec": name,
            "of": source,
            "tokens": len(states_TLD),
            "relative_error": dict(
                zip(("layer 1", "middle", "deep", "final"), errors, strict=True)
            ),
        }


def real_states(folder: Path, tokens: int) -> tuple[str, torch.Tensor] | None:
    """Return float32 aux and final states [T, 4, D] of a target, and where they come from."""
    target, mixture = folder / "models/target", folder / "data/mixture/train.parquet"
    manifest = folder / "data/hidden_states/manifest.json"
    if target.is_dir() and mixture.is_file():
        model = load_model(target)
        layers = aux_layers(model.config.get_text_config().num_hidden_layers)
        rows = (capture(model, [s.input_ids], layers)[0] for s in read_samples(mixture))
        return "the target in float32", joined(rows, tokens)
    if manifest.is_file():
        store = open_store(manifest, folder / "var/states")
        if store.meta.codec == store.meta.final_codec == "bf16" and store.meta.final_rows == "all":
            read = (store.read(sample_id) for sample_id in store.samples)
            rows = (Captured(aux_TLD=s.aux_TLD, final_TD=s.final_TD) for s in read)
            return "the store's bf16 states", joined(rows, tokens)
    return None


def joined(rows: Iterator[Captured], tokens: int) -> torch.Tensor:
    """Put samples of this many tokens end to end, each final state behind its layers."""
    found: list[torch.Tensor] = []
    while sum(map(len, found)) < tokens and (row := next(rows, None)):
        found.append(torch.cat([row.aux_TLD, row.final_TD[:, None]], dim=1))
    return torch.cat(found)


def speed_lines() -> Iterator[dict[str, object]]:
    """Time encode and decode over 8 MB of Gaussian float32 vectors, about a sample."""
    for hidden_size in SIZES:
        states = torch.randn(2**21 // (3 * hidden_size), 3, hidden_size)
        for name in CODECS:
            yield {"what": "speed", "codec": name, "hidden_size": hidden_size} | speed(
                state_codec(name), states
            )


def speed(codec: StateCodec, states: torch.Tensor) -> dict[str, object]:
    """Return GB/s of float32 states in and out."""
    parts = codec.encode(states)
    encode_s = seconds(lambda: codec.encode(states))
    decode_s = seconds(lambda: codec.decode(parts, states.shape[-1]))
    return {
        "encode_gb_per_s": round(states.nbytes / encode_s / 1e9, 2),
        "decode_gb_per_s": round(states.nbytes / decode_s / 1e9, 2),
    }


def seconds(call: Callable[[], object], *, times: int = 5) -> float:
    """Return the least CPU time of a few calls."""
    found = []
    for _ in range(times):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return min(found)


def read_lines(hidden_size: int) -> Iterator[dict[str, object]]:
    """Read and decode a store by samples, and its file in one piece; both from the page cache."""
    samples = [sample(number, 200) for number in range(40)]
    for options, _ in LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="eyas-store-") as name:
            store, path = write_store(Path(name), samples, make_layout(*options), hidden_size)
            verify_s = seconds(lambda path=path: shards.kept_shard(path))
            store.read("s0")
            read_s = seconds(lambda store=store: [store.read(s.id) for s in samples])
            raw_s = seconds(path.read_bytes)
            size = path.stat().st_size
        yield (
            {"what": "read", "hidden_size": hidden_size}
            | named(options)
            | {
                "store_mb": round(size / 1e6, 1),
                "read_gb_per_s": round(size / read_s / 1e9, 2),
                "raw_gb_per_s": round(size / raw_s / 1e9, 2),
                "verify_gb_per_s": round(size / verify_s / 1e9, 2),
                "tokens_per_s": round(sum(len(s.input_ids) for s in samples) / read_s),
            }
        )


def write_store(
    folder: Path, samples: list[Sample], layout: Layout, hidden_size: int
) -> tuple[Store, Path]:
    """Write one shard of Gaussian states; return its store and file."""
    path = shards.shard_path(folder / "key", 0)
    path.parent.mkdir(parents=True)
    length = len(samples[0].input_ids)
    states = [
        Captured(
            aux_TLD=torch.randn(length, 3, hidden_size), final_TD=torch.randn(length, hidden_size)
        )
        for _ in samples
    ]
    shard = shards.write_shard(path, samples, states, layout)
    meta = StoreMeta(
        key="key",
        target_name="noise",
        target_revision="",
        template="",
        layers=LAYERS,
        layer_axis="layer outputs",
        hidden_size=hidden_size,
        codec=layout.aux.label,
        compute_dtype="float32",
        final=POST_NORM,
        final_codec=layout.final.label,
        final_rows=layout.final_rows,
    )
    stored = [
        StoredSample(
            id=s.id, split="train", shard=0, offset=n * length, length=length, spans=s.spans
        )
        for n, s in enumerate(samples)
    ]
    return Store(Manifest(meta=meta, shards=(shard,), samples=tuple(stored)), folder), path


def sample(number: int, length: int) -> Sample:
    """Return a sample of which 30 % are supervised."""
    return Sample(
        id=f"s{number}",
        dataset="noise",
        input_ids=tuple(range(length)),
        spans=((length * 7 // 10, length),),
        temperature=0.0,
        provider="",
        flags=(),
        completion_tokens_billed=None,
    )


def named(options: tuple[str, str, str]) -> dict[str, object]:
    """Return a layout's options by name."""
    return dict(zip(("codec", "final_codec", "final_rows"), options, strict=True))


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="working folder of a run")
    parser.add_argument("--tokens", type=int, default=4096, help="for the error lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({"what": "machine", "threads": 1, **about}))
    for lines in (bytes_lines(), error_lines(options.folder, options.tokens), speed_lines()):
        for line in lines:
            print(json.dumps(line), flush=True)
    for hidden_size in SIZES:
        for line in read_lines(hidden_size):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
