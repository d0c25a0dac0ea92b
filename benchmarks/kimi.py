"""Run the whole Kimi project at reduced size: nine data sets, real tokenizer, stand-in target.

The project is laid into an empty folder; conf/ gets one experiment on top of `kimi_k2_5`. The
target is a small Llama over Kimi's 163,840 ids, replies are sold by a simulated
market whose bill counts Kimi's own tokens, and the upstream rows are read from a folder, recast
where that folder has no rows in the form of the data set. Prints minutes a stage in a JSON line.
`--plan`: instead, what `eyas plan` says of the project at full size, with made-up prompts.
Run: python benchmarks/kimi.py [--kimi ../shared/kimi] [--prompts ../shared/prompts]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import market
import orjson
import yaml
from rehearse import SIMULATION, prompts_of
from workspace import copy_tree, environment, free_port, served, shell, stages_of, write_yaml

from eyas.desk.params import check, compose
from eyas.files import write_jsonl
from eyas.settings import Dataset

Row = dict[str, Any]
ROWS = 20  # of each data set, before the held-out split
VOCABULARY, END_OF_TURN = 163_840, 163_586
FOLLOWED = 30_000  # of them in use by the target; the draft vocabulary holds these
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")

# In the form of K2.5's: what codec kimi_k2_5 is held against when it is loaded.
TEMPLATE = """{%- set ns = namespace(last=-1) %}
{%- set thinks = thinking is not defined or thinking %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + (tools_ts_str or tools | tojson) }}
    {{- '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- set kind = m.role if m.role in ('user', 'assistant') else 'system' %}
    {{- '<|im_' + kind + '|>' + (m.name or m.role) + '<|im_middle|>' }}
    {%- if m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
    {%- if m.role == 'assistant' %}
        {%- set kept = thinks and loop.index0 > ns.last %}
        {{- '<think>' + (m.reasoning_content or '' if kept else '') + '</think>' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- if m.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_assistant|>assistant<|im_middle|><think>' }}
    {%- if not thinks %}{{- '</think>' }}{% endif %}
{%- endif %}"""


def as_it_is(row: Row) -> Row:
    """Leave a row in the form that its file has."""
    return row


# data set -> schema, file, rows to skip, how a row is recast into the upstream's form
SETS: dict[str, tuple[str, str, int, Callable[[Row], Row]]] = {
    "b1_glaive": ("sharegpt", "glaive_toolcall_sharegpt", 0, as_it_is),
    "b2_opencodeinstruct": (
        *("opencodeinstruct", "mbpp_sanitized", 0),
        lambda row: {"id": str(row["task_id"]), "input": row["prompt"], "output": row["code"]},
    ),
    "b3_magicoder": (
        *("magicoder", "mbpp_sanitized", 100),
        lambda row: {"index": row["task_id"], "problem": row["prompt"], "solution": row["code"]},
    ),
    "b4_mixturethoughts": (
        *("mixture_of_thoughts", "reasoning_math_prompts", 0),
        lambda row: {"messages": [{"role": "user", "content": row["instruction"]}]},
    ),
    "b5_openthoughts": (
        *("openthoughts", "gsm8k_train", 0),
        lambda row: {"conversations": [{"from": "user", "value": row["question"]}]},
    ),
    "b6_ultrachat": ("ultrachat", "ultrachat_ultra_eval", 0, as_it_is),
    "b7_sharegpt": ("sharegpt", "sharegpt_dummy_conversation", 0, as_it_is),
    "b8_sweagent": ("swe_agent", "swe_agent_demonstrations", 0, as_it_is),
    "a1_deepswekimi": ("messages", "reason_tool_use_messages", 0, as_it_is),
}


def rows_of(folder: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a data set."""
    _, file, skip, recast = SETS[name]
    lines = (folder / f"{file}.jsonl").read_bytes().splitlines()
    yield from (recast(orjson.loads(line)) for line in lines[skip : skip + ROWS])


def write_target(kimi: Path, folder: Path) -> None:
    """Write a small Llama over Kimi's vocabulary, with Kimi's tokenizer.

    Its layers are random and say little, so it answers token i with token 7 i + 11 modulo FOLLOWED:
    a drafter that reads the right embedding, state, head and map is accepted, any other is not.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eyas.states.folder import save_configs, save_weights

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        bos_token_id=163_584,
        eos_token_id=END_OF_TURN,
        pad_token_id=163_839,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    ids, known = torch.arange(FOLLOWED), torch.randn(FOLLOWED, config.hidden_size)
    weights["model.embed_tokens.weight"] = known[torch.arange(VOCABULARY) % FOLLOWED]
    weights["lm_head.weight"][(7 * ids + 11) % FOLLOWED] = known
    save_weights(weights, folder)
    save_configs(config, folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((kimi / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_experiment(project: Path, target: Path, prompts: Path, port: int) -> None:
    """Write conf/: `kimi_k2_5` with other rows, a small target and few, short replies."""
    datasets = yaml.safe_load((project / "conf/datasets/kimi.yaml").read_text(encoding="utf-8"))
    for name, dataset in datasets.items():
        path = project / f"data/sources/kimi/{name}.jsonl"
        write_jsonl(path, rows_of(prompts, name))
        dataset["source"] = {"kind": "file", "path": str(path.relative_to(project))}
        dataset["prepare"] |= {"schema": SETS[name][0], "max_upstream_rows": None}
    write_yaml(project / "conf/datasets/kimi_rehearsal.yaml", datasets)
    stand_in = {"name": "kimi_stand_in", "codec": "kimi_k2_5", "dtype": "float32"}
    source = {"source": {"kind": "folder", "path": str(target)}}
    write_yaml(project / "conf/target/kimi_stand_in.yaml", stand_in | source)
    write_yaml(
        project / "conf/experiment/kimi_rehearsal.yaml",
        {
            "defaults": [
                "kimi_k2_5",
                {"override /target": "kimi_stand_in"},
                {"override /datasets": "kimi_rehearsal"},
                {"override /extract": "default"},
                "_self_",
            ],
            "partition": {"short": {"max_tokens": 240}, "long": {"max_tokens": 240}},
            "merge": {"extract_tokens_per_s": None},
            "train": {"epochs": 1, "soup": 1},
            "evaluate": {"max_prompts_per_set": 2, "max_new_tokens": 12, "draft_steps": [1, 3]},
            "runtime": {
                "tracking": "off",
                "connection": {"url": f"http://127.0.0.1:{port}/api/v1"},
            },
        },
        "# @package _global_\n",
    )
    config = project / "conf/config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("- experiment: null", "- experiment: kimi_rehearsal"))


def write_market(path: Path, **changes: Any) -> None:
    """Write the default simulation without its long replies, or with other changes."""
    simulation = yaml.safe_load(SIMULATION.read_text(encoding="utf-8"))
    write_yaml(path, simulation | changes)


def run_stages(project: Path) -> dict[str, float]:
    """Run `dvc repro` and return the seconds of each stage; what it prints goes to our stderr."""
    seconds: dict[str, float] = {}
    stage, since = "", time.monotonic()
    process = subprocess.Popen(
        ["dvc", "repro"],
        cwd=project,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if begun := stages_of(line):
            seconds[stage] = time.monotonic() - since
            stage, since = begun[0], time.monotonic()
    seconds[stage] = time.monotonic() - since
    if process.wait():
        sys.exit(f"dvc repro: exit code {process.returncode}")
    return {name: round(value, 1) for name, value in seconds.items() if name}


def by_verb(seconds: dict[str, float]) -> dict[str, float]:
    """Return the minutes of each verb, all data sets together."""
    verbs: dict[str, float] = {}
    for name, value in seconds.items():
        verb = name.partition("@")[0]
        verbs[verb] = verbs.get(verb, 0.0) + value / 60
    return {verb: round(minutes, 2) for verb, minutes in verbs.items()}


def read_metrics(project: Path) -> dict[str, Any]:
    """Return what the run made, from its metrics."""
    read = {path.stem: json.loads(path.read_text()) for path in (project / "metrics").glob("*")}
    sets = {
        name: {
            "prompts": read[f"prepare-{name}"]["prompts"],
            "responses": read[f"generate-{name}"]["responses"],
            "identical_or_within": read[f"reconstruct-{name}"]["rows_out"],
            "valid": read[f"validate-{name}"]["rows_out"],
        }
        for name in SETS
    }
    usd = sum(read[f"generate-{name}"]["cost_usd"] for name in SETS)
    return {
        "sets": sets,
        "usd": round(usd, 4),
        "tokens": read["merge"]["tokens"],
        "state_bytes": read["extract"]["size_bytes"],
        "teacher_argmax_agreement": read["extract"]["teacher_argmax_agreement"],
        "vocabulary_coverage": read["train"]["vocabulary_coverage"],
        "lossless_share": read["evaluate"]["lossless_share"],
        "acceptance_length": read["evaluate"]["acceptance_length_trained"],
    }


def rehearse(kimi: Path, prompts: Path) -> None:
    """Run everything once, then again to see that nothing is left to do."""
    with tempfile.TemporaryDirectory(prefix="eyas-kimi-") as name:
        home, port = Path(name), free_port()
        project, url = home / "project", f"http://127.0.0.1:{port}/api/v1"
        project.mkdir()
        copy_tree(project)
        write_target(kimi, home / "target")
        write_experiment(project, home / "target", prompts, port)
        lengths = [{"max_tokens": 1_000_000, "median_tokens": 90.0, "sigma": 0.5}]
        write_market(home / "market.yaml", lengths=lengths, delay_mean_s=0.2, time_scale=10.0)
        shell(project, "eyas params && dvc repro target")
        arguments = ["eyas.cli", "serve", "--port", str(port), "--codec", "kimi_k2_5"]
        arguments += ["--simulate", str(home / "market.yaml")]
        with served(project, arguments, f"{url}/key", home / "market.log"):
            shell(
                project,
                "for ds in $(ls data/sources/kimi); do dvc repro prepare@${ds%.jsonl}; done",
            )
            print(shell(project, "eyas plan --yes"))
            seconds = run_stages(project)
            books = market.ledger(url)
            print(shell(project, "eyas summary"))
            if "lineage" in shell(project, "eyas --help"):
                print(shell(project, "eyas lineage models/export"))
            idle = stages_of(shell(project, "dvc repro"))
        edges = shell(project, "dvc dag --dot").count("->")
        facts = {"what": "the Kimi project at reduced size", "minutes": by_verb(seconds)}
        facts |= {"minutes_in_all": round(sum(seconds.values()) / 60, 1), "dag_edges": edges}
        facts |= {"stages_of_second_run": idle, "billed_usd": round(books["usd"], 4)}
        print(json.dumps(facts | read_metrics(project)))


def plan(kimi: Path) -> None:
    """Print what `eyas plan` says of `experiment=kimi_k2_5`; prompts are as long as assumed."""
    with tempfile.TemporaryDirectory(prefix="eyas-kimi-") as name:
        home, port = Path(name), free_port()
        project, url = home / "project", f"http://127.0.0.1:{port}/api/v1"
        project.mkdir()
        copy_tree(project)
        (project / "models/target").mkdir(parents=True)
        (project / "models/target/config.json").write_bytes((kimi / "config.json").read_bytes())
        overrides = ["experiment=kimi_k2_5", f"runtime.connection.url={url}"]
        params = check(compose(overrides))
        for dataset in params.value("datasets"):
            about = params.section(f"datasets.{dataset}", Dataset)
            if about.kind == "prompts":
                path = project / f"data/prompts/{dataset}.jsonl"
                write_jsonl(path, prompts_of(dataset, about))
        shell(project, f"eyas params {' '.join(overrides)}")
        write_market(home / "market.yaml")
        arguments = ["eyas.cli", "serve", "--port", str(port), "--simulate"]
        with served(project, [*arguments, str(home / "market.yaml")], f"{url}/key", home / "log"):
            print(shell(project, "eyas plan", check=False))  # exit code 1: it wants a yes


def main() -> None:
    """Rehearse, or plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kimi", type=Path, default=Path("../shared/kimi"))
    parser.add_argument("--prompts", type=Path, default=Path("../shared/prompts"))
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    if options.plan:
        plan(options.kimi)
    else:
        rehearse(options.kimi.resolve(), options.prompts.resolve())


if __name__ == "__main__":
    main()
