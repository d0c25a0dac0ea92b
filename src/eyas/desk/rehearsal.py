"""Serve the market of a simulation file in this process.

Reads: conf/simulation/*.yaml, models/target (--codec). Run: eyas serve --simulate FILE.
"""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from eyas.desk.local_endpoint import TARGET, bind
from eyas.desk.params import fill
from eyas.errors import EyasError
from eyas.generation.shop import ROOT, LocalAnswer
from eyas.generation.simulation import Simulation, check_simulation
from eyas.tokens.codecs import Codec, ReplyParts, load_codec, num_calls


def read_simulation(path: Path) -> Simulation:
    """Read and check a simulation.

    Raises: EyasError naming the key that is unknown, missing or impossible.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EyasError(f"{path}: {error}", hint="see conf/simulation/default.yaml") from None
    simulation: Simulation = fill(Simulation, value, path.name)
    try:
        check_simulation(simulation)
    except ValueError as error:
        raise EyasError(f"{path}: {error}") from None
    return simulation


def counted_by(codec: Codec) -> Callable[[Mapping[str, Any], LocalAnswer], LocalAnswer]:
    """Return a function that gives an answer the counts of the target's own tokens.

    So a bill matches the ids that reconstruct makes of the reply, as that of a real provider.
    """

    def recount(body: Mapping[str, Any], answer: LocalAnswer) -> LocalAnswer:
        parts = ReplyParts(
            content=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            calls_before=num_calls(body["messages"]),
        )
        thought = ReplyParts(content=None, reasoning=answer.reasoning)
        return dataclasses.replace(
            answer,
            prompt_tokens=len(codec.render_prompt(body["messages"], body.get("tools") or ())),
            completion_tokens=len(codec.reply_ids(codec.normalise(parts), answer.finish_reason)),
            reasoning_tokens=len(codec.reply_ids(thought, "length")) if answer.reasoning else 0,
        )

    return recount


def serve_simulation(path: Path, *, port: int, codec: str | None) -> None:
    """Serve on 127.0.0.1:`port` until Ctrl-C; port 0 takes a free one.

    `codec`: tokens are counted as it does over models/target; None: four characters a token.
    """
    from eyas.generation.simulator import serve_simulation as serve

    simulation = read_simulation(path)
    recount = counted_by(load_codec(codec, TARGET)) if codec else None
    with bind(port) as listener, contextlib.suppress(KeyboardInterrupt):
        number = listener.getsockname()[1]
        sys.stdout.write(f"{simulation.model} (simulated): http://127.0.0.1:{number}{ROOT}\n")
        sys.stdout.flush()
        asyncio.run(serve(simulation, listener, recount))
