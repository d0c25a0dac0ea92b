from typing import Any

import pytest
import torch

from eyas.errors import EyasError
from eyas.states.decoder import Cache, decode, from_model, prefill

# float32 sums in another order; the logits are of size 10, so 1e-4 is some 100 units of rounding
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@torch.inference_mode()
def test_prefill_gives_the_logits_of_transformers(llama: Any) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    weights = from_model(llama)
    logits_V = prefill(weights, Cache(weights, 2), 1, ids)
    torch.testing.assert_close(logits_V, llama(torch.tensor([ids])).logits[0, -1], **TOLERANCE)


@torch.inference_mode()
def test_decode_gives_the_logits_of_transformers_for_rows_of_unlike_length(llama: Any) -> None:
    rows = [[5, 6, 7], [8], list(range(20, 60))]
    weights = from_model(llama)
    cache = Cache(weights, 4)
    for slot, ids in enumerate(rows):
        prefill(weights, cache, slot, ids)
    last_S = torch.tensor([11, 12, 13, 0])
    logits_SV = decode(weights, cache, last_S, [3, 1, 40, 0])
    for slot, ids in enumerate(rows):
        expected = llama(torch.tensor([[*ids, int(last_S[slot])]])).logits[0, -1]
        torch.testing.assert_close(logits_SV[slot], expected, **TOLERANCE)


@torch.inference_mode()
def test_the_cache_keeps_its_rows_when_it_grows(llama: Any) -> None:
    weights = from_model(llama)
    cache = Cache(weights, 1)
    prefill(weights, cache, 0, [1, 2, 3])
    before = cache.states[:, :, :, :, :3].clone()
    cache.ensure(300)
    assert cache.states.shape[4] == 512
    assert torch.equal(cache.states[:, :, :, :, :3], before)


def test_another_architecture_is_refused(llama: Any) -> None:
    from transformers import LlamaForCausalLM

    config = llama.config.__class__(
        **{**llama.config.to_dict(), "attention_bias": True, "num_hidden_layers": 1}
    )
    with pytest.raises(EyasError, match="plain Llama"):
        from_model(LlamaForCausalLM(config))
