"""A ChatML target small enough to be made for each run: a byte-level BPE of 600 tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.records import Prompt, Response, Sample
from eyas.settings import Validate
from eyas.tokens.codecs import ReplyParts
from eyas.tokens.codecs.chatml import ChatML, load_chatml
from eyas.tokens.tokenizers import train_tokenizer

TEXTS = (
    "the quick brown fox jumps over the lazy dog and the dog does not mind at all",
    "def add(left, right):\n    return left + right\n\nprint(add(1, 2))\n",
    "Grüße aus Köln, señor: ¿qué tal? 東京は晴れです。 Привет, мир! 🙂",
    "What is 12 times 12? It is 144. The answer of the target is a reply.",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokenizer files of a ChatML target."""
    path = tmp_path_factory.mktemp("target")
    train_tokenizer(TEXTS * 8, path, vocab_size=600, max_length=512)
    return path


@pytest.fixture(scope="session")
def codec(folder: Path) -> ChatML:
    """Return its codec."""
    return load_chatml(folder)


@pytest.fixture
def rules() -> Validate:
    """Return the gates of the default configuration, with a shorter loop window."""
    return Validate(
        max_count_delta=2,
        keep_near=False,
        min_accepted_share=0.8,
        repeat_ngram=3,
        repeat_times=2,
        drop_loops=True,
    )


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., Prompt]:
    """Return a maker of prompts; keywords replace fields."""

    def make(**changes: Any) -> Prompt:
        fields: dict[str, Any] = {
            "id": "p1",
            "dataset": "chat",
            "upstream_id": "1",
            "messages": ({"role": "user", "content": "What is 12 times 12?"},),
            "tools": (),
            "prompt_tokens": 0,
            "partition": "short",
            "licence": "MIT",
        }
        return Prompt(**fields | changes)

    return make


@pytest.fixture(scope="session")
def make_response(codec: ChatML) -> Callable[..., Response]:
    """Return a maker of honestly billed responses to a prompt; keywords replace fields."""

    def make(prompt: Prompt, **changes: Any) -> Response:
        fields: dict[str, Any] = {
            "id": prompt.id,
            "fingerprint": "f",
            "sample": 0,
            "model": "m",
            "provider": "local",
            "generation_id": "gen-1",
            "reasoning": None,
            "content": "It is 144.",
            "tool_calls": (),
            "finish_reason": "stop",
            "native_finish_reason": "stop",
            "prompt_tokens": len(codec.render_prompt(prompt.messages, prompt.tools)),
            "cost_usd": 0.0,
            "latency_s": 0.1,
            "attempts": 1,
            "source": "local",
            "sampling": {"temperature": 0.5},
            "usage": {},
        } | changes
        if "completion_tokens" not in fields:
            parts = ReplyParts(content=fields["content"])
            ids = codec.reply_ids(parts, fields["finish_reason"])
            fields["completion_tokens"] = len(ids)
        return Response(**fields)

    return make


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    """Return a maker of samples; keywords replace fields."""

    def make(**changes: Any) -> Sample:
        fields: dict[str, Any] = {
            "id": "s1",
            "dataset": "chat",
            "input_ids": (1, 40, 41, 42, 43, 2),
            "spans": ((3, 6),),
            "temperature": 0.5,
            "provider": "local",
            "flags": (),
            "completion_tokens_billed": 3,
            "conversation": "p1",
        }
        return Sample(**fields | changes)

    return make
