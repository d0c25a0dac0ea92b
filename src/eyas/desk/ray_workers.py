"""Let the nodes of a Ray cluster work alongside one another, as processes of one machine do.

Ray starts the workers where there is room and brings back what they return. Which of them makes
what they settle among themselves, by the claims in the store's folder: all nodes see the project
under the same path, on a file system that keeps locks, and have eyas installed.
Source: Ray Core, tasks and resources, https://docs.ray.io/en/latest/ray-core/walkthrough.html
"""

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eyas.errors import EyasError

R = TypeVar("R")
_TICK_S = 0.5
log = logging.getLogger("eyas")


def alongside(
    address: str,
    work: Callable[..., R],
    arguments: Sequence[tuple[Any, ...]],
    tick: Callable[[], None],
) -> list[R]:
    """Call `work(*arguments[i])` on a node each; return the results of those that end well.

    `address`: "local" starts a cluster of this machine alone, "auto" joins the one it belongs to.
    A node with GPUs gives each call one. `tick` is called twice a second meanwhile; a call that
    fails, or whose node dies, is told as a warning: the others may do its share.

    Raises: EyasError with the first reason if all have failed, or where there is no Ray.
    """
    ray = _reach(address)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        there = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_answer)
        waiting = [there.remote(str(Path.cwd()), work, given) for given in arguments]
        results: list[R] = []
        reasons: list[str] = []
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=_TICK_S)
            for reference in ended:
                reason, result = _received(ray, reference)
                if reason:
                    reasons.append(reason)
                    log.warning("worker on Ray: %s", reason)
                else:
                    results.append(result)
            tick()
    finally:
        ray.shutdown()
    if not results:
        raise EyasError(reasons[0])
    return results


def _reach(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise EyasError(
            f"runtime.extract.ray={address}: Ray is not installed",
            hint="uv pip install -r requirements/ray.lock, on every node",
        ) from None
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EyasError(
            f"runtime.extract.ray: no cluster at '{address}': {error}",
            hint="`ray start --head` on one node, or runtime.extract.ray=local",
        ) from None
    return ray


def _received(ray: Any, reference: Any) -> tuple[str, Any]:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"killed or broken ({error})", None


def _answer(folder: str, work: Callable[..., Any], given: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        os.chdir(folder)
        return "", work(*given)
    except (EyasError, OSError) as error:
        return str(error), None
