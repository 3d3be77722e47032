"""The kernel of `conv.hopper.upsampled`: a 3x3 convolution of an image of which some channels are
an upsampled one, or the input gradient of these channels.

As in `tile_mma_kernels` a program stays, one warp loads and two warpgroups multiply, a tile each in
turn. A tile is the pixels of one parity: of an image [H, W], those with rows 2 i + p and columns
2 j + q, seen as rows i and columns j. To TMA an image is [H / 2, 2, N, W / 2, 2 C], so that such
pixels are an ordinary box.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import aggregate, allocate_for_views, sync_threads, tma_load
from ...hopper.pipeline import new_barriers, new_ring, new_turns
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs_alone
from .tiles.tile_epilogue import Beside, Terms
from .tiles.tile_mma_loop import Blocks, Tiles, pixels_from
from .tiles.tile_multiply import Dropout, Results, ThenNorm, multiply_tiles


@gluon.constexpr_function
def block_chunks(pixels, width):
    """Size of a block in chunks of 8 pixels: those of a tile, and one more row of `width`."""
    return (pixels + width) // 8


@aggregate
class _Images:
    """What is convolved, as in `conv_parity_kernel`."""

    up_desc: gl.tensor
    up_row_desc: gl.tensor
    up_w_desc: gl.tensor
    x_desc: gl.tensor
    x_row_desc: gl.tensor
    x_w_desc: gl.tensor
    K1: gl.tensor
    K2: gl.tensor
    base: gl.tensor
    width: gl.tensor


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _copy_rows(
    desc, row_desc, blocks, tiles, stage, bar, row, parity, n0, column, k, MORE: gl.constexpr
):
    """The rows of a tile, and with MORE the next one too."""
    WIDTH: gl.constexpr = blocks.WIDTH
    to = pixels_from(blocks, stage, 0, [tiles.ROWS, 1, tiles.IMAGES, tiles.W, 64])
    tma_load(desc, [row, parity, n0, column, k], bar, to)
    if MORE:
        BELOW: gl.constexpr = tiles.ROWS * WIDTH // 8
        to = pixels_from(blocks, stage, BELOW, [1, 1, tiles.IMAGES, tiles.W, 64])
        tma_load(row_desc, [row + tiles.ROWS, parity, n0, column, k], bar, to)


@gluon.jit
def _load(images, blocks, tiles, OVERLAP: gl.constexpr):
    ONE: gl.constexpr = (blocks.PIXELS + 64) * 128
    TWO: gl.constexpr = (blocks.PIXELS + blocks.WIDTH + 2 * 64) * 128
    DGRAD: gl.constexpr = blocks.TRANSPOSED
    up_desc, up_row_desc, up_w_desc = images.up_desc, images.up_row_desc, images.up_w_desc
    x_desc, x_row_desc, x_w_desc = images.x_desc, images.x_row_desc, images.x_w_desc
    block = 0
    if DGRAD and OVERLAP:
        await_inputs_alone()
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        if DGRAD:
            n0, h0, _, _, _ = tiles.place(i)
            for k0 in range(0, images.K1, 64):
                for parity in range(4):
                    p = parity // 2
                    q = parity % 2
                    for t in range(2):
                        stage, bar = blocks.x.acquire(block, TWO)
                        _copy_rows(
                            up_desc, up_row_desc, blocks, tiles, stage, bar, h0 - p, p, n0, t - q,
                            q * images.width + k0, True,
                        )  # fmt: skip
                        for r in gl.static_range(2):  # the opposite filter
                            at = [parity * 4 + (1 - r) * 2 + 1 - t, k0, c0]
                            tma_load(up_w_desc, at, bar, blocks.w_bufs.index(stage * 2 + r))
                        block += 1
        else:
            n0, h0, _, _, parity = tiles.place(i)
            p = parity // 2
            q = parity % 2
            above = h0 - 1 + p  # where rows of the upsampled image, or of the other parity, begin
            for k0 in range(0, images.K1, 64):
                for t in range(2):
                    stage, bar = blocks.x.acquire(block, TWO)
                    for r in gl.static_range(2):
                        at = [parity * 4 + r * 2 + t, c0, k0]
                        tma_load(up_w_desc, at, bar, blocks.w_bufs.index(stage * 2 + r))
                    if OVERLAP:  # filters are there before the previous kernel
                        if (k0 == 0) & (t == 0):
                            await_inputs_alone()
                    _copy_rows(
                        up_desc, up_row_desc, blocks, tiles, stage, bar, above, 0, n0, t - 1 + q,
                        k0, True,
                    )  # fmt: skip
                    block += 1
            if x_desc is not None:
                for k0 in range(0, images.K2, 64):
                    for s in range(3):
                        column = (q + s + 1) // 2 - 1
                        k = (q + s + 1) % 2 * images.width + images.base + k0
                        stage, bar = blocks.x.acquire(block, TWO)
                        _copy_rows(
                            x_desc, x_row_desc, blocks, tiles, stage, bar, above, 1 - p, n0,
                            column, k, True,
                        )  # fmt: skip
                        for r in gl.static_range(2):
                            at = [6 * r + s, c0, k0]
                            tma_load(x_w_desc, at, bar, blocks.w_bufs.index(stage * 2 + r))
                        block += 1
                for k0 in range(0, images.K2, 64):
                    for s in range(3):
                        column = (q + s + 1) // 2 - 1
                        k = (q + s + 1) % 2 * images.width + images.base + k0
                        stage, bar = blocks.x.acquire(block, ONE)
                        _copy_rows(
                            x_desc, x_row_desc, blocks, tiles, stage, bar, h0, p, n0, column, k,
                            False,
                        )  # fmt: skip
                        tma_load(x_w_desc, [3 + s, c0, k0], bar, blocks.w_bufs.index(stage * 2))
                        block += 1


# --- products -------------------------------------------------------------------------------------


@aggregate
class _Products:
    """Blocks of two taps each, and blocks of one."""

    K1: gl.tensor
    K2: gl.tensor
    HAS_OTHERS: gl.constexpr
    DGRAD: gl.constexpr

    @gluon.jit
    def count(self):
        pairs = self.K1 // 64 * 8 if self.DGRAD else self.K1 // 64 * 2 + self.K2 // 64 * 3
        return pairs, self.K2 // 64 * 3 if self.HAS_OTHERS else 0, 0

    @gluon.jit
    def multiply(self, blocks, acc, block, step):
        pairs, singles, _ = self.count()
        acc, block, _ = blocks.multiply(acc, block, 0, pairs, 2)
        if self.HAS_OTHERS:
            acc, block, _ = blocks.multiply(acc, block, 0, singles, 1, True)
        return acc, block, 0


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["N", "H"])
def conv_parity_kernel(
    up_desc,  # [H, ., N, W, .] in boxes [ROWS, 1, IMAGES, W, 64]: the small image; DGRAD: dy
    up_row_desc,  # the same in boxes of one row
    up_w_desc,  # [16, CO, K1] in boxes [1, 64, 64]
    x_desc,  # [H, 2, N, W, 2 (base + K2)], the other channels, or None
    x_row_desc,
    x_w_desc,  # [9, CO, K2]
    beside_desc,  # DGRAD: x [H, N, W, C] in boxes [ROWS, IMAGES, W, 64], or None: no norm
    y_desc,  # [H, 2, N, W, 2 C] in boxes of a tile; DGRAD: [H, N, W, C]
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, ., of which C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, tiles of an image, 2, C]; None: of an input gradient without a norm
    K1,
    K2,
    base,  # the other channels begin there
    width,  # channels of the image that has both kinds of pixels
    stride_emb,
    stride_table,  # channels of the table
    N,
    H,  # of the small image
    C,
    ROWS: gl.constexpr,  # of a tile
    IMAGES: gl.constexpr,  # of a tile, which they share unless it is one
    W: gl.constexpr,  # of the small image
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory, and two filters each
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    OVERLAP: gl.constexpr,  # the previous kernel may still be under way
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    dtype: gl.constexpr = up_desc.dtype
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [2 * BLOCKS, 1, 64, 64], up_w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2, ROWS, IMAGES, W, 64], TILE)
    x = new_ring(x_bufs, BLOCKS)
    turns = new_turns(2)
    beside_full = None
    if beside_desc is not None:
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    blocks_c = C // 64
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * blocks_c
    if not DGRAD:
        count *= 4
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, 1, 1 if DGRAD else 4)
    blocks = Blocks(x, w_bufs, None, 2, CHUNKS, ROWS * IMAGES * W, IMAGES * W, DGRAD)
    images = _Images(
        up_desc, up_row_desc, up_w_desc, x_desc, x_row_desc, x_w_desc, K1, K2, base, width
    )
    CV = stride_table if DGRAD else C  # channels that the vectors have
    terms = Terms(vectors_ptr, None, emb_ptr, stride_emb, N, C, CV, DGRAD, ACT, False, None)
    beside = Beside(beside_desc, None, beside_full, None, False)
    results = Results(y_desc, stages, partial_ptr, True, False)
    products = _Products(K1, K2, x_desc is not None, DGRAD)
    no_norm = ThenNorm(None, None, None, None, None, None, 1, None)
    launch_roles(
        multiply_tiles, (
            blocks, tiles, turns, terms, beside, Dropout(None, None), results, no_norm, products,
            OVERLAP,
        ),
        _load, (images, blocks, tiles, OVERLAP),
        2, (REGISTERS, 24),
    )  # fmt: skip
