"""The kernel of `conv.hopper.unfused` for 1x1 filters: a product [pixels, K] times [K, C].

Such a convolution is bound by memory, and a matrix product in the usual tiles by the L2 cache: it
fetches the filters again for every tile of pixels, and the pixels for every block of channels. Here
a program keeps the filters of its channels, all of K, and lets the pixels pass by.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from ...hopper.compat import sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import (
    give_back,
    new_barrier_pairs,
    new_barriers,
    wait_empty,
    wait_for,
    wait_full,
)


@gluon.jit
def _load(
    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, first, stride, tiles, c0,
    PIXELS: gl.constexpr, K_BLOCKS: gl.constexpr, C_BLOCKS: gl.constexpr,
    DGRAD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(w_full.index(0), K_BLOCKS * C_BLOCKS * 64 * 128)
    for k in range(K_BLOCKS):
        for j in gl.static_range(C_BLOCKS):
            buf = w_bufs.index(k * C_BLOCKS + j)
            c = c0 + j * 64
            if DGRAD:
                tma_load(w_desc, [k * 64, c], w_full.index(0), buf)
            else:
                tma_load(w_desc, [c, k * 64], w_full.index(0), buf)
    block = 0
    for tile in range(first, tiles, stride):
        for k in range(K_BLOCKS):
            stage, bar = wait_empty(x_full, x_empty, block, BLOCKS, PIXELS * 128)
            tma_load(x_desc, [tile * PIXELS, k * 64], bar, x_bufs.index(stage))
            block += 1


@gluon.jit
def _multiply(
    y_desc, x_bufs, w_bufs, y_bufs, x_full, x_empty, w_full, turns, bias_ptr,
    C, first, stride, tiles, c0,
    GROUP: gl.constexpr, PIXELS: gl.constexpr, K_BLOCKS: gl.constexpr, C_BLOCKS: gl.constexpr,
    DGRAD: gl.constexpr, BLOCKS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Every other tile, beginning with that of GROUP. The groups multiply in turn: a barrier knows
    two states, and so would take blocks of the other's tile for those of this one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    block = GROUP * K_BLOCKS
    stored = 0
    phase = 0
    mbarrier.wait(w_full.index(0), 0)
    for tile in range(first + GROUP * stride, tiles, 2 * stride):
        accs = ()
        for _ in gl.static_range(C_BLOCKS):
            accs = accs + (gl.zeros([64, PIXELS], gl.float32, LAYOUT),)
        mbarrier.wait(turns.index(GROUP), phase ^ (1 - GROUP))
        for k in gl.static_range(K_BLOCKS):
            stage = wait_full(x_full, block + k, BLOCKS)
            x = x_bufs.index(stage).permute((1, 0))
            sums = ()
            for j in gl.static_range(C_BLOCKS):
                w = w_bufs.index(k * C_BLOCKS + j)
                if DGRAD:
                    w = w.permute((1, 0))
                sums = sums + (warpgroup_mma(w, x, accs[j], use_acc=k > 0, is_async=True),)
            accs = sums
            if k > 0:  # those of the block before are done
                accs = wait_for(C_BLOCKS, accs, C_BLOCKS)
                sync_threads()
                give_back(x_empty, block + k - 1, BLOCKS)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        accs = wait_for(0, accs, C_BLOCKS)
        sync_threads()
        give_back(x_empty, block + K_BLOCKS - 1, BLOCKS)
        block += 2 * K_BLOCKS

        for j in gl.static_range(C_BLOCKS):
            y = accs[j]
            c = c0 + j * 64
            if bias_ptr is not None:
                offs = c + gl.arange(0, 64, layout=VECTOR)
                bias = gl.load(bias_ptr + offs, mask=offs < C, other=0.0)
                y += bias.to(gl.float32)[:, None]
            slot = GROUP * OUT + stored % OUT
            tma.store_wait(OUT - 1)  # the one that was there
            y_bufs.index(slot).permute((1, 0)).store(round_pairs(y, y_bufs.dtype))
            fence_async_shared()
            tma_store(y_desc, [tile * PIXELS, c], y_bufs.index(slot))
            stored += 1
        phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def conv_bare_points_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]: x, or dy
    w_desc,  # [CO, CI] in boxes [64, 64]
    y_desc,  # [M, C] in boxes [PIXELS, 64]: y, or dx
    bias_ptr,  # [C] or None
    M,
    C,
    PIXELS: gl.constexpr,  # of a tile: 128 or 256
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    C_BLOCKS: gl.constexpr,  # of 64 channels of y, of a program
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    OUT: gl.constexpr,  # of results there, for either warpgroup
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, PIXELS, 64], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [K_BLOCKS * C_BLOCKS, 64, 64], w_desc.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [2 * OUT, PIXELS, 64], y_desc.layout)
    x_full, x_empty = new_barrier_pairs(BLOCKS)
    w_full = new_barriers(1)
    turns = new_barriers(2)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same tile
    groups = (C + C_BLOCKS * 64 - 1) // (C_BLOCKS * 64)
    c0 = gl.program_id(0) % groups * (C_BLOCKS * 64)
    first = gl.program_id(0) // groups
    stride = gl.num_programs(0) // groups
    tiles = (M + PIXELS - 1) // PIXELS
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, x_bufs, w_bufs, y_bufs, x_full, x_empty, w_full, turns, bias_ptr, C,
                    first, stride, tiles, c0, role, PIXELS, K_BLOCKS, C_BLOCKS, DGRAD, BLOCKS, OUT,
                ),
            )
            if role < 2
            else (
                _load,
                (
                    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, first, stride, tiles,
                    c0, PIXELS, K_BLOCKS, C_BLOCKS, DGRAD, BLOCKS,
                ),
            )
            for role in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
