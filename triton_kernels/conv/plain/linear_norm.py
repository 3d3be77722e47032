"""A 1x1 convolution of images of few pixels and the norm that reads it next, in one launch.

    y = x w^T + bias + residual,   a = act(norm(y beside x2))

Behind attention at batch 1, where a launch takes longer than the arithmetic of one. A program has
16 channels, which are whole groups, of all pixels of an image: of y, or of x2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...activations import activate, check_activation
from ...norm.single_cta_kernels import parameters, sum_of_lanes
from ...norm.statistics import add_pairs
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import describe

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_IMAGES, _MAX_PIXELS, _MAX_CHANNELS = 4, 64, 512
_LANES, _NUM_WARPS = 16, 4  # channels of a program


@triton.jit
def _linear_norm_kernel(
    x_ptr,  # [N, HW, CI]
    filter_desc,  # [CO, CI] in boxes [LANES, BLOCK_K]
    filter_bias_ptr,  # [CO]
    residual_ptr,  # [N, HW, CO] or None
    y_ptr,  # [N, HW, CO], out
    x2_ptr,  # [N, HW, C - CO] or None
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    a_ptr,  # [N, HW, C], out
    CI,
    CO,
    C,
    eps,
    ACT: tl.constexpr,
    HW: tl.constexpr,
    CG: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = (tl.program_id(0) // (C // LANES)).to(tl.int64)
    c0 = tl.program_id(0) % (C // LANES) * LANES
    offs_c = c0 + tl.arange(0, LANES)
    offs_p, offs_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    mask = (offs_p < HW)[:, None] & (offs_c < C)[None, :]
    g, b = parameters(weight_ptr, bias_ptr, offs_c, offs_c < C)
    place = (n * HW + offs_p)[:, None] * CO + offs_c[None, :]
    if x2_ptr is None or c0 < CO:
        terms = tl.load(filter_bias_ptr + offs_c)
        w = filter_desc.load([c0, 0])
        await_inputs()
        # what is needed last is asked for first
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + place, mask=mask, other=0.0)
        there = (offs_p < HW)[:, None] & (offs_k < CI)[None, :]
        ptrs = x_ptr + (n * HW + offs_p)[:, None] * CI + offs_k[None, :]
        x = tl.load(ptrs, mask=there, other=0.0)
        y = tl.dot(x, tl.trans(w), tl.zeros([BLOCK_P, LANES], tl.float32)) + terms[None, :]
        if residual_ptr is not None:
            y += residual.to(tl.float32)
        y = y.to(a_ptr.dtype.element_ty)  # as its other readers see it
        tl.store(y_ptr + place, y, mask=mask)
        y = y.to(tl.float32)
    else:
        await_inputs()
        second = (n * HW + offs_p)[:, None] * (C - CO) + (offs_c - CO)[None, :]
        y = tl.load(x2_ptr + second, mask=mask, other=0.0).to(tl.float32)

    count = HW * CG * 1.0
    y = tl.where(mask, y, 0.0)
    mean = sum_of_lanes(tl.sum(y, 0), LANES // CG, CG) / count
    y = tl.where(mask, y - mean[None, :], 0.0)
    rest, var = tl.reduce((y, y * y), 0, add_pairs)
    rest = sum_of_lanes(rest, LANES // CG, CG) / count  # what the sum has rounded off the mean
    var = sum_of_lanes(var, LANES // CG, CG) / count - rest * rest
    slope = g / tl.sqrt(var + eps)
    a = activate((y - rest[None, :]) * slope[None, :] + b[None, :], ACT)
    ptrs = a_ptr + (n * HW + offs_p)[:, None] * C + offs_c[None, :]
    tl.store(ptrs, a.to(a_ptr.dtype.element_ty), mask=mask)


def postpones(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
) -> bool:
    """Whether `linear_norm_few` can do it, with a norm that `serves_linear_norm` says yes to."""
    n, h, w, ci = x.shape
    co, _, *size = weight.shape
    few = n <= _MAX_IMAGES and h * w <= _MAX_PIXELS and size == [1, 1] and ci <= _MAX_CHANNELS
    return few and describe(x.device).tma and ci % 16 == co % _LANES == 0 and x.itemsize == 2


def serves_linear_norm(
    co: int,  # channels of the convolution
    channels: int,  # of the norm, CO or more
    num_groups: int,
) -> bool:
    """Whether every program has whole groups, of the convolution or of what is beside it."""
    return channels % _LANES == co % _LANES == _LANES % (channels // num_groups) == 0


def linear_norm_few(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, 1, 1], dtype of x
    bias: Tensor,  # float32 [CO]
    residual: Tensor | None,  # [N, H, W, CO], dtype of x
    x2: Tensor | None,  # [N, H, W, C2]
    num_groups: int,
    norm_weight: Tensor,  # [CO + C2]
    norm_bias: Tensor,  # [CO + C2]
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:  # [N, H, W, CO + C2], [N, H, W, CO]
    """act(norm(y beside x2)), and y. No kernel may write filters while earlier ones of the stream
    are under way: they are read ahead."""
    check_activation(activation)
    n, h, w, ci = x.shape
    co = weight.shape[0]
    c = co + (0 if x2 is None else x2.shape[3])
    assert serves_linear_norm(co, c, num_groups) and weight.shape == (co, ci, 1, 1)
    assert all(t is None or t.is_contiguous() for t in (x, x2, residual))
    a = _empty((n, h, w, c), dtype=x.dtype, device=x.device)
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    if n == 0:
        return a, y
    block_k, rows = max(triton.next_power_of_2(ci), 16), weight[:, :, 0, 0]
    filters = TensorDescriptor(rows, [co, ci], list(rows.stride()), [_LANES, block_k])
    _linear_norm_kernel[(n * (c // _LANES),)](
        x, filters, bias, residual, y, x2, norm_weight, norm_bias, a, ci, co, c, eps, activation,
        h * w, c // num_groups, _LANES, max(triton.next_power_of_2(h * w), 16), block_k,
        num_warps=_NUM_WARPS, num_stages=1, **overlapping(x.device),
    )  # fmt: skip
    return a, y
