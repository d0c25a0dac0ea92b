"""Ask for every row once: admit, send, classify, journal; wait, stop and resume as the rules say.

One dispatcher decides what is sent next. A row that waits for its next try is an entry in a heap
and holds no connection; only requests in flight are tasks. None of them is ever cancelled to meet
a budget: it would be billed all the same.
"""

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from eyas.errors import EyasError
from eyas.generation.facts import Tally, View, facts_of, state_of
from eyas.generation.faults import FINAL, OVERLOAD
from eyas.generation.jobs import Job, Wish, build_body
from eyas.generation.journal import Journal
from eyas.generation.limiter import Limiter
from eyas.generation.limits import Limits, Spent
from eyas.generation.meter import Meter
from eyas.generation.outcomes import Outcome
from eyas.generation.patience import (
    HOPELESS,
    Plan,
    Providers,
    delay_s,
    hopeless,
    out_of_reach,
    outage_s,
    refusal,
)
from eyas.generation.progress import Progress
from eyas.generation.rows import Row, failure_of, head_of, response_of
from eyas.generation.signals import signals

_SYNC_RECORDS = 100
_TICK_S = 1.0
_LAG_S = 0.05  # a sleeper's rest; how late it wakes is the event loop's lag
log = logging.getLogger("eyas")


class Asker(Protocol):
    """Whoever sends a request body and classifies the answer."""

    async def ask(self, body: bytes) -> Outcome:
        """Return what became of the request."""
        ...


