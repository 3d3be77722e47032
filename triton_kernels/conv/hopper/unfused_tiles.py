"""The kernel of `conv.hopper.unfused_3x3` in TF32: 3x3 filters over rows of 8 to 64 pixels.

Tiles, the ring and the two warpgroups are those of `tile_mma_kernels`. A block has 32 channels, so
that a pixel has 128 bytes here too: to shared memory and the tensor cores a product is what it is
in 16 bits, of half as many channels. The three filters of a block lie with it, under one barrier. A
result would be twice as large, so it goes from registers to memory: eight neighbouring channels of
a pixel, 32 bytes, are in one warp. In four bytes wgmma takes its operands from shared memory only
with the sum's index innermost, so an input gradient is the forward convolution of filters that
`conv.plain.transpose_weights` has transposed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import allocate_for_views, sync_threads, tma_load
from ...hopper.pipeline import new_ring, new_turns
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from .tile_mma_loop import Blocks, Tiles, block_chunks, pixels_from, place_of_filter

_CHANNELS = gl.constexpr(32)  # of a block


@gluon.jit
def _load(x_desc, w_desc, blocks, tiles, K):
    BYTES: gl.constexpr = (blocks.CHUNKS * 8 + 3 * 64) * 128
    BOX: gl.constexpr = [2, tiles.IMAGES, tiles.W, _CHANNELS]
    block = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        n, h0, _, _, _ = tiles.place(i)
        for k0 in range(0, K, _CHANNELS):
            for s in gl.static_range(3):
                stage, bar = blocks.x.acquire(block, BYTES)
                for j in gl.static_range(tiles.ROWS // 2 + 1):
                    rows = pixels_from(blocks, stage, j * (blocks.WIDTH // 4), BOX)
                    at = [h0 + 2 * j - 1, n, s - 1, k0]
                    tma_load(x_desc, at, bar, rows)
                block += 1
                for r in gl.static_range(3):
                    tap, row, column = place_of_filter(r, s, k0, c0, False)
                    buf = blocks.w_bufs.index(stage * 3 + r)
                    tma_load(w_desc, [tap, row, column], bar, buf)


@gluon.jit
def _multiply(GROUP: gl.constexpr, y_ptr, blocks, turns, tiles, bias_ptr, K, N, H, C):
    """Every other tile, beginning with that of GROUP; in turn, as in `tile_multiply`."""
    PIXELS: gl.constexpr = blocks.PIXELS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 8])
    channels = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    pixels = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, LAYOUT))
    image = pixels // tiles.W % tiles.IMAGES
    row = pixels // blocks.WIDTH
    place = image * (H * tiles.W) + row * tiles.W + pixels % tiles.W
    tile_blocks = K // _CHANNELS * 3
    block = GROUP * tile_blocks
    step = block * 3
    programs = gl.num_programs(0)
    phase = 0
    for i in range(gl.program_id(0) + GROUP * programs, tiles.count, 2 * programs):
        c0 = tiles.channel(i)
        n, h0, _, _, _ = tiles.place(i)
        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        turns.wait(GROUP, phase)
        acc, block, step = blocks.multiply(acc, block, step, tile_blocks)
        acc = blocks.finish(acc, block, step, turns, GROUP)
        block += tile_blocks  # those of the other warpgroup
        step += tile_blocks * 3

        if bias_ptr is not None:
            acc += gl.load(bias_ptr + c0 + channels).to(gl.float32)[:, None]
        to = y_ptr + n.to(gl.int64) * (H * tiles.W * C)
        # computed here: kept from tile to tile, `place * C` has 64 registers
        offs = ((place + h0 * tiles.W) * C)[None, :] + (c0 + channels)[:, None]
        if tiles.IMAGES == 1:
            gl.store(to + offs, acc)
        else:
            gl.store(to + offs, acc, mask=(n + image < N)[None, :])
        phase ^= 1


@gluon.jit(do_not_specialize=["N", "H"])
def conv_unfused_tiles_kernel(
    x_desc,  # float32 [H, N, W, K] in boxes [2, IMAGES, W, 32]
    w_desc,  # [9, C, K] in boxes [1, 64, 32]
    y_ptr,  # [N, H, W, C]
    bias_ptr,  # [C] or None
    N,
    H,
    K,
    C,
    ROWS: gl.constexpr,  # of a tile, in
    IMAGES: gl.constexpr,  # so many images: more than one only if ROWS is H
    W: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory, each with three filters
):
    dtype: gl.constexpr = x_desc.dtype
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, _CHANNELS], MATRIX)
    slots: gl.constexpr = [BLOCKS * 3, 1, 64, _CHANNELS]
    w_bufs = gl.allocate_shared_memory(dtype, slots, w_desc.layout)
    x = new_ring(x_bufs, BLOCKS)
    turns = new_turns(2)
    fence_async_shared()
    sync_threads()

    blocks_c = C // 64
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * blocks_c
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, 1, 1)
    blocks = Blocks(x, w_bufs, None, 3, CHUNKS, ROWS * IMAGES * W, IMAGES * W, False)
    await_inputs()
    launch_roles(
        _multiply, (y_ptr, blocks, turns, tiles, bias_ptr, K, N, H, C),
        _load, (x_desc, w_desc, blocks, tiles, K),
        2, (232, 40),
    )  # fmt: skip
