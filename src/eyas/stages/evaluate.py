"""Measure acceptance on the held-out prompts: real draft-verify decoding, and its replay.

Reads: data/heldout/DS.jsonl, models/target, models/export, models/drafter (config.json and
start.safetensors). Writes: data/evaluation.json.
Run: python -m eyas.stages.evaluate. Source: eyas.drafter.acceptance.

The target decodes every prompt plainly once, in batches. The trained drafter then decodes it for
real at `headline_steps`, and the ids must be the same. Other K and the baselines (the start before
training, random weights, prompt lookup) are replays of the plain path; the replay of the trained
drafter at the headline K must verify exactly as often as its real loop did. Time is measured on a
few prompts, one at a time, as a user feels it.

With `evaluate.backend=sglang` a server with the exported drafter answers, by its own counts; the
target is not loaded, and prompt lookup is replayed along the server's replies.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from eyas.desk.params import Params
from eyas.desk.stage import CONF, Report, run_stage
from eyas.drafter import acceptance as ac
from eyas.drafter import served
from eyas.drafter.config import DrafterConfig, load_config
from eyas.drafter.export import (
    check_tensors,
    expected_shapes,
    read_export,
    read_tensors,
    served_tensors,
)
from eyas.drafter.heldout import Decoding, HeldOut, decode_all, describe, wall_clock
from eyas.drafter.inference import DraftRunner
from eyas.drafter.lookup import Lookup
from eyas.drafter.verifier import Target
from eyas.errors import EyasError
from eyas.files import read_json, read_records, write_json
from eyas.records import Prompt
from eyas.settings import Evaluate, Runtime
from eyas.states.folder import SIDECAR
from eyas.states.target import load_model
from eyas.tokens.codecs import load_codec

TARGET = Path("models/target")
EXPORT = Path("models/export")
DRAFTER = Path("models/drafter")
OUT = Path("data/evaluation.json")
ALL = "all"
CONVENTION = (
    "greedy, chain of K drafts; acceptance length = tokens gained / verifications, bonus token "
    "counted, the token of the prefill not; acceptance by position is conditional on the one before"
)
Chains = Callable[[int], Sequence[int]]
log = logging.getLogger("eyas")


@hydra.main(version_base=None, config_path=CONF, config_name="config")
def main(config: DictConfig) -> None:
    """Evaluate the exported drafter."""
    run_stage("evaluate", work, config)


def work(params: Params) -> Report:
    """Decode, replay, write the table."""
    settings = params.section("evaluate", Evaluate)
    runtime = params.knob("runtime", Runtime)
    torch.set_num_threads(runtime.threads or torch.get_num_threads())
    config = load_config(DRAFTER / "config.json")
    check_belonging(config)
    codec = load_codec(params.section("target.codec", str), TARGET)
    prompts = read_prompts(params.section("merge.sources", tuple[str, ...]), settings)
    rendered = [(p, codec.render_prompt(p.messages, p.tools)) for p in prompts]
    decoding = Decoding(max_new_tokens=settings.max_new_tokens, stop_ids=codec.stop_ids)
    if settings.backend == "sglang":
        read_export(EXPORT, config)
        return work_served(rendered, settings, runtime.sglang_url, decoding)
    if settings.backend != "transformers":
        raise EyasError(
            f"evaluate.backend: expected transformers | sglang, got '{settings.backend}'"
        )
    model = load_model(TARGET)
    embed_VD = model.get_input_embeddings().weight.detach()
    runners = {
        name: DraftRunner(tensors, config, embed_VD)
        for name, tensors in drafters_of(config).items()
    }
    target = Target(model, config.aux_layers)
    paths = decode_all(target, runners["trained"], rendered, settings.headline_steps, decoding)
    clock = wall_clock(target, runners["trained"], paths, settings.headline_steps, decoding)
    target.close()
    rows, replays = table(paths, runners, settings)
    result = {
        "convention": CONVENTION,
        "headline_steps": settings.headline_steps,
        "rows": rows,
        "wall_clock": clock,
        "prompts": [describe(path, r) for path, r in zip(paths, replays, strict=True)],
    }
    warn_of(result["prompts"])
    write_json(OUT, result)
    return report_of(result, settings)


def work_served(
    rendered: Sequence[tuple[Prompt, list[int]]],
    settings: Evaluate,
    url: str | None,
    decoding: Decoding,
) -> Report:
    """Let a server decode the prompts with its drafter, and write its counts as the table."""
    if url is None:
        raise EyasError(
            "runtime.sglang_url: expected the address of a server for evaluate.backend=sglang",
            hint=f"{EXPORT}/README.md has the command that starts one",
        )
    num_drafts = settings.headline_steps
    served.check_server(served.server_info(url), num_drafts)
    replies = served.ask_all(url, [ids for _, ids in rendered], **decoding)
    rows = served_rows(rendered, replies, settings)
    tokens, verifications = rows[0]["tokens"], rows[0]["verifications"]
    average = served.server_info(url)["internal_states"][0]["avg_spec_accept_length"]
    metrics = acceptance_metrics(rows, num_drafts) | {
        "prompts": len(replies),
        "forward_passes_saved_share": round((tokens - verifications) / (tokens + len(replies)), 4),
        "server_accept_length": round((tokens + len(replies)) / max(verifications, 1), 4),
        "server_average": round(average, 4),
    }
    write_json(OUT, {"convention": CONVENTION, "headline_steps": num_drafts, "rows": rows})
    return Report(
        summary=f"acceptance length at K={num_drafts} in SGLang: trained "
        f"{metrics['acceptance_length_trained']:.2f}, prompt lookup "
        f"{metrics['acceptance_length_lookup']:.2f}; {len(replies)} prompts",
        metrics=metrics,
        artifacts=(OUT,),
    )


def served_rows(
    rendered: Sequence[tuple[Prompt, list[int]]],
    replies: Sequence[served.Reply],
    settings: Evaluate,
) -> list[dict[str, Any]]:
    """Return the rows of the server's drafter, and those of prompt lookup on the same replies."""
    num_drafts, lookup = settings.headline_steps, Lookup(max_ngram=settings.lookup_ngram)
    named = [(p.dataset, r.ids) for (p, _), r in zip(rendered, replies, strict=True)]
    found = [reply.verified(num_drafts) for reply in replies]
    rows = rows_of(("trained", "served", num_drafts), named, found)
    paths = [[*ids, *reply.ids] for (_, ids), reply in zip(rendered, replies, strict=True)]
    replays = [
        ac.replay(
            path, len(ids), lambda n, path=path: lookup.propose(path[:n], num_drafts), num_drafts
        )
        for path, (_, ids) in zip(paths, rendered, strict=True)
    ]
    return rows + rows_of(("lookup", "replay", num_drafts), named, replays)


