"""Bring answers bought elsewhere into a data set's journal: `eyas import DATASET FILE`.

Reads: params.yaml, data/prompts/DATASET.jsonl, a JSONL file. Writes: var/journal/DATASET.
A row of the file is a Response of another clone, or {id | messages, content, completion_tokens or
true_ids} and, where known, reasoning, tool_calls, finish_reason, prompt_tokens, cost_usd, model,
provider. What is held counts towards the budget; nothing is asked that is held.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from eyas.desk.params import Params
from eyas.errors import EyasError
from eyas.files import read_records
from eyas.generation.jobs import Job, build_jobs
from eyas.generation.journal import Journal
from eyas.generation.outcomes import FINISHED
from eyas.records import Prompt, Response, canonical_json
from eyas.settings import Dataset

SOURCE = "imported"
_EXAMPLES = 3


@dataclass(slots=True)
class Import:
    """What became of a file's rows."""

    taken: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Count a row that is not taken, with its place."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, [])
        if len(self.examples[reason]) < _EXAMPLES:
            self.examples[reason].append(where)

    def lines(self) -> Iterator[str]:
        """Yield a line for what was taken and one for each reason."""
        yield f"{self.taken} answers taken"
        for reason, count in self.skipped.most_common():
            yield f"{count} skipped: {reason} ({', '.join(self.examples[reason])})"


def import_answers(params: Params, dataset: str, file: Path) -> Import:
    """Write every answer of the file that fits a prompt and is not held into the journal.

    Raises: EyasError if there is no file or there are no prompts.
    """
    from eyas.desk.plan import JOURNAL, wish_of

    if not file.is_file():
        raise EyasError(f"{file}: no such file")
    hint = f"run `dvc repro prepare@{dataset}`"
    prompts = read_records(Path(f"data/prompts/{dataset}.jsonl"), Prompt, hint=hint)
    wish = wish_of(params, params.section(f"datasets.{dataset}", Dataset))
    jobs = build_jobs(prompts, wish)
    free = _by_key(jobs)
    result = Import()
    with Journal(JOURNAL / dataset) as journal:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if line.strip():
                _take(line, f"{file}:{number}", free, journal, result)
    return result


def _by_key(jobs: list[Job]) -> dict[str, list[Job]]:
    """Return the jobs of each prompt, under its id and under its messages."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        for key in (job.prompt.id, _key_of(job.prompt.messages)):
            found.setdefault(key, []).append(job)
    return found


def _key_of(messages: Any) -> str:
    return canonical_json(list(messages)).decode()


def _take(
    line: bytes, where: str, jobs: Mapping[str, list[Job]], journal: Journal, result: Import
) -> None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        result.skip("not JSON", where)
        return
    if not isinstance(row, dict):
        result.skip("not an object", where)
        return
    wanted = jobs.get(str(row.get("id"))) or jobs.get(_key_of(row.get("messages") or []))
    if not wanted:
        result.skip("no prompt with this id or these messages", where)
        return
    job = next((job for job in wanted if job.fingerprint not in journal.entries), None)
    if job is None:
        result.skip("held already", where)
        return
    try:
        response = response_from(row, job)
    except (ValueError, TypeError) as error:
        result.skip(str(error), where)
        return
    journal.write("responses", asdict(response))
    result.taken += 1


def response_from(row: Mapping[str, Any], job: Job) -> Response:
    """Return a row as the answer to a job.

    Raises: ValueError naming what is missing or of another type.
    """
    content, reasoning = row.get("content"), row.get("reasoning")
    calls = row.get("tool_calls") or []
    for name, value in (("content", content), ("reasoning", reasoning)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} is no text")
    if not (content or reasoning or calls):
        raise ValueError("no content, reasoning or tool_calls")
    finish = row.get("finish_reason") or ("tool_calls" if calls else "stop")
    if finish not in FINISHED:
        raise ValueError(f"finish_reason '{finish}'")
    ids = row.get("true_ids")
    tokens = _count(row, "completion_tokens") or len(ids or ())
    if not tokens:  # nothing to check the rebuilt ids against
        raise ValueError("neither completion_tokens nor true_ids")
    return Response(
        id=job.prompt.id,
        fingerprint=job.fingerprint,
        sample=job.sample,
        model=str(row.get("model") or ""),
        provider=str(row.get("provider") or ""),
        generation_id=str(row.get("generation_id") or ""),
        reasoning=reasoning,
        content=content,
        tool_calls=tuple(calls),
        finish_reason=finish,
        native_finish_reason=row.get("native_finish_reason"),
        prompt_tokens=_count(row, "prompt_tokens") or job.prompt.prompt_tokens,
        completion_tokens=tokens,
        cost_usd=float(row.get("cost_usd") or 0.0),
        latency_s=float(row.get("latency_s") or 0.0),
        attempts=0,
        source=SOURCE,
        sampling=dict(row.get("sampling") or {}),
        usage=dict(row.get("usage") or {}),
        true_ids=tuple(map(int, ids)) if ids else None,
        quantization=row.get("quantization"),
    )


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name) or (row.get("usage") or {}).get(name) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is no count")
    return value
