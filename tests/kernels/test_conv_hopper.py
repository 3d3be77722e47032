"""The Gluon path of the fused convolutions: where it applies, and on a Hopper GPU its results."""

import pytest
import torch

from triton_kernels.conv import fused as conv_fused
from triton_kernels.conv.hopper import row_mma as gluon_rows
from triton_kernels.conv.plain.tma import Config
from triton_kernels.conv.plain.tma_wgrad import WgradConfig
from triton_kernels.hopper.descriptors import SUPPORTED
from triton_kernels.runtime.device import describe

from .test_conv_fused import (
    ALL_CONFIGS,
    ROUNDING,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    check_weight_grad,
    forward_case,
    forward_reference,
    poison,  # noqa: F401  a fixture for every test here
    relative,
)

HOPPER = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")).hopper
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"),
    pytest.mark.skipif(not SUPPORTED, reason="another version of Triton"),
]
CONFIG = Config(*gluon_rows.TILE)
RESIDENT = Config(*gluon_rows.RESIDENT_TILE)  # of convolutions of 64 channels
RESIDENT_OF_4 = Config(*gluon_rows.RESIDENT_TILE_OF_4)
WGRAD_CONFIG = WgradConfig(*gluon_rows.WGRAD_TILE)
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
}


CONFIGS = [CONFIG, RESIDENT, RESIDENT_OF_4]
VARIANTS = [(config, torch.bfloat16) for config in CONFIGS] + [(CONFIG, torch.float16)]


def served(shape: Shape, config: Config, direction: int) -> Shape:
    """The shape; with 64 channels to be multiplied, of x (1) or of dy (2), if `config` wants it."""
    if config != CONFIG:
        return shape._replace(ci=64) if direction == 1 else shape._replace(co=64)
    return shape


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
        shape = served(SHAPES[name], config, 1)
        repeatedly(lambda: check_forward(shape, dtype, device, config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_forward_of_the_product_alone(self, config, device):
        shape = served(SHAPES["rows of channels"], config, 1)
        x, weight, bias, emb, residual = forward_case(shape, torch.bfloat16, device)
        y, partials = conv_fused.conv_forward(x, weight, bias, config=config)
        exact = forward_reference(x, weight, bias, emb * 0, residual * 0, torch.float64)
        assert partials is None
        assert relative(y, exact) <= ROUNDING[torch.bfloat16] + 1e-5

    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("config", [CONFIG, RESIDENT], ids=str)
    @pytest.mark.parametrize("name", ["a tile", "rows of channels", "many tiles"])
    def test_extra_pointwise_convolutions(self, name, config, count, device):
        shape, dtype = served(SHAPES[name], config, 1), torch.bfloat16
        repeatedly(lambda: check_extra(shape, 128, 64, dtype, device, config, count))

    @pytest.mark.parametrize(("config", "dtype"), VARIANTS, ids=str)
    @pytest.mark.parametrize("name", SHAPES)
    def test_input_grad(self, name, config, dtype, device):
        shape = served(SHAPES[name], config, 2)
        repeatedly(lambda: check_grad(shape, None, dtype, device, config=config))

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("name", ["rows of channels", "many channels"])
    def test_input_grad_of_two_inputs(self, name, config, device):
        shape, dtype = served(SHAPES[name], config, 2), torch.bfloat16
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
        for shape in (
            Shape(1, 6, 64, 64, 64),
            Shape(1, 64, 64, 96, 64),
            Shape(1, 64, 64, 64, 64, 1),
            Shape(1, 128, 128, 64, 64),
        ):
            assert applying(shape, torch.bfloat16, device) == (False, False, False)
        assert applying(SHAPES["an image"], torch.float32, device) == (False, False, False)

    def test_filters_stay_where_there_are_few(self, device):
        n, h, w, ci, co, _ = SHAPES["many channels"]
        x, y = (torch.empty((n, h, w, c), dtype=torch.half, device=device) for c in (ci, co))
        weight = torch.empty((co, ci, 3, 3), dtype=torch.half, device=device)
        assert gluon_rows.tiles(x, y, weight) == [gluon_rows.TILE]
        resident = [gluon_rows.RESIDENT_TILE, gluon_rows.RESIDENT_TILE_OF_4]
        assert gluon_rows.tiles(y, x, weight) == [gluon_rows.TILE, *resident]
        weight = torch.empty((64, 64, 3, 3), dtype=torch.half, device=device)
        assert gluon_rows.tiles(y, y, weight) == [gluon_rows.TILE, *resident]
        few = [gluon_rows.TILE, gluon_rows.RESIDENT_TILE]
        assert gluon_rows.tiles(y, y, weight, extra=[x]) == few
        assert gluon_rows.tiles(y, y, weight, extra=[x, y]) == [gluon_rows.TILE]


def applying(shape: Shape, dtype, device) -> tuple[bool, bool, bool]:
    """Whether the path applies to each of the three passes."""
    n, h, w, ci, co, kernel = shape
    x, y = (torch.empty((n, h, w, c), dtype=dtype, device=device) for c in (ci, co))
    weight = torch.empty((co, ci, kernel, kernel), dtype=dtype, device=device)
    return (
        bool(gluon_rows.tiles(x, y, weight)),
        bool(gluon_rows.tiles(y, x, weight)),
        gluon_rows.wgrad_applies(x, y, weight, (kernel // 2, kernel // 2)),
    )


def test_nothing_applies_without_a_hopper_gpu():
    shape = SHAPES["an image"]
    assert applying(shape, torch.bfloat16, torch.device("cpu")) == (False, False, False)


def test_configurations_are_told_apart():
    others = sum(ALL_CONFIGS, [])
    assert all(map(gluon_rows.serves, CONFIGS))
    assert gluon_rows.serves(WGRAD_CONFIG)
    assert not any(map(gluon_rows.serves, others))


def test_a_tuned_gluon_configuration_is_ignored_where_it_does_not_apply(monkeypatch, device):
    """A table made on a Hopper GPU has to be harmless elsewhere."""
    monkeypatch.setattr(gluon_rows, "takes", lambda x: False)
    table = {128: list(CONFIG)}
    known = {name: table for name in ("conv_forward 4 64 64 64 3 3 torch.float16 True 0 True",)}
    monkeypatch.setattr("triton_kernels.runtime.tuning._table", lambda: known)
    check_forward(SHAPES["a tile"], torch.float16, device)
