"""The kernel of `conv.gluon.once_wide`: a tile of pixels and all 192 channels of the result, 64 by
each of three warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...dependent_launch import await_inputs
from ...gluon.pairs import round_pairs, widen_pairs
from ...gluon.pipeline import new_barriers, sync_threads


@gluon.jit
def _multiply(
    y_desc, x_bufs, x_full, w_bufs, w_full, stages, beside_full, bias_ptr, partial_ptr, tile,
    GROUP: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """Of a warpgroup: its 64 channels."""
    K_BLOCKS: gl.constexpr = x_bufs.shape[0]
    PIXELS: gl.constexpr = x_bufs.shape[1]
    C: gl.constexpr = stages.shape[0] * 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    offs = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    bias = gl.load(bias_ptr + offs)
    acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
    mbarrier.wait(w_full.index(GROUP), 0)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.wait(x_full.index(k), 0)
        w = w_bufs.index(GROUP * K_BLOCKS + k)
        x = x_bufs.index(k).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    y = acc + bias[:, None]
    stage = stages.index(GROUP)
    if BESIDE:
        mbarrier.wait(beside_full.index(GROUP), 0)
        y += widen_pairs(stage.permute((1, 0)).load(LAYOUT))
    y = round_pairs(y, stages.dtype)
    stage.permute((1, 0)).store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [tile * PIXELS, GROUP * 64], stage)
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel
        total = gl.sum(widen_pairs(y), axis=1)
        d = widen_pairs(y) - (total * (1.0 / PIXELS))[:, None]
        to = partial_ptr + tile.to(gl.int64) * 2 * C + offs
        gl.store(to, total)
        gl.store(to + C, gl.sum(d * d, axis=1))
    tma.store_wait(0)


@gluon.jit
def conv_once_wide_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]
    w_desc,  # [C, K] in boxes [64, 64]
    residual_desc,  # [M, C] in boxes [PIXELS, 64], or None
    y_desc,  # likewise
    bias_ptr,  # float32 [C]
    partial_ptr,  # float32 [M / PIXELS, 2, C] or None
    PIXELS: gl.constexpr,  # of a tile
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    BESIDE: gl.constexpr = residual_desc is not None
    x_bufs = gl.allocate_shared_memory(dtype, [K_BLOCKS, PIXELS, 64], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [3 * K_BLOCKS, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [3, PIXELS, 64], y_desc.layout)
    x_full = new_barriers(K_BLOCKS)
    w_full = new_barriers(3)
    beside_full = w_full
    if BESIDE:
        beside_full = new_barriers(3)
    fence_async_shared()
    sync_threads()
    for j in gl.static_range(3):
        bar = w_full.index(j)
        mbarrier.expect(bar, K_BLOCKS * 64 * 128)
        for k in gl.static_range(K_BLOCKS):
            w = w_bufs.index(j * K_BLOCKS + k)
            tma.async_copy_global_to_shared(w_desc, [j * 64, k * 64], bar, w)
    await_inputs()
    tile = gl.program_id(0)
    for k in gl.static_range(K_BLOCKS):
        bar = x_full.index(k)
        mbarrier.expect(bar, PIXELS * 128)
        tma.async_copy_global_to_shared(x_desc, [tile * PIXELS, k * 64], bar, x_bufs.index(k))
    if BESIDE:
        for j in gl.static_range(3):
            bar = beside_full.index(j)
            mbarrier.expect(bar, PIXELS * 128)
            at = [tile * PIXELS, j * 64]
            tma.async_copy_global_to_shared(residual_desc, at, bar, stages.index(j))
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, x_bufs, x_full, w_bufs, w_full, stages, beside_full, bias_ptr,
                    partial_ptr, tile, group, BESIDE,
                ),
            )
            for group in (0, 1, 2)
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
