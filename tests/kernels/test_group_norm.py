"""group_norm against the reference in float64: the output and every gradient."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.norm.group_norm import group_norm

from .group_norm_cases import (  # noqa: F401  fixtures, and a mark for every test here
    NAMES,
    check,
    each_way,
    force,
    make_case,
    of_two,
    pytestmark,
    relative_error,
    run,
    several_tiles,
)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, path, device):
    check(*make_case((2, 5, 7, 24), device=device), 4, act)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((2, 3, 5, 64), 32, id="two-channels-a-group"),
        pytest.param((1, 3, 3, 192), 32, id="six-channels-a-group-three-blocks"),
        pytest.param((1, 2, 3, 320), 32, id="ten-channels-a-group-straddling-a-block"),
        pytest.param((2, 3, 3, 7), 7, id="odd-channels-each-a-group"),
        pytest.param((2, 3, 3, 7), 1, id="layer-norm-over-the-image"),
        pytest.param((3, 1, 1, 10), 2, id="one-pixel"),
        pytest.param((1, 5, 1, 3), 3, id="one-column"),
        pytest.param((1, 1, 1, 136), 1, id="one-pixel-masked-second-block"),
        pytest.param((2, 37, 41, 3), 1, id="several-chunks-ragged"),
        pytest.param((1, 2, 2, 520), 1, id="partials-longer-than-a-finalize-tile"),
        pytest.param((0, 4, 4, 8), 2, id="empty-batch"),
    ],
)
def test_shapes(shape, groups, path, device):
    check(*make_case(shape, device=device), groups, "silu")


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("affine", [False, True], ids=["no-affine", "affine"])
def test_optional_arguments(affine, modulated, path, device):
    case = make_case((2, 4, 3, 12), affine=affine, modulated=modulated, device=device)
    check(*case, 3, "mish")


@pytest.mark.parametrize("present", range(4), ids=["weight", "bias", "scale", "shift"])
def test_one_argument_alone(present, path, device):
    x, params, dy = make_case((2, 4, 3, 12), device=device)
    params = [p if i == present else None for i, p in enumerate(params)]
    check(x, params, dy, 3, "gelu_tanh")


@pytest.mark.parametrize("ops", [group_norm, reference.group_norm], ids=["triton", "reference"])
def test_a_group_of_a_single_number(ops, device):
    """Its deviation is 0, so what is left is the bias; F.group_norm refuses it. PyTorch computes
    x rstd - mean rstd with rstd = 316, each rounded."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 3, device=device, requires_grad=True)
    weight, bias = torch.randn(2, 3, device=device, requires_grad=True)
    y = ops(x, 3, weight, bias)
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=1e-4)
    dx, d_weight, d_bias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert dx.abs().max() < 1e-3 and d_weight.abs().max() < 1e-4
    assert torch.equal(d_bias, torch.ones_like(bias))


def test_fp16_with_float32_parameters(path, device):
    check(*make_case((2, 9, 5, 40), dtype=torch.float16, device=device), 8, "silu")


# --- two tensors as one --------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_of_two(act, path, device):
    """Groups of six: the third has four channels in the first half and two in the second."""
    check(*make_case((2, 5, 7, 24), device=device), 4, act, c1=16)


@pytest.mark.parametrize(
    ("shape", "groups", "c1"),
    [
        pytest.param((2, 3, 5, 20), 2, 4, id="the-first-group-has-all-of-x1"),
        pytest.param((1, 3, 3, 320), 32, 192, id="ten-channels-a-group-straddling"),
        pytest.param((2, 3, 3, 7), 1, 4, id="one-group-odd-channels"),
        pytest.param((2, 3, 3, 7), 7, 6, id="a-half-of-one-channel"),
        pytest.param((3, 1, 1, 10), 2, 3, id="one-pixel"),
        pytest.param((2, 37, 41, 5), 1, 2, id="several-chunks-ragged"),
        pytest.param((1, 2, 2, 264), 1, 8, id="several-blocks-in-x2"),
        pytest.param((0, 4, 4, 8), 2, 6, id="empty-batch"),
    ],
)
def test_shapes_of_two(shape, groups, c1, path, device):
    check(*make_case(shape, device=device), groups, "silu", c1=c1)


