"""Measure reconstruct, validate and merge on a synthetic data set of any size.

Makes prompts and honestly billed responses out of this repository's own text, then runs the three
stages as DVC does, each a process of its own. One sample in 14 is 16,000 tokens long, the others
have like lengths; random windows of text make up every one. With Kimi's tokenizer the responses
have reasoning. Prints one JSON line: tokens/s is over reconstruct and validate, their start
included; the load average tells whether the cores were free.

Run: python benchmarks/tokens.py --samples 40000 --tokens 138000000 --tokenizer ../shared/kimi
"""

import argparse
import json
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from witness import as_bytes

from eyas.files import read_json, write_json, write_jsonl
from eyas.records import Prompt, Response
from eyas.tokens.codecs import Codec, ReplyParts, load_codec

ROOT = Path(__file__).parents[1]
NAME = "synthetic"
LONG_EVERY, LONG_TOKENS = 14, 16_000
PROMPT_SHARE = 0.3  # of a sample's tokens
POLL_S = 0.1
METRICS = {
    "reconstruct": f"reconstruct-{NAME}",
    "validate": f"validate-{NAME}",
    "merge": "merge",
    "corpus": "corpus",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one stage took; memory in bytes, over all of its processes."""

    wall_s: float
    cpu_s: float
    peak_process: int
    peak_all: int


def main() -> None:
    """Make the corpus, run the stages, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=138_000_000)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/target"), metavar="DIR")
    parser.add_argument("--pieces", action="store_true", help="the responses have token texts")
    given = parser.parse_args()
    if given.tokens < given.samples * 64:
        parser.error("expected at least 64 tokens a sample")
    with tempfile.TemporaryDirectory(prefix="eyas-tokens-") as name:
        folder = Path(name)
        maker = multiprocessing.get_context("spawn").Process(target=lay_out, args=(folder, given))
        maker.start()
        maker.join()
        if maker.exitcode:
            sys.exit(maker.exitcode)
        stages = {stage: run(stage, folder) for stage in ("reconstruct", "validate", "merge")}
        counts = {s: read_json(folder / f"metrics/{f}.json") for s, f in METRICS.items()}
    print(json.dumps(line_of(stages, counts)))


