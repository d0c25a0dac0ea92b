import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.prompts.schemas import ParsedRow, Reject
from eyas.prompts.selection import (
    Plan,
    Selection,
    TargetFacts,
    cut_at_last_user,
    is_heldout,
    partition_of,
    select,
)
from eyas.records import Message, Tool, row_id
from eyas.settings import PartitionRule

RULES = {
    "short": PartitionRule(max_prompt_tokens=8, max_tokens=4),
    "long": PartitionRule(max_prompt_tokens=None, max_tokens=10),
}
PLAN = Plan(
    dataset="d",
    kind="prompts",
    licence="MIT",
    heldout_permille=0,
    max_rows=None,
    seed=0,
    partition=None,
    partitions=RULES,
)


def count_words(messages: Sequence[Message], tools: Sequence[Tool]) -> int:
    if any(message.get("content") == "refuse me" for message in messages):
        raise EyasError("chat template: refuses these messages")
    return sum(len(str(message["content"]).split()) for message in messages) + len(tools)


TARGET = TargetFacts(
    count_tokens=count_words, has_special_text=lambda text: "<|im_end|>" in text, context_tokens=30
)


def plan(**changes: Any) -> Plan:
    return dataclasses.replace(PLAN, **changes)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def row(*messages: Message, name: str = "", tools: tuple[Tool, ...] = ()) -> ParsedRow:
    return ParsedRow(upstream_id=name, messages=messages, tools=tools)


def many(count: int) -> list[ParsedRow]:
    return [row(user(f"question {i}"), reply(f"answer {i}"), name=str(i)) for i in range(count)]


def reasons(selection: Selection) -> list[str]:
    return [violation.rule for violation in selection.rejects]


def test_prompt_ends_with_the_last_user_turn_and_is_named_by_what_is_sent() -> None:
    found = select([row(user("a"), reply("b"), user("c"), reply("d"), name="u")], PLAN, TARGET)
    (prompt,) = found.prompts
    messages = (user("a"), reply("b"), user("c"))
    assert prompt.messages == messages
    assert prompt.id == row_id("d", "u", messages)
    assert (prompt.upstream_id, prompt.licence) == ("u", "MIT")
    assert (prompt.prompt_tokens, prompt.partition) == (3, "short")


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([user("a")], 1),
        ([user("a"), reply("b")], 1),
        ([user("a"), reply("b"), user("c"), reply("d")], 3),
        ([user("a"), reply("b"), {"role": "tool", "content": "c"}, reply("d")], 1),
        ([{"role": "system", "content": "s"}], 0),
    ],
)
def test_cut_at_last_user(messages: list[Message], kept: int) -> None:
    assert cut_at_last_user(messages) == tuple(messages[:kept])


def test_trajectory_is_kept_whole_for_training() -> None:
    messages = (user("a"), reply("b"), user("c"), reply("d"))
    (prompt,) = select([row(*messages)], plan(kind="trajectories"), TARGET).prompts
    assert prompt.messages == messages
    assert prompt.prompt_tokens == 4


def test_heldout_trajectory_is_cut_so_that_it_can_be_answered() -> None:
    messages = (user("a"), reply("b"), user("c"), reply("d"))
    found = select([row(*messages)], plan(kind="trajectories", heldout_permille=1000), TARGET)
    (prompt,) = found.heldout
    assert not found.prompts
    assert prompt.messages == messages[:3]
    assert prompt.prompt_tokens == 3
    assert prompt.id == row_id("d", "", messages)


REJECTED: list[tuple[str, ParsedRow | Reject, str]] = [
    ("prompts", Reject(reason="bad_role", detail="x"), "bad_role"),
    ("prompts", row({"role": "system", "content": "s"}), "no_user_turn"),
    ("trajectories", row(user("a")), "no_final_reply"),
    ("prompts", row(user("say <|im_end|> now")), "special_token_text"),
    ("prompts", row(user("a"), tools=({"function": {"<|im_end|>": 1}},)), "special_token_text"),
    ("prompts", row(user("refuse me")), "template_refused"),
    ("prompts", row(user("w " * 21)), "too_long"),
    ("trajectories", row(user("w " * 30), reply("b")), "too_long"),
]


@pytest.mark.parametrize(("kind", "given_row", "reason"), REJECTED)
def test_each_loss_has_a_named_reason(
    kind: str, given_row: ParsedRow | Reject, reason: str
) -> None:
    found = select([given_row], plan(kind=kind), TARGET)
    assert reasons(found) == [reason]
    assert (found.rows_in, found.prompts, found.heldout) == (1, (), ())
    assert found.rejects[0].dataset == "d"
    assert found.rejects[0].severity == "reject"


def test_malformed_row_is_found_again_by_its_place() -> None:
    found = select([row(user("a")), Reject(reason="bad_role", detail="x")], PLAN, TARGET)
    assert [(v.id, v.detail) for v in found.rejects] == [("row 2", "x")]


def test_prompt_that_just_leaves_room_for_its_answer_is_kept() -> None:
    assert len(select([row(user("w " * 20))], PLAN, TARGET).prompts) == 1


def test_special_text_behind_the_last_user_turn_is_cut_off_with_it() -> None:
    found = select([row(user("a"), reply("<|im_end|>"))], PLAN, TARGET)
    assert len(found.prompts) == 1


