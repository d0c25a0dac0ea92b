import copy
import gzip
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.prompts.rows import ParsedRow, Reject
from eyas.prompts.schemas import SCHEMAS, parse_row
from eyas.prompts.sources import read_rows
from eyas.records import row_id
from eyas.settings import Source

UPSTREAM = Path("../shared/prompts")
BENCHMARK = Path("benchmarks/prepare_rows.py").resolve()


def test_unknown_schema_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(EyasError, match=r"expected bfcl \| .* \| ultrachat, got 'alpaca'"):
        parse_row("alpaca", {})


def test_what_is_no_object_is_told_whatever_it_is() -> None:
    deep: list[object] = []
    for _ in range(3000):
        deep = [deep]
    for row in (deep, "\ud800", ["\ud800"], b"bytes", float("nan"), None):
        found = parse_row("messages", row)
        assert isinstance(found, Reject)
        assert found.reason == "not_an_object"
        found.detail.encode()


def test_a_line_of_no_strict_json_is_a_row_that_is_counted(tmp_path: Path) -> None:
    lines = b'{"prompt": "a", "score": NaN}\n{"prompt": "a", "score": -1e999}\n'
    lines += b'{"prompt": "\\ud83d"}\n{"prompt": "b"}\n'
    (tmp_path / "rows.jsonl").write_bytes(lines)
    rows = list(read_rows(Source(kind="file", path=str(tmp_path / "rows.jsonl"))))
    found = [parse_row("messages", row) for row in rows]
    assert [r.reason if isinstance(r, Reject) else "" for r in found] == ["not_json"] * 3 + [""]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# Words of the schemas, so that rows get past the first check of each.
KEYS = (
    *("id", "task_id", "question_id", "index", "instance_id", "prompt", "question", "problem"),
    *("instruction", "input", "turns", "test_list", "messages", "conversations", "data", "chat"),
    *("system", "trajectory", "history", "function", "tools", "role", "content", "from", "value"),
    *("type", "text", "name", "arguments", "parameters", "tool_calls", "tool_call_id", "items"),
    *("properties", "reasoning", "system_prompt", "tool_call_ids", "additionalProperties"),
)
DECLARED = (
    "SYSTEM: You are a helpful assistant with access to the following functions. "
    'Use them if required - {"name": "f"}'
)
GLAIVE_CHAT = (
    'USER: a\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{}\'} <|endoftext|>'
)
WORDS = (
    *("system", "user", "assistant", "tool", "ai", "human", "gpt", "function_call", "observation"),
    *("text", "reasoning", "tool_call", "object", "dict", "array", "any", "f", "a.b", "abc_0", ""),
    *("[]", "{}", "[{", '{"name": "f", "arguments": {}}', '[{"name": "f"}]', "[" * 2000),
    "<think>a</think>b",
    *(DECLARED, GLAIVE_CHAT, "USER: a\n\n\nASSISTANT: b <|endoftext|>\n\n\nUSER: c"),
    "SYSTEM: You are a helpful assistant, with no access to external functions.",
)
LIKELY = st.recursive(
    st.sampled_from(WORDS) | st.none() | st.integers(0, 3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=20,
)
ROWS = (
    st.dictionaries(st.sampled_from(KEYS), LIKELY | JSON, max_size=8)
    | st.just({"when": date(2024, 1, 1)})
    | JSON
)


@given(st.sampled_from(sorted(SCHEMAS)), ROWS)
def test_any_json_value_is_parsed_or_rejected_without_an_exception(schema: str, row: Any) -> None:
    found = parse_row(schema, row)
    assert isinstance(found, ParsedRow | Reject)
    if isinstance(found, ParsedRow):
        assert row_id("d", found.upstream_id, found.messages, found.tools)


ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    *ASKED[:1],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_ids": ["c"]},
]
SAID = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "dict", "properties": {}}}
WHOLE: dict[str, dict[str, Any]] = {
    "bfcl": {"id": "a", "question": [ASKED[:1]], "function": [FUNCTION]},
    "glaive": {"system": DECLARED, "chat": GLAIVE_CHAT},
    "gsm8k": {"question": "Q", "answer": "A"},
    "humaneval": {"task_id": "a", "prompt": "def f():"},
    "instruction": {"instruction": "Q"},
    "magicoder": {"index": 1, "problem": "Q"},
    "mbpp": {"task_id": 1, "prompt": "Q", "test_list": ["assert f()"]},
    "messages": {"id": "a", "messages": CALLING, "tools": [CALL]},
    "mixture_of_thoughts": {"messages": [ASKED[0], ASKED[1] | {"content": "<think>a</think>b"}]},
    "nebius_swe": {"instance_id": "a", "trajectory": [{"role": "user", "text": "Hi"}]},
    "opencodeinstruct": {"id": "a", "input": "Q"},
    "openhands": {"instance_id": "a", "trajectory": CALLING, "tools": [CALL]},
    "openthoughts": {"system": "s", "conversations": SAID},
    "sharegpt": {
        "id": "a_0",
        "conversations": [
            *SAID[:1],
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "1"},
        ],
        "tools": '[{"name": "f"}]',
    },
    "swe_agent": {"history": CALLING, "info": {}},
    "swe_smith": {"instance_id": "a", "traj_id": "b", "messages": CALLING},
    "turns": {"question_id": 1, "turns": ["Q", "R"]},
    "ultrachat": {"id": "a", "data": ["Hi", "Hello"]},
}


