"""The report page: one self-contained HTML file that a person reads from top to bottom.

Reads: what `eyas.desk.results` reads, models/drafter/curves.jsonl, data/valid/*.parquet,
data/mixture/projection.json, models/target/eyas_target.json. What is not there is left out, and a
note says so.
"""

from pathlib import Path

from eyas.desk import markup, plots, projection_table
from eyas.desk.asked import prompt_table
from eyas.desk.bills import bill_table
from eyas.desk.figures import acceptance_figures, data_figures, training_figures
from eyas.desk.results import (
    ALL,
    DRAFTERS,
    TITLES,
    Results,
    passes_saved,
    share_kept,
)
from eyas.desk.words import UNKNOWN, dollars, number, percent, ratio, seconds, size
from eyas.files import read_json

SIDECAR = Path("models/target/eyas_target.json")
BASELINES = tuple(drafter for drafter in DRAFTERS if drafter != "trained")
GLOSSARY = (
    ("target", "the large model that answers; what it would say is never changed"),
    ("drafter", "the small model that guesses the target's next tokens, a chain of K at a time"),
    (
        "verification",
        "one forward pass of the target over a chain of drafts; the drafts up to the first wrong "
        "one are kept, and the target's own next token (the bonus token) comes with them",
    ),
    (
        "acceptance length",
        "tokens gained / verifications, over all prompts; plain decoding has 1.0, a chain of K "
        "drafts at most K + 1",
    ),
    (
        "acceptance by position",
        "the share of k-th drafts that were right where all drafts before them were",
    ),
    ("lossless", "the drafted reply has the very token ids of plain greedy decoding"),
    ("prompt lookup", "the free baseline: copies what followed the same words earlier in the text"),
    (
        "untrained start",
        "the drafter before training: a closed-form regression from the target's hidden states",
    ),
    ("random weights", "a drafter that has learned nothing; what noise scores"),
    (
        "TTT step",
        "training-time test: the drafter is trained on its own k-th guess, as it will be used",
    ),
    (
        "ids identical",
        "replies whose token ids equal those the endpoint really sampled; "
        "known only where the endpoint tells them",
    ),
    ("accepted", "samples that passed every rule / all answers and trajectories"),
)


def build_page(results: Results, root: Path, version: str) -> str:
    """Return the page; `version` says which sources made it."""
    target = read_json(root / SIDECAR) if (root / SIDECAR).is_file() else {}
    name = str(target.get("name", "the target"))
    body = [
        markup.paragraph("eyas · from prompts to an EAGLE-3 drafter", "kicker"),
        markup.heading(1, f"A drafter for {name}"),
        markup.paragraph(lead(results, name), "lead"),
        markup.cards(headline_cards(results)),
        markup.flow(flow_items(results)),
        *_gains(results),
        *_costs(results, root),
        *_rejects(results),
        *_training(results, root, run_facts(results, target, version)),
        markup.heading(2, "Terms"),
        markup.terms(GLOSSARY),
        markup.footer(
            "The drafter lies in `models/export` and loads in SGLang and vLLM. The numbers behind "
            "this page: `metrics/` and `data/evaluation.json`. Every run so far: `make ui`."
        ),
    ]
    return markup.page(f"eyas: a drafter for {name}", body)


def lead(results: Results, target: str) -> str:
    """Return the result in two sentences."""
    trained, lookup = results.tau("trained", ALL), results.tau("lookup", ALL)
    if trained is None:
        return "The drafter has not been evaluated yet; what there is so far stands below."
    words = (
        f"With this drafter, one forward pass of {target} yields {trained:.2f} tokens on average "
        f"where plain decoding yields 1 (greedy, {results.headline_steps} drafts a chain, prompts "
        "that training never saw)."
    )
    return words if lookup is None else f"{words} Copying from the prompt would yield {lookup:.2f}."


def headline_cards(results: Results) -> list[tuple[str, str, str]]:
    """Return the headline: value, what it is, what it rests on."""
    cards: list[tuple[str, str, str]] = []
    row, metrics = results.row("trained", ALL), results.metrics.get("evaluate", {})
    if row is not None:
        interval = f"95 % interval {row['tau_low']:.2f} to {row['tau_high']:.2f}"
        small = f"{interval}; K = {results.headline_steps}, bonus token counted"
        cards.append((ratio(row["tau"]), "acceptance length", small))
        untrained = results.tau("untrained", ALL)
        small = f"the untrained start has {ratio(untrained)}"
        cards.append((ratio(results.tau("lookup", ALL)), "prompt lookup, for free", small))
    if "lossless_share" in metrics:
        small = f"the ids of plain decoding, on {metrics['prompts']} held-out prompts"
        cards.append((percent(metrics["lossless_share"], 0), "lossless", small))
        timed = (results.evaluation or {}).get("wall_clock", {}).get("prompts", metrics["prompts"])
        small = f"of plain decoding; {timed} prompts, one at a time, on this machine"
        cards.append((f"{metrics['wall_clock_ratio']:.2f}x", "the speed", small))
        saved = percent(metrics["forward_passes_saved_share"], 0)
        cards.append((saved, "forward passes saved", "prefill counted on both sides"))
    if (cost := results.total("generate", "cost_usd")) is not None:
        small = f"for {number(results.total('generate', 'responses'))} answers"
        cards.append((f"${dollars(cost)}", "spent", small))
    return cards


