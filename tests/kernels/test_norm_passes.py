"""norm_passes and norm_tables against float64 compositions: statistics from tiles, the apply pass,
and the way back through autograd."""

import pytest
import torch

from triton_kernels import column_sum, norm_passes, norm_tables, reference
from triton_kernels.activations import ACTIVATIONS

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs and workspaces start as NaN, so an element that no program writes cannot pass."""
    for module in (norm_passes, norm_tables, column_sum):
        monkeypatch.setattr(
            module, "_empty", lambda shape, **kw: torch.full(shape, torch.nan, **kw)
        )


def _partials(x, k, second=None):
    """What the epilogue of a convolution leaves: sums over each of k tiles of x and of its squared
    deviations, or, given a second tensor, of x and of x times the second."""
    n, h, w, c = x.shape
    tiles = x.double().reshape(n, k, h * w // k, c)
    other = (tiles - tiles.mean(2, keepdim=True)).square()
    if second is not None:
        other = tiles * second.double().reshape(tiles.shape)
    return torch.stack((tiles.sum(2), other.sum(2)), 2).float()


def _randn(*shape, dtype=torch.float32, device="cpu", offset=0.0):
    return (torch.randn(shape, device=device) + offset).to(dtype)


def _halves(shape, channels, *, dtype=torch.float32, device="cpu", offset=0.0):
    """One or two tensors of these channels, weight and bias of them all."""
    torch.manual_seed(0)
    halves = [
        _randn(*shape, c, dtype=dtype, device=device, offset=offset + i)
        for i, c in enumerate(channels)
    ]
    return halves, *torch.randn(2, sum(channels), device=device)


def _table(halves, ks, groups, weight, bias, **film):
    partials = tuple(_partials(x, k) for x, k in zip(halves, ks, strict=True))
    pixels = tuple(x.shape[1] * x.shape[2] for x in halves)
    return norm_passes.norm_table(partials, pixels, groups, weight, bias, EPS, **film)


def _second(halves):
    return halves[1] if len(halves) == 2 else None


def _error(got, exact):
    exact = exact.double()
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def _close(name, got, exact, low=None, floor=2e-6):
    """At most twice as far from float64 as the same in the tensors' precision; the floor is a few
    float32 roundings."""
    budget = floor if low is None else floor + 2 * _error(low, exact)
    assert _error(got, exact) <= budget, f"{name}: {_error(got, exact):.2e} over {budget:.2e}"


def _forward(halves, groups, weight, bias, activation, dtype=None, **film):
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


_CASES = [
    pytest.param((2, 4, 4), (64,), (4,), 32, id="two-channels-a-group"),
    pytest.param((2, 3, 5), (40, 24), (5, 3), 8, id="two-halves"),
    pytest.param((1, 2, 6), (28, 20), (3, 4), 4, id="a-group-over-the-border"),
    pytest.param((1, 2, 2), (192, 128), (2, 1), 32, id="ten-channels-a-group-over-the-border"),
    pytest.param((3, 1, 1), (10,), (1,), 2, id="one-pixel"),
    pytest.param((2, 3, 3), (7,), (3,), 7, id="odd-channels-each-a-group"),
    pytest.param((1, 5, 7), (5, 131), (7, 1), 1, id="one-group-ragged"),
    pytest.param((1, 30, 8), (66,), (80,), 3, id="more-tiles-than-a-block"),
    pytest.param((1, 17, 19), (3,), (1,), 1, id="several-chunks-ragged"),
    pytest.param((0, 4, 4), (8, 8), (2, 1), 4, id="empty-batch"),
]


@pytest.mark.parametrize(("shape", "channels", "ks", "groups"), _CASES)
def test_forward(shape, channels, ks, groups, device):
    halves, weight, bias = _halves(shape, channels, device=device)
    table = _table(halves, ks, groups, weight, bias)
    a = norm_passes.apply(halves[0], _second(halves), table, "silu")
    low, exact = (
        _forward(halves, groups, weight, bias, "silu", dtype) for dtype in (None, torch.float64)
    )
    assert a.shape == exact.shape and a.dtype == halves[0].dtype
    _close("a", a, exact, low)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, device):
    halves, weight, bias = _halves((1, 3, 3), (12,), device=device)
    a = norm_passes.apply(halves[0], None, _table(halves, (1,), 4, weight, bias), act)
    low, exact = (_forward(halves, 4, weight, bias, act, dtype) for dtype in (None, torch.float64))
    _close("a", a, exact, low)


# --- backward: dz is the gradient at the affine output, so that autograd takes no activation ------


def _case(shape, channels, groups, *, film=False, dtype=torch.float32, device="cpu", offset=0.0):
    """Arguments of the two functions below, the tiles apart."""
    halves, weight, bias = _halves(shape, channels, dtype=dtype, device=device, offset=offset)
    dz = _randn(*shape, sum(channels), dtype=dtype, device=device)
    adds = [_randn(*x.shape, dtype=dtype, device=device) for x in (*halves, halves[0])]
    names = ("scale", "shift") if film else ()
    film = {name: _randn(shape[0], sum(channels), device=device) for name in names}
    return halves, groups, weight, bias, dz, adds, film


def _autograd(halves, groups, weight, bias, dz, adds, film, dtype=None):
    """Every gradient, all tensors first converted to `dtype`, if one is given."""
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (*halves, weight, bias)]
    film = {k: v.to(dtype or v.dtype).detach().requires_grad_() for k, v in film.items()}
    *xs, w, b = leaves
    z = _forward(xs, groups, w, b, "identity", dtype, **film)
    grads = torch.autograd.grad(z, leaves + list(film.values()), dz.to(z.dtype))
    dx, (d_weight, d_bias, *d_film) = list(grads[: len(xs)]), grads[len(xs) :]
    result = {"weight": d_weight, "bias": d_bias} | dict(zip(film, d_film, strict=True))
    if len(xs) == 1:
        result |= {"emb": dx[0].double().sum((1, 2)), "conv_bias": dx[0].double().sum((0, 1, 2))}
    dx = [d + add.to(d.dtype) for d, add in zip(dx, adds, strict=False)]
    dx[0] = dx[0] + adds[-1].to(dx[0].dtype)
    result |= {f"dx{i + 1}": d for i, d in enumerate(dx)}
    return result | {"sums": dx[0].double().sum((0, 1, 2))}


def _kernels(halves, groups, weight, bias, dz, adds, film, ks, accumulate=False):
    """The same from norm_table, norm_grad_table and norm_dx. Gradients begin as ones."""
    n, h, w, c = dz.shape
    one = len(halves) == 1
    table = _table(halves, ks, groups, weight, bias, **film)
    mean, rstd = table[:, None, None, 0].double(), table[:, None, None, 1].double()
    xhat = (torch.cat(halves, -1) - mean) * rstd
    got = {name: torch.ones_like(weight) for name in ("weight", "bias", "conv_bias")}
    got["sums"] = torch.ones(halves[0].shape[-1], device=dz.device)
    got |= {name: torch.ones(n, 2 * c + 3, device=dz.device)[:, 3 : c + 3] for name in film}
    options = {f"grad_{name}_out": got[name] for name in film}
    if film:
        options |= {"weight": weight, "bias": bias, "scale": film["scale"]}
    if one:
        got["emb"] = torch.ones(n, 2 * c, device=dz.device, dtype=dz.dtype)[:, c:]
        options |= {
            "input_partials": _partials(halves[0], ks[0]),
            "emb_grad_out": got["emb"],
            "bias_grad_out": got["conv_bias"],
        }
    coeff = norm_passes.norm_grad_table(
        _partials(dz, ks[-1], xhat),
        table,
        h * w,
        groups,
        got["weight"],
        got["bias"],
        accumulate=accumulate,
        **options,
    )
    add1, add2, second = adds[0], None if one else adds[1], adds[-1]
    *dx, rows = norm_passes.norm_dx(
        dz, halves[0], _second(halves), coeff, add1, add2, second, sums=True
    )
    norm_passes.bias_grad(rows, got["sums"], accumulate)
    return got | {f"dx{i + 1}": d for i, d in enumerate(dx) if d is not None}


def _check_backward(case, ks, floor=2e-6):
    low, exact = _autograd(*case), _autograd(*case, dtype=torch.float64)
    got = _kernels(*case, ks)
    assert got["dx1"].dtype == case[0][0].dtype
    sizes = exact["dx1"].abs().sum((1, 2))
    # sums of dx vanish where a channel is a group: measure them by what was summed
    scales = exact | {"emb": sizes, "conv_bias": sizes.sum(0), "sums": sizes.sum(0)}
    for name, c in exact.items():
        scale = scales[name].norm().clamp_min(1e-30)
        error, budget = (((t[name].double() - c).norm() / scale).item() for t in (got, low))
        budget = 2 * budget + floor
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize(("shape", "channels", "ks", "groups"), _CASES)
def test_backward(shape, channels, ks, groups, device):
    _check_backward(_case(shape, channels, groups, device=device), ks)


def test_backward_with_scale_and_shift(device):
    _check_backward(_case((3, 4, 3), (12,), 3, film=True, device=device), (4,))
