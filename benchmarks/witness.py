"""How many replies of a finished run get the ids really sampled: from text, and from token texts.

The ids that the local target sampled are told anew as engines tell tokens: `bytes` (this endpoint),
`texts` (SGLang: a part of a character is U+FFFD), `late_texts` (vLLM: nothing, then the character
with its last token); each with the stop token and without. `line`: a line of data/responses with
pieces, as a multiple of one without; `body`: the same of an answer on its way, with `logprobs`.
`cpu_s`: rebuilding all replies from text, and from bytes. Prints one JSON line.

Run: python benchmarks/witness.py --run FOLDER (with models/target, data/prompts, data/responses)
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import orjson
from providers import RULES

from eyas.files import iter_records
from eyas.generation.pieces import read_pieces, write_pieces
from eyas.records import Piece, Prompt, Response
from eyas.tokens.audit import truth_metrics, witness_metrics
from eyas.tokens.codecs import load_codec
from eyas.tokens.rebuild import Rebuilt, rebuild_response

Pieces = tuple[Piece, ...]
SHOWN = ("replies_of_known_ids", "identical_share", "text_identical_share", "silent_mismatches")


def main() -> None:
    """Rebuild every reply in every form, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--codec", default="chatml")
    args = parser.parse_args()
    codec = load_codec(args.codec, args.run / "models/target")
    tasks = list(tasks_of(args.run / "data"))
    told = [[codec.bytes_of(i) for i in r.true_ids or ()] for _, r in tasks]
    stops = {codec.bytes_of(i) for i in codec.stop_ids}

    def rebuild(pieces: Sequence[Pieces | None], *, known: bool = True) -> list[Rebuilt]:
        return [
            rebuild_response(
                p, replace(r, pieces=one, true_ids=r.true_ids if known else None), codec, RULES
            )
            for (p, r), one in zip(tasks, pieces, strict=True)
        ]

    forms = {}
    for end, left_out in (("", set()), ("_without_stop", stops)):
        for name, form in FORMS.items():
            made = rebuild([form([t for t in tokens if t not in left_out]) for tokens in told])
            truth = truth_metrics(made)
            forms[name + end] = {key: truth[key] for key in SHOWN} | witness_metrics(made)
    whole = [as_bytes(tokens) for tokens in told]
    none: list[Pieces | None] = [None] * len(whole)
    bare, full = (
        sum(len(orjson.dumps(asdict(replace(r, true_ids=None, pieces=p)))) for r, p in pairs)
        for pairs in ([(r, None) for _, r in tasks], zip([r for _, r in tasks], whole, strict=True))
    )
    bodies = bare + sum(len(orjson.dumps(write_pieces(tokens))) for tokens in told)
    cpu_s = {
        "text": cpu_of(lambda: rebuild(none, known=False)),
        "bytes": cpu_of(lambda: rebuild(whole, known=False)),
    }
    sizes = {"line": round(full / bare, 2), "body": round(bodies / bare, 2)}
    print(json.dumps({"forms": forms, **sizes, "cpu_s": cpu_s, "tokens": sum(map(len, told))}))


def tasks_of(data: Path) -> Iterator[tuple[Prompt, Response]]:
    """Yield the replies whose true ids are known, with their prompts."""
    for path in sorted((data / "responses").glob("*.jsonl")):
        prompts = {p.id: p for p in iter_records(data / "prompts" / path.name, Prompt)}
        for response in iter_records(path, Response):
            if response.true_ids is not None:
                yield prompts[response.id], response


def as_bytes(tokens: Sequence[bytes]) -> Pieces:
    """Return what eyas makes of the answer of its own endpoint."""
    return read_pieces({"logprobs": write_pieces(tokens)}) or ()


def as_texts(tokens: Sequence[bytes]) -> Pieces:
    """Return pieces of an engine that decodes tokens one by one."""
    return tuple(token.decode(errors="replace") for token in tokens)


def as_late_texts(tokens: Sequence[bytes]) -> Pieces:
    """Return pieces of an engine that tells a character with its last token."""
    pieces, held = list[str](), b""
    for token in tokens:
        held += token
        text = held.decode(errors="replace")
        pieces.append("" if text.endswith("\N{REPLACEMENT CHARACTER}") else text)
        held = b"" if pieces[-1] else held
    return tuple(pieces)


FORMS: dict[str, Callable[[Sequence[bytes]], Pieces]] = {
    "bytes": as_bytes,
    "texts": as_texts,
    "late_texts": as_late_texts,
}


def cpu_of(work: Callable[[], object]) -> float:
    """Return the CPU-seconds of the second of two calls."""
    work()
    start_s = time.process_time()
    work()
    return round(time.process_time() - start_s, 3)


if __name__ == "__main__":
    main()
