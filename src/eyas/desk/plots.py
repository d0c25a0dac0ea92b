"""The report's plots, as SVG text that follows the page's colours and reads in grey.

Source: matplotlib's SVG backend; line styles and hatches carry what colour carries.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

_STYLES = ("-", "--", "-.", ":")
_HATCHES = ("", "//", "..", "xx")
_COLOURS = ("#1f6f8b", "#d98032", "#6b8f3c", "#8a5a9e")
_GREY = "#808080"
_SIZE_IN = (6.4, 3.2)
Series = Mapping[str, Sequence[float]]


def bars(labels: Sequence[str], series: Series, ylabel: str) -> bytes:
    """Return grouped bars, a group a label, as SVG."""
    figure, axes = _figure()
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [i + (index - (len(series) - 1) / 2) * width for i in range(len(labels))]
        drawn = axes.bar(
            places,
            values,
            width,
            label=name,
            color=_COLOURS[index % 4],
            hatch=_HATCHES[index % 4],
            edgecolor=_GREY,
        )
        axes.bar_label(drawn, [f"{v:,.4g}" for v in values], fontsize=7, color=_GREY)
    axes.set_xticks(range(len(labels)), labels)
    return _finished(figure, axes, ylabel, legend=len(series) > 1)


def lines(xs: Mapping[str, Sequence[float]], ys: Series, xlabel: str, ylabel: str) -> bytes:
    """Return one line a name, as SVG."""
    figure, axes = _figure()
    for index, (name, values) in enumerate(ys.items()):
        axes.plot(
            xs[name],
            values,
            _STYLES[index % 4],
            label=name,
            color=_COLOURS[index % 4],
            marker="o" if len(values) < 12 else None,
        )
    axes.set_xlabel(xlabel)
    return _finished(figure, axes, ylabel, legend=len(ys) > 1)


def histogram(values: Mapping[str, Sequence[int]], xlabel: str) -> bytes:
    """Return the distributions of counts, an outline a name, as SVG."""
    figure, axes = _figure()
    top = max((max(v) for v in values.values() if v), default=1)
    edges = [top * i / 20 for i in range(21)]
    for index, (name, counts) in enumerate(values.items()):
        axes.hist(
            counts,
            bins=edges,
            histtype="step",
            linewidth=1.6,
            linestyle=_STYLES[index % 4],
            color=_COLOURS[index % 4],
            label=name,
        )
    axes.set_xlabel(xlabel)
    return _finished(figure, axes, "replies", legend=len(values) > 1)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    return figure, figure.add_subplot()


def _finished(figure: Any, axes: Any, ylabel: str, *, legend: bool) -> bytes:
    import matplotlib

    axes.set_ylabel(ylabel, color=_GREY)
    axes.xaxis.label.set_color(_GREY)
    axes.tick_params(colors=_GREY)
    axes.grid(axis="y", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)
    if legend:
        axes.legend(frameon=False, fontsize=8, labelcolor=_GREY)
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "eyas", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()
