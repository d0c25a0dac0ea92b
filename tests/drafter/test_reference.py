"""The fast unrolling against a slow and obvious one: one document, one row, one key at a time.

Latent attention is done as servers do it: heads compare with the cached latent itself.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig, MlaShape, Yarn
from eyas.drafter.layers import unit_rms
from eyas.drafter.losses import pack_loss
from eyas.drafter.model import Drafter, random_start
from eyas.drafter.packing import Document, Packer, number_replies
from eyas.records import Span

DECAY = 0.8
# All is float64 but the RoPE tables: float32 in both, a scalar and a vector pow apart (1 ulp, 6e-8)
TOLERANCE = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + 1e-5)


def turned(a: Tensor, b: Tensor, frequency: float | Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Rotate pairs (a, b); the angle in float32."""
    angle = torch.tensor(position, dtype=torch.float32) * frequency
    cos, sin = angle.cos().double(), angle.sin().double()
    return a * cos - b * sin, b * cos + a * sin


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate [heads, K] by Llama's rule, one pair (i, i + K/2) at a time."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        at = torch.tensor(2 * i, dtype=torch.float32) / x.shape[-1]
        out[:, i], out[:, i + half] = turned(x[:, i], x[:, i + half], 1 / 10_000.0**at, position)
    return out


def rotate_pairs(x: Tensor, position: int, yarn: Yarn | None) -> Tensor:
    """Rotate [heads, P] by DeepSeek's rule, one pair (2i, 2i + 1) at a time."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(width // 2):
        at = torch.tensor(2 * i, dtype=torch.float32) / width
        frequency = 1 / 10_000.0**at
        if yarn:
            low, high = (
                width
                * math.log(yarn.original_max_position_embeddings / beta / 2 / math.pi)
                / (2 * math.log(10_000.0))
                for beta in (yarn.beta_fast, yarn.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
            slow = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            frequency = frequency * (1 - slow) + frequency / yarn.factor * slow
        out[:, 2 * i], out[:, 2 * i + 1] = turned(x[:, 2 * i], x[:, 2 * i + 1], frequency, position)
    return out * (growth(yarn, yarn.mscale) / growth(yarn, yarn.mscale_all_dim) if yarn else 1.0)


def growth(yarn: Yarn, weight: float) -> float:
    return 0.1 * weight * math.log(yarn.factor) + 1.0


Layer = Callable[[str], Tensor]


def llama_heads(
    config: DrafterConfig, layer: Layer, both: Tensor, position: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled query, key and value, each [H, K]."""
    query, key, value = (
        (layer(f"self_attn.{name}_proj") @ both).view(-1, config.head_dim) for name in "qkv"
    )
    copies = config.num_attention_heads // config.num_key_value_heads
    key, value = (x.repeat_interleave(copies, dim=0) for x in (rotate(key, position), value))
    return rotate(query, position) / math.sqrt(config.head_dim), key, value


