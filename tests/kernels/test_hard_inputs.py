"""The Triton kernels at inputs that are hard on float32: means of a thousand deviations, deviations
of 1e-4, one channel a group, one sample. The bounds are those of the tests of `reference.fused`."""

import pytest
import torch

from triton_kernels import fused_ops, reference
from triton_kernels.norm.group_norm import group_norm
from triton_kernels.reference import fused

from .group_norm_cases import each_way  # noqa: F401  a fixture for tests here
from .test_reference_exact import NAMES, ROUNDINGS, check_norm, norm_case, relative_error
from .test_reference_fused_exact import EPS, check_block, draws

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

# of products, which a GPU computes in TF32 and the interpreter exactly
PRODUCTS = 1e-3 if torch.cuda.is_available() else 2 * ROUNDINGS

HARD = pytest.mark.parametrize(("mean", "deviation"), [(1e3, 1), (1, 1e-4), (0, 1e-4)], ids=str)


@HARD
@pytest.mark.parametrize(
    ("shape", "second", "groups"),
    [
        pytest.param((2, 8, 8, 32), 0, 8, id="one-tensor"),
        pytest.param((2, 8, 8, 32), 16, 8, id="two-tensors"),
        pytest.param((1, 4, 8, 16), 16, 32, id="one-channel-a-group-of-one-sample"),
    ],
)
def test_a_norm_and_a_convolution(shape, second, groups, mean, deviation, device):
    """Partial sums, tables, applied norms, gradients: every pass of a step."""
    case = shape, second, 16, groups, mean, deviation
    check_block(fused_ops, *case, floor=PRODUCTS, device=device)


@HARD
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((2, 9, 7, 24), 4, id="six-channels-a-group"),
        pytest.param((1, 6, 5, 16), 16, id="one-channel-a-group-of-one-sample"),
        pytest.param((2, 1, 1, 32), 2, id="one-pixel"),
    ],
)
def test_group_norm(shape, groups, mean, deviation, path, device):
    """The public op, by each way. Its mean is a float32, 2^-24 of itself off, and xhat as far as
    that is of a deviation, or of sqrt(eps); the gradient of weight is a sum of xhat."""
    off = 4 * 2**-24 * mean
    floors = dict.fromkeys(NAMES, off / (deviation**2 + EPS) ** 0.5)
    floors["d_weight"] = off / deviation
    case = [t.to(device) for t in norm_case(shape, mean, deviation)]
    check_norm(case, groups, "silu", function=group_norm, floors=floors)


@pytest.mark.parametrize("stats", ["conv_forward", "avg_pool", "tensor_partials"])
def test_partials_of_a_large_mean(stats, device):
    """A result about 1e3 with a deviation of 1, whose partial sums are those of what is stored."""
    draw = draws(device=device)
    x = draw(2, 8, 8, 32)
    if stats == "conv_forward":
        filters = draw(16, 3, 3, 32).permute(0, 3, 1, 2) / 288**0.5
        bias = torch.full((16,), 1e3, device=device)
        y, partials = fused_ops.conv_forward(x, filters, bias, stats=True)
        exact = reference.conv2d(x.double(), filters.double(), bias.double())
        assert relative_error(y - 1e3, exact - 1e3) < PRODUCTS + 4 * 2**-24 * 1e3
    elif stats == "avg_pool":
        y, partials = fused_ops.avg_pool(x + 1e3, True)
    else:
        y = x + 1e3
        partials = fused_ops.tensor_partials(y)
    weight, bias = torch.ones(y.shape[3], device=device), torch.zeros(y.shape[3], device=device)
    norm = y.shape[1] * y.shape[2], 2, weight, bias, EPS
    got = fused.norm_table((partials,), norm[:1], *norm[1:])
    want = fused.norm_table((fused.tensor_partials(y.double()),), norm[:1], *norm[1:])
    assert relative_error(got[:, 0], want[:, 0]) < 2**-23
    assert relative_error(got[:, 1], want[:, 1]) < 2e-5
