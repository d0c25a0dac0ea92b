"""Samples in other trainers' form: the conversions against formulas written out here."""

from typing import Any

import pytest
import torch

from eyas.errors import EyasError
from eyas.states import foreign
from eyas.states.codecs import Parts, state_codec
from eyas.states.store import SampleStates
from eyas.states.target import TargetHead

T, L, D, V = 12, 3, 16, 50


def head() -> TargetHead:
    torch.manual_seed(3)
    return TargetHead(
        embed_VD=torch.randn(V, D),
        norm_weight_D=torch.rand(D) + 0.5,
        lm_head_VD=torch.randn(V, D),
        norm_eps=1e-5,
        config={"hidden_size": D, "num_hidden_layers": 8, "model_type": "llama"},
    )


HEAD = head()


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """The naive norm, a row at a time."""
    rows = [r / (sum(float(v) ** 2 for v in r) / D + HEAD.norm_eps) ** 0.5 for r in x]
    return torch.stack(rows) * HEAD.norm_weight_D


def sample(length: int = T, seed: int = 0) -> SampleStates:
    generator = torch.Generator().manual_seed(seed)
    sizes_L = torch.tensor([0.1, 1.0, 30.0])[:, None]
    before_TD = torch.randn(length, D, generator=generator) * 7
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[2:5] = mask_T[7:] = True
    return SampleStates(
        input_ids=torch.randint(0, V, (length,), generator=generator),
        mask_T=mask_T,
        aux_TLD=(torch.randn(length, L, D, generator=generator) * sizes_L).bfloat16().float(),
        final_TD=rms_norm(before_TD).bfloat16().float(),
    )


def prepared(it: SampleStates) -> dict[str, torch.Tensor]:
    ids = it.input_ids
    return {"input_ids": ids, "loss_mask": it.mask_T.long(), "token_ids": ids}


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_the_reader_of_speculators_gets_layers_and_a_final_state_that_norms_to_ours() -> None:
    it = sample()
    parts = foreign.to_speculators(it, HEAD, "bf16")
    states = parts["hidden_states"]
    assert states.dtype == torch.bfloat16
    assert torch.equal(states[:, :-1].float(), it.aux_TLD)
    assert relative(rms_norm(states[:, -1].float()), it.final_TD) < 2**-8  # bf16 rounds by 2^-9
    assert torch.equal(parts["token_ids"], it.input_ids)


def test_fp8_has_a_scale_a_token_over_all_layers_and_spends_its_range_on_the_final_state() -> None:
    it = sample()
    parts = foreign.to_speculators(it, HEAD, "fp8")
    values, scales = parts["hidden_states"].float(), parts["hidden_states_scales"]
    assert (values.shape, scales.shape) == ((T, L + 1, D), (T, 1, 1))
    assert parts["hidden_states"].dtype == torch.float8_e4m3fn
    assert torch.equal(values.abs().amax((1, 2)), torch.full((T,), 448.0))
    assert torch.equal(values[:, -1].abs().amax(1), torch.full((T,), 448.0))
    wide = values * scales
    assert relative(wide[:, 2], it.aux_TLD[:, 2]) < 2**-4  # e4m3 has three bits of fraction
    assert relative(rms_norm(wide[:, -1]), it.final_TD) < 2**-4


