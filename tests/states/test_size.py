import pytest

from eyas.states.layout import Layout, make_layout
from eyas.states.size import bytes_per_token, hours

BF16 = make_layout("bf16", "bf16", "all")
FP8 = make_layout("fp8", "fp8", "supervised")
INT4 = make_layout("int4", "fp8", "supervised")


def test_size_by_hand_for_kimi() -> None:
    per_token = bytes_per_token(BF16, num_layers=3, hidden_size=7168)
    assert per_token == 57_348
    assert hours(138_400_000, 422.5) == pytest.approx(90.99, abs=0.01)


def test_size_of_a_teacher_by_hand_for_kimi() -> None:
    layout = make_layout("int4", "fp8", "supervised", 64, 16)
    shares = {"final_share": 0.3 / 16, "teacher_share": 0.3}
    per_token = bytes_per_token(layout, num_layers=3, hidden_size=7168, **shares)
    assert per_token == pytest.approx(4 + 3 * 4032 + 0.3 * (64 * 8 + 7172 / 16))


@pytest.mark.parametrize("hidden_size", [576, 7168])
@pytest.mark.parametrize(("layout", "bar"), [(FP8, 1 / 2), (INT4, 1 / 4)])
def test_fp8_takes_a_half_and_int4_a_quarter_of_four_bf16_layers(
    layout: Layout, bar: float, hidden_size: int
) -> None:
    per_token = bytes_per_token(layout, num_layers=3, hidden_size=hidden_size, final_share=0.3)
    assert per_token <= bar * (8 * hidden_size + 16)