def line_of(stages: dict[str, Ran], counts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures; tokens are all that were made, those of rejected samples too."""
    both = [stages["reconstruct"], stages["validate"]]
    tokens = counts["corpus"]["tokens"]
    mib = 1 << 20
    return {
        "samples": counts["corpus"]["samples"],
        "samples_kept": counts["validate"]["rows_out"],
        "tokens": tokens,
        "tokens_per_s": round(tokens / sum(r.wall_s for r in both)),
        "tokens_per_cpu_s": round(tokens / sum(r.cpu_s for r in both)),
        "peak_rss_process_mib": max(r.peak_process for r in stages.values()) // mib,
        "peak_rss_all_mib": max(r.peak_all for r in stages.values()) // mib,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "merge_minutes": round(stages["merge"].wall_s / 60, 3),
        **{f"{name}_s": round(r.wall_s, 2) for name, r in stages.items()},
        **{f"{name}_cpu_s": round(r.cpu_s, 2) for name, r in stages.items()},
        **{f"{name}_peak_all_mib": r.peak_all // mib for name, r in stages.items()},
    }


def lay_out(folder: Path, given: argparse.Namespace) -> None:
    """Write params.yaml, target, prompts and responses into a working folder."""
    (folder / "models").mkdir()
    (folder / "models/target").symlink_to(given.tokenizer.resolve())
    kimi = (given.tokenizer / "tiktoken.model").is_file()
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["target"]["codec"] = "kimi_k2_5" if kimi else "chatml"
    params["runtime"] |= {"tracking": "off"}
    some = next(d for d in params["datasets"].values() if d["kind"] == "prompts")
    params["datasets"] = {NAME: some}
    params["merge"] |= {"sources": [NAME], "caps": {}, "max_tokens": 32_768}
    (folder / "params.yaml").write_text(yaml.safe_dump(params | {"select": None}), "utf-8")
    pairs = list(pairs_of(given, load_codec(params["target"]["codec"], folder / "models/target")))
    write_jsonl(folder / f"data/prompts/{NAME}.jsonl", (prompt for prompt, _ in pairs))
    write_jsonl(folder / f"data/responses/{NAME}.jsonl", (response for _, response in pairs))
    tokens = sum(response.prompt_tokens + response.completion_tokens for _, response in pairs)
    write_json(folder / "metrics/corpus.json", {"samples": len(pairs), "tokens": tokens})


def pairs_of(given: argparse.Namespace, codec: Codec) -> Iterator[tuple[Prompt, Response]]:
    """Yield prompts and responses whose samples have about the wanted number of tokens."""
    text = repository_text()
    chars_a_token = len(text) / len(codec.reply_ids(ReplyParts(content=text), "length"))
    source = random.Random(0)
    short = (given.tokens - given.samples // LONG_EVERY * LONG_TOKENS) / (
        given.samples - given.samples // LONG_EVERY
    )
    mean = given.tokens / given.samples
    for number in range(given.samples):
        is_long = number % LONG_EVERY == LONG_EVERY - 1 and short > 0
        tokens = LONG_TOKENS if is_long else (short if short > 0 else mean)
        length = int(tokens * source.uniform(0.8, 1.2) * chars_a_token)
        asked = int(length * PROMPT_SHARE)
        texts = window(text, asked, source), window(text, length - asked, source)
        yield pair_of(number, texts, codec, pieces=given.pieces)


def window(text: str, length: int, source: random.Random) -> str:
    """Return that many characters from a random place, which may run over the end."""
    start = source.randrange(len(text))
    return (text[start:] + text * (length // len(text) + 1))[:length]


def pair_of(
    number: int, texts: tuple[str, str], codec: Codec, *, pieces: bool
) -> tuple[Prompt, Response]:
    """Return a prompt and a response that is billed by the codec's own count."""
    asked, said = texts
    half = len(said) // 2 if codec.markup_ids else 0
    reply = ReplyParts(content=said[half:], reasoning=said[:half] or None)
    messages = ({"role": "user", "content": asked},)
    ids = codec.reply_ids(reply, "stop")
    prompt_tokens = len(codec.render_prompt(messages, ()))
    prompt = Prompt(
        id=f"p{number}",
        dataset=NAME,
        upstream_id=str(number),
        messages=messages,
        tools=(),
        prompt_tokens=prompt_tokens,
        partition="short",
        licence="Apache-2.0",
    )
    response = Response(
        id=prompt.id,
        fingerprint=f"f{number}",
        sample=0,
        model="synthetic",
        provider="synthetic",
        generation_id=f"g{number}",
        reasoning=reply.reasoning,
        content=reply.content,
        tool_calls=(),
        finish_reason="stop",
        native_finish_reason="stop",
        prompt_tokens=prompt_tokens,
        completion_tokens=len(ids),
        cost_usd=0.0,
        latency_s=1.0,
        attempts=1,
        source="imported",
        sampling={"temperature": 1.0},
        usage={},
        pieces=as_bytes([codec.bytes_of(i) for i in ids]) if pieces else None,
    )
    return prompt, response


def repository_text() -> str:
    """Return the text of documents, sources and prompts, without what spells a special token."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")])
    files += sorted(ROOT.glob("data/sources/*.jsonl"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for marker in ("<|", "|>", "<think>", "</think>", "[EOS]", "[BOS]", "[PAD]", "[UNK]"):
        text = text.replace(marker, " ")
    return text


def run(stage: str, folder: Path) -> Ran:
    """Run a stage in the folder as dvc.yaml does, watching its processes."""
    words = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["vars"][0]["run"]
    select = [] if stage == "merge" else [f"select={NAME}"]
    command = [sys.executable, "-m", f"eyas.stages.{stage}", *shlex.split(words), *select]
    started, peaks = time.monotonic(), dict[int, int]()
    together = 0
    with subprocess.Popen(command, cwd=folder, stdout=sys.stderr) as process:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            now = {p: resident(p) for p in [process.pid, *children(process.pid)]}
            together = max(together, sum(now.values()))
            peaks |= {p: max(peaks.get(p, 0), size) for p, size in now.items()}
            time.sleep(POLL_S)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{stage} failed")
    return Ran(
        wall_s=time.monotonic() - started,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_process=usage.ru_maxrss * 1024,
        peak_all=max(together, usage.ru_maxrss * 1024),
    )


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, on Linux."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def resident(pid: int) -> int:
    """Return the bytes that a process holds in memory now; 0 for one that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
