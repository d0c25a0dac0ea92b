"""The files of a finished run, as the stages write them: four data sets, one of trajectories."""

import random
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.files import write_json, write_jsonl
from eyas.parquet import write_samples
from eyas.records import Prompt, Sample, row_id

SETS = ("chat", "tools", "code", "trajectories")
ANSWERS = {"chat": 136, "tools": 90, "code": 90, "trajectories": 0}
LENGTHS = {"chat": (90, 50), "tools": (120, 30), "code": (150, 20), "trajectories": (60, 30)}
VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADING = {"src", "href", "xlink:href", "srcset", "data", "action"}
TAUS = {"trained": 1.62, "untrained": 1.49, "random": 1.0, "lookup": 1.21}


def data_metrics(name: str) -> dict[str, dict[str, Any]]:
    answers = ANSWERS[name]
    kept = max(answers - 5, 20)
    truth = {"identical_share": 0.97, "kept_identical_share": 0.99, "replies_of_known_ids": answers}
    return {
        "prepare": {
            "rows_in": 170,
            "prompts": answers or 23,
            "heldout": 14,
            "rejects_duplicate": 2,
            "prompt_tokens_p50": 40,
            "prompt_tokens_p90": 90,
            "prompt_tokens_max": 1234,
            "language_de": 7,
            "language_en": 107,
            "language_unclear": 7,
        },
        "generate": {
            "prompts": answers,
            "responses": answers,
            "truncated": answers // 3,
            "prompt_tokens": 55 * answers,
            "completion_tokens": 110 * answers,
            "cost_usd": 0.0000495 * answers,
            "rejects_budget": 3 if name == "code" else 0,
        },
        "reconstruct": {"rows_in": answers or 23, "rows_out": kept + 1}
        | (truth if answers else {}),
        "validate": {
            "rows_in": kept + 1,
            "rows_out": kept,
            "accepted_share": 0.95,
            "rejects_ends_in_loop": 1,
        },
    }


def evaluation_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    spread = {"all": 0.0, "chat": -0.1, "tools": 0.12, "code": 0.08, "trajectories": -0.2}
    for drafter, base in TAUS.items():
        for steps in range(1, 6) if drafter == "trained" else (3,):
            for name, shift in spread.items():
                tau = 1 + max(0.0, base - 1 + (shift if base > 1 else 0)) * (1 - 0.45**steps)
                prompts = 37 if name == "all" else {"trajectories": 1}.get(name, 12)
                verifications = prompts * 30
                rows.append(
                    {
                        "drafter": drafter,
                        "dataset": name,
                        "method": "replay",
                        "draft_steps": steps,
                        "tau": tau,
                        "tau_low": tau - 0.08,
                        "tau_high": tau + 0.11,
                        "tau_without_loops": tau - 0.05,
                        "acceptance_by_position": [
                            max(0.0, 0.45 + shift / 2 - 0.04 * k) for k in range(steps)
                        ],
                        "prompts": prompts,
                        "prompts_in_loops": 2 if name == "all" else 1,
                        "verifications": verifications,
                        "tokens": round(verifications * tau),
                    }
                )
    real = [r for r in rows if (r["drafter"], r["draft_steps"]) == ("trained", 3)]
    return [*({**r, "method": "real", "lossless_prompts": r["prompts"]} for r in real), *rows]


def curve_rows(steps: int = 180, ttt_steps: int = 3) -> list[dict[str, Any]]:
    draw = random.Random(0)

    def row(split: str, step: int) -> dict[str, Any]:
        noise = draw.uniform(-0.15, 0.15) if split == "train" else 0.0
        figures: dict[str, Any] = {"split": split, "step": step, "epoch": 1}
        for k in range(1, ttt_steps + 1):
            figures[f"loss_step{k}"] = 2.2 + 0.5 * k + 1.3 * 0.985**step + noise
            figures[f"accuracy_step{k}"] = 0.52 - 0.09 * k - 0.12 * 0.985**step - noise / 4
        figures["simulated_acceptance_length"] = 1.75 - 0.3 * 0.985**step - noise / 3
        return figures

    return [row("val", 0), *(row("train", s) for s in range(1, steps + 1)), row("val", steps)]


