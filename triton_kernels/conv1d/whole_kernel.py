"""The kernel of `conv1d.whole`: a piece of a convolution over short sequences of many samples.

Legend as in `conv1d_kernels`; a block is 128 bytes of channels, and P = SAMPLES TT the positions of
a program. In shared memory the sample is the row of a block and the time the row of rows: a tap of
the filter is then the same block from another row on, and always by a multiple of 8 rows, which is
what the swizzle of TMA and the products agree about.

      t = -2   | 8 channels ... of samples n0, n0 + 1, ...   zeros, from TMA
      t = -1   |                                             zeros
    > t = 0    |   tap 2 begins here, for the times 0 .. TT - 1 of the result
      ...

Where a convolution has a stride of 2, every other time comes first: a tap sees those or the rest.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, view_from
from ..hopper.pipeline import new_barriers
from ..tf32 import split_to_tf32


@gluon.jit
def _load_filters(w_desc, w_bufs, w_full, row_0, block, slot, TILES: gl.constexpr):
    WIDTH: gl.constexpr = w_desc.block_type.shape[2]
    bar = w_full.index(slot)
    mbarrier.expect(bar, TILES * 64 * 128)
    for i in gl.static_range(TILES):
        at = [i, row_0, block * WIDTH]
        tma_load(w_desc, at, bar, w_bufs.index(slot * TILES + i))


@triton.constexpr_function
def _row(j, times, stride):
    """Where of so many times the j-th lies: the first of each stride, then the second."""
    return j // stride + j % stride * ((times + stride - 1) // stride)


@gluon.jit
def _load_samples(
    x_desc, x_bufs, x_full, t, n, block, second, slot,
    PARTS: gl.constexpr, TIMES: gl.constexpr, SAMPLES: gl.constexpr, TOGETHER: gl.constexpr,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """A block of channels, and the block `second` channels behind it if there are two parts."""
    WIDTH: gl.constexpr = x_desc.block_type.shape[2]
    BOX: gl.constexpr = [TOGETHER, SAMPLES, WIDTH]
    LAYOUT: gl.constexpr = x_desc.layout  # Triton 3.6 does not take it as an argument as it is
    SLOT: gl.constexpr = PARTS * TIMES * SAMPLES // 8  # chunks
    bar = x_full.index(slot)
    mbarrier.expect(bar, PARTS * TIMES * SAMPLES * 128)
    for part in gl.static_range(PARTS):
        for j in gl.static_range(TIMES // TOGETHER):
            buf = view_from(
                x_bufs, slot * SLOT, BOX, LAYOUT,
                (part * TIMES + _row(j * TOGETHER, TIMES, STRIDE)) * SAMPLES // 8, SLOT,
            )  # fmt: skip
            at = [t + j * TOGETHER, n, block * WIDTH + part * second]
            tma_load(x_desc, at, bar, buf)


@gluon.jit
def _positions(
    x_bufs, first, place: gl.constexpr, STEP: gl.constexpr, P: gl.constexpr, WIDTH: gl.constexpr
):
    """P rows from chunk `first` + place on, as the right operand of a product. STEP divides
    `first`."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, x_bufs.dtype.primitive_bitwidth)
    return view_from(x_bufs, first, [P, WIDTH], MATRIX, place, STEP).permute((1, 0))


