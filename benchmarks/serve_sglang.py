"""Serve an exported drafter with a real SGLang and hold it against our own decoding.

Held-out prompts are decoded greedily here, plainly and with drafts as the stage evaluate does it,
and then by an SGLang server on the CPU with the same target, drafter and K. Its ids must be those
of plain decoding, its acceptance length that of `evaluate` within 2 %, and on most prompts it must
verify exactly as often: a server skips the names that it does not know, and the mean hides it. The
same is asked of a second drafter, made so that no tensor may be misread (benchmarks/sglang_probe).

Reads: models/target, models/export, models/drafter, data/heldout, params.yaml of a run's folder.
Writes: var/sglang/server.log. Prints one JSON line; exits 1 where a bar is missed.

Run: make test-sglang, or python benchmarks/serve_sglang.py [--folder FOLDER | --tiny --set ...]
"""

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2, copytree
from typing import Any

import sglang_server as sglang
import torch
import yaml
from sglang_probe import probe_of

from eyas.desk.params import PARAMS_FILE, Params, compose, read_params
from eyas.drafter import acceptance as ac
from eyas.drafter import served
from eyas.drafter.config import load_config
from eyas.drafter.export import read_export, served_tensors, write_export
from eyas.drafter.heldout import Decoding, HeldOut, decode_all
from eyas.drafter.inference import DraftRunner
from eyas.drafter.verifier import Target
from eyas.errors import EyasError
from eyas.records import Prompt
from eyas.settings import Evaluate
from eyas.stages import evaluate
from eyas.states.target import load_model
from eyas.tokens.codecs import load_codec

