"""How many bytes and hours hidden states take, before any are extracted.

Source: a token keeps its id (4 bytes), its aux layers and, as extract.final_rows says, the final
state, each one vector; as extract.teacher_k says, ids and log-probabilities, 4 bytes each.
"""

from eyas.states.codecs import vector_bytes
from eyas.states.layout import Layout

_ID_BYTES, _TOP_BYTES = 4, 8
_SECONDS_PER_HOUR = 3600


def bytes_per_token(
    layout: Layout,
    *,
    num_layers: int,
    hidden_size: int,
    final_share: float = 1.0,
    teacher_share: float = 0.0,
) -> float:
    """Return the stored bytes of a mean token, by the shares that keep a final state, a teacher.

    Kimi-K2.5, 3 layers of 7168, 138.4 M tokens of which 30 % are supervised:
    bf16, all final states: 4 + 4 * 14336 = 57,348 bytes, 7.9 TB;
    fp8, supervised:        4 + 3 * 7172 + 0.3 * 7172 = 23,672 bytes, 3.3 TB;
    int4 with an fp8 final: 4 + 3 * 4032 + 0.3 * 7172 = 14,252 bytes, 2.0 TB;
    int4 with teacher_k 64, final_every 16: 4 + 3 * 4032 + 0.3 * (512 + 7172 / 16) = 12,388 bytes.
    """
    aux = num_layers * vector_bytes(layout.aux, hidden_size)
    top = teacher_share * _TOP_BYTES * (layout.teacher_k or 0)
    return _ID_BYTES + aux + final_share * vector_bytes(layout.final, hidden_size) + top


def hours(tokens: int, tokens_per_s: float) -> float:
    """Return the hours that `tokens` take at a rate."""
    return tokens / tokens_per_s / _SECONDS_PER_HOUR
