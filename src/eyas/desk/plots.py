"""The report's plots: SVG that takes the page's colours, dark or light, and PNG for elsewhere.

A plot is a function that draws on given axes. Hatches, dashes and markers carry what colour
carries, so every plot reads in grey. Source: matplotlib's SVG backend; equal input, equal bytes.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INK, SOFT, LINE, CARD = "#22282c", "#5b666e", "#d8dcdf", "#fcfbf9"
_COLOURS = ("#1b6e8a", "#c4621a", "#66782a", "#7b57a4", "#8c8579")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (7, 2, 1, 2)))
_HATCHES = ("", "////", "---", "xx", "\\\\")
_MARKERS = "os^Dv"
_WIDTH_IN = 5.2
_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
}
Draw = Callable[[Any], None]  # on matplotlib axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series; `low` and `high` are an interval around it, `dots` draws points and no line."""

    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False
    style: int | None = None  # its number by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars, a group a label. They begin at `base`: the value that means nothing won."""

    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    xlabel: str
    base: float = 0.0
    stacked: bool = False
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None  # by series
    number: str = "{:.2f}"

    @property
    def height_in(self) -> float:
        """Return a height at which every bar has the same thickness."""
        rows = len(self.labels) * (1.6 if self.stacked else len(self.series) + 0.8)
        return 0.85 + 0.19 * rows

    def draw(self, axes: Any) -> None:
        """Draw, first label on top, the value at the end of each bar."""
        count = 1 if self.stacked else len(self.series)
        thickness = (0.62 if self.stacked else 0.84) / count
        starts = [self.base] * len(self.labels)
        for index, (name, values) in enumerate(self.series.items()):
            shift = 0.0 if self.stacked else (index - (count - 1) / 2) * thickness
            rows = [row + shift for row in range(len(self.labels))]
            axes.barh(
                rows,
                [max(0.0, value - self.base) for value in values],
                thickness,
                left=starts,
                label=name,
                color=_COLOURS[index % 5],
                hatch=_HATCHES[index % 5],
                edgecolor=CARD,
                linewidth=0.8,
            )
            if self.stacked:
                starts = [start + value for start, value in zip(starts, values, strict=True)]
            else:
                self._tell(axes, rows, values, self._interval(axes, name, rows))
        if self.stacked:
            self._tell(axes, range(len(self.labels)), starts, starts)
        axes.set_yticks(range(len(self.labels)), self.labels)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.set_xlim(left=self.base)
        axes.set_xlabel(self.xlabel)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="x")
        _legend(axes, len(self.series))

    def _interval(self, axes: Any, name: str, rows: Sequence[float]) -> Sequence[float]:
        """Draw the interval of a series, if it has one; return where its marks end."""
        bounds = (self.intervals or {}).get(name)
        if bounds is None:
            return self.series[name]
        axes.hlines(rows, [low for low, _ in bounds], [high for _, high in bounds], color=INK, lw=1)
        return [high for _, high in bounds]

    def _tell(
        self, axes: Any, rows: Sequence[float], values: Sequence[float], ends: Sequence[float]
    ) -> None:
        for row, value, end in zip(rows, values, ends, strict=True):
            axes.annotate(
                self.number.format(value),
                (max(value, end, self.base), row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )


def lines(series: Mapping[str, Line], xlabel: str, ylabel: str, *, whole: bool = False) -> Draw:
    """Return a plot of lines; `whole` marks every whole number of the x axis."""

    def draw(axes: Any) -> None:
        for index, (name, line) in enumerate(series.items()):
            number = index if line.style is None else line.style
            colour = _COLOURS[number % 5]
            axes.plot(
                line.xs,
                line.ys,
                linestyle="none" if line.dots else _DASHES[number % 4],
                marker=_MARKERS[number % 5] if line.dots or len(line.xs) < 12 else None,
                markersize=6 if line.dots else 5,
                markerfacecolor=CARD if line.dots else colour,
                markeredgecolor=colour,
                color=colour,
                linewidth=1.8,
                label=name,
            )
            if line.low:
                axes.fill_between(line.xs, line.low, line.high, color=colour, alpha=0.15, lw=0)
        if whole:
            axes.set_xticks(sorted({int(x) for line in series.values() for x in line.xs}))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(axis="y")
        _legend(axes, len(series))

    return draw


def distribution(values: Sequence[int], top: int, xlabel: str) -> Draw:
    """Return a histogram up to `top`, its median marked."""

    def draw(axes: Any) -> None:
        edges = [top * i / 24 for i in range(25)]
        axes.hist(values, bins=edges, color=_COLOURS[0], edgecolor=CARD, linewidth=0.8)
        middle = sorted(values)[len(values) // 2]
        axes.axvline(middle, color=INK, linewidth=1.2, linestyle=_DASHES[1])
        axes.annotate(
            f"median {middle:,}",
            (middle, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2) if middle < 0.7 * top else (-4, -2),
            textcoords="offset points",
            va="top",
            ha="left" if middle < 0.7 * top else "right",
            fontsize=8.5,
        )
        axes.set_xlim(0, top)
        axes.margins(y=0.25)
        axes.set_xlabel(xlabel)
        axes.grid(axis="y")
        axes.locator_params(axis="y", nbins=3, integer=True)

    return draw


def svg_of(draws: Mapping[str, Draw], *, name: str, alt: str, height_in: float = 2.9) -> str:
    """Return an inline SVG of plots below each other, titled by their names, if they have one.

    `name` makes the ids in it unique on the page; `alt` is read out in its place. Colours become
    the page's CSS variables.
    """
    import html

    import matplotlib

    out = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = _figure((_WIDTH_IN, height_in))
        places = figure.subplots(len(draws), squeeze=False).flat
        for axes, (title, draw) in zip(places, draws.items(), strict=True):
            draw(axes)
            axes.set_title(title)
        figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    text = out.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in _variables().items():
        body = body.replace(colour, f"var({variable})")
    size = f"0 0 {_WIDTH_IN * 72:.0f} {height_in * 72:.0f}"
    label = html.escape(alt, quote=True)
    return f'<svg class="plot" viewBox="{size}" role="img" aria-label="{label}">{body}'.strip()


def png_of(draws: Mapping[str, Draw], height_in: float) -> bytes:
    """Return a PNG, on its own background, of plots beside each other, titled by their names."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = _figure((_WIDTH_IN * len(draws), height_in))
        parts = figure.subfigures(1, len(draws), squeeze=False).flat
        for part, (title, draw) in zip(parts, draws.items(), strict=True):
            part.set_facecolor(CARD)
            part.suptitle(title, x=0.02, ha="left")
            draw(part.subplots())
        figure.savefig(out, format="png", dpi=150, facecolor=CARD, metadata={"Software": None})
    return out.getvalue()


def _figure(size_in: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=size_in, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))


def _variables() -> dict[str, str]:
    """Return the CSS variable of each colour."""
    named = {INK: "--ink", SOFT: "--soft", LINE: "--line", CARD: "--card"}
    return named | {colour: f"--c{i}" for i, colour in enumerate(_COLOURS)}


def _legend(axes: Any, count: int) -> None:
    if count > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if count < 5 else 3)
