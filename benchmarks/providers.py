"""Three simulated providers of one target: two must be found out from statistics, one rejected.

One joins texts with spaces, leaves the stop token unbilled and writes arguments anew; one strips
white space and bills a token too many; one renders prompts by another template. Nothing tells the
pipeline so. Four replies in a hundred were sampled in other tokens than the tokenizer's, so their
count is off by one; `silent` are those that are kept all the same. Texts: data/sources/chat.jsonl.

Prints one JSON line; exits 1 unless both rules are found, 99 % of the replies kept have the ids
that were sampled, and the third is rejected by name.
Run: python benchmarks/providers.py [--tokenizer ../shared/kimi] [--replies 300]
Without that folder the replies are those of models/target, which has neither reasoning nor calls.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.files import read_json, read_jsonl
from eyas.records import Prompt, Response, Sample
from eyas.settings import Validate
from eyas.tokens.codecs import Codec, ReplyParts, load_codec
from eyas.tokens.codecs.kimi_reply import call_of
from eyas.tokens.ledger import Account, open_accounts, rejected_providers
from eyas.tokens.providers import Finding, find_rules
from eyas.tokens.rebuild import Rebuilt, rebuild_response

KIMI = Path("../shared/kimi")
TARGET = Path("models/target")
TEXTS = Path("data/sources/chat.jsonl")
RULES = Validate(
    max_count_delta=2,
    keep_near=False,
    min_accepted_share=0.8,
    repeat_ngram=8,
    repeat_times=4,
    drop_loops=True,
)
TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "Foretell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_ODD_SHARE, _CUT_SHARE, _CALL_SHARE = 0.04, 0.2, 0.25
_WRONG_TEMPLATE_TOKENS = 21
_IDENTICAL_SHARE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target to simulate: its codec, and where its texts have white space of their own."""

    name: str
    codec: Codec
    reasons: bool
    restored: tuple[tuple[str, str], ...]  # what a provider that strips takes away
    joined: tuple[tuple[str, str], ...]  # what a provider that joins adds, to be stripped


