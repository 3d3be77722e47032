"""A 3x3 convolution in parts that makes its own input, act(norm(x)), for the smallest images.

    parts[k] = conv(act(norm(x)))  over the channels of slice k      x itself perhaps in parts
    parts[S + k] = 1x1 convolutions of other tensors, over some of their channels

A slice is whole groups of channels of a whole image, so its statistics are its own, and a program
needs nobody else: it adds up the parts that the convolution before left, normalises, activates,
moves the few numbers that it has to where each of the nine taps wants them, multiplies, and leaves
parts for the next. So a layer is one launch, like those of `stream.conv1d`. Every block of output
channels makes the same slice again; that is a thousand numbers.

The filters depend on nothing that a kernel writes: they are asked for before the launch in front of
this has ended.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate, check_activation
from ..dependent_launch import await_inputs, overlapping
from ..device import describe
from ..layout import check_nhwc, check_shape
from ..norm.stream_kernels import affine
from ..tuning import decided
from .conv_split import SplitConv
from .norm_tables import _row_stride
from .norm_whole import _terms
from .norm_whole_kernels import _over_groups, _sum_parts

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_PIXELS = 64
_SLICES = 16  # about: the parts that the next launch adds up
_BLOCK_C = 64
_BLOCK_E = 64  # channels of other tensors in a slice


@triton.jit
def _moved(
    a,  # [K, P]
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
):
    """What the taps from FIRST on see of each pixel, one below the other: [TAPS K, P]."""
    offs = tl.arange(0, TAPS * P)
    tap, p = FIRST + offs // P, offs % P
    h, w = p // W + tap // 3 - 1, p % W + tap % 3 - 1
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (p < H * W)
    index = tl.broadcast_to(tl.where(inside, h * W + w, 0)[None, :], (K, TAPS * P))
    columns = tl.where(inside[None, :], tl.gather(a, index, 1), 0.0).to(a.dtype)
    columns = tl.permute(tl.reshape(columns, (K, TAPS, P)), (1, 0, 2))
    return tl.reshape(columns, (TAPS * K, P))


@triton.jit
def _filters(
    weight_ptr,  # [CO, 9, C]
    offs_co,
    mask_co,
    offs_c,  # [K]
    mask_c,
    C,
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
    K: tl.constexpr,
):
    """[CO, TAPS K]"""
    taps = tl.broadcast_to(FIRST + tl.arange(0, TAPS)[:, None], (TAPS, K))
    offs = tl.reshape(taps * C + offs_c[None, :], (TAPS * K,))
    there = tl.reshape(tl.broadcast_to(mask_c[None, :], (TAPS, K)), (TAPS * K,))
    ptrs = weight_ptr + offs_co[:, None] * (9 * C) + offs[None, :]
    return tl.load(ptrs, mask=mask_co[:, None] & there[None, :], other=0.0)


@triton.jit
def _multiply_slice(
    x_ptr,  # [N, HW, E], another tensor
    weight_ptr,  # [CO, E], rows stride_w apart
    out_ptrs,
    mask_out,
    n,
    e0,
    E,
    stride_w,
    offs_co,
    mask_co,
    HW: tl.constexpr,
    P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    offs_e, offs_p = e0 + tl.arange(0, BLOCK_E), tl.arange(0, P)
    mask_e = (offs_e < E)[None, :]
    w_ptrs = weight_ptr + offs_co[:, None] * stride_w + offs_e[None, :]
    w = tl.load(w_ptrs, mask=mask_co[:, None] & mask_e, other=0.0)
    await_inputs()
    x_ptrs = x_ptr + (n * HW + offs_p)[:, None] * E + offs_e[None, :]
    x = tl.load(x_ptrs, mask=(offs_p < HW)[:, None] & mask_e, other=0.0)
    acc = tl.dot(w, tl.trans(x), input_precision=PRECISION)
    tl.store(out_ptrs, acc, mask=mask_out)


@triton.jit(do_not_specialize=["N"])
def _norm_conv_split_kernel(
    x1_ptr,  # [N, HW, C1]; with SPLITS > 0 it is written
    parts_ptr,  # float32 [SPLITS, N, C1, HW], or None: x1 is read
    conv_bias_ptr,  # of the convolution in parts, as the next three
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    x2_ptr,  # [N, HW, C - C1] or None
    norm_weight_ptr,  # [C] or None
    norm_bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    weight_ptr,  # [CO, 9, C]
    extra1_ptr,  # [N, HW, E1] or None
    extra1_weight_ptr,  # [CO, E1], rows stride_w1 apart
    extra2_ptr,  # a second such pair, or None
    extra2_weight_ptr,
    out_ptr,  # float32 [all parts, N, CO, HW], out
    stride_emb,
    stride_scale,
    stride_shift,
    stride_w1,
    stride_w2,
    N,
    C1,
    C,
    CO,
    E1,
    E2,
    slices,
    slices1,  # of the first extra tensor
    eps,
    ACT: tl.constexpr,
    SPLITS: tl.constexpr,
    CG: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    HW: tl.constexpr = H * W
    K: tl.constexpr = BLOCK_G * BLOCK_J
    pid, k = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(CO, BLOCK_C)
    n = (pid // blocks).to(tl.int64)
    offs_co = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_co = offs_co < CO
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < HW
    out_ptrs = out_ptr + (k * N + n) * CO * HW + offs_co[:, None] * HW + offs_p[None, :]
    mask_out = mask_co[:, None] & mask_p[None, :]
    if k >= slices:
        if extra1_ptr is not None:
            if k < slices + slices1:
                _multiply_slice(
                    extra1_ptr, extra1_weight_ptr, out_ptrs, mask_out, n, (k - slices) * BLOCK_E,
                    E1, stride_w1, offs_co, mask_co, HW, BLOCK_P, BLOCK_E, PRECISION,
                )  # fmt: skip
            elif extra2_ptr is not None:
                _multiply_slice(
                    extra2_ptr, extra2_weight_ptr, out_ptrs, mask_out, n,
                    (k - slices - slices1) * BLOCK_E,
                    E2, stride_w2, offs_co, mask_co, HW, BLOCK_P, BLOCK_E, PRECISION,
                )  # fmt: skip
    else:
        lanes = tl.arange(0, K)
        j = lanes % BLOCK_J
        offs_c = (k * BLOCK_G + lanes // BLOCK_J) * CG + j
        mask_c = (j < CG) & (offs_c < C)
        w8 = _filters(weight_ptr, offs_co, mask_co, offs_c, mask_c, C, 0, 8, K)
        w1 = _filters(weight_ptr, offs_co, mask_co, offs_c, mask_c, C, 8, 1, K)
        g, b = affine(norm_weight_ptr, norm_bias_ptr, None, None, 0, 0, n, offs_c, mask_c)
        await_inputs()
        if scale_ptr is not None:
            s = tl.load(scale_ptr + n * stride_scale + offs_c, mask=mask_c, other=0.0)
            g *= 1.0 + s
            b *= 1.0 + s
        if shift_ptr is not None:
            b += tl.load(shift_ptr + n * stride_shift + offs_c, mask=mask_c, other=0.0)
        first = mask_c & (offs_c < C1)
        if SPLITS > 0:
            x = _sum_parts(
                parts_ptr, conv_bias_ptr, extra_bias_ptr, emb_ptr, residual_ptr, x1_ptr,
                stride_emb, N, HW, C1, n, offs_c, offs_p, first, mask_p, SPLITS,
            )  # fmt: skip
        else:
            offs = (n * HW + offs_p)[None, :] * C1 + offs_c[:, None]
            x = tl.load(x1_ptr + offs, mask=first[:, None] & mask_p[None, :], other=0.0)
            x = x.to(tl.float32)
        if x2_ptr is not None:
            second = mask_c & (offs_c >= C1)
            offs = (n * HW + offs_p)[None, :] * (C - C1) + (offs_c - C1)[:, None]
            x2 = tl.load(x2_ptr + offs, mask=second[:, None] & mask_p[None, :], other=0.0)
            x = tl.where(second[:, None], x2.to(tl.float32), x)
        mask = mask_c[:, None] & mask_p[None, :]
        count = HW * CG * 1.0
        x = tl.where(mask, x, 0.0)
        mean = _over_groups(x, BLOCK_G, BLOCK_J) / count
        x = tl.where(mask, x - mean[:, None], 0.0)
        rest = _over_groups(x, BLOCK_G, BLOCK_J) / count  # what the sum has rounded off the mean
        var = _over_groups(x * x, BLOCK_G, BLOCK_J) / count - rest * rest
        rstd = 1.0 / tl.sqrt(var + eps)
        a = activate((x - rest[:, None]) * (rstd * g)[:, None] + b[:, None], ACT)
        a = tl.where(mask, a, 0.0).to(weight_ptr.dtype.element_ty)
        acc = tl.dot(w8, _moved(a, 0, 8, H, W, K, BLOCK_P), input_precision=PRECISION)
        acc = tl.dot(w1, _moved(a, 8, 1, H, W, K, BLOCK_P), acc, input_precision=PRECISION)
        tl.store(out_ptrs, acc, mask=mask_out)


def norm_conv_split(
    x1: Tensor | SplitConv,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    num_groups: int,
    norm_weight: Tensor | None,  # [C1 + C2]
    norm_bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    weight: Tensor,  # [CO, C1 + C2, 3, 3] in channels_last memory, dtype of x1
    *,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
) -> tuple[Tensor, Tensor]:  # float32 [S, N, CO, H * W], and x1: the sum, if it was in parts
    """`conv_split` of `norm_whole`. No kernel may write the filters, or weight and bias of the
    norm, while earlier ones of the stream are under way: they are read ahead."""
    check_activation(activation)
    n, h, w, c1 = x1.shape
    split = x1 if isinstance(x1, SplitConv) else None
    if split is not None:
        x1 = _empty(split.shape, dtype=split.dtype, device=split.parts.device)
    check_nhwc("x1", x1)
    c = c1
    if x2 is not None:
        check_nhwc("x2", x2)
        check_shape("x2", x2, n, h, w, x2.shape[3])
        c += x2.shape[3]
    co, cg = weight.shape[0], c // num_groups
    check_shape("weight", weight, co, c, 3, 3)
    assert weight.permute(0, 2, 3, 1).is_contiguous() and weight.dtype == x1.dtype
    assert norm_conv_split_supported(h * w) and len(extra) <= 2
    for other, w1x1 in extra:
        check_nhwc("extra", other)
        check_shape("extra", other, n, h, w, other.shape[3])
        assert w1x1.shape == (co, other.shape[3]) and w1x1.stride(1) == 1
    block_j = triton.next_power_of_2(cg)
    block_g = _groups_of_slice(num_groups, block_j)
    channels = [other.shape[3] for other, _ in extra]
    slices = [triton.cdiv(num_groups, block_g), *(triton.cdiv(e, _BLOCK_E) for e in channels)]
    out = _empty((sum(slices), n, co, h * w), dtype=torch.float32, device=x1.device)
    if n == 0:
        return out, x1
    parts, *terms = _terms(split)
    others = [t for pair in extra for t in pair] + [None] * (4 - 2 * len(extra))
    strides = [w1x1.stride(0) for _, w1x1 in extra] + [0] * (2 - len(extra))
    film = (scale, shift)
    _norm_conv_split_kernel[(n * triton.cdiv(co, _BLOCK_C), sum(slices))](
        x1, parts, *terms, x2, norm_weight, norm_bias, *film, weight, *others, out,
        _row_stride(terms[2]), *map(_row_stride, film), *strides, n, c1, c, co,
        *(channels + [0, 0])[:2], *(slices + [0])[:2], eps,
        activation, 0 if parts is None else parts.shape[0], cg, h, w, "tf32", block_g, block_j,
        max(triton.next_power_of_2(h * w), 16), _BLOCK_C, _BLOCK_E,
        num_warps=4 if block_g * block_j <= 16 else 8, **overlapping(x1.device),
    )  # fmt: skip
    return out, x1


def norm_conv_split_supported(pixels: int) -> bool:
    """Whether a program can hold its channels of so many pixels."""
    return pixels <= _MAX_PIXELS


def norm_conv_split_pays(
    n: int, h: int, w: int, channels: int, out_channels: int, num_groups: int, dtype: torch.dtype
) -> bool:
    """Whether the programs find a place at once, and it was measured to be faster."""
    block_g = _groups_of_slice(num_groups, triton.next_power_of_2(channels // num_groups))
    programs = n * triton.cdiv(num_groups, block_g) * triton.cdiv(out_channels, _BLOCK_C)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    few = programs <= 2 * describe(device).num_sms
    return few and decided("norm_conv_split", (n, h, w, channels, out_channels, num_groups, dtype))


def _groups_of_slice(num_groups: int, lanes: int) -> int:
    """Of which a slice has at least 16 channels, as matrix products want, in about 16 slices."""
    block_g = 1
    while block_g * lanes < 16 or (num_groups > _SLICES * block_g and block_g * lanes < 32):
        block_g *= 2
    return block_g
