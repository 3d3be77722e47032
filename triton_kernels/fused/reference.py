"""The kernels of the planned network in plain PyTorch, under the same names and signatures.

This is what `fused` means: a test holds each kernel against it, and on it the plan of
`diffusion.planned.unet` runs on a machine without a GPU. Any floating-point dtype.

    partials   [N, K, 2, C]  sums over each of the K pixel tiles of image n. Forward: (sum of x,
               sum of (x - mean of the tile)^2). Backward: (sum of dz, sum of dz xhat)
    table      [N, 4, C]     (mean, rstd, g, b): xhat = (x - mean) rstd, z = xhat g + b
    coeff      [N, 3, C]     (p, q, r): dx = p dz + q x + r
"""

import torch
import torch.nn.functional as F

from .. import reference
from ..reference import ACTIVATION_FUNCTIONS
from .conv_meeting import SecondNorm  # noqa: F401  likewise
from .conv_norm import NextNorm  # noqa: F401  as in `ops`
from .conv_split import SplitConv
from .reference_norms import (  # noqa: F401  the norms are called as functions of this module
    apply,
    apply_upsampled,
    norm_apply,
    norm_apply_upsampled,
    norm_backward,
    norm_dx,
    norm_grad_table,
    norm_table,
    tensor_partials,
)
from .reference_norms import drop as _drop
from .reference_norms import over_pixels as _rows
from .reference_norms import put as _put


def conv_forward(
    x,
    weight,
    bias=None,
    *,
    emb=None,
    residual=None,
    extra=(),
    extra_bias=None,
    stats=False,
    width=None,
):
    """(conv(x) + bias + emb[n, c] + residual + extra, partials or None), where `extra` are 1x1
    convolutions of other tensors: pairs of [N, H, W, C] and [CO, C], and a bias. Zeros follow up to
    `width` channels."""
    y = reference.conv2d(x, weight, bias)
    y = y if emb is None else y + _rows(emb)
    y = y if residual is None else y + residual
    for other, columns in extra:
        y = y + other @ columns.T
    y = y if extra_bias is None else y + extra_bias
    y = y if width is None else pad_channels(y, width, y.dtype)
    return y, tensor_partials(y) if stats else None


def norms_in_conv(x, weight, num_groups, extra=(), second=0):
    """Whether `conv_norm` may be asked."""
    return x.shape[1] * x.shape[2] <= 96


def meets(x, weight, num_groups, extra=(), residual=False):
    """Whether `conv_meeting` may be asked."""
    return x.shape[1] * x.shape[2] <= 384