@st.composite
def damaged_rows(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a whole row with something else in one place of it, at any depth."""
    schema = draw(st.sampled_from(sorted(WHOLE)))
    row = copy.deepcopy(WHOLE[schema])
    node: Any = row
    while True:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not node[key] or not isinstance(node[key], dict | list) or draw(st.booleans()):
            break
        node = node[key]
    node[key] = draw(LIKELY | JSON)
    return schema, row


PIECES = st.sampled_from(
    [
        *("USER:", "ASSISTANT:", "FUNCTION RESPONSE:", "\n\n\n", "<|endoftext|>", "<functioncall>"),
        *("{", "}", "'", '"', '{"name": "f", "arguments": ', "null", "Infinity", "a", " ", "["),
    ]
)


@pytest.mark.parametrize("schema", sorted(SCHEMAS))
def test_whole_row_of_every_schema_is_parsed(schema: str) -> None:
    assert isinstance(parse_row(schema, WHOLE[schema]), ParsedRow)


@given(damaged_rows())
def test_damaged_row_is_parsed_or_rejected_without_an_exception(
    damaged: tuple[str, dict[str, Any]],
) -> None:
    found = parse_row(*damaged)
    assert isinstance(found, ParsedRow | Reject)
    if isinstance(found, ParsedRow):
        assert row_id("d", found.upstream_id, found.messages, found.tools)


@given(st.lists(PIECES, max_size=20), st.lists(PIECES, max_size=6))
def test_any_text_of_glaive_is_parsed_or_rejected(chat: list[str], functions: list[str]) -> None:
    asked = "USER: a\n\n\nASSISTANT: " + "".join(chat)
    calling = "USER: a\n\n\nASSISTANT: <functioncall> " + "".join(chat)
    rows = ((DECLARED, asked), (DECLARED, calling), (DECLARED + "".join(functions), calling))
    for system, text in rows:
        assert isinstance(parse_row("glaive", {"system": system, "chat": text}), ParsedRow | Reject)


@pytest.mark.parametrize("schema", sorted(SCHEMAS))
@pytest.mark.parametrize("row", [None, [], "row", 3, {}, {"messages": {}, "question": 0}])
def test_row_of_another_kind_is_rejected_by_every_schema(schema: str, row: Any) -> None:
    assert isinstance(parse_row(schema, row), Reject)


@pytest.mark.parametrize("depth", [235, 245, 249, 250, 251, 252, 253, 254, 255, 300])
def test_what_is_parsed_has_an_id_however_deep_it_is_nested(depth: int) -> None:
    tool: dict[str, Any] = {"name": "f"}
    for _ in range(depth):
        tool = {"name": "f", "x": tool}
    for tools in ([tool], json.dumps([tool])):
        found = parse_row("messages", {"prompt": "Hi", "tools": tools})
        if isinstance(found, ParsedRow):
            assert row_id("d", "", found.messages, found.tools)
        else:
            assert found.reason in ("not_json", "bad_tools")


@given(st.permutations(["role", "content", "name"]), st.permutations(["id", "messages", "x"]))
def test_row_id_does_not_depend_on_the_order_of_keys(inner: list[str], outer: list[str]) -> None:
    message = {"role": "user", "content": "Hi", "name": "n"}
    row = {"id": "a", "messages": [{key: message[key] for key in inner}], "x": 1}
    found = parse_row("messages", {key: row[key] for key in outer})
    assert isinstance(found, ParsedRow)
    assert row_id("d", found.upstream_id, found.messages) == row_id("d", "a", [message])


# Which schema reads which file of real upstream rows, and what comes out.
UPSTREAM_COUNTS: list[tuple[str, str, int, dict[str, int]]] = [
    ("bfcl", "bfcl_v4_multi_turn_base", 0, {"no_functions": 40}),
    ("bfcl", "bfcl_v4_multi_turn_func_doc", 0, {"no_messages": 12}),
    ("bfcl", "bfcl_v4_parallel_multiple", 60, {}),
    ("bfcl", "bfcl_v4_simple_python", 110, {}),
    ("glaive", "glaive_v2_original", 7, {}),
    ("gsm8k", "gsm8k_test", 400, {}),
    ("gsm8k", "gsm8k_train", 500, {}),
    ("humaneval", "humaneval", 164, {}),
    ("instruction", "reasoning_math_prompts", 89, {}),
    ("mbpp", "mbpp_sanitized", 200, {}),
    ("messages", "reason_tool_use_messages", 50, {}),
    ("messages", "specforge_tool_use", 1, {}),
    ("sharegpt", "glaive_toolcall_sharegpt", 119, {"duplicate": 11}),
    ("sharegpt", "sharegpt_dummy_conversation", 75, {"duplicate": 5}),
    ("swe_agent", "swe_agent_demonstrations", 6, {}),
    ("swe_smith", "swe_smith_ft_xml", 2, {}),
    ("turns", "mt_bench_question", 80, {}),
    ("turns", "spec_bench_question", 128, {}),
    ("turns", "vicuna_bench_question", 80, {}),
    ("ultrachat", "ultrachat_ultra_eval", 381, {"duplicate": 4}),
]
needs_upstream = pytest.mark.skipif(
    not UPSTREAM.is_dir(), reason="needs ../shared/prompts, real upstream rows"
)


@pytest.fixture(scope="module")
def count() -> Callable[[str, Source], dict[str, Any]]:
    """Return the function that benchmarks/prepare_rows.py prints the numbers of."""
    spec = importlib.util.spec_from_file_location("prepare_rows", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.count


@needs_upstream
@pytest.mark.parametrize(("schema", "name", "prompts", "rejected"), UPSTREAM_COUNTS)
def test_every_real_upstream_row_is_a_prompt_or_has_a_reason(
    count: Callable[[str, Source], dict[str, Any]],
    schema: str,
    name: str,
    prompts: int,
    rejected: dict[str, int],
) -> None:
    line = count(schema, Source(kind="file", path=str(UPSTREAM / f"{name}.jsonl")))
    assert {reason: entry["count"] for reason, entry in line["rejects"].items()} == rejected
    assert line["prompts_out"] == prompts
    assert line["rows_in"] == prompts + sum(rejected.values())


@needs_upstream
def test_every_upstream_file_has_its_schema() -> None:
    assert {path.stem for path in UPSTREAM.glob("*.jsonl")} == {row[1] for row in UPSTREAM_COUNTS}


@needs_upstream
def test_multi_turn_rows_find_their_functions(
    count: Callable[[str, Source], dict[str, Any]],
) -> None:
    rows, functions = (
        str(UPSTREAM / f"bfcl_v4_multi_turn_{name}.jsonl") for name in ("base", "func_doc")
    )
    line = count("bfcl", Source(kind="file", path=rows, functions=functions))
    assert (line["rows_in"], line["prompts_out"], line["rejects"]) == (40, 40, {})


def counted(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_command_prints_one_line_that_adds_up(tmp_path: Path, name: str) -> None:
    rows = [
        {"prompt": "Hi", "id": "a"},
        {"prompt": "Hi", "id": "b"},
        {"id": "c"},
        3,
        {"prompt": ""},
    ]
    text = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    done = counted("messages", str(tmp_path / name))
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    line = json.loads(done.stdout)
    assert (line["rows_in"], line["prompts_out"]) == (5, 1)
    assert {reason: entry["count"] for reason, entry in line["rejects"].items()} == {
        "duplicate": 1,
        "no_content": 1,
        "no_messages": 1,
        "not_an_object": 1,
    }
    assert line["rejects"]["no_messages"]["example_id"] == "row 3"


def test_command_names_what_it_cannot_read(tmp_path: Path) -> None:
    missing = counted("messages", str(tmp_path / "none.jsonl"))
    assert missing.returncode == 1
    assert "none.jsonl: no such file" in missing.stderr
    (tmp_path / "rows.jsonl").write_text("{}", encoding="utf-8")
    unknown = counted("alpaca", str(tmp_path / "rows.jsonl"))
    assert unknown.returncode == 1
    assert "got 'alpaca'" in unknown.stderr
