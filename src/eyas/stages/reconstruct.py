"""Rebuild the exact token ids of a data set's replies, and check them against the bill.

Reads: data/prompts/DS.jsonl, data/responses/DS.jsonl, models/target (tokenizer, template).
Writes: data/samples/DS.parquet, data/samples/DS.rejects.jsonl.
Run: python -m eyas.stages.reconstruct select=chat. Source: eyas.tokens.rebuild.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.desk.workers import Recipe, num_workers, spread
from eyas.errors import EyasError
from eyas.files import iter_records, write_jsonl
from eyas.parquet import write_samples
from eyas.records import Prompt, Response, Sample, Violation, outlined, packed
from eyas.settings import Validate
from eyas.tokens.audit import bill_metrics, truth_metrics
from eyas.tokens.codecs import load_codec
from eyas.tokens.rebuild import NEAR, Rebuilt, rebuild_response, rebuild_trajectory

Task = tuple[Prompt, Response | None]  # no response: a trajectory
_WORTH_BYTES = (
    8 << 20
)  # of text: what two seconds of a core get through, as starting a worker takes


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Reconstruct the selected data set."""
    run_stage("reconstruct", work, config)


def work(params: Params) -> Report:
    """Rebuild, count and write."""
    name = params.value("select")
    rules = params.section("validate", Validate)
    kind = params.section(f"datasets.{name}.kind", str)
    codec = params.section("target.codec", str)
    tasks = _trajectories(name) if kind == "trajectories" else _answers(name)
    processes = num_workers(_size_of(name), _WORTH_BYTES)
    pairs = spread(Recipe(make=rebuilder, arguments=(codec, rules)), tasks, processes)
    rebuilt: list[Rebuilt] = []
    results = (result for _, results in pairs for result in results)
    write_samples(Path(f"data/samples/{name}.parquet"), _samples(results, rebuilt))
    samples = [r.result for r in rebuilt if isinstance(r.result, Sample)]
    rejects = [r.result for r in rebuilt if isinstance(r.result, Violation)]
    write_jsonl(Path(f"data/samples/{name}.rejects.jsonl"), rejects)
    return _report(rebuilt, samples, rejects)


def rebuilder(codec_name: str, rules: Validate) -> Callable[[Task], list[Rebuilt]]:
    """Return the function that rebuilds one answer, or one trajectory; samples are packed."""
    codec = load_codec(codec_name, Path("models/target"))

    def rebuild(task: Task) -> list[Rebuilt]:
        prompt, response = task
        if response is None:
            return [_with_ids(r, packed) for r in rebuild_trajectory(prompt, codec)]
        return [_with_ids(rebuild_response(prompt, response, codec, rules), packed)]

    return rebuild


def _with_ids(one: Rebuilt, form: Callable[[Sample], Sample]) -> Rebuilt:
    return replace(one, result=form(one.result)) if isinstance(one.result, Sample) else one


def _samples(results: Iterable[Rebuilt], told: list[Rebuilt]) -> Iterator[Sample]:
    """Yield the samples; every result goes into `told`, without ids, so that memory is bounded."""
    for one in results:
        if isinstance(one.result, Sample):
            yield one.result
        told.append(_with_ids(one, outlined))


def _size_of(name: str) -> int:
    paths = [Path(f"data/{kind}/{name}.jsonl") for kind in ("prompts", "responses")]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _trajectories(name: str) -> Iterator[Task]:
    return ((prompt, None) for prompt in _prompts(name))


def _prompts(name: str) -> Iterator[Prompt]:
    hint = f"run `dvc repro prepare@{name}`"
    return iter_records(Path(f"data/prompts/{name}.jsonl"), Prompt, hint=hint)


def _answers(name: str) -> Iterator[Task]:
    path = Path(f"data/responses/{name}.jsonl")
    hint = f"run `dvc repro generate@{name}`"
    by_id = {prompt.id: prompt for prompt in _prompts(name)}
    response = None
    for response in iter_records(path, Response, hint=hint):
        if response.id not in by_id:
            raise EyasError(f"{path}: answers prompt {response.id}, which is not there", hint=hint)
        yield by_id[response.id], response
    if response is None:
        raise EyasError(f"{path}: expected at least one response, got none", hint=hint)


def _report(rebuilt: list[Rebuilt], samples: list[Sample], rejects: list[Violation]) -> Report:
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
