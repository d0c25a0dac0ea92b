"""Say how long a data set's prompts are, and in what language and script users write. Pure.

The script is certain, and for code and formulas still true; the language is the likeliest one.
Source: https://www.unicode.org/charts/nameslist/ (a letter's name begins with its script);
https://github.com/adbar/py3langid (naive Bayes over byte n-grams, its model in the package).
"""

import functools
import unicodedata
from collections import Counter
from collections.abc import Sequence

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from eyas.prompts.chat import asked_text
from eyas.records import Prompt

_READ_CHARS = 2000  # of each prompt: enough to tell
_SURE = 0.5  # likelihood of a language that is believed
_RARE = 100  # a language of fewer than one in so many prompts is one of the others
_KANA = ("HIRAGANA", "KATAKANA")


def describe(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Return prompt lengths in tokens (median, 9 of 10, longest) and prompts by language."""
    lengths = sorted(prompt.prompt_tokens for prompt in prompts)
    if not lengths:
        return {}
    texts = [asked_text(prompt.messages)[:_READ_CHARS] for prompt in prompts]
    scripts, languages = Counter(map(script_of, texts)), Counter[str]()
    for name, count in Counter(map(language_of, texts)).items():
        languages[name if count * _RARE >= len(texts) else "other"] += count
    return {
        "prompt_tokens_p50": lengths[len(lengths) // 2],
        "prompt_tokens_p90": lengths[len(lengths) * 9 // 10],
        "prompt_tokens_max": lengths[-1],
        **{f"script_{name}": count for name, count in sorted(scripts.items())},
        **{f"language_{name}": count for name, count in sorted(languages.items())},
    }


def language_of(text: str) -> str:
    """Return the ISO 639 code of a text's language, `unclear` for a text that shows none."""
    name, likelihood = _identifier().classify(text)
    return name if likelihood >= _SURE else "unclear"


@functools.cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def script_of(text: str) -> str:
    """Return the script of most letters, `none` for a text without; kana tells Japanese."""
    counts = Counter(_script(letter) for letter in text if letter.isalpha())
    if counts["kana"] * 4 > counts["cjk"]:
        counts["kana"] += counts["cjk"]
    return max(counts, key=lambda name: (counts[name], name), default="none")


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "other").split()[0]
    return "kana" if name in _KANA else name.lower()
