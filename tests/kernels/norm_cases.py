"""What the tests of the fused network's group norm share: inputs, one tensor or the two halves of
a concat, and what the reference makes of them."""

import pytest
import torch

from triton_kernels import reference

EPS = 1e-5

CASES = [
    pytest.param((2, 4, 4), (64,), (4,), 32, id="two-channels-a-group"),
    pytest.param((2, 3, 5), (40, 24), (5, 3), 8, id="two-halves"),
    pytest.param((1, 2, 6), (28, 20), (3, 4), 4, id="a-group-over-the-border"),
    pytest.param((1, 2, 2), (192, 128), (2, 1), 32, id="ten-channels-a-group-over-the-border"),
    pytest.param((1, 4, 4), (64, 64), (8, 4), 32, id="programs-of-one-half"),
    pytest.param((1, 4, 4), (48, 80), (4, 8), 32, id="a-program-over-the-border"),
    pytest.param((2, 4, 4), (66, 62), (8, 1), 32, id="a-group-of-a-program-over-the-border"),
    pytest.param((3, 1, 1), (10,), (1,), 2, id="one-pixel"),
    pytest.param((2, 3, 3), (7,), (3,), 7, id="odd-channels-each-a-group"),
    pytest.param((1, 5, 7), (5, 131), (7, 1), 1, id="one-group-ragged"),
    pytest.param((1, 30, 8), (66,), (80,), 3, id="more-tiles-than-a-block"),
    pytest.param((1, 17, 19), (3,), (1,), 1, id="several-chunks-ragged"),
    pytest.param((0, 4, 4), (8, 8), (2, 1), 4, id="empty-batch"),
]

MODEL_CASES = [
    ((32, 64, 64), (64,), (32,)),
    ((8, 64, 64), (128, 64), (8, 32)),
    ((32, 32, 32), (128,), (8,)),
    ((8, 32, 32), (192, 128), (2, 8)),
    ((32, 16, 16), (192,), (2,)),
    ((8, 16, 16), (256, 192), (1, 2)),
    ((32, 8, 8), (256,), (1,)),
    ((128, 8, 8), (256, 256), (1, 1)),
]


def partials_of(x, k, second=None):
    """What the epilogue of a convolution leaves: sums over each of k tiles of x and of its squared
    deviations, or, given a second tensor, of x and of x times the second."""
    n, h, w, c = x.shape
    tiles = x.double().reshape(n, k, h * w // k, c)
    other = (tiles - tiles.mean(2, keepdim=True)).square()
    if second is not None:
        other = tiles * second.double().reshape(tiles.shape)
    return torch.stack((tiles.sum(2), other.sum(2)), 2).float()


def randn(*shape, dtype=torch.float32, device="cpu", offset=0.0):
    return (torch.randn(shape, device=device) + offset).to(dtype)


def make_halves(shape, channels, *, dtype=torch.float32, device="cpu", offset=0.0):
    """One or two tensors of these channels, weight and bias of them all."""
    torch.manual_seed(0)
    halves = [
        randn(*shape, c, dtype=dtype, device=device, offset=offset + i)
        for i, c in enumerate(channels)
    ]
    return halves, *torch.randn(2, sum(channels), device=device)


def second_half(halves):
    return halves[1] if len(halves) == 2 else None


def relative_error(got, exact):
    exact = exact.double()
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def assert_near(name, got, exact, low=None, floor=2e-6):
    """At most twice as far from float64 as the same in the tensors' precision; the floor is a few
    float32 roundings."""
    budget = floor if low is None else floor + 2 * relative_error(low, exact)
    assert relative_error(got, exact) <= budget, (
        f"{name}: {relative_error(got, exact):.2e} over {budget:.2e}"
    )


def reference_forward(halves, groups, weight, bias, activation, dtype=None, **film):
    """The reference over the concatenation."""
    film = {name: None if p is None else p.to(dtype or p.dtype) for name, p in film.items()}
    return reference.group_norm(
        torch.cat(halves, -1).to(dtype or halves[0].dtype),
        groups,
        weight.to(dtype or weight.dtype),
        bias.to(dtype or bias.dtype),
        eps=EPS,
        activation=activation,
        **film,
    )


def make_case(
    shape, channels, groups, *, film=False, dtype=torch.float32, device="cpu", offset=0.0
):
    """Arguments of `reference_backward`, and of what is compared with it."""
    halves, weight, bias = make_halves(shape, channels, dtype=dtype, device=device, offset=offset)
    dz = randn(*shape, sum(channels), dtype=dtype, device=device)
    adds = [randn(*x.shape, dtype=dtype, device=device) for x in (*halves, halves[0])]
    names = ("scale", "shift") if film else ()
    film = {name: randn(shape[0], sum(channels), device=device) for name in names}
    return halves, groups, weight, bias, dz, adds, film


def reference_backward(halves, groups, weight, bias, dz, adds, film, dtype=None):
    """Every gradient, all tensors first converted to `dtype`, if one is given."""
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (*halves, weight, bias)]
    film = {k: v.to(dtype or v.dtype).detach().requires_grad_() for k, v in film.items()}
    *xs, w, b = leaves
    z = reference_forward(xs, groups, w, b, "identity", dtype, **film)
    grads = torch.autograd.grad(z, leaves + list(film.values()), dz.to(z.dtype))
    dx, (d_weight, d_bias, *d_film) = list(grads[: len(xs)]), grads[len(xs) :]
    result = {"weight": d_weight, "bias": d_bias} | dict(zip(film, d_film, strict=True))
    if len(xs) == 1:
        result |= {"emb": dx[0].double().sum((1, 2)), "conv_bias": dx[0].double().sum((0, 1, 2))}
    dx = [d + add.to(d.dtype) for d, add in zip(dx, adds, strict=False)]
    dx[0] = dx[0] + adds[-1].to(dx[0].dtype)
    result |= {f"dx{i + 1}": d for i, d in enumerate(dx)}
    return result | {"sums": dx[0].double().sum((0, 1, 2))}
