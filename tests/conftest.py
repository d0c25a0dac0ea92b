"""A copy of the repository on the tiny target, for tests that type what a user types."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path.cwd()
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")
COPIED = (".dvc/config", ".dvcignore", ".gitignore", "Makefile", "README.md", "dvc.yaml", "docs")
COPIED += ("conf", "data/sources", "params.yaml", "pyproject.toml", "requirements", "src")

Shell = Callable[[str], subprocess.CompletedProcess[str]]


def copy_repository(folder: Path) -> None:
    """Lay a copy of the project into `folder`, default experiment tiny, as a git repository."""
    for name in COPIED:
        source, copied = ROOT / name, folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copied, ignore=LEFT_OUT)
        else:
            shutil.copy2(source, copied)
    config = folder / "conf" / "config.yaml"
    text = config.read_text(encoding="utf-8")
    text = text.replace("- experiment: null", "- experiment: tiny")
    text = text.replace(
        "tracking: mlflow", 'tracking: "off"'
    )  # tests/desk has its own; 20 imports less
    text = text.replace("checkpoint_every_s: 30", "checkpoint_every_s: 0")  # something to resume
    config.write_text(text, encoding="utf-8")
    (ROOT / "var" / "cache").mkdir(parents=True, exist_ok=True)
    (folder / "var").mkdir()
    (folder / "var" / "cache").symlink_to(ROOT / "var" / "cache")
    (folder / ".venv").symlink_to(ROOT / ".venv")


def shell_in(folder: Path) -> Shell:
    """Return a function that runs a command line in `folder` as a user's shell would."""
    environment = os.environ | {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "COLUMNS": "100",
        "SHELL": "/bin/sh",  # DVC's choice where none is set; dash does not exec a last command
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    return run


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository in which the whole tiny pipeline has run once."""
    folder = tmp_path_factory.mktemp("repository")
    copy_repository(folder)
    run = shell_in(folder)
    ready = run(
        "git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm copy"
        " && eyas params && dvc repro"
    )
    assert ready.returncode == 0, ready.stdout[-4000:] + ready.stderr[-4000:]
    return folder


@pytest.fixture
def shell(tiny_repository: Path) -> Shell:
    """Return a shell in the tiny repository."""
    return shell_in(tiny_repository)


@pytest.fixture(scope="session")
def llama() -> Any:
    """Return a random Llama with grouped heads, small enough for every test."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval().requires_grad_(False)


@pytest.fixture(scope="session")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of that Llama, without a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_drafter_config() -> Any:
    """Return the shape of a drafter for the random Llama."""
    from eyas.drafter.config import DrafterConfig

    return DrafterConfig(
        hidden_size=48,
        target_hidden_size=48,
        intermediate_size=64,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        draft_vocab_size=60,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        aux_layers=(1, 3, 4),
        target_name="random",
        target_revision="0",
        bos_token_id=1,
        eos_token_id=2,
    )
