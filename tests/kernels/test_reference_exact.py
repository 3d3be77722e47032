"""The reference ops, which are the specification, against float64 at inputs that are hard on
float32: large means, tiny deviations, one pixel, one channel a group, one sample, none."""

import pytest
import torch

from triton_kernels import GroupNorm, reference
from triton_kernels.runtime import layout

NAMES = ("y", "dx", "d_weight", "d_bias", "d_scale", "d_shift")

# a few roundings to 24 bits, in norms over everything
ROUNDINGS = 2e-6


def relative_error(got, exact, size=None):
    """The norm of the difference over that of `exact`, or over a size that its terms have."""
    size = exact.norm() if size is None else size
    return ((got.double() - exact).norm() / size.clamp_min(1e-30)).item()


# --- group_norm -----------------------------------------------------------------------------------


def two_pass_norm(x, groups, weight, bias, *, eps=1e-5, act="identity", scale, shift, fixed=False):
    """The definition, mean first: [N, H, W, C]. If statistics are `fixed` no gradient is theirs."""
    n, h, w, c = x.shape
    grouped = x.view(n, h * w, groups, c // groups)
    mean = grouped.mean((1, 3), keepdim=True)
    variance = (grouped - mean).square().mean((1, 3), keepdim=True)
    if fixed:
        mean, variance = mean.detach(), variance.detach()
    z = ((grouped - mean) / (variance + eps).sqrt()).view(x.shape) * weight + bias
    return reference.ACTIVATION_FUNCTIONS[act](z * (1 + scale) + shift)


def exact_norm(case, groups, **options):
    """Output and gradients in float64, and the sizes of the terms that each of them is a sum of."""
    x, weight, bias, scale, shift, dy = (t.double() for t in case)
    params = weight, bias, scale[:, None, None], shift[:, None, None]
    # a leaf of its own a pixel, so that gradients come as terms
    leaves = [t.expand(x.shape).clone().requires_grad_() for t in (x, *params)]
    film = {"scale": leaves[3], "shift": leaves[4]}
    y, still = (
        two_pass_norm(leaves[0], groups, *leaves[1:3], **film, fixed=fixed, **options)
        for fixed in (False, True)
    )
    terms = torch.autograd.grad(still, leaves, dy)
    (dx,) = torch.autograd.grad(y, leaves[0], dy)
    shapes = [t.shape for t in (x, *params)]
    sums = [t.sum_to_size(s) for t, s in zip(terms, shapes, strict=True)]
    sizes = [t.abs().sum_to_size(s).norm() for t, s in zip(terms, shapes, strict=True)]
    exact = [y.detach(), dx, *(s.view(t.shape) for s, t in zip(sums[1:], case[1:5], strict=True))]
    return list(zip(exact, [y.detach().norm(), *sizes], strict=True))


def norm_results(function, case, groups, activation="identity", eps=1e-5):
    """Output and gradients of `function`."""
    leaves = [t.detach().requires_grad_() for t in case[:5]]
    x, weight, bias, scale, shift = leaves
    options = {"scale": scale, "shift": shift, "activation": activation, "eps": eps}
    y = function(x, groups, weight, bias, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, case[5].to(y.dtype))]


def norm_case(shape, mean=0.0, deviation=1.0, seed=0):
    """x, weight, bias, scale, shift and dy."""
    draw = torch.Generator().manual_seed(seed)
    n, _, _, c = shape
    x = torch.randn(shape, generator=draw) * deviation + mean
    shapes = (c,), (c,), (n, c), (n, c), shape
    return x, *(torch.randn(s, generator=draw) for s in shapes)


def check_norm(case, groups, act="identity", eps=1e-5, function=reference.group_norm):
    exact = exact_norm(case, groups, act=act, eps=eps)
    got = norm_results(function, case, groups, act, eps)
    for name, a, (c, size) in zip(NAMES, got, exact, strict=True):
        assert relative_error(a, c, size) < ROUNDINGS, name


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [(0, 1), (1e3, 1), (-1e5, 1), (1, 1e-4), (0, 1e-4), (1e-20, 1e-20)],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((2, 16, 17, 64), 32, id="two-channels-a-group"),
        pytest.param((2, 16, 16, 24), 3, id="eight-channels-a-group"),
        pytest.param((3, 5, 7, 6), 6, id="one-channel-a-group"),
        pytest.param((2, 5, 3, 7), 1, id="one-group"),
        pytest.param((1, 1, 1, 64), 8, id="one-pixel-of-one-sample"),
        pytest.param((4, 1, 1, 64), 2, id="one-pixel"),
        pytest.param((1, 31, 1, 10), 5, id="one-column"),
    ],
)
def test_norm(shape, groups, mean, deviation):
    check_norm(norm_case(shape, mean, deviation), groups, "silu")


