"""Kimi's tokenizer from its ranks file; no code of the model's folder is run.

Reads: tiktoken.model (one base64 token and its rank a line), tokenizer_config.json.
Source: the tokenizer class of K2.5; the ranks are the same bytes in K2, K2.5, K2.6 and K2-Thinking.
"""

import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from eyas.errors import EyasError
from eyas.files import read_json

RANKS_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
NUM_RESERVED = 256  # ids after the ranks; those without a name are <|reserved_token_ID|>
_HINT = "build the target again with `dvc repro -f -s target`"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MAX_CHARS, MAX_RUN = 400_000, 25_000
_RUN = re.compile(r"\s+|\S+")


class KimiTokenizer:
    """Text to ids and back; `ids` has the special tokens by their spelling."""

    def __init__(self, ranks: dict[bytes, int], names: Mapping[int, str]) -> None:
        reserved = range(len(ranks), len(ranks) + NUM_RESERVED)
        self.ids = {names.get(i, f"<|reserved_token_{i}|>"): i for i in reserved}
        self.size = reserved.stop
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.ids
        )
        self._named = re.compile("|".join(re.escape(names[i]) for i in reserved if i in names))
        self._spelled = re.compile("|".join(map(re.escape, self.ids)))

    def encode(self, text: str) -> list[int]:
        """Return the ids of text whose special tokens are real ones."""
        if len(text) <= MAX_RUN:
            return self._encode_special(text)
        ids, at = list[int](), 0
        for found in self._named.finditer(text):
            ids += _joined(self._encode_special, text[at : found.start()])
            ids.append(self.ids[found.group()])
            at = found.end()
        return ids + _joined(self._encode_special, text[at:])

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of text whose special tokens are only spelled."""
        return _joined(self._encoding.encode_ordinary, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD."""
        return self._encoding.decode(ids)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._encoding.decode_single_token_bytes(token)

    def id_of(self, token: bytes) -> int | None:
        """Return the id of a token's bytes, or of a special one's text."""
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def spells_special(self, text: str) -> bool:
        """Tell whether `encode` would find a special token in the text."""
        return self._spelled.search(text) is not None

    def _encode_special(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")


def cut_long_runs(text: str) -> Iterator[str]:
    """Cut text as the tokenizer class does before it looks for words; the cuts change ids.

    At every 400,000th character first, then inside runs of more than 25,000 characters that are
    all whitespace, or all not.
    """
    for start in range(0, len(text), MAX_CHARS):
        window, at = text[start : start + MAX_CHARS], 0
        for run in _RUN.finditer(window):
            for end in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield window[at:end]
                at = end
        yield window[at:]


def _joined(encode: Callable[[str], list[int]], text: str) -> list[int]:
    if len(text) <= MAX_RUN:
        return encode(text)
    return [i for piece in cut_long_runs(text) for i in encode(piece)]


def load_tokenizer(folder: Path, needed: Sequence[str]) -> KimiTokenizer:
    """Read the ranks and the names of special tokens of a target folder.

    Raises: EyasError if a file is missing or other than K2's, or a token of `needed` has no name.
    """
    config = folder / "tokenizer_config.json"
    ranks = read_ranks(folder / "tiktoken.model")
    named = read_json(config, hint=_HINT).get("added_tokens_decoder") or {}
    tokenizer = KimiTokenizer(ranks, {int(i): token["content"] for i, token in named.items()})
    if missing := [token for token in needed if token not in tokenizer.ids]:
        raise EyasError(f"{config}: no special token {missing[0]}", hint="not a Kimi K2 target")
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the rank of each token.

    Raises: EyasError if the file is missing, or not the one that K2 targets share.
    """
    if not path.is_file():
        raise EyasError(f"{path}: no such file", hint=_HINT)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != RANKS_SHA256:
        raise EyasError(
            f"{path}: expected sha256 {RANKS_SHA256}, got {digest}",
            hint="ids of another vocabulary would be wrong without a sign of it; fetch K2's file",
        )
    pairs = (line.split() for line in content.splitlines() if line)
    return {binascii.a2b_base64(token): int(rank) for token, rank in pairs}