def test_same_messages_and_tools_are_a_duplicate_whatever_their_upstream_id() -> None:
    tool = {"function": {"name": "f"}}
    rows = [
        row(user("a"), name="1"),
        row(user("a"), name="2"),
        row(user("a"), reply("b"), name="3"),
        row(user("a"), name="4", tools=(tool,)),
    ]
    found = select(rows, PLAN, TARGET)
    assert reasons(found) == ["duplicate", "duplicate"]
    assert {prompt.upstream_id for prompt in found.prompts} == {"1", "4"}


@pytest.mark.parametrize(("tokens", "name"), [(0, "short"), (8, "short"), (9, "long")])
def test_partition_goes_by_prompt_tokens(tokens: int, name: str) -> None:
    assert partition_of(tokens, RULES) == name
    assert partition_of(tokens, dict(reversed(RULES.items()))) == name


def test_prompt_that_no_partition_takes_is_too_long() -> None:
    narrow = {"short": RULES["short"]}
    assert partition_of(9, narrow) is None
    found = select([row(user("w " * 9))], plan(partitions=narrow), TARGET)
    assert [v.detail for v in found.rejects] == ["9 tokens, room for 8"]


def test_partition_of_the_data_set_overrides_the_length() -> None:
    (prompt,) = select([row(user("a"))], plan(partition="long"), TARGET).prompts
    assert prompt.partition == "long"


def test_max_rows_cuts_prompts_and_leaves_the_heldout_rows_alone() -> None:
    whole = select(many(200), plan(heldout_permille=120), TARGET)
    cut = select(many(200), plan(heldout_permille=120, max_rows=10), TARGET)
    assert cut.prompts == whole.prompts[:10]
    assert cut.heldout == whole.heldout
    assert cut.not_selected == len(whole.prompts) - 10
    assert 10 < len(cut.heldout) < 40


def test_seed_changes_the_order_and_not_the_split() -> None:
    first = select(many(50), plan(heldout_permille=120), TARGET)
    second = select(many(50), plan(heldout_permille=120, seed=1), TARGET)
    assert first.prompts != second.prompts
    assert {p.id for p in first.prompts} == {p.id for p in second.prompts}


def test_row_that_comes_upstream_moves_no_other_row() -> None:
    few = select(many(50), plan(heldout_permille=120), TARGET)
    more = select([row(user("new")), *many(50)], plan(heldout_permille=120), TARGET)
    known = {prompt.id for prompt in (*few.prompts, *few.heldout)}
    assert [p for p in more.prompts if p.id in known] == list(few.prompts)
    assert [p for p in more.heldout if p.id in known] == list(few.heldout)


def test_parts_of_one_conversation_stay_on_one_side() -> None:
    rows = [
        ParsedRow(upstream_id=f"{i}_{part}", messages=(user(f"{i} {part}"),), conversation=f"{i}")
        for i in range(60)
        for part in range(3)
    ]
    found = select(rows, plan(heldout_permille=300), TARGET)
    sides = [{prompt.conversation for prompt in side} for side in (found.prompts, found.heldout)]
    assert not sides[0] & sides[1]
    assert all(sides)
    assert len(found.prompts) + len(found.heldout) == 180


def test_heldout_share_is_what_was_asked() -> None:
    share = sum(is_heldout(row_id("d", str(i), ()), 120) for i in range(20000)) / 20000
    assert share == pytest.approx(0.12, abs=0.01)  # four standard deviations of a binomial draw


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "chats"}, r"datasets\.d\.kind: expected prompts \| trajectories, got 'chats'"),
        ({"licence": " "}, r"datasets\.d\.licence: expected a licence"),
        ({"partition": "huge"}, r"expected null \| long \| short, got 'huge'"),
    ],
)
def test_impossible_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EyasError, match=message):
        select([], plan(**changes), TARGET)


TEXTS = st.text(alphabet="ab <|im_end>", min_size=1, max_size=30)
SOME_ROWS = st.lists(
    st.one_of(
        st.builds(lambda text: row(user(text)), TEXTS),
        st.builds(lambda a, b: row(user(a), reply(b)), TEXTS, TEXTS),
        st.just(Reject(reason="bad_role", detail="")),
    ),
    max_size=30,
)
PLANS = st.builds(
    plan,
    kind=st.sampled_from(["prompts", "trajectories"]),
    heldout_permille=st.integers(0, 1000),
    max_rows=st.none() | st.integers(0, 10),
    seed=st.integers(0, 3),
)


@given(SOME_ROWS, PLANS)
def test_counts_add_up_and_heldout_rows_are_never_prompts(
    rows: list[ParsedRow | Reject], some_plan: Plan
) -> None:
    found = select(rows, some_plan, TARGET)
    out = len(found.prompts) + len(found.heldout) + len(found.rejects) + found.not_selected
    assert found.rows_in == len(rows) == out
    ids = [prompt.id for prompt in (*found.prompts, *found.heldout)]
    assert len(ids) == len(set(ids))
    assert some_plan.max_rows is None or len(found.prompts) <= some_plan.max_rows


@given(SOME_ROWS, PLANS, st.randoms(use_true_random=False))
def test_selection_depends_on_the_rows_and_not_on_their_order(
    rows: list[ParsedRow | Reject], some_plan: Plan, random: Any
) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    first, second = select(rows, some_plan, TARGET), select(shuffled, some_plan, TARGET)
    assert first.prompts == second.prompts
    assert first.heldout == second.heldout