def test_norm_of_groups_of_their_own_mean_and_of_two_tensors():
    """Means of 1e3 and -1e3, and groups across the border that have both."""
    x, *rest = norm_case((2, 9, 7, 24))
    x += torch.tensor([1e3, -1e3]).repeat_interleave(12)

    def of_two(x, *args, **options):
        halves = x[..., :16].contiguous(), x[..., 16:].contiguous()
        return reference.group_norm(halves[0], *args, x2=halves[1], **options)

    for groups in (2, 3):
        for function in (reference.group_norm, of_two):
            check_norm((x, *rest), groups, "mish", function=function)


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_norm_of_a_large_mean_with_one_leaf(trained):
    """If x is frozen PyTorch's backward is gone round."""
    case = norm_case((2, 9, 7, 24), 1e3)
    x, weight, bias, scale, shift, dy = case
    leaf = {"x": x, "weight": weight}[trained].requires_grad_()
    y = reference.group_norm(x, 4, weight, bias, scale=scale, shift=shift)
    got = y.detach(), torch.autograd.grad(y, leaf, dy)[0]
    results = exact_norm([t.detach() for t in case], 4)
    for a, (c, size) in zip(got, (results[0], results[1 if trained == "x" else 2]), strict=True):
        assert relative_error(a, c, size) < ROUNDINGS


def test_norm_of_groups_of_a_single_number():
    """Variance 0: what is left is the bias, and gradients of x and weight are 0."""
    x, weight, bias, *_ = norm_case((1, 1, 1, 64), 1e3)
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = reference.group_norm(x, 64, weight, bias)
    assert torch.equal(y.flatten(), bias)
    dx, d_weight = torch.autograd.grad(y.sum(), leaves)
    assert dx.abs().max() < 1e-4 and not d_weight.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_of_a_low_precision(dtype):
    """x and dy are rounded on the way in, which is no error of the op, and y and dx on the way out,
    by half a unit in the last place."""
    x, *params, dy = norm_case((2, 9, 7, 24), 100)
    case = (x.to(dtype), *params, dy.to(dtype))
    half_unit = torch.finfo(dtype).eps / 2
    got = norm_results(reference.group_norm, case, 4, "silu")
    assert got[0].dtype == got[1].dtype == dtype
    for name, a, (c, size) in zip(NAMES, got, exact_norm(case, 4, act="silu"), strict=True):
        rounding = half_unit if a.dtype == dtype else 0
        assert relative_error(a, c, size) < ROUNDINGS + rounding, name


@pytest.mark.parametrize("shape", [(0, 4, 4, 8), (2, 0, 3, 8)], ids=["no-samples", "no-pixels"])
def test_norm_of_nothing(shape):
    y, dx, *grads = norm_results(reference.group_norm, norm_case(shape), 2)
    assert y.shape == dx.shape == shape
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("pixels", [(9, 7), (1, 1)], ids=str)
def test_module_on_a_cpu_of_a_large_mean(memory, pixels, monkeypatch):
    """Where there are no kernels the module is the reference, for tensors of either layout."""
    monkeypatch.setattr(layout, "_INTERPRETED", False)
    x, weight, bias, scale, shift, dy = norm_case((2, *pixels, 24), 1e3)
    case = x, weight, bias, torch.zeros_like(scale), torch.zeros_like(shift), dy
    norm = GroupNorm(4, 24)
    norm.load_state_dict({"weight": weight, "bias": bias})
    leaf = x.permute(0, 3, 1, 2).contiguous(memory_format=memory).requires_grad_()
    y = norm(leaf)
    grads = torch.autograd.grad(y, (leaf, norm.weight, norm.bias), dy.permute(0, 3, 1, 2))
    for a, (c, size) in zip((y.detach(), *grads), exact_norm(case, 4), strict=False):
        a = a.permute(0, 2, 3, 1) if a.ndim == 4 else a
        assert relative_error(a, c, size) < ROUNDINGS