def flow_items(results: Results) -> list[tuple[str, str, str]]:
    """Return what came out of each stage: count, thing, stage."""
    merge, extract = results.metrics.get("merge", {}), results.metrics.get("extract", {})
    train = results.metrics.get("train", {})
    items = (
        (number(results.total("prepare", "prompts")), "prompts", "prepare"),
        (number(results.total("generate", "responses")), "answers", "generate"),
        (number(results.total("reconstruct", "rows_out")), "samples", "reconstruct"),
        (number(results.total("validate", "rows_out")), "kept", "validate"),
        (number(merge.get("tokens")), "tokens", "merge"),
        (size(extract.get("size_bytes")), "of hidden states", "extract"),
        (number(train.get("steps")), "optimiser steps", "train"),
        (ratio(results.tau("trained", ALL)), "acceptance length", "evaluate"),
    )
    return [item for item in items if item[0] != UNKNOWN]


def _gains(results: Results) -> list[str]:
    parts = [markup.heading(2, "What the drafter gains")]
    if results.evaluation is None:
        return [*parts, markup.note("`data/evaluation.json` is not there: run `dvc repro`.")]
    parts.append(
        markup.paragraph(
            "The target decodes every held-out prompt twice, plainly and with drafts. "
            + real_loop_words(results)
        )
    )
    headings = ("held-out set", "prompts", "trained", "95 % interval")
    headings += tuple(TITLES[drafter] for drafter in BASELINES)
    rows = [gain_row(results, name) for name in (*results.heldout_sets, ALL)]
    caption = f"Acceptance length, K = {results.headline_steps}"
    parts.append(
        markup.table(caption, (*headings, "passes saved", "lossless", "in loops"), rows),
    )
    parts.append(markup.columns(markup.figure(*f) for f in acceptance_figures(results)))
    all_steps = [row for row in results.rows() if row["drafter"] == "trained"]
    positions = max((row["draft_steps"] for row in all_steps), default=0)
    by_position = [
        (
            row["dataset"],
            str(row["draft_steps"]),
            ratio(row["tau"]),
            *(percent(share, 0) for share in row["acceptance_by_position"]),
            *([""] * (positions - len(row["acceptance_by_position"]))),
        )
        for row in all_steps
    ]
    heads = ("held-out set", "K", "length", *(f"draft {k + 1}" for k in range(positions)))
    numbers = markup.table("The trained drafter at every K", heads, by_position)
    return [*parts, markup.folded("The numbers behind these plots", numbers)]


def real_loop_words(results: Results) -> str:
    """Return what the real loop showed, and what a reader must know of loops."""
    real = results.row("trained", ALL, method="real")
    words = ""
    if real is not None and "lossless_prompts" in real:
        count, prompts = real["lossless_prompts"], real["prompts"]
        words = f"Drafting changed no token in {count} of {prompts} replies. "
    row = results.row("trained", ALL)
    if row is not None and row["prompts_in_loops"]:
        words += (
            f"Replies that end in a loop: {row['prompts_in_loops']}. A loop is easy to foresee; "
            f"without them the acceptance length is {ratio(row['tau_without_loops'])}. "
        )
    return words + "Other K and the baselines are replays of the same replies."


def gain_row(results: Results, dataset: str) -> tuple[str, ...]:
    """Return a row of the acceptance table."""
    row, real = results.row("trained", dataset), results.row("trained", dataset, method="real")
    assert row is not None
    return (
        dataset,
        number(row["prompts"]),
        ratio(row["tau"]),
        f"{row['tau_low']:.2f} to {row['tau_high']:.2f}",
        *(ratio(results.tau(drafter, dataset)) for drafter in BASELINES),
        percent(passes_saved(real or row)),
        f"{real['lossless_prompts']} of {real['prompts']}"
        if real is not None and "lossless_prompts" in real
        else UNKNOWN,
        number(row["prompts_in_loops"]),
    )


def _costs(results: Results, root: Path) -> list[str]:
    headings = ("data set", "prompts", "held out", "answers", "cut off", "prompt tokens")
    headings += ("reply tokens", "cost, USD", "ids identical", "accepted")
    rows = [cost_row(results, name) for name in results.datasets]
    parts = [
        markup.heading(2, "What the data cost"),
        markup.paragraph(
            "Each prompt was answered by the target itself. Cost is what the endpoint charged, "
            "summed over answers; a data set of trajectories was written by the target before and "
            "costs nothing. Answers are cut off at their partition's `max_tokens`."
        ),
        markup.table("From prompts to samples", headings, [*rows, total_row(results)]),
        *prompt_table(results),
        *bill_table(results),
    ]
    drawn, missing = data_figures(results, root)
    if missing:
        parts.append(markup.note(f"Not drawn, since they are not there: {', '.join(missing)}."))
    parts += projection_table.section(root)
    return [*parts, markup.columns(markup.figure(*f) for f in drawn)]


