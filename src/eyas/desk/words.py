"""Numbers as a reader wants them; what is unknown is a dash. Pure."""

from collections.abc import Mapping

Number = float | int | None
UNKNOWN = "-"
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def number(value: Number) -> str:
    """Return a count with separators."""
    return UNKNOWN if value is None else f"{value:,}"


def ratio(value: Number) -> str:
    """Return two decimals."""
    return UNKNOWN if value is None else f"{value:.2f}"


def percent(share: Number, decimals: int = 1) -> str:
    """Return a share of 1 as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.{decimals}f} %"


def shares(each: Mapping[str, float]) -> str:
    """Return named shares of a whole."""
    return ", ".join(f"{name} {percent(share, 0)}" for name, share in each.items())


def dollars(value: Number) -> str:
    """Return an amount with at least cents, and with three digits that count."""
    if value is None:
        return UNKNOWN
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.4f}"


def size(size_bytes: Number) -> str:
    """Return a number of bytes in its unit."""
    if size_bytes is None:
        return UNKNOWN
    unit, scale = next((u for u in _UNITS if size_bytes >= u[1]), _UNITS[-1])
    return f"{size_bytes / scale:.3g} {unit}"


def seconds(duration_s: Number) -> str:
    """Return a duration in the unit that people would say it in."""
    if duration_s is None:
        return UNKNOWN
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 7200 else f"{duration_s / 3600:.1f} h"
