import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.records import Sample
from eyas.settings import Extract
from eyas.states import shards
from eyas.states.layout import Captured, make_layout

SETTINGS = Extract(
    backend="transformers", layers=None, codec="bf16", shard_tokens=8, batch_tokens=8
)
LENGTHS = (3, 5, 4, 7)


def sample(number: int, length: int) -> Sample:
    return Sample(
        id=f"s{number}",
        dataset="chat",
        input_ids=tuple(range(number, number + length)),
        spans=((1, length),),
        temperature=0.7,
        provider="local",
        flags=(),
        completion_tokens_billed=length - 1,
    )


SAMPLES = [sample(n, length) for n, length in enumerate(LENGTHS)]


def states(number: int) -> Captured:
    generator = torch.Generator().manual_seed(number)
    aux_TLD = torch.randn(LENGTHS[number], 3, 6, generator=generator)
    return Captured(aux_TLD=aux_TLD, final_TD=aux_TLD[:, 0] * 2)


LAYOUTS = {
    "default": make_layout("bf16", "bf16", "all"),
    "bf16 supervised": make_layout("bf16", "bf16", "supervised"),
    "fp8": make_layout("fp8", "fp8", "supervised"),
    "int4": make_layout("int4", "fp8", "supervised"),
    "int4, all": make_layout("int4", "bf16", "all"),
}


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ((3, 5, 4, 7), 8, [range(2), range(2, 3), range(3, 4)]),
        ((20, 1), 8, [range(1), range(1, 2)]),
        ((1, 1, 1), 8, [range(3)]),
        ((), 8, []),
    ],
)
def test_shards_hold_whole_samples_in_order(
    lengths: tuple[int, ...], limit: int, expected: list[range]
) -> None:
    assert shards.plan_shards(lengths, limit) == expected


def test_the_key_follows_ids_tokens_weights_and_settings() -> None:
    def key(samples: list[Sample], weights: str, settings: Extract) -> str:
        return shards.store_key(samples, weights, (1, 3, 4), settings)

    base = key(SAMPLES, "w", SETTINGS)
    again = dataclasses.replace(SAMPLES[0], input_ids=(9, 9, 9))
    others = {
        key(SAMPLES[:3], "w", SETTINGS),
        key([again, *SAMPLES[1:]], "w", SETTINGS),
        key(SAMPLES, "v", SETTINGS),
        key(SAMPLES, "w", dataclasses.replace(SETTINGS, batch_tokens=9)),
        shards.store_key(SAMPLES, "w", (1, 2, 4), SETTINGS),
    }
    assert len(others) == 5
    assert base not in others
    assert base == key(SAMPLES, "w", dataclasses.replace(SETTINGS, layers=(1, 3, 4)))
    assert base == "1cd87c37a863cef88ea9676244b62325", "stores of the first release stay good"


def test_the_key_follows_codecs_and_kept_rows() -> None:
    choices = [("bf16", "bf16", "all"), ("bf16", "fp8", "all"), ("bf16", "bf16", "supervised")]
    choices += [("fp8", "fp8", "supervised"), ("int4", "fp8", "supervised")]
    spans = [dataclasses.replace(SAMPLES[0], spans=((2, 3),)), *SAMPLES[1:]]
    keys = []
    for codec, final_codec, final_rows in choices:
        settings = dataclasses.replace(
            SETTINGS, codec=codec, final_codec=final_codec, final_rows=final_rows
        )
        keys.append(shards.store_key(SAMPLES, "w", (1, 3, 4), settings))
        respanned = shards.store_key(spans, "w", (1, 3, 4), settings)
        assert (respanned == keys[-1]) == (final_rows == "all"), "rows follow the replies"
    for k, every in ((8, 1), (16, 1), (8, 4)):
        settings = dataclasses.replace(SETTINGS, teacher_k=k, final_every=every)
        keys.append(shards.store_key(SAMPLES, "w", (1, 3, 4), settings))
        assert shards.store_key(spans, "w", (1, 3, 4), settings) != keys[-1]
    assert len(set(keys)) == len(choices) + 3


def test_a_full_disk_is_told_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"GB free, got .*\n  hint: set runtime.store"):
        shards.check_space(tmp_path, 10**18)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("spans", [(), ((4, 4),), ((3, 4),)])
def test_a_sample_with_an_empty_reply_is_stored(
    name: str, spans: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    layout, bare = LAYOUTS[name], dataclasses.replace(SAMPLES[2], spans=spans)
    shards.write_shard(tmp_path / "shard.safetensors", [bare], [states(2)], layout)
    with safe_open(tmp_path / "shard.safetensors", framework="pt") as file:
        rows = len(file.get_slice("final.values")[:])
    assert rows == (0 if layout.final_rows == "supervised" else 4)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_states_that_no_codec_holds_are_refused_by_sample_and_field(
    name: str, value: float, tmp_path: Path
) -> None:
    path = tmp_path / "shard.safetensors"
    rows, captured = SAMPLES[:2], [states(0), states(1)]
    captured[1].final_TD[0, 5] = value  # a row that `supervised` would not even keep
    with pytest.raises(EyasError, match="sample s1: final states: expected finite values below"):
        shards.write_shard(path, rows, captured, LAYOUTS[name])
    captured[0].aux_TLD[1, 2, 3] = value
    with pytest.raises(EyasError, match="sample s0: aux states: expected finite values below"):
        shards.write_shard(path, rows, captured, LAYOUTS[name])
    assert list(tmp_path.iterdir()) == []
