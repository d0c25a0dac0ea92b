"""Say how a rebuilt reply differs from the ids really sampled, where those are known. Pure."""

from collections.abc import Callable, Sequence

_SHOWN = 8  # ids of each side
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def difference(
    sampled: Sequence[int], rebuilt: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> str:
    """Return the cause of a difference, where it begins, and both sides of the first stretch.

    A model may sample a spelling that its tokenizer would not choose; the text does not show it.
    sampled 7 8 9 4, rebuilt 7 17 4: the stretch is 8 9 against 17, at token 1.
    """
    start = next(
        (i for i, (a, b) in enumerate(zip(sampled, rebuilt, strict=False)) if a != b),
        min(len(sampled), len(rebuilt)),
    )
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


def _stretch(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    """Return how many ids of each side come before both go on with the same two ids, or end."""
    later = {tuple(b[j : j + 2]): j for j in reversed(range(len(b) - 1))}
    for i in range(len(a) - 1):
        if (j := later.get(tuple(a[i : i + 2]))) is not None:
            return i, j
    return len(a), len(b)
