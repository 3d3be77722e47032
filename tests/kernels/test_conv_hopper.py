"""The Gluon path of the fused convolutions: where it applies, and on a Hopper GPU its results."""

import pytest
import torch

from triton_kernels.conv import fused as conv_fused
from triton_kernels.conv.fused import FORWARD, INPUT_GRAD
from triton_kernels.conv.hopper.stationary import stationary_weights
from triton_kernels.conv.hopper.weight_grads import row_wgrad
from triton_kernels.conv.weight_grad import weight_grad_spec
from triton_kernels.hopper.descriptors import SUPPORTED
from triton_kernels.registry.choose import listed
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.spec import ConvSpec, dtype_name
from triton_kernels.runtime.device import Device, describe

from .chips import HOPPER
from .conv_fused_cases import (
    ROUNDING,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    check_weight_grad,
    forward_case,
    forward_reference,
    needs_tma,  # noqa: F401  a fixture for every test here
    relative,
)

ON_HOPPER = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")).hopper
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="no Hopper GPU"),
    pytest.mark.skipif(not SUPPORTED, reason="another version of Triton"),
]
STATIONARY = stationary_weights.TILE  # of convolutions of 64 channels
STATIONARY_OF_4 = stationary_weights.TILE_OF_4
WGRAD_CONFIG = row_wgrad.TILE
DTYPES = [torch.bfloat16, torch.float16]

# One program with one tile, programs with several and an odd number of them, more than one block of
# channels in or out, tiles that are not whole images.
SHAPES = {
    "a tile": Shape(1, 4, 64, 64, 64),
    "an image": Shape(1, 64, 64, 64, 64),
    "rows of channels": Shape(3, 12, 64, 128, 192),
    "many tiles": Shape(37, 64, 64, 64, 64),
    "many channels": Shape(21, 64, 64, 192, 64),
}
WGRAD_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "a tile"} | {
    "32x32": Shape(9, 32, 32, 128, 128),
    "16x16": Shape(13, 16, 16, 192, 128),
    "8x8": Shape(64, 8, 8, 256, 192),
    "8x8 of an odd number": Shape(37, 8, 8, 64, 128),
    "fewer tiles than programs": Shape(2, 16, 16, 64, 64),
    "a part for each block of channels": Shape(13, 8, 8, 512, 576),
    "more blocks of channels than programs": Shape(21, 8, 8, 768, 960),
    "rows of two pieces": Shape(5, 16, 128, 64, 128),
    "rows of three pieces": Shape(7, 48, 48, 128, 64),
    "96x96": Shape(2, 96, 96, 64, 64),
    "channels that fill no block": Shape(3, 16, 16, 72, 136),
    "pieces over the edge, channels too": Shape(3, 40, 40, 160, 96),
    "whole rows of 20": Shape(5, 20, 20, 64, 128),
    "rows of 12 of four images": Shape(7, 12, 12, 96, 288),
    "rows of 4 and 7": Shape(11, 7, 4, 64, 64),
    "tall": Shape(2, 70, 24, 128, 72),
    "32 channels": Shape(9, 64, 64, 32, 32),
    "8 and 24 channels": Shape(13, 20, 12, 8, 24),
    "40 and 320 channels": Shape(5, 16, 16, 40, 320),
}


CONFIGS = [STATIONARY, STATIONARY_OF_4]
VARIANTS = [(config, torch.bfloat16) for config in CONFIGS] + [(STATIONARY, torch.float16)]


def served(shape: Shape, direction: int) -> Shape:
    """The shape with 64 channels to be multiplied, of x (1) or of dy (2)."""
    return shape._replace(ci=64) if direction == 1 else shape._replace(co=64)


