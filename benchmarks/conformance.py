"""Compare the Kimi codec with texts and ids that the official tokenizer class made.

Prints one JSON line, {"ok": n, "total": n, "failed": ["name: what differs"]}; exits 1 if any did.
A line of --cases has messages, tools, kwargs, and text, ids or ids_sha256; one of --completions has
the parts of a reply and completion_ids; one of --encodings text and ids, specials not parsed.

Run: python benchmarks/conformance.py --tokenizer ../shared/kimi --cases FILE.jsonl
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.kimi import NEEDED, Kimi
from eyas.tokens.codecs.kimi_prompt import RELEASES, Release, render_prompt
from eyas.tokens.codecs.kimi_reply import IMPLICIT_THINK_END
from eyas.tokens.codecs.kimi_tokenizer import KimiTokenizer, load_tokenizer

Case = dict[str, Any]
_SHOWN = 40  # characters, on each side of the first difference


def main() -> None:
    """Read the arguments, compare every line of the file, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kind = parser.add_mutually_exclusive_group(required=True)
    for name in CHECKS:
        kind.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("--release", choices=sorted(RELEASES), default="kimi_k2_5")
    given = parser.parse_args()
    name = next(name for name in CHECKS if getattr(given, name))
    tokenizer, release = load_tokenizer(given.tokenizer, NEEDED), RELEASES[given.release]
    failed, total = [], 0
    for total, case in enumerate(read_jsonl(getattr(given, name)), start=1):
        if wrong := _tried(CHECKS[name], tokenizer, release, case):
            failed.append(f"{case.get('name', f'line {total}')}: {wrong}")
    print(json.dumps({"ok": total - len(failed), "total": total, "failed": failed}))
    sys.exit(1 if failed else 0)


def _tried(check: "Check", tokenizer: KimiTokenizer, release: Release, case: Case) -> str | None:
    try:
        return check(tokenizer, release, case)
    except EyasError as error:
        return f"refused ({error})"


def check_case(tokenizer: KimiTokenizer, release: Release, case: Case) -> str | None:
    """Compare a rendered prompt; return what differs, or None."""
    text = render_prompt(
        case["messages"],
        case.get("tools") or (),
        _asked(release, case.get("kwargs") or {}),
        opens_reply=case.get("add_generation_prompt", True),
    )
    if case.get("text", text) != text:
        return _difference(case["text"], text)
    ids = tokenizer.encode(text)
    digest = hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
    if case.get("ids", ids) != ids or case.get("ids_sha256", digest) != digest:
        return f"the ids differ, expected {case.get('num_ids', len(case.get('ids', ids)))}"
    return None


def _asked(release: Release, kwargs: Case) -> Release:
    """Return the release as the template's keywords ask it to be; only false turns thinking off."""
    if unknown := sorted(kwargs.keys() - {"thinking", "preserve_thinking"}):
        raise EyasError(f"template keyword '{unknown[0]}' is not known")
    return replace(
        release,
        thinking=kwargs.get("thinking", release.thinking) is not False,
        keeps_history_reasoning=kwargs.get("preserve_thinking", release.keeps_history_reasoning),
    )


def check_completion(tokenizer: KimiTokenizer, release: Release, case: Case) -> str | None:
    """Compare the ids of a reply; return what differs, or None."""
    codec = Kimi(tokenizer, replace(release, thinking=case.get("thinking", release.thinking)))
    calls = [
        {"id": identity, "type": "function", "function": {"name": "", "arguments": arguments}}
        for identity, arguments in case.get("calls") or ()
    ]
    reply = ReplyParts(
        content=case.get("content"),
        reasoning=case.get("reasoning"),
        tool_calls=tuple(calls),
        flags=() if case.get("think_closed", True) else (IMPLICIT_THINK_END,),
    )
    ids = codec.reply_ids(codec.normalise(reply), case["finish_reason"])
    return None if ids == case["completion_ids"] else f"got {ids}"


def check_encoding(tokenizer: KimiTokenizer, release: Release, case: Case) -> str | None:
    """Compare the ids of plain text; return what differs, or None."""
    ids = tokenizer.encode_plain(case["text"])
    return None if ids == case["ids"] else f"got {ids}"


def _difference(expected: str, got: str) -> str:
    pairs = zip(expected, got, strict=False)
    at = next((i for i, (e, g) in enumerate(pairs) if e != g), min(len(expected), len(got)))
    around = slice(max(0, at - _SHOWN), at + _SHOWN)
    return f"the text differs at {at}, expected {expected[around]!r}, got {got[around]!r}"


Check = Callable[[KimiTokenizer, Release, Case], str | None]
CHECKS: dict[str, Check] = {
    "cases": check_case,
    "completions": check_completion,
    "encodings": check_encoding,
}

if __name__ == "__main__":
    main()
