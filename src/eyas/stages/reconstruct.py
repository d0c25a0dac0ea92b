"""Rebuild the exact token ids of a data set's replies, and check them against the bill.

Reads: data/prompts/DS.jsonl, data/responses/DS.jsonl, models/target (tokenizer, template).
Writes: data/samples/DS.parquet, data/samples/DS.rejects.jsonl, data/samples/DS.providers.json.
Run: python -m eyas.stages.reconstruct select=chat. Source: eyas.tokens.rebuild, .providers.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_records, write_json, write_jsonl
from eyas.parquet import write_samples
from eyas.records import Prompt, Response, Sample, Violation
from eyas.settings import Validate
from eyas.tokens.audit import bill_metrics, truth_metrics
from eyas.tokens.codecs import Codec, load_codec
from eyas.tokens.ledger import Account, open_accounts, rejected_providers
from eyas.tokens.providers import AS_GIVEN, find_rules
from eyas.tokens.rebuild import NEAR, Rebuilt, rebuild_response, rebuild_trajectory


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Reconstruct the selected data set."""
    run_stage("reconstruct", work, config)


def work(params: Params) -> Report:
    """Rebuild, count and write."""
    name = params.value("select")
    rules = params.section("validate", Validate)
    kind = params.section(f"datasets.{name}.kind", str)
    codec = load_codec(params.section("target.codec", str), Path("models/target"))
    prompt_file = Path(f"data/prompts/{name}.jsonl")
    prompts = read_records(prompt_file, Prompt, hint=f"run `dvc repro prepare@{name}`")
    accounts: dict[str, Account] = {}
    if kind == "trajectories":
        rebuilt = [r for prompt in prompts for r in rebuild_trajectory(prompt, codec)]
    else:
        rebuilt, accounts = _rebuild_responses(name, prompts, codec, rules)
    samples = [r.result for r in rebuilt if isinstance(r.result, Sample)]
    rejects = [r.result for r in rebuilt if isinstance(r.result, Violation)]
    provider_file = Path(f"data/samples/{name}.providers.json")
    write_samples(Path(f"data/samples/{name}.parquet"), samples)
    write_jsonl(Path(f"data/samples/{name}.rejects.jsonl"), rejects)
    write_json(provider_file, accounts)
    return replace(_report(rebuilt, samples, rejects, accounts), artifacts=(provider_file,))


def _rebuild_responses(
    name: str, prompts: list[Prompt], codec: Codec, rules: Validate
) -> tuple[list[Rebuilt], dict[str, Account]]:
    """Find the providers' rules first, then rebuild every answer by the rule of its provider."""
    path = Path(f"data/responses/{name}.jsonl")
    hint = f"run `dvc repro generate@{name}`"
    responses = read_records(path, Response, hint=hint)
    if not responses:
        raise EyasError(f"{path}: expected at least one response, got none", hint=hint)
    by_id = {prompt.id: prompt for prompt in prompts}
    if strangers := [r.id for r in responses if r.id not in by_id]:
        raise EyasError(f"{path}: answers prompt {strangers[0]}, which is not there", hint=hint)
    found = find_rules(((by_id[r.id], r) for r in responses), codec)
    rule_of = {provider: finding.rule for provider, finding in found.items()}
    rebuilt = [
        rebuild_response(by_id[r.id], r, codec, rules, rule_of.get(r.provider, AS_GIVEN))
        for r in responses
    ]
    providers = (response.provider for response in responses)
    return rebuilt, open_accounts(zip(providers, rebuilt, strict=True), found)


def _report(
    rebuilt: list[Rebuilt],
    samples: list[Sample],
    rejects: list[Violation],
    accounts: dict[str, Account],
) -> Report:
    reasons = Counter(v.rule for v in rejects)
    flags = Counter(flag for sample in samples for flag in sample.flags)
    bill, truth = bill_metrics(rebuilt), truth_metrics(rebuilt)
    words = [f"{len(rebuilt)} in: {len(samples)} samples, {len(rejects)} rejected"]
    if bill:
        words.append(f"{bill['count_exact_share']:.2%} match the bill")
    if truth:
        words.append(
            f"{truth['identical_share']:.2%} identical to the ids really sampled "
            f"({truth['kept_identical_share']:.2%} of those kept)"
        )
    words += rejected_providers(accounts).values()
    return Report(
        summary=", ".join(words),
        metrics={
            "rows_in": len(rebuilt),
            "rows_out": len(samples),
            "near": flags.pop(NEAR, 0),
            **bill,
            **truth,
            **{f"rejects_{rule}": count for rule, count in sorted(reasons.items())},
            **{f"flagged_{flag}": count for flag, count in sorted(flags.items())},
        },
    )


if __name__ == "__main__":
    main()
