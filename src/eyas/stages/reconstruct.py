"""Rebuild the exact token ids of a data set's replies, and check them against the bill.

Reads: data/prompts/DS.jsonl, data/responses/DS.jsonl, models/target (tokenizer, template).
Writes: data/samples/DS.parquet; beside it DS.rejects.jsonl, DS.providers.json, and
DS.mismatches.jsonl (replies whose ids are not those really sampled, where these are known).
Run: python -m eyas.stages.reconstruct select=chat. Source: eyas.tokens.rebuild, .providers.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.workers import Recipe, num_workers, spread
from eyas.errors import EyasError
from eyas.files import iter_records, write_json, write_jsonl
from eyas.parquet import write_samples
from eyas.records import Prompt, Response, Sample, Violation, outlined, packed
from eyas.settings import Validate
from eyas.tokens.audit import bill_metrics, mismatches, truth_metrics, witness_metrics
from eyas.tokens.codecs import Codec, load_codec
from eyas.tokens.ledger import Account, open_accounts, rejected_providers
from eyas.tokens.providers import AS_GIVEN, Finding, ProviderRule, find_rules, rows_to_look_at
from eyas.tokens.rebuild import NEAR, Rebuilt, rebuild_response, rebuild_trajectory

TARGET = Path("models/target")
Task = tuple[Prompt, Response | None]  # no response: a trajectory
_WORTH_BYTES = (
    8 << 20
)  # of text: what two seconds of a core get through, as starting a worker takes


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Reconstruct the selected data set."""
    run_stage("reconstruct", work, config)


def work(params: Params) -> Report:
    """Find the providers' rules, rebuild, count and write."""
    name = params.value("select")
    rules = params.section("validate", Validate)
    kind = params.section(f"datasets.{name}.kind", str)
    codec = params.section("target.codec", str)
    found: dict[str, Finding] = {}
    if kind == "trajectories":
        tasks: Iterator[Task] = ((prompt, None) for prompt in _prompts(name))
    else:
        by_id = {prompt.id: prompt for prompt in _prompts(name)}
        found = _find_rules(name, by_id, _codec(codec, TARGET.resolve()))
        tasks = _answers(name, by_id)
    rule_of = {provider: finding.rule for provider, finding in found.items()}
    recipe = Recipe(make=rebuilder, arguments=(codec, rules, rule_of))
    results = spread(recipe, tasks, num_workers(_size_of(name), _WORTH_BYTES))
    told: list[tuple[str, Rebuilt]] = []
    write_samples(Path(f"data/samples/{name}.parquet"), _samples(results, told))
    accounts = open_accounts(told, found) if found else {}
    return _finish(name, [rebuilt for _, rebuilt in told], accounts)


def _find_rules(name: str, by_id: Mapping[str, Prompt], codec: Codec) -> dict[str, Finding]:
    """Read the answers twice, so that only those that are looked at are held."""
    chosen = rows_to_look_at(response for _, response in _answers(name, by_id))
    pairs = (pair for row, pair in enumerate(_answers(name, by_id)) if row in chosen)
    return find_rules(pairs, codec)


@functools.lru_cache(maxsize=1)  # the rules and one process's rebuilding take the same
def _codec(name: str, folder: Path) -> Codec:
    return load_codec(name, folder)


def rebuilder(
    codec_name: str, rules: Validate, rule_of: Mapping[str, ProviderRule]
) -> Callable[[Task], list[Rebuilt]]:
    """Return the function that rebuilds one answer, or one trajectory; samples are packed."""
    codec = _codec(codec_name, TARGET.resolve())

    def rebuild(task: Task) -> list[Rebuilt]:
        prompt, response = task
        if response is None:
            return [_with_ids(r, packed) for r in rebuild_trajectory(prompt, codec)]
        rule = rule_of.get(response.provider, AS_GIVEN)
        return [_with_ids(rebuild_response(prompt, response, codec, rules, rule), packed)]

    return rebuild


def _with_ids(one: Rebuilt, form: Callable[[Sample], Sample]) -> Rebuilt:
    return replace(one, result=form(one.result)) if isinstance(one.result, Sample) else one


def _samples(
    results: Iterable[tuple[Task, list[Rebuilt]]], told: list[tuple[str, Rebuilt]]
) -> Iterator[Sample]:
    """Yield the samples; every result goes into `told`, without ids, so that memory is bounded."""
    for (_, response), rebuilt in results:
        for one in rebuilt:
            if isinstance(one.result, Sample):
                yield one.result
            told.append((response.provider if response else "", _with_ids(one, outlined)))


def _size_of(name: str) -> int:
    paths = [Path(f"data/{kind}/{name}.jsonl") for kind in ("prompts", "responses")]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _prompts(name: str) -> Iterator[Prompt]:
    hint = f"run `dvc repro prepare@{name}`"
    return iter_records(Path(f"data/prompts/{name}.jsonl"), Prompt, hint=hint)


def _answers(name: str, by_id: Mapping[str, Prompt]) -> Iterator[tuple[Prompt, Response]]:
    path = Path(f"data/responses/{name}.jsonl")
    hint = f"run `dvc repro generate@{name}`"
    response = None
    for response in iter_records(path, Response, hint=hint):
        if response.id not in by_id:
            raise EyasError(f"{path}: answers prompt {response.id}, which is not there", hint=hint)
        yield by_id[response.id], response
    if response is None:
        raise EyasError(f"{path}: expected at least one response, got none", hint=hint)


def _finish(name: str, rebuilt: list[Rebuilt], accounts: dict[str, Account]) -> Report:
    samples = [r.result for r in rebuilt if isinstance(r.result, Sample)]
    rejects = [r.result for r in rebuilt if isinstance(r.result, Violation)]
    provider_file = Path(f"data/samples/{name}.providers.json")
    write_jsonl(Path(f"data/samples/{name}.rejects.jsonl"), rejects)
    mismatched = (row for one in rebuilt for row in mismatches(one))
    write_jsonl(Path(f"data/samples/{name}.mismatches.jsonl"), mismatched)
    write_json(provider_file, accounts)
    return replace(_report(rebuilt, samples, rejects, accounts), artifacts=(provider_file,))


def _report(
    rebuilt: list[Rebuilt],
    samples: list[Sample],
    rejects: list[Violation],
    accounts: dict[str, Account],
) -> Report:
    reasons = Counter(v.rule for v in rejects)
    flags = Counter(flag for sample in samples for flag in sample.flags)
    bill, truth = bill_metrics(rebuilt), truth_metrics(rebuilt)
    witness = witness_metrics(rebuilt)
    words = [f"{len(rebuilt)} in: {len(samples)} samples, {len(rejects)} rejected"]
    if bill:
        words.append(f"{bill['count_exact_share']:.2%} match the bill")
    if truth:
        words.append(
            f"{truth['identical_share']:.2%} identical to the ids really sampled "
            f"({truth['kept_identical_share']:.2%} of those kept), "
            f"{truth['identical_token_share']:.2%} of their tokens "
            f"({truth['kept_identical_token_share']:.2%})"
        )
    if witness.get("witnessed_share"):
        words.append(f"{witness['witnessed_share']:.2%} from token texts")
    words += rejected_providers(accounts).values()
    return Report(
        summary=", ".join(words),
        metrics={
            "rows_in": len(rebuilt),
            "rows_out": len(samples),
            "near": flags.pop(NEAR, 0),
            **bill,
            **truth,
            **witness,
            **{f"rejects_{rule}": count for rule, count in sorted(reasons.items())},
            **{f"flagged_{flag}": count for flag, count in sorted(flags.items())},
        },
    )


if __name__ == "__main__":
    main()
