"""The kernel of `conv.hopper.upsampled`: a 3x3 convolution of an image of which some channels are
an upsampled one, or the input gradient of these channels.

As in `tiles_kernels` a program stays, one warp loads and two warpgroups multiply, a tile each in
turn. A tile is the pixels of one parity: of an image [H, W], those with rows 2 i + p and columns
2 j + q, seen as rows i and columns j. To TMA an image is [H / 2, 2, N, W / 2, 2 C], so that such
pixels are an ordinary box.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from ...activations import activate_affine_grad
from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...hopper.pipeline import new_barrier_pairs, new_barriers, wait_empty
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .tile_epilogue import (
    by_image,
    in_pieces,
    load_vectors,
    places_of,
    squares_about_mean,
    store_piece,
    store_sums,
)
from .tile_mma_loop import finish_products, multiply_blocks_with_filters, pixels_from


@gluon.constexpr_function
def block_chunks(pixels, width):
    """Size of a block in chunks of 8 pixels: those of a tile, and one more row of `width`."""
    return (pixels + width) // 8


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _copy_rows(
    desc, row_desc, x_bufs, stage, bar, row, parity, n0, column, k,
    ROWS: gl.constexpr, MORE: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """ROWS rows of an image, and with MORE the next one too."""
    WIDTH: gl.constexpr = IMAGES * W
    chunk = stage * block_chunks(ROWS * WIDTH, WIDTH)
    to = pixels_from(x_bufs, chunk, [ROWS, 1, IMAGES, W, 64])
    tma_load(desc, [row, parity, n0, column, k], bar, to)
    if MORE:
        to = pixels_from(x_bufs, chunk + ROWS * WIDTH // 8, [1, 1, IMAGES, W, 64])
        tma_load(row_desc, [row + ROWS, parity, n0, column, k], bar, to)


@gluon.jit
def _load(
    up_desc, up_row_desc, up_w_desc, x_desc, x_row_desc, x_w_desc,
    x_bufs, w_bufs, full, empty,
    K1, K2, base, width, tiles, tiles_h, blocks_c,
    ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    ONE: gl.constexpr = (ROWS * IMAGES * W + 64) * 128
    TWO: gl.constexpr = ((ROWS + 1) * IMAGES * W + 2 * 64) * 128
    block = 0
    if DGRAD and OVERLAP:
        await_inputs_alone()
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        c0 = i % blocks_c * 64
        tile = i // blocks_c
        if DGRAD:
            n0 = tile // tiles_h * IMAGES
            h0 = tile % tiles_h * ROWS
            for k0 in range(0, K1, 64):
                for parity in range(4):
                    p = parity // 2
                    q = parity % 2
                    for t in range(2):
                        stage, bar = wait_empty(full, empty, block, BLOCKS, TWO)
                        _copy_rows(
                            up_desc, up_row_desc, x_bufs, stage, bar, h0 - p, p, n0, t - q,
                            q * width + k0, ROWS, True, IMAGES, W,
                        )  # fmt: skip
                        for r in gl.static_range(2):  # the opposite filter
                            at = [parity * 4 + (1 - r) * 2 + 1 - t, k0, c0]
                            tma_load(up_w_desc, at, bar, w_bufs.index(stage * 2 + r))
                        block += 1
        else:
            parity = tile % 4
            p = parity // 2
            q = parity % 2
            n0 = tile // 4 // tiles_h * IMAGES
            h0 = tile // 4 % tiles_h * ROWS
            above = h0 - 1 + p  # where rows of the upsampled image, or of the other parity, begin
            for k0 in range(0, K1, 64):
                for t in range(2):
                    stage, bar = wait_empty(full, empty, block, BLOCKS, TWO)
                    for r in gl.static_range(2):
                        at = [parity * 4 + r * 2 + t, c0, k0]
                        tma_load(up_w_desc, at, bar, w_bufs.index(stage * 2 + r))
                    if OVERLAP:  # filters are there before the launch in front
                        if (k0 == 0) & (t == 0):
                            await_inputs_alone()
                    _copy_rows(
                        up_desc, up_row_desc, x_bufs, stage, bar, above, 0, n0, t - 1 + q, k0,
                        ROWS, True, IMAGES, W,
                    )  # fmt: skip
                    block += 1
            if x_desc is not None:
                for k0 in range(0, K2, 64):
                    for s in range(3):
                        column = (q + s + 1) // 2 - 1
                        k = (q + s + 1) % 2 * width + base + k0
                        stage, bar = wait_empty(full, empty, block, BLOCKS, TWO)
                        _copy_rows(
                            x_desc, x_row_desc, x_bufs, stage, bar, above, 1 - p, n0, column, k,
                            ROWS, True, IMAGES, W,
                        )  # fmt: skip
                        for r in gl.static_range(2):
                            at = [6 * r + s, c0, k0]
                            tma_load(x_w_desc, at, bar, w_bufs.index(stage * 2 + r))
                        block += 1
                for k0 in range(0, K2, 64):
                    for s in range(3):
                        column = (q + s + 1) // 2 - 1
                        k = (q + s + 1) % 2 * width + base + k0
                        stage, bar = wait_empty(full, empty, block, BLOCKS, ONE)
                        _copy_rows(
                            x_desc, x_row_desc, x_bufs, stage, bar, h0, p, n0, column, k,
                            ROWS, False, IMAGES, W,
                        )  # fmt: skip
                        tma_load(x_w_desc, [3 + s, c0, k0], bar, w_bufs.index(stage * 2))
                        block += 1


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _multiply(
    beside_desc, y_desc, x_bufs, w_bufs, stages, full, empty, beside_full, turns,
    vectors_ptr, emb_ptr, partial_ptr,
    K1, K2, stride_emb, stride_table, tiles, tiles_h, blocks_c, N, C,
    GROUP: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
    HAS_OTHERS: gl.constexpr, DGRAD: gl.constexpr, ACT: gl.constexpr, BLOCKS: gl.constexpr,
    PIECEWISE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = IMAGES * W
    PIXELS: gl.constexpr = ROWS * WIDTH
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    PIECE: gl.constexpr = max(64, WIDTH)
    PIECES: gl.constexpr = PIXELS // PIECE
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    zeros = gl.zeros([64, PIECE], gl.float32, PART)
    BY_IMAGE: gl.constexpr = by_image(zeros, IMAGES, W).type.layout
    SUMS: gl.constexpr = gl.SliceLayout(2, BY_IMAGE)
    # Before the products, where nothing waits for them, if there are registers to keep them in.
    EARLY: gl.constexpr = PIXELS * IMAGES <= 256 or not DGRAD
    HAS_NORM: gl.constexpr = beside_desc is not None
    HAS_VECTORS: gl.constexpr = HAS_NORM or not DGRAD
    PARITIES: gl.constexpr = 1 if DGRAD else 4
    CHUNKS: gl.constexpr = block_chunks(PIXELS, WIDTH)
    CV = stride_table if DGRAD else C  # channels that the vectors have
    pairs = K1 // 64 * 8 if DGRAD else K1 // 64 * 2 + K2 // 64 * 3
    singles = K2 // 64 * 3 if HAS_OTHERS else 0
    block = GROUP * (pairs + singles)
    phase = 0
    stage_buf = stages.index(GROUP)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    STAGED: gl.constexpr = 1 if PIECEWISE else PIECES  # pieces that lie there at a time
    pieces = reinterpret(stage_buf, stage_buf.dtype, [STAGED, PIECE, 64], MATRIX)
    if not DGRAD:
        OUT: gl.constexpr = [STAGED * PIECE // WIDTH, 1, IMAGES, W, 64]
        out = reinterpret(stage_buf, stage_buf.dtype, OUT, y_desc.layout)
    programs = gl.num_programs(0)
    if OVERLAP:
        await_inputs_alone()
    for i in range(gl.program_id(0) + GROUP * programs, tiles, 2 * programs):
        c0 = i % blocks_c * 64
        tile = i // blocks_c
        parity = tile % PARITIES
        place = tile // PARITIES
        n0 = place // tiles_h * IMAGES
        h0 = place % tiles_h * ROWS
        tma.store_wait(0)  # of the last tile, from where this writes to
        if HAS_NORM:
            bar = beside_full.index(GROUP)
            mbarrier.expect(bar, PIXELS * 128)
            tma_load(beside_desc, [h0, n0, 0, c0], bar, stage_buf)
        if HAS_VECTORS and EARLY:
            vectors = load_vectors(
                vectors_ptr, None, emb_ptr, stride_emb, n0, c0, N, CV, IMAGES, DGRAD, SUMS
            )

        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        mbarrier.wait(turns.index(GROUP), phase ^ (1 - GROUP))
        acc, block = multiply_blocks_with_filters(
            acc, x_bufs, w_bufs, full, empty, block, pairs, False,
            2, 2, CHUNKS, PIXELS, WIDTH, DGRAD, BLOCKS,
        )  # fmt: skip
        if HAS_OTHERS:
            acc, block = multiply_blocks_with_filters(
                acc, x_bufs, w_bufs, full, empty, block, singles, True,
                1, 2, CHUNKS, PIXELS, WIDTH, DGRAD, BLOCKS,
            )  # fmt: skip
        acc = finish_products(acc, empty, empty, turns, block, 0, GROUP, BLOCKS, 0)
        block += pairs + singles  # those of the other warpgroup

        accs = in_pieces(acc, PIXELS, PIECE)
        if HAS_VECTORS and not EARLY:
            vectors = load_vectors(
                vectors_ptr, None, emb_ptr, stride_emb, n0, c0, N, CV, IMAGES, DGRAD, SUMS
            )
        offs, image, valid = places_of(n0, c0, N, C, IMAGES, SUMS)
        total = gl.zeros([64, IMAGES], gl.float32, SUMS)
        second = gl.zeros([64, IMAGES], gl.float32, SUMS)
        rounded = ()
        if HAS_NORM:
            mean, rstd, g, b = vectors
            shift = (-mean * rstd)[:, :, None]
            rstd = rstd[:, :, None]
            g = g[:, :, None]
            b = b[:, :, None]
            mbarrier.wait(beside_full.index(GROUP), phase)
        elif not DGRAD:
            bias = vectors[0][:, :, None]
        for j in gl.static_range(PIECES):
            y = by_image(accs[j], IMAGES, W)
            if PIECEWISE and j > 0:  # the piece before has left
                tma.store_wait(0)
                sync_threads()
            buf = pieces.index(j % STAGED).permute((1, 0))
            if HAS_NORM:
                xhat = by_image(widen_pairs(buf.load(PART)), IMAGES, W) * rstd + shift
                y *= activate_affine_grad(xhat, g, b, ACT)
                total += gl.sum(y, axis=2)
                second += gl.sum(y * xhat, axis=2)
            elif not DGRAD:
                y += bias
            y = round_pairs(y, y_desc.dtype)
            if not DGRAD:
                total += gl.sum(widen_pairs(y), axis=2)
                rounded = rounded + (y,)
            store_piece(buf, y, PART, W)
            if not DGRAD and (j + 1) % STAGED == 0:
                fence_async_shared()
                row = h0 + (j + 1 - STAGED) * (PIECE // WIDTH)
                at = [row, parity // 2, n0, 0, parity % 2 * C + c0]
                tma_store(y_desc, at, out)
        if DGRAD:
            fence_async_shared()
            tma_store(y_desc, [h0, n0, 0, c0], stage_buf)
        else:
            second = squares_about_mean(rounded, total, second, PIECES)
        if partial_ptr is not None:
            row = image * tiles_h * PARITIES + place % tiles_h * PARITIES + parity
            store_sums(partial_ptr, row, C, offs, valid, total, second)
        phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


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
    y_desc,  # [H, 2, N, W, 2 C] in boxes of a tile, or PIECEWISE of a piece; DGRAD: [H, N, W, C]
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
    PIECEWISE: gl.constexpr,  # the result leaves in pieces from where there is room for one
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    dtype: gl.constexpr = up_desc.dtype
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [2 * BLOCKS, 1, 64, 64], up_w_desc.layout)
    STAGED: gl.constexpr = max(64, IMAGES * W) // (IMAGES * W) if PIECEWISE else ROWS  # rows
    stages = gl.allocate_shared_memory(dtype, [2, STAGED, IMAGES, W, 64], TILE)
    full, empty = new_barrier_pairs(BLOCKS)
    turns = new_barriers(2)
    beside_full = turns  # without a norm unused
    if beside_desc is not None:
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    # tiles of the same pixels are neighbours, so pixels come from memory once and then from L2
    blocks_c = C // 64
    tiles_h = H // ROWS
    tiles = gl.cdiv(N, IMAGES) * tiles_h * blocks_c
    if not DGRAD:
        tiles *= 4
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    beside_desc, y_desc, x_bufs, w_bufs, stages, full, empty, beside_full, turns,
                    vectors_ptr, emb_ptr, partial_ptr,
                    K1, K2, stride_emb, stride_table, tiles, tiles_h, blocks_c, N, C,
                    role, ROWS, IMAGES, W, x_desc is not None, DGRAD, ACT, BLOCKS, PIECEWISE,
                    OVERLAP,
                ),
            )
            if role < 2
            else (
                _load,
                (
                    up_desc, up_row_desc, up_w_desc, x_desc, x_row_desc, x_w_desc,
                    x_bufs, w_bufs, full, empty, K1, K2, base, width, tiles, tiles_h, blocks_c,
                    ROWS, IMAGES, W, DGRAD, BLOCKS, OVERLAP,
                ),
            )
            for role in (0, 1, 2)
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