class Run:
    """One data set being asked; `go` is called once."""

    def __init__(
        self, wish: Wish, plan: Plan, journal: Journal, *, limits: Limits, tally: Tally
    ) -> None:
        self.tally = tally
        self._wish, self._plan, self._journal, self._limits = wish, plan, journal, limits
        self._limiter = Limiter(max(plan.concurrency.values()), time_scale=plan.time_scale)
        self._waiting: list[tuple[float, int, Row]] = []  # heap: due, tie-break, row
        self._serial = itertools.count()
        self._tasks: dict[asyncio.Task[None], Row] = {}
        self._load = 0.0  # in units of the limit: a row of a narrower partition weighs more
        self._wake, self._tick = asyncio.Event(), asyncio.Event()
        self._meter = Meter()
        self._providers = Providers(wish.endpoint.provider, plan.slugs)
        self._hopeless = self._silence = self._unstored = 0
        self._heard_s = 0.0  # when the last answer came
        self._interrupted = self._over = False
        self._dry = False  # nothing more is admitted
        self._started_s = 0.0
        self._stop: BaseException | None = None

    async def go(self, jobs: Sequence[Job], asker: Asker, progress: Progress) -> None:
        """Ask for `jobs` in this order until all have an end or the budget is reached.

        Raises: EyasError when the run had to stop, KeyboardInterrupt after Ctrl-C; either way
        whatever was answered is in the journal.
        """
        self._started_s = self._heard_s = time.monotonic()
        watcher = asyncio.create_task(self._watch(progress))
        sleeper = asyncio.create_task(self._feel_lag())
        try:
            with signals(self.interrupt, self.abandon):
                await self._dispatch(deque(jobs), asker)
        finally:
            self._over = True
            sleeper.cancel()
            self._tick.set()
            await watcher
        if self._unstored:
            log.error("%d answers that had been paid for could not be stored", self._unstored)
        if self._stop:
            raise self._stop

    def facts(self, now_s: float | None = None) -> dict[str, Any]:
        """Return the numbers of the run at this moment, facts.py."""
        return facts_of(
            *(self.tally, self._limits.tokens, self._limiter, self._meter),
            now_s=time.monotonic() if now_s is None else now_s,
            started_s=self._started_s,
            sent_s=(row.sent_s for row in self._tasks.values()),
        )

    def interrupt(self) -> None:
        """Drain at the first call, abandon what is in flight at the second."""
        if self._interrupted:
            self.abandon()
            return
        self._interrupted = True
        self._halt(KeyboardInterrupt())
        log.warning(
            "interrupted: waiting for %d requests in flight, they are billed anyway; "
            "Ctrl-C again abandons them",
            len(self._tasks),
        )

    def abandon(self) -> None:
        """Record and cancel what is in flight."""
        self._halt(KeyboardInterrupt())
        for task, row in self._tasks.items():
            estimate = self._estimate(row)
            with contextlib.suppress(EyasError):
                self._journal.write("abandoned", head_of(row) | {"estimated_tokens": estimate})
            self.tally.abandoned += 1
            task.cancel()

    async def _dispatch(self, todo: deque[Job], asker: Asker) -> None:
        while True:
            now_s = time.monotonic()
            if row := self._next(todo, now_s):
                self._send(row, asker, now_s)
                continue
            paused = now_s < self._limiter.paused_until_s
            if not self._tasks and (self._stop or not (self._waiting or paused)):
                return
            await self._sleep(now_s)

    def _next(self, todo: deque[Job], now_s: float) -> Row | None:
        """Return the row to send now: one whose wait is over, else the next that fits the budget.

        The order is kept strictly: taking a shorter prompt instead would bias what is kept.
        """
        if self._stop or not self._limiter.has_room(self._load, now_s):
            return None
        if self._waiting and self._waiting[0][0] <= now_s:
            row = heapq.heappop(self._waiting)[2]
            self.tally.waiting[row.waits_for] -= 1
            return row
        if todo and self._limits.admits(todo[0].prompt.prompt_tokens, todo[0].max_tokens):
            job = todo.popleft()
            return Row(job, self._limits.admit(job.prompt.prompt_tokens, job.max_tokens))
        self._dry = not self._waiting
        return None

    async def _sleep(self, now_s: float) -> None:
        """Wait until a request ends, a pause ends or a waiting row is due."""
        until_s = None
        if now_s < self._limiter.paused_until_s:
            until_s = self._limiter.paused_until_s
        elif self._waiting and self._waiting[0][0] > now_s and not self._stop:
            until_s = self._waiting[0][0]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), until_s and until_s - now_s)
        self._wake.clear()

    def _send(self, row: Row, asker: Asker, now_s: float) -> None:
        row.sends += 1
        row.first_s, row.sent_s = row.first_s or now_s, now_s
        self._write("issued", head_of(row))
        if self._journal.trouble:  # a request whose record may be missing is not sent
            return
        avoid = row.avoid | self._providers.aside
        body = build_body(row.job.prompt, row.job.sample, self._wish, avoid=avoid)
        task = asyncio.create_task(self._ask(row, body, asker))
        self._tasks[task] = row
        self._load += self._weight(row)
        self._limits.send(row.ticket, now_s)
        self.tally.requests_sent += 1
        task.add_done_callback(self._ended)

    async def _ask(self, row: Row, body: dict[str, Any], asker: Asker) -> None:
        started_s = time.monotonic()
        outcome = await asker.ask(orjson.dumps(body))
        now_s = time.monotonic()
        self.tally.new_usd += outcome.cost_usd
        if outcome.reply:
            self._limiter.on_success(self._load, now_s)
            self._keep(row, outcome, body, latency_s=now_s - started_s)
        else:
            self._fail(row, outcome, now_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        row = self._tasks.pop(task)
        self._load -= self._weight(row)
        if not task.cancelled() and (error := task.exception()):
            self._halt(error)
        self._wake.set()

    def _keep(self, row: Row, outcome: Outcome, body: dict[str, Any], *, latency_s: float) -> None:
        job = row.job
        prompt_tokens, completion_tokens = outcome.prompt_tokens, outcome.completion_tokens
        spent = Spent(
            prompt_tokens=job.prompt.prompt_tokens if prompt_tokens is None else prompt_tokens,
            completion_tokens=job.max_tokens if completion_tokens is None else completion_tokens,
            usd=outcome.cost_usd,
        )
        self._limits.settle(row.ticket, spent, time.monotonic())
        response = response_of(
            row,
            outcome,
            body,
            source=self._wish.endpoint.name,
            latency_s=latency_s,
            quantizations=self._plan.quantizations,
        )
        self._unstored += not self._write("responses", dataclasses.asdict(response))
        self._hopeless, self._silence, self._heard_s = 0, 0, time.monotonic()
        self.tally.count(response)
        self._providers.answered(response.provider)
        self._meter.answered(
            response.provider,
            time.monotonic(),
            latency_s=latency_s,
            tokens=(response.prompt_tokens, response.completion_tokens),
            usd=response.cost_usd,
            truncated=response.finish_reason == "length",
        )

    def _fail(self, row: Row, outcome: Outcome, now_s: float) -> None:
        charged = (outcome.prompt_tokens or 0) + (outcome.completion_tokens or 0)
        if outcome.maybe_billed and not charged and self._wish.endpoint.name != "local":
            charged = self._estimate(row)
        self._limits.charge(charged, outcome.cost_usd)
        self.tally.failures[outcome.reason] += 1
        self.tally.maybe_billed += outcome.maybe_billed
        self._meter.failed(outcome.provider, outcome.reason, now_s)
        final = outcome.kind == "reject" and outcome.reason in FINAL
        self._write("failures", failure_of(row, outcome, charged_tokens=charged, final=final))
        match outcome.kind:
            case "stop":
                self._halt(refusal(outcome))
            case "reject" if self._providers.pass_on(row, outcome):
                self._again(row, outcome, now_s)
            case "reject":
                self._give_up(row, outcome)
            case _:
                self._again(row, outcome, now_s)

    def _again(self, row: Row, outcome: Outcome, now_s: float) -> None:
        """Queue a row for its next try, unless it has had enough of them."""
        crowded = outcome.kind == "pause" or outcome.reason in OVERLOAD
        if crowded:
            self._limiter.on_overload(now_s, outcome.reason)
        wait_s = delay_s(self._plan, row, outcome)
        if outcome.kind == "pause":
            self._limiter.pause(now_s + wait_s)
        out = self._is_out(outcome, now_s)
        row.failures += not (crowded or out)
        row.maybe_billed += outcome.maybe_billed
        spent = row.failures >= self._plan.attempts or row.maybe_billed > 1
        if spent or (crowded and now_s - row.first_s > self._plan.patience_s):
            self._give_up(row, outcome)
            return
        self._limits.rest(row.ticket)
        row.waits_for = outcome.reason
        self.tally.waiting[outcome.reason] += 1
        heapq.heappush(self._waiting, (now_s + wait_s, next(self._serial), row))

    def _is_out(self, outcome: Outcome, now_s: float) -> bool:
        """Tell whether the whole endpoint is out: then all wait, and no row is to blame.

        One that stays silent for longer than a row's patience ends the run.
        """
        if outcome.kind != "retry" or outcome.reason in OVERLOAD:
            return False
        self._silence += 1
        if self._silence < HOPELESS:
            return False
        silent_s = now_s - self._heard_s
        self._limiter.pause(now_s + outage_s(self._plan, self._silence))
        if silent_s > self._plan.patience_s:
            self._halt(out_of_reach(outcome, silent_s))
        return True

    def _give_up(self, row: Row, outcome: Outcome) -> None:
        self._limits.void(row.ticket)
        self.tally.failed_rows[outcome.reason] += 1
        self._hopeless += outcome.reason not in FINAL or outcome.reason == "unknown_shape"
        if self._hopeless >= HOPELESS:
            self._halt(hopeless(outcome))

    def _write(self, name: str, record: dict[str, Any]) -> bool:
        """Append to the journal; on a full disk stop the run. Tell whether it was stored."""
        stored = True
        try:
            self._journal.write(name, record)
        except EyasError:
            stored = False
        if self._journal.trouble:
            self._halt(self._journal.trouble)
        if self._journal.unsynced >= _SYNC_RECORDS:
            self._tick.set()
        return stored

    def _halt(self, error: BaseException) -> None:
        """Send nothing more; the first reason stays."""
        self._stop = self._stop or error
        self._wake.set()

    def _weight(self, row: Row) -> float:
        return self._limiter.maximum / self._plan.concurrency[row.job.prompt.partition]

    def _estimate(self, row: Row) -> int:
        mean = self._limits.tokens.mean_tokens()
        return row.job.prompt.prompt_tokens + int(row.job.max_tokens if mean is None else mean)

    async def _watch(self, progress: Progress) -> None:
        """Every second, or 100 records, bring the journal to the disk and show how it goes."""
        while not self._over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._tick.wait(), _TICK_S)
            self._tick.clear()
            if self._journal.unsynced:
                try:
                    await asyncio.to_thread(self._journal.sync)
                except OSError as error:
                    self._halt(EyasError(f"{self._journal.folder}: cannot sync ({error.strerror})"))
            self.tally.in_flight = len(self._tasks)
            progress.show(self._view(time.monotonic()))

    async def _feel_lag(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_LAG_S)
            self._meter.lagged(max(time.monotonic() - before_s - _LAG_S, 0.0))

    def _view(self, now_s: float) -> View:
        return View(
            state=state_of(self._limiter, now_s, stopping=bool(self._stop), dry=self._dry),
            reason=str(self._stop or ""),
            facts=self.facts(now_s),
        )
