import pytest
import torch

from eyas.states import int4


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def naive_decode(parts: dict[str, torch.Tensor], row: int, width: int) -> list[float]:
    """Decode one vector value by value; the matrix has +-1/8 at (i, j) by the bits of i & j."""
    steps, found = parts["steps"][row].tolist(), []
    for group, step in enumerate(steps):
        packed = parts["codes"][row, group].tolist()
        codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        levels = [(code - 7.5) * step for code in codes]
        found += [
            sum(v * (-1) ** (i & j).bit_count() / 8 for i, v in enumerate(levels))
            for j in range(64)
        ]
    found = found[:width]
    for place, value in zip(parts["places"][row], parts["outliers"][row], strict=True):
        found[int(place)] = float(value)
    return found


@pytest.mark.parametrize("width", [48, 130, 576])
def test_decode_is_what_the_form_says_value_by_value(width: int) -> None:
    parts = dict(int4.encode(noise(2, width)))
    decoded = int4.decode(parts, width)
    for row in range(2):
        want = torch.tensor(naive_decode(parts, row, width))
        torch.testing.assert_close(decoded[row], want, rtol=1e-5, atol=1e-5)  # order of 64 sums


def test_the_largest_values_are_kept_in_bf16_at_their_places() -> None:
    states = noise(3, 576)
    states[:, 11], states[:, 500] = 900.0, -31.4
    parts = int4.encode(states)
    assert int4.num_outliers(576) == 4
    assert parts["places"][:, :2].tolist() == [[11, 500]] * 3
    decoded = int4.decode(parts, 576)
    assert torch.equal(decoded[:, [11, 500]], states[:, [11, 500]].bfloat16().float())


def test_rotated_values_are_off_by_at_most_a_clipped_step() -> None:
    groups = noise(20, 64) @ _matrix()  # what encode rotates has a zero at its outlier's place
    states = groups @ _matrix()
    parts = int4.encode(
        torch.cat([states, torch.full((20, 64), 0.0)], 1).index_fill(1, torch.tensor([64]), 1e3)
    )
    assert parts["places"].tolist() == [[64]] * 20
    back = int4.decode(parts, 128)[:, :64] @ _matrix()
    # half a step inside; the largest value lies 0.07 / 0.93 * 7.5 = 0.56 steps outside, and bf16
    # rounds the step by up to 0.4 % of 7.5 steps
    assert ((groups - back).abs() <= 0.6 * parts["steps"][:, :1].float() + 1e-5).all()


def _matrix() -> torch.Tensor:
    return torch.tensor([[(-1) ** (i & j).bit_count() / 8 for i in range(64)] for j in range(64)])