def check_belonging(config: DrafterConfig) -> None:
    """Refuse a drafter that was made for another target."""
    revision = read_json(TARGET / SIDECAR, hint="run `dvc repro target`")["revision"]
    if revision != config.target_revision:
        raise EyasError(
            f"{DRAFTER}: made for target revision {config.target_revision}, {TARGET} is {revision}",
            hint="run `dvc repro`",
        )


def read_prompts(sources: Sequence[str], settings: Evaluate) -> list[Prompt]:
    """Return the held-out prompts, at most `max_prompts_per_set` of each set, in order of id."""
    prompts: list[Prompt] = []
    for name in sources:
        path = Path(f"data/heldout/{name}.jsonl")
        rows = sorted(read_records(path, Prompt, hint=f"run `dvc repro prepare@{name}`"), key=_id)
        prompts += rows[: settings.max_prompts_per_set]
    if not prompts:
        raise EyasError("data/heldout: no held-out prompt", hint="raise heldout.permille")
    return prompts


def _id(prompt: Prompt) -> str:
    return prompt.id


def drafters_of(config: DrafterConfig) -> dict[str, dict[str, torch.Tensor]]:
    """Return the exported drafter, its start before training, and random weights."""
    trained = read_export(EXPORT, config)
    start = read_tensors(DRAFTER / "start.safetensors")
    check_tensors(start, config, str(DRAFTER / "start.safetensors"))
    start = served_tensors(start)
    generator = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn(shape, generator=generator) * 0.02
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in expected_shapes(config).items()
        if name not in ("d2t", "t2d")
    }
    random |= {name: trained[name] for name in ("d2t", "t2d")}
    return {"trained": trained, "untrained": start, "random": random}


