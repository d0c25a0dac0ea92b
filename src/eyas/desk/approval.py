"""Remember what was said yes to: dollars a data set, given by `eyas plan --yes`.

Reads, writes: var/approved.json.
"""

from collections.abc import Mapping
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.generation.estimate import Estimate

FILE = Path("var/approved.json")
_CENT = 0.01  # rounding


def approve(usd: Mapping[str, float]) -> None:
    """Write the yes; one given before stays, also where it was higher."""
    before = _approved()
    now = {name: round(max(value, before.get(name, 0.0)), 6) for name, value in usd.items()}
    write_json(FILE, before | now)


def approved_usd(dataset: str) -> float:
    """Return the dollars allowed to a data set; 0 without a yes."""
    return _approved().get(dataset, 0.0)


def check_approved(dataset: str, foretold: Estimate, confirm_above_usd: float | None) -> None:
    """Refuse a run that may cost more than goes without a yes and more than got one.

    Raises: EyasError with what is expected and what is allowed.
    """
    if confirm_above_usd is None:
        return
    high = foretold.usd[2]
    allowed = max(confirm_above_usd, approved_usd(dataset))
    if high > allowed + _CENT:
        raise EyasError(
            f"generate@{dataset}: may cost up to ${high:.2f} ({foretold.basis}), "
            f"without a yes ${allowed:.2f} is allowed",
            hint="look at `eyas plan`, then say `eyas plan --yes`; nothing was sent",
        )


def _approved() -> dict[str, float]:
    return read_json(FILE, hint="remove it") if FILE.is_file() else {}
