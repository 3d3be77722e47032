"""The dx pass with the gradient of a 1x1 skip in it, against its twin in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from triton_kernels.conv import skip_dx
from triton_kernels.conv.plain.by_tma import tma_skip_dx
from triton_kernels.conv.plain.pointers import pointer_skip_dx
from triton_kernels.norm.inline_statistics import NORM_BACKWARD
from triton_kernels.norm.tables import NormGrads
from triton_kernels.reductions.row_sums import RowSums
from triton_kernels.reference import fused as fused_reference

from .distinct import distinct


class Case(NamedTuple):
    n: int
    h: int
    w: int
    co: int
    c1: int
    c2: int = 0
    upsample1: bool = False
    add1: bool = False
    halves: bool = False  # dz is two tensors, of which the first has been added up


SMALL = {
    "one input": Case(2, 8, 8, 24, 40, add1=True),
    "two inputs": Case(1, 8, 24, 72, 64, 16),
    "two inputs, one upsampled": Case(3, 8, 16, 40, 64, 72, upsample1=True),
    "two inputs, two gradients": Case(3, 8, 16, 40, 64, 72, upsample1=True, halves=True),
    "7x5, two gradients": Case(2, 14, 10, 16, 128, 24, True, True, halves=True),
    "one input, upsampled": Case(1, 16, 8, 16, 24, upsample1=True, add1=True),
    "images of 16 pixels": Case(5, 4, 4, 16, 64, 64),
    "rows of 12": Case(3, 12, 12, 8, 16),
    "empty batch": Case(0, 8, 8, 8, 16),
    "7x7": Case(3, 7, 7, 24, 40, add1=True),
    "14x10, upsampled": Case(2, 14, 10, 16, 64, 24, upsample1=True),
    "2x2, upsampled": Case(5, 2, 2, 72, 24, upsample1=True, add1=True),
    "halves of 24 and 40": Case(2, 6, 6, 16, 24, 40, add1=True),
    "halves of 72 and 56, one upsampled": Case(2, 4, 6, 40, 72, 56, upsample1=True),
}
MODEL = {
    "64x64": Case(32, 64, 64, 64, 64, 64),
    "64x64 upsampled": Case(32, 64, 64, 64, 128, 64, upsample1=True),
    "32x32": Case(32, 32, 32, 128, 128, 64),
    "16x16 upsampled": Case(32, 16, 16, 192, 256, 192, upsample1=True),
    "16x16 of two gradients": Case(32, 16, 16, 192, 256, 192, upsample1=True, halves=True),
    "32x32 of two gradients": Case(32, 32, 32, 128, 192, 128, upsample1=True, halves=True),
    "64x64 of two gradients": Case(32, 64, 64, 64, 128, 64, upsample1=True, halves=True),
    "8x8": Case(33, 8, 8, 256, 256, 192),
    "encoder": Case(32, 32, 32, 128, 64, add1=True),
    "28x28 upsampled": Case(32, 28, 28, 64, 128, 64, upsample1=True),
    "14x14 of 96 and 160, upsampled": Case(32, 14, 14, 96, 96, 160, upsample1=True),
}
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-9, torch.float32: 1.5 * 2**-10}
DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def _inputs(case: Case, dtype, device) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype=dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    n, h, w, co, c1, c2, upsample1, add1, halves = case
    small = (h // 2, w // 2) if upsample1 else (h, w)
    return {
        "dy": randn(n, h, w, co),
        "weight": (randn(co, c1 + c2, dtype=torch.float32) / co**0.5).to(dtype)[..., None, None],
        "dz": randn(n, *small, c1) if halves else randn(n, h, w, c1 + c2),
        "x1": randn(n, *small, c1) + 2,
        "x2": randn(n, h, w, c2) - 2 if c2 else None,
        "coeff": randn(n, 3, c1 + c2, dtype=torch.float32),
        "add1": randn(n, h, w, c1) if add1 else None,
        "dz2": randn(n, h, w, c2) if halves else None,
    }


def _check(case: Case, dtype, device, config=None, sums: bool | RowSums = True, factor=None):
    inputs = _inputs(case, dtype, device)
    exact = {k: v if v is None else v.double() for k, v in inputs.items()}
    options = {"upsample1": case.upsample1, "factor": factor}
    got = skip_dx.skip_dx(**inputs, sums=sums, **options, config=config)
    want = fused_reference.skip_dx(**exact, sums=True, **options)
    for name, g, e in zip(("dx1", "dx2"), got, want, strict=False):
        assert (g is None) == (e is None)
        if e is not None:
            assert g.dtype == dtype and g.shape == e.shape
            error = (g.double() - e).norm() / e.norm().clamp(min=1e-30)
            assert error <= ROUNDING[dtype] + 2**-24 * case.co**0.5, f"{name}: {error:.2e}"
    # a sum over pixels is small beside what was added up, by which the products' error scales
    scale = want[0].abs().sum((1, 2)).norm().clamp(min=1e-30)
    error = (got[2].double().sum(0) - want[2].sum(0)).norm() / scale
    assert error <= (ROUNDING[dtype] if dtype == torch.float32 else 1e-5), f"rows: {error:.2e}"
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_small(name, dtype, device):
    _check(SMALL[name], dtype, device)


SCALED = ["one input", "two inputs", "14x10, upsampled", "halves of 24 and 40", "7x7"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_sums_that_a_number_multiplies(name, dtype, device):
    _check(SMALL[name], dtype, device, factor=-(0.5**0.5))


def test_rows_in_a_place_of_row_sums(device):
    case = SMALL["two inputs, one upsampled"]
    sums = RowSums(torch.zeros(case.c1, device=device))
    _, _, rows = _check(case, torch.float32, device, sums=sums)
    sums.add(rows, 0, sums.grad)
    total = rows.sum(0)
    sums.flush()
    torch.testing.assert_close(sums.grad, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | MODEL)
def test_coefficients_made_in_the_kernel(name, dtype, device):
    """Against the launch before it that makes them."""
    case = (SMALL | MODEL)[name]
    if name in MODEL and device.type == "cpu":
        pytest.skip("large")
    inputs = _inputs(case, dtype, device)
    dy, weight, dz, x1, x2, _, add1, dz2 = inputs.values()
    (n, h, w, _), c = dy.shape, weight.shape[1]
    generator = torch.Generator().manual_seed(1)
    tiles = 4 if h * w % 4 == 0 else 1
    partials = torch.randn(n, tiles, 2, c, generator=generator).to(device)
    table = torch.rand(n, 4, c, generator=generator).to(device) + 0.5
    groups = 4 if name in SMALL else 32
    table[:, :2] = table[:, :2, :: c // groups].repeat_interleave(c // groups, dim=2)
    results = []
    for ways in (kernel.config() for kernel in NORM_BACKWARD.kernels):
        sums = RowSums(torch.ones(3 * c, device=device))
        d_weight, d_bias, d_bias_before = sums.grad.split(c)
        *dx, rows = skip_dx.skip_backward(
            dy, weight, dz, x1, x2, partials, table, groups,
            NormGrads(d_weight, d_bias),
            sums=sums, rows=sums, add1=add1, dz2=dz2, upsample1=case.upsample1, ways=ways,
        )  # fmt: skip
        sums.add(rows, 0, d_bias_before[: case.c1])
        total = rows.sum(0)
        sums.flush()
        results.append((*dx, total, sums.grad[: 2 * c]))
    for got, want in zip(*results, strict=True):
        if want is not None:
            error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
            assert error <= 2 * ROUNDING[dtype]


# Channels that are no multiple of 8, as no descriptor of a TMA unit could have them
ODD = {
    "odd channels": Case(2, 6, 4, 19, 7, 12, add1=True),
    "odd channels, upsampled": Case(2, 6, 4, 10, 33, upsample1=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SMALL | ODD)
def test_without_a_tma_unit(name, dtype, device, no_tma):
    _check((SMALL | ODD)[name], dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SCALED, "odd channels"])
def test_sums_that_a_number_multiplies_without_a_tma_unit(name, dtype, device, no_tma):
    _check((SMALL | ODD)[name], dtype, device, factor=-(0.5**0.5))


@pytest.mark.parametrize("config", distinct(pointer_skip_dx.TILES), ids=str)
@pytest.mark.parametrize("name", ["two inputs, two gradients", "14x10, upsampled"])
def test_every_tile_without_a_tma_unit(name, config, device, no_tma):
    case = SMALL[name]
    if case.halves and case.c1 % config.block_c:
        pytest.skip("a tile of two tensors")
    _check(case, torch.float16, device, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", tma_skip_dx.CONFIGS, ids=str)
@pytest.mark.parametrize("name", MODEL)
def test_every_config_at_model_shapes(name, config, device):
    case = MODEL[name]
    if case.halves and case.c1 % config.block_c:
        pytest.skip("a tile of two tensors")
    _check(case, torch.bfloat16, device, config, factor=0.5**0.5)
    first = _check(case, torch.bfloat16, device, config)
    for _ in range(3):
        again = _check(case, torch.bfloat16, device, config)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))
