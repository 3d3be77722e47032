"""A second kernel of `conv.hopper.unfused_1x1`, where there are about as many tiles as
multiprocessors: a program does one.

Of the 4 us of such a layer half is its launch, and most of the rest waiting for memory, which takes
a microsecond however little is asked for. So a program asks for all it needs before anything else,
or for as much as fits. No warp is there for loads alone: it would begin later than the first does.

Every buffer and every barrier is an allocation of its own, and has one copy into it. Between uses
of one allocation the compiler has all warps meet, whichever part of it is meant.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from ....hopper.compat import sync_threads, tma_load, tma_store
from ....hopper.pairs import round_pairs
from ....hopper.pipeline import wait_for


@gluon.jit
def _expect(bars, slot: gl.constexpr, PIXELS: gl.constexpr, C_BLOCKS: gl.constexpr):
    mbarrier.expect(bars[slot * (1 + C_BLOCKS)], PIXELS * 128)
    for j in gl.static_range(C_BLOCKS):
        mbarrier.expect(bars[slot * (1 + C_BLOCKS) + 1 + j], 64 * 128)


@gluon.jit
def _load(
    x_desc, w_desc, x_bufs, w_bufs, bars, m0, c0,
    k: gl.constexpr, slot: gl.constexpr, C_BLOCKS: gl.constexpr, DGRAD: gl.constexpr,
):  # fmt: skip
    """The pixels and the filters of the k-th 64 channels of the sum."""
    bar: gl.constexpr = slot * (1 + C_BLOCKS)
    tma_load(x_desc, [m0, k * 64], bars[bar], x_bufs[slot])
    for j in gl.static_range(C_BLOCKS):
        buf = w_bufs[slot * C_BLOCKS + j]
        if DGRAD:
            tma_load(w_desc, [k * 64, c0 + j * 64], bars[bar + 1 + j], buf)
        else:
            tma_load(w_desc, [c0 + j * 64, k * 64], bars[bar + 1 + j], buf)


@gluon.jit
def _load_bias(bias_ptr, c0, C, VECTOR: gl.constexpr):
    offs = c0 + gl.arange(0, 64, layout=VECTOR)
    return gl.load(bias_ptr + offs, mask=offs < C, other=0.0)


@gluon.jit
def conv_unfused_single_tile_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]: x, or dy
    w_desc,  # [CO, CI] in boxes [64, 64]
    y_desc,  # [M, C] in boxes [PIXELS, 64]: y, or dx
    bias_ptr,  # [C] or None
    C,
    PIXELS: gl.constexpr,  # of a tile
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    C_BLOCKS: gl.constexpr,  # of 64 channels of y, of a tile
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of K_BLOCKS, in shared memory
    num_warps: gl.constexpr,  # 4, or 8, each half of which does half of the pixels
):
    HALVES: gl.constexpr = num_warps // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, HALVES], [16, PIXELS // HALVES, 16]
    )
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = ()
    w_bufs = ()
    bars = ()
    for _ in gl.static_range(BLOCKS):
        x_bufs = x_bufs + (gl.allocate_shared_memory(dtype, [PIXELS, 64], x_desc.layout),)
    for _ in gl.static_range(BLOCKS * C_BLOCKS):
        w_bufs = w_bufs + (gl.allocate_shared_memory(dtype, [64, 64], w_desc.layout),)
    for _ in gl.static_range(BLOCKS * (1 + C_BLOCKS)):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(BLOCKS * (1 + C_BLOCKS)):
        mbarrier.init(bars[i], count=1)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same pixels
    groups = (C + C_BLOCKS * 64 - 1) // (C_BLOCKS * 64)
    c0 = gl.program_id(0) % groups * (C_BLOCKS * 64)
    m0 = gl.program_id(0) // groups * PIXELS
    for k in gl.static_range(BLOCKS):
        _expect(bars, k, PIXELS, C_BLOCKS)
    for k in gl.static_range(BLOCKS):
        _load(x_desc, w_desc, x_bufs, w_bufs, bars, m0, c0, k, k, C_BLOCKS, DGRAD)

    # Before the products, where nothing waits for them, if there are registers to keep them in.
    EARLY: gl.constexpr = C_BLOCKS * PIXELS // HALVES <= 256
    biases = ()
    accs = ()
    for j in gl.static_range(C_BLOCKS):
        if bias_ptr is not None and EARLY:
            biases = biases + (_load_bias(bias_ptr, c0 + j * 64, C, VECTOR),)
        accs = accs + (gl.zeros([64, PIXELS], gl.float32, LAYOUT),)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.wait(bars[k % BLOCKS * (1 + C_BLOCKS)], k // BLOCKS & 1)
        sums = ()
        for j in gl.static_range(C_BLOCKS):
            mbarrier.wait(bars[k % BLOCKS * (1 + C_BLOCKS) + 1 + j], k // BLOCKS & 1)
            w = w_bufs[k % BLOCKS * C_BLOCKS + j]
            if DGRAD:
                w = w.permute((1, 0))
            x = x_bufs[k % BLOCKS].permute((1, 0))
            sums = sums + (warpgroup_mma(w, x, accs[j], use_acc=k > 0, is_async=True),)
        accs = sums
        if k > 0 and k - 1 + BLOCKS < K_BLOCKS:  # what the block before lay in is free
            accs = wait_for(C_BLOCKS, accs, C_BLOCKS)
            sync_threads()
            _expect(bars, (k - 1) % BLOCKS, PIXELS, C_BLOCKS)
            _load(
                x_desc, w_desc, x_bufs, w_bufs, bars, m0, c0, k - 1 + BLOCKS, (k - 1) % BLOCKS,
                C_BLOCKS, DGRAD,
            )  # fmt: skip
    accs = wait_for(0, accs, C_BLOCKS)
    sync_threads()  # where results go the products of other warps may have read from

    y_bufs = ()
    for j in gl.static_range(C_BLOCKS):
        y = accs[j]
        if bias_ptr is not None:
            if EARLY:
                bias = biases[j]
            else:
                bias = _load_bias(bias_ptr, c0 + j * 64, C, VECTOR)
            y += bias.to(gl.float32)[:, None]
        y_bufs = y_bufs + (gl.allocate_shared_memory(dtype, [PIXELS, 64], y_desc.layout),)
        y_bufs[j].permute((1, 0)).store(round_pairs(y, dtype))
    fence_async_shared()
    for j in gl.static_range(C_BLOCKS):
        tma_store(y_desc, [m0, c0 + j * 64], y_bufs[j])
    tma.store_wait(0)