BAR = 0.02  # of the acceptance length
# Of the prompts, how many must take as many verifications as here: measured, a server that reads
# the layers next to ours keeps the mean within 1.3 % and no prompt's count; d2t of zeros half.
EQUAL_SHARE = 0.75
LOG = sglang.ROOT / "var/sglang/server.log"
_OF_A_RUN = ("conf", "src", "docs", "data/sources", "README.md", "dvc.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What our own decoding gives, and by drafter its folder and its verifications."""

    target: str
    num_drafts: int
    decoding: Decoding
    paths: list[HeldOut]
    drafters: dict[str, tuple[Path, list[ac.Verified]]]


def main() -> None:
    """Read the arguments, decode twice, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--folder", type=Path, default=Path(), help="a folder with a finished run")
    kind.add_argument("--tiny", action="store_true", help="run the tiny experiment first")
    parser.add_argument("--set", nargs="*", default=[], help="options of the tiny experiment")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()
    with (
        working_folder(given.folder, given.set, tiny=given.tiny) as folder,
        contextlib.chdir(folder),
        tempfile.TemporaryDirectory(prefix="eyas-probe-") as scratch,
    ):
        try:
            reference = decode_here(given.prompts, given.max_new_tokens, Path(scratch))
            line = about(reference)
            for name, (drafter, replays) in reference.drafters.items():
                replies, facts = decode_there(reference, drafter)
                line[name] = compare(reference.paths, replays, replies) | facts
        except EyasError as error:
            sys.exit(f"serve_sglang: {error}")
    met = all(line[name]["met"] for name in reference.drafters)
    print(json.dumps(line | {"met": met}))
    sys.exit(not met)


@contextlib.contextmanager
def working_folder(folder: Path, options: Sequence[str], *, tiny: bool) -> Generator[Path]:
    """Give the folder of a finished run: this one, or a temporary one of the tiny experiment."""
    if not tiny:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="eyas-tiny-") as name:
        make_tiny_run(Path(name), options)
        yield Path(name)


def make_tiny_run(folder: Path, options: Sequence[str]) -> None:
    """Run every stage up to the export, on a target of a few million parameters."""
    for name in _OF_A_RUN:
        source, copied = sglang.ROOT / name, folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        (copytree if source.is_dir() else copy2)(source, copied)
    with contextlib.chdir(folder):
        text = compose(["experiment=tiny", "runtime.tracking=off", *options], Path("conf"))
        PARAMS_FILE.write_text(text, encoding="utf-8")
        tree = yaml.safe_load(text)
        stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
        for stage, block in stages.items():
            if stage in ("compose", "evaluate", "report"):
                continue
            for dataset in tree["datasets"] if "foreach" in block else [None]:
                module = importlib.import_module(f"eyas.stages.{stage}")
                module.work(Params(tree | {"select": dataset}))


def decode_here(num_prompts: int, max_new_tokens: int, scratch: Path) -> Reference:
    """Decode prompts of this folder's run plainly and with drafts, and replay each drafter."""
    params = read_params()
    settings = params.section("evaluate", Evaluate)
    config = load_config(evaluate.DRAFTER / "config.json")
    evaluate.check_belonging(config)
    codec = load_codec(params.section("target.codec", str), evaluate.TARGET)
    sources = params.section("merge.sources", tuple[str, ...])
    prompts = spread(evaluate.read_prompts(sources, settings), num_prompts)
    rendered = [(p, codec.render_prompt(p.messages, p.tools)) for p in prompts]
    tensors = read_export(evaluate.EXPORT, config)
    model = load_model(evaluate.TARGET)
    embed_VD = model.get_input_embeddings().weight.detach()
    probe = served_tensors(probe_of(tensors))
    write_export(scratch, probe, config, "A probe.")
    runner, probing = (DraftRunner(weights, config, embed_VD) for weights in (tensors, probe))
    target, num_drafts = Target(model, config.aux_layers), settings.headline_steps
    decoding = Decoding(max_new_tokens=max_new_tokens, stop_ids=codec.stop_ids)
    paths = decode_all(target, runner, rendered, num_drafts, decoding)
    return Reference(
        target=config.target_name,
        num_drafts=num_drafts,
        decoding=decoding,
        paths=paths,
        drafters={
            "export": (evaluate.EXPORT.resolve(), replay_all(paths, runner, settings)),
            "probe": (scratch, replay_all(paths, probing, settings)),
        },
    )


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Take the first prompt of every data set, then the second of each, and so on."""
    seen = Counter[str]()
    ranks = []
    for prompt in prompts:
        ranks.append(seen[prompt.dataset])
        seen[prompt.dataset] += 1
    order = sorted(range(len(prompts)), key=ranks.__getitem__)
    return [prompts[index] for index in order[:count]]


@torch.inference_mode()
def replay_all(
    paths: Sequence[HeldOut], runner: DraftRunner, settings: Evaluate
) -> list[ac.Verified]:
    """Return the verifications that `evaluate` would replay along the plain paths."""
    num_drafts, runners = settings.headline_steps, {"trained": runner}
    return [
        ac.replay(
            path.ids,
            len(path.prompt),
            evaluate.chains_of("trained", path, runners, settings, num_drafts),
            num_drafts,
        )
        for path in paths
    ]


def decode_there(reference: Reference, drafter: Path) -> tuple[list[served.Reply], dict[str, Any]]:
    """Let a server decode the same prompts; return its replies, and facts about it."""
    began_s = time.monotonic()
    target, num_drafts = evaluate.TARGET.resolve(), reference.num_drafts
    with sglang.serving(sglang.drafting(target, drafter, num_drafts), log=LOG) as url:
        ready_s = time.monotonic()
        prompts = [path.prompt for path in reference.paths]
        replies = served.ask_all(url, prompts, **reference.decoding)
        done_s = time.monotonic()
        info = served.server_info(url)
    if (algorithm := info["speculative_algorithm"]) != "EAGLE3":
        raise EyasError(f"the server drafts by {algorithm}, expected EAGLE3")
    return replies, {
        "start_s": round(ready_s - began_s, 1),
        "answer_s": round(done_s - ready_s, 1),
        "server_average": round(info["internal_states"][0]["avg_spec_accept_length"], 4),
    }


def about(reference: Reference) -> dict[str, Any]:
    """Return what both drafters have in common."""
    paths = reference.paths
    return {
        "what": "exported drafter in SGLang",
        "target": reference.target,
        "draft_steps": reference.num_drafts,
        "topk": 1,
        "prompts": len(paths),
        "max_new_tokens": reference.decoding["max_new_tokens"],
        "tokens": sum(len(path.plain.ids) for path in paths),
        "lossless_here": sum(path.lost_at is None for path in paths),
        "bar": BAR,
    }


def compare(
    paths: Sequence[HeldOut], replays: Sequence[ac.Verified], replies: Sequence[served.Reply]
) -> dict[str, Any]:
    """Return a drafter's figures: ids, and both acceptance lengths by our convention.

    Tokens gained a verification, the bonus token counted, the token of the prefill not. SGLang's
    `spec_accept_length` counts that one too; its server average also drafts past a reply's end.
    """
    tokens = sum(len(reply.ids) for reply in replies)
    verifications = sum(reply.verifications for reply in replies)
    if not verifications:
        raise EyasError("the server counted no verification", hint="a longer --max-new-tokens")
    ours = ac.tau_of([replay.gains for replay in replays])
    theirs = (tokens - len(replies)) / verifications
    differing = differences(paths, replies)
    pairs = zip(replays, replies, strict=True)
    equal = sum(len(replay.gains) == reply.verifications for replay, reply in pairs)
    return {
        "lossless": len(replies) - len(differing),
        "differing": differing,
        "accept_length_sglang": round(theirs, 4),
        "accept_length_evaluate": round(ours, 4),
        "difference": round(theirs / ours - 1, 4),
        "equal_verifications": equal,
        "spec_accept_length": round(tokens / verifications, 4),
        "met": not differing
        and abs(theirs / ours - 1) <= BAR
        and equal >= EQUAL_SHARE * len(replies),
    }


def differences(
    paths: Sequence[HeldOut], replies: Sequence[served.Reply]
) -> list[dict[str, float | int | str]]:
    """Return where replies leave plain decoding, and how near a tie of two logits was there."""
    found = []
    for path, reply in zip(paths, replies, strict=True):
        at = ac.first_difference(path.plain.ids, reply.ids)
        if at is not None:
            gap = path.plain.gaps[min(at, len(path.plain.gaps) - 1)]
            found.append({"id": path.prompt_id, "at_token": at, "logit_gap": round(gap, 5)})
    return found


if __name__ == "__main__":
    main()