def test_specforge_gets_layers_side_by_side_under_a_leading_one() -> None:
    it = sample()
    parts = foreign.to_specforge(it)
    assert parts["aux_hidden_state"].shape == (1, T, L * D)
    assert torch.equal(parts["aux_hidden_state"][0, :, D : 2 * D].float(), it.aux_TLD[:, 1])
    assert torch.equal(parts["hidden_state"][0].float(), it.final_TD)
    assert parts["loss_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert parts["loss_mask"].dtype == parts["input_ids"].dtype == torch.int64


def taken(form: str, found: dict[str, Any]) -> Parts:
    return foreign.from_foreign(form, found, L, HEAD)


def test_a_bf16_row_comes_back_exactly_through_specforge() -> None:
    it = sample()
    parts = taken("specforge", foreign.to_specforge(it))
    assert torch.equal(parts["aux.values"].float(), it.aux_TLD)
    assert torch.equal(parts["final.values"].float(), it.final_TD)


def test_states_from_before_the_norm_are_normed_and_those_from_behind_are_left() -> None:
    it = sample()
    before_TD = (torch.randn(T, D) * 5).bfloat16()
    wanted_TD = rms_norm(before_TD.float()).bfloat16()
    for last_TD, wanted in ((before_TD, wanted_TD), (it.final_TD, it.final_TD)):
        states = torch.cat([it.aux_TLD, last_TD[:, None]], dim=1).bfloat16()
        parts = taken("speculators", prepared(it) | {"hidden_states": states})
        assert torch.allclose(parts["final.values"].float(), wanted.float(), rtol=2**-7)


def test_e4m3_layers_keep_their_bits() -> None:
    it = sample()
    parts = foreign.to_speculators(it, HEAD, "fp8")
    ours = taken("speculators", prepared(it) | parts)
    bits = parts["hidden_states"][:, :-1].contiguous().view(torch.uint8)
    assert torch.equal(ours["aux.values"].view(torch.uint8), bits)
    decoded = state_codec("fp8").decode(
        {"values": ours["aux.values"], "scales": ours["aux.scales"]}, D
    )
    wide = parts["hidden_states"].float() * parts["hidden_states_scales"]
    assert torch.equal(decoded, wide[:, :-1])
    assert relative(ours["final.values"].float(), it.final_TD) < 2**-4


def test_final_states_that_another_norm_made_are_told() -> None:
    it = sample()
    assert foreign.is_normed(it.final_TD, HEAD)
    assert not foreign.is_normed(it.final_TD * 1.2, HEAD)
    found = foreign.to_specforge(it) | {"hidden_state": (it.final_TD[None] * 3).bfloat16()}
    with pytest.raises(EyasError, match="what the final norm made"):
        taken("specforge", found)


BF16 = torch.zeros(T, L + 1, D).bfloat16()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_states": BF16[..., 1:]}, r"\(12, 4, 16\), .*got \(\(12, 4, 15\)"),
        ({"hidden_states": BF16[:, 1:]}, r"\(12, 4, 16\), .*got \(\(12, 3, 16\)"),
        ({"hidden_states": BF16[1:]}, r"got \(\(11, 4, 16\)"),
        ({"hidden_states": BF16.half()}, "torch.bfloat16.*got .*torch.float16"),
        ({"hidden_states": BF16.to(torch.float8_e4m3fn)}, "torch.bfloat16.*got .*float8"),
        ({"hidden_states_scales": torch.ones(T, 1, 1)}, "float8_e4m3fn.*got .*bfloat16"),
        (
            {
                "hidden_states": BF16.to(torch.float8_e4m3fn),
                "hidden_states_scales": torch.ones(T, L + 1, 1),
            },
            r"hidden_states_scales: expected \(\(12, 1, 1\)",
        ),
        ({"hidden_states": BF16 + torch.inf}, "expected finite values"),
        ({"loss_mask": torch.zeros(T - 2).long()}, r"loss_mask: .*got \(\(10,\)"),
        ({"loss_mask": torch.full((T,), 2)}, "expected 0 and 1"),
        ({"input_ids": torch.zeros(T).long()}, "those of the data set's row"),
        ({"token_ids": torch.full((T,), V), "input_ids": torch.full((T,), V)}, "expected 0 to 49"),
    ],
)
def test_what_is_not_a_sample_of_the_target_is_refused(
    changes: dict[str, torch.Tensor], told: str
) -> None:
    it = sample()
    found = prepared(it) | foreign.to_speculators(it, HEAD, "bf16") | changes
    with pytest.raises(EyasError, match=told):
        taken("speculators", found)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"aux_hidden_state": BF16[None, :, :2].flatten(2)}, r"\(1, 12, 48\), .*\(1, 12, 32\)"),
        ({"hidden_state": BF16[None, :, 0, 1:]}, r"\(1, 12, 16\), .*\(1, 12, 15\)"),
        ({"hidden_state": BF16[None, :, 0].float()}, "got .*torch.float32"),
        ({"loss_mask": torch.ones(T + 1).long()}, r"loss_mask: .*got \(\(13,\)"),
        ({"input_ids": torch.zeros(T)}, "input_ids: expected .*int64"),
    ],
)
def test_what_is_not_a_file_of_specforge_is_refused(
    changes: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(EyasError, match=told):
        taken("specforge", foreign.to_specforge(sample()) | changes)


@pytest.mark.parametrize("form", ["speculators", "specforge"])
def test_a_tensor_that_is_missing_is_named(form: str) -> None:
    it = sample()
    whole = foreign.to_specforge(it)
    if form == "speculators":
        whole = prepared(it) | foreign.to_speculators(it, HEAD, "bf16")
    for key in whole:
        with pytest.raises(EyasError, match=f"{key}: expected .*got nothing"):
            taken(form, {k: v for k, v in whole.items() if k != key})


@pytest.mark.parametrize(
    ("mask", "spans"),
    [([0, 1, 1, 0, 1], ((1, 3), (4, 5))), ([1, 1], ((0, 2),)), ([0, 0], ()), ([1], ((0, 1),))],
)
def test_replies_are_the_runs_of_the_mask(mask: list[int], spans: tuple[tuple[int, int]]) -> None:
    assert foreign.spans_of(torch.tensor(mask)) == spans
