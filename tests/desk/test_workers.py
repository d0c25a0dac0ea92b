"""Work spread over processes: order, bounds, failures."""

import signal
from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from eyas.desk.workers import Recipe, alongside, num_workers, spread
from eyas.errors import EyasError
from eyas.files import read_json

# of the standard library: a worker cannot import what stands in a test
TRIPLE: Recipe[int, int] = Recipe(make=methodcaller, arguments=("__mul__", 3))
READ_NUMBER: Recipe[str, int] = Recipe(make=partial, arguments=(int,))
RAISE_SIGNAL: Recipe[Any, None] = Recipe(make=partial, arguments=(signal.raise_signal,))


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_items(processes: int) -> None:
    assert list(spread(TRIPLE, range(100), processes)) == [(i, 3 * i) for i in range(100)]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_an_item_raises_comes_out(processes: int) -> None:
    with pytest.raises(ValueError, match=r"invalid literal.*'no'"):
        list(spread(READ_NUMBER, ["1", "no", "2"], processes))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_function_that_cannot_be_made_is_told_as_it_is(processes: int) -> None:
    broken: Recipe[str, str] = Recipe(make=partial, arguments=("no function",))
    with pytest.raises(TypeError, match="must be callable"):
        list(spread(broken, ["1"], processes))


def test_a_worker_that_is_killed_is_an_error_of_one_line() -> None:
    assert len(list(spread(RAISE_SIGNAL, [signal.SIGCHLD], 2))) == 1
    with pytest.raises(EyasError, match="a worker process has ended"):
        list(spread(RAISE_SIGNAL, [signal.SIGCHLD, signal.SIGKILL], 2))


def test_items_are_taken_no_further_ahead_than_a_few_chunks() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield taken

    for item, result in spread(TRIPLE, items(), 2):
        assert result == 3 * item
        assert taken <= item + 5 * 16


def test_little_data_is_worth_one_process() -> None:
    assert num_workers(99, worth_bytes=100) == 1
    assert num_workers(100, worth_bytes=100) >= 1


def test_processes_alongside_give_their_results_and_the_parent_ticks() -> None:
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    assert sorted(alongside(pow, [(2, 3), (3, 2)], tick)) == [8, 9]
    assert ticks >= 1


def test_one_that_fails_leaves_its_share_and_all_that_fail_give_the_first_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = tmp_path / "value.json"
    value.write_text("7", encoding="utf-8")
    missing = tmp_path / "missing.json"
    assert alongside(read_json, [(missing,), (value,)], lambda: None) == [7]
    assert "missing.json: no such file" in caplog.text
    with pytest.raises(EyasError, match=r"missing\.json: no such file"):
        alongside(read_json, [(missing,)], lambda: None)
    with pytest.raises(EyasError, match=r"killed or broken \(exit code -9\)"):
        alongside(signal.raise_signal, [(signal.SIGKILL,)], lambda: None)
