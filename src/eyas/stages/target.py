"""Put the target into one folder of one form, wherever it comes from.

Reads: an installed wheel, the hub, a folder, or the project's own text. Writes: models/target.
Run: python -m eyas.stages.target.
Source: design section 1; the folder is what transformers, SGLang and vLLM load.
"""

import shutil
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.settings import Runtime, Target, TargetSource
from eyas.states import folder as folders
from eyas.states import gguf, sources, tiny
from eyas.tokens import tokenizers

FOLDER = Path("models/target")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Build models/target."""
    run_stage("target", work, config)


def work(params: Params) -> Report:
    """Build the folder beside its place, check it, then put it there."""
    started = time.monotonic()
    target = params.section("target", Target)
    threads = params.knob("runtime", Runtime).threads
    if target.dtype not in _DTYPES:
        raise EyasError(f"target.dtype: expected {' | '.join(_DTYPES)}, got '{target.dtype}'")
    if threads:
        torch.set_num_threads(threads)
    draft = FOLDER.with_name(".target.part")
    shutil.rmtree(draft, ignore_errors=True)
    revision = build(target, draft)
    folders.check_folder(draft)
    about = {
        "name": target.name,
        "codec": target.codec,
        "revision": revision,
        "source": {"kind": target.source.kind, **_given(target.source)},
    }
    write_json(draft / folders.SIDECAR, about)
    shutil.rmtree(FOLDER, ignore_errors=True)
    draft.rename(FOLDER)
    return _report(target.name, time.monotonic() - started)


def build(target: Target, folder: Path) -> str:
    """Fill `folder` from the target's source; return the identity of what it was made from."""
    source, dtype = target.source, _DTYPES[target.dtype]
    if source.weights not in ("all", "head"):
        raise EyasError(f"target.source.weights: expected all | head, got '{source.weights}'")
    head_only = source.weights == "head"
    match source.kind:
        case "wheel_gguf":
            package, file = _need(source, "package"), _need(source, "file")
            path = sources.wheel_file(package, file, _need(source, "sha256"))
            gguf.convert_gguf(path, folder, dtype=dtype)
            tokenizers.save_gguf_tokenizer(path, folder)
            return _need(source, "sha256")
        case "hub":
            revision = _need(source, "revision")
            found = sources.hub_folder(_need(source, "repo"), revision, head_only=head_only)
            folders.copy_folder(found, folder, head_only=head_only)
            return revision
        case "folder":
            folders.copy_folder(Path(_need(source, "path")), folder, head_only=head_only)
            return folders.folder_digest(folder)
        case "train_tiny":
            return _build_tiny(source, dtype, folder)
    kinds = "wheel_gguf | hub | folder | train_tiny"
    raise EyasError(f"target.source.kind: expected {kinds}, got '{source.kind}'")


def _build_tiny(source: TargetSource, dtype: torch.dtype, folder: Path) -> str:
    if source.steps is None or source.seed is None:
        raise EyasError("target.source: kind 'train_tiny' needs steps and seed")
    plan = tiny.Plan(steps=source.steps, seed=source.seed, dtype=dtype)
    texts = tiny.project_texts(Path())
    cached = tiny.cache_folder(plan, texts)
    if not (cached / tiny.DONE).is_file():
        shutil.rmtree(cached, ignore_errors=True)
        vocab_size = tokenizers.train_tokenizer(
            texts, cached, vocab_size=plan.vocab_size, max_length=plan.max_length
        )
        rows = tokenizers.encode_texts(cached, texts)
        tiny.train(rows, plan, cached, vocab_size=vocab_size)
    shutil.copytree(cached, folder, ignore=shutil.ignore_patterns(tiny.DONE))
    return cached.name


def _need(source: TargetSource, name: str) -> str:
    value = getattr(source, name)
    if not value:
        raise EyasError(f"target.source: kind '{source.kind}' needs '{name}'")
    return str(value)


def _given(source: TargetSource) -> dict[str, object]:
    names = ("package", "file", "sha256", "repo", "revision", "steps", "seed")  # a path is private
    given = {name: value for name in names if (value := getattr(source, name)) is not None}
    return given if source.weights == "all" else given | {"weights": source.weights}


def _report(name: str, seconds: float) -> Report:
    config = read_json(FOLDER / "config.json")
    text = config.get("text_config", config)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    metrics = {
        "layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "size_bytes": size,
        "duration_s": round(seconds, 2),
    }
    summary = f"{name}: {metrics['layers']} layers, {size / 1e6:,.0f} MB in {seconds:.1f} s"
    return Report(summary=summary, metrics=metrics)


if __name__ == "__main__":
    main()