def test_two_of_a_mean_of_1e3(path, device):
    """And of -1e3 in the second half, so that a group across the border has a deviation of 1e3."""
    x, params, dy = make_case((2, 20, 19, 12), offset=1e3, modulated=False, device=device)
    x[..., 6:] -= 2e3
    exact = run(reference.group_norm, x, params, dy, 3, "identity", torch.float64)
    got = run(of_two(group_norm, 6), x, params, dy, 3, "identity")
    for name, a, c in zip(NAMES[:4], got, exact, strict=False):
        assert relative_error(a, c) < 1e-4, name


def test_two_in_fp16_in_chunks_of_several_tiles(device, monkeypatch):
    several_tiles(monkeypatch)
    case = make_case((2, 13, 11, 40), dtype=torch.float16, device=device)
    check(*case, 4, "silu", c1=24)


@pytest.mark.parametrize("frozen", ["x", "x2", "both"])
def test_two_of_which_one_is_frozen(frozen, path, device):
    (x1, (weight, *_), _), (x2, _, _) = (
        make_case((2, 3, 3, c), device=device, modulated=False) for c in (6, 10)
    )
    leaves = [x1.requires_grad_(), x2.requires_grad_(), torch.ones(16, device=device)]
    leaves[2].requires_grad_()
    dy = torch.randn(2, 3, 3, 16, device=device)
    full = torch.autograd.grad(group_norm(x1, 4, leaves[2], x2=x2, activation="silu"), leaves, dy)
    kept = [i for i, name in enumerate(("x", "x2", "weight")) if name != frozen]
    kept = [2] if frozen == "both" else kept
    a, b, w = (t if i in kept else t.detach() for i, t in enumerate(leaves))
    y = group_norm(a, 4, w, x2=b, activation="silu")
    got = torch.autograd.grad(y, [leaves[i] for i in kept], dy)
    assert all(torch.equal(g, full[i]) for g, i in zip(got, kept, strict=True))


def test_chunks_of_several_tiles(device, monkeypatch):
    """What large batches get: the launchers cut chunks down while there are too few programs."""
    several_tiles(monkeypatch)
    check(*make_case((2, 13, 11, 24), device=device), 4, "silu")


@pytest.mark.parametrize("way", ["stream", "several-tiles", "resident"])
def test_large_mean(way, device, monkeypatch):
    """Mean 1e3, deviation 1: float32 holds the mean to 3e-5 of a deviation; no more is lost.

    A first pixel far off the rest must not matter either, as it would for sums shifted by it.
    """
    if way == "several-tiles":
        several_tiles(monkeypatch)
    else:
        force(way, monkeypatch)
    x, params, dy = make_case((2, 20, 19, 12), offset=1e3, modulated=False, device=device)
    x[:, 0, 0] = 0
    exact = run(reference.group_norm, x, params, dy, 3, "identity", torch.float64)
    got = run(group_norm, x, params, dy, 3, "identity")
    for name, a, c in zip(NAMES[:4], got, exact, strict=False):
        assert relative_error(a, c) < 1e-4, name


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the mean of nothing
def test_no_pixels(device):
    x = torch.empty(2, 0, 3, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = group_norm(x, 2, weight)
    y.backward(torch.empty_like(y))
    assert y.shape == x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_constant_input_gives_the_offset(path, device):
    """Variance 0: rstd is 1 / sqrt(eps), xhat is 0."""
    x = torch.full((2, 3, 3, 8), 1234.5, device=device)
    bias = torch.arange(8.0, device=device)
    assert torch.equal(group_norm(x, 2, None, bias), bias.expand(x.shape))


def test_scale_and_shift_as_halves_of_an_embedding(path, device):
    """`chunk` leaves rows 2C apart; no copy is needed."""
    x, (weight, bias, _, _), dy = make_case((3, 2, 2, 8), device=device)
    embedding = torch.randn(3, 16, device=device)
    results = []
    for function, dtype in ((group_norm, torch.float32), (reference.group_norm, torch.float64)):
        leaf = embedding.to(dtype).requires_grad_()
        scale, shift = leaf.chunk(2, dim=1)
        y = function(x.to(dtype), 2, weight.to(dtype), bias.to(dtype), scale=scale, shift=shift)
        results.append((y, *torch.autograd.grad(y, leaf, dy.to(dtype))))
    for a, c in zip(*results, strict=True):
        assert relative_error(a.detach(), c.detach()) < 2e-6


def test_expanded_gradient(device):
    """`sum` hands back a gradient with zero strides."""
    x, _, _ = make_case((2, 3, 3, 8), device=device)
    leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
    (dx,) = torch.autograd.grad(group_norm(leaf, 2, activation="silu").sum(), leaf)
    (want,) = torch.autograd.grad(reference.group_norm(exact, 2, activation="silu").sum(), exact)
    assert relative_error(dx, want) < 1e-5


def test_frozen_input_or_parameters(path, device):
    """Only what needs a gradient gets one."""
    x, (weight, bias, scale, shift), dy = make_case((2, 3, 3, 8), device=device)
    full = run(group_norm, x, (weight, bias, scale, shift), dy, 2, "silu")
    leaf = weight.requires_grad_()
    y = group_norm(x, 2, leaf, bias, activation="silu", scale=scale, shift=shift)
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], full[2])
    leaf = x.requires_grad_()
    y = group_norm(leaf, 2, weight.detach(), bias, activation="silu", scale=scale, shift=shift)
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], full[1])