def latent_heads(
    config: DrafterConfig, layer: Layer, both: Tensor, position: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled query in the latent's terms, and latent key and value for each head."""
    s, heads = config.mla, config.num_attention_heads
    assert s is not None
    if s.q_lora_rank is None:
        query = layer("self_attn.q_proj") @ both
    else:
        lora = norm(layer("self_attn.q_a_proj") @ both, layer("self_attn.q_a_layernorm"))
        query = layer("self_attn.q_b_proj") @ lora
    latent = layer("self_attn.kv_a_proj_with_mqa") @ both
    kept = norm(latent[: s.kv_lora_rank], layer("self_attn.kv_a_layernorm"))
    shared = rotate_pairs(latent[None, s.kv_lora_rank :], position, s.yarn)[0]
    expand = layer("self_attn.kv_b_proj").view(heads, -1, s.kv_lora_rank)
    query = query.view(heads, -1)
    plain = torch.einsum(
        "hp,hpn->hn", query[:, : s.qk_nope_head_dim], expand[:, : s.qk_nope_head_dim]
    )
    turning = rotate_pairs(query[:, s.qk_nope_head_dim :], position, s.yarn)
    sharper = growth(s.yarn, s.yarn.mscale_all_dim) ** 2 if s.yarn else 1.0
    scale = sharper / math.sqrt(s.qk_nope_head_dim + s.qk_rope_head_dim)
    key = torch.cat([kept, shared]).expand(heads, -1)
    return torch.cat([plain, turning], dim=-1) * scale, key, kept.expand(heads, -1)


def out_of_heads(config: DrafterConfig, layer: Layer, mixed: Tensor) -> Tensor:
    """Return what o_proj reads; values in the latent's terms are spelt out."""
    if config.mla is None:
        return mixed.flatten()
    expand = layer("self_attn.kv_b_proj").view(len(mixed), -1, config.mla.kv_lora_rank)
    return torch.einsum("hn,hvn->hv", mixed, expand[:, config.mla.qk_nope_head_dim :]).flatten()


def reference_rows(tiny, document: Document, steps: int) -> list[list[Tensor | None]]:
    """Return outputs[step][row] of one document; None where the row has no token to read."""
    weights = dict(tiny.drafter.named_parameters())
    config, ids = tiny.config, document.input_ids_T
    length = len(ids)

    def layer(name: str) -> Tensor:
        return weights[f"midlayer.{name}.weight"]

    heads_of = latent_heads if config.mla else llama_heads
    heads: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    hidden: list[Tensor] = []
    for aux_LD in document.aux_TLD:
        if config.fc_norm:
            each = [norm(x, weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(aux_LD)]
            aux_LD = torch.stack(each)
        hidden.append(weights["fc.weight"] @ aux_LD.flatten())
    outputs: list[list[Tensor | None]] = []
    for step in range(steps):
        rows = [t for t in range(length) if t + 1 + step < length]
        for t in rows:
            embedding = norm(tiny.embed_VD[ids[t + 1 + step]], layer("input_layernorm"))
            both = torch.cat([embedding, norm(hidden[t], layer("hidden_norm"))])
            heads[step, t] = heads_of(config, layer, both, t + step)
        row_outputs: list[Tensor | None] = []
        for t in rows:
            query = heads[step, t][0]
            seen = [(0, s) for s in range(t + 1)] + [(j, t) for j in range(1, step + 1)]
            mixed = []
            for h in range(config.num_attention_heads):
                shares = torch.stack([query[h] @ heads[s][1][h] for s in seen]).softmax(0)
                mixed.append(shares @ torch.stack([heads[s][2][h] for s in seen]))
            together = out_of_heads(config, layer, torch.stack(mixed))
            attended = hidden[t] + layer("self_attn.o_proj") @ together
            x = norm(attended, layer("post_attention_layernorm"))
            inner = torch.nn.functional.silu(layer("mlp.gate_proj") @ x) * (
                layer("mlp.up_proj") @ x
            )
            row_outputs.append(attended + layer("mlp.down_proj") @ inner)
        row_outputs += [None] * (length - len(row_outputs))
        outputs.append(row_outputs)
        hidden = [h if out is None else out for h, out in zip(hidden, row_outputs, strict=True)]
    return outputs


def counts(document: Document, t: int, step: int) -> bool:
    """Design rule 3, word for word: the token read and the one predicted, both in one reply."""
    read, predicted = t + 1 + step, t + 2 + step
    if predicted >= len(document.input_ids_T):
        return False
    return bool(document.reply_T[read] > 0) and bool(
        document.reply_T[read] == document.reply_T[predicted]
    )


def reference_loss(tiny, steps: int) -> Tensor:
    weights = dict(tiny.drafter.named_parameters())
    per_step: list[list[Tensor]] = [[] for _ in range(steps)]
    for document in tiny.documents.documents:
        outputs = reference_rows(tiny, document, steps)
        for step in range(steps):
            for t, out in enumerate(outputs[step]):
                if not counts(document, t, step):
                    continue
                target_logits = tiny.head_VD @ document.final_TD[t + 1 + step]
                if not tiny.drafter.t2d[target_logits.argmax()]:
                    continue
                teacher = target_logits[tiny.drafter.t2d].softmax(0)
                assert out is not None
                logits = weights["lm_head.weight"] @ norm(out, weights["norm.weight"])
                per_step[step].append(-(teacher * logits.log_softmax(0)).sum())
    return sum(
        (DECAY**k * torch.stack(losses).mean() for k, losses in enumerate(per_step)),
        start=torch.zeros((), dtype=torch.float64),
    )


@pytest.mark.parametrize(("steps", "block"), [(1, 128), (3, 128), (3, 3)])
def test_loss_and_gradients_equal_the_reference_on_packed_documents(
    tiny, steps: int, block: int, monkeypatch
) -> None:
    monkeypatch.setattr("eyas.drafter.attention._QUERIES_PER_BLOCK", block)
    parameters = dict(tiny.drafter.named_parameters())
    expected = reference_loss(tiny, steps)
    expected_grads = torch.autograd.grad(expected, list(parameters.values()))

    pack = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    weights = tuple(DECAY**k for k in range(steps))
    got, _ = pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), weights)
    got_grads = torch.autograd.grad(got, list(parameters.values()))

    assert 0 < int(pack.in_vocab_P.sum()) < len(pack.predictions_P), "both kinds must occur"
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)
    for name, grad, want in zip(parameters, got_grads, expected_grads, strict=True):
        assert want.abs().max() > 0, name
        torch.testing.assert_close(grad, want, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def noise_documents(replies: list[tuple[int, list[Span]]]) -> list[Document]:
    """Return documents of these lengths and reply spans."""
    g = torch.Generator().manual_seed(0)
    return [
        Document(
            input_ids_T=torch.randint(0, 40, (length,), generator=g),
            reply_T=number_replies(length, spans, truncated=False),
            aux_TLD=torch.randn(length, 3, 16, generator=g, dtype=torch.float64),
            final_TD=torch.randn(length, 16, generator=g, dtype=torch.float64),
        )
        for length, spans in replies
    ]


@pytest.mark.parametrize("heads", [(4, 1, 6), (4, 4, 2)])
@pytest.mark.parametrize("draft_vocab", [24, 40])
def test_documents_of_any_length_and_shape_equal_the_reference(
    tiny, monkeypatch, heads: tuple[int, int, int], draft_vocab: int
) -> None:
    """One key head or as many as queries, gaps, replies from 0, documents of 1 to 3 tokens."""
    monkeypatch.setattr("eyas.drafter.attention._LARGEST_GAP", 2)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    shape = dict(zip(names, heads, strict=True)) | {"draft_vocab_size": draft_vocab}
    config = dataclasses.replace(tiny.config, **shape)
    drafter = Drafter(config, torch.arange(config.vocab_size) < draft_vocab)
    random_start(drafter, seed=3)
    with torch.no_grad():
        for parameter in drafter.double().parameters():
            parameter.mul_(15.0 if parameter.ndim > 1 else 1.1)
    replies = [(1, [(0, 1)]), (2, [(0, 2)]), (30, [(2, 5), (20, 30)]), (3, [(0, 3)]), (5, [])]
    replies += [(12, [(0, 4), (4, 6), (6, 7), (7, 12)])]
    documents = noise_documents(replies)
    tiny.documents.documents[:] = documents
    tiny = dataclasses.replace(tiny, config=config, drafter=drafter)
    parameters = list(drafter.parameters())
    expected = reference_loss(tiny, 4)
    want = torch.autograd.grad(expected, parameters)
    pack = Packer(tiny.documents, tiny.favourites, drafter.t2d).pack(range(len(documents)))
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    weights = tuple(DECAY**k for k in range(4))
    got, _ = pack_loss(drafter, pack, embed_TD, tiny.draft_head(), weights)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)
    for grad, wanted in zip(torch.autograd.grad(got, parameters), want, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=TOLERANCE, atol=TOLERANCE)