def samples_of(name: str) -> list[Sample]:
    draw, (mean, deviation) = random.Random(name), LENGTHS[name]
    samples = []
    for index in range(60):
        length = min(160, max(2, int(draw.gauss(mean, deviation))))
        samples.append(
            Sample(
                id=f"{name}{index}",
                dataset=name,
                input_ids=tuple(range(40 + length)),
                spans=((40, 40 + length),),
                temperature=0.7,
                provider="local",
                flags=(),
                completion_tokens_billed=length,
            )
        )
    return samples


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every file that summary and report read."""
    root = tmp_path_factory.mktemp("run")
    for name in SETS:
        for stage, metrics in data_metrics(name).items():
            write_json(root / f"metrics/{stage}-{name}.json", metrics)
        write_samples(root / f"data/valid/{name}.parquet", samples_of(name))
    single: dict[str, dict[str, Any]] = {
        "merge": {"rows_in": 316, "rows_out": 312, "tokens": 52110, "rejects_too_long": 4},
        "extract": {
            "tokens": 52110,
            "size_bytes": 240_000_000,
            "teacher_argmax_agreement": 0.9987,
        },
        "train": {
            "documents": 290,
            "tokens": 48000,
            "predictions": 30100,
            "steps": 180,
            "ttt_steps": 3,
            "vocabulary_coverage": 0.9991,
            "wall_s": 214.0,
            "val_simulated_acceptance_length": 1.73,
        },
        "export": {"parameters": 14_200_000, "size_bytes": 28_400_000},
        "evaluate": {f"acceptance_length_{d}": tau for d, tau in TAUS.items()}
        | {
            "prompts": 37,
            "lossless_share": 1.0,
            "wall_clock_ratio": 1.08,
            "forward_passes_saved_share": 0.355,
        },
    }
    for stage, metrics in single.items():
        write_json(root / f"metrics/{stage}.json", metrics)
    write_json(
        root / "data/evaluation.json",
        {"headline_steps": 3, "rows": evaluation_rows(), "wall_clock": {"prompts": 8}},
    )
    write_jsonl(root / "models/drafter/curves.jsonl", curve_rows())
    target = {"name": "smollm2_135m", "codec": "chatml", "revision": "9f" * 32}
    write_json(root / "models/target/eyas_target.json", target)
    (root / "params.yaml").write_text(
        "merge: {sources: [chat, tools, code, trajectories]}\nexport: {profile: vllm}\n"
    )
    return root


def chat_prompt(number: int, prompt_tokens: int) -> Prompt:
    """Return a short prompt of the set chat."""
    messages = ({"role": "user", "content": f"q{number}"},)
    return Prompt(
        id=row_id("chat", str(number), messages),
        dataset="chat",
        upstream_id=str(number),
        messages=messages,
        tools=(),
        prompt_tokens=prompt_tokens,
        partition="short",
        licence="none",
    )


@pytest.fixture(scope="session")
def make_prompt() -> Callable[[int, int], Prompt]:
    """Return a function of number and prompt tokens that makes a prompt of the set chat."""
    return chat_prompt


class Reader(HTMLParser):
    """Collects what a validator would ask of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.loaded += [value or "" for name, value in attrs if name in LOADING]
        if tag in ("svg", "img"):
            self.pictures.append(given)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.fixture(scope="session")
def read_page() -> Callable[[str], Any]:
    """Return a function that reads a page as a validator would."""
    return Reader


@pytest.fixture
def check_page() -> Callable[[str], str]:
    """Return a function that checks a page's frame and returns its words."""

    def check(page: str) -> str:
        reader = Reader(page)
        assert reader.open == []
        assert reader.headings[0] == 1
        assert reader.headings.count(1) == 1
        steps = zip(reader.headings, reader.headings[1:], strict=False)
        assert all(after <= before + 1 for before, after in steps)
        assert all(where.startswith(("#", "data:")) for where in reader.loaded)
        assert all(len(picture["aria-label"] or "") > 20 for picture in reader.pictures)
        assert page.count("<table>") == page.count("<caption>")
        assert '<th scope="col"></th>' not in page
        return " ".join(reader.words)

    return check
