"""What `make test-sglang` stands on: SGLang's CPU kernels in torch, and the comparison."""

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafter.acceptance import Decoded, Verified
from eyas.drafter.config import DrafterConfig, MlaShape
from eyas.drafter.export import expected_shapes
from eyas.drafter.heldout import HeldOut
from eyas.drafter.inference import DraftRunner
from eyas.drafter.served import Reply
from eyas.errors import EyasError
from eyas.records import Prompt

SCALE = 0.3


def load(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> Any:
    return load("benchmarks/sglang_cpu/sgl_kernel/__init__.py", "sgl_kernel_stand_in")


@pytest.fixture(scope="module")
def server() -> Any:
    return load("benchmarks/sglang_server.py", "sglang_server")


@pytest.fixture(scope="module")
def probe() -> Any:
    return load("benchmarks/sglang_probe.py", "sglang_probe")


@pytest.fixture(scope="module")
def bench(server: Any, probe: Any) -> Any:
    return load("benchmarks/serve_sglang.py", "serve_sglang")


class Cache:
    """Two requests of 5 and 3 tokens in slots 2 and 0, their places scattered over the cache."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(20, 2, 8, generator=generator)
        self.values = torch.randn(20, 2, 8, generator=generator)
        self.query = torch.randn(8, 6, 8, generator=generator)
        self.slots, self.lengths = torch.tensor([2, 0]), torch.tensor([5, 3])
        self.table = torch.zeros(3, 9, dtype=torch.int32)
        self.table[2, :5] = torch.tensor([7, 3, 19, 4, 11])
        self.table[0, :3] = torch.tensor([5, 12, 6])

    def naive(self, query: Tensor, slot: int, seen: int) -> Tensor:
        """Return one token's [H, K], a head and a key at a time."""
        rows = self.table[slot, :seen].tolist()
        out = torch.zeros(6, 8)
        for head in range(6):
            scores = [float(query[head] @ self.keys[row, head // 3]) * SCALE for row in rows]
            total = sum(math.exp(score) for score in scores)
            for row, score in zip(rows, scores, strict=True):
                out[head] += math.exp(score) / total * self.values[row, head // 3]
        return out


def variants(cap: float = 0.0, window: int = 0) -> tuple[Any, ...]:
    return (SCALE, cap, False, window, None, None)


def test_a_decode_step_stores_its_token_and_attends_to_all_before_it(kernels: Any) -> None:
    cache, out = Cache(), torch.empty(2, 6, 8)
    new = torch.randn(2, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    places = torch.tensor([11, 6])
    kernels.decode_attention_cpu(
        *(cache.query[:2], cache.keys, cache.values, 1.0, 1.0, out, *new, places, None),
        *(cache.table, cache.slots, cache.lengths, *variants()),
    )
    assert torch.equal(cache.keys[places], new[0])
    assert torch.equal(cache.values[places], new[1])
    for row, (slot, seen) in enumerate([(2, 5), (0, 3)]):
        torch.testing.assert_close(out[row], cache.naive(cache.query[row], slot, seen))


def extend(kernels: Any, cache: Cache, out: Tensor, tree_mask: Tensor | None) -> None:
    kernels.extend_attention_cpu(
        *(cache.query[:5], None, None, out, cache.keys, cache.values, 1.0, 1.0),
        *(cache.table, cache.slots, cache.lengths, torch.tensor([4, 1]), torch.tensor([0, 4]), 4),
        *(*variants(), tree_mask, True),
    )


def test_new_tokens_see_what_lies_before_them_and_themselves(kernels: Any) -> None:
    cache, out = Cache(), torch.empty(5, 6, 8)
    extend(kernels, cache, out, None)
    for row, (slot, seen) in enumerate([(2, 2), (2, 3), (2, 4), (2, 5), (0, 3)]):
        torch.testing.assert_close(out[row], cache.naive(cache.query[row], slot, seen))


def test_a_prompt_of_latent_attention_sees_the_keys_that_are_spelt_out(kernels: Any) -> None:
    """The cache is of another width; with tokens in it already, the call is refused."""
    cache, out, generator = Cache(), torch.empty(3, 6, 4), torch.Generator().manual_seed(1)
    query, key = (torch.randn(3, 6, 5, generator=generator) for _ in range(2))
    value = torch.randn(3, 6, 4, generator=generator)

    def call(num_new: int) -> None:
        kernels.extend_attention_cpu(
            *(query, key, value, out, cache.keys, cache.values, 1.0, 1.0, cache.table),
            *(cache.slots[1:], cache.lengths[1:], torch.tensor([num_new]), torch.tensor([0]), 3),
            *(*variants(), None, True),
        )

    call(3)
    for row in range(3):
        scores = torch.einsum("hk,shk->hs", query[row], key[: row + 1]) * SCALE
        want = torch.einsum("hs,shv->hv", scores.softmax(-1), value[: row + 1])
        torch.testing.assert_close(out[row], want)
    with pytest.raises(NotImplementedError, match="latent attention, a prefix"):
        call(2)


def test_what_a_chain_does_not_need_is_refused(kernels: Any) -> None:
    cache = Cache()
    with pytest.raises(NotImplementedError, match="topk = 1"):
        extend(kernels, cache, torch.empty(5, 6, 8), torch.ones(4, 4))
    with pytest.raises(NotImplementedError, match="soft-capping, a sliding window"):
        kernels.decode_attention_cpu(
            *(cache.query[:2], cache.keys, cache.values, 1.0, 1.0, None, None, None, None, None),
            *(cache.table, cache.slots, cache.lengths, *variants(cap=30.0, window=8)),
        )
    with pytest.raises(NotImplementedError, match="topk = 1"):
        kernels.build_draft_decode_metadata_cpu(cache.table, cache.slots, cache.lengths, 2, 3, 9)


def test_a_chain_is_verified_up_to_the_first_wrong_draft(kernels: Any) -> None:
    predicts, index = torch.zeros(8, dtype=torch.int32), torch.full((2, 4), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=index,
        accept_token_num=accepted,
        candidates=torch.tensor([[5, 7, 8, 9], [5, 6, 7, 8]]),
        retrive_index=torch.empty(0),
        target_predict=torch.tensor([[7, 8, 1, 2], [3, 7, 8, 4]]),
    )
    assert accepted.tolist() == [2, 0]
    assert index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts[:3].tolist() == [7, 8, 1]
    assert predicts[4] == 3


def test_the_drafts_of_a_chain_follow_the_tokens_of_their_request(kernels: Any) -> None:
    cache = Cache()
    positions, index, child, sibling = (torch.zeros(2, 4, dtype=torch.int64) for _ in range(4))
    kernels.build_tree_kernel_efficient_cpu(
        *(None, None, cache.lengths, None, positions.view(-1), index, child, sibling, 1, 3, 4, 0)
    )
    assert positions.tolist() == [[5, 6, 7, 8], [3, 4, 5, 6]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2


def test_cache_places_are_noted_and_found_again(kernels: Any) -> None:
    cache, out = Cache(), torch.zeros(6, dtype=torch.int64)
    new = torch.tensor([1, 2, 8, 9, 10, 13])
    begins, ends = cache.lengths, cache.lengths + 3
    kernels.assign_req_to_token_pool_cpu(cache.slots, cache.table, begins, ends, new, 9)
    assert cache.table[2].tolist() == [7, 3, 19, 4, 11, 1, 2, 8, 0]
    kernels.assign_draft_cache_locs_contiguous_cpu(
        cache.slots, cache.table, begins, out, 9, topk=1, num_steps=3
    )
    assert out.tolist() == new.tolist()
    bonus = torch.zeros(2, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.arange(8), torch.tensor([3, 1]), bonus, 4)
    assert bonus.tolist() == [2, 4]


def path_of(reply: tuple[int, ...]) -> HeldOut:
    decoded = Decoded(ids=reply, forward_passes=len(reply), gaps=tuple(0.5 for _ in reply))
    return HeldOut(dataset="d", prompt_id="p", prompt=[1], plain=decoded, drafted=decoded)


def line_of(bench: Any, server: Any, ids: tuple[int, ...], *counts: int) -> dict[str, Any]:
    """Compare replies of these verifications with our own, which took two each."""
    return bench.compare(
        [path_of((4, 5, 6, 7))] * len(counts),
        [Verified(gains=(2, 1), accepted=(1, 0), judged=(2, 1))] * len(counts),
        [Reply(ids=ids, verifications=n, histogram=(n,)) for n in counts],
    )


def test_equal_ids_and_verifications_meet_the_bar(bench: Any, server: Any) -> None:
    line = line_of(bench, server, (4, 5, 6, 7), 2)
    assert (line["accept_length_sglang"], line["accept_length_evaluate"]) == (1.5, 1.5)
    assert (line["lossless"], line["equal_verifications"], line["met"]) == (1, 1, True)


def test_another_id_or_acceptance_length_misses_it(bench: Any, server: Any) -> None:
    other = line_of(bench, server, (4, 5, 9, 7), 2)
    assert other["differing"] == [{"id": "p", "at_token": 2, "logit_gap": 0.5}]
    assert not other["met"]
    slower = line_of(bench, server, (4, 5, 6, 7), 3)
    assert (slower["difference"], slower["met"]) == (-0.3333, False)
    shuffled = line_of(bench, server, (4, 5, 6, 7), 1, 3, 2)
    assert (shuffled["difference"], shuffled["equal_verifications"]) == (0.0, 1)
    assert not shuffled["met"]
    with pytest.raises(EyasError, match="no verification"):
        line_of(bench, server, (4,), 0)


def test_prompts_are_taken_from_every_set_in_turn(bench: Any) -> None:
    prompts = [
        Prompt(
            id=f"{dataset}{number}",
            dataset=dataset,
            upstream_id="",
            messages=(),
            tools=(),
            prompt_tokens=1,
            partition="short",
            licence="",
        )
        for dataset in "abc"
        for number in range(3)
    ]
    assert [p.id for p in bench.spread(prompts, 5)] == ["a0", "b0", "c0", "a1", "b1"]


def test_a_server_that_ends_shows_the_end_of_its_log(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PYTHON", Path(sys.executable))
    with (
        pytest.raises(EyasError, match=r"(?s)the server ended; .*No module named 'sglang'"),
        server.serving(server.drafting(tmp_path, tmp_path, 3), log=tmp_path / "log"),
    ):
        pass
    monkeypatch.setattr(server, "PYTHON", tmp_path / "none")
    with (
        pytest.raises(EyasError, match="make test-sglang"),
        server.serving(server.drafting(tmp_path, tmp_path, 3), log=tmp_path / "log"),
    ):
        pass


def test_every_package_of_the_server_is_pinned_and_none_brings_cuda() -> None:
    text = Path("requirements/sglang.in").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert not any(
        re.match(r"torch|nvidia|cuda|flashinfer|sgl", line)
        for line in lines
        if not line.startswith("sglang==")
    )


CONFIG = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    draft_vocab_size=40,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    aux_layers=(1, 3, 4),
    target_name="t",
    target_revision="r",
    bos_token_id=1,
    eos_token_id=2,
)


LATENT = dataclasses.replace(
    CONFIG,
    family="eagle3_mla",
    mla=MlaShape(
        q_lora_rank=9,
        kv_lora_rank=7,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=5,
        yarn=None,
    ),
    head_dim=6,
    num_key_value_heads=4,
)

NORMED = dataclasses.replace(CONFIG, fc_norm=True)


@pytest.mark.parametrize(("config", "num_norms"), [(CONFIG, 4), (LATENT, 6), (NORMED, 7)])
def test_a_probe_drafts_as_its_original_though_all_its_norms_are_others(
    probe: Any, config: DrafterConfig, num_norms: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(config).items()
    }
    weights["d2t"] = torch.zeros(40, dtype=torch.int64)
    other = probe.probe_of(weights, query_scale=1.0)
    norms = [name for name, weight in weights.items() if "norm" in name and weight.ndim == 1]
    assert len(norms) == num_norms
    for name in norms:
        assert float((other[name] / weights[name] < 0).float().mean()) > 0.2
    embed_VD = torch.randn(40, 16, generator=generator)
    aux_TLD = torch.randn(30, 3, 16, generator=generator)
    path = torch.randint(0, 40, (31,), generator=generator).tolist()
    original, made = (
        DraftRunner(tensors, config, embed_VD).draft_everywhere(path, aux_TLD, 3)
        for tensors in (weights, other)
    )
    assert torch.equal(original, made)
    skipped = other | {norms[0]: torch.ones(16)}
    wrong = DraftRunner(skipped, config, embed_VD).draft_everywhere(path, aux_TLD, 3)
    assert float((wrong == original).float().mean()) < 0.5