YARN = Yarn(factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)


def latent(config: DrafterConfig, q_lora_rank: int | None, yarn: Yarn | None) -> DrafterConfig:
    """Return the shape with latent attention; every size is another one."""
    shape = MlaShape(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=6,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        yarn=yarn,
    )
    return dataclasses.replace(
        config, family="eagle3_mla", mla=shape, head_dim=9, num_key_value_heads=4
    )


@pytest.mark.parametrize(("q_lora_rank", "yarn"), [(7, None), (7, YARN), (None, YARN)])
@pytest.mark.parametrize("recompute", [False, True])
def test_latent_attention_equals_the_form_in_which_servers_cache_the_latent(
    tiny, q_lora_rank: int | None, yarn: Yarn | None, recompute: bool
) -> None:
    config = latent(tiny.config, q_lora_rank, yarn)
    drafter = Drafter(config, tiny.drafter.t2d)
    random_start(drafter, seed=3)
    with torch.no_grad():
        for parameter in drafter.double().parameters():
            parameter.mul_(15.0 if parameter.ndim > 1 else 1.1)
    tiny = dataclasses.replace(tiny, config=config, drafter=drafter)
    parameters = dict(drafter.named_parameters())
    expected = reference_loss(tiny, 3)
    want = torch.autograd.grad(expected, list(parameters.values()))
    pack = Packer(tiny.documents, tiny.favourites, drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    weights = (1.0, DECAY, DECAY**2)
    given = (drafter, pack, embed_TD, tiny.draft_head(), weights)
    got, _ = pack_loss(*given, recompute=recompute)
    grads = torch.autograd.grad(got, list(parameters.values()))
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)
    for name, grad, wanted in zip(parameters, grads, want, strict=True):
        assert wanted.abs().max() > 1e-3, name
        torch.testing.assert_close(grad, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)

    drafter.float()
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        loss, _ = pack_loss(drafter, pack, embed_TD.to(dtype), tiny.draft_head().float(), weights)
        coarse = torch.autograd.grad(loss, list(parameters.values()))
        for name, grad, exact in zip(parameters, coarse, want, strict=True):
            assert grad.dtype == torch.float32, name
            error = float((grad - exact).norm() / exact.norm())
            assert error < bound, (name, error)


