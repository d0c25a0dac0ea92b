"""Let SGLang servers run token ids and write what a drafter learns from: the client's side.

States never come here: the server's plugin (states/sglang_plugin.py) writes each shard into the
store, which both sides see. Here rows are sent, a batch of like lengths each request, two under
way; settings, lengths, ids and the target's own choice are checked before a shard counts.
Source: SGLang 0.5.23, POST /generate, GET /server_info.

Legend: T tokens, D hidden size, V vocabulary.
"""

import json
import logging
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import replacing
from eyas.records import Sample
from eyas.states.capture_hf import batches
from eyas.states.handover import HEAD, PLAN, fault_path, plan_of, request_id, write_plan
from eyas.states.job import Job
from eyas.states.sglang_plugin import VERSIONS
from eyas.states.shards import check_space, is_there
from eyas.states.target import load_head

# How a model class of SGLang reads explicit layer ids (set_eagle3_layers_to_capture), by the
# model_type in config.json: the output of layer i has the id i; or that holds if the first is 1,
# while other lists name inputs and so would have to be one higher.
IDS_ARE_OUTPUTS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "glm4_moe")
IDS_ARE_OUTPUTS_IF_FIRST_IS_1 = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
_UNDER_WAY = 2  # requests: one runs, one waits in the server's queue
_ATTEMPTS = 3
_TIMEOUT_S = 1800.0  # of one request
_WRITE_S = 600.0  # after the last reply, until the shard is there
_POLL_S = 0.02
_SETTINGS: dict[str, Any] = {
    "disable_radix_cache": True,  # a cached prefix has no states
    "chunked_prefill_size": -1,
    "disable_overlap_schedule": True,  # its copies to the host leave the final state out
    "return_hidden_states_mode": "full",
    "enable_return_aux_hidden_states": True,
    "aux_hidden_state_capture": "eagle3",
    "attn_dp_size": 1,
}
_FLAGS = "start the server with the flags in docs/extraction.md"
_GREEDY = {"temperature": 0, "max_new_tokens": 1}
log = logging.getLogger("eyas")


class NoAnswerError(EyasError):
    """A server that is gone or silent, where another attempt may help."""


