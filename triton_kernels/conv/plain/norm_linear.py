"""A norm without an activation and the 1x1 convolution that reads it, in one launch.

    y = norm(x) w^T + b

In front of attention at batch 1. What a norm does to a channel is two numbers, and statistics are
partial sums of the launch that made x, so that every program can make them of all groups, while its
pixels are on their way, and normalize these before it multiplies.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...norm.single_cta_kernels import parameters, sum_of_lanes
from ...norm.small_batch import about, load_sums
from ...registry.kernel import Kernel, Op, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import Device, describe
from ..fused_spec import forward_spec

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_IMAGES, _MAX_LANES, _MAX_LOADED = 4, 512, 8192  # of a program, and their partial sums
_BLOCK_C, _BLOCK_M, _NUM_WARPS = 64, 32, 4


@triton.jit
def _norm_linear_kernel(
    x_ptr,  # [N, HW, C]
    partial_ptr,  # float32 [N, K, 2, C]
    weight_ptr,  # [C] of the norm
    bias_ptr,  # [C]
    filter_desc,  # [CO, C] in boxes [BLOCK_C, BLOCK_K]
    filter_bias_ptr,  # [CO]
    y_ptr,  # [N, HW, CO], out
    pixels,  # that the partials describe
    C,
    CO,
    eps,
    HW: tl.constexpr,
    K: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,  # divides HW
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(CO, BLOCK_C)
    c0 = pid % blocks * BLOCK_C
    tile = pid // blocks
    n = (tile // (HW // BLOCK_M)).to(tl.int64)
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_co = c0 + tl.arange(0, BLOCK_C)
    offs_k = tl.arange(0, BLOCK_K)
    mask = tl.full([BLOCK_M], 1, tl.int1)[:, None] & (offs_k < C)[None, :]
    # lanes of groups, BLOCK_J to each, of which CG are channels
    lanes = tl.arange(0, BLOCK_G * BLOCK_J)
    offs_c = lanes // BLOCK_J * CG + lanes % BLOCK_J
    mask_c = (lanes % BLOCK_J < CG) & (offs_c < C)
    lane = tl.where(offs_k < C, offs_k // CG * BLOCK_J + offs_k % CG, 0)
    g, b = parameters(weight_ptr, bias_ptr, offs_k, offs_k < C)
    terms = tl.load(filter_bias_ptr + offs_co, mask=offs_co < CO, other=0.0)
    w = filter_desc.load([c0, 0])
    await_inputs()
    x = tl.load(x_ptr + offs_m[:, None] * C + offs_k[None, :], mask=mask, other=0.0)
    half_ptr = partial_ptr + n * (K * 2) * C
    sums, within, there = load_sums(half_ptr, C, offs_c, mask_c, K, BLOCK_T)
    mean = tl.sum(sums, 0) * (1.0 / pixels)
    mean = sum_of_lanes(mean, BLOCK_G, BLOCK_J) / CG
    var, rest = about(sums, within, there, mean, pixels, K)
    rest = sum_of_lanes(rest, BLOCK_G, BLOCK_J) / CG
    var = sum_of_lanes(var, BLOCK_G, BLOCK_J) / CG - rest * rest
    slope = tl.gather(1.0 / tl.sqrt(var + eps), lane, 0) * g
    mean = tl.gather(mean + rest, lane, 0)
    a = (x.to(tl.float32) - mean[None, :]) * slope[None, :] + b[None, :]
    a = tl.where(mask, a, 0.0).to(x.dtype)
    y = tl.dot(w, tl.trans(a), input_precision="tf32") + terms[:, None]
    ptrs = y_ptr + offs_m[None, :] * CO + offs_co[:, None]
    tl.store(ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_co < CO)[:, None])


@configures("norm_linear")
class Rows(NamedTuple):
    """Tiles of 64 channels of 32 pixels."""


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if not gpu.tma or spec.itemsize != 2 or spec.k % 8 or spec.taps > 1:
        return "it does 1x1 convolutions of numbers of 16 bits, of channels by 8, with TMA"
    if spec.n > _MAX_IMAGES or spec.h * spec.w % _BLOCK_M:
        return f"it does {_MAX_IMAGES} images at most, of whole tiles of {_BLOCK_M} pixels"
    lanes = triton.next_power_of_2(spec.k // spec.groups) * triton.next_power_of_2(spec.groups)
    sums = lanes * triton.next_power_of_2(max(spec.tiles))
    if lanes > _MAX_LANES or sums > _MAX_LOADED:
        return f"a program would have {lanes} lanes and load {sums} sums of either kind"
    return None


NORM_LINEAR = Op(
    "norm_linear",
    ("h", "w", "k", "c", "groups", "tiles", "dtype"),
    (Kernel("norm_linear", Rows, _refuse, lambda *_: [Rows()]),),
)


def norm_linear_few(
    x: Tensor,  # [N, H, W, C]
    partials: Tensor,  # float32 [N, K, 2, C]
    pixels: int,  # H W of the image that it describes
    num_groups: int,
    norm_weight: Tensor,  # [C]
    norm_bias: Tensor,  # [C]
    eps: float,
    weight: Tensor,  # [CO, C], dtype of x
    bias: Tensor,  # float32 [CO]
) -> Tensor:  # [N, H, W, CO]
    """norm(x) weight^T + bias. No kernel may write these two while earlier ones of the stream are
    under way: they are read ahead."""
    n, h, w, c = x.shape
    co, k, cg = weight.shape[0], partials.shape[1], c // num_groups
    assert x.is_contiguous() and weight.shape == (co, c) and weight.stride(1) == 1
    spec = forward_spec(x, weight[:, :, None, None], groups=num_groups, tiles=(k,))
    assert partials.is_contiguous() and NORM_LINEAR.refuse(spec, describe(x.device)) is None
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    block_k = max(triton.next_power_of_2(c), 16)
    filters = TensorDescriptor(weight, [co, c], list(weight.stride()), [_BLOCK_C, block_k])
    _norm_linear_kernel[(n * h * w // _BLOCK_M * triton.cdiv(co, _BLOCK_C),)](
        x, partials, norm_weight, norm_bias, filters, bias, y, pixels, c, co, eps, h * w, k, cg,
        _BLOCK_C, _BLOCK_M, block_k, *map(triton.next_power_of_2, (num_groups, cg, k)),
        num_warps=_NUM_WARPS, num_stages=1, **overlapping(x.device),
    )  # fmt: skip
    return y
