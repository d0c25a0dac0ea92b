import pytest

from eyas.prompts.statistics import describe, language_of, script_of
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


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Write a function that adds two numbers.", "en"),
        ("Schreibe bitte eine Funktion, die zwei Zahlen addiert.", "de"),
        ("日本語の文章です。", "ja"),
        ("def f(x): return x+1", "unclear"),
        ("", "unclear"),
    ],
)
def test_language_is_the_likeliest_or_unclear(text: str, language: str) -> None:
    assert language_of(text) == language


def test_rare_languages_are_counted_together() -> None:
    texts = ["Write a function that adds two numbers."] * 150
    texts.append("Schreibe bitte eine Funktion, die zwei Zahlen addiert.")
    found = describe([prompt(n, text) for n, text in enumerate(texts)])
    assert {k: v for k, v in found.items() if k.startswith("language")} == {
        "language_en": 150,
        "language_other": 1,
    }


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
    prompts = [
        prompt(tokens, "Hi" if tokens > 3 else "请写一个函数把两个数字相加并解释结果")
        for tokens in (5, 1, 4, 2, 3)
    ]
    assert describe(prompts) == {
        "prompt_tokens_p50": 3,
        "prompt_tokens_p90": 5,
        "prompt_tokens_max": 5,
        "script_cjk": 3,
        "script_latin": 2,
        "language_unclear": 2,
        "language_zh": 3,
    }
    assert describe([]) == {}
