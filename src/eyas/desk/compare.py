"""The page that holds two runs against each other: drafters, cost, data, changes, lineage.

Run: eyas report --compare RUN RUN; a RUN is what `eyas.desk.runs` reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.desk import markup, plots
from eyas.desk.digests import git
from eyas.desk.params import flatten
from eyas.desk.plots import Bars
from eyas.desk.results import ALL, headlines
from eyas.desk.runs import SOURCES, Run, difference
from eyas.desk.words import UNKNOWN, dollars, number, ratio

Row = tuple[str, ...]
_QUESTIONS = {  # the figures that answer, by the start of their names in MLflow
    "What did it cost?": ("data_cost", "data_failures", "data_prompt", "data_compl", "states_"),
    "Was the data clean?": ("data_accepted", "data_rejects", "data_responses", "data_mixture"),
    "How fast is it?": ("lossless", "wall_clock", "forward", "tau_", "accepted_"),
}
_LINEAGE = ("data set", "answers", "tokens", "USD", "USD a Mtok", "kept", "dropped", "providers")


def build_comparison(a: Run, b: Run) -> str:
    """Return the page: `b` against `a`."""
    names = (a.name, b.name)
    origins = [(what, *pair) for what, *pair in zip(_FACTS, origin(a), origin(b), strict=True)]
    body = [
        markup.paragraph("eyas · two runs compared", "kicker"),
        markup.heading(1, f"{b.name} against {a.name}"),
        markup.paragraph(lead(a, b), "lead"),
        *(markup.note(words) for words in warnings(a, b)),
        markup.heading(2, "Which drafter is better?"),
        *_acceptance(a, b),
        *_figures(a, b),
        markup.heading(2, "What changed between the two?"),
        _table("Parameters that differ", ("parameter", *names), differing(a.params, b.params)),
        _table("Data that differ (DVC's md5)", ("path", *names), _data(a, b)),
        _sources(a.commit, b.commit),
        markup.heading(2, "Where each drafter comes from"),
        _table("What each was made with", ("fact", *names), origins),
        *(
            _table(f"Data of {r.name}", (*_LINEAGE, "answers, md5"), lineage_rows(r))
            for r in (a, b)
        ),
        markup.footer("Made by `eyas report --compare`. Every run so far: `make ui`."),
    ]
    return markup.page(f"eyas: {b.name} against {a.name}", body)


def lead(a: Run, b: Run) -> str:
    """Return the result in two sentences."""
    first, second = a.results.tau("trained", ALL), b.results.tau("trained", ALL)
    if first is None or second is None:
        return "At least one of the two has not been evaluated, so no drafter can be called better."
    words = f"Acceptance length {second:.2f} against {first:.2f}"
    gap = difference(a.results, b.results)
    if gap is None:
        return f"{words}. They were not decoded on the same replies, so the gap has no interval."
    low, high = gap
    told = "better" if low > 0 else "worse" if high < 0 else "no difference that the prompts show"
    return f"{words}: {second - first:+.2f} (95 % {low:+.2f} to {high:+.2f}, paired): {told}."


def warnings(a: Run, b: Run) -> list[str]:
    """Return what a reader must know before comparing."""
    told = [f"{r.name}: `{p}` is not here, try `dvc fetch`." for r in (a, b) for p in r.missing]
    told += [f"{r.name}: made with uncommitted changes, not shown here." for r in (a, b) if r.dirty]
    if a.params.get("evaluate") != b.params.get("evaluate"):
        told.append("The two were evaluated with different settings: see the parameters.")
    return told


def _acceptance(a: Run, b: Run) -> list[str]:
    if not (a.results.evaluation and b.results.evaluation):
        return [markup.note("An evaluation is missing, so there is no table.")]
    sets = (*(n for n in a.results.heldout_sets if n in b.results.heldout_sets), ALL)
    rows = [_acceptance_row(a, b, name) for name in sets]
    runs = {f"A: {a.name}": a, f"B: {b.name}": b}
    bars = Bars(
        labels=sets,
        series={k: [r.results.tau("trained", n) or 1.0 for n in sets] for k, r in runs.items()},
        xlabel="tokens a verification; 1 is plain decoding",
        base=1.0,
        intervals={k: [_interval(r, n) for n in sets] for k, r in runs.items()},
    )
    told = "; ".join(f"{row[0]} {row[1]} and {row[3]}" for row in rows)
    alt = f"Bars of acceptance length of {a.name} and {b.name}: {told}."
    svg = plots.svg_of({"": bars.draw}, name="compare", alt=alt, height_in=bars.height_in)
    heads = ("held-out set", a.name, "95 %", b.name, "95 %", "gap", "95 %, paired")
    caption = f"Acceptance length of the trained drafters, K = {b.results.headline_steps}"
    words = "The bars begin at 1, where nothing is gained; lines are 95 % intervals."
    figure = markup.figure("Acceptance length by held-out set", svg, words)
    return [markup.table(caption, heads, rows), markup.columns([figure])]


def _acceptance_row(a: Run, b: Run, name: str) -> Row:
    taus = [run.results.tau("trained", name) or 1.0 for run in (a, b)]
    spans = [f"{low:.2f} to {high:.2f}" for low, high in (_interval(r, name) for r in (a, b))]
    gap = difference(a.results, b.results, None if name == ALL else name)
    paired = UNKNOWN if gap is None else f"{gap[0]:+.2f} to {gap[1]:+.2f}"
    moved = f"{taus[1] - taus[0]:+.2f}"
    return (name, ratio(taus[0]), spans[0], ratio(taus[1]), spans[1], moved, paired)


def _interval(run: Run, name: str) -> tuple[float, float]:
    row = run.results.row("trained", name) or {"tau_low": 1.0, "tau_high": 1.0}
    return row["tau_low"], row["tau_high"]


def _figures(a: Run, b: Run) -> list[str]:
    """Return a table for each question, of the figures that MLflow has under the same names."""
    told = [headlines(run.results, "evaluate") for run in (a, b)]
    parts: list[str] = []
    for question, starts in _QUESTIONS.items():
        names = sorted({n for figures in told for n in figures if n.startswith(starts)})
        rows = [_figure_row(name, *(figures.get(name) for figures in told)) for name in names]
        heads = ("figure", a.name, b.name, "gap")
        parts += [markup.heading(2, question), _table(f"{question} (MLflow's names)", heads, rows)]
    return parts


def _figure_row(name: str, first: float | None, second: float | None) -> Row:
    gap = UNKNOWN if first is None or second is None else f"{second - first:+,.5g}"
    return (name, *(UNKNOWN if v is None else f"{v:,.7g}" for v in (first, second)), gap)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Return a row for each leaf that differs."""
    first, second = ({k: str(v) for k, v in flatten("", tree)} for tree in (a, b))
    rows = ((n, first.get(n, UNKNOWN), second.get(n, UNKNOWN)) for n in sorted({*first, *second}))
    return [row for row in rows if row[1] != row[2]]


