"""Norms with inline statistics against float64 through autograd, and against the two launches."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.noise.dropout import Mask
from triton_kernels.norm import inline_statistics, passes as norm_passes, tables as norm_tables
from triton_kernels.norm.from_partials import SumsConfig
from triton_kernels.norm.inline_statistics import NORM_APPLY, OneLaunch
from triton_kernels.norm.tables import Statistics
from triton_kernels.reductions import row_sums
from triton_kernels.runtime.device import Device

from .norm_cases import (
    CASES,
    EPS,
    MODEL_CASES,
    assert_near,
    make_case,
    make_halves,
    partials_of,
    reference_backward,
    reference_forward,
    second_half,
)

ONE, TWO = OneLaunch(), NORM_APPLY.kernel("two_launches").config()


def _apply(halves, ks, groups, weight, bias, config=ONE, scale=None, shift=None, **options):
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=True))
    pixels = tuple(x.shape[1] * x.shape[2] for x in halves)
    norm = Statistics(partials, pixels, groups, weight, bias, EPS, scale, shift)
    xs = halves[0], second_half(halves)
    return inline_statistics.norm_apply(*xs, norm, "silu", config=config, **options)


def _check_forward(shape, channels, ks, groups, device, dtype=torch.float32, floor=2e-6, **options):
    halves, weight, bias = make_halves(shape, channels, device=device, dtype=dtype)
    a, table = _apply(halves, ks, groups, weight, bias, **options)
    again, _ = _apply(halves, ks, groups, weight, bias, **options)
    low, exact = (
        reference_forward(halves, groups, weight, bias, "silu", d) for d in (None, torch.float64)
    )
    assert a.dtype == dtype and torch.equal(a, again)
    assert_near("a", a, exact, low, floor=floor)
    _, expected = _apply(halves, ks, groups, weight, bias, config=TWO)
    assert_near("table", table, expected, floor=floor)


_FOLD_CASES = [
    *CASES,
    pytest.param((2, 4, 4), (192, 128), (2, 1), 32, id="ten-channels-a-group-in-blocks-of-64"),
    pytest.param((1, 4, 8), (256, 192), (2, 4), 32, id="fourteen-channels-a-group"),
]


@pytest.mark.parametrize(("shape", "channels", "ks", "groups"), _FOLD_CASES)
def test_forward(shape, channels, ks, groups, device):
    _check_forward(shape, channels, ks, groups, device)


@pytest.mark.parametrize("channels", [(40, 24), (12, 12)], ids=str)
def test_forward_of_an_upsampled_half(channels, device):
    """The bits of what is upsampled first."""
    (large, other), weight, bias = make_halves((2, 6, 8), channels, device=device)
    small = large[:, ::2, ::2].contiguous()
    large = reference.upsample_nearest2d(small)
    want, expected = _apply((large, other), (3, 2), 4, weight, bias, config=TWO)
    partials = partials_of(small, 3), partials_of(other, 2)
    norm = Statistics(partials, (12, 48), 4, weight, bias, EPS)
    made = inline_statistics.norm_apply_upsampled(small, other, norm, "silu")
    a, (table, second), made = made
    torch.testing.assert_close(table, expected)
    torch.testing.assert_close(a, want)
    assert torch.equal(second, table[..., channels[0] :]) and torch.equal(made, large)


def test_forward_of_several_tiles(device, monkeypatch):
    monkeypatch.setattr(norm_passes, "_PROGRAMS", 0)
    monkeypatch.setattr(inline_statistics, "sums_config", lambda _: SumsConfig(16, 64, 2, 4))
    _check_forward((2, 9, 11), (40, 24), (3, 1), 4, device)


def test_forward_with_scale_and_shift(device):
    halves, weight, bias = make_halves((3, 4, 6), (12,), device=device)
    scale, shift = torch.randn(2, 3, 2 * 12, device=device)[..., 5:17]
    a, _ = _apply(halves, (4,), 3, weight, bias, scale=scale, shift=shift)
    film = {"scale": scale, "shift": shift}
    low, exact = (
        reference_forward(halves, 3, weight, bias, "silu", d, **film) for d in (None, torch.double)
    )
    assert_near("a", a, exact, low)


@pytest.mark.parametrize("channels", [(12,), (12, 6)], ids=["one", "two-halves"])
def test_large_mean(channels, device):
    halves, weight, bias = make_halves((2, 20, 19), channels, device=device, offset=1e3)
    a, _ = _apply(halves, (19, 5)[: len(channels)], 3, weight, bias)
    assert_near(
        "a", a, reference_forward(halves, 3, weight, bias, "silu", torch.float64), floor=1e-4
    )


def test_dropout_takes_two_launches(device):
    halves, weight, bias = make_halves((2, 4, 4), (16,), device=device)
    mask = Mask(0.3, torch.tensor([7, 9], device=device), layer=2, first=1)
    got, _ = _apply(halves, (2,), 4, weight, bias, config=None, mask=mask)
    whole, _ = _apply(halves, (2,), 4, weight, bias, config=TWO)
    torch.testing.assert_close(got, reference.dropout(whole, 0.3, mask.rng, layer=2, first=1))


# --- backward -------------------------------------------------------------------------------------


def _backward(case, k, config=ONE, rows=True, in_place=False, kx=1, **options):
    """The gradients of `reference_backward`, added to ones, with those of the input's partials."""
    (x,), groups, weight, bias, dz, adds, film = case
    n, _, _, c = dz.shape
    table = norm_tables.norm_table(
        (partials_of(x, kx),), (x.shape[1] * x.shape[2],), groups, weight, bias, EPS, **film
    )
    xhat = (x - table[:, None, None, 0].double()) * table[:, None, None, 1].double()
    sums = row_sums.RowSums(torch.ones(4 * c, device=dz.device))
    got = dict(zip(("weight", "bias", "conv_bias", "sums"), sums.grad.split(c), strict=True))
    got |= {name: torch.ones(n, 2 * c + 3, device=dz.device)[:, 3 : c + 3] for name in film}
    into = norm_tables.NormGrads(got["weight"], got["bias"], **{name: got[name] for name in film})
    if film:
        options["film"] = weight, bias, film["scale"]
    if kx:
        got["emb"] = torch.ones(n, 2 * c, device=dz.device, dtype=dz.dtype)[:, c:]
        into = into._replace(emb=got["emb"], input_bias=got["conv_bias"])
        options["input_partials"] = partials_of(x, kx)
    partials = partials_of(dz, k, xhat)
    out = dz.clone() if in_place else None
    got["dx1"], added = inline_statistics.norm_backward(
        out if in_place else dz,
        x,
        partials,
        table,
        groups,
        into,
        sums=sums,
        add1=adds[0],
        add1_second=adds[1],
        rows=rows and sums,
        out=out,
        config=config,
        **options,
    )
    assert (added is not None) == rows and (out is None or got["dx1"] is out)
    if rows:
        row_sums.bias_grad(added, got["sums"], True, sums)
    sums.flush()
    return got