@pytest.mark.parametrize("family", ["eagle3", "eagle3_mla"])
def test_normed_aux_states_equal_the_reference(tiny, family: str) -> None:
    shape = tiny.config if family == "eagle3" else latent(tiny.config, 7, None)
    config = dataclasses.replace(shape, fc_norm=True)
    drafter = Drafter(config, tiny.drafter.t2d)
    random_start(drafter, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.double().parameters():
            factor = 0.5 + torch.rand(parameter.shape, generator=generator)
            parameter.mul_(15.0 if parameter.ndim > 1 else factor)
    tiny = dataclasses.replace(tiny, config=config, drafter=drafter)
    parameters = dict(drafter.named_parameters())
    expected = reference_loss(tiny, 3)
    want = torch.autograd.grad(expected, list(parameters.values()))
    pack = Packer(tiny.documents, tiny.favourites, drafter.t2d).pack([0, 1, 2])
    read = dataclasses.replace(pack, aux_TLD=unit_rms(pack.aux_TLD, config.rms_norm_eps))
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    got, _ = pack_loss(drafter, read, embed_TD, tiny.draft_head(), (1.0, DECAY, DECAY**2))
    grads = torch.autograd.grad(got, list(parameters.values()))
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)
    for name, grad, wanted in zip(parameters, grads, want, strict=True):
        assert wanted.abs().max() > 1e-3, name
        torch.testing.assert_close(grad, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("spans", [[(1, 4)], []])
def test_a_step_without_a_supervised_row_has_no_loss_and_no_gradient(tiny, spans) -> None:
    tiny.documents.documents[:] = noise_documents([(5, spans)])
    nothing_V = torch.zeros_like(tiny.drafter.t2d)  # no favourite is in the draft vocabulary
    pack = Packer(tiny.documents, tiny.favourites, nothing_V).pack([0])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    loss, tally = pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), (1.0, DECAY))
    assert float(loss.detach()) == 0.0
    assert tally.counted.tolist() == ([2, 1] if spans else [0, 0])
    for grad in torch.autograd.grad(loss, list(tiny.drafter.parameters())):
        assert not grad.any()


def test_packed_documents_do_not_see_one_another(tiny) -> None:
    packer = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d)
    weights = (1.0, DECAY, DECAY**2)

    def sums(indices: list[int]) -> Tensor:
        pack = packer.pack(indices)
        tally = pack_loss(
            tiny.drafter, pack, tiny.embed_VD[pack.input_ids_T], tiny.draft_head(), weights
        )[1]
        return torch.stack(list(tally))

    alone = sums([0]) + sums([1]) + sums([2])
    torch.testing.assert_close(sums([2, 0, 1]), alone, rtol=1e-12, atol=0)


def test_bfloat16_gradients_are_float32_and_point_where_the_exact_ones_do(tiny) -> None:
    pack = Packer(tiny.documents, tiny.favourites, tiny.drafter.t2d).pack([0, 1, 2])
    embed_TD = tiny.embed_VD[pack.input_ids_T]
    weights = (1.0, DECAY, DECAY**2)
    parameters = dict(tiny.drafter.named_parameters())
    exact = torch.autograd.grad(
        pack_loss(tiny.drafter, pack, embed_TD, tiny.draft_head(), weights)[0],
        list(parameters.values()),
    )
    tiny.drafter.float()
    loss, _ = pack_loss(tiny.drafter, pack, embed_TD.bfloat16(), tiny.draft_head(), weights)
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, list(parameters.values()))
    for name, grad, want in zip(parameters, got, exact, strict=True):
        assert grad.dtype == torch.float32, name
        error = float((grad - want).norm() / want.norm())
        assert error < 0.1, (name, error)  # bfloat16 has 8 bits; measured: 0.005 to 0.03