def meets_twice(x, weight, num_groups, second, residual=False):
    """Whether it may be asked for a second norm of so many groups."""
    return (weight.shape[0] // second) % (weight.shape[0] // num_groups) == 0


def conv_meeting(
    x, weight, bias, norm, *, extra=(), into=None, also=None, zeros=None, **terms
):  # fmt: skip
    """As `conv_norm`; a may be asked for in a place, and another norm of y in another."""
    extra = [(t if t.shape[1] == x.shape[1] else upsample(t), w) for t, w in extra]
    y, partials, a = conv_norm(x, weight, bias, norm, extra=extra, **terms)
    if into is not None:
        a = into.copy_(a)
    if also is not None:
        assert y is not None
        groups = y.shape[3] // also.channels
        other = reference.group_norm(
            y, groups, also.weight, also.bias, eps=norm.eps, activation=norm.activation
        )
        also.a.copy_(other)
    return y, partials, a


def conv_norm(x, weight, bias, norm, *, x2=None, **terms):
    """(what `conv_forward` returns, or None if it is not kept; its partials if they are wanted;
    act(norm(.)) of it beside x2)"""
    y, partials = conv_forward(x, weight, bias, **terms, stats=True)
    weight, bias, num_groups, eps, activation, keep, stats = norm
    both = y if x2 is None else torch.cat((y, x2), dim=3)
    a = reference.group_norm(both, num_groups, weight, bias, eps=eps, activation=activation)
    return y if keep else None, partials if stats else None, a


def serves_conv_means(x, weight, extra=()):
    """Whether a GPU has the means of the result where it is made; here those of even sizes."""
    return x.shape[1] % 2 == x.shape[2] % 2 == 0


def conv_means(x, weight, bias, **terms):
    """What `conv_forward` returns with partials, and (its 2x2 means, their partials)."""
    y, partials = conv_forward(x, weight, bias, **terms, stats=True)
    return y, partials, avg_pool_partials(y)


def conv_few(x, weight, bias=None, **options):
    return conv_forward(x, weight, bias, **options)


def conv_plain_input_grad(dy, weight):
    """The gradient of x in y = conv(x). Channels of dy behind those of y do not count."""
    with torch.enable_grad():
        x = dy.new_zeros((*dy.shape[:3], weight.shape[1])).requires_grad_()
        y = reference.conv2d(x, weight.detach())
    return torch.autograd.grad(y, x, dy[..., : y.shape[3]])[0].contiguous()


def conv_input_grad(dy, weight, *, inputs, table, activation, mask=None):
    """(dz, partials) of z in y = conv(dropout(act(z))), where z is the norm of the concatenated
    inputs, and there is dropout if there is a mask."""
    x = torch.cat(inputs, dim=3)
    mean, rstd, g, b = table.unbind(1)
    xhat = (x - _rows(mean)) * _rows(rstd)
    with torch.enable_grad():
        z = (xhat * _rows(g) + _rows(b)).detach().requires_grad_()
        a = _drop(ACTIVATION_FUNCTIONS[activation](z), mask)
    (dz,) = torch.autograd.grad(a, z, conv_plain_input_grad(dy, weight))
    return dz, _grad_partials(dz, xhat)


def _grad_partials(dz, xhat):
    return torch.stack((dz.sum((1, 2)), (dz * xhat).sum((1, 2))), dim=1)[:, None]


def activation_grad(da, x, table, activation):
    """(dz, partials) of z in a = act(z), where z is the norm of x."""
    mean, rstd, g, b = table.unbind(1)
    xhat = (x - _rows(mean)) * _rows(rstd)
    with torch.enable_grad():
        z = (xhat * _rows(g) + _rows(b)).detach().requires_grad_()
        a = ACTIVATION_FUNCTIONS[activation](z)
    (dz,) = torch.autograd.grad(a, z, da)
    return dz, _grad_partials(dz, xhat)


def conv_weight_grad(x, dy, out, *, accumulate=False, stride=1, padding=None):
    """The gradient of weight in y = conv(x), into or added to `out` [CO, CI, R, S]. Channels of x
    and dy behind those of the filters do not count, and the image ends where dy wants it to."""
    co, ci, r, _ = out.shape
    x = x[..., :ci].contiguous()
    with torch.enable_grad():
        weight = torch.zeros_like(out).requires_grad_()
        y = _conv(x, weight, None, stride, r // 2 if padding is None else padding)
    _put(out, torch.autograd.grad(y, weight, dy[..., :co])[0], accumulate)


def conv_two_weight_grads(x1, dy1, out1, x2, dy2, out2, *, accumulate=False, share=1.0):
    """Of two convolutions over images of one size."""
    conv_weight_grad(x1, dy1, out1, accumulate=accumulate)
    conv_weight_grad(x2, dy2, out2, accumulate=accumulate)


def conv_weight_grads(*gradients, accumulate=False, share=1.0):
    """Of several (x, dy, out)."""
    for gradient in gradients:
        conv_weight_grad(*gradient, accumulate=accumulate)


def _conv(x, weight, bias, stride, padding):
    if stride == 2 and padding == 0:
        x = F.pad(x, (0, 0, 0, 1, 0, 1))
    return reference.conv2d(x, weight, bias, stride=stride, padding=padding)


def conv_down(x, weight, bias, padding):
    """The 3x3 convolution of stride 2 that halves the image. With padding 0 there is one row and
    one column of zeros, behind the image."""
    return _conv(x, weight, bias, 2, padding)


def conv_down_input_grad(dy, weight, padding, add=None):
    """The gradient of its x, plus `add`."""
    n, p, q, _ = dy.shape
    with torch.enable_grad():
        x = dy.new_zeros((n, 2 * p, 2 * q, weight.shape[1])).requires_grad_()
        y = _conv(x, weight.detach(), None, 2, padding)
    dx = torch.autograd.grad(y, x, dy)[0].contiguous()
    return dx if add is None else dx + add


# --- behind upsampling ----------------------------------------------------------------------------

_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))  # of 3 that are one of 2, by parity of the row or column