Say = Callable[[Case, list[str], random.Random], tuple[ReplyParts, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What a provider does: to the parts of a reply, and to the two counts of its bill."""

    name: str
    hand_out: Callable[[ReplyParts, str], ReplyParts]
    offset: int
    cut_offset: int
    prompt_offset: int = 0


def join(reply: ReplyParts, finish_reason: str) -> ReplyParts:
    """Put a space at both sides of each text, none where it was cut; write arguments compactly."""
    cut = finish_reason == "length"
    tail = "" if cut else " "
    calls = tuple(
        call_of(c["id"], json.dumps(json.loads(c["function"]["arguments"]), separators=(",", ":")))
        for c in reply.tool_calls
    )
    return replace(
        reply,
        reasoning=reply.reasoning and f" {reply.reasoning}{' ' if reply.content else tail}",
        content=reply.content and f" {reply.content}{tail}",
        tool_calls=calls,
    )


def strip(reply: ReplyParts, finish_reason: str) -> ReplyParts:
    """Take the white space off both sides of each text."""
    return replace(
        reply,
        reasoning=reply.reasoning and reply.reasoning.strip(),
        content=reply.content and reply.content.strip(),
    )


PROVIDERS = (
    Provider(name="Joiner", hand_out=join, offset=-1, cut_offset=0),
    Provider(name="Stripper", hand_out=strip, offset=1, cut_offset=1),
    Provider(
        name="Stranger",
        hand_out=lambda reply, _: reply,
        offset=0,
        cut_offset=0,
        prompt_offset=_WRONG_TEMPLATE_TOKENS,
    ),
)


def main() -> None:
    """Simulate, rebuild, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=KIMI, metavar="DIR")
    parser.add_argument("--replies", type=int, default=300, help="of each provider")
    options = parser.parse_args()
    case = case_of(options.tokenizer)
    rows = [row for provider in PROVIDERS for row in answers_of(case, provider, options.replies)]
    findings = find_rules(rows, case.codec)
    rebuilt = [
        rebuild_response(p, r, case.codec, RULES, findings[r.provider].rule) for p, r in rows
    ]
    providers = (response.provider for _, response in rows)
    accounts = open_accounts(zip(providers, rebuilt, strict=True), findings)
    result = {
        provider.name: result_of(case, provider, findings[provider.name], accounts, rebuilt)
        for provider in PROVIDERS
    }
    rejected = rejected_providers(accounts)
    found = [name for name, one in result.items() if one["found"]]
    line = {
        "target": case.name,
        "replies_each": options.replies,
        "recovered": found,
        "rejected": rejected,
        "providers": result,
    }
    print(json.dumps(line, ensure_ascii=False))
    sys.exit(0 if found == ["Joiner", "Stripper"] and list(rejected) == ["Stranger"] else 1)


def case_of(folder: Path) -> Case:
    """Return Kimi-K2.5 if its tokenizer is there, else the target of the default run."""
    if folder.is_dir():
        return Case(
            name="kimi_k2_5",
            codec=load_codec("kimi_k2_5", folder),
            reasons=True,
            restored=(("reasoning_end", "restore_newline"),),
            joined=tuple(
                (f"{part}_{side}", "strip_space")
                for part in ("reasoning", "content")
                for side in ("start", "end")
            ),
        )
    target = read_json(TARGET / "eyas_target.json", hint="run `dvc repro target`")
    return Case(
        name=target["name"],
        codec=load_codec(target["codec"], TARGET),
        reasons=False,
        restored=(("content_start", "restore_space"),),
        joined=(("content_start", "strip_space"), ("content_end", "strip_space")),
    )


def answers_of(
    case: Case, provider: Provider, count: int, say: Say | None = None
) -> list[tuple[Prompt, Response]]:
    """Return prompts and a provider's answers to what the target says; the seed is its name."""
    texts = [m["content"] for row in read_jsonl(TEXTS) for m in row["messages"]]
    chance = random.Random(provider.name)
    said = ((say or say_something)(case, texts, chance) for _ in range(count))
    return [_answer(case, provider, f"{i}", *one, chance=chance) for i, one in enumerate(said)]


def _answer(
    case: Case,
    provider: Provider,
    number: str,
    said: ReplyParts,
    finish: str,
    *,
    chance: random.Random,
) -> tuple[Prompt, Response]:
    prompt = Prompt(
        id=f"{provider.name}-{number}",
        dataset="simulated",
        upstream_id=number,
        messages=({"role": "user", "content": f"Question {number}?"},),
        tools=(TOOL,) if case.reasons else (),
        prompt_tokens=0,
        partition="short",
        licence="Apache-2.0",
    )
    ids = case.codec.reply_ids(said, finish)
    is_odd = chance.random() < _ODD_SHARE
    given = provider.hand_out(said, finish)
    offset = provider.cut_offset if finish == "length" else provider.offset
    rendered = len(case.codec.render_prompt(prompt.messages, prompt.tools))
    return prompt, Response(
        id=prompt.id,
        fingerprint=prompt.id,
        sample=0,
        model=case.name,
        provider=provider.name,
        generation_id=prompt.id,
        reasoning=given.reasoning,
        content=given.content,
        tool_calls=given.tool_calls,
        finish_reason=finish,
        native_finish_reason=finish,
        prompt_tokens=rendered + provider.prompt_offset,
        completion_tokens=len(ids) + is_odd + offset,
        cost_usd=0.0,
        latency_s=0.0,
        attempts=1,
        source="openrouter",
        sampling={},
        usage={},
        true_ids=() if is_odd else tuple(ids),
    )


def say_something(case: Case, texts: list[str], chance: random.Random) -> tuple[ReplyParts, str]:
    """Return what the target says, white space of its own included, and how it ended."""
    content, finish = chance.choice(texts).strip(), "stop"
    if chance.random() < _CUT_SHARE:
        content, finish = content[: max(1, len(content) // 2)].strip(), "length"
    if not case.reasons:
        return ReplyParts(content=f" {content}"), finish
    reasoning = " ".join(chance.sample(texts, 2)).strip()
    if chance.random() < 0.5:
        reasoning = reasoning.rstrip(".?! 。")
    calls: tuple[dict[str, Any], ...] = ()
    if finish == "stop" and chance.random() < _CALL_SHARE:
        finish = "tool_calls"
        arguments = {"city": chance.choice(texts)[:12], "days": chance.randrange(9)}
        calls = (call_of("functions.forecast:0", json.dumps(arguments, ensure_ascii=False)),)
    return ReplyParts(content=content, reasoning=f"{reasoning}\n", tool_calls=calls), finish


def result_of(
    case: Case,
    provider: Provider,
    finding: Finding,
    accounts: dict[str, Account],
    rebuilt: list[Rebuilt],
) -> dict[str, Any]:
    """Return what was found of a provider, and whether it is what the simulation did."""
    rule, account = finding.rule, accounts[provider.name]
    kept = [
        r.evidence
        for r in rebuilt
        if isinstance(r.result, Sample) and r.evidence and r.evidence.provider == provider.name
    ]
    identical = sum(bool(e.identical) for e in kept)
    expected = {"Joiner": case.joined, "Stripper": case.restored}.get(provider.name, ())
    offsets = (rule.offset, rule.cut_offset) == (provider.offset, provider.cut_offset)
    return {
        "found": set(rule.edits) == set(expected)
        and offsets
        and not rule.rejected
        and identical >= _IDENTICAL_SHARE * len(kept) > 0,
        "verdict": finding.verdict,
        "spellings": rule.spellings,
        "as_given_matched": finding.as_given.matched,
        "exact": account["exact"],
        "silent": len(kept) - identical,
        "rejected": account["rejected"],
    }


if __name__ == "__main__":
    main()
