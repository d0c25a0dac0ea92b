"""Apply the structural rules and the billing audit; fail loudly when too little passes.

Reads: data/samples/DS.parquet, data/samples/DS.rejects.jsonl, models/target (tokenizer).
Writes: data/valid/DS.parquet, data/valid/DS.rejects.jsonl.
Run: python -m eyas.stages.validate select=chat. Source: eyas.tokens.checks.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_records, write_jsonl
from eyas.parquet import read_samples, write_samples
from eyas.records import Sample, Violation
from eyas.settings import Validate
from eyas.tokens.audit import audit_by_provider, length_metrics
from eyas.tokens.checks import Context, violations_of
from eyas.tokens.codecs import load_codec


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
    samples = list(read_samples(Path(f"data/samples/{name}.parquet"), hint=hint))
    context = Context(codec=codec, rules=rules)
    found = {sample.id: violations_of(sample, context) for sample in samples}
    kept = [flagged(s, found[s.id]) for s in samples if not is_rejected(found[s.id])]
    violations = [v for of_sample in found.values() for v in of_sample]
    rejects = [v for v in violations if v.severity == "reject"]
    share = len(kept) / max(1, len(samples) + len(earlier))
    if share < rules.min_accepted_share:
        raise EyasError(
            f"data set '{name}': {share:.1%} accepted, expected at least "
            f"{rules.min_accepted_share:.1%}\n{reasons_table([*earlier, *rejects])}",
            hint="mend the cause, or lower validate.min_accepted_share",
        )
    write_samples(Path(f"data/valid/{name}.parquet"), kept)
    write_jsonl(Path(f"data/valid/{name}.rejects.jsonl"), violations)
    return _report(samples, kept, rejects, share)


def is_rejected(violations: list[Violation]) -> bool:
    """Tell whether any violation is more than a flag."""
    return any(v.severity == "reject" for v in violations)


def flagged(sample: Sample, violations: list[Violation]) -> Sample:
    """Return the sample with the rules it merely bends added to its flags."""
    return replace(sample, flags=(*sample.flags, *(v.rule for v in violations)))


def reasons_table(rejects: list[Violation]) -> str:
    """Return one line a reason: how many, and an example."""
    counts = Counter(v.rule for v in rejects)
    example = {v.rule: f"{v.id}: {v.detail}" for v in reversed(rejects)}
    return "\n".join(f"  {n:>6}  {rule:<28} {example[rule]}" for rule, n in counts.most_common())


def _report(
    samples: list[Sample], kept: list[Sample], rejects: list[Violation], share: float
) -> Report:
    first_rule = {v.id: v.rule for v in reversed(rejects)}
    reasons = Counter(first_rule.values())
    audits = audit_by_provider(samples)
    billed = sum(a.billed_tokens for a in audits.values())
    rebuilt = sum(a.rebuilt_tokens for a in audits.values())
    replies = [end - start for sample in kept for start, end in sample.spans]
    prompts = [len(s.input_ids) - sum(e - b for b, e in s.spans) for s in kept]
    return Report(
        summary=f"{len(kept)} of {len(samples)} samples kept, {share:.1%} accepted in all, "
        f"billed {billed:,} tokens, rebuilt {rebuilt:,}",
        metrics={
            "rows_in": len(samples),
            "rows_out": len(kept),
            "accepted_share": round(share, 4),
            "billed_tokens": billed,
            "rebuilt_tokens": rebuilt,
            "billing_difference_share": round((billed - rebuilt) / max(1, billed), 6),
            **length_metrics("completion", replies),
            **length_metrics("prompt", prompts),
            **{f"rejects_{rule}": count for rule, count in sorted(reasons.items())},
        },
    )
