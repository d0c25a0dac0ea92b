"""How many bytes and hours hidden states take, before any are extracted.

Source: a token keeps its id (4 bytes), its aux layers and the final state, each one vector.
"""

from eyas.states.codecs import state_codec

_ID_BYTES = 4
_SECONDS_PER_HOUR = 3600


def bytes_per_token(codec: str, *, num_layers: int, hidden_size: int) -> int:
    """Return the stored bytes of one token with `num_layers` aux layers and the final state.

    Kimi-K2.5: 3 layers of 7168, bf16: 4 + 4 * 14336 = 57,348 bytes; 138.4 M tokens are 7.9 TB.
    """
    return _ID_BYTES + (num_layers + 1) * state_codec(codec).vector_bytes(hidden_size)


def hours(tokens: int, tokens_per_s: float) -> float:
    """Return the hours that `tokens` take at a rate."""
    return tokens / tokens_per_s / _SECONDS_PER_HOUR
