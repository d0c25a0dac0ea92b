import pytest

from eyas.prompts.statistics import describe, script_of
from eyas.records import Prompt


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Was ist Größe?", "latin"),
        ("你好吗 ok", "cjk"),
        ("日本語の文章です", "kana"),
        ("Привет, world and", "latin"),
        ("Привет, мир (hi)", "cyrillic"),
        ("안녕하세요", "hangul"),
        ("2 + 2 = ?", "none"),
        ("", "none"),
    ],
)
def test_script_is_that_of_most_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def prompt(tokens: int, text: str) -> Prompt:
    return Prompt(
        id=str(tokens),
        dataset="d",
        upstream_id="",
        messages=({"role": "system", "content": "日本"}, {"role": "user", "content": text}),
        tools=(),
        prompt_tokens=tokens,
        partition="any",
        licence="MIT",
    )


def test_lengths_and_scripts_are_counted() -> None:
    prompts = [prompt(tokens, "Hi" if tokens > 3 else "你好") for tokens in (5, 1, 4, 2, 3)]
    assert describe(prompts) == {
        "prompt_tokens_p50": 3,
        "prompt_tokens_p90": 5,
        "prompt_tokens_max": 5,
        "script_cjk": 3,
        "script_latin": 2,
    }
    assert describe([]) == {}
