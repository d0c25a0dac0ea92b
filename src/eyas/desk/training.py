"""What the stage train tells when it is done: metrics, curves, and a line."""

from collections.abc import Sequence

from eyas.desk import words
from eyas.desk.stage import Report
from eyas.drafter.schedule import Row


def build_report(
    facts: dict[str, float],
    curve: Sequence[Row],
    every_steps: int,
    shares: dict[str, float],
    about: tuple[str, bool],
) -> Report:
    """Return metrics, thinned curves and one line for the reader.

    `shares` is where time went; `about`: the type of the products, and was the run resumed.
    """
    dtype, resumed = about
    told = [dtype]
    if "best_epoch" in facts:  # with train.patience
        told.append(f"of {curve[-1]['epoch']} epochs number {facts['best_epoch']:.0f} is kept")
    told += ["resumed"] * resumed
    points = [
        (f"{row['split']}_{key}", row["step"], value)
        for row in curve
        if row["split"] == "val" or row["step"] % every_steps == 0
        for key, value in row.items()
        if key not in ("split", "step", "epoch")
    ]
    length = facts.get("val_simulated_acceptance_length", 0.0)
    summary = (
        f"{facts['steps']} steps over {facts['tokens']:,} tokens in {facts['wall_s']:.0f} s "
        f"({', '.join(told)}); simulated acceptance length on the validation split "
        f"{facts.get('val_simulated_acceptance_length_at_start', 0.0):.2f} -> {length:.2f} "
        f"with the bonus token, {facts['ttt_steps']} draft steps"
        f"{'; time: ' + words.shares(shares) if shares else ''}"
    )
    metrics = facts | {f"{kind}_share": share for kind, share in shares.items()}
    return Report(summary=summary, metrics=metrics, curves=tuple(points))