class SGLang:
    """One server. Raises EyasError for one that does not fit before anything is sent to it."""

    def __init__(self, url: str, target: Path, job: Job, *, patience_s: float) -> None:
        self.url, self._target, self._job = url.rstrip("/"), target, job
        self._patience_s = patience_s  # for a server that is gone to come back
        self.seconds = {"fetch": 0.0, "write": 0.0}
        check_layer_rule(job.model_type, job.layers)
        self._await_server()

    def make_shard(
        self, path: Path, samples: Sequence[Sample], advance: Callable[[int], None]
    ) -> None:
        """Send the samples and see that their shard is written; `advance` hears of tokens.

        A server that is gone is waited for and looked at anew, and the shard begun again.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._attempt(path, samples, advance)
            except NoAnswerError as error:
                log.warning("%s; %s is sent again", error, path.name)
                self._await_server()
        return self._attempt(path, samples, advance)

    def favourites(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the server's own next token at every position, [T]."""
        body = {"input_ids": list(ids), "sampling_params": _GREEDY}
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        meta = fetch(f"{self.url}/generate", body)["meta_info"]
        # The entry at a position is of the token there, predicted at the position before.
        found = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
        own_T = torch.tensor([entry[0][1] for entry in found])
        if len(own_T) != len(ids):
            raise EyasError(f"{self.url}: expected {len(ids)} log-probabilities, got {len(own_T)}")
        return own_T

    def _write_head(self, path: Path) -> None:
        """Put lm_head where the servers find it."""
        head = load_head(self._target, dtype=getattr(torch, self._job.dtype))
        check_space(path.parent, head.lm_head_VD.nbytes)
        with replacing(path) as temporary:
            save_file({"lm_head": head.lm_head_VD}, temporary)

    def _attempt(
        self, path: Path, samples: Sequence[Sample], advance: Callable[[int], None]
    ) -> None:
        attempt, started = secrets.token_hex(4), time.monotonic()
        if self._job.layout.teacher_k and not (head := path.with_name(HEAD)).is_file():
            self._write_head(head)
        write_plan(path, plan_of(self._job, attempt, samples))
        batch_tokens = self._job.settings.batch_tokens
        groups = batches([len(s.input_ids) for s in samples], batch_tokens)

        def send(group: list[int]) -> None:
            rids = [request_id(path, attempt, row) for row in group]
            self._send([samples[row] for row in group], rids)

        with ThreadPoolExecutor(_UNDER_WAY) as pool:
            for group, _ in zip(groups, pool.map(send, groups), strict=True):
                advance(sum(len(samples[row].input_ids) for row in group))
        sent = time.monotonic()
        self._await_shard(path, samples, fault_path(path, attempt))
        self.seconds["fetch"] += sent - started
        self.seconds["write"] += time.monotonic() - sent
        path.with_suffix(PLAN).unlink(missing_ok=True)

    def _send(self, samples: Sequence[Sample], rids: list[str]) -> None:
        body = {"input_ids": [list(s.input_ids) for s in samples], "rid": rids}
        body |= {"sampling_params": _GREEDY, "return_hidden_states": True}
        for sample, reply in zip(samples, fetch(f"{self.url}/generate", body), strict=True):
            meta = reply["meta_info"]
            got = (meta["prompt_tokens"], meta.get("cached_tokens", 0), meta.get("hidden_states"))
            if got != (len(sample.input_ids), 0, []):
                raise EyasError(
                    f"{self.url}: sample {sample.id}: expected {len(sample.input_ids)} tokens, "
                    f"0 of them cached, no states in the reply; got {got[0]}, {got[1]}, "
                    f"{'states' if got[2] else got[2]}",
                    hint="is eyas installed beside SGLang, and EYAS_STORE set for it?",
                )

    def _await_shard(self, path: Path, samples: Sequence[Sample], fault: Path) -> None:
        tokens = sum(len(s.input_ids) for s in samples)
        until = time.monotonic() + _WRITE_S
        while not is_there(path, tokens):
            if fault.is_file():
                raise EyasError(
                    f"{self.url}: {path.name}: {fault.read_text(encoding='utf-8')}",
                    hint="the server's log has the whole story",
                )
            if time.monotonic() > until:
                raise EyasError(
                    f"{path}: expected within {_WRITE_S:.0f} s of the last reply, not there",
                    hint="does the server's EYAS_STORE name the folder of runtime.store? is its "
                    "disk full? see its log",
                )
            time.sleep(_POLL_S)
        with safe_open(path, framework="pt") as file:
            stored = file.get_tensor("input_ids").tolist()
        if stored != [token for sample in samples for token in sample.input_ids]:
            path.with_suffix(".json").unlink(missing_ok=True)
            raise EyasError(f"{path}: other token ids than were sent")

    def _await_server(self) -> None:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                info = fetch(f"{self.url}/server_info", None)
                return check_server(self.url, info, self._job)
            except NoAnswerError as error:
                if time.monotonic() > until:
                    raise EyasError(
                        f"{self.url}: no server ({error})",
                        hint="start it (docs/extraction.md), or mend runtime.extract.servers",
                    ) from None
            time.sleep(1.0)


def check_server(url: str, info: dict[str, Any], job: Job) -> None:
    """Refuse a server whose states would be other ones, or too few.

    Raises: EyasError naming the setting.
    """
    settings = _SETTINGS | {"return_aux_hidden_state_layer_ids": list(job.layers)}
    for name, expected in (settings | {"dtype": job.dtype}).items():
        if info.get(name) != expected:
            raise EyasError(
                f"{url}: {name}: expected {expected}, got {info.get(name)}", hint=_FLAGS
            )
    if info["version"] not in VERSIONS:
        raise EyasError(f"{url}: expected SGLang {' or '.join(VERSIONS)}, got {info['version']}")
    longest = max(len(s.input_ids) for s in job.samples)
    if (most := info["max_req_input_len"]) < longest:
        raise EyasError(
            f"{url}: max_req_input_len: expected {longest} at least, got {most}",
            hint="raise --context-length and --max-total-tokens, or lower merge.max_tokens",
        )


def check_layer_rule(model_type: str, layers: Sequence[int]) -> None:
    """Refuse layer ids that the target's class in SGLang would not read as outputs.

    Raises: EyasError for a class whose rule is not known, or other ids than its rule allows.
    """
    if model_type not in IDS_ARE_OUTPUTS + IDS_ARE_OUTPUTS_IF_FIRST_IS_1:
        raise EyasError(
            f"extract.backend: sglang: the class of model_type '{model_type}' is not known",
            hint="see its set_eagle3_layers_to_capture, then name it in states/capture_sglang.py",
        )
    if model_type in IDS_ARE_OUTPUTS_IF_FIRST_IS_1 and layers[0] != 1:
        raise EyasError(f"extract.layers: expected 1 first for {model_type}, got {list(layers)}")


def fetch(url: str, body: object) -> Any:
    """Return a server's JSON answer; POST where there is a body.

    Raises: NoAnswerError if the server is gone, silent or failing; EyasError with its words if it
        refuses.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace")[:500]
        kind = NoAnswerError if error.code >= 500 else EyasError
        raise kind(f"{url}: HTTP {error.code}: {words}") from None
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"{url}: no answer ({error})") from None
