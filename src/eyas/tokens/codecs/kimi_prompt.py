"""Kimi's chat prompt as text, and what differs between the releases. Pure.

Source: the chat template of K2.5. A turn is `<|im_ROLE|>` name `<|im_middle|>` body `<|im_end|>`,
nothing stands between turns. All up to the last answer without tool calls is history, and the
reasoning of history is left out:

| messages                                  | reasoning kept of   |
|-------------------------------------------|---------------------|
| user, answer, user                        | nothing             |
| user, answer, user, call, result          | the call            |
| user, call, result, answer, user          | nothing             |

A field that is null counts as absent, as engines drop such fields before they render.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import EyasError
from eyas.records import Message, Tool
from eyas.tokens.codecs.kimi_tools import declare_tools

IM_END = "<|im_end|>"
MIDDLE = "<|im_middle|>"
THINK, THINK_END = "<think>", "</think>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_MARKERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_SYSTEM = "<|im_system|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a Kimi release, or a way to ask it, does in its own manner."""

    thinking: bool = True
    opens_thinking: bool = True  # the prompt ends with <think>; else the model writes it itself
    default_system: str | None = None
    typescript_tools: bool = True
    keeps_history_reasoning: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)


# Assumption: all releases end the history at the *last* answer, as K2.5's template does; a copy of
# K2-Thinking's that ends it at the first is the work of a renderer without `break`.
_BOTH_FIELDS = ("reasoning_content", "reasoning")
RELEASES = {
    "kimi_k2_5": Release(),
    "kimi_k2_5_instant": Release(thinking=False),
    "kimi_k2_6": Release(reasoning_fields=_BOTH_FIELDS),
    "kimi_k2_6_instant": Release(reasoning_fields=_BOTH_FIELDS, thinking=False),
    "kimi_k2_6_preserved": Release(reasoning_fields=_BOTH_FIELDS, keeps_history_reasoning=True),
    "kimi_k2_thinking": Release(
        opens_thinking=False,
        default_system="You are Kimi, an AI assistant created by Moonshot AI.",
        typescript_tools=False,
    ),
}


def render_prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    release: Release,
    *,
    opens_reply: bool = True,
) -> str:
    """Return the whole chat prompt, the header of the reply included if it `opens_reply`.

    Raises: EyasError for content that is not text.
    """
    parts = []
    if tools:
        body = declare_tools(tools, typescript=release.typescript_tools)
        parts.append(f"{_SYSTEM}tool_declare{MIDDLE}{body}{IM_END}")
    if release.default_system and (not messages or messages[0].get("role") != "system"):
        parts.append(f"{_SYSTEM}system{MIDDLE}{release.default_system}{IM_END}")
    start = 0 if release.keeps_history_reasoning else _history_length(messages)
    for index, message in enumerate(messages):
        parts.append(_turn(message, release, thinks=release.thinking and index >= start))
    if opens_reply:
        parts.append(f"{_MARKERS['assistant']}assistant{MIDDLE}{_opening(release)}")
    return "".join(parts)


def _opening(release: Release) -> str:
    if not release.opens_thinking:
        return ""
    return THINK if release.thinking else THINK + THINK_END


def _history_length(messages: Sequence[Message]) -> int:
    """Return how many messages there are up to the last answer without tool calls."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "assistant" and not messages[index].get("tool_calls"):
            return index + 1
    return 0


def _turn(message: Message, release: Release, *, thinks: bool) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise EyasError(f"messages: expected a role, got {role!r}")
    header = f"{_MARKERS.get(role, _SYSTEM)}{message.get('name') or role}{MIDDLE}"
    body = text_of(message.get("content"), role)
    if role == "tool":
        body = f"## Return of {_given(message, 'tool_call_id')}\n{body}"
    if role == "assistant":
        reasoning = _reasoning(message, release) if thinks else ""
        body = f"{THINK}{reasoning}{THINK_END}{body}{_calls(message.get('tool_calls'))}"
    return f"{header}{body}{IM_END}"


def _given(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "" if value is None else str(value)


def _reasoning(message: Message, release: Release) -> str:
    return next((str(message[f]) for f in release.reasoning_fields if message.get(f)), "")


def text_of(content: Any, role: str) -> str:
    """Return content as text: parts are joined with nothing between.

    Raises: EyasError for parts that are not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise EyasError(f"messages: the {role}'s content is neither text nor a list of parts")
    return "".join([_part_text(part, role) for part in content])


def _part_text(part: Any, role: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise EyasError(f"messages: expected parts of text in the {role}'s content, got {kind}")


def _calls(calls: Any) -> str:
    if not calls:
        return ""
    texts = [
        f"{CALL}{_given(call, 'id')}{ARGUMENTS}{arguments_text(call)}{CALL_END}" for call in calls
    ]
    return f"{SECTION}{''.join(texts)}{SECTION_END}"


def arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as they are if text, as JSON otherwise.

    Raises: EyasError for a call without arguments.
    """
    function = call.get("function")
    if not isinstance(function, dict) or function.get("arguments") is None:
        raise EyasError(f"tool_calls: expected a function with arguments, got {call!r}")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
