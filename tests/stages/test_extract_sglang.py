"""The SGLang backend against a stand-in server: HTTP and hooks are real, SGLang is not."""

import json
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.desk.params import Params, read_params
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.parquet import write_samples
from eyas.records import Sample
from eyas.settings import Extract
from eyas.stages import extract
from eyas.states import capture_sglang, handover, sglang_plugin, store
from eyas.states.capture_hf import capture
from eyas.states.capturing import read_job
from eyas.states.handover import place_of, plan_of, write_plan
from eyas.states.job import Job
from eyas.states.layout import Captured
from eyas.states.shards import shard_path

ROOT = Path.cwd()
LAYERS = (1, 3, 4)
LENGTHS = (9, 30, 4, 17, 12, 25, 8)
INFO: dict[str, Any] = {
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "disable_overlap_schedule": True,
    "return_hidden_states_mode": "full",
    "enable_return_aux_hidden_states": True,
    "aux_hidden_state_capture": "eagle3",
    "return_aux_hidden_state_layer_ids": list(LAYERS),
    "dtype": "float32",
    "attn_dp_size": 1,
    "version": "0.5.23",
    "max_req_input_len": 1024,
}


class StandIn:
    """What a server has: a model, settings, and faults to show."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.info = dict(INFO)
        self.layers: tuple[int, ...] | None = LAYERS
        self.rank, self.data_ranks = 0, 1
        self.plugin = True
        self.busy = threading.Lock()
        self.batches: list[list[int]] = []
        self.lose = 0  # so many of the next requests get HTTP 503
        self.change: Callable[[SimpleNamespace], None] = lambda _output: None

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.busy:  # as in a scheduler, a batch at a time
            return self.answer(body)

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.lose:
            self.lose -= 1
            return 503, {"error": "busy"}
        if body.get("return_logprob"):
            return 200, {"meta_info": self.logprobs(body["input_ids"])}
        rows = body["input_ids"]
        self.batches.append([len(row) for row in rows])
        found = [capture(self.model, [row], LAYERS)[0] for row in rows]
        output = SimpleNamespace(
            hidden_states=torch.cat([f.aux_TLD.flatten(1) for f in found]),
            last_hidden_states=torch.cat([f.final_TD for f in found]),
        )
        self.change(output)
        replies, offset = [], 0
        for row, rid in zip(rows, body["rid"], strict=True):
            request = self.request(row, rid)
            if self.plugin:
                offset = prefill(request, output, offset, len(row))
            if request.to_finish:
                return 400, {"error": request.to_finish}
            meta = {"prompt_tokens": len(row), "cached_tokens": 0}
            replies.append({"meta_info": meta | {"hidden_states": [] if self.plugin else [[0.5]]}})
        return 200, replies

    def request(self, ids: list[int], rid: str) -> SimpleNamespace:
        return SimpleNamespace(
            origin_input_ids=ids,
            rid=rid,
            return_hidden_states=True,
            finished=lambda: False,
            is_retracted=False,
            to_finish=None,
        )

    def logprobs(self, ids: list[int]) -> dict[str, Any]:
        best = self.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        entries = [[[-0.5, token, None]] for token in best]
        return {"input_top_logprobs": [None, *entries[:-1]], "output_top_logprobs": entries[-1:]}


def prefill(request: SimpleNamespace, output: SimpleNamespace, offset: int, length: int) -> int:
    full = SimpleNamespace(is_full=lambda: True, is_last=lambda: False)
    return sglang_plugin.on_prefill(
        None,
        None,
        req=request,
        logits_output=output,
        hidden_state_offset=offset,
        capture_hidden_mode=full,
        extend_input_len=length,
    )


@pytest.fixture
def stand_in(llama: Any, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Put modules named like SGLang's where the plugin imports them."""
    server = StandIn(llama)
    context = ModuleType("sglang.srt.runtime_context")
    context.__dict__["get_parallel"] = lambda: SimpleNamespace(
        attn_dp_size=server.data_ranks, attn_cp_size=1, attn_tp_rank=server.rank
    )
    context.__dict__["get_exec"] = lambda: SimpleNamespace(
        features=SimpleNamespace(return_aux_hidden_state_layer_ids=server.layers)
    )
    batch = ModuleType("sglang.srt.managers.schedule_batch")
    batch.__dict__["FINISH_ABORT"] = lambda message, _status, _kind: message
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (context, batch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sglang_plugin.open_inbox.cache_clear()
    return server


@pytest.fixture
def url(stand_in: StandIn, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve it on a free port, its store that of the stage."""
    monkeypatch.setenv(sglang_plugin.FOLDER, str(home / "var/states"))

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, stand_in.info if self.path == "/server_info" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(*stand_in.generate(body))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def home(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with a random target and a mixture of 6 + 1 samples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/target").mkdir(parents=True)
    for path in llama_folder.iterdir():
        (tmp_path / "models/target" / path.name).symlink_to(path)
    about = {"name": "random", "codec": "chatml", "revision": "r0", "source": {}}
    write_json(tmp_path / "models/target/eyas_target.json", about)
    samples = [sample(n, length) for n, length in enumerate(LENGTHS)]
    (tmp_path / "data/mixture").mkdir(parents=True)
    write_samples(tmp_path / "data/mixture/train.parquet", samples[:6])
    write_samples(tmp_path / "data/mixture/val.parquet", samples[6:])
    return tmp_path


RUNTIME = read_params().value("runtime")


def sample(number: int, length: int) -> Sample:
    ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(number))
    return Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(ids.tolist()),
        spans=((length // 2, length),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=None,
    )


def params(*servers: str, **changes: Any) -> Params:
    settings = {"backend": "sglang", "layers": None, "codec": "bf16", "compute_dtype": "float32"}
    settings |= {"shard_tokens": 40, "batch_tokens": 30, **changes}
    workers = {"workers": 1, "servers": list(servers), "patience_s": 0}
    runtime = RUNTIME | {"tracking": "off", "threads": 1, "extract": workers}
    return Params({"extract": settings, "runtime": runtime})


CHOICES = {
    "bf16": {},
    "fp32": {"codec": "fp32", "final_codec": "fp32"},
    "int4": {"codec": "int4", "final_codec": "fp8", "final_rows": "supervised"},
    "teacher": {"final_rows": "supervised", "teacher_k": 8, "final_every": 2},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_server_writes_the_shards_that_the_target_in_this_process_writes(
    home: Path, stand_in: StandIn, url: str, choice: str
) -> None:
    report = extract.work(params(url, **CHOICES[choice]))
    assert report.metrics["rows_in"] == report.metrics["rows_out"] == 7
    assert report.metrics["shards_written"] == 3
    assert report.metrics["teacher_argmax_agreement"] >= 0.9
    assert store.verify(home / extract.MANIFEST, home / "var/states") == []
    theirs = store.open_store(home / extract.MANIFEST, home / "var/states")
    assert (theirs.meta.compute_dtype, theirs.meta.layers) == ("float32", LAYERS)
    extract.work(params(backend="transformers", **CHOICES[choice]))
    ours = store.open_store(home / extract.MANIFEST, home / "var/states")
    for name in ours.samples:
        a, b = ours.read(name), theirs.read(name)
        assert torch.equal(a.input_ids, b.input_ids)
        assert (a.top_T2K is not None) == (b.top_T2K is not None) == ("teacher" in choice)
        if a.top_T2K is not None and b.top_T2K is not None:
            x, y = a.top_T2K[:, 1], b.top_T2K[:, 1]  # float32 sums in another order
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5, equal_nan=True)
        kept = ~a.final_TD.isnan()
        assert torch.equal(kept, ~b.final_TD.isnan())
        for x, y in ((a.aux_TLD, b.aux_TLD), (a.final_TD[kept], b.final_TD[kept])):
            # float32 sums in another order: now and then a value rounds to its neighbour
            assert float((x - y).norm() / x.norm()) <= (1e-6 if choice == "fp32" else 2e-3)
    assert max(map(sum, stand_in.batches)) <= 30, "at most batch_tokens a request"
    assert sorted(n for batch in stand_in.batches for n in batch) == sorted(LENGTHS)
    assert not list(home.glob("var/states/*/*.plan")) + list(home.glob("var/states/*/*.claim"))


def test_a_killed_run_goes_on_and_a_finished_one_asks_no_server(
    home: Path, stand_in: StandIn, url: str
) -> None:
    extract.work(params(url))
    whole = (home / extract.MANIFEST).read_bytes()
    next(home.glob("var/states/*/shard-00001.json")).unlink()
    sent = len(stand_in.batches)
    report = extract.work(params(url))
    assert (report.metrics["shards_written"], report.metrics["shards_reused"]) == (1, 2)
    assert sorted(n for batch in stand_in.batches[sent:] for n in batch) == [4, 12, 17]
    assert (home / extract.MANIFEST).read_bytes() == whole
    assert extract.work(params("http://127.0.0.1:9")).metrics["shards_written"] == 0


def test_a_server_without_lm_head_tells_its_client(
    home: Path, stand_in: StandIn, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_sglang.SGLang, "_write_head", lambda self, path: None)
    with pytest.raises(EyasError, match=r"No such file or directory: .*lm_head.safetensors"):
        extract.work(params(url, **CHOICES["teacher"]))


def test_room_for_lm_head_is_asked_and_a_server_holds_one_store_s_alone(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract.work(params(url, **CHOICES["teacher"]))
    [head] = home.glob("var/states/*/lm_head.safetensors")
    handover.read_head(head.rename(home / "other.safetensors"))
    assert handover.read_head.cache_info().currsize == 1
    asked: list[int] = []
    monkeypatch.setattr(capture_sglang, "check_space", lambda folder, size: asked.append(size))
    next(home.glob("var/states/*/shard-00001.json")).unlink()
    extract.work(params(url, **CHOICES["teacher"]))
    assert asked == [97 * 48 * 4]


def test_a_request_that_gets_no_answer_is_sent_again_with_its_shard(
    home: Path, stand_in: StandIn, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.lose = 2
    extract.work(params(url))
    assert "HTTP 503" in caplog.text
    assert store.verify(home / extract.MANIFEST, home / "var/states") == []
    stand_in.lose = 100
    next(home.glob("var/states/*/shard-00001.json")).unlink()
    with pytest.raises(EyasError, match="HTTP 503"):
        extract.work(params(url))


def test_a_server_that_is_not_there_is_told(home: Path) -> None:
    with pytest.raises(EyasError, match=r"127.0.0.1:9: no server .*\n  hint: start it"):
        extract.work(params("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disable_radix_cache": False}, "disable_radix_cache: expected True, got False\n  hint: "),
        ({"chunked_prefill_size": 8192}, "chunked_prefill_size: expected -1, got 8192"),
        ({"return_aux_hidden_state_layer_ids": [2, 4]}, r"expected \[1, 3, 4\], got \[2, 4\]"),
        ({"dtype": "bfloat16"}, "dtype: expected float32, got bfloat16"),
        ({"attn_dp_size": 2}, "attn_dp_size: expected 1, got 2"),
        ({"version": "0.5.24"}, "expected SGLang 0.5.23, got 0.5.24"),
        ({"max_req_input_len": 29}, "expected 30 at least, got 29"),
        ({"disable_overlap_schedule": False}, "disable_overlap_schedule: expected True"),
    ],
)
def test_a_server_whose_states_would_be_others_is_refused_before_anything_is_sent(
    home: Path, stand_in: StandIn, url: str, change: dict[str, Any], message: str
) -> None:
    stand_in.info |= change
    with pytest.raises(EyasError, match=message):
        extract.work(params(url))
    assert stand_in.batches == []


def break_stand_in(server: StandIn, fault: str) -> None:
    match fault:
        case "layers":
            server.layers = (1, 2, 4)
        case "data ranks":
            server.data_ranks = 2
        case "no aux":
            server.change = lambda output: setattr(output, "last_hidden_states", None)
        case "short":
            server.change = lambda output: setattr(
                output, "hidden_states", output.hidden_states[:-1]
            )
        case "nan":
            server.change = lambda output: output.hidden_states.fill_(torch.nan)
        case "no plugin":
            server.plugin = False
        case "not post-norm":
            server.change = lambda output: output.last_hidden_states.copy_(
                output.hidden_states[:, -48:]
            )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layers", r"expected layers \(1, 3, 4\), got \(1, 2, 4\)"),
        ("data ranks", "start several servers instead"),
        ("no aux", "--enable-return-aux-hidden-states"),
        ("short", "states of 30 tokens: start with --disable-radix-cache"),
        ("nan", r"sample s\d: aux states: expected finite values"),
        ("no plugin", "got 30, 0, states\n  hint: is eyas installed beside SGLang"),
        ("not post-norm", "predict the target's own next token in"),
    ],
)
def test_states_that_cannot_be_kept_are_refused_by_name(
    home: Path, stand_in: StandIn, url: str, fault: str, message: str
) -> None:
    break_stand_in(stand_in, fault)
    with pytest.raises(EyasError, match=message):
        extract.work(params(url))
    assert list(home.glob("var/states/*/shard-*.json")) == []


def test_one_rank_alone_writes(home: Path, stand_in: StandIn) -> None:
    stand_in.rank = 1
    output = SimpleNamespace(hidden_states=torch.ones(4, 144), last_hidden_states=torch.ones(4, 48))
    assert prefill(stand_in.request([1, 2, 3, 4], "no rid of ours"), output, 0, 4) == 4


def test_a_rid_is_never_taken_for_a_path(tmp_path: Path) -> None:
    expected = (tmp_path / "0af/shard-00012.safetensors", "9b", 3)
    assert place_of("0af-12-9b-3", tmp_path) == expected
    for rid in ("../x-1-2-3", "0af-1-2", "0af-1-9b-3/.."):
        with pytest.raises(EyasError, match="expected KEY-SHARD-ATTEMPT-ROW"):
            place_of(rid, tmp_path)


def job_of(home: Path, params: Params) -> Job:
    return read_job(params.section("extract", Extract), home / "var/states")


def test_rows_of_an_attempt_that_was_given_up_are_refused(
    home: Path, stand_in: StandIn, url: str
) -> None:
    extract.work(params(url))
    folder = next(home.glob("var/states/*"))
    plan = plan_of(job_of(home, params(url)), "aa", [sample(0, 4)])
    write_plan(folder / "shard-00000.safetensors", plan)
    states = SimpleNamespace(hidden_states=torch.ones(4, 144), last_hidden_states=torch.ones(4, 48))
    stale = stand_in.request([1, 2, 3, 4], f"{folder.name}-0-bb-0")
    prefill(stale, states, 0, 4)
    assert "given up" in str(stale.to_finish)
    long = stand_in.request([1, 2, 3], f"{folder.name}-0-aa-0")
    prefill(long, states, 0, 3)
    assert "row 0 of 3 tokens is not in the plan" in str(long.to_finish)
    write_json(folder / "shard-00000.plan", {"rows": []})
    broken = stand_in.request([1, 2, 3, 4], f"{folder.name}-0-cc-0")
    prefill(broken, states, 0, 4)
    assert "not a plan" in str(broken.to_finish)


def test_what_went_wrong_with_an_earlier_attempt_stops_no_later_one(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(shard: Path, plan: handover.ShardPlan) -> None:
        write_plan(shard, plan)
        handover.fault_path(shard, "0ff").write_text("of a client that was killed")

    monkeypatch.setattr(capture_sglang, "write_plan", write_late)
    extract.work(params(url))
    (shard, *_) = home.glob("var/states/*/shard-00000.safetensors")
    write_plan(shard, plan_of(job_of(home, params(url)), "aa", [sample(0, 4)]))
    assert not handover.fault_path(shard, "0ff").exists()


def test_a_server_that_cannot_tell_its_fault_goes_on(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sglang_plugin, "write_text", full)
    inbox = sglang_plugin.Inbox(tmp_path)
    for number in range(2):
        shard = shard_path(tmp_path / "0a", number)
        row = handover.PlannedRow(id="s", length=2, spans=())
        plan = handover.ShardPlan(
            attempt="b",
            layers=(1,),
            hidden_size=4,
            layout=("bf16", "bf16", "all", None, 1),
            rows=(row,),
        )
        write_plan(shard, plan)
        states = Captured(aux_TLD=torch.ones(2, 1, 4), final_TD=torch.ones(2, 4))
        if not number:
            states.aux_TLD.fill_(torch.nan)
        inbox.put(f"0a-{number}-b-0", (1,), [1, 2], states)
    until = time.monotonic() + 20
    while not shard.with_suffix(".json").is_file() and time.monotonic() < until:
        time.sleep(0.01)
    assert shard.is_file()
    assert "its client waits in vain" in caplog.text


def test_layer_ids_follow_the_rule_of_the_targets_class() -> None:
    for model_type in ("llama", "qwen3", "deepseek_v3", "kimi_k25"):
        capture_sglang.check_layer_rule(model_type, (1, 29, 57))
    capture_sglang.check_layer_rule("llama", (2, 30, 58))
    with pytest.raises(EyasError, match=r"expected 1 first for kimi_k25, got \[2, 30, 58\]"):
        capture_sglang.check_layer_rule("kimi_k25", (2, 30, 58))
    with pytest.raises(
        EyasError, match="'gpt2' is not known\n  hint: see its set_eagle3_layers_to_capture"
    ):
        capture_sglang.check_layer_rule("gpt2", (1, 3, 4))


def hooked_modules(version: str, names: tuple[str, ...]) -> dict[str, ModuleType]:
    scope: dict[str, Any] = {}
    exec(f"def prefill(self, *, {', '.join(names)}): ...", scope)
    methods = dict.fromkeys((sglang_plugin._PREFILL, sglang_plugin._DECODE), scope["prefill"])
    processor = ModuleType(sglang_plugin._MODULE)
    vars(processor)[sglang_plugin._CLASS] = type(sglang_plugin._CLASS, (), methods)
    package = ModuleType("sglang")
    vars(package)["__version__"] = version
    hooks = ModuleType("sglang.srt.plugins.hook_registry")
    registered: list[str] = []
    vars(hooks)["registered"] = registered
    vars(hooks)["HookType"] = SimpleNamespace(AROUND="around")
    vars(hooks)["HookRegistry"] = SimpleNamespace(
        register=lambda name, _function, _kind: registered.append(name.rsplit(".", 1)[1])
    )
    return {"sglang": package, processor.__name__: processor, hooks.__name__: hooks}


def test_the_plugin_hooks_the_release_it_knows_and_stops_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(sorted(sglang_plugin._ARGUMENTS))
    sglang_plugin.register()  # idle without a store
    monkeypatch.setenv(sglang_plugin.FOLDER, str(tmp_path))

    def put(version: str, arguments: tuple[str, ...]) -> ModuleType:
        modules = hooked_modules(version, arguments)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return modules["sglang.srt.plugins.hook_registry"]

    hooks = put("0.5.23", names)
    sglang_plugin.register()
    assert len(vars(hooks)["registered"]) == 2
    for version, arguments in (("0.5.24", names), ("0.5.23", names[1:])):
        put(version, arguments)
        with pytest.raises(SystemExit, match=f"expected SGLang .* got {version} with"):
            sglang_plugin.register()
    monkeypatch.setitem(sys.modules, sglang_plugin._MODULE, None)
    with pytest.raises(SystemExit, match="SGLang's modules are not those"):
        sglang_plugin.register()


def test_the_servers_side_imports_no_heavy_package() -> None:
    code = "import sys, eyas.states.sglang_plugin; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"transformers", "pyarrow", "hydra", "omegaconf", "mlflow", "typer", "httpx", "rich"}
    assert heavy.isdisjoint(done.stdout.split())


def test_the_plugin_is_declared_where_sglang_looks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["project"]["entry-points"]["sglang.srt.plugins"]
    assert declared == {"eyas": "eyas.states.sglang_plugin:register"}


def test_the_manifest_of_a_server_differs_from_ours_in_its_key_alone(
    home: Path, stand_in: StandIn, url: str
) -> None:
    extract.work(params(url))
    theirs = read_json(home / extract.MANIFEST)
    extract.work(params(backend="transformers"))
    ours = read_json(home / extract.MANIFEST)
    assert theirs["samples"] == ours["samples"]
    assert {k for k, v in ours["meta"].items() if theirs["meta"][k] != v} == {"key"}
