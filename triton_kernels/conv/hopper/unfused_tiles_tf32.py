"""`bare_tiles` in TF32: blocks of 32 channels, whose pixels have 128 bytes as well.

To shared memory and the tensor cores a product is what it is in 16 bits, of half as many channels.
The three filters of a block lie with it, under one barrier. A result would be twice as large, so it
goes from registers to memory: eight neighbouring channels of a pixel, 32 bytes, are in one warp.

In four bytes wgmma takes its operands from shared memory only with the sum's index innermost, so an
input gradient is the forward convolution of filters that `conv.plain.transpose_weights` has turned.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import allocate_for_views, sync_threads, tma_load
from ...hopper.pipeline import new_ring, new_turns
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from .tile_mma_loop import Blocks, Tiles, block_chunks, pixels_from


@gluon.jit
def _load(x_desc, w_desc, blocks, tiles, K):
    PAIRS: gl.constexpr = tiles.ROWS // 2 + 1
    BYTES: gl.constexpr = (blocks.CHUNKS * 8 + 3 * 64) * 128
    block = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        n, h0, _, _ = tiles.place(i)
        for k0 in range(0, K, 32):
            for s in gl.static_range(3):
                stage, bar = blocks.x.acquire(block, BYTES)
                for j in gl.static_range(PAIRS):
                    chunk = stage * blocks.CHUNKS + j * (blocks.WIDTH // 4)
                    rows = pixels_from(blocks.x.bufs, chunk, [2, tiles.IMAGES, tiles.W, 32])
                    at = [h0 + 2 * j - 1, n, s - 1, k0]
                    tma_load(x_desc, at, bar, rows)
                for r in gl.static_range(3):
                    buf = blocks.w_bufs.index(stage * 3 + r)
                    tma_load(w_desc, [3 * r + s, c0, k0], bar, buf)
                block += 1


@gluon.jit
def _multiply(GROUP: gl.constexpr, y_ptr, blocks, turns, tiles, bias_ptr, N, H, K, C):
    """Every other tile, beginning with that of GROUP; in turn, as in `bare_points`."""
    PIXELS: gl.constexpr = blocks.PIXELS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 8])
    channels = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    pixels = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, LAYOUT))
    image = pixels // tiles.W % tiles.IMAGES
    row = pixels // blocks.WIDTH
    place = image * (H * tiles.W) + row * tiles.W + pixels % tiles.W
    tile_blocks = K // 32 * 3
    block = GROUP * tile_blocks
    programs = gl.num_programs(0)
    phase = 0
    for i in range(gl.program_id(0) + GROUP * programs, tiles.count, 2 * programs):
        c0 = tiles.channel(i)
        n, h0, _, _ = tiles.place(i)
        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        turns.wait(GROUP, phase)
        acc, block, _ = blocks.multiply(acc, block, 0, tile_blocks)
        acc = blocks.finish(acc, block, 0, turns, GROUP)
        block += tile_blocks  # those of the other warpgroup

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
def conv_bare_tiles_tf32_kernel(
    x_desc,  # float32 [H, N, W, K] in boxes [2, IMAGES, W, 32]
    w_desc,  # float32 [9, C, K] in boxes [1, 64, 32]
    y_ptr,  # float32 [N, H, W, C]
    bias_ptr,  # [C] or None
    N,
    H,
    K,
    C,
    ROWS: gl.constexpr,  # of a tile, in
    IMAGES: gl.constexpr,  # so many images: more than one only if ROWS is H
    W: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels and filters in shared memory
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    x_bufs = allocate_for_views(gl.float32, [BLOCKS * CHUNKS, 8, 32], MATRIX)
    w_bufs = gl.allocate_shared_memory(gl.float32, [BLOCKS * 3, 1, 64, 32], w_desc.layout)
    x = new_ring(x_bufs, BLOCKS)
    turns = new_turns(2)
    fence_async_shared()
    sync_threads()
    await_inputs()

    blocks_c = C // 64
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * blocks_c
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, 1)
    blocks = Blocks(x, w_bufs, None, 3, CHUNKS, ROWS * IMAGES * W, IMAGES * W, False)
    launch_roles(
        _multiply, (y_ptr, blocks, turns, tiles, bias_ptr, N, H, K, C),
        _load, (x_desc, w_desc, blocks, tiles, K),
        2, (232, 40),
    )  # fmt: skip
