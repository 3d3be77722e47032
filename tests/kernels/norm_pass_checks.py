"""Passes of a norm, forward and backward, beside the reference in float64."""

import torch

from triton_kernels import reference
from triton_kernels.norm import passes as norm_passes, tables as norm_tables
from triton_kernels.reductions import row_sums
from triton_kernels.reference import fused

from .norm_cases import (
    EPS,
    assert_near,
    partials_of,
    randn,
    reference_backward,
    reference_forward,
    second_half,
)


def table_of(halves, ks, groups, weight, bias, **film):
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=True))
    pixels = tuple(x.shape[1] * x.shape[2] for x in halves)
    return norm_tables.norm_table(partials, pixels, groups, weight, bias, EPS, **film)


def check_upsampled(n, h, w, c1, c2, dtype, device):
    """The small tensor and its statistics stand for the one that is never made; its gradient is the
    sum over blocks of that one's."""
    torch.manual_seed(0)
    c, groups = c1 + c2, (c1 + c2) // 10
    x1 = randn(n, h, w, c1, dtype=dtype, device=device)
    x2, dz, add1, add2 = (
        randn(n, 2 * h, 2 * w, width, dtype=dtype, device=device) for width in (c2, c, c1, c2)
    )
    weight, bias = torch.randn(2, c, device=device)
    coeff = torch.randn(n, 3, c, device=device)
    partials = (partials_of(x1, w), partials_of(x2, 4))
    table = norm_tables.norm_table(partials, (h * w, 4 * h * w), groups, weight, bias, EPS)
    a, large = norm_passes.apply_upsampled(x1, x2, table, "silu")
    halves = (reference.upsample_nearest2d(x1), x2)
    assert torch.equal(large, halves[0])
    few, again = norm_passes.apply_upsampled(x1, x2, table, "silu", corners=True)
    assert torch.equal(few[:, ::2, ::2], a[:, ::2, ::2]) and torch.equal(again, large)
    assert torch.equal(few[..., c1:], a[..., c1:])
    again, nothing = norm_passes.apply_upsampled(x1, x2, table, "silu", keep=False)
    assert torch.equal(again, a) and nothing is None
    rounding = torch.finfo(dtype).eps / 2 + 2e-6
    assert_near(
        "a",
        a,
        reference_forward(halves, groups, weight, bias, "silu", torch.float64),
        floor=rounding,
    )

    dx1, dx2, rows = norm_passes.norm_dx(
        dz, x1, x2, coeff, add1, add2, add1, sums=True, upsample1=True
    )
    p, q, r = coeff.double()[:, :, None, None].unbind(1)
    exact = p * dz + q * torch.cat(halves, 3) + r
    exact += torch.cat((2 * add1.double(), add2.double()), 3)
    exact1 = reference.avg_pool2d(exact[..., :c1]) * 4
    assert_near("dx1", dx1, exact1, floor=rounding)
    assert_near("dx2", dx2, exact[..., c1:], floor=rounding)
    assert_near("rows", rows.double().sum(0), exact1.sum((0, 1, 2)), floor=1e-5)


