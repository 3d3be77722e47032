"""A third kernel of `conv.hopper.unfused` for 1x1 filters, of long sums over many pixels.

Filters of 320 and more channels leave no room for pixels if they stay (`bare_points`), and a
program a tile has an end and a beginning in which nothing is fetched (`bare_once`). Here a program
goes from tile to tile, pixels and filters pass by in one ring, and a warp fetches those of the next
tile while this one's results are stored. All of 192 channels a tile: pixels are fetched once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
)

from ...hopper.compat import sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import (
    give_back,
    new_barrier_pairs,
    wait_empty,
    wait_for,
    wait_full,
)


@gluon.jit
def _load(
    x_desc, w_desc, x_bufs, w_bufs, full, empty, tiles, groups,
    PIXELS: gl.constexpr, K_BLOCKS: gl.constexpr, C_BLOCKS: gl.constexpr, DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    block = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m = tile // groups * PIXELS
        c0 = tile % groups * (C_BLOCKS * 64)
        for k in range(K_BLOCKS):
            slot, bar = wait_empty(full, empty, block, BLOCKS, (PIXELS + C_BLOCKS * 64) * 128)
            tma_load(x_desc, [m, k * 64], bar, x_bufs.index(slot))
            for j in gl.static_range(C_BLOCKS):
                buf = w_bufs.index(slot * C_BLOCKS + j)
                c = c0 + j * 64
                if DGRAD:
                    tma_load(w_desc, [k * 64, c], bar, buf)
                else:
                    tma_load(w_desc, [c, k * 64], bar, buf)
            block += 1


@gluon.jit
def _multiply(
    y_desc, x_bufs, w_bufs, y_bufs, full, empty, bias_ptr, C, tiles, groups,
    GROUP: gl.constexpr, PIXELS: gl.constexpr, K_BLOCKS: gl.constexpr, C_BLOCKS: gl.constexpr,
    DGRAD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """64 of each tile's channels."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    block = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        c = tile % groups * (C_BLOCKS * 64) + GROUP * 64
        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        for k in gl.static_range(K_BLOCKS):
            slot = wait_full(full, block + k, BLOCKS)
            w = w_bufs.index(slot * C_BLOCKS + GROUP)
            if DGRAD:
                w = w.permute((1, 0))
            x = x_bufs.index(slot).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
            if k > 0:  # the product before is done
                acc = wait_for(1, (acc,), 1)[0]
                sync_threads()
                give_back(empty, block + k - 1, BLOCKS)
        acc = wait_for(0, (acc,), 1)[0]
        sync_threads()
        give_back(empty, block + K_BLOCKS - 1, BLOCKS)
        block += K_BLOCKS

        if bias_ptr is not None:
            offs = c + gl.arange(0, 64, layout=VECTOR)
            bias = gl.load(bias_ptr + offs, mask=offs < C, other=0.0)
            acc += bias.to(gl.float32)[:, None]
        tma.store_wait(0)  # of the tile before
        sync_threads()
        y_bufs.index(GROUP).permute((1, 0)).store(round_pairs(acc, y_bufs.dtype))
        fence_async_shared()
        tma_store(y_desc, [tile // groups * PIXELS, c], y_bufs.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def conv_bare_ring_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]: x, or dy
    w_desc,  # [CO, CI] in boxes [64, 64]
    y_desc,  # [M, C] in boxes [PIXELS, 64]: y, or dx
    bias_ptr,  # [C] or None
    M,
    C,
    PIXELS: gl.constexpr,  # of a tile
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    C_BLOCKS: gl.constexpr,  # of 64 channels of y, of a tile: a warpgroup each; 2 or 3
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels and filters in shared memory
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, PIXELS, 64], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [BLOCKS * C_BLOCKS, 64, 64], w_desc.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [C_BLOCKS, PIXELS, 64], y_desc.layout)
    full, empty = new_barrier_pairs(BLOCKS, C_BLOCKS)
    fence_async_shared()
    sync_threads()

    groups = (C + C_BLOCKS * 64 - 1) // (C_BLOCKS * 64)
    tiles = (M + PIXELS - 1) // PIXELS * groups
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, x_bufs, w_bufs, y_bufs, full, empty, bias_ptr, C, tiles, groups, role,
                    PIXELS, K_BLOCKS, C_BLOCKS, DGRAD, BLOCKS,
                ),
            )
            if role < C_BLOCKS
            else (
                _load,
                (
                    x_desc, w_desc, x_bufs, w_bufs, full, empty, tiles, groups, PIXELS, K_BLOCKS,
                    C_BLOCKS, DGRAD, BLOCKS,
                ),
            )
            for role in ((0, 1, 2) if C_BLOCKS == 2 else (0, 1, 2, 3))
        ],
        [4, 1] if C_BLOCKS == 2 else [4, 4, 1],
        [232, 32] if C_BLOCKS == 2 else [160, 160, 24],
    )  # fmt: skip