def _check_backward(case, k, floor=2e-6, **options):
    low, exact = reference_backward(*case), reference_backward(*case, dtype=torch.float64)
    got, again = (_backward(case, k, **options) for _ in range(2))
    assert all(torch.equal(got[name], again[name]) for name in got)
    sizes = exact["dx1"].abs().sum((1, 2))
    scales = exact | {"emb": sizes, "conv_bias": sizes.sum(0), "sums": sizes.sum(0)}
    for name in ("weight", "bias", "conv_bias", "sums"):  # there was a one
        got[name] = got[name].double() - 1
    for name, c in exact.items():
        scale = scales[name].norm().clamp_min(1e-30)
        error, budget = (((t[name].double() - c).norm() / scale).item() for t in (got, low))
        # the one that was there is rounded with the sum
        slack = 2 * torch.finfo(torch.float32).eps * len(got[name].flatten()) ** 0.5 / scale.item()
        budget = 2 * budget + floor + slack
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize(
    ("shape", "channels", "ks", "groups"), [c for c in _FOLD_CASES if len(c.values[1]) == 1]
)
def test_backward(shape, channels, ks, groups, device):
    _check_backward(make_case(shape, channels, groups, device=device), ks[0])


def test_backward_with_scale_and_shift(device):
    _check_backward(make_case((3, 4, 3), (12,), 3, film=True, device=device), 4, kx=2)


def test_backward_in_place_of_several_tiles(device, monkeypatch):
    monkeypatch.setattr(Device, "busy", 1)
    case = make_case((2, 9, 11), (24,), 4, device=device)
    _check_backward(case, 3, in_place=True, kx=9, config=OneLaunch(256, 4, 4))


def test_backward_of_a_large_mean(device):
    case = make_case((2, 20, 19), (12,), 3, device=device, offset=1e3)
    _check_backward(case, 19, kx=5, floor=1e-4)


def test_what_is_not_wanted(device):
    case = make_case((2, 4, 4), (16,), 4, device=device)
    whole, part = _backward(case, 2), _backward(case, 2, rows=False)
    assert torch.equal(whole["dx1"], part["dx1"]) and torch.equal(whole["weight"], part["weight"])


# --- on the GPU: the model's shapes ---------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "channels", "ks"), MODEL_CASES, ids=str)
def test_model_shapes(shape, channels, ks, dtype, device):
    _check_forward(shape, channels, ks, 32, device, dtype)
    if len(channels) == 1:
        case = make_case(shape, channels, 32, dtype=dtype, device=device)
        _check_backward(case, ks[0], kx=ks[0])
