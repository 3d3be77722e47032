"""The kernel of `conv.hopper.one_row`: a 3x3 convolution of few images, of which a program has one
row of pixels, or a part of it.

A program does one tile and then ends, and what takes its time is the way to memory and back. So it
asks for as many filters as fit into shared memory before it waits for the previous kernel, and for
all pixels that belong to them at once behind it.

    unit (k, r)   64 channels of the row of pixels above, at or below the tile, and the three
                  filters [64, 64] of that row;  of a 1x1 convolution: one of either

A unit's pixels have margins of half a tile at either end, which TMA reads from the image, or fills
with zeros beyond it: the tap to the left or right is the same tile from another address.

Every buffer and every barrier is an allocation of its own: between uses of one allocation the
compiler has all warps meet, whichever part of it is meant.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper.compat import reinterpret, sync_threads, tma_load, tma_store, view_from
from ...hopper.pairs import round_pairs, widen_pairs
from ...runtime.dependent_launch import await_inputs


@gluon.jit
def _expect(
    x_bars, w_bars,
    unit: gl.constexpr, SLOTS: gl.constexpr, MAIN: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """How much a unit is, to the barriers of its slot."""
    mbarrier.expect(w_bars[unit % SLOTS], (3 if unit < MAIN else 1) * 64 * 128)
    mbarrier.expect(x_bars[unit % SLOTS], 2 * W * 128)


@gluon.jit
def _load_filters(
    w_desc, extra1_w_desc, extra2_w_desc, w_bufs, w_bars, first, c0,
    unit: gl.constexpr, SLOTS: gl.constexpr, MAIN: gl.constexpr, BLOCKS1: gl.constexpr,
):  # fmt: skip
    """Those of a unit, to its slot."""
    slot: gl.constexpr = unit % SLOTS
    bar = w_bars[slot]
    if unit < MAIN:
        k0 = (first + unit) // 3 * 64
        tap = (first + unit) % 3 * 3
        for s in gl.static_range(3):
            buf = w_bufs[slot * 3 + s]
            tma_load(w_desc, [tap + s, c0, k0], bar, buf)
    else:
        buf = w_bufs[slot * 3]
        if unit < MAIN + BLOCKS1:
            at = [0, c0, (unit - MAIN) * 64]
            tma_load(extra1_w_desc, at, bar, buf)
        else:
            at = [0, c0, (unit - MAIN - BLOCKS1) * 64]
            tma_load(extra2_w_desc, at, bar, buf)


@gluon.jit
def _load_pixels(
    x_desc, extra1_desc, extra2_desc, x_bufs, x_bars, first, n, h,
    unit: gl.constexpr, SLOTS: gl.constexpr, MAIN: gl.constexpr, BLOCKS1: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Those of a unit, to its slot."""
    slot: gl.constexpr = unit % SLOTS
    bar = x_bars[slot]
    if unit < MAIN:
        at = [n, h + (first + unit) % 3 - 1, -(W // 2), (first + unit) // 3 * 64]
        tma_load(x_desc, at, bar, x_bufs[slot])
    elif unit < MAIN + BLOCKS1:
        at = [n, h, -(W // 2), (unit - MAIN) * 64]
        tma_load(extra1_desc, at, bar, x_bufs[slot])
    else:
        at = [n, h, -(W // 2), (unit - MAIN - BLOCKS1) * 64]
        tma_load(extra2_desc, at, bar, x_bufs[slot])


@gluon.jit
def _moved(x_buf, s: gl.constexpr, W: gl.constexpr):
    """The tile moved by s - 1 pixels, [64, W]"""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pixels = reinterpret(x_buf, x_buf.dtype, [2 * W, 64], FLAT)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return view_from(pixels, 0, [W, 64], MATRIX, W // 2 + s - 1).permute((1, 0))


@gluon.jit
def _multiply(
    acc, x_bufs, w_bufs,
    unit: gl.constexpr, SLOTS: gl.constexpr, MAIN: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The products of a unit, begun but not waited for."""
    slot: gl.constexpr = unit % SLOTS
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    if unit < MAIN:
        for s in gl.static_range(3):
            w_buf = w_bufs[slot * 3 + s]
            w = reinterpret(w_buf, w_buf.dtype, [64, 64], MATRIX)
            x = _moved(x_bufs[slot], s, W)
            acc = warpgroup_mma(w, x, acc, use_acc=unit + s > 0, is_async=True)
    else:
        w_buf = w_bufs[slot * 3]
        w = reinterpret(w_buf, w_buf.dtype, [64, 64], MATRIX)
        acc = warpgroup_mma(w, _moved(x_bufs[slot], 1, W), acc, is_async=True)
    return acc


@gluon.jit(do_not_specialize=["N"])
def conv_one_row_kernel(
    x_desc,  # [N, H, W, CI] in boxes [1, 1, 2 W, 64]
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64]
    residual_desc,  # [N, H, W, CO] in boxes [1, 1, W, 64], or None
    y_desc,  # the same; None with PARTS > 1
    extra1_desc,  # [N, H, W, C1] in boxes [1, 1, 2 W, 64], or None
    extra1_w_desc,  # [1, CO, C1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    bias_ptr,  # float32 [CO]
    extra_bias_ptr,  # [CO] or None
    emb_ptr,  # [N, CO] or None
    partial_ptr,  # float32 [N, H, 2, CO], out, or None
    parts_ptr,  # PARTS > 1: float32 [PARTS, N, CO, H * W], out
    stride_emb,
    factor,  # multiplies the sum; or None
    N,
    CO,
    H: gl.constexpr,
    W: gl.constexpr,
    BLOCKS: gl.constexpr,  # of 64 channels of x
    BLOCKS1: gl.constexpr,  # of the others
    BLOCKS2: gl.constexpr,
    PARTS: gl.constexpr,  # of the sum, which has no others then, nor has it other terms
    SLOTS: gl.constexpr,  # units in shared memory
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dtype: gl.constexpr = x_desc.dtype
    MAIN: gl.constexpr = (BLOCKS * 3 + PARTS - 1) // PARTS  # of a program
    UNITS: gl.constexpr = MAIN + BLOCKS1 + BLOCKS2
    HAS_RESIDUAL: gl.constexpr = residual_desc is not None
    x_bufs = ()
    w_bufs = ()
    x_bars = ()
    w_bars = ()
    for _ in gl.static_range(SLOTS):
        x_bufs += (gl.allocate_shared_memory(dtype, [1, 1, 2 * W, 64], x_desc.layout),)
        x_bars += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        w_bars += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for _ in gl.static_range(SLOTS * 3):
        w_bufs += (gl.allocate_shared_memory(dtype, [1, 64, 64], w_desc.layout),)
    stage = gl.allocate_shared_memory(dtype, [1, 1, W, 64], x_desc.layout)
    if HAS_RESIDUAL:
        beside_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    warm_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(x_bars[i], count=1)
        mbarrier.init(w_bars[i], count=1)
    if HAS_RESIDUAL:
        mbarrier.init(beside_bar, count=1)
    mbarrier.init(warm_bar, count=1)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same pixels
    blocks_c = CO // 64
    c0 = gl.program_id(0) % blocks_c * 64
    tile = gl.program_id(0) // blocks_c
    n = tile // H
    h = tile % H
    if PARTS > 1:  # what is beyond the last channel is zeros
        first = gl.program_id(1) * MAIN
    else:
        first = 0
    for i in gl.static_range(SLOTS):
        _expect(x_bars, w_bars, i, SLOTS, MAIN, W)
    if HAS_RESIDUAL:
        mbarrier.expect(beside_bar, W * 128)
    for i in gl.static_range(SLOTS):
        _load_filters(
            w_desc, extra1_w_desc, extra2_w_desc, w_bufs, w_bars, first, c0, i, SLOTS, MAIN, BLOCKS1
        )
    # There is no image N, so that nothing is read; but TMA learns of x before it is there.
    mbarrier.expect(warm_bar, 2 * W * 128)
    tma_load(x_desc, [N, 0, 0, 0], warm_bar, x_bufs[SLOTS - 1])
    offs = c0 + gl.arange(0, 64, layout=VECTOR)
    if PARTS == 1:
        bias = gl.load(bias_ptr + offs)
    if extra_bias_ptr is not None:
        bias += gl.load(extra_bias_ptr + offs)
    mbarrier.wait(warm_bar, 0)
    await_inputs()
    for i in gl.static_range(SLOTS):
        _load_pixels(
            x_desc, extra1_desc, extra2_desc, x_bufs, x_bars, first, n, h, i, SLOTS, MAIN,
            BLOCKS1, W,
        )  # fmt: skip
    if HAS_RESIDUAL:  # to where the result will be
        tma_load(residual_desc, [n, h, 0, c0], beside_bar, stage)
    if emb_ptr is not None:
        bias += gl.load(emb_ptr + n.to(gl.int64) * stride_emb + offs)

    acc = gl.zeros([64, W], gl.float32, LAYOUT)
    for i in gl.static_range(UNITS):
        mbarrier.wait(w_bars[i % SLOTS], i // SLOTS & 1)
        mbarrier.wait(x_bars[i % SLOTS], i // SLOTS & 1)
        acc = _multiply(acc, x_bufs, w_bufs, i, SLOTS, MAIN, W)
        if i > 0 and i - 1 + SLOTS < UNITS:  # where the unit before lay is room
            acc = warpgroup_mma_wait(3 if i < MAIN else 1, deps=(acc,))
            sync_threads()
            _expect(x_bars, w_bars, i - 1 + SLOTS, SLOTS, MAIN, W)
            _load_filters(
                w_desc, extra1_w_desc, extra2_w_desc, w_bufs, w_bars, first, c0, i - 1 + SLOTS,
                SLOTS, MAIN, BLOCKS1,
            )  # fmt: skip
            _load_pixels(
                x_desc, extra1_desc, extra2_desc, x_bufs, x_bars, first, n, h, i - 1 + SLOTS,
                SLOTS, MAIN, BLOCKS1, W,
            )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))

    if PARTS > 1:
        row = ((gl.program_id(1) * N + n) * CO + offs).to(gl.int64) * (H * W)
        pixel = h * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(parts_ptr + row[:, None] + pixel[None, :], acc)
    else:
        y = acc + bias[:, None]
        buf = reinterpret(stage, dtype, [W, 64], gl.NVMMASharedLayout(128, 16))
        buf = buf.permute((1, 0))
        if HAS_RESIDUAL:
            mbarrier.wait(beside_bar, 0)
            y += widen_pairs(buf.load(LAYOUT))
        if factor is not None:
            y *= factor
        y = round_pairs(y, dtype)
        buf.store(y)
        fence_async_shared()
        tma_store(y_desc, [n, h, 0, c0], stage)
        if partial_ptr is not None:
            y = widen_pairs(y)
            total = gl.sum(y, axis=1)
            # about the mean of the tile, since a difference of large sums would cancel
            d = y - (total / W)[:, None]
            to = partial_ptr + tile.to(gl.int64) * 2 * CO + offs
            gl.store(to, total)
            gl.store(to + CO, gl.sum(d * d, axis=1))
        tma.store_wait(0)
