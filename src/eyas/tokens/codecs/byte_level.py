"""The bytes of a byte-level tokenizer's tokens; its vocabulary has a letter for each byte. Pure.

Source: the alphabet of GPT-2's byte-level BPE: printable bytes of Latin-1 stand for themselves, the
others for the letters from U+0100 on, in order: `Ġ` is the 33rd of these, the space.
"""

from collections import Counter
from collections.abc import Mapping

from tokenizers import Tokenizer

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + n): b for n, b in enumerate(_OTHERS)}


def bytes_by_id(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of each token, of added ones their text.

    Nothing for another kind of vocabulary (SentencePiece writes a space as U+2581): the table must
    say of the whole vocabulary what the tokenizer's own decoder says.
    """
    added = {i: token.content.encode() for i, token in tokenizer.get_added_tokens_decoder().items()}
    words = {i: w for w, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    try:
        found = {i: bytes(_BYTES[c] for c in w) for i, w in words.items() if i not in added}
    except KeyError:
        return {}
    text = b"".join(found.values()).decode(errors="replace")
    return found | added if tokenizer.decode(list(found), skip_special_tokens=False) == text else {}


def id_by_bytes(tokens: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the id of each token's bytes; none where two tokens have the same."""
    counts = Counter(tokens.values())
    return {token: i for i, token in tokens.items() if counts[token] == 1}
