"""Work spread over processes: order, bounds, failures."""

import signal
from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import pytest

from eyas.desk.workers import Recipe, num_workers, spread
from eyas.errors import EyasError

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
