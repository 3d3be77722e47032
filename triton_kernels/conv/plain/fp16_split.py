"""float32 operands of a product as float16 numbers: one of each, or two whose sum it is.

A float16 number has the 11 bits of a TF32 number, and two have the 22 of two, but not their range.
So each channel is first multiplied by a power of four that brings its largest finite number to 2^14
or more, below 2^16. Of those less than 2^-28 of it one part loses bits, and two of less than 2^-17.

In a weight gradient, a sum over pixels of one channel of x and one of dy, these powers stand
outside of the sum. So no channel costs another one bits, whatever their scales.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dependent_launch import await_inputs, following, overlapping
from ...runtime.device import describe

_CHANNELS = 64  # of a program
_PIXELS_LOOKING, _PIXELS_CONVERTING = 128, 64  # of a step


@triton.jit
def _largest_kernel(
    x_ptr,  # [M, CI]
    dy_ptr,  # [M, CO]
    out_ptr,  # uint8 [chunks of x and of dy, splits, BLOCK_C]: exponents of the largest numbers
    M,
    CI,
    CO,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    ptr, num_c, offs_c = _chunk(x_ptr, dy_ptr, CI, CO, BLOCK_C)
    first, step = tl.program_id(1) * BLOCK_M, tl.num_programs(1) * BLOCK_M
    largest = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    v = _load(ptr, first, M, num_c, offs_c, BLOCK_M)
    for start in range(first, M, step):
        after = _load(ptr, start + step, M, num_c, offs_c, BLOCK_M)
        v = tl.abs(v)
        largest = tl.maximum(largest, tl.where(v < float("inf"), v, 0.0))
        v = after
    # the next exponent, from 2 - 2^-9 on: that may be rounded to a float16 number that is infinite
    exponent = (tl.max(largest, axis=0).to(tl.int32, bitcast=True) + 0x4000) >> 23
    out_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_C
    tl.store(out_ptr + tl.arange(0, BLOCK_C), exponent.to(tl.uint8))


@triton.jit
def _chunk(x_ptr, dy_ptr, CI, CO, BLOCK_C: tl.constexpr):
    """Of this program: the tensor, how many channels that has, and which of them are meant."""
    chunk = tl.program_id(0)
    chunks_x = tl.cdiv(CI, BLOCK_C)
    second = chunk >= chunks_x
    ptr = dy_ptr if second else x_ptr
    first = tl.where(second, chunk - chunks_x, chunk) * BLOCK_C
    return ptr, tl.where(second, CO, CI), first + tl.arange(0, BLOCK_C)


@triton.jit
def _load(ptr, start, M, num_c, offs_c, BLOCK_M: tl.constexpr):
    """Pixels from `start` on, as zeros where there are none. From the cache that multiprocessors
    share, so that it may be asked before `await_inputs`."""
    offs_m = start + tl.arange(0, BLOCK_M)
    mask = ((offs_m >= 0) & (offs_m < M))[:, None] & (offs_c < num_c)[None, :]
    ptrs = ptr + (offs_m[:, None] * num_c + offs_c[None, :])
    return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _power_of_two(exponent):
    """Of exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp16_split_kernel(
    x_ptr,  # [M, CI]
    dy_ptr,  # [M, CO]
    x_out_ptr,  # float16 [PARTS, M, CI]
    dy_out_ptr,  # float16 [PARTS, M, CO]
    largest_ptr,  # of `_largest_kernel`
    factors_ptr,  # float32 [CI + CO]
    M,
    CI,
    CO,
    splits,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least splits
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    ptr, num_c, offs_c = _chunk(x_ptr, dy_ptr, CI, CO, BLOCK_C)
    second = tl.program_id(0) >= tl.cdiv(CI, BLOCK_C)
    out_ptr = dy_out_ptr if second else x_out_ptr
    mask_c = offs_c < num_c
    first, step = tl.program_id(1) * BLOCK_M, tl.num_programs(1) * BLOCK_M
    # the last pixels first: they may be in the cache still. They were there before the kernel in
    # front of this one, which has waited for whoever wrote them
    last = (tl.cdiv(M, BLOCK_M) - 1) * BLOCK_M
    v = _load(ptr, last - first, M, num_c, offs_c, BLOCK_M)
    await_inputs()

    offs_p = tl.arange(0, BLOCK_P)[:, None]
    seen_ptrs = largest_ptr + tl.program_id(0) * splits * BLOCK_C + offs_p * BLOCK_C
    seen = tl.load(seen_ptrs + tl.arange(0, BLOCK_C)[None, :], offs_p < splits, 0).to(tl.int32)
    half = tl.minimum((15 + 127 - tl.max(seen, axis=0)) >> 1, 63)  # at least -57
    if tl.program_id(1) == 0:
        factor_ptrs = factors_ptr + tl.where(second, CI, 0) + offs_c
        tl.store(factor_ptrs, _power_of_two(-half), mask=mask_c)
    scale = _power_of_two(2 * half)[None, :]

    for start in range(first, M, step):
        after = _load(ptr, last - start - step, M, num_c, offs_c, BLOCK_M)
        offs_m = last - start + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & mask_c[None, :]
        offs = offs_m[:, None] * num_c + offs_c[None, :]
        v *= scale
        big = v.to(tl.float16)
        tl.store(out_ptr + offs, big, mask=mask)
        if PARTS == 2:
            tl.store(out_ptr + M * num_c + offs, (v - big.to(tl.float32)).to(tl.float16), mask=mask)
        v = after


def in_halves(
    x: Tensor,  # contiguous float32 [..., CI]
    dy: Tensor,  # contiguous float32 [..., CO], of as many pixels
    parts: int,  # 1 or 2
) -> tuple[Tensor, Tensor, Tensor]:
    """float16 [parts, ..., CI] and [parts, ..., CO], and float32 [CI + CO], a factor a channel. A
    product of two channels has to be multiplied twice by the product of their factors, which is a
    float32; its square may be none. Where x is infinite or NaN its second part is NaN."""
    (ci, co), m = (t.shape[-1] for t in (x, dy)), x[..., 0].numel()
    chunks = triton.cdiv(ci, _CHANNELS) + triton.cdiv(co, _CHANNELS)
    most = describe(x.device).loops // chunks  # programs for each chunk of channels
    splits = _programs(m, _PIXELS_LOOKING, most)
    largest = x.new_empty((chunks, splits, _CHANNELS), dtype=torch.uint8)
    factors = x.new_empty((ci + co,), dtype=torch.float32)
    halves = [x.new_empty((parts, *t.shape), dtype=torch.float16) for t in (x, dy)]
    _largest_kernel[(chunks, splits)](
        x, dy, largest, m, ci, co, BLOCK_M=_PIXELS_LOOKING, BLOCK_C=_CHANNELS, num_warps=8,
        **overlapping(x.device),
    )  # fmt: skip
    _fp16_split_kernel[(chunks, _programs(m, _PIXELS_CONVERTING, most))](
        x, dy, *halves, largest, factors, m, ci, co, splits, PARTS=parts,
        BLOCK_P=triton.next_power_of_2(splits), BLOCK_M=_PIXELS_CONVERTING, BLOCK_C=_CHANNELS,
        **following(x.device),
    )  # fmt: skip
    return *halves, factors


def _programs(pixels: int, step: int, most: int) -> int:
    """Programs that share the pixels of a channel, at most `most`, with equally many steps each."""
    steps = max(triton.cdiv(pixels, step), 1)
    return triton.cdiv(steps, triton.cdiv(steps, max(most, 1)))