def _data(a: Run, b: Run) -> list[Row]:
    rows = differing(a.digests, b.digests)
    return [
        (path, one[:12], other[:12])
        for path, one, other in rows
        if path.startswith(("data/", "models/")) and not path.endswith(".rejects.jsonl")
    ]


def _sources(a: str, b: str) -> str:
    if not all(git("rev-parse", "--verify", "--quiet", f"{c}^{{commit}}") for c in (a, b)):
        return markup.note("Sources cannot be compared: a commit of the two is not in this clone.")
    changed = git("diff", "--stat=100", a, b, "--", *SOURCES).splitlines()
    words = f"Sources: `{a[:12]}` and `{b[:12]}`, "
    if not changed:
        return markup.paragraph(f"{words} the same in `{'`, `'.join(SOURCES)}`.")
    rows = [tuple(part.strip() for part in line.rsplit("|", 1)) for line in changed[:-1]]
    table = _table("Files that differ", ("file", "lines"), rows)
    return markup.folded(f"{words.replace('`', '')} {changed[-1].strip()}", table)


_FACTS = (
    "commit",
    "target",
    "target revision",
    "template",
    "asked",
    "providers allowed",
    "USD a Mtok",
)
_FACTS += ("temperature, top_p", "mixture", "mixture, md5", "aux layers")


def origin(run: Run) -> Row:
    """Return what a drafter was made with, in the order of `_FACTS`."""
    target, endpoint, sampling = (run.params[k] for k in ("target", "endpoint", "generate"))
    return (
        run.commit[:12] or UNKNOWN,
        target["name"],
        str(run.drafter.get("target_revision", UNKNOWN))[:16],
        target["codec"],
        f"{endpoint['model']} at {endpoint['name']}",
        _words(endpoint["provider"]) or "any",
        " / ".join(map(str, (endpoint["prices"] or {}).values())) or "the market's",
        f"{sampling['temperature']}, {sampling['top_p']}",
        ", ".join(run.results.datasets),
        run.digests.get("data/mixture/train.parquet", UNKNOWN)[:12],
        " ".join(map(str, run.drafter.get("aux_layers", (UNKNOWN,)))),
    )


def _words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def lineage_rows(run: Run) -> list[Row]:
    """Return a row a data set: what was bought of whom, what was kept, and the answers' digest."""
    rows: list[Row] = []
    for name in run.results.datasets:
        generate, valid = (
            run.results.metrics.get(f"{s}-{name}", {}) for s in ("generate", "validate")
        )
        known = {**run.results.metrics.get(f"reconstruct-{name}", {}), **valid}
        tokens = sum(generate.get(f"{kind}_tokens", 0) for kind in ("prompt", "completion"))
        cost = generate.get("cost_usd")
        rows.append(
            (
                *(name, number(generate.get("responses")), number(tokens), dollars(cost)),
                dollars(cost / tokens * 1e6) if cost and tokens else UNKNOWN,
                number(valid.get("rows_out")),
                _words(
                    {
                        k.removeprefix("rejects_"): v
                        for k, v in known.items()
                        if k.startswith("rejects_")
                    }
                )
                or "none",
                ", ".join(
                    k[9:-8] for k in valid if k.startswith("provider_") and k.endswith("_replies")
                ),
                run.digests.get(f"data/responses/{name}.jsonl", UNKNOWN)[:12],
            )
        )
    return rows


def _table(caption: str, heads: Row, rows: Sequence[Row]) -> str:
    return markup.table(caption, heads, rows) if rows else markup.paragraph(f"{caption}: none.")
