"""Workers on a Ray cluster of this machine, where Ray is installed."""

import importlib.util
import os
from pathlib import Path

import pytest

from eyas.desk import ray_workers
from eyas.errors import EyasError
from eyas.states.claims import work_through

ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (requirements/ray.lock)"
)
SHARDS = 24


def make_all(folder: str, fails: bool) -> list[int]:
    """Make the shards that no other worker makes; return which, and leave this process's number."""
    if fails:
        raise EyasError("no target here")
    paths = [Path(folder, f"shard-{i:05d}.safetensors") for i in range(SHARDS)]
    made: list[int] = []

    def make(number: int) -> None:
        with paths[number].open("x") as shard:
            shard.write(str(os.getpid()))
        made.append(number)

    work_through(paths, lambda number: paths[number].is_file(), make)
    return made


@ray
def test_two_workers_make_each_shard_once(tmp_path: Path) -> None:
    ticks: list[int] = []
    made = ray_workers.alongside(
        "local", make_all, [(str(tmp_path), False)] * 2, lambda: ticks.append(1)
    )
    assert len(made) == 2
    assert sorted(made[0] + made[1]) == list(range(SHARDS))
    assert ticks


@ray
def test_a_worker_that_fails_leaves_its_share_to_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [(str(tmp_path), True), (str(tmp_path), False)]
    assert ray_workers.alongside("local", make_all, given, lambda: None) == [list(range(SHARDS))]
    assert "no target here" in caplog.text
    with pytest.raises(EyasError, match="no target here"):
        ray_workers.alongside("local", make_all, given[:1], lambda: None)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(EyasError, match="Ray is not installed"):
        ray_workers.alongside("local", make_all, [], lambda: None)