@torch.inference_mode()
def table(
    paths: Sequence[HeldOut], runners: Mapping[str, DraftRunner], settings: Evaluate
) -> tuple[list[dict[str, Any]], list[ac.Verified]]:
    """Return the rows, real and replayed, and the trained drafter's replay at the headline K."""
    headline = settings.headline_steps
    steps = sorted({*settings.draft_steps, headline})
    replies = [(path.dataset, path.plain.ids) for path in paths]
    rows = rows_of(("trained", "real", headline), replies, [p.drafted.verified for p in paths])
    for row in rows:
        row["lossless_prompts"] = sum(
            p.lost_at is None for p in paths if row["dataset"] in (ALL, p.dataset)
        )
    replays = {}
    for name in (*runners, "lookup"):
        chains = [chains_of(name, path, runners, settings, max(steps)) for path in paths]
        for num_drafts in steps if name == "trained" else [headline]:
            replays[name, num_drafts] = [
                ac.replay(path.ids, len(path.prompt), chain, num_drafts)
                for path, chain in zip(paths, chains, strict=True)
            ]
            rows += rows_of((name, "replay", num_drafts), replies, replays[name, num_drafts])
    return rows, replays["trained", headline]


def chains_of(
    name: str,
    path: HeldOut,
    runners: Mapping[str, DraftRunner],
    settings: Evaluate,
    num_drafts: int,
) -> Chains:
    """Return the chain that a drafter proposes after each prefix of a path."""
    ids = path.ids
    if name == "lookup":
        lookup = Lookup(max_ngram=settings.lookup_ngram)
        return lambda committed: lookup.propose(ids[:committed], num_drafts)
    if len(path.plain.ids) < 2:
        return lambda _: []
    assert path.plain.aux_TLD is not None
    drafts_TJ = runners[name].draft_everywhere(ids, path.plain.aux_TLD, num_drafts)
    return lambda committed: drafts_TJ[committed - 2].tolist()


def rows_of(
    about: tuple[str, str, int],
    replies: Sequence[tuple[str, Sequence[int]]],
    verified: Sequence[ac.Verified],
) -> list[dict[str, Any]]:
    """Return a row for all, one a data set as `replies` name it; `about`: drafter, method, K."""
    drafter, method, num_drafts = about
    rows = []
    for dataset in (ALL, *dict.fromkeys(name for name, _ in replies)):
        chosen = [
            (ids, v)
            for (name, ids), v in zip(replies, verified, strict=True)
            if dataset in (ALL, name)
        ]
        row = {"drafter": drafter, "dataset": dataset, "method": method}
        rows.append(row | ac.figures_of(chosen, num_drafts))
    return rows


def warn_of(prompts: Sequence[Mapping[str, Any]]) -> None:
    """Tell of prompts decoded with loss, and of those that the replay verifies otherwise.

    Either comes from rounding where two logits are nearly equal, or from an error in the code.
    """
    for prompt in prompts:
        if not prompt["lossless"]:
            log.warning(
                "evaluate: %s prompt %s: drafted ids leave plain ones at token %d (logit gap %.2g)",
                *(prompt[key] for key in ("dataset", "id", "lost_at_token", "logit_gap_there")),
            )
        elif not prompt["replay_equal"]:
            log.warning("evaluate: %(dataset)s prompt %(id)s: replay differs", prompt)


def acceptance_metrics(rows: Sequence[Mapping[str, Any]], headline: int) -> dict[str, float | int]:
    """Return the acceptance length of each drafter and data set at the headline K."""
    return {
        f"acceptance_length_{row['drafter']}"
        + ("" if row["dataset"] == ALL else f"_{row['dataset']}"): round(row["tau"], 4)
        for row in rows
        if row["method"] != "real" and row["draft_steps"] == headline
    }


def report_of(result: Mapping[str, Any], settings: Evaluate) -> Report:
    """Return the headline: acceptance lengths, losslessness, time."""
    metrics = acceptance_metrics(result["rows"], settings.headline_steps)
    prompts, clock = result["prompts"], result["wall_clock"]
    saved = 1 - clock["forward_passes_drafted"] / clock["forward_passes_plain"]
    metrics |= {
        "prompts": len(prompts),
        "lossless_share": sum(p["lossless"] for p in prompts) / len(prompts),
        "replay_equal_share": sum(p["replay_equal"] for p in prompts) / len(prompts),
        "wall_clock_ratio": clock["ratio"],
        "forward_passes_saved_share": round(saved, 4),
    }
    return Report(
        summary=f"acceptance length at K={settings.headline_steps}: trained "
        f"{metrics['acceptance_length_trained']:.2f}, untrained "
        f"{metrics['acceptance_length_untrained']:.2f}, prompt lookup "
        f"{metrics['acceptance_length_lookup']:.2f}; lossless on "
        f"{metrics['lossless_share']:.0%} of {len(prompts)} prompts; {clock['ratio']:.2f}x plain",
        metrics=metrics,
        artifacts=(OUT,),
    )


if __name__ == "__main__":
    main()
