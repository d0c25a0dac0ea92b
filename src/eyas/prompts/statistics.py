"""Say how long the prompts of a data set are and in what script their users write. Pure.

The script is counted, not the language: it is certain, and for code and formulas still true.
Source: https://www.unicode.org/charts/nameslist/ (a letter's name begins with its script).
"""

import functools
import unicodedata
from collections import Counter
from collections.abc import Sequence

from eyas.prompts.chat import asked_text
from eyas.records import Prompt

_READ_CHARS = 2000  # of each prompt: enough to tell
_KANA = ("HIRAGANA", "KATAKANA")


def describe(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Return prompt lengths in tokens (median, 9 of 10, longest) and prompts by script."""
    lengths = sorted(prompt.prompt_tokens for prompt in prompts)
    if not lengths:
        return {}
    scripts = Counter(script_of(asked_text(prompt.messages)) for prompt in prompts)
    return {
        "prompt_tokens_p50": lengths[len(lengths) // 2],
        "prompt_tokens_p90": lengths[len(lengths) * 9 // 10],
        "prompt_tokens_max": lengths[-1],
        **{f"script_{name}": count for name, count in sorted(scripts.items())},
    }


def script_of(text: str) -> str:
    """Return the script of most letters, `none` for a text without; kana tells Japanese."""
    counts = Counter(_script(letter) for letter in text[:_READ_CHARS] if letter.isalpha())
    if counts["kana"] * 4 > counts["cjk"]:
        counts["kana"] += counts["cjk"]
    return max(counts, key=lambda name: (counts[name], name), default="none")


@functools.lru_cache(maxsize=1 << 14)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "other").split()[0]
    return "kana" if name in _KANA else name.lower()
