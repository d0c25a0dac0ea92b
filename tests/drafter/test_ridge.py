import dataclasses

import pytest
import torch
from torch import Tensor

from eyas.drafter.layers import rms_norm
from eyas.drafter.losses import pack_loss
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, Packer
from eyas.drafter.ridge import NormalEquations, ridge_start, sum_equations
from eyas.drafter.unroll import build_layout
from eyas.errors import EyasError

STRENGTH = 1e-9


def linear_documents(tiny, aux_map: Tensor, token_map: Tensor, norm_weight: Tensor) -> None:
    """Replace the final states by the linear relation that the start assumes, position 0 apart."""
    ones = torch.ones(16, dtype=torch.float64)
    made = []
    generator = torch.Generator().manual_seed(1)
    for length in (40, 50, 30):
        ids = torch.randint(0, 40, (length,), generator=generator)
        aux = torch.randn(length, 3, 16, generator=generator, dtype=torch.float64)
        aux[0] *= 1e4
        token = rms_norm(tiny.embed_VD[ids], ones, 1e-5)
        state = torch.zeros(length, 16, dtype=torch.float64)
        state[1:] = aux[:-1].flatten(1) @ aux_map.T + token[1:] @ token_map.T
        reply = torch.ones(length, dtype=torch.int32)
        reply[:5] = 0
        made.append(
            Document(input_ids_T=ids, reply_T=reply, aux_TLD=aux, final_TD=state * norm_weight)
        )
    tiny.documents.documents[:] = made


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def relation(tiny):
    aux_map, norm_weight = noise(16, 48, seed=1), noise(16, seed=2).abs() + 0.5
    token_map = noise(16, 8, seed=3) @ noise(8, 16, seed=4)  # rank 8: what 2 heads of 4 carry
    linear_documents(tiny, aux_map, token_map, norm_weight)
    return aux_map, token_map, norm_weight


def test_a_linear_relation_is_recovered(tiny, relation) -> None:
    aux_map, token_map, norm_weight = relation
    equations = sum_equations(tiny.documents, tiny.embed_VD, norm_weight, 1e-5)
    assert equations.rows == 40 + 50 + 30 - 3 * 2, "neither position 0 nor the last has a row"
    want = torch.cat([aux_map, token_map], dim=1)
    torch.testing.assert_close(equations.solve(STRENGTH), want, rtol=1e-4, atol=1e-4)


def test_rows_whose_final_state_was_not_kept_are_left_out(tiny, relation) -> None:
    aux_map, token_map, norm_weight = relation
    kept_of = [range(5, 39), range(2, 49), range(0)]
    for document, kept in zip(tiny.documents.documents, kept_of, strict=True):
        missing = torch.ones(len(document.final_TD), dtype=torch.bool)
        missing[list(kept)] = False
        document.final_TD[missing] = torch.nan
    equations = sum_equations(tiny.documents, tiny.embed_VD, norm_weight, 1e-5)
    assert equations.rows == 34 + 47
    want = torch.cat([aux_map, token_map], dim=1)
    torch.testing.assert_close(equations.solve(STRENGTH), want, rtol=1e-4, atol=1e-4)


def test_strength_is_relative_to_the_size_of_features(tiny, relation) -> None:
    equations = sum_equations(tiny.documents, tiny.embed_VD, relation[2], 1e-5)
    aux_half = equations.solve(0.1)[:, :48]
    for document in tiny.documents.documents:
        document.aux_TLD.mul_(1000.0)
    larger = sum_equations(tiny.documents, tiny.embed_VD, relation[2], 1e-5)
    torch.testing.assert_close(larger.solve(0.1)[:, :48] * 1000.0, aux_half, rtol=1e-6, atol=1e-9)


def test_the_start_puts_out_the_regressed_state(tiny, relation) -> None:
    _, _, norm_weight = relation
    equations = sum_equations(tiny.documents, tiny.embed_VD, norm_weight, 1e-5)
    config = dataclasses.replace(tiny.config, head_dim=4)
    drafter = Drafter(config, tiny.drafter.t2d).double()
    ridge_start(
        drafter,
        equations,
        strength=STRENGTH,
        norm_scale=0.5,
        norm_weight_D=norm_weight,
        head_ND=tiny.draft_head(),
        seed=0,
    )
    torch.testing.assert_close(drafter.norm.weight.detach(), 0.5 * norm_weight)
    document = tiny.documents.documents[0]
    # a document of one token and a row: attention has one key, so nothing else is attended to
    layout = build_layout(torch.tensor([1]), (3,), 1)
    embed_TD = tiny.embed_VD[document.input_ids_T[:3]]
    with torch.no_grad():
        (out,) = drafter.unroll(embed_TD, document.aux_TLD[1:4], layout, 1)
    token = rms_norm(embed_TD[1], torch.ones(16, dtype=torch.float64), 1e-5)
    want = relation[0] @ document.aux_TLD[1].flatten() + relation[1] @ token
    torch.testing.assert_close(out[0], want, rtol=1e-3, atol=1e-3)


def test_the_start_foresees_far_more_than_chance(tiny, relation) -> None:
    equations = sum_equations(tiny.documents, tiny.embed_VD, relation[2], 1e-5)
    drafter = Drafter(tiny.config, tiny.drafter.t2d).double()

    ridge_start(
        drafter,
        equations,
        strength=STRENGTH,
        norm_scale=1.0,
        norm_weight_D=relation[2],
        head_ND=tiny.draft_head(),
        seed=0,
    )
    pack = Packer(tiny.documents, tiny.favourites, drafter.t2d).pack([0, 1, 2])
    with torch.no_grad():
        embed_TD = tiny.embed_VD[pack.input_ids_T]
        tally = pack_loss(drafter, pack, embed_TD, tiny.draft_head(), (1.0,))[1]
    # the maps are exact; with heads this small a row's attention leaks to other rows
    assert tally.correct[0] / tally.trained[0] > 0.4, "chance is 1 in 24"


def test_no_rows_and_broken_states_are_refused(tiny) -> None:
    with pytest.raises(EyasError, match="expected documents of three tokens"):
        NormalEquations(48, 16).solve(0.01)
    tiny.documents.documents[0].aux_TLD[3] = torch.nan
    equations = sum_equations(tiny.documents, tiny.embed_VD, torch.ones(16), 1e-5)
    with pytest.raises(EyasError, match="inf or NaN"):
        equations.solve(0.01)


def test_a_strength_that_leaves_no_one_solution_is_told() -> None:
    equations = NormalEquations(4, 2)
    equations.accumulate(torch.eye(3, 4, dtype=torch.float64), noise(3, 2, seed=0))
    with pytest.raises(
        EyasError, match=r"over 3 rows at strength 0\n  hint: raise train\.ridge_st"
    ):
        equations.solve(0.0)
    assert torch.isfinite(equations.solve(0.01)).all()
