"""Say how a rebuilt reply differs from the ids really sampled, where those are known. Pure."""

from collections.abc import Callable, Sequence

_SHOWN = 8  # ids of each side
_NEAR = 32  # ids from a difference, where the sides are looked for first
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def difference(
    sampled: Sequence[int], rebuilt: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the cause of a difference, where it begins, and both sides of the first stretch.

    A model may sample a spelling that its tokenizer would not choose; the text does not show it.
    sampled 7 8 9 4, rebuilt 7 17 4: the stretch is 8 9 against 17, at token 1.
    """
    start = _num_same(sampled, rebuilt)
    texts = [decode(ids).rstrip(REPLACEMENT) for ids in (sampled, rebuilt)]  # a cut character
    if texts[0] != texts[1]:
        cause = "another text"
    elif start == len(rebuilt):
        cause = "a character whose bytes are not whole"
    else:
        cause = "another spelling of the same text"
    ends = _stretch(sampled[start:], rebuilt[start:])
    sides = [
        f"{name} {list(ids[start : start + min(end, _SHOWN)])}"
        for name, ids, end in zip(("sampled", "rebuilt"), (sampled, rebuilt), ends, strict=True)
    ]
    return f"{cause}, at token {start}: {', '.join(sides)}"


def num_identical(sampled: Sequence[int], rebuilt: Sequence[int]) -> int:
    """Return how many of the sampled ids the rebuilt reply has too, stretches apart left out.

    sampled 7 8 9 4 5, rebuilt 7 17 4 5: 7 and 4 5 are the same, 3 in all.
    """
    tail = _num_same(sampled[::-1], rebuilt[::-1])
    same, a, b = tail, sampled[: len(sampled) - tail], rebuilt[: len(rebuilt) - tail]
    while a and b:
        start = _num_same(a, b)
        same += start
        skipped = _stretch(a[start:], b[start:])
        a, b = a[start + skipped[0] :], b[start + skipped[1] :]
    return same


def _num_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _stretch(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    """Return how many ids of each side come before both go on with the same two ids, or end.

    Both are looked into near their beginnings first: the same two ids may come again far behind.
    """
    size = _NEAR
    while True:
        later = {tuple(b[j : j + 2]): j for j in reversed(range(min(size, len(b) - 1)))}
        for i in range(min(size, len(a) - 1)):
            if (j := later.get(tuple(a[i : i + 2]))) is not None:
                return i, j
        if size >= max(len(a), len(b)):
            return len(a), len(b)
        size *= 4
