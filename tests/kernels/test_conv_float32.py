"""conv2d in float32 on tensor cores: TF32, and three products of it."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import conv2d as conv
from triton_kernels.conv import tf32x3 as conv_tf32x3
from triton_kernels.conv import tma as conv_tma
from triton_kernels.conv import turned_wgrad as conv_turned_wgrad

from .conv_cases import (
    SMALL,
    Shape,
    check,
    make,
    poison,  # noqa: F401  a fixture for the tests here
    references,
    run,
)

TENSOR_CORES = {
    **{
        name: SMALL[name]
        for name in (
            "whole rows a tile",
            "no padding",
            "padding beyond the filter",
            "1-D, 5 taps",
            "1x1",
            "1x1 with padding",
            "stride 2 by TMA",
            "stride 2 by TMA, 4x4",
        )
    },
    "odd": Shape(2, 5, 7, 32, 40),
    "more in than out": Shape(3, 4, 6, 72, 36),
    "wide, no padding": Shape(2, 5, 7, 32, 32, padding=0),
    "wide, padding beyond the filter": Shape(1, 3, 4, 36, 32, padding=(4, 3)),
    "wide, 2x4 filter": Shape(2, 5, 6, 32, 36, (2, 4), padding=(1, 2)),
    "wide, 1-D, 5 taps": Shape(2, 1, 17, 36, 32, (1, 5)),
    "wide, 1x1 with padding": Shape(2, 3, 5, 32, 36, (1, 1), padding=1),
}


@pytest.fixture
def tensor_cores(monkeypatch):
    """Small products in float32 take the paths of large ones."""
    monkeypatch.setattr(conv_tma, "_TURN_FROM", 0)
    monkeypatch.setattr(conv_tf32x3, "_WORTH", 0)
    monkeypatch.setattr(conv_turned_wgrad, "_WORTH", 0)


@pytest.mark.usefixtures("poison", "tensor_cores")
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_float32_on_tensor_cores(name, precision, device, monkeypatch):
    shape, tf32 = TENSOR_CORES[name], precision == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    data = make(shape, torch.float32, device)
    got = run(conv.conv2d, shape, *data, allow_tf32=tf32)
    check(got, *references(shape, *data), shape, precision)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf * 0
@pytest.mark.usefixtures("poison", "tensor_cores")
@pytest.mark.parametrize("split", ["before", "in registers", "gathered"])
def test_float32_on_tensor_cores_keeps_infinities(split, device):
    """Halves of an infinity are no infinities, and the other filter's second half is zero."""
    ci = 8 if split == "gathered" else 32
    x, weight = torch.ones(1, 3, 4, ci, device=device), torch.ones(32, ci, 1, 1, device=device)
    tiles = {
        "before": None,
        "in registers": next(c for c in conv_tf32x3.FWD_CONFIGS if c.tensor_cores == 2),
        "gathered": None,  # where there are few channels
    }

    def forward():
        return conv._conv2d_fwd(x, weight, None, 1, (0, 0), False, tiles[split])

    x[0, 0, 0, 0], x[0, 1, 1, 1], x[0, 2, 2, 2] = float("inf"), float("nan"), 3.4028e38
    y, exact = forward(), reference.conv2d(x.double(), weight.double())
    torch.testing.assert_close(y, exact.float(), rtol=1e-6, atol=0, equal_nan=True)
    assert y[0, 0, 0, 0] == float("inf") and y[0, 1, 1].isnan().all()
    weight[:, 0] = 0
    assert forward()[0, 0, 0].isnan().all()  # inf * 0
