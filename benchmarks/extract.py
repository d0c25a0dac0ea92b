"""Hold the extraction of hidden states against a bare prefill, and its two backends together.

Samples are the project's own texts in the target's ids. Times are CPU seconds, of this process or
of all the server's, and extraction takes turns with the bare prefill of the same batches, shard by
shard. The server computes both in one state; a bare request asks for no states.

Reads: models/target, data/sources, docs. Writes: two stores in a temporary folder. Prints JSON
lines; exits 1 where a bar is missed.

Run: python benchmarks/extract.py [--sglang] [--tokens N]; --sglang wants `make test-sglang` once
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import sglang_server
import torch
from workspace import sample_of

from eyas.desk.params import Params, read_params
from eyas.errors import EyasError
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.settings import Extract, Runtime
from eyas.stages import extract
from eyas.states import capturing
from eyas.states.capture_hf import Transformers, batches, capture
from eyas.states.capture_sglang import SGLang, fetch
from eyas.states.job import Job
from eyas.states.store import open_store
from eyas.states.target import load_model
from eyas.states.tiny import project_texts
from eyas.tokens.tokenizers import encode_texts

BAR = 0.9  # of the bare prefill's tokens per second
# float32 sums in another order: a shifted layer or a missing norm is 5 orders of magnitude off
EQUAL = 1e-4
LONGEST = 1000
LOG = sglang_server.ROOT / "var/sglang/capture.log"


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, default=Path("models/target"))
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--sglang", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    met = True
    with working_folder(given.target, given.tokens) as params:
        try:
            for line in transformers_lines(params):
                print(json.dumps(line), flush=True)
                met &= bool(line.get("met", True))
            for line in sglang_lines(params) if given.sglang else ():
                print(json.dumps(line), flush=True)
                met &= bool(line.get("met", True))
        except EyasError as error:
            sys.exit(f"extract: {error}")
    sys.exit(not met)


@contextlib.contextmanager
def working_folder(target: Path, tokens: int) -> Generator[dict[str, Any]]:
    """Stand in a temporary folder with the target and a mixture; give its parameters."""
    tree = read_params().tree()
    tree["runtime"] |= {"tracking": "off", "threads": 1}
    tree["extract"] |= {"shard_tokens": 4096, "batch_tokens": 2048}
    tree["extract"] |= {"codec": "fp32", "final_codec": "fp32"}  # for the equality
    target, samples = target.resolve(), project_samples(target, tokens)
    with tempfile.TemporaryDirectory(prefix="eyas-extract-") as name, contextlib.chdir(name):
        Path("models").mkdir()
        Path("models/target").symlink_to(target)
        write_samples(capturing.MIXTURE / "train.parquet", samples[:-1])
        write_samples(capturing.MIXTURE / "val.parquet", samples[-1:])
        yield tree


def project_samples(target: Path, tokens: int) -> list[Sample]:
    """Return samples of 30 to 1,000 tokens, `tokens` in all: texts alone and joined."""
    rows, taken = encode_texts(target, project_texts(sglang_server.ROOT)), 0
    samples: list[Sample] = []
    while taken < tokens:
        ids: list[int] = []
        for _ in range(1 + len(samples) % 5):
            ids += rows.pop()
        ids = ids[:LONGEST]
        samples.append(sample_of(len(samples), ids))
        taken += len(ids)
    return samples


def transformers_lines(tree: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Compare speed with a bare prefill's, and a batch with its rows alone."""
    params = Params(tree)
    job = capturing.read_job(
        params.section("extract", Extract), Path(params.knob("runtime", Runtime).store)
    )
    job.folder.mkdir(parents=True)
    backend = capturing.make_backend(job, params.knob("runtime", Runtime), None)
    assert isinstance(backend, Transformers)
    model = load_model(capturing.TARGET)

    @torch.inference_mode()
    def bare(samples: list[Sample]) -> None:
        for group in batches([len(s.input_ids) for s in samples], job.settings.batch_tokens):
            rows = [torch.tensor(samples[row].input_ids) for row in group]
            ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            model.get_decoder()(input_ids=ids_BT, use_cache=False)

    yield {"what": "transformers", **compare_speed(job, backend, bare, time.process_time)}
    report = extract.work(params)
    yield {"what": "extract", "backend": "transformers", **report.metrics}
    ids = sorted((list(s.input_ids) for s in job.samples), key=len)[
        :: max(1, len(job.samples) // 6)
    ]
    together = capture(model, ids, job.layers)
    alone = [capture(model, [row], job.layers)[0] for row in ids]
    worst = max(
        float((a.aux_TLD - b.aux_TLD).abs().max() / b.aux_TLD.abs().max())
        for a, b in zip(together, alone, strict=True)
    )
    line: dict[str, object] = {"what": "batched equals single", "rows": len(ids)}
    yield line | {"largest_relative": worst, "bar": EQUAL, "met": worst <= EQUAL}


def compare_speed(
    job: Job,
    backend: Transformers | SGLang,
    bare: Callable[[list[Sample]], None],
    cpu_s: Callable[[], float],
) -> dict[str, object]:
    """Take turns, a shard each, twice; return both speeds in tokens a CPU second."""
    spent = {"bare": 0.0, "extract": 0.0}
    tokens = 0
    for _turn in range(2):
        for number, run in enumerate(job.runs):
            samples = [job.samples[row] for row in run]
            for name in spent:
                began = cpu_s()
                if name == "bare":
                    bare(samples)
                else:
                    backend.make_shard(job.path(number), samples, lambda _tokens: None)
                spent[name] += cpu_s() - began
            tokens += job.tokens(number)
    ratio = spent["bare"] / spent["extract"]
    speeds = {f"{name}_tokens_per_cpu_s": round(tokens / s, 1) for name, s in spent.items()}
    return {"tokens": tokens, **speeds, "ratio": round(ratio, 4), "bar": BAR, "met": ratio >= BAR}


def sglang_lines(tree: dict[str, Any], *, speed: bool = True) -> Iterator[dict[str, object]]:
    """Compare a server's states with those found above, and its speed with a bare prefill's."""
    theirs = open_store(extract.MANIFEST, Path(tree["runtime"]["store"]))
    tree["extract"] |= {"backend": "sglang", "compute_dtype": "float32"}
    job = capturing.read_job(
        Params(tree).section("extract", Extract), Path(Params(tree).knob("runtime", Runtime).store)
    )
    flags = sglang_server.capturing(capturing.TARGET.resolve(), job.layers)
    store = {"EYAS_STORE": str(Path(tree["runtime"]["store"]).resolve())}
    with sglang_server.serving(flags, log=LOG, environment=store) as url:
        tree["runtime"]["extract"] |= {"servers": [url], "patience_s": 0}
        params = Params(tree)
        report = extract.work(params)
        yield {"what": "extract", "backend": "sglang", **report.metrics}
        yield equality(theirs, tree)
        if not speed:
            return
        backend = capturing.make_backend(job, params.knob("runtime", Runtime), None)
        assert isinstance(backend, SGLang)

        def bare(samples: list[Sample]) -> None:
            for group in batches([len(s.input_ids) for s in samples], job.settings.batch_tokens):
                body = {"input_ids": [list(samples[row].input_ids) for row in group]}
                body |= {"sampling_params": {"temperature": 0, "max_new_tokens": 1}}
                fetch(f"{url}/generate", body)

        scratch = replace(job, folder=job.folder.with_name("0" * 32))
        scratch.folder.mkdir()
        yield {"what": "sglang"} | compare_speed(scratch, backend, bare, server_cpu_s)


def server_cpu_s() -> float:
    """Return the CPU seconds of this process's children, the server's processes."""
    times = [p.cpu_times() for p in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


def equality(theirs: Any, tree: dict[str, Any]) -> dict[str, object]:
    """Return the largest difference of two stores of the same samples, by field and layer."""
    ours = open_store(extract.MANIFEST, Path(tree["runtime"]["store"]))
    worst, sizes = {"aux": 0.0, "final": 0.0}, {"aux": 0.0, "final": 0.0}
    for name in theirs.samples:
        a, b = theirs.read(name), ours.read(name)
        for field, x, y in (("aux", a.aux_TLD, b.aux_TLD), ("final", a.final_TD, b.final_TD)):
            worst[field] = max(worst[field], float((x - y).abs().max()))
            sizes[field] = max(sizes[field], float(x.abs().max()))
    relative = max(worst[field] / sizes[field] for field in worst)
    line: dict[str, object] = {"what": "backends equal", "samples": len(theirs.samples)}
    line |= {"largest_difference": worst, "largest_value": sizes, "relative": relative}
    return line | {"bar": EQUAL, "met": relative <= EQUAL}


if __name__ == "__main__":
    main()
