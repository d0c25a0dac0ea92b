"""SGLang 0.5.23 plugin: the states of each prefill go straight into the store's shards.

Entry point `eyas` of the group `sglang.srt.plugins`: SGLang calls `register` in each of its
processes. Idle unless EYAS_STORE names the folder of the shards (runtime.store, as this machine
sees it). SGLang itself is not patched, no state travels as JSON, and under tensor parallelism rank
0 alone writes. Imports torch, numpy, safetensors and orjson, which an SGLang environment has.

A request: POST /generate with `input_ids`, a `rid` of states/handover.py, `return_hidden_states`
and one new token. What cannot be kept whole is refused with HTTP 400 and the server goes on.
Source: sglang/srt/plugins, sglang/srt/managers/scheduler_components/batch_result_processor.py.

Legend: T tokens, L aux layers, D hidden size.
"""

import functools
import inspect
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import write_text
from eyas.states.handover import Assembly, fault_path, place_of, read_plan
from eyas.states.layout import Captured

VERSIONS = ("0.5.23",)
FOLDER = "EYAS_STORE"
_MODULE = "sglang.srt.managers.scheduler_components.batch_result_processor"
_CLASS = "SchedulerBatchResultProcessor"
_PREFILL, _DECODE = "_append_prefill_hidden_states", "_append_decode_hidden_states"
_ARGUMENTS = {"req", "logits_output", "hidden_state_offset", "capture_hidden_mode"}
_ARGUMENTS |= {"extend_input_len", "store"}
_WAITING = 8  # rows between the scheduler and the thread that encodes them
_MOST_OPEN = 32  # shards under way; above, the one longest untouched was given up by its client
log = logging.getLogger(__name__)


class Inbox:
    """Rows on their way into shards; a thread encodes and writes, so that prefills go on."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._open: OrderedDict[Path, Assembly] = OrderedDict()
        self._queue: queue.Queue[tuple[Assembly, int, Sequence[int], Captured]] = queue.Queue(
            _WAITING
        )
        threading.Thread(target=self._write_all, daemon=True, name="eyas").start()

    def put(self, rid: str, layers: Sequence[int], ids: Sequence[int], states: Captured) -> None:
        """Take a row's states; waits where the disk is slower than the target.

        Raises: EyasError if the shard's plan does not know such a row.
        """
        shard, attempt, row = place_of(rid, self._store)
        assembly = self._assembly(shard, attempt)
        assembly.check(row, layers, ids, states)
        self._queue.put((assembly, row, ids, states))

    def _assembly(self, shard: Path, attempt: str) -> Assembly:
        known = self._open.get(shard)
        if known is None or known.plan.attempt != attempt:
            plan = read_plan(shard)
            if plan.attempt != attempt:
                raise EyasError(f"{shard.name}: a row of an attempt that was given up")
            known = self._open[shard] = Assembly(shard, plan)
        self._open.move_to_end(shard)
        for other in [s for s, assembly in self._open.items() if assembly.done]:
            del self._open[other]
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return known

    def _write_all(self) -> None:
        while True:
            assembly, row, ids, states = self._queue.get()
            try:
                assembly.add(row, ids, states)
            except Exception as error:  # the thread's border: told to the client, who decides
                log.exception("eyas: %s", assembly.shard)
                assembly.done = True
                self._tell(assembly, f"{type(error).__name__}: {error}")

    def _tell(self, assembly: Assembly, words: str) -> None:
        try:
            write_text(fault_path(assembly.shard, assembly.plan.attempt), words)
        except OSError:  # the disk that is full for the shard may be full for this too
            log.exception("eyas: %s: its client waits in vain", assembly.shard)


@functools.cache  # one in a process: SGLang's hooks have no other place for it
def open_inbox() -> Inbox:
    """Return this process's inbox."""
    return Inbox(Path(os.environ[FOLDER]))


def register() -> None:
    """Put the hooks in; what does not fit stops the server, where SGLang would only log it."""
    if not os.environ.get(FOLDER):
        return
    try:
        version = import_module("sglang").__version__
        processor = getattr(import_module(_MODULE), _CLASS)
        hooks = import_module("sglang.srt.plugins.hook_registry")
        found = set(inspect.signature(getattr(processor, _PREFILL)).parameters) - {"self"}
        getattr(processor, _DECODE)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"eyas: SGLang's modules are not those of {VERSIONS}: {error}") from error
    if version not in VERSIONS or found != _ARGUMENTS:
        raise SystemExit(f"eyas: expected SGLang {VERSIONS}, got {version} with {sorted(found)}")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register(f"{_MODULE}.{_CLASS}.{_PREFILL}", on_prefill, around)
    hooks.HookRegistry.register(f"{_MODULE}.{_CLASS}.{_DECODE}", on_decode, around)


def on_decode(_original: object, *_args: object, **_kwargs: object) -> None:
    """Drop the states of sampled tokens: what is captured is one prefill of the whole sample."""


def on_prefill(
    _original: object,
    _processor: object,
    *,
    req: Any,
    logits_output: Any,
    hidden_state_offset: int,
    capture_hidden_mode: Any,
    extend_input_len: int,
    store: bool = True,
) -> int:
    """Take a request's rows out of its batch; return where the next request's begin."""
    if not capture_hidden_mode.is_full():
        if store and req.return_hidden_states:
            _refuse(req, "expected return_hidden_states: true")
        return hidden_state_offset + int(capture_hidden_mode.is_last())
    end = hidden_state_offset + extend_input_len
    if store and req.return_hidden_states and not req.finished() and not req.is_retracted:
        try:
            _take(req, logits_output, slice(hidden_state_offset, end))
        except (EyasError, OSError) as error:
            _refuse(req, str(error))
    return end


def _take(req: Any, logits_output: Any, rows: slice) -> None:
    aux, final = logits_output.hidden_states, logits_output.last_hidden_states
    if final is None:
        raise EyasError("no aux layers here: start with --enable-return-aux-hidden-states")
    ids = tuple(req.origin_input_ids)
    if rows.stop - rows.start != len(ids) or rows.stop > min(len(aux), len(final)):
        raise EyasError(
            f"{rows.stop - rows.start} states of {len(ids)} tokens: start with "
            "--disable-radix-cache --chunked-prefill-size -1"
        )
    context = import_module("sglang.srt.runtime_context")
    parallel = context.get_parallel()
    if (parallel.attn_dp_size, parallel.attn_cp_size) != (1, 1):
        raise EyasError("attention is split over data or context: start several servers instead")
    if parallel.attn_tp_rank != 0:
        return  # every rank holds the same rows
    layers = tuple(context.get_exec().features.return_aux_hidden_state_layer_ids or ())
    # Copies, in any case: buffers are used again by the next forward pass.
    final_TD = final[rows].detach().to("cpu", copy=True)
    aux_TLD = aux[rows].detach().to("cpu", copy=True).unflatten(-1, (-1, final_TD.shape[-1]))
    open_inbox().put(req.rid, layers, ids, Captured(aux_TLD=aux_TLD, final_TD=final_TD))


def _refuse(req: Any, message: str) -> None:
    log.warning("eyas: request %s refused: %s", req.rid, message)
    abort = import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
    req.to_finish = abort(f"eyas: {message}", 400, "BadRequestError")
