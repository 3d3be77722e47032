"""The norms of the planned network: from partial sums to tables, the passes over memory, and their
gradients."""

import torch
from torch import Tensor

from ... import reference
from ...tf32 import rounded_to_tf32
from .. import ACTIVATION_FUNCTIONS


def put(out: Tensor, value: Tensor, accumulate: bool) -> None:
    """out = value, or out + value."""
    out.copy_(out + value if accumulate else value)


def operand(x, tf32):
    """What a product in TF32 reads of x, if there is one."""
    return rounded_to_tf32(x.float()).to(x.dtype) if tf32 else x


def over_pixels(v: Tensor) -> Tensor:
    """[N, C] as [N, 1, 1, C]."""
    return v[:, None, None, :]


def drop(a, mask):
    """Dropout, if there is a mask."""
    if mask is None:
        return a
    return reference.dropout(a, mask.p, mask.rng, layer=mask.layer, first=mask.first)


def tensor_partials(x, programs=1):
    """Forward partials of a tensor, with one tile an image; float32 of 16-bit numbers."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = x.mean((1, 2), keepdim=True)
    return torch.stack((x.sum((1, 2)), (x - mean).square().sum((1, 2))), dim=1)[:, None]


def norm_table(partials, pixels, num_groups, weight, bias, eps, scale=None, shift=None):
    """The table of a GroupNorm over the concatenation of 1 or 2 tensors, each described by its
    partials over so many pixels: g = weight (1 + scale), b = bias (1 + scale) + shift."""
    means, variances = [], []
    for part, count in zip(partials, pixels, strict=True):
        tile = count / part.shape[1]
        sums, squares = part.unbind(2)  # [N, K, C]
        mean = sums.sum(1) / count
        between = (tile * (sums / tile - mean[:, None]).square()).sum(1)
        means.append(mean)
        variances.append((squares.sum(1) + between) / count)
    mean, variance = torch.cat(means, 1), torch.cat(variances, 1)  # [N, C]
    n, c = mean.shape
    mean_g = mean.view(n, num_groups, -1).mean(2, keepdim=True)
    spread = (mean.view(n, num_groups, -1) - mean_g).square() + variance.view(n, num_groups, -1)
    rstd_g = torch.rsqrt(spread.mean(2, keepdim=True) + eps)
    width = c // num_groups
    columns = [v.expand(n, num_groups, width).reshape(n, c) for v in (mean_g, rstd_g)]
    gain = 1 if scale is None else 1 + scale
    columns += [(v * gain).to(mean.dtype).expand(n, c) for v in (weight, bias)]
    if shift is not None:
        columns[3] = columns[3] + shift
    return torch.stack(columns, dim=1)


def apply(x1, x2, table, activation, *, mask=None, early=False, tf32=False, dtype=None, after=None):
    """act(z) of the norm of x1, or of the concatenation of x1 and x2; the scale and the shift of
    `after` [N, C] behind it; dropout, if there is a mask; and a tensor added to that. With `tf32`,
    here and below, the first results are rounded to TF32."""
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    mean, rstd, g, b = table.to(torch.promote_types(x.dtype, table.dtype)).unbind(1)
    a = ACTIVATION_FUNCTIONS[activation](
        (x - over_pixels(mean)) * over_pixels(rstd * g) + over_pixels(b)
    )
    scale, shift, add = (None,) * 3 if after is None else after
    if scale is not None:
        a = a * over_pixels(scale.to(a.dtype)) + over_pixels(shift.to(a.dtype))
    y = drop(a.to(dtype or x.dtype), mask)
    return operand(y if add is None else (y + add).to(y.dtype), tf32)


def apply_upsampled(
    x1, x2, table, activation, *, corners=False, keep=True, early=False, tf32=False
):
    """`apply` of x1 with 2x2 blocks for its pixels; and these, to `keep`. With `corners` the first
    of these four pixels counts alone, as far as x1 goes."""
    large = reference.upsample_nearest2d(x1)
    a = apply(large, x2, table, activation, tf32=tf32)
    if corners:
        rest = torch.ones(a.shape[1:], dtype=torch.bool, device=a.device)
        rest[::2, ::2], rest[..., x1.shape[3] :] = False, False
        a = a.masked_fill(rest, torch.nan)
    return a, large if keep else None


def norm_grad_table(
    partials,
    table,
    pixels,
    num_groups,
    into,
    *,
    input_partials=None,
    film=(None,) * 3,
    sums,
):
    """coeff of the norm's backward, and the gradients of its weight and bias, and of scale and
    shift [N, C] if it has them, for which it needs `film`: weight, bias and scale. With the
    partials of its one input it also gives `into.emb` [N, C], the sum of dx over pixels, which is
    the gradient of what was added to the input per (n, c), and `into.input_bias` [C], its sum over
    n. Gradients [C] are added to; `sums` may be a tensor [N, 2 C or 3 C], of what they are sums."""
    d, e = partials.sum(1).unbind(1)  # [N, C]
    mean, rstd, g, _ = table.unbind(1)
    n, c = d.shape
    count = pixels * (c // num_groups)

    def group_mean(v):
        sums = v.view(n, num_groups, -1).sum(2, keepdim=True) / count
        return sums.expand(n, num_groups, c // num_groups).reshape(n, c)

    m1, m2 = group_mean(g * d), group_mean(g * e)
    p, q, r = rstd * g, -rstd.square() * m2, rstd.square() * m2 * mean - rstd * m1
    weight, bias, scale = film
    gain = 1 if scale is None else 1 + scale
    rows = [gain * e, gain * d]
    if scale is not None:
        into.scale.copy_(weight * e + bias * d)
        into.shift.copy_(d)
    if input_partials is not None:
        rows.append(p * d + q * input_partials[:, :, 0].sum(1) + r * pixels)
        if into.emb is not None:
            into.emb.copy_(rows[2])
    if isinstance(sums, Tensor):
        sums.copy_(torch.cat(rows, dim=1))
    for out, row in zip(into.of_rows, rows, strict=False):
        if out is not None:
            put(out, row.sum(0), True)
    return torch.stack((p, q, r), dim=1)


def norm_dx(
    dz,
    x1,
    x2,
    coeff,
    *,
    add1=None,
    add1_second=None,
    add2=None,
    sums=None,
    upsample1=False,
    factor=None,
    tf32=False,
    out=None,
):
    """(dx1, dx2 or None, rows whose sum is that of dx1 over samples and pixels, or None). With
    `upsample1` x1 is what was upsampled to make the first half, and dx1 its gradient. A factor
    multiplies dx1, which goes to `out`; that may be dz if there is no x2."""
    small, x1 = x1, reference.upsample_nearest2d(x1) if upsample1 else x1
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    p, q, r = coeff.unbind(1)
    dx = over_pixels(p) * dz + over_pixels(q) * x + over_pixels(r)
    dx1, dx2 = dx, None
    if x2 is not None:
        dx1, dx2 = (half.contiguous() for half in dx.split([x1.shape[3], x2.shape[3]], dim=3))
        dx2 = dx2 if add2 is None else dx2 + add2
    for more in (add1, add1_second):
        dx1 = dx1 if more is None else dx1 + more
    if upsample1:
        dx1 = reference.avg_pool2d(dx1) * 4
        assert dx1.shape == small.shape
    dx1 = dx1 if factor is None else factor * dx1
    rows = None if sums is None else dx1.sum((1, 2))
    dx1, dx2 = operand(dx1, tf32), None if dx2 is None else operand(dx2, tf32)
    return dx1 if out is None else out.copy_(dx1), dx2, rows


def norm_apply(x1, x2, norm, activation, **how):
    """(`apply` of the table that `norm_table` makes of `norm`, the table)."""
    table = norm_table(*norm)
    return apply(x1, x2, table, activation, **how), table


def norm_apply_upsampled(x1, x2, norm, activation, *, tf32=False):
    """`norm_apply` of x1 with 2x2 blocks for its pixels, where the table is followed by that of x2
    alone; and these."""
    large = reference.upsample_nearest2d(x1)
    a, table = norm_apply(large, x2, norm, activation, tf32=tf32)
    return a, (table, table[..., x1.shape[3] :].contiguous()), large


def norm_backward(
    dz,
    x,
    partials,
    table,
    num_groups,
    into,
    *,
    sums,
    add1=None,
    add1_second=None,
    rows=True,
    upsample1=False,
    tf32=False,
    out=None,
    **given,
):
    """(dx, its rows or None) of `norm_dx` of one tensor, where `norm_grad_table`, which is also
    given the rest, makes the coefficients. The gradients are added to."""
    pixels = dz.shape[1] * dz.shape[2]
    coeff = norm_grad_table(partials, table, pixels, num_groups, into, sums=sums, **given)
    adds = {"add1": add1, "add1_second": add1_second, "upsample1": upsample1, "out": out}
    adds["tf32"] = tf32
    dx, _, rows = norm_dx(dz, x, None, coeff, sums=rows or None, **adds)
    return dx, rows


def grad_partials(dz, xhat):
    return torch.stack((dz.sum((1, 2)), (dz * xhat).sum((1, 2))), dim=1)[:, None]


def activation_grad(da, x1, x2, table, activation, after_scale=None):
    """(dz, partials, None) of z in a = act(z), where z is the norm of x1, or of it beside x2. Of
    scale act(z) + shift the last are sums [N, 1, 2, C]: of da a and of da."""
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    mean, rstd, g, b = table.unbind(1)
    xhat = (x - over_pixels(mean)) * over_pixels(rstd)
    with torch.enable_grad():
        z = (xhat * over_pixels(g) + over_pixels(b)).detach().requires_grad_()
        a = ACTIVATION_FUNCTIONS[activation](z)
    after = None
    if after_scale is not None:
        after = grad_partials(da, a.detach()).flip(2)
        da = da * over_pixels(after_scale.to(da.dtype))
    (dz,) = torch.autograd.grad(a, z, da)
    return dz, grad_partials(dz, xhat), after
