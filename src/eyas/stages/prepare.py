"""Turn a data set's upstream rows into prompts and a held-out split.

Reads: the data set's source, models/target (template, tokenizer, context length).
Writes: data/prompts/DS.jsonl, data/heldout/DS.jsonl, data/prompts/DS.rejects.jsonl.
Run: python -m eyas.stages.prepare select=chat. Source: docs/contracts.md.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json, write_jsonl
from eyas.prompts.rows import ParsedRow
from eyas.prompts.schemas import parse_row
from eyas.prompts.screening import Screening
from eyas.prompts.selection import Plan, Selection, TargetFacts, check_plan, select
from eyas.prompts.sources import read_rows
from eyas.prompts.statistics import describe
from eyas.records import Prompt
from eyas.settings import DatasetPrepare, EvaluationSet, Heldout, PartitionRule, Source
from eyas.tokens.codecs import load_codec

TARGET = Path("models/target")
_SHOWN_REASONS = 3


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Prepare the selected data set."""
    run_stage("prepare", work, config)


def work(params: Params) -> Report:
    """Read, parse, select and write the rows of one data set."""
    name = params.value("select")
    if not name:
        raise EyasError(
            "no data set selected", hint="add select=NAME, a key under conf/datasets: select=chat"
        )
    source = params.section(f"datasets.{name}.source", Source)
    prepare = params.section(f"datasets.{name}.prepare", DatasetPrepare)
    plan = _plan(params, name, prepare)
    check_plan(plan)
    target = _target(params.section("target.codec", str))
    upstream = itertools.islice(read_rows(source), prepare.max_upstream_rows)
    selection = select((parse_row(prepare.schema, row) for row in upstream), plan, target)
    reasons = Counter(violation.rule for violation in selection.rejects)
    _check_filled(name, source, selection, reasons)
    write_jsonl(Path(f"data/prompts/{name}.jsonl"), _lines(selection.prompts))
    write_jsonl(Path(f"data/heldout/{name}.jsonl"), _lines(selection.heldout))
    write_jsonl(Path(f"data/prompts/{name}.rejects.jsonl"), selection.rejects)
    return _report(source, selection, reasons)


def _plan(params: Params, name: str, prepare: DatasetPrepare) -> Plan:
    return Plan(
        dataset=name,
        kind=params.section(f"datasets.{name}.kind", str),
        licence=params.section(f"datasets.{name}.licence", str),
        heldout_permille=params.section("heldout", Heldout).permille,
        max_rows=prepare.max_rows,
        seed=prepare.seed,
        partition=prepare.partition,
        partitions=params.section("partition", dict[str, PartitionRule]),
        screening=_screening(prepare),
    )


def _screening(prepare: DatasetPrepare) -> Screening:
    if prepare.overlap is None:
        return Screening(near_duplicate_jaccard=prepare.near_duplicate_jaccard)
    return Screening(
        near_duplicate_jaccard=prepare.near_duplicate_jaccard,
        passage_words=prepare.overlap.num_words,
        against_heldout=prepare.overlap.heldout,
        evaluation=tuple(row for known in prepare.overlap.against for row in _parsed(known)),
    )


def _parsed(known: EvaluationSet) -> Iterator[ParsedRow]:
    """Yield the rows that can be read; a broken evaluation row has no prompt to be leaked."""
    rows = (parse_row(known.schema, row) for row in read_rows(known.source))
    return (row for row in rows if isinstance(row, ParsedRow))


def _lines(prompts: Iterable[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield prompts as they are written: a conversation is named only where rows share one."""
    for prompt in prompts:
        line = asdict(prompt)
        if not prompt.conversation:
            del line["conversation"]
        yield line


def _target(codec_name: str) -> TargetFacts:
    codec = load_codec(codec_name, TARGET)
    config = read_json(TARGET / "config.json", hint="dvc repro target")
    return TargetFacts(
        count_tokens=lambda messages, tools: len(codec.render_prompt(messages, tools)),
        has_special_text=codec.has_special_text,
        context_tokens=config.get("text_config", config)["max_position_embeddings"],
    )


def _check_filled(
    name: str, source: Source, selection: Selection, reasons: Mapping[str, int]
) -> None:
    if selection.prompts:
        return
    where = f"data set '{name}' from {source.package or source.repo or source.kind} {source.path}"
    most = Counter(reasons).most_common(_SHOWN_REASONS)
    counts = ", ".join(f"{reason} {count}" for reason, count in most) or "none rejected"
    raise EyasError(
        f"{where}: expected prompts, got none of {selection.rows_in} rows ({counts}, "
        f"{len(selection.heldout)} held out)",
        hint=f"check datasets.{name}.source and .prepare (schema, max_rows) under conf/datasets",
    )


def _report(source: Source, selection: Selection, reasons: Mapping[str, int]) -> Report:
    tokens = sum(prompt.prompt_tokens for prompt in selection.prompts)
    metrics = {
        "rows_in": selection.rows_in,
        "prompts": len(selection.prompts),
        "heldout": len(selection.heldout),
        "not_selected": selection.not_selected,
        "prompt_tokens": tokens,
        **describe(selection.prompts),
        **{f"rejects_{reason}": count for reason, count in sorted(reasons.items())},
    }
    summary = (
        f"{selection.rows_in} rows: {len(selection.prompts)} prompts ({tokens:,} tokens), "
        f"{len(selection.heldout)} held out, {selection.not_selected} not selected, "
        f"{len(selection.rejects)} rejected"
    )
    read = (Path(source.path),) if source.kind == "file" and source.path else ()
    return Report(summary=summary, metrics=metrics, inputs=read)


if __name__ == "__main__":
    main()
