"""The kernel of `conv.gluon.bare` for 3x3 filters over rows of 16 to 64 pixels.

A tile is whole rows of an image, 64 channels of the result. With the row above and the one below it
is fetched three times for each block of input channels, moved by a column each time: outside of the
image TMA writes zeros. The three taps of a column of the filter are that block from another row on,
so a pixel is fetched three to four times, not nine. Products take both operands from shared memory.

One warp loads; two warpgroups multiply, a tile each, so that one stores while the other multiplies.
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

from .rows_kernels import round_pairs, sync_threads


@gluon.constexpr_function
def block_chunks(pixels, w):
    """Size of a block of pixels in chunks of 8."""
    return (pixels + 2 * w) // 8


@gluon.jit
def _pixels(x_bufs, chunk, shape: gl.constexpr):
    """Pixels from a chunk on."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=len(shape))
    start = x_bufs.index(chunk)
    return start._reinterpret(start.dtype, shape, LAYOUT)


@gluon.jit
def _load(
    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, K, tiles, tiles_h, blocks_c,
    PIXELS: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    PAIRS: gl.constexpr = PIXELS // W // 2 + 1
    CHUNKS: gl.constexpr = block_chunks(PIXELS, W)
    block = 0
    step = 0
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        c0 = i % blocks_c * 64
        n = i // blocks_c // tiles_h
        h0 = i // blocks_c % tiles_h * (PIXELS // W)
        for k0 in range(0, K, 64):
            for s in gl.static_range(3):
                stage = block % BLOCKS
                bar = x_full.index(stage)
                mbarrier.wait(x_empty.index(stage), (block // BLOCKS & 1) ^ 1)
                mbarrier.expect(bar, PAIRS * 2 * W * 128)
                for j in gl.static_range(PAIRS):
                    rows = _pixels(x_bufs, stage * CHUNKS + j * (W // 4), [1, 2, W, 64])
                    at = [n, h0 + 2 * j - 1, s - 1, k0]
                    tma.async_copy_global_to_shared(x_desc, at, bar, rows)
                block += 1
                for r in gl.static_range(3):
                    slot = step % STEPS
                    bar = w_full.index(slot)
                    mbarrier.wait(w_empty.index(slot), (step // STEPS & 1) ^ 1)
                    mbarrier.expect(bar, 64 * 128)
                    buf = w_bufs.index(slot)
                    if DGRAD:
                        at = [8 - 3 * r - s, k0, c0]
                    else:
                        at = [3 * r + s, c0, k0]
                    tma.async_copy_global_to_shared(w_desc, at, bar, buf)
                    step += 1


@gluon.jit
def _multiply(
    y_desc, x_bufs, w_bufs, y_bufs, x_full, x_empty, w_full, w_empty, turns, bias_ptr,
    K, tiles, tiles_h, blocks_c,
    GROUP: gl.constexpr, PIXELS: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Every other tile, beginning with that of GROUP; in turn, as in `bare_points`."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    CHUNKS: gl.constexpr = block_chunks(PIXELS, W)
    tile_blocks = K // 64 * 3
    block = GROUP * tile_blocks
    step = block * 3
    y_buf = y_bufs.index(GROUP)
    programs = gl.num_programs(0)
    phase = 0
    for i in range(gl.program_id(0) + GROUP * programs, tiles, 2 * programs):
        c0 = i % blocks_c * 64
        n = i // blocks_c // tiles_h
        h0 = i // blocks_c % tiles_h * (PIXELS // W)
        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        mbarrier.wait(turns.index(GROUP), phase ^ (1 - GROUP))
        for j in range(tile_blocks):
            stage = block % BLOCKS
            mbarrier.wait(x_full.index(stage), block // BLOCKS & 1)
            for r in gl.static_range(3):
                slot = step % STEPS
                mbarrier.wait(w_full.index(slot), step // STEPS & 1)
                w = w_bufs.index(slot)
                w = w._reinterpret(w.dtype, [64, 64], gl.NVMMASharedLayout(128, 16))
                if DGRAD:
                    w = w.permute((1, 0))
                x = _pixels(x_bufs, stage * CHUNKS + r * (W // 8), [PIXELS, 64])
                acc = warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # the product before is done
                sync_threads()
                later = j + r > 0
                mbarrier.arrive(w_empty.index((step + STEPS - 1) % STEPS), count=1, pred=later)
                if r == 0:
                    before = (block + BLOCKS - 1) % BLOCKS
                    mbarrier.arrive(x_empty.index(before), count=1, pred=later)
                step += 1
            block += 1
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        sync_threads()
        mbarrier.arrive(w_empty.index((step + STEPS - 1) % STEPS), count=1)
        mbarrier.arrive(x_empty.index((block + BLOCKS - 1) % BLOCKS), count=1)
        block += tile_blocks  # those of the other warpgroup
        step += tile_blocks * 3

        if bias_ptr is not None:
            bias = gl.load(bias_ptr + c0 + gl.arange(0, 64, layout=VECTOR))
            acc += bias.to(gl.float32)[:, None]
        tma.store_wait(0)  # of the last tile, from where this writes to
        buf = y_buf._reinterpret(y_buf.dtype, [PIXELS, 64], gl.NVMMASharedLayout(128, 16))
        buf.permute((1, 0)).store(round_pairs(acc, y_buf.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [n, h0, 0, c0], y_buf)
        phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "H"])
def conv_bare_tiles_kernel(
    x_desc,  # [N, H, W, K] in boxes [1, 2, W, 64]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64]
    y_desc,  # [N, H, W, C] in boxes [1, PIXELS / W, W, 64]: y, or dx
    bias_ptr,  # [C] or None
    N,
    H,
    K,
    C,
    PIXELS: gl.constexpr,  # of a tile
    W: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    STEPS: gl.constexpr,  # of filters there
    num_warps: gl.constexpr,
):
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS * block_chunks(PIXELS, W), 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [STEPS, 1, 64, 64], w_desc.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [2, 1, PIXELS // W, W, 64], y_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], BAR)
    x_empty = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], BAR)
    w_full = gl.allocate_shared_memory(gl.int64, [STEPS, 1], BAR)
    w_empty = gl.allocate_shared_memory(gl.int64, [STEPS, 1], BAR)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(BLOCKS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
    for i in gl.static_range(STEPS):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same pixels
    blocks_c = C // 64
    tiles_h = H * W // PIXELS
    tiles = N * tiles_h * blocks_c
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, x_bufs, w_bufs, y_bufs, x_full, x_empty, w_full, w_empty, turns,
                    bias_ptr, K, tiles, tiles_h, blocks_c, 0, PIXELS, W, DGRAD, BLOCKS, STEPS,
                ),
            ),
            (
                _multiply,
                (
                    y_desc, x_bufs, w_bufs, y_bufs, x_full, x_empty, w_full, w_empty, turns,
                    bias_ptr, K, tiles, tiles_h, blocks_c, 1, PIXELS, W, DGRAD, BLOCKS, STEPS,
                ),
            ),
            (
                _load,
                (
                    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, K, tiles,
                    tiles_h, blocks_c, PIXELS, W, DGRAD, BLOCKS, STEPS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