@pytest.mark.parametrize("trained", [0, 1], ids=["weight", "bias"])
def test_reference_of_a_frozen_input(trained):
    """PyTorch's backward would end the process."""
    x, (weight, bias, _, _), dy = make_case((2, 3, 3, 8))
    leaf = (weight, bias)[trained].requires_grad_()
    (got,) = torch.autograd.grad(reference.group_norm(x, 2, weight, bias), leaf, dy)
    xhat = reference.group_norm(x, 2)
    assert relative_error(got, (dy * (xhat if trained == 0 else 1)).sum((0, 1, 2))) < 1e-6


def test_same_bits_again(path, device):
    case = make_case((2, 37, 41, 3), device=device)
    first, second = (run(group_norm, *case, 1, "silu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_sample_does_not_depend_on_its_batch(path, device):
    """Bit for bit, when the images are cut alike."""
    x, (weight, bias, _, _), _ = make_case((3, 6, 5, 16), device=device)
    batch = group_norm(x, 4, weight, bias)
    assert torch.equal(batch[1:2], group_norm(x[1:2], 4, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"num_groups": 5}, "num_groups is 5; expected a divisor of the 8", id="groups"
        ),
        pytest.param({"num_groups": 0}, "num_groups is 0", id="no-groups"),
        pytest.param({"activation": "swish"}, "'swish'; expected one of identity", id="activation"),
        pytest.param({"weight": torch.ones(4)}, r"weight has shape \(4,\)", id="weight"),
        pytest.param({"scale": torch.ones(1, 8)}, r"scale has shape \(1, 8\)", id="scale"),
        pytest.param({"bias": torch.ones(8).double()}, "bias is torch.float64", id="dtype"),
        pytest.param({"shift": torch.ones(8, 2).T}, "shift has strides", id="strides"),
        pytest.param({"x": torch.ones(2, 8, 4, 4).permute(0, 2, 3, 1)}, "NHWC", id="layout"),
        pytest.param({"x2": torch.ones(2, 4, 3, 8)}, r"x2 has shape \(2, 4, 3, 8\)", id="x2"),
        pytest.param({"x2": torch.ones(2, 4, 4, 1)}, "divisor of the 9", id="groups-of-two"),
        pytest.param({"x2": torch.ones(2, 4, 4, 2).half()}, "x2 is torch.float16", id="x2-dtype"),
    ],
)
def test_errors(change, message, device):
    arguments = {"x": torch.ones(2, 4, 4, 8), "num_groups": 2} | change
    arguments = {k: v.to(device) if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        group_norm(**arguments)