def cost_row(results: Results, name: str) -> tuple[str, ...]:
    """Return a data set's row: counts, tokens, money, quality."""
    generate = ("responses", "truncated", "prompt_tokens", "completion_tokens")
    return (
        name,
        number(results.of("prepare", name, "prompts")),
        number(results.of("prepare", name, "heldout")),
        *(number(results.of("generate", name, metric)) for metric in generate),
        dollars(results.of("generate", name, "cost_usd")),
        percent(results.of("reconstruct", name, "identical_share")),
        percent(results.of("validate", name, "accepted_share")),
    )


def total_row(results: Results) -> tuple[str, ...]:
    """Return the row over all data sets."""
    generate = ("responses", "truncated", "prompt_tokens", "completion_tokens")
    known = results.total("reconstruct", "replies_of_known_ids")
    same = sum(
        (results.of("reconstruct", d, "identical_share") or 0)
        * (results.of("reconstruct", d, "replies_of_known_ids") or 0)
        for d in results.datasets
    )
    return (
        markup.TOTAL,
        number(results.total("prepare", "prompts")),
        number(results.total("prepare", "heldout")),
        *(number(results.total("generate", metric)) for metric in generate),
        dollars(results.total("generate", "cost_usd")),
        percent(same / known if known else None),
        percent(share_kept(results)),
    )


def _rejects(results: Results) -> list[str]:
    rows = reject_rows(results)
    parts = [markup.heading(2, "What was dropped, and why")]
    if not rows:
        return [*parts, markup.paragraph("Nothing: every row passed every rule.")]
    headings = ("stage: reason", *results.datasets, "sum")
    caption = "Rows dropped (each in data/*/*.rejects.jsonl)"
    return [*parts, markup.table(caption, headings, rows)]


def reject_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row for each reason: its stage, its rows in every data set, and their sum."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for stage in ("prepare", "generate", "reconstruct", "validate"):
        for dataset in results.datasets:
            for metric, count in results.metrics.get(f"{stage}-{dataset}", {}).items():
                if metric.startswith("rejects_") and count:
                    reason = metric.removeprefix("rejects_").replace("_", " ")
                    counts.setdefault((reason, stage), {})[dataset] = count
    for metric, count in results.metrics.get("merge", {}).items():
        if metric.startswith("rejects_") and count:
            reason = metric.removeprefix("rejects_").replace("_", " ")
            counts[(reason, "merge")] = {ALL: count}
    return [
        (
            f"{stage}: {reason}",
            *(number(by_set[d]) if d in by_set else UNKNOWN for d in results.datasets),
            number(sum(by_set.values())),
        )
        for (reason, stage), by_set in counts.items()
    ]


def _training(results: Results, root: Path, run: list[tuple[str, str]]) -> list[str]:
    train, extract = results.metrics.get("train", {}), results.metrics.get("extract", {})
    pairs = [
        *run,
        ("conversations", number(train.get("documents"))),
        ("tokens", number(train.get("tokens"))),
        ("supervised predictions", number(train.get("predictions"))),
        ("optimiser steps", number(train.get("steps"))),
        ("TTT steps", number(train.get("ttt_steps"))),
        ("tokens that the draft vocabulary covers", percent(train.get("vocabulary_coverage"))),
        ("hidden states", size(extract.get("size_bytes"))),
        (
            "stored states that name the target's token",
            percent(extract.get("teacher_argmax_agreement")),
        ),
        ("training time", seconds(train.get("wall_s"))),
    ]
    drawn = training_figures(root)
    boxes = [markup.figure(*f) for f in drawn]
    boxes.append(markup.facts("The run", (pair for pair in pairs if pair[1] != UNKNOWN)))
    parts = [markup.heading(2, "How training went")]
    if not drawn:
        parts.append(markup.note("`models/drafter/curves.jsonl` is not there, so no curves."))
    return [*parts, markup.columns(boxes)]


def run_facts(results: Results, target: dict[str, object], version: str) -> list[tuple[str, str]]:
    """Return what made this page."""
    export = results.metrics.get("export", {})
    pairs = (
        ("target", str(target.get("name", UNKNOWN))),
        ("target revision", str(target.get("revision", UNKNOWN))[:16]),
        ("codec", str(target.get("codec", UNKNOWN))),
        ("drafter parameters", number(export.get("parameters"))),
        ("drafter size", size(export.get("size_bytes"))),
        ("sources", version),
    )
    return [pair for pair in pairs if pair[1] != UNKNOWN]


def acceptance_picture(results: Results) -> bytes:
    """Return the README's picture: acceptance by held-out set, and by position."""
    from eyas.desk.figures import by_position, by_set

    bars = by_set(results)
    draws = {"Acceptance length": bars.draw, "Share of drafts accepted": by_position(results)}
    return plots.png_of(draws, max(3.2, bars.height_in))