def by_kernels(halves, groups, weight, bias, dz, adds, film, ks, accumulate=False, sums=None):
    """The same from norm_table, norm_grad_table and norm_dx. Gradients begin as ones, or, with
    RowSums, as what its gradient has."""
    n, h, w, c = dz.shape
    one = len(halves) == 1
    table = table_of(halves, ks, groups, weight, bias, **film)
    mean, rstd = table[:, None, None, 0].double(), table[:, None, None, 1].double()
    xhat = (torch.cat(halves, -1) - mean) * rstd
    flat = torch.ones(4 * c, device=dz.device) if sums is None else sums.grad
    got = dict(zip(("weight", "bias", "conv_bias"), flat.split(c), strict=False))
    got["sums"] = flat[3 * c :][: halves[0].shape[-1]]
    got |= {name: torch.ones(n, 2 * c + 3, device=dz.device)[:, 3 : c + 3] for name in film}
    into = norm_tables.NormGrads(**{name: got[name] for name in film})
    options = {"film": (weight, bias, film["scale"])} if film else {}
    if one:
        got["emb"] = torch.ones(n, 2 * c, device=dz.device, dtype=dz.dtype)[:, c:]
        into = into._replace(emb=got["emb"])
        options["input_partials"] = partials_of(halves[0], ks[0])
    of_dz = partials_of(dz, ks[-1], xhat), table, h * w, groups
    if sums is None:
        work = torch.full((n, (2 + one) * c), torch.nan, device=dz.device)
        coeff = norm_tables.norm_grad_table(*of_dz, into, sums=work, **options)
        row_sums.bias_grad(work, flat[: work.shape[1]], accumulate)
    else:
        into = into._replace(weight=got["weight"], bias=got["bias"])
        into = into._replace(input_bias=got["conv_bias"]) if one else into
        coeff = norm_tables.norm_grad_table(*of_dz, into, sums=sums, **options)
    add1, add2, second = adds[0], None if one else adds[1], adds[-1]
    *dx, rows = norm_passes.norm_dx(
        dz, halves[0], second_half(halves), coeff, add1, add2, second, sums=sums or True
    )
    row_sums.bias_grad(rows, got["sums"], accumulate, sums)
    return got | {f"dx{i + 1}": d for i, d in enumerate(dx) if d is not None}


def check_backward(case, ks, floor=2e-6):
    low, exact = reference_backward(*case), reference_backward(*case, dtype=torch.float64)
    got = by_kernels(*case, ks)
    assert got["dx1"].dtype == case[0][0].dtype
    sizes = exact["dx1"].abs().sum((1, 2))
    # sums of dx vanish where a channel is a group: measure them by what was summed
    scales = exact | {"emb": sizes, "conv_bias": sizes.sum(0), "sums": sizes.sum(0)}
    for name, c in exact.items():
        scale = scales[name].norm().clamp_min(1e-30)
        error, budget = (((t[name].double() - c).norm() / scale).item() for t in (got, low))
        budget = 2 * budget + floor
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def check_dx_without_sums(case):
    """Without sums and additions, of which by_kernels has both."""
    halves, _, weight, _, dz, *_ = case
    coeff = torch.randn(dz.shape[0], 3, weight.numel(), device=dz.device)
    p, q, r = coeff.double()[:, :, None, None].unbind(1)
    exact = (p * dz + q * torch.cat(halves, 3) + r).split([x.shape[3] for x in halves], 3)
    rounding = torch.finfo(dz.dtype).eps / 2 + 2e-6
    dx = norm_passes.norm_dx(dz, halves[0], second_half(halves), coeff)
    for got, want in zip(dx, exact, strict=False):
        assert_near("dx", got, want, floor=rounding)


def check_dx_times_a_number(n, h, w, channels, upsample1, dtype, device):
    """The gradient of the first half, and the rows of its sums, beside the twin in float64."""
    c1, *second = channels
    small = (h // 2, w // 2) if upsample1 else (h, w)
    x1, dz, add1, more = (
        randn(n, *shape, dtype=dtype, device=device)
        for shape in ((*small, c1), (h, w, sum(channels)), (h, w, c1), (h, w, c1))
    )
    x2 = randn(n, h, w, *second, dtype=dtype, device=device) if second else None
    coeff = randn(n, 3, sum(channels), device=device)
    adds = {"add1": add1, "add1_second": more, "add2": x2}
    options = {"upsample1": upsample1, "factor": -(0.5**0.5), "sums": True}
    dx1, dx2, rows = norm_passes.norm_dx(dz, x1, x2, coeff, **adds, **options)
    adds = {name: x if x is None else x.double() for name, x in adds.items()}
    tensors = (x if x is None else x.double() for x in (dz, x1, x2, coeff))
    exact1, exact2, sums = fused.norm_dx(*tensors, **adds, **options)
    rounding = torch.finfo(dtype).eps / 2 + 2e-6
    assert_near("dx1", dx1, exact1, floor=rounding)
    assert_near("rows", rows.double().sum(0), sums.sum(0), floor=1e-5)
    if second:
        assert_near("dx2", dx2, exact2, floor=rounding)
