"""What the tests of the kernels of inference at a small batch share."""

import pytest
import torch

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


EPS = 1e-5


def randn(*shape, dtype=torch.float32, device="cpu", offset=0.0):
    return (torch.randn(shape, device=device) + offset).to(dtype)


def close(got, exact, low, scale=2.0, rest=1e-6):
    """Within twice the error of the reference in the same precision, against float64."""
    assert torch.isfinite(got).all()
    exact = exact.double()
    error = (got.double() - exact).norm()
    assert error <= scale * (low.double() - exact).norm() + rest * exact.norm(), error


def filters(co, ci, r, s, dtype, device):
    weight = randn(co, ci, r, s, dtype=dtype, device=device) / (ci * r * s) ** 0.5
    return weight.contiguous(memory_format=torch.channels_last)


def conv_inputs(case, dtype, device):
    n, h, w, ci, co, r, s, extras, splits = case
    torch.manual_seed(0)
    x = randn(n, h, w, ci, dtype=dtype, device=device)
    weight = filters(co, ci, r, s, dtype, device)
    wide = filters(co, max(sum(extras), 1), 1, 1, dtype, device)[:, :, 0, 0]
    columns = wide.split(list(extras), dim=1) if extras else ()
    extra = [
        (randn(n, h, w, c, dtype=dtype, device=device), part)
        for c, part in zip(extras, columns, strict=True)
    ]
    return x, weight, extra, splits


def as_double(*tensors):
    return [None if x is None else x.double() for x in tensors]


def partials_of(x, k):
    n, h, w, c = x.shape
    tiles = x.double().reshape(n, k, h * w // k, c)
    m2 = (tiles - tiles.mean(2, keepdim=True)).square()
    return torch.stack((tiles.sum(2), m2.sum(2)), 2).float()
