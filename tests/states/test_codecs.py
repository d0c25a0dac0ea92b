import pytest
import torch

from eyas.errors import EyasError
from eyas.states.codecs import StateCodec, codec_of_label, state_codec, vector_bytes

NAMES = ("bf16", "fp8", "int4")
# largest |x - decoded| of a value, as a share of its vector's largest value: half a unit in the
# last of 8 bits; half of e4m3's widest gap, 32 of 448; for int4 what Gaussian vectors show; the
# bound that holds for any stands in test_int4.py
SHARE = {"bf16": 2**-8, "fp8": 16 / 448, "int4": 0.25}
# mean relative error of Gaussian vectors, and a tenth more
GAUSSIAN = {"bf16": 0.0017 * 1.1, "fp8": 0.0265 * 1.1, "int4": 0.0935 * 1.1}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: StateCodec, states: torch.Tensor) -> torch.Tensor:
    parts = codec.encode(states)
    assert all(len(part) == len(states) for part in parts.values())
    return codec.decode(parts, states.shape[-1])


def relative(got: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return (got - states).norm(dim=-1) / states.norm(dim=-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 6, 48, 64, 65, 576, 1000])
def test_every_width_keeps_its_shape_and_its_error_bound(name: str, width: int) -> None:
    states = noise(7, 3, width, seed=width) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    got = round_trip(state_codec(name), states)
    assert (got.dtype, got.shape) == (torch.float32, states.shape)
    bound = SHARE[name] * states.abs().amax(-1, keepdim=True)
    assert ((got - states).abs() <= bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_error_of_gaussian_vectors_is_that_of_every_layer(name: str) -> None:
    states = noise(200, 3, 576) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    error_L = relative(round_trip(state_codec(name), states), states).mean(0)
    assert (error_L < GAUSSIAN[name]).all()
    torch.testing.assert_close(error_L, error_L[:1].expand(3), rtol=0.05, atol=0.0)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_few_huge_channels_leave_the_others_their_precision(name: str) -> None:
    states = noise(50, 576)
    states[:, [7, 300, 301]] *= torch.tensor([3e4, -2e3, 1e2])
    got = round_trip(state_codec(name), states)
    assert (relative(got, states) < 0.03).all()
    if name == "int4":  # fp8's scale follows the largest value: small ones go under
        rest = torch.ones(576, dtype=torch.bool)
        rest[[7, 300, 301]] = False
        assert (relative(got[:, rest], states[:, rest]) < 0.13).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1.0, 1e35])
def test_no_size_of_values_gives_nan_or_inf(name: str, size: float) -> None:
    states = noise(5, 100) * size
    got = round_trip(state_codec(name), states)
    assert got.isfinite().all()
    assert (got.abs() <= 1.1 * states.abs().max() + 1e-37).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_come_back_as_zeros_beside_other_rows(name: str) -> None:
    states = noise(4, 2, 130)
    states[1], states[3, 0] = 0.0, 0.0
    got = round_trip(state_codec(name), states)
    assert not got[1].any()
    assert not got[3, 0].any()
    assert got[3, 1].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_rows(name: str) -> None:
    got = round_trip(state_codec(name), torch.zeros(0, 3, 70))
    assert got.shape == (0, 3, 70)


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_is_coded_the_same_whatever_stands_beside_it(name: str) -> None:
    codec, states = state_codec(name), noise(6, 3, 200)
    together, alone = codec.encode(states), codec.encode(states[4:5])
    assert all(
        torch.equal(together[key][4:5].view(torch.uint8), alone[key].view(torch.uint8))
        for key in alone
    )


@pytest.mark.parametrize("name", NAMES)
def test_encode_leaves_its_input_alone_and_takes_bfloat16(name: str) -> None:
    codec, states = state_codec(name), noise(3, 80).bfloat16()
    before = states.clone()
    wide = round_trip(codec, states.float())
    assert torch.equal(round_trip(codec, states), wide)
    assert torch.equal(states, before)


def test_fp32_is_exact() -> None:
    states = torch.randn(5, 3, 70, generator=torch.Generator().manual_seed(4))
    assert torch.equal(round_trip(state_codec("fp32"), states), states)


def test_bf16_is_exact_for_bf16_states() -> None:
    states = noise(9, 3, 70).bfloat16().float()
    assert torch.equal(round_trip(state_codec("bf16"), states), states)


def test_fp8_by_hand() -> None:
    parts = state_codec("fp8").encode(torch.tensor([[896.0, -1.0, 3.3]]))
    assert parts["scales"].tolist() == [2.0]  # 896 / 448
    assert parts["values"].float().tolist() == [[448.0, -0.5, 1.625]]  # 1.65 between 1.625 and 1.75


def test_fp8_decodes_every_byte_as_torch_does() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = every[every.float().isfinite()].unsqueeze(0)  # two bytes are NaN; encode makes none
    decoded = state_codec("fp8").decode({"values": values, "scales": torch.tensor([3.0])}, 254)
    assert torch.equal(decoded, values.float() * 3.0)


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("fp32", 576, 2304),
        ("bf16", 576, 1152),
        ("fp8", 576, 580),
        ("int4", 576, 288 + 2 * 9 + 4 * 4),
        ("bf16", 7168, 14336),
        ("fp8", 7168, 7172),
        ("int4", 7168, 3584 + 2 * 112 + 4 * 56),
        ("int4", 65, 64 + 2 * 2 + 4 * 1),
    ],
)
def test_bytes_of_a_vector_by_hand(name: str, width: int, expected: int) -> None:
    assert vector_bytes(state_codec(name), width) == expected


def test_an_unknown_codec_and_an_unknown_version_are_named() -> None:
    with pytest.raises(
        EyasError, match=r"extract.codec: expected fp32 \| bf16 \| fp8 \| int4, got 'zip'"
    ):
        state_codec("zip")
    assert codec_of_label("int4/1").name == "int4"
    for label in ("int4/2", "int4", "zip"):
        with pytest.raises(EyasError, match=rf"codec: expected .*int4/1, got '{label}'\n  hint: "):
            codec_of_label(label)
