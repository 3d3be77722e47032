"""Several sums, products and activations in one pass over memory."""

import math

import pytest
import torch

from triton_kernels import fused_ops
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.elementwise.steps import (
    ACT,
    ACT_GRAD,
    ADD,
    AFFINE,
    ALL,
    CLAMP,
    CLAMP_GRAD,
    DIV,
    MUL,
    OF_CHANNELS,
    OF_IMAGES,
    OF_PIXELS,
    ONE,
)
from triton_kernels.reference import fused as reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(3, 5, 7, 40), (2, 4, 4, 300), (2, 9, 3), (5, 64), (1, 1), (0, 4, 4, 16), (4, 16, 16, 64)]


def _sizes(shape):
    n, *between, c = shape
    m = math.prod(between)
    return {ALL: shape, OF_CHANNELS: (c,), OF_IMAGES: (n, c), OF_PIXELS: (n * m,), ONE: (1,)}


def _tensors(shape, has, dtypes, device):
    generator = torch.Generator().manual_seed(0)
    sizes = _sizes(shape)
    drawn = (torch.randn(sizes[kind], generator=generator) for kind in has)
    return [x.to(device, dtype) for x, dtype in zip(drawn, dtypes, strict=True)]


def _compare(shape, has, dtypes, steps, results, device):
    tensors = _tensors(shape, has, dtypes, device)
    got = fused_ops.elementwise(tensors, has, steps, results, shape)
    wide = [(at, torch.float64) for at, _ in results]
    expected = reference.elementwise([x.double() for x in tensors], has, steps, wide, shape)
    for (_, dtype), y, z in zip(results, got, expected, strict=True):
        assert y.dtype == dtype and y.shape == z.shape == torch.Size(shape)
        rounding = torch.finfo(dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(y.double(), z, rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chain(shape, dtype, device):
    """(act(x) p + q) c + row of images, limited; of which what is between is wanted, too."""
    has = ALL, OF_CHANNELS, OF_IMAGES, ONE, OF_PIXELS
    steps = [
        (ACT, 0, 0, ACTIVATIONS.index("silu"), 0.0),
        (AFFINE, 5, 0, 1.5, -0.25),
        (MUL, 6, 1, 0.0, 0.0),
        (ADD, 7, 2, 0.0, 0.0),
        (MUL, 8, 3, 0.0, 0.0),
        (ADD, 9, 4, 0.0, 0.0),
        (CLAMP, 10, 0, -1.0, 2.0),
    ]
    results = [(11, dtype), (6, torch.float32), (10, dtype)]
    _compare(shape, has, (dtype, torch.float32, dtype, dtype, dtype), steps, results, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations(activation, dtype, device):
    which = ACTIVATIONS.index(activation)
    steps = [(ACT, 0, 0, which, 0.0), (ACT_GRAD, 1, 0, which, 0.0)]
    results = [(2, dtype), (3, dtype)]
    _compare((2, 3, 40), (ALL, ALL), (dtype, dtype), steps, results, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", [(-0.5, 0.5), (-math.inf, 0.0), (0.25, math.inf)])
def test_limits_and_quotients(limits, dtype, device):
    steps = [(CLAMP, 0, 0, *limits), (CLAMP_GRAD, 1, 0, *limits), (AFFINE, 0, 0, 0.0, 3.0)]
    steps += [(DIV, 1, 4, 0.0, 0.0)]
    results = [(2, dtype), (3, dtype), (5, dtype)]
    _compare((2, 3, 40), (ALL, ALL), (dtype, dtype), steps, results, device)


def test_a_cast_alone(device):
    _compare((2, 3, 40), (ALL,), (torch.float32,), [], [(0, torch.float16)], device)


def test_what_is_no_number_stays_so(device):
    x = torch.tensor([[math.nan, 3.0, -3.0, math.inf]], device=device)
    steps = [(CLAMP, 0, 0, -1.0, 1.0)]
    (y,) = fused_ops.elementwise([x], (ALL,), steps, [(1, torch.float32)], (1, 4))
    torch.testing.assert_close(y.cpu(), torch.tensor([[math.nan, 1.0, -1.0, 1.0]]), equal_nan=True)


@pytest.mark.gpu
def test_many_numbers(device):
    """More than 2^31."""
    shape = (3, 2**15, 2**15 // 64, 50)
    x = torch.ones(shape, dtype=torch.bfloat16, device=device)
    row = torch.arange(3.0, device=device)[:, None].repeat(1, 50)
    steps = [(ADD, 0, 1, 0.0, 0.0)]
    (y,) = fused_ops.elementwise([x, row], (ALL, OF_IMAGES), steps, [(2, x.dtype)], shape)
    for i in range(3):
        assert bool((y[i] == 1 + i).all())


def test_a_tensor_of_another_size_is_refused(device):
    x, steps = torch.ones(2, 3, device=device), [(ADD, 0, 1, 0.0, 0.0)]
    with pytest.raises(AssertionError):
        fused_ops.elementwise([x, x], (ALL, ONE), steps, [(2, x.dtype)], (2, 3))
