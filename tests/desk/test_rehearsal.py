"""A simulated market whose bill counts the target's own tokens."""

from pathlib import Path
from typing import Any

import pytest

from eyas.desk.rehearsal import counted_by
from eyas.generation.shop import LocalAnswer
from eyas.tokens.codecs import Codec, ReplyParts
from eyas.tokens.codecs.chatml import load_chatml
from eyas.tokens.tokenizers import train_tokenizer

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 times 12?"}]}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp("target")
    train_tokenizer(["What is 12 times 12? It is 144."] * 8, folder, vocab_size=300, max_length=64)
    return load_chatml(folder)


def drawn(content: str, finish_reason: str = "stop") -> LocalAnswer:
    return LocalAnswer(
        content=content,
        reasoning=None,
        tool_calls=(),
        finish_reason=finish_reason,
        prompt_tokens=1,
        completion_tokens=1,
    )


@pytest.mark.parametrize(("finish_reason", "end"), [("stop", 1), ("length", 0)])
def test_the_bill_is_what_reconstruct_counts(codec: Codec, finish_reason: str, end: int) -> None:
    answer = counted_by(codec)(BODY, drawn("It is 144.", finish_reason))
    ids = codec.reply_ids(ReplyParts(content="It is 144."), "length")
    assert answer.completion_tokens == len(ids) + end
    assert answer.prompt_tokens == len(codec.render_prompt(BODY["messages"], ()))
    assert (answer.content, answer.reasoning_tokens) == ("It is 144.", 0)


def test_thoughts_and_calls_are_counted_where_the_target_has_them() -> None:
    kimi = Path("../shared/kimi")
    if not kimi.is_dir():
        pytest.skip("../shared/kimi (ranks file) is not on this machine")
    from eyas.tokens.codecs.kimi import load_kimi

    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = LocalAnswer(
        content="done",
        reasoning="think it over",
        tool_calls=(call,),
        finish_reason="tool_calls",
        prompt_tokens=1,
        completion_tokens=1,
    )
    answer = counted_by(load_kimi(kimi, "kimi_k2_5"))(BODY, said)
    assert answer.reasoning_tokens == 3
    # 3 thoughts, </think>, "done", section, call, functions.f:0 (4), arguments, {}, 3 ends
    assert answer.completion_tokens == 3 + 1 + 1 + 2 + 4 + 1 + 1 + 3
