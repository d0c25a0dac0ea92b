"""Which white space at borders the bill can show, and which it cannot: every combination tried.

The target (Kimi-K2.5) has a habit at one border, the provider leaves texts alone, joins them with
spaces or strips them, and bills k tokens more; in half of the runs some replies are cut inside
their reasoning. A run is `right` if the offset is found and 97 % of the replies kept have the ids
that were sampled, `refused` if so few are kept that the gate fails, and else `wrong`: silently so.

Prints one JSON line. Run: python benchmarks/borders.py [--tokenizer ../shared/kimi]
"""

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from providers import KIMI, RULES, Case, Provider, answers_of, case_of, join, say_something, strip

from eyas.records import Sample
from eyas.tokens.borders import edit_reply
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.providers import find_rules
from eyas.tokens.rebuild import rebuild_response

HABITS = {
    "none": (),
    "a space before reasoning": (("reasoning_start", "restore_space"),),
    "a newline after reasoning": (("reasoning_end", "restore_newline"),),
    "two newlines after reasoning": (("reasoning_end", "restore_newline"),) * 2,
    "a newline before content": (("content_start", "restore_newline"),),
    "two newlines before content": (("content_start", "restore_newline"),) * 2,
    "a newline after content": (("content_end", "restore_newline"),),
}
HANDS: dict[str, Callable[[ReplyParts, str], ReplyParts]] = {
    "leaves": lambda reply, _: reply,
    "joins": join,
    "strips": strip,
}
OFFSETS = ((0, 0), (-1, 0), (1, 1), (2, 2))
_REPLIES = 200


def main() -> None:
    """Try every combination, count, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=KIMI, metavar="DIR")
    case = case_of(parser.parse_args().tokenizer)
    outcomes: dict[str, Counter[str]] = {}
    for habit, hand, offsets, cuts in itertools.product(HABITS, HANDS, OFFSETS, (False, True)):
        outcome = outcome_of(case, habit, hand, offsets, cuts_reasoning=cuts)
        outcomes.setdefault(f"{hand}; {habit}", Counter())[outcome] += 1
    line = {
        "target": case.name,
        **sum(outcomes.values(), Counter()),
        "not_right": {name: dict(c) for name, c in outcomes.items() if set(c) != {"right"}},
    }
    print(json.dumps(line))


def outcome_of(
    case: Case, habit: str, hand: str, offsets: tuple[int, int], *, cuts_reasoning: bool
) -> str:
    """Return what became of one combination."""

    def say(case: Case, texts: list[str], chance: random.Random) -> tuple[ReplyParts, str]:
        reply, finish = say_something(case, texts, chance)
        reply = strip(reply, finish)
        if cuts_reasoning and finish == "length" and chance.random() < 0.6:
            reply = replace(reply, content=None)
        return edit_reply(reply, finish, HABITS[habit]), finish

    provider = Provider(
        name=f"{habit}, {hand}, {offsets}, {cuts_reasoning}",
        hand_out=HANDS[hand],
        offset=offsets[0],
        cut_offset=offsets[1],
    )
    rows = answers_of(case, provider, _REPLIES, say)
    rule = find_rules(rows, case.codec)[provider.name].rule
    rebuilt = [rebuild_response(p, r, case.codec, RULES, rule) for p, r in rows]
    kept = [r.evidence for r in rebuilt if isinstance(r.result, Sample) and r.evidence]
    if len(kept) < RULES.min_accepted_share * len(rows):
        return "refused"
    identical = sum(bool(e.identical) for e in kept)
    is_right = (rule.offset, rule.cut_offset) == offsets and identical >= 0.97 * len(kept)
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    main()
