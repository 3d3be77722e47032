"""avg_pool2d and upsample_nearest2d against the reference in float64, output and gradient."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.norm.sums import SUM_PROGRAMS, tensor_partials
from triton_kernels.reductions.row_sums import RowSums
from triton_kernels.resample import op as module
from triton_kernels.resample.op import avg_pool2d, upsample_nearest2d

from .norm_cases import assert_near, partials_of

OPS = [
    pytest.param(avg_pool2d, reference.avg_pool2d, id="avg_pool2d"),
    pytest.param(upsample_nearest2d, reference.upsample_nearest2d, id="upsample_nearest2d"),
]


def _check(op, expected, shape, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = op(leaf), expected(exact)
    assert y.dtype == dtype
    dy = torch.randn(want.shape, device=device).to(dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (want_dx,) = torch.autograd.grad(want, exact, dy.double())
    # three float32 additions, then one rounding to dtype
    rounding = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    for a, b in ((y, want), (dx, want_dx)):
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize(("op", "expected"), OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 4, 6, 8), id="even"),
        pytest.param((2, 5, 7, 3), id="odd-rows-and-columns"),
        pytest.param((1, 3, 4, 5), id="odd-rows"),
        pytest.param((1, 2, 9, 300), id="odd-columns-two-channel-blocks"),
        pytest.param((1, 2, 35, 160), id="two-column-blocks"),
        pytest.param((0, 4, 4, 8), id="empty-batch"),
    ],
)
def test_output_and_gradient(op, expected, shape, dtype, device):
    _check(op, expected, shape, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 4, 6, 8), (2, 5, 7, 3), (1, 2, 35, 160), (0, 4, 4, 8)], ids=str
)
def test_spread_with_another_gradient_and_sums(shape, dtype, device):
    """The gradient of a pooled tensor that has another consumer, and its sum for a bias."""
    torch.manual_seed(0)
    n, h, w, c = shape
    add = torch.randn(shape, device=device).to(dtype)
    dy = torch.randn(n, h // 2, w // 2, c, device=device).to(dtype)
    sums = RowSums(torch.zeros(0, device=device))
    fine, rows = module.spread_add(dy, shape, 0.25, add, sums)
    exact = add.double()
    up = reference.upsample_nearest2d(dy.double()) / 4
    exact[:, : up.shape[1], : up.shape[2]] += up
    rounding = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(fine.double(), exact, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(rows.double().sum(0), exact.sum((0, 1, 2)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        pytest.param((2, 4, 6, 8), 1, id="one-tile"),
        pytest.param((1, 32, 48, 40), 12, id="part-of-a-row, masked-second-block"),
        pytest.param((64, 32, 34, 3), 2, id="rows-and-a-part"),
        pytest.param((3, 7, 11, 5), 1, id="odd-sizes"),
        pytest.param((1, 2, 2, 136), 1, id="one-pixel, masked-second-block"),
        pytest.param((1, 62, 74, 7), 31, id="37-pixels-of-a-tile"),
        pytest.param((1, 2, 1042, 20), 1, id="521-pixels-of-a-tile"),
        pytest.param((0, 4, 4, 8), 1, id="empty-batch"),
    ],
)
def test_sums_of_what_is_pooled(shape, tiles, dtype, device):
    """Of the means as they are rounded, which are those that are pooled without sums."""
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) + 3).to(dtype)
    y, partials = module.gather_sums(x, 0.25)
    assert torch.equal(y, module.gather(x, 0.25))
    assert partials.dtype == torch.float32
    assert partials.shape == (shape[0], tiles, 2, shape[3])
    assert partials.shape == tensor_partials(y, SUM_PROGRAMS).shape, (
        "as of the pass that takes them"
    )
    assert_near("partials", partials, partials_of(y, tiles), floor=1e-6)


def test_upsampling_one_pixel(device):
    x = torch.arange(3.0, device=device).view(1, 1, 1, 3)
    assert torch.equal(upsample_nearest2d(x), x.expand(1, 2, 2, 3))


def test_pooling_undoes_upsampling(device):
    x = torch.randn(2, 3, 5, 7, device=device)
    assert torch.equal(avg_pool2d(upsample_nearest2d(x)), x)


@pytest.mark.parametrize("op", [avg_pool2d, upsample_nearest2d])
def test_expanded_gradient(op, device):
    x = torch.randn(1, 4, 4, 2, device=device, requires_grad=True)
    op(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.25 if op is avg_pool2d else 4.0))


@pytest.mark.usefixtures("no_launch")
def test_errors():
    with pytest.raises(ValueError, match=r"shape \(1, 1, 4, 2\); expected at least 2 rows"):
        avg_pool2d(torch.ones(1, 1, 4, 2))
    with pytest.raises(ValueError, match="contiguous NHWC"):
        upsample_nearest2d(torch.ones(1, 2, 4, 4).permute(0, 2, 3, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "expected"), OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(32, 64, 64, 64), (32, 32, 32, 192), (3, 17, 15, 192), (128, 8, 8, 256)], ids=str
)
def test_model_shapes(op, expected, shape, dtype, device):
    for _ in range(3):
        _check(op, expected, shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(64, 64, 64, 64), (32, 32, 32, 128), (1, 64, 64, 64), (3, 30, 34, 72)], ids=str
)
def test_sums_on_the_gpu(shape, dtype, device):
    x = (torch.randn(shape, device=device) + 3).to(dtype)
    y, partials = module.gather_sums(x, 0.25)
    assert torch.equal(y, module.gather(x, 0.25))
    assert_near("partials", partials, partials_of(y, partials.shape[1]), floor=1e-6)
    for _ in range(3):
        assert torch.equal(module.gather_sums(x, 0.25)[1], partials)