def upsampled_filters(weight, channels, dtype):
    """(filters [16, CO, C1] of 2x2 taps, by parity of rows, of columns, tap of rows, of columns,
    with which the first channels of [CO, C1 + C2, 3, 3] are a convolution of what was upsampled to
    them; the others [CO, C2, 3, 3])"""
    first = weight[:, :channels].to(dtype)
    summed = [
        sum(first[:, :, r, s] for r in rows for s in columns)
        for p in _TAPS
        for q in _TAPS
        for rows in p
        for columns in q
    ]
    return torch.stack(summed), weight[:, channels:].to(dtype)


def serves_upsampled(small, channels, co, gradients=False):
    """Whether a GPU would rather have what follows; here small images of an even width are."""
    return small.shape[2] % 2 == 0


def conv_of_upsampled(x, filters, bias):
    """(conv(upsample(x)) + bias, partials)"""
    summed, _ = filters
    kinds = []
    for p in range(2):
        for q in range(2):
            first = 4 * (2 * p + q)
            taps = summed[first : first + 4].permute(1, 2, 0).unflatten(2, (2, 2))
            padded = F.pad(x.permute(0, 3, 1, 2), (1 - q, q, 1 - p, p))
            kinds.append(F.conv2d(padded, taps).permute(0, 2, 3, 1))
    n, h, w, co = kinds[0].shape
    y = torch.stack(kinds, 3).view(n, h, w, 2, 2, co).permute(0, 1, 3, 2, 4, 5)
    y = y.reshape(n, 2 * h, 2 * w, co) + bias
    return y, tensor_partials(y)