@gluon.jit
def _multiply_tap(
    acc, w_bufs, x_bufs, tile, first, place: gl.constexpr, second: gl.constexpr,
    STEP: gl.constexpr, P: gl.constexpr, WIDTH: gl.constexpr, SPLIT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The product of a filter [64, WIDTH] with P positions from chunk `first` + place on, not
    waited for. STEP divides `first`. SPLIT: of float32, as three of TF32, where smaller halves of
    the positions are `second` chunks on."""
    w = w_bufs.index(tile)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, w.dtype.primitive_bitwidth)
    w = reinterpret(w, w.dtype, [64, WIDTH], MATRIX)
    x = _positions(x_bufs, first, place, STEP, P, WIDTH)
    if SPLIT:
        big, small = split_to_tf32(w.load(gl.DotOperandLayout(0, LAYOUT, 1)))
        acc = warpgroup_mma(small, x, acc, is_async=True)
        small_x = _positions(x_bufs, first, place + second, STEP, P, WIDTH)
        acc = warpgroup_mma(big, small_x, acc, is_async=True)
        acc = warpgroup_mma(big, x, acc, is_async=True)
        return warpgroup_mma_wait(3, deps=(acc,))  # the tap before is done with its registers
    else:
        return warpgroup_mma(w, x, acc, is_async=True)


@gluon.jit
def _store(
    out_ptr, acc, split, m, t, n, N,
    CO: gl.constexpr, LENGTH: gl.constexpr, TIMES: gl.constexpr, STEP: gl.constexpr, first,
):  # fmt: skip
    """The partial sums [channel m, position (t, n)] where t < TIMES, to times first + STEP t."""
    inside = (n < N) & (t < TIMES)
    to = (split * N + n).to(gl.int64) * (CO * LENGTH) + (first + STEP * t) * CO
    out = out_ptr + to[None, :] + m[:, None]
    gl.store(out, acc, mask=inside[None, :])


@gluon.jit(do_not_specialize=["N"])
def conv1d_whole_kernel(
    x_desc,  # [T, N, C] in boxes [TOGETHER, SAMPLES, WIDTH]; SPLIT: [T, N, 2C], see `_multiply_tap`
    w_desc,  # [taps and skip, R, C] in boxes [1, 64, WIDTH]; R is CO, or 2 CO
    out_ptr,  # float32 [splits, N, TO, CO], out
    side_ptr,  # float32 [splits, N, T, CO], out: the 1x1 skip, or None
    N,
    C: gl.constexpr,
    T: gl.constexpr,
    CO: gl.constexpr,
    TAPS: gl.constexpr,
    STRIDE: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SPLIT: gl.constexpr,
    SAMPLES: gl.constexpr,  # of a program: a multiple of 8
    TT: gl.constexpr,  # its times
    BLOCKS: gl.constexpr,  # its input channels, in units of WIDTH
    SLOTS: gl.constexpr,  # blocks that are in shared memory at once
    TOGETHER: gl.constexpr,  # times fetched by an instruction
    PDL: gl.constexpr,
):
    """What there is room for is asked for at once: the filters before the previous kernel has
    ended, the samples behind the wait."""
    dtype: gl.constexpr = x_desc.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    WIDTH: gl.constexpr = 1024 // BITS
    P: gl.constexpr = SAMPLES * TT
    BEFORE: gl.constexpr = 1 if TRANSPOSED else TAPS // 2
    TIMES: gl.constexpr = TT + 2 if TRANSPOSED else (TT - 1) * STRIDE + TAPS
    LENGTH: gl.constexpr = (T - 1) // STRIDE + 1
    TILES: gl.constexpr = TAPS + (side_ptr is not None)
    PARTS: gl.constexpr = 2 if SPLIT else 1
    ROW: gl.constexpr = SAMPLES // 8  # chunks of a time
    SECOND: gl.constexpr = TIMES * ROW
    SLOT: gl.constexpr = PARTS * SECOND
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 256 // BITS])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    x_bufs = allocate_for_views(dtype, [SLOTS * SLOT, 8, WIDTH], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [SLOTS * TILES, 1, 64, WIDTH], w_desc.layout)
    x_full = new_barriers(SLOTS)
    w_full = new_barriers(SLOTS)
    fence_async_shared()
    sync_threads()

    row_0 = gl.program_id(0) * 64
    parts_t: gl.constexpr = (LENGTH + TT - 1) // TT
    t0 = gl.program_id(1) % parts_t * TT
    n0 = gl.program_id(1) // parts_t * SAMPLES
    split = gl.program_id(2)
    block_0 = split * BLOCKS
    if PDL:
        gdc_launch_dependents()
    for b in gl.static_range(SLOTS):
        _load_filters(w_desc, w_bufs, w_full, row_0, block_0 + b, b, TILES)
    if PDL:
        gdc_wait()
    for b in gl.static_range(SLOTS):
        _load_samples(
            x_desc, x_bufs, x_full, t0 * STRIDE - BEFORE, n0, block_0 + b, C, b,
            PARTS, TIMES, SAMPLES, TOGETHER, STRIDE,
        )  # fmt: skip

    odd = row_0 // CO
    acc = gl.zeros([64, P], gl.float32, LAYOUT)
    if side_ptr is not None:
        side = gl.zeros([64, P], gl.float32, LAYOUT)
    for b in range(BLOCKS):
        slot = b % SLOTS
        mbarrier.wait(w_full.index(slot), b // SLOTS & 1)
        mbarrier.wait(x_full.index(slot), b // SLOTS & 1)
        for i in gl.static_range(TAPS):
            if TRANSPOSED and i == 1:  # x[t - 1], or x[t + 1]
                acc = _multiply_tap(
                    acc, w_bufs, x_bufs, slot * TILES + i, slot * SLOT + 2 * odd * ROW,
                    (BEFORE - 1) * ROW, SECOND, ROW, P, WIDTH, SPLIT, LAYOUT,
                )  # fmt: skip
            else:
                acc = _multiply_tap(
                    acc, w_bufs, x_bufs, slot * TILES + i, slot * SLOT,
                    (BEFORE if TRANSPOSED else _row(i, TIMES, STRIDE)) * ROW, SECOND,
                    SLOT, P, WIDTH, SPLIT, LAYOUT,
                )  # fmt: skip
        if side_ptr is not None:
            side = _multiply_tap(
                side, w_bufs, x_bufs, slot * TILES + TAPS, slot * SLOT,
                BEFORE * ROW, SECOND, SLOT, P, WIDTH, SPLIT, LAYOUT,
            )  # fmt: skip
            side = warpgroup_mma_wait(0, deps=(side,))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if b + SLOTS < BLOCKS:
            sync_threads()  # all warps are done with the slot
            _load_filters(w_desc, w_bufs, w_full, row_0, block_0 + b + SLOTS, slot, TILES)
            _load_samples(
                x_desc, x_bufs, x_full, t0 * STRIDE - BEFORE, n0, block_0 + b + SLOTS, C, slot,
                PARTS, TIMES, SAMPLES, TOGETHER, STRIDE,
            )  # fmt: skip

    m = row_0 % CO + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, LAYOUT))
    t = t0 + p // SAMPLES
    n = n0 + p % SAMPLES
    if TRANSPOSED:
        _store(out_ptr, acc, split, m, t, n, N, CO, 2 * T, T, 2, odd)
    else:
        _store(out_ptr, acc, split, m, t, n, N, CO, LENGTH, LENGTH, 1, 0)
    if side_ptr is not None:
        _store(side_ptr, side, split, m, t, n, N, CO, T, T, 1, 0)
