"""Apply the structural rules; fail loudly, writing nothing, when too little passes.

Reads: data/samples/DS.parquet, DS.rejects.jsonl and DS.providers.json beside it,
data/prompts/DS.jsonl (the tools that were declared), models/target (tokenizer).
Writes: data/valid/DS.parquet, data/valid/DS.rejects.jsonl.
Run: python -m eyas.stages.validate select=chat. Source: eyas.tokens.checks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json, read_jsonl, read_records, write_jsonl
from eyas.parquet import read_samples, write_samples
from eyas.records import Sample, Tool, Violation
from eyas.settings import Validate
from eyas.tokens.audit import length_metrics
from eyas.tokens.checks import Context, violations_of
from eyas.tokens.codecs import load_codec
from eyas.tokens.ledger import Account, account_metrics, rejected_providers

_EXAMPLE_WIDTH = 100


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Validate the selected data set."""
    run_stage("validate", work, config)


def work(params: Params) -> Report:
    """Check every sample, hold the gate, write."""
    name = params.value("select")
    rules = params.section("validate", Validate)
    codec = load_codec(params.section("target.codec", str), Path("models/target"))
    hint = f"run `dvc repro reconstruct@{name}`"
    earlier = read_records(Path(f"data/samples/{name}.rejects.jsonl"), Violation, hint=hint)
    accounts = read_json(Path(f"data/samples/{name}.providers.json"), hint=hint)
    context = Context(codec=codec, rules=rules, tools=_declared_tools(name))
    kept: list[Sample] = []
    found: list[Violation] = []
    for sample in read_samples(Path(f"data/samples/{name}.parquet"), hint=hint):
        violations = violations_of(sample, context)
        found += violations
        if all(v.severity == "flag" for v in violations):
            kept.append(flagged(sample, violations))
    dropped = first_rejects(found)
    total = len(kept) + len(dropped) + len(earlier)
    share = len(kept) / max(1, total)
    if not total:
        raise EyasError(f"data set '{name}': expected at least one sample, got none", hint=hint)
    if share < rules.min_accepted_share:
        raise EyasError(
            f"data set '{name}': {share:.1%} of {total} accepted, expected at least "
            f"{rules.min_accepted_share:.1%}\n{reasons_table([*earlier, *dropped])}"
            + "".join(f"\n  {reason}" for reason in rejected_providers(accounts).values()),
            hint="mend the cause, or lower validate.min_accepted_share",
        )
    write_samples(Path(f"data/valid/{name}.parquet"), kept)
    write_jsonl(Path(f"data/valid/{name}.rejects.jsonl"), found)
    return _report(kept, dropped, share, accounts)


def _declared_tools(name: str) -> dict[str, list[Tool]]:
    """Return the tools of the prompts that declare any, by prompt id."""
    path = Path(f"data/prompts/{name}.jsonl")
    rows = read_jsonl(path, hint=f"run `dvc repro prepare@{name}`")
    return {row["id"]: row["tools"] for row in rows if row.get("tools")}


def flagged(sample: Sample, violations: Sequence[Violation]) -> Sample:
    """Return the sample with the rules that it merely bends added to its flags."""
    return replace(sample, flags=(*sample.flags, *(v.rule for v in violations)))


def first_rejects(violations: Sequence[Violation]) -> list[Violation]:
    """Return one rejecting violation a sample, its first: so that counts add up."""
    rejects = (v for v in violations if v.severity == "reject")
    return list({v.id: v for v in reversed(list(rejects))}.values())[::-1]


def reasons_table(rejects: Sequence[Violation]) -> str:
    """Return one line a reason: how many, and an example."""
    counts = Counter(v.rule for v in rejects)
    examples = {v.rule: f"{v.id}: {v.detail}" for v in reversed(rejects)}
    lines = [f"  {'rows':>6}  {'reason':<26} example"]
    for rule, count in counts.most_common():
        lines.append(f"  {count:>6}  {rule:<26} {examples[rule][:_EXAMPLE_WIDTH]}")
    return "\n".join(lines)


def _report(
    kept: list[Sample], dropped: list[Violation], share: float, accounts: dict[str, Account]
) -> Report:
    reasons = Counter(v.rule for v in dropped)
    flags = Counter(flag for sample in kept for flag in sample.flags)
    replies = [end - start for sample in kept for start, end in sample.spans]
    prompts = [len(s.input_ids) - sum(end - start for start, end in s.spans) for s in kept]
    rows_in = len(kept) + len(dropped)
    return Report(
        summary=f"{len(kept)} of {rows_in} samples kept ({share:.1%} with those that reconstruct "
        f"rejected), {sum(prompts):,} prompt and {sum(replies):,} reply tokens",
        metrics={
            "rows_in": rows_in,
            "rows_out": len(kept),
            "accepted_share": round(share, 4),
            **length_metrics("prompt", prompts),
            **length_metrics("completion", replies),
            **account_metrics(accounts, kept),
            **{f"rejects_{rule}": count for rule, count in sorted(reasons.items())},
            **{f"flagged_{flag}": count for flag, count in sorted(flags.items())},
        },
    )


if __name__ == "__main__":
    main()
