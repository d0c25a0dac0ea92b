"""Turn a data set's upstream rows into prompts and a held-out split.

Reads: the data set's source, models/target (tokenizer, template).
Writes: data/prompts/DS.jsonl, data/heldout/DS.jsonl, data/prompts/DS.rejects.jsonl.
Run: python -m eyas.stages.prepare select=chat. Source: docs/contracts.md.
"""

from collections import Counter
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import write_jsonl
from eyas.prompts.schemas import SCHEMAS, parse
from eyas.prompts.selection import Rules, Selection, select
from eyas.prompts.sources import read_rows
from eyas.settings import DatasetPrepare, Heldout, PartitionRule, Source
from eyas.tokens.codecs import load_codec

KINDS = ("prompts", "trajectories")
TARGET = Path("models/target")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Prepare the selected data set."""
    run_stage("prepare", work, config)


def work(params: Params) -> Report:
    """Parse, select and write the rows of one data set."""
    name = params.value("select")
    source = params.section(f"datasets.{name}.source", Source)
    prepare = params.section(f"datasets.{name}.prepare", DatasetPrepare)
    rules = _rules(params, name, prepare)
    if prepare.schema not in SCHEMAS:
        known = " | ".join(sorted(SCHEMAS))
        raise EyasError(f"datasets.{name}.prepare.schema: expected {known}, got '{prepare.schema}'")
    rows = (parse(prepare.schema, row, i) for i, row in enumerate(read_rows(source)))
    selection = select(rows, rules)
    _check_filled(name, selection, source)
    write_jsonl(Path(f"data/prompts/{name}.jsonl"), selection.prompts)
    write_jsonl(Path(f"data/heldout/{name}.jsonl"), selection.heldout)
    write_jsonl(Path(f"data/prompts/{name}.rejects.jsonl"), selection.rejects)
    return _report(selection)


def _rules(params: Params, name: str, prepare: DatasetPrepare) -> Rules:
    codec = load_codec(params.section("target.codec", str), TARGET)
    partitions = params.section("partition", dict[str, PartitionRule])
    kind = params.section(f"datasets.{name}.kind", str)
    licence = params.section(f"datasets.{name}.licence", str)
    if kind not in KINDS:
        raise EyasError(f"datasets.{name}.kind: expected {' | '.join(KINDS)}, got '{kind}'")
    if not licence.strip():
        raise EyasError(f"datasets.{name}.licence: empty", hint="name the rows' licence")
    if prepare.partition is not None and prepare.partition not in partitions:
        known = " | ".join(partitions)
        raise EyasError(
            f"datasets.{name}.prepare.partition: expected {known}, got '{prepare.partition}'"
        )
    return Rules(
        dataset=name,
        kind=kind,
        licence=licence,
        partitions=partitions,
        partition=prepare.partition,
        heldout_permille=params.section("heldout", Heldout).permille,
        max_rows=prepare.max_rows,
        seed=prepare.seed,
        count_tokens=lambda messages, tools: len(codec.render_prompt(messages, tools)),
        has_special_text=codec.has_special_text,
    )


def _check_filled(name: str, selection: Selection, source: Source) -> None:
    if selection.prompts:
        return
    reasons = Counter(v.rule for v in selection.rejects).most_common(3)
    raise EyasError(
        f"data set '{name}': no prompt left of {source.path or source.repo}; rejects: {reasons}",
        hint="check source, schema and max_rows under conf/datasets",
    )


def _report(selection: Selection) -> Report:
    reasons = Counter(v.rule for v in selection.rejects)
    prompts, heldout = len(selection.prompts), len(selection.heldout)
    rows_in = prompts + heldout + selection.not_selected + len(selection.rejects)
    tokens = sum(p.prompt_tokens for p in selection.prompts)
    return Report(
        summary=f"{rows_in} rows: {prompts} prompts ({tokens:,} tokens), {heldout} held out, "
        f"{selection.not_selected} not selected, {len(selection.rejects)} rejected",
        metrics={
            "rows_in": rows_in,
            "prompts": prompts,
            "heldout": heldout,
            "not_selected": selection.not_selected,
            "prompt_tokens": tokens,
            **{f"rejects_{reason}": count for reason, count in sorted(reasons.items())},
        },
    )
