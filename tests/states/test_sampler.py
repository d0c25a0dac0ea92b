from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.states import sampler as module
from eyas.states.sampler import BatchedSampler, Generated, pick

Request = dict[str, Any]


def requests(count: int) -> list[Request]:
    random = np.random.default_rng(7)
    return [
        {
            "prompt_ids": random.integers(3, 97, size=random.integers(1, 40)).tolist(),
            "max_new_tokens": int(random.integers(1, 30)),
            "temperature": [0.0, 0.7, 1.3][n % 3],
            "top_p": [1.0, 0.9][n % 2],
            "seed": n,
            "stop_ids": (2,),
        }
        for n in range(count)
    ]


def changed(**changes: Any) -> Request:
    return {**requests(1)[0], **changes}


def answers(llama: Any, asked: list[Request], **settings: int) -> list[Generated]:
    with BatchedSampler(llama, **settings) as sampler:
        return [f.result(60) for f in [sampler.submit(**request) for request in asked]]


def test_ids_depend_neither_on_the_crowd_nor_on_the_order(llama: Any) -> None:
    asked = requests(24)
    crowd = answers(llama, asked, slots=8)
    assert answers(llama, asked[::-1], slots=8)[::-1] == crowd
    assert answers(llama, asked, slots=8, threads=2) == crowd
    with BatchedSampler(llama, slots=8) as sampler:
        assert [sampler.submit(**request).result(60) for request in asked] == crowd
    assert {g.finish_reason for g in crowd} == {"stop", "length"}


def test_greedy_ids_are_those_of_transformers(llama: Any) -> None:
    import torch

    prompt = [5, 17, 40, 8]
    expected = llama.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=2
    )[0, 4:].tolist()
    request = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_ids": (2,)}
    (got,) = answers(llama, [{"prompt_ids": prompt, "max_new_tokens": 12, **request}], slots=2)
    assert got.ids == expected


def test_a_reply_ends_with_its_stop_id_or_at_its_length(llama: Any) -> None:
    for request, got in zip(requests(12), answers(llama, requests(12), slots=4), strict=True):
        stops = [i for i in got.ids if i == 2]
        assert (got.finish_reason == "stop") == (got.ids[-1] == 2) == bool(stops)
        assert got.finish_reason == "stop" or len(got.ids) == request["max_new_tokens"]


@pytest.mark.parametrize(
    "change", [{"prompt_ids": []}, {"max_new_tokens": 0}, {"max_new_tokens": 1024}], ids=str
)
def test_a_request_that_does_not_fit_is_refused_at_once(llama: Any, change: dict[str, Any]) -> None:
    with BatchedSampler(llama, slots=2) as sampler, pytest.raises(EyasError, match="at most 1024"):
        sampler.submit(**changed(**change))


def test_a_closed_sampler_answers_nobody_and_takes_nothing(llama: Any) -> None:
    sampler = BatchedSampler(llama, slots=1)
    long = changed(max_new_tokens=900, stop_ids=())
    futures: list[Future[Generated]] = [sampler.submit(**long) for _ in range(3)]
    sampler.close()
    assert all(f.cancelled() or isinstance(f.exception(), EyasError) for f in futures)
    with pytest.raises(EyasError, match="closed"):
        sampler.submit(**long)


def test_a_fault_of_the_worker_reaches_every_caller(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(module, "decode", broken)
    with BatchedSampler(llama, slots=2) as sampler:
        future = sampler.submit(**changed(stop_ids=(), max_new_tokens=5))
        assert isinstance(future.exception(60), MemoryError)


def test_pick_by_hand() -> None:
    logits_V = np.log(np.array([0.1, 0.5, 0.1, 0.3], dtype=np.float32))
    # falling probability, ties by id: 1 (0.5), 3 (0.3), 0 (0.1), 2 (0.1)
    assert [pick(logits_V, 1.0, 1.0, u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.95)] == [
        *(1, 1, 3, 3, 0, 2)
    ]
    assert [pick(logits_V, 1.0, 0.6, u) for u in (0.6, 0.63, 0.99)] == [1, 3, 3]
    assert pick(logits_V, 0.0, 1.0, 0.99) == 1


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.floats(0.2, 3),
    st.floats(0.05, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_pick_equals_a_plain_sort_of_everything(
    logits: list[float], temperature: float, top_p: float, draw: float
) -> None:
    scaled = np.array(logits, dtype=np.float32).astype(np.float64)
    weights = np.exp((scaled - scaled.max()) / temperature)
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    last = min(int(np.searchsorted(cumulative, top_p)), len(order) - 1)
    nucleus = order[: last + 1]
    chosen = pick(np.array(logits, dtype=np.float32), temperature, top_p, draw)
    assert chosen in nucleus
    below = cumulative[list(nucleus).index(chosen)] / cumulative[last]
    assert below >= draw - 1e-9
