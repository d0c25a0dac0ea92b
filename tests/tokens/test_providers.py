"""A provider's rule from its replies, by replies whose counts are written out."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.records import Prompt, Response
from eyas.tokens.borders import EDITS
from eyas.tokens.codecs.chatml import ChatML
from eyas.tokens.providers import (
    MIN_REPLIES,
    Finding,
    Seen,
    find_rule,
    find_rules,
    look_at,
    rows_to_look_at,
)

OFFICIAL = Path("../shared/kimi")
END, START = "content_end", "content_start"


def seen(delta: int = 0, *, prompt: int = 0, cut: bool = False, **changes: Any) -> Seen:
    """Return a reply of ten ids that is billed `delta` more."""
    fields: dict[str, Any] = {
        "finished": not cut,
        "billed": 10 + delta,
        "prompt_delta": prompt,
        "counts": {"given": 10},
        "changes": {
            (place, edit): 0 for place in (START, END)[: 1 if cut else 2] for edit in EDITS
        },
    }
    return Seen(**fields | changes)


def with_changes(reply: Seen, changes: dict[tuple[str, str], int]) -> Seen:
    return replace(reply, changes=dict(reply.changes) | changes)


def rule_of(*groups: Iterable[Seen]) -> Finding:
    return find_rule("Acme", [one for group in groups for one in group])


def test_the_offset_is_the_one_at_which_most_replies_match() -> None:
    found = rule_of([seen(1)] * 40, [seen(1, cut=True)] * 10, [seen(0)] * 10)
    assert (found.rule.offset, found.rule.cut_offset, found.rule.edits) == (1, 1, ())
    assert (found.best.matched, found.runner_up.matched) == (50, 20)
    assert found.verdict == "as given, k = +1 in 50 of 60 replies (83.3%)"


def test_an_unbilled_stop_token_shows_in_replies_that_were_cut() -> None:
    found = rule_of([seen(-1)] * 30, [seen(0, cut=True)] * 30)
    assert (found.rule.offset, found.rule.cut_offset) == (-1, 0)
    assert found.rule.offset_of("length") == 0
    assert found.rule.offset_of("tool_calls") == -1


def test_a_space_at_nearly_every_border_is_stripped_though_k_would_explain_it() -> None:
    spaced = with_changes(seen(-1, spaced=frozenset({END})), {(END, "strip_space"): -1})
    found = rule_of([spaced] * 57, [seen(0)] * 3)
    assert found.rule.edits == ((END, "strip_space"),)
    assert (found.rule.offset, found.spaced_share[END]) == (0, 0.95)


def test_a_space_that_the_bill_counts_is_kept() -> None:
    plain = seen(0, spaced=frozenset({START}))
    told = with_changes(plain, {(START, "strip_space"): -1})
    assert rule_of([plain] * 50, [told] * 10).rule.edits == ()
    assert rule_of([plain] * 60).rule.edits == ((START, "strip_space"),)


def test_white_space_that_was_taken_must_show_in_the_bill() -> None:
    lost = with_changes(seen(1), {(START, "restore_newline"): 1, (START, "restore_space"): 1})
    kept = with_changes(seen(0), {(START, "restore_newline"): 0, (START, "restore_space"): 1})
    found = rule_of([lost] * 30, [kept] * 30)
    assert found.rule.edits == ((START, "restore_newline"),)
    assert (found.rule.offset, found.best.matched, found.as_given.matched) == (0, 60, 30)


def test_where_two_edits_explain_the_bill_alike_there_is_no_rule() -> None:
    alike = {(START, "restore_newline"): 1, (START, "restore_space"): 1}
    found = rule_of([with_changes(seen(1), alike)] * 30, [seen(0)] * 30)
    assert (found.rule.edits, found.rule.offset) == ((), 0)
    assert found.verdict.startswith("no rule: at best restore_space at content_start, k = +0 in 60")
    assert found.verdict.endswith("restore_newline at content_start, k = +0 in 60")


def test_an_offset_that_a_lost_token_would_explain_is_told() -> None:
    lost = with_changes(seen(1), {(START, "restore_newline"): 1})
    found = rule_of([lost] * 60)
    assert (found.rule.edits, found.rule.offset) == ((), 1)
    assert "not told apart from others: restore_newline at content_start, k = +0" in found.verdict


@pytest.mark.parametrize("replies", [0, 1, MIN_REPLIES - 1])
def test_few_replies_tell_nothing(replies: int) -> None:
    found = rule_of([seen(1, prompt=50)] * replies)
    assert (found.rule.offset, found.rule.rejected) == (0, None)
    assert found.verdict == f"no rule: {replies} replies, at least {MIN_REPLIES} are needed"


def test_a_bill_that_follows_nothing_gives_no_rule() -> None:
    found = rule_of(*([seen(delta)] * 10 for delta in range(-3, 4)))
    assert (found.rule.edits, found.rule.offset) == ((), 0)
    assert found.verdict.startswith("no rule: at best")


@pytest.mark.parametrize(
    ("billed", "spellings"),
    [
        ({"given": 60}, ("given",)),
        ({"spaced": 60}, ("spaced",)),
        ({"spaced": 40, "given": 20}, ("spaced", "given", "compact")),
        ({"given": 9}, ("given", "compact", "spaced")),
    ],
)
def test_the_spelling_of_nearly_all_calls_is_the_providers(
    billed: dict[str, int], spellings: tuple[str, ...]
) -> None:
    counts = {"given": 10, "compact": 15, "spaced": 18}
    calls = [
        seen(counts[name] - 10, counts=counts) for name, num in billed.items() for _ in range(num)
    ]
    assert rule_of([seen(0)] * 60, calls).rule.spellings == spellings


@pytest.mark.parametrize(
    ("deltas", "offset", "rejected"),
    [
        ({0: 60}, 0, False),
        ({3: 50, 0: 10}, 3, False),
        ({4: 60}, 0, True),
        ({-1: 60}, 0, True),
        ({0: 31, 40: 29}, 0, False),
        ({0: 20, 9: 20, 17: 20}, 0, True),
    ],
)
def test_prompts_billed_otherwise_than_rendered_reject_the_provider_by_name(
    deltas: dict[int, int], offset: int, rejected: bool
) -> None:
    found = rule_of(*([seen(0, prompt=delta)] * num for delta, num in deltas.items()))
    assert found.rule.prompt_offset == offset
    assert (found.rule.rejected is not None) is rejected
    if found.rule.rejected:
        assert found.rule.rejected.startswith("provider 'Acme': prompts billed otherwise")


def test_replies_are_looked_at_provider_by_provider(
    codec: ChatML, make_prompt: Callable[..., Prompt], make_response: Callable[..., Response]
) -> None:
    prompt = make_prompt()
    rows = [(prompt, make_response(prompt, content=f"It is {n}.")) for n in range(300)]
    other = make_response(prompt, provider="Other", completion_tokens=99, finish_reason="error")
    found = find_rules([*rows, (prompt, other)], codec)
    assert list(found) == ["local"]
    assert (found["local"].replies, found["local"].best.matched) == (200, 200)
    assert found["local"].rule == replace(found["local"].rule, edits=(), offset=0, rejected=None)


def test_a_look_tells_what_edits_would_change(
    codec: ChatML, make_prompt: Callable[..., Prompt], make_response: Callable[..., Response]
) -> None:
    prompt = make_prompt()
    looked = look_at(prompt, make_response(prompt, content="It is 144. "), codec)
    assert looked is not None
    assert looked.spaced == {END}
    assert (looked.changes[END, "strip_space"], looked.changes[END, "strip_newline"]) == (-1, 0)
    assert looked.billed == looked.counts["given"]
    alone = look_at(prompt, make_response(prompt, content=" "), codec)
    assert alone is not None
    assert alone.changes[START, "strip_space"] == -1
    assert look_at(prompt, make_response(prompt, reasoning="hm"), codec) is None


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="../shared/kimi is not on this machine")
def test_simulated_providers_of_kimi_are_found_out() -> None:
    command = [sys.executable, "benchmarks/providers.py", "--replies", "200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout)
    assert line["recovered"] == ["Joiner", "Stripper"]
    assert list(line["rejected"]) == ["Stranger"]
    assert [line["providers"][p]["silent"] for p in line["recovered"]] == [0, 0]


def test_the_rows_to_look_at_are_all_that_the_rules_rest_on(
    codec: ChatML,
    make_prompt: Callable[..., Prompt],
    make_response: Callable[..., Response],
) -> None:
    prompt = make_prompt()
    honest = make_response(prompt)
    billed = honest.completion_tokens
    rows = [
        replace(
            honest,
            provider="AB"[number % 3 == 0],
            completion_tokens=billed + number % 5 % 2,
            finish_reason="error" if number % 7 == 0 else "stop",
        )
        for number in range(900)
    ]
    chosen = rows_to_look_at(rows)
    assert len(chosen) == 2 * 200
    few = [(prompt, row) for number, row in enumerate(rows) if number in chosen]
    assert find_rules(few, codec) == find_rules([(prompt, row) for row in rows], codec)
