"""What a client tells a capturing server of a shard, and how the server puts the shard together.

A shard's rows arrive one request each, in any order. The client writes the plan before the first;
a request's `rid` names store, shard, attempt and row. The server encodes each row as it comes and
writes the shard, in the store's own form, when the last is there.

Writes: <store>/<key>/shard-NNNNN.plan, and lm_head.safetensors where teachers are made (client);
the shard and its .json, or shard-NNNNN.ATTEMPT.fault with what went wrong (server).

Legend: T tokens, L aux layers, D hidden size, V vocabulary.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.records import Sample, Span
from eyas.states.codecs import Parts
from eyas.states.job import Job
from eyas.states.layout import Captured, make_layout
from eyas.states.shards import encode_row, shard_path, write_rows

PLAN, _FAULT = ".plan", ".fault"  # beside a shard
HEAD = "lm_head.safetensors"  # beside the shards, for the servers
_RID = re.compile(r"([0-9a-f]+)-(\d+)-([0-9a-f]+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A sample that will arrive; its ids come with it."""

    id: str
    length: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What the rows of a shard are, and how they are to be written."""

    attempt: str  # hex; rows of an earlier attempt are refused
    layers: tuple[int, ...]
    hidden_size: int
    layout: tuple[str, str, str, int | None, int]  # as layout.make_layout takes it
    rows: tuple[PlannedRow, ...]


def plan_of(job: Job, attempt: str, samples: Sequence[Sample]) -> ShardPlan:
    """Return the plan of a shard of these samples."""
    rows = (PlannedRow(id=s.id, length=len(s.input_ids), spans=s.spans) for s in samples)
    of = job.settings
    return ShardPlan(
        attempt=attempt,
        layers=job.layers,
        hidden_size=job.hidden_size,
        layout=(of.codec, of.final_codec, of.final_rows, of.teacher_k, of.final_every),
        rows=tuple(rows),
    )


def request_id(shard: Path, attempt: str, row: int) -> str:
    """Return the `rid` of a row's request."""
    number = int(shard.stem.removeprefix("shard-"))
    return f"{shard.parent.name}-{number}-{attempt}-{row}"


def place_of(rid: str, store: Path) -> tuple[Path, str, int]:
    """Return shard, attempt and row of a request; `store` is the server's name for runtime.store.

    Raises: EyasError if the rid is not one of ours: it is never taken for a path.
    """
    found = _RID.fullmatch(rid)
    if not found:
        raise EyasError(f"rid: expected KEY-SHARD-ATTEMPT-ROW, got '{rid}'")
    key, number, attempt, row = found.groups()
    return shard_path(store / key, int(number)), attempt, int(row)


def fault_path(shard: Path, attempt: str) -> Path:
    """Return where the server tells why an attempt at a shard has failed."""
    return shard.with_suffix(f".{attempt}{_FAULT}")


def write_plan(shard: Path, plan: ShardPlan) -> None:
    """Write the plan, and remove what an earlier attempt left."""
    for old in (shard.with_suffix(".json"), *shard.parent.glob(fault_path(shard, "*").name)):
        old.unlink(missing_ok=True)
    write_json(shard.with_suffix(PLAN), dataclasses.asdict(plan))


def read_plan(shard: Path) -> ShardPlan:
    """Read a shard's plan.

    Raises: EyasError if it is missing or of another release.
    """
    path = shard.with_suffix(PLAN)
    value = read_json(path, hint="does the server's EYAS_STORE name runtime.store?")
    try:
        rows = tuple(
            PlannedRow(id=r["id"], length=r["length"], spans=tuple((a, b) for a, b in r["spans"]))
            for r in value["rows"]
        )
        return ShardPlan(**value | {"rows": rows, "layers": tuple(value["layers"])})
    except (KeyError, TypeError) as error:
        raise EyasError(
            f"{path}: not a plan ({error})",
            hint="client and server run different releases of eyas",
        ) from None


@functools.lru_cache(maxsize=1)  # another store's frees this one's memory
def read_head(path: Path) -> torch.Tensor:
    """Read lm_head, onto the GPU where there is one."""
    return load_file(path, device="cuda" if torch.cuda.is_available() else "cpu")["lm_head"]


class Assembly:
    """A shard that is being put together."""

    def __init__(self, shard: Path, plan: ShardPlan) -> None:
        self.shard, self.plan, self.done = shard, plan, False
        self._layout = make_layout(*plan.layout)
        self._rows: dict[int, tuple[Sequence[int], Parts]] = {}

    def check(self, row: int, layers: Sequence[int], ids: Sequence[int], states: Captured) -> None:
        """Refuse a row that is not what the plan says.

        Raises: EyasError for other layers, a row that the plan has not, another length or shape.
        """
        plan = self.plan
        if tuple(layers) != plan.layers:
            raise EyasError(f"expected layers {plan.layers}, got {tuple(layers)}")
        if not row < len(plan.rows) or len(ids) != plan.rows[row].length:
            raise EyasError(f"{self.shard.name}: row {row} of {len(ids)} tokens is not in the plan")
        aux = (len(ids), len(plan.layers), plan.hidden_size)
        final = (len(ids), plan.hidden_size)
        got = tuple(states.aux_TLD.shape), tuple(states.final_TD.shape)
        if got != (aux, final):
            raise EyasError(f"{self.shard.name}: expected states of {(aux, final)}, got {got}")

    def add(self, row: int, ids: Sequence[int], states: Captured) -> None:
        """Encode a row; with the last one, write the shard.

        Raises: EyasError for states that no codec holds; OSError if the shard cannot be written.
        """
        about = self.plan.rows[row]
        head_VD = read_head(self.shard.with_name(HEAD)) if self._layout.teacher_k else None
        self._rows[row] = (ids, encode_row(about.id, about.spans, states, self._layout, head_VD))
        if len(self._rows) == len(self.plan.rows):
            ordered = [self._rows[number] for number in range(len(self.plan.rows))]
            write_rows(self.shard, [ids for ids, _ in ordered], [parts for _, parts in ordered])
            self._rows, self.done = {}, True
