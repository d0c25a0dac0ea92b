"""Classify HTTP answers as the client does: one JSON line out for each line in.

A line in: {"status": 200, "headers": {...}, "body": "<raw text>"}.
Run: python benchmarks/classify.py FILE.jsonl
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from eyas.generation.outcomes import Outcome, classify


def line_of(outcome: Outcome) -> dict[str, Any]:
    """Return what the client would do, and what it would keep."""
    reply = outcome.reply
    return {
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "retry_after_s": outcome.retry_after_s,
        "cost_usd": outcome.cost_usd,
        "finish_reason": reply and reply.finish_reason,
        "reasoning": reply and reply.reasoning,
        "content": reply and reply.content,
        "tool_calls": list(reply.tool_calls) if reply else [],
        "completion_tokens": outcome.completion_tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "provider": reply.provider if reply else outcome.provider,
        "maybe_billed": outcome.maybe_billed,
        "detail": outcome.detail,
    }


def main() -> None:
    """Read the file and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    for number, line in enumerate(options.file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            case = orjson.loads(line)
            status, body = int(case["status"]), str(case["body"])
            headers = {str(k): str(v) for k, v in (case.get("headers") or {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sys.exit(f"{options.file}:{number}: expected status, headers, body ({error!r})")
        outcome = classify(status, headers, body, now_s=time.time())
        print(orjson.dumps(line_of(outcome)).decode())


if __name__ == "__main__":
    main()
