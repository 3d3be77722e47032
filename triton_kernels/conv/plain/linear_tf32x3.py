"""Linear layers over few samples in float32, by three products in TF32 (`conv.plain.tf32x3`).

    y[m, c] = sum_k x[m, k] w[c, k] + bias[c]

Such a layer is one trip to memory and a chain of products, each waiting for the one before: of 256
channels in steps of 32 it took longer than the launch. So the sum is cut into chunks that are side
by side, one or two a warp, and added up in the end.
"""

import triton
import triton.language as tl

from ...registry.kernel import Kernel
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import Device
from ...tf32 import split_to_tf32
from ..configs import ConvOperands
from ..refusals import Only
from . import tf32x3
from .products import whole_sum

CHUNKS, CHUNK = 8, 32  # channels of x at once: so many chunks of so many
TILE = 16  # samples, and channels of y, of a program


@triton.jit(do_not_specialize=["M"])
def _linear_tf32x3_kernel(
    x_ptr,  # float32 [M, K]: x, or dy
    w_ptr,  # float32, an output channel `stride_wc` apart, one of the sum `stride_wk`
    bias_ptr,  # [C] or None
    y_ptr,  # float32 [M, C]: y, or dx
    M,
    K,
    C,
    stride_wc,
    stride_wk,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    await_inputs()
    c_blocks = tl.cdiv(C, BLOCK_C)
    offs_c = tl.program_id(0) % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_m = tl.program_id(0) // c_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk = tl.arange(0, CHUNKS)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    c = offs_c[None, :, None]
    m = offs_m[None, :, None]
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    acc_small = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    for k0 in range(0, K, CHUNKS * CHUNK):
        k = k0 + chunk
        w = tl.load(w_ptr + c * stride_wc + k * stride_wk, mask=(c < C) & (k < K), other=0.0)
        x = tl.load(x_ptr + m.to(tl.int64) * K + k, mask=(m < M) & (k < K), other=0.0)
        w, w_small = split_to_tf32(w)  # [CHUNKS, BLOCK_C, CHUNK]
        x, x_small = split_to_tf32(x)  # [CHUNKS, BLOCK_M, CHUNK]
        x = tl.trans(x, (0, 2, 1))
        small = tl.dot(w_small, x, input_precision="tf32")
        small = tl.dot(w, tl.trans(x_small, (0, 2, 1)), small, input_precision="tf32")
        acc_small += tl.sum(small, axis=0)
        acc += tl.sum(tl.dot(w, x, input_precision="tf32"), axis=0)
    acc = whole_sum(acc, acc_small)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)[:, None]
    mask = (offs_c < C)[:, None] & (offs_m < M)[None, :]
    tl.store(y_ptr + offs_m.to(tl.int64)[None, :] * C + offs_c[:, None], acc, mask=mask)


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := tf32x3.refuse(spec, gpu) or Only(filters=(1, 1))(spec, gpu):
        return reason
    pixels, most = spec.n * spec.h * spec.w, tf32x3.MANY_PIXELS
    return f"{pixels} pixels; it takes up to {most}" if pixels > most else None


def _launch(_: tuple, operands: ConvOperands) -> None:
    x, weight, bias, y, *_ = operands
    k, c = x.shape[-1], y.shape[-1]
    m = x.numel() // k
    strides = (1, c) if operands.dgrad else (k, 1)
    _linear_tf32x3_kernel[(triton.cdiv(m, TILE) * triton.cdiv(c, TILE),)](
        x, weight, bias, y, m, k, c, *strides, CHUNKS=CHUNKS, CHUNK=CHUNK, BLOCK_C=TILE,
        BLOCK_M=TILE, num_warps=4, num_stages=1, **overlapping(x.device),
    )  # fmt: skip


LINEAR = Kernel("linear_tf32x3", refuse=_refuse, launch=_launch)
