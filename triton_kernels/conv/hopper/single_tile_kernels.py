"""The kernel of `conv.hopper.single_tile`: a tile of a 1x1 convolution with its epilogue.

Every buffer and every barrier is an allocation of its own, as in `unfused_single_tile`.
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

from ...hopper.compat import sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...runtime.dependent_launch import await_inputs


@gluon.jit
def conv_single_tile_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]
    w_desc,  # [C, K] in boxes [64, 64]
    residual_desc,  # [M, C] in boxes [PIXELS, 64], or None
    y_desc,  # likewise
    bias_ptr,  # float32 [C]
    partial_ptr,  # float32 [M / PIXELS, 2, C] or None
    factor,  # multiplies the sum; or None
    C,
    PIXELS: gl.constexpr,  # of a tile
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    dtype: gl.constexpr = x_desc.dtype
    stage = gl.allocate_shared_memory(dtype, [PIXELS, 64], y_desc.layout)
    if residual_desc is not None:
        residual_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(residual_bar, count=1)
    # programs that are neighbours do the same pixels
    blocks_c = C // 64
    tile = gl.program_id(0) // blocks_c
    c0 = gl.program_id(0) % blocks_c * 64
    x_bufs = ()
    w_bufs = ()
    bars = ()
    for _ in gl.static_range(K_BLOCKS):
        x_bufs = x_bufs + (gl.allocate_shared_memory(dtype, [PIXELS, 64], x_desc.layout),)
        w_bufs = w_bufs + (gl.allocate_shared_memory(dtype, [64, 64], w_desc.layout),)
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.init(bars[k], count=1)
    fence_async_shared()
    sync_threads()

    m0 = tile * PIXELS
    for k in gl.static_range(K_BLOCKS):
        mbarrier.expect(bars[k], (64 + PIXELS) * 128)
        tma_load(w_desc, [c0, k * 64], bars[k], w_bufs[k])
    acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
    offs = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    bias = gl.load(bias_ptr + offs)[:, None]
    await_inputs()
    for k in gl.static_range(K_BLOCKS):
        tma_load(x_desc, [m0, k * 64], bars[k], x_bufs[k])
    if residual_desc is not None:
        mbarrier.expect(residual_bar, PIXELS * 128)
        tma_load(residual_desc, [m0, c0], residual_bar, stage)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.wait(bars[k], 0)
        x = x_bufs[k].permute((1, 0))
        acc = warpgroup_mma(w_bufs[k], x, acc, use_acc=k > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    y = acc + bias
    if residual_desc is not None:
        mbarrier.wait(residual_bar, 0)
        y += widen_pairs(stage.permute((1, 0)).load(LAYOUT))
    if factor is not None:
        y *= factor
    y = round_pairs(y, dtype)
    stage.permute((1, 0)).store(y)
    fence_async_shared()
    tma_store(y_desc, [m0, c0], stage)
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel
        total = gl.sum(widen_pairs(y), axis=1)
        d = widen_pairs(y) - (total * (1.0 / PIXELS))[:, None]
        to = partial_ptr + tile.to(gl.int64) * 2 * C + offs
        gl.store(to, total)
        gl.store(to + C, gl.sum(d * d, axis=1))
    tma.store_wait(0)
