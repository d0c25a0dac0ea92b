"""Kimi prompts as text: the rule of history, content, and the manners of the releases."""

from typing import Any

import pytest

from eyas.errors import EyasError
from eyas.tokens.codecs.kimi_prompt import RELEASES, render_prompt

K2_5 = RELEASES["kimi_k2_5"]
OPEN = "<|im_assistant|>assistant<|im_middle|>"
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPELLED_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A", "reasoning_content": "R"}
CALLING = {**ANSWER, "content": "C", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "functions.f:0", "content": "20"}


def turns(messages: Any, release: str = "kimi_k2_5", tools: Any = ()) -> list[str]:
    """Return the turns' texts, the opening of the reply last."""
    return render_prompt(messages, tools, RELEASES[release]).split("<|im_end|>")


@pytest.mark.parametrize(
    ("messages", "reasonings"),
    [
        ([USER, ANSWER, USER], [""]),
        ([USER, ANSWER, USER, CALLING, RESULT], ["", "R"]),
        ([USER, CALLING, RESULT, CALLING, RESULT], ["R", "R"]),
        ([USER, CALLING, RESULT, ANSWER, USER], ["", ""]),
        ([USER, CALLING, RESULT, ANSWER, USER, CALLING, RESULT], ["", "", "R"]),
        ([USER, ANSWER | {"tool_calls": []}, USER], [""]),
        ([USER, ANSWER | {"tool_calls": None}, USER], [""]),
    ],
)
def test_reasoning_up_to_the_last_answer_is_left_out(messages: Any, reasonings: list[str]) -> None:
    said = [turn for turn in turns(messages)[:-1] if turn.startswith(OPEN)]
    assert [turn.split("<think>")[1].split("</think>")[0] for turn in said] == reasonings
    quiet = [turn for turn in turns(messages, "kimi_k2_5_instant")[:-1] if turn.startswith(OPEN)]
    assert all("<think></think>" in turn for turn in quiet)
    kept = [turn for turn in turns(messages, "kimi_k2_6_preserved")[:-1] if turn.startswith(OPEN)]
    assert all("<think>R</think>" in turn for turn in kept)


def test_a_turn_has_its_role_its_name_and_its_body() -> None:
    messages = [
        {"role": "system", "content": " S\n"},
        {"role": "developer", "content": None},
        {**USER, "name": "alice"},
        CALLING,
        RESULT,
        {**RESULT, "name": "f", "content": [{"type": "text", "text": "2"}, {"text": "5"}]},
    ]
    assert turns(messages) == [
        "<|im_system|>system<|im_middle|> S\n",
        "<|im_system|>developer<|im_middle|>",
        "<|im_user|>alice<|im_middle|>Q",
        f"{OPEN}<think>R</think>C{SPELLED_CALL}",
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n20",
        "<|im_system|>f<|im_middle|>## Return of functions.f:0\n25",
        f"{OPEN}<think>",
    ]


def test_null_fields_count_as_absent() -> None:
    nulls = {"name": None, "reasoning_content": None, "tool_calls": None, "content": None}
    assert turns([{"role": "assistant", **nulls}])[0] == f"{OPEN}<think></think>"
    result = {"role": "tool", "tool_call_id": None, "content": []}
    assert turns([result])[0] == "<|im_system|>tool<|im_middle|>## Return of \n"
    assert turns([{"role": "user"}])[0] == "<|im_user|>user<|im_middle|>"


def test_arguments_are_text_as_it_is_or_json() -> None:
    function = {"name": "f", "arguments": {"b": "é", "a": [1, None]}}
    text = turns([{"role": "assistant", "tool_calls": [{"id": "x", "function": function}]}])[0]
    assert '<|tool_call_argument_begin|>{"b": "é", "a": [1, null]}<|tool_call_end|>' in text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, "expected a role, got None"),
        ({"role": "user", "content": 5}, "neither text nor a list"),
        ({"role": "user", "content": {"text": "x"}}, "neither text nor a list"),
        ({"role": "user", "content": [{"type": "image"}]}, "the user's content, got image"),
        ({"role": "tool", "content": [7]}, "in the tool's content, got int"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "expected a function with arguments"),
    ],
)  # fmt: skip
def test_a_message_that_is_not_text_is_refused(message: Any, words: str) -> None:
    with pytest.raises(EyasError, match=words):
        render_prompt([message], (), K2_5)


@pytest.mark.parametrize(
    ("release", "opening"),
    [
        ("kimi_k2_5", "<think>"),
        ("kimi_k2_5_instant", "<think></think>"),
        ("kimi_k2_6", "<think>"),
        ("kimi_k2_6_instant", "<think></think>"),
        ("kimi_k2_6_preserved", "<think>"),
        ("kimi_k2_thinking", ""),
    ],
)
def test_each_release_opens_the_reply_in_its_manner(release: str, opening: str) -> None:
    assert turns([USER], release)[-1] == OPEN + opening
    assert render_prompt([USER], (), RELEASES[release], opens_reply=False).endswith("<|im_end|>")


def test_k2_thinking_adds_a_system_message_and_declares_tools_in_json() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    declared, system, user, _ = turns([USER], "kimi_k2_thinking", [tool])
    compact = '[{"type":"function","function":{"name":"f"}}]'
    assert declared == f"<|im_system|>tool_declare<|im_middle|>{compact}"
    assert system.endswith("You are Kimi, an AI assistant created by Moonshot AI.")
    assert user == "<|im_user|>user<|im_middle|>Q"
    own = {"role": "system", "content": "S"}
    assert turns([own, USER], "kimi_k2_thinking")[0] == "<|im_system|>system<|im_middle|>S"


def test_only_k2_6_reads_reasoning_under_either_name() -> None:
    message = {"role": "assistant", "content": "C", "reasoning": "R", "tool_calls": [CALL]}
    assert "<think>R</think>C" in turns([message], "kimi_k2_6")[0]
    assert "<think></think>C" in turns([message], "kimi_k2_5")[0]