def conv_of_upsampled_input_grad(dy, filters):
    """The gradient of x."""
    n, h, w, _ = dy.shape
    with torch.enable_grad():
        x = dy.new_zeros((n, h // 2, w // 2, filters[0].shape[2])).requires_grad_()
        y, _ = conv_of_upsampled(x, [f.detach() for f in filters], 0)
    return torch.autograd.grad(y, x, dy)[0].contiguous()


def conv_upsampled(a, filters, bias, *, emb=None):
    """(conv(a) + bias + emb[n, c], partials), where the first channels of a were upsampled."""
    c1 = filters[0].shape[2]
    y, _ = conv_of_upsampled(a[:, ::2, ::2, :c1], filters, bias)
    y = y + reference.conv2d(a[..., c1:].contiguous(), filters[1])
    y = y if emb is None else y + _rows(emb)
    return y, tensor_partials(y)


def conv_upsampled_input_grad(dy, filters, *, inputs, tables, activation):
    """(dz1, dz2, partials) as those of `conv_input_grad`, but of the small image that was upsampled
    to the first of two inputs: dz1 is the sum over 2x2 pixels."""
    x1, x2 = inputs
    with torch.enable_grad():
        a1, a2 = (torch.zeros_like(x).requires_grad_() for x in inputs)
        y, _ = conv_of_upsampled(a1, filters, 0)
        y = y + reference.conv2d(a2, filters[1])
    halves = zip(torch.autograd.grad(y, (a1, a2), dy), inputs, strict=True)
    tables = tables[0][..., : x1.shape[3]], tables[1]
    grads = [
        activation_grad(da, x, rows, activation)
        for (da, x), rows in zip(halves, tables, strict=True)
    ]
    (dz1, partials1), (dz2, partials2) = grads
    return dz1, dz2, torch.cat((partials1, partials2), 3)


# --- norms with the gradient of a 1x1 skip --------------------------------------------------------


def skip_dx(dy, weight, dz, x1, x2, coeff, *, add1=None, dz2=None, sums=None, upsample1=False):
    """`norm_dx` of a block whose skip is a 1x1 convolution, with its input gradient added. With dz2
    dz is that of x1 alone, added up over the 2x2 pixels that are one."""
    if dz2 is not None:
        dz = torch.cat((upsample(dz) / 4, dz2), 3)
    c1 = x1.shape[3]
    skip = conv_plain_input_grad(dy, weight)
    d1, d2 = skip[..., :c1], skip[..., c1:]
    adds = {"add1": d1, "add1_second": add1, "add2": None if x2 is None else d2}
    return norm_dx(dz, x1, x2, coeff, **adds, sums=sums, upsample1=upsample1)


def skip_backward(
    dy,
    skip_weight,
    dz,
    x1,
    x2,
    partials,
    table,
    num_groups,
    grad_weight_out,
    grad_bias_out,
    *,
    sums,
    add1=None,
    dz2=None,
    upsample1=False,
):
    """`skip_dx` with the coefficients of `norm_grad_table`; the gradients are added to."""
    pixels, grads = dy.shape[1] * dy.shape[2], (grad_weight_out, grad_bias_out)
    coeff = norm_grad_table(partials, table, pixels, num_groups, *grads, accumulate=True)
    options = {"add1": add1, "dz2": dz2, "sums": sums, "upsample1": upsample1}
    return skip_dx(dy, skip_weight, dz, x1, x2, coeff, **options)


class RowSums:
    """Sums over rows that go into the flat gradient at `flush`; here they are added at once."""

    def __init__(self, grad):
        self.grad, self.kept = grad, []

    def flush(self, last=True):
        """All that was asked for has been added."""


def bias_grad(rows, out, accumulate=False, sums=None):
    """The sum of rows [rows, C], into or added to `out` [C or fewer]."""
    _put(out, rows.sum(0)[: len(out)], accumulate)


def linear_grads(x, dy, weight, grad_weight, grad_bias, need_dx=True):
    """The gradient of x in y = x weight^T + bias, or None; the other two are added to."""
    _put(grad_weight, dy.T @ x, True)
    _put(grad_bias, dy.sum(0), True)
    return dy @ weight if need_dx else None


def tensor_rows(x, sums):
    """Rows [rows, C] whose sum is that of x [..., C] over all but the channels."""
    return x.reshape(-1, x.shape[-1]).sum(0)[None]


def sinusoids(t, frequencies, width):
    """cos(t f), then sin(t f), then zeros: [N, width], in the frequencies' precision."""
    angles = t[:, None].float() * frequencies[None, :]
    return F.pad(torch.cat([angles.cos(), angles.sin()], 1), (0, width - 2 * len(frequencies)))


def pad_channels(x, width, dtype):
    """x [..., C] with zeros behind its channels, in that dtype."""
    return F.pad(x, (0, width - x.shape[-1])).to(dtype)


def attention_forward(qkv, num_heads, order):
    """(o, what backward needs) of `reference.attention`."""
    return reference.attention(qkv, num_heads, order=order), None


def attention_few(qkv, num_heads, order):
    """The first of these alone."""
    return reference.attention(qkv, num_heads, order=order)


def attention_backward(do, qkv, o, state, num_heads, order, sums):
    """(dqkv, rows [rows, 3C] whose sum is that of it over samples and positions)"""
    with torch.enable_grad():
        qkv = qkv.detach().requires_grad_()
        o = reference.attention(qkv, num_heads, order=order)
    dqkv = torch.autograd.grad(o, qkv, do)[0]
    return dqkv, dqkv.sum(1)


def avg_pool(x):
    """2x2 means."""
    return reference.avg_pool2d(x)


def avg_pool_partials(x):
    """The same, and their partials."""
    y = avg_pool(x)
    return y, tensor_partials(y)


def avg_pool_grad(dy, add=None, sums=None):
    """(its input gradient for even sizes, plus `add`; rows whose sum is its sum over pixels, or
    None)"""
    dx = reference.upsample_nearest2d(dy) / 4
    dx = dx if add is None else dx + add
    return dx, None if sums is None else dx.sum((1, 2))


def upsample(x):
    """Each pixel becomes a 2x2 block."""
    return reference.upsample_nearest2d(x)


def upsample_grad(dy):
    """Its input gradient."""
    return reference.avg_pool2d(dy) * 4


# --- inference at a small batch -------------------------------------------------------------------


def conv_split(x, weight, *, extra=()):
    """Parts [S, N, CO, H W] whose sum over S is conv(x) and the 1x1 convolutions of `extra`."""
    n, h, w, _ = x.shape
    main = reference.conv2d(x, weight)
    parts = [main, *(other @ columns.T for other, columns in extra)]
    return torch.stack([y.reshape(n, h * w, -1).mT for y in parts])


def worth_splitting(x_shape, weight, device, extra=()):
    """Whether a GPU would rather have the parts; here small images do."""
    return x_shape[1] * x_shape[2] <= 24


def sum_parts(split: SplitConv):
    """(the convolution that was in parts; its partials, or None)"""
    n, h, w, c = split.shape
    y = split.parts.sum(0).mT.reshape(n, h, w, c)
    for bias in (split.bias, split.extra_bias):
        y = y if bias is None else y + bias
    y = y if split.emb is None else y + _rows(split.emb)
    y = y if split.residual is None else y + split.residual
    y = y.to(split.dtype).contiguous()
    return y, tensor_partials(y)


def resample_parts(split: SplitConv, up: bool):
    """(the convolution that was in parts; it upsampled or its 2x2 means; its partials, or None)"""
    y, partials = sum_parts(split)
    return y, upsample(y) if up else avg_pool(y), partials


def norm_whole_supported(channels, num_groups, pixels):
    """Whether `norm_whole` may be asked; a kernel keeps a group in registers."""
    return pixels * channels // num_groups <= 300


def norm_whole(
    x1, x2, num_groups, weight, bias, eps, activation, scale=None, shift=None, keep=True, pool=False
):
    """(act(norm(x)) of x1 beside x2, x1), where x1 may be a convolution in parts, and only kept if
    somebody else reads it; with `pool` the 2x2 means of x1 stand for it."""
    keep |= not isinstance(x1, SplitConv)
    x1 = sum_parts(x1)[0] if isinstance(x1, SplitConv) else x1
    x1 = avg_pool(x1) if pool else x1
    x = x1 if x2 is None else torch.cat((x1, x2), dim=3)
    return (
        reference.group_norm(
            x, num_groups, weight, bias, eps=eps, activation=activation, scale=scale, shift=shift
        ),
        x1 if keep else None,
    )


def norm_of_sums_pays(elements):
    """Whether to ask for `norm_of_sums`, or for a table and `apply`."""
    return elements <= 20000


def norm_of_sums(
    x1, x2, partials, pixels, num_groups, weight, bias, eps, activation, scale=None, shift=None
):
    """`apply` of the table of `norm_table`."""
    table = norm_table(partials, pixels, num_groups, weight, bias, eps, scale, shift)
    return apply(x1, x2, table, activation)


def serves_norm_conv(x, weight, extra, partials, num_groups, width=None):
    """Whether a GPU would rather not have act(norm(x)) in memory; here few channels are."""
    return weight.shape[2:] == (3, 3) and x.shape[3] <= 32


def norm_conv(
    x, partials, num_groups, norm_weight, norm_bias, eps, activation, weight, bias,
    *, scale=None, shift=None, width=None, means=False, **terms,
):  # fmt: skip
    """`conv_forward` of act(norm(x)), with partials unless there is a width, or `conv_means`.
    Tensors in `extra` may be half as large: then they are upsampled."""
    pixels = x.shape[1] * x.shape[2]
    if "extra" in terms:
        whole = [upsample(t) if t.shape[1] < x.shape[1] else t for t, _ in terms["extra"]]
        terms["extra"] = [(t, w) for t, (_, w) in zip(whole, terms["extra"], strict=True)]
    norm = num_groups, norm_weight, norm_bias, eps, scale, shift
    a = apply(x, None, norm_table((partials,), (pixels,), *norm), activation)
    if means:
        return conv_means(a, weight, bias, **terms)
    return conv_forward(a, weight, bias, stats=width is None, width=width, **terms)


def serves_small_terms(small, channels, co):
    """Whether `norm_conv` would rather upsample what it adds 1x1 convolutions of."""
    return co <= 32


def serves_norm_conv_of_two(x1, x2, weight, partials, num_groups):
    """The same of two tensors side by side."""
    return weight.shape[2:] == (3, 3) and x1.shape[3] <= 32


def norm_conv_of_two(
    x1, x2, partials, num_groups, norm_weight, norm_bias, eps, activation, weight, bias,
    *, emb=None,
):  # fmt: skip
    """`conv_forward` of act(norm([x1, x2])), with partials."""
    pixels = (x1.shape[1] * x1.shape[2],) * 2
    table = norm_table(partials, pixels, num_groups, norm_weight, norm_bias, eps)
    return conv_forward(apply(x1, x2, table, activation), weight, bias, emb=emb, stats=True)


def norm_of_sums_upsampled(x1, x2, *arguments, corners=False, keep=True, **options):
    """`norm_of_sums` of x1 with 2x2 blocks for its pixels; and these, or None."""
    large = upsample(x1)
    return norm_of_sums(large, x2, *arguments, **options), large if keep else None


def serves_norm_linear(x, partials, num_groups):
    """Whether a norm may be in the launch of the 1x1 convolution behind it."""
    return True


def norm_linear_few(x, partials, pixels, num_groups, norm_weight, norm_bias, eps, weight, bias):
    """norm(x) weight^T + bias"""
    sums = (partials,), (pixels,), num_groups, norm_weight, norm_bias, eps
    return norm_of_sums(x, None, *sums, "identity") @ weight.T + bias


def postpones(x, weight):
    """Whether a norm may be in the launch of a 1x1 convolution; here in images of one size."""
    return weight.shape[2:] == (1, 1) and x.shape[1] * x.shape[2] == 24


def serves_linear_norm(co, channels, num_groups):
    """Whether such a norm may be."""
    return True


def linear_norm_few(
    x, weight, bias, residual, x2, num_groups, norm_weight, norm_bias, eps, activation
):
    """(act(norm(y beside x2)), y) of a 1x1 convolution y"""
    y, _ = conv_forward(x, weight, bias, residual=residual)
    a, _ = norm_whole(y, x2, num_groups, norm_weight, norm_bias, eps, activation)
    return a, y


def serves_qkv_attention(x, num_heads):
    """Whether a GPU would rather have both in one launch; here few positions are."""
    return x.shape[1] <= 40


def qkv_attention(x, weight, bias, num_heads, order):
    """`attention_few` of x weight^T + bias."""
    return attention_few(x @ weight.T + bias, num_heads, order)


def serves_norm_attention(x, num_heads, norm):
    """Whether a GPU would rather have all three in one launch; here of an odd number of images."""
    return len(x) % 2 == 1


def norm_attention(x, norm, weight, bias, num_heads, order):
    """`attention_few` of norm(x) weight^T + bias, by partials, pixels and a norm's arguments; or of
    x weight^T + bias"""
    if norm is not None:
        partials, pixels, *rest = norm
        sums = (partials,), (pixels,)
        x = norm_of_sums(x[:, None], None, *sums, *rest, "identity")[:, 0]
    return qkv_attention(x, weight, bias, num_heads, order)


def begin_step(x, channels, dtype, table=None, row=None, index=None, cleared=None):
    """(x with zeros behind its channels up to so many, table[row, index]); `cleared` is zeros."""
    if cleared is not None:
        cleared.zero_()
    image = F.pad(x, [0, channels - x.shape[3]]).to(dtype)
    if table is None:
        return image, None
    rows = table.index_select(0, row)[0]
    return image, rows if index is None else rows.index_select(0, index)