def repeatedly(check, times: int = 4):
    """A race shows as a wrong result, or one that changes."""
    first = check()
    for _ in range(times):
        assert all(map(torch.equal, check(), first))


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(("config", "dtype"), VARIANTS, ids=str)
    @pytest.mark.parametrize("name", SHAPES)
    def test_forward(self, name, config, dtype, device):
        shape = served(SHAPES[name], 1)
        repeatedly(lambda: check_forward(shape, dtype, device, config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_forward_of_the_product_alone(self, config, device):
        shape = served(SHAPES["rows of channels"], 1)
        x, weight, bias, emb, residual = forward_case(shape, torch.bfloat16, device)
        y, partials = conv_fused.conv_forward(x, weight, bias, config=config)
        exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
        assert partials is None
        assert relative(y, exact) <= ROUNDING[torch.bfloat16] + 1e-5

    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("name", ["a tile", "rows of channels", "many tiles"])
    def test_extra_pointwise_convolutions(self, name, count, device):
        shape, dtype = served(SHAPES[name], 1), torch.bfloat16
        repeatedly(lambda: check_extra(shape, 128, 64, dtype, device, STATIONARY, count))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["a tile", "rows of channels", "many tiles"])
    def test_sums_that_a_number_multiplies(self, name, config, device):
        shape, dtype = served(SHAPES[name], 1), torch.bfloat16
        repeatedly(lambda: check_forward(shape, dtype, device, config, factor=0.5**0.5))
        if config == STATIONARY:
            repeatedly(lambda: check_extra(shape, 128, 64, dtype, device, config, factor=-3))

    @pytest.mark.parametrize(("config", "dtype"), VARIANTS, ids=str)
    @pytest.mark.parametrize("name", SHAPES)
    def test_input_grad(self, name, config, dtype, device):
        shape = served(SHAPES[name], 2)
        repeatedly(lambda: check_grad(shape, None, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["rows of channels", "many channels"])
    def test_input_grad_of_two_inputs(self, name, config, device):
        shape, dtype = served(SHAPES[name], 2), torch.bfloat16
        repeatedly(lambda: check_grad(shape, 64, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("activation", ["identity", "gelu"])
    def test_input_grad_of_other_activations(self, activation, config, device):
        shape, dtype = SHAPES["an image"], torch.float16
        check_grad(shape, None, dtype, device, activation, config)

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", WGRAD_SHAPES)
    def test_weight_grad(self, name, dtype, accumulate, device):
        shape, config = WGRAD_SHAPES[name], WGRAD_CONFIG
        repeatedly(lambda: [check_weight_grad(shape, dtype, device, accumulate, config)])

    def test_what_applies(self, device):
        assert applying(SHAPES["an image"], torch.bfloat16, device) == (True, True, True)
        assert applying(WGRAD_SHAPES["32x32"], torch.bfloat16, device) == (False, False, True)
        assert applying(SHAPES["a tile"], torch.bfloat16, device) == (True, True, False)
        assert applying(Shape(1, 128, 128, 64, 64), torch.bfloat16, device) == (False, False, True)
        for shape in (
            Shape(1, 6, 64, 64, 64),
            Shape(1, 64, 64, 96, 64),
            Shape(1, 40, 40, 64, 64),
        ):
            assert applying(shape, torch.bfloat16, device) == (False, False, True)
        for shape in (Shape(1, 64, 64, 64, 64, 1), Shape(1, 64, 64, 64, 68)):
            assert applying(shape, torch.bfloat16, device) == (False, False, False)
        assert applying(SHAPES["an image"], torch.float32, device) == (False, False, False)


def applying(shape: Shape, dtype, device) -> tuple[bool, bool, bool]:
    """Whether the path applies to each of the three passes."""
    n, h, w, ci, co, kernel = shape
    x, y = (torch.empty((n, h, w, c), dtype=dtype, device=device) for c in (ci, co))
    weight = torch.empty((co, ci, kernel, kernel), dtype=dtype, device=device)
    return (
        STATIONARY in rows_of(FORWARD, spec_of(shape, dtype)),
        STATIONARY in rows_of(INPUT_GRAD, spec_of(shape, dtype, grad=True)),
        row_wgrad.WEIGHT_GRAD.refuse(
            weight_grad_spec(x, y, weight.float(), 1, (kernel // 2, kernel // 2), "tf32"),
            describe(device),
        )
        is None,
    )


def spec_of(shape: Shape, dtype, grad: bool = False, **terms) -> ConvSpec:
    """Of a shape; an input gradient multiplies the channels of dy."""
    n, h, w, ci, co, kernel = shape
    k, c = (co, ci) if grad else (ci, co)
    if grad:
        terms |= {"activation": "silu", "first": ci}
    name = dtype_name(dtype, allow_tf32=True)
    filters = (co, ci)
    return ConvSpec(n, name, h, w, k, c, kernel, kernel, filters=filters, **terms)


def rows_of(op: Op, spec: ConvSpec, gpu: Device = HOPPER) -> list[tuple]:
    """The configurations that keep filters."""
    return [c for _, c in listed(op, spec, gpu) if c.kernel == "stationary_weights"]


def test_filters_stay_where_there_are_few():
    stationary = [STATIONARY, STATIONARY_OF_4]
    many, few = Shape(2, 64, 64, 128, 64), Shape(2, 64, 64, 64, 64)
    half = torch.half
    assert rows_of(FORWARD, spec_of(many, half)) == []
    assert rows_of(INPUT_GRAD, spec_of(many, half, grad=True)) == stationary
    assert rows_of(FORWARD, spec_of(few, half)) == stationary
    assert rows_of(FORWARD, spec_of(few, half, extra=(128,))) == [STATIONARY]
    assert rows_of(FORWARD, spec_of(few, half, extra=(128, 128))) == []


def test_nothing_applies_without_wgmma():
    ampere = Device(tma=True, num_sms=108, shared_memory=166_912, arch=80)
    assert not rows_of(FORWARD, spec_of(SHAPES["an image"], torch.bfloat16), ampere)
