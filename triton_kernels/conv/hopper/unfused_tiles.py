"""The kernel of `conv.hopper.unfused_3x3`: 3x3 filters over rows of 8 to 64 pixels.

A tile is whole rows of an image, or several images, and 64 channels of the result. With the row
above and the one below it is fetched three times for each block of input channels, moved by a
column each time: outside of the image TMA writes zeros. The three taps of a column of the filter
are that block from another row on, so a pixel is fetched three to four times, not nine. Products
take both operands from shared memory. To TMA rows are the outermost dimension: row 0 of all images
of a tile comes before row 1.

One warp loads; two warpgroups multiply, a tile each, so that one stores while the other multiplies.

In TF32 a block has 32 channels, whose pixels have 128 bytes as well: to shared memory and the
tensor cores a product is what it is in 16 bits, of half as many channels. The three filters of a
block lie with it, under one barrier. A result would be twice as large, so it goes from registers to
memory: eight neighbouring channels of a pixel, 32 bytes, are in one warp. In four bytes wgmma takes
its operands from shared memory only with the sum's index innermost, so an input gradient is the
forward convolution of filters that `conv.plain.transpose_weights` has transposed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import new_ring, new_turns
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from .tile_mma_loop import Blocks, Tiles, block_chunks, pixels_from, place_of_filter


@gluon.jit
def _load(x_desc, w_desc, blocks, tiles, K):
    PAIRS: gl.constexpr = tiles.ROWS // 2 + 1
    CHANNELS: gl.constexpr = 1024 // x_desc.dtype.primitive_bitwidth
    BYTES: gl.constexpr = (blocks.CHUNKS * 8 + blocks.FILTERS * 64) * 128
    BOX: gl.constexpr = [2, tiles.IMAGES, tiles.W, CHANNELS]
    block = 0
    step = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        n, h0, _, _, _ = tiles.place(i)
        for k0 in range(0, K, CHANNELS):
            for s in gl.static_range(3):
                stage, bar = blocks.x.acquire(block, BYTES)
                for j in gl.static_range(PAIRS):
                    rows = pixels_from(blocks, stage, j * (blocks.WIDTH // 4), BOX)
                    at = [h0 + 2 * j - 1, n, s - 1, k0]
                    tma_load(x_desc, at, bar, rows)
                block += 1
                for r in gl.static_range(3):
                    tap, row, column = place_of_filter(r, s, k0, c0, blocks.DGRAD)
                    if blocks.w is None:
                        buf = blocks.w_bufs.index(stage * blocks.FILTERS + r)
                        tma_load(w_desc, [tap, row, column], bar, buf)
                    else:
                        blocks.load_filter(w_desc, tap, row, column, step)
                        step += 1


@gluon.jit
def _store(acc, y_desc, y_buf, n, h0, c0):
    """Two 16-bit numbers a word, through shared memory."""
    PIXELS: gl.constexpr = acc.shape[1]
    tma.store_wait(0)  # of the last tile, from where this writes to
    buf = reinterpret(y_buf, y_buf.dtype, [PIXELS, 64], gl.NVMMASharedLayout(128, 16))
    buf.permute((1, 0)).store(round_pairs(acc, y_buf.dtype))
    fence_async_shared()
    tma_store(y_desc, [h0, n, 0, c0], y_buf)


@gluon.jit
def _multiply(GROUP: gl.constexpr, y, y_bufs, blocks, turns, tiles, bias_ptr, K, N, H, C):
    """Every other tile, beginning with that of GROUP; in turn, as in `unfused_pointwise`. N, H and
    C are of TF32."""
    PIXELS: gl.constexpr = blocks.PIXELS
    CHANNELS: gl.constexpr = 1024 // blocks.w_bufs.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, CHANNELS // 4])
    channels = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    if y_bufs is None:
        pixels = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, LAYOUT))
        image = pixels // tiles.W % tiles.IMAGES
        row = pixels // blocks.WIDTH
        place = image * (H * tiles.W) + row * tiles.W + pixels % tiles.W
    tile_blocks = K // CHANNELS * 3
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
        if y_bufs is not None:
            _store(acc, y, y_bufs.index(GROUP), n, h0, c0)
        else:
            to = y + n.to(gl.int64) * (H * tiles.W * C)
            # computed here: kept from tile to tile, `place * C` has 64 registers
            offs = ((place + h0 * tiles.W) * C)[None, :] + (c0 + channels)[:, None]
            if tiles.IMAGES == 1:
                gl.store(to + offs, acc)
            else:
                gl.store(to + offs, acc, mask=(n + image < N)[None, :])
        phase ^= 1
    if y_bufs is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "H"])
def conv_unfused_tiles_kernel(
    x_desc,  # [H, N, W, K] in boxes [2, IMAGES, W, 64; 32 in TF32]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64; 32 in TF32]
    y,  # [H, N, W, C] in boxes [ROWS, IMAGES, W, 64]: y, or dx; in TF32 a pointer to [N, H, W, C]
    bias_ptr,  # [C] or None
    N,
    H,
    K,
    C,
    ROWS: gl.constexpr,  # of a tile, in
    IMAGES: gl.constexpr,  # so many images: more than one only if ROWS is H
    W: gl.constexpr,
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    STEPS: gl.constexpr,  # of filters there; 0, in TF32: three with each block
):
    dtype: gl.constexpr = x_desc.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    FILTERS: gl.constexpr = 0 if STEPS > 0 else 3
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, 1024 // BITS], MATRIX)
    slots: gl.constexpr = [STEPS + BLOCKS * FILTERS, 1, 64, 1024 // BITS]
    w_bufs = gl.allocate_shared_memory(dtype, slots, w_desc.layout)
    y_bufs = None
    if STEPS > 0:
        y_bufs = gl.allocate_shared_memory(dtype, [2, ROWS, IMAGES, W, 64], y.layout)
    x = new_ring(x_bufs, BLOCKS)
    w = new_ring(w_bufs, STEPS) if STEPS > 0 else None
    turns = new_turns(2)
    fence_async_shared()
    sync_threads()

    blocks_c = C // 64
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * blocks_c
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, 1, 1)
    blocks = Blocks(x, w_bufs, w, FILTERS, CHUNKS, ROWS * IMAGES * W, IMAGES * W, DGRAD)
    if STEPS > 0:
        launch_roles(
            _multiply, (y, y_bufs, blocks, turns, tiles, bias_ptr, K, None, None, None),
            _load, (x_desc, w_desc, blocks, tiles, K),
            2, (240, 24),
        )  # fmt: skip
    else:
        await_inputs()
        launch_roles(
            _multiply, (y, None, blocks, turns, tiles, bias_ptr, K, N, H, C),
            _load, (x_desc, w_desc, blocks, tiles, K),
            2, (232, 40),
        )  # fmt: skip
