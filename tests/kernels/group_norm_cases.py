"""What the tests of group_norm share: inputs, how it is made to take a way, and what is allowed."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.norm import multi_pass, pass_grid, passes
from triton_kernels.norm.group_norm import group_norm
from triton_kernels.runtime.device import Device

from .taken import take

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

NAMES = ("y", "dx", "d_weight", "d_bias", "d_scale", "d_shift")


_KERNELS = {"stream": "multi_pass", "resident": "single_program", "cluster": "cluster"}


def force(path, monkeypatch):
    """Take images through "stream", "resident" or "cluster"."""
    take(monkeypatch, **dict.fromkeys(("group_norm", "group_norm_bwd"), _KERNELS[path]))


@pytest.fixture(params=["stream", "resident"], name="path")
def each_way(request, monkeypatch):
    """The test runs twice, once by each way through group_norm."""
    force(request.param, monkeypatch)
    return request.param


def make_case(shape, *, affine=True, modulated=True, offset=0.0, dtype=torch.float32, device="cpu"):
    """x, weight, bias, scale, shift and dy; parameters stay float32 and scale, shift follow x."""
    torch.manual_seed(0)
    n, _, _, c = shape
    x = (torch.randn(shape, device=device) + offset).to(dtype)
    dy = torch.randn(shape, device=device).to(dtype)
    params = [torch.randn(c, device=device) if affine else None for _ in range(2)]
    params += [torch.randn(n, c, device=device).to(dtype) if modulated else None for _ in range(2)]
    return x, params, dy


def run(function, x, params, dy, groups, act, dtype=None):
    """Output and gradients; every tensor first converted to `dtype`, if one is given."""
    leaves = [
        None if t is None else t.to(dtype or t.dtype).detach().requires_grad_()
        for t in (x, *params)
    ]
    x, weight, bias, scale, shift = leaves
    y = function(x, groups, weight, bias, activation=act, scale=scale, shift=shift)
    present = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(y, present, dy.to(y.dtype)))
    return [y.detach()] + [None if t is None else next(grads) for t in leaves]


def relative_error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def of_two(function, c1):
    """`function` of x in two halves, the first of c1 channels; gradients are of the whole x."""

    def halves(x, *args, **kwargs):
        x1, x2 = x[..., :c1].contiguous(), x[..., c1:].contiguous()
        return function(x1, *args, x2=x2, **kwargs)

    return halves


def check(x, params, dy, groups, act, floor=2e-6, c1=None):
    """Each result has its tensor's dtype and is at most twice as far from float64 as PyTorch at the
    same precision is; the floor is a few float32 roundings. With c1 x is handed over in halves."""
    ours = group_norm if c1 is None else of_two(group_norm, c1)
    theirs = reference.group_norm if c1 is None else of_two(reference.group_norm, c1)
    exact = run(theirs, x, params, dy, groups, act, torch.float64)
    low = run(theirs, x, params, dy, groups, act)
    got = run(ours, x, params, dy, groups, act)
    for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
        if c is None:
            continue
        assert a.dtype == b.dtype, name
        error, budget = relative_error(a, c), 2 * relative_error(b, c) + floor
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def of_passes(config, monkeypatch):
    """Every pass over memory has this configuration."""
    monkeypatch.setattr(multi_pass, "_config", lambda *_: config)
    monkeypatch.setattr(passes, "_APPLY", config)
    monkeypatch.setattr(passes, "_dx_config", lambda *_: config)


def several_tiles(monkeypatch):
    monkeypatch.setattr(Device, "busy", 1)
    force("stream", monkeypatch)
    of_passes(pass_grid.PassConfig(256, 4, 4), monkeypatch)
