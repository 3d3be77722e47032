"""The kernel of `conv.hopper.tile_mma`: a 3x3 convolution, or its input gradient, with its
epilogue.

A program has three parts that run side by side. `_load` is one warp that fills two rings in shared
memory: the pixels of a tile moved by a column, and filters of one tap. `_multiply`, twice, is a
warpgroup that takes every other tile. The rings hold what one needs and then what the other does,
so that one finishes a tile while the other multiplies. It waits for its turn first (`turns`): a
barrier tells only an even phase from an odd one, not the next one from those after it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ...activations import activate_affine, activate_affine_grad
from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...hopper.pipeline import (
    give_back,
    new_barrier_pairs,
    new_barriers,
    wait_empty,
    wait_full,
    wait_full_both,
)
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .epilogue_avg_pool import means_of_piece, store_means
from .epilogue_grid_sync import leave_sums, norm_of_image
from .epilogue_norm import norm_of_tile
from .tile_epilogue import (
    by_image,
    in_pieces,
    load_vectors,
    places_of,
    squares_about_mean,
    store_piece,
    store_sums,
)
from .tile_mma_loop import (
    block_chunks,
    finish_products,
    load_filter,
    load_filter_of_tap,
    multiply_blocks,
    multiply_blocks_with_filters,
    multiply_tap,
    pixels_from,
    place_of_filter,
)

# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _place_of_tile(
    tile, tiles_h, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Image, row and column where a tile begins, and its number within the image."""
    if COLUMNS == 1:
        return tile // tiles_h * IMAGES, tile % tiles_h * ROWS, 0, tile % tiles_h
    else:
        of_image = tile % (tiles_h * COLUMNS)
        n0 = tile // (tiles_h * COLUMNS)
        return n0, of_image // COLUMNS * ROWS, of_image % COLUMNS * W, of_image


@gluon.jit
def _wait_for_slot(
    x_full, x_empty, block,
    HALO: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
    BLOCKS: gl.constexpr, FILTERS: gl.constexpr = 0,
):  # fmt: skip
    """The next slot for the rows of a tile, with HALO = 1 those above and below too, and the
    barrier for them and for so many filters that come with them."""
    BYTES: gl.constexpr = (ROWS + 2 * HALO) * IMAGES * W * 128 + FILTERS * 64 * 128
    return wait_empty(x_full, x_empty, block, BLOCKS, BYTES)


@gluon.jit
def _copy_pixels(
    x_desc, x_bufs, stage, bar, n0, h0, w0, k0,
    HALO: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """These rows, to their slot."""
    WIDTH: gl.constexpr = IMAGES * W
    for j in gl.static_range((ROWS + 2 * HALO) // 2):
        chunk = stage * block_chunks(ROWS * WIDTH, WIDTH) + j * (WIDTH // 4)
        to = pixels_from(x_bufs, chunk, [2, IMAGES, W, 64])
        tma_load(x_desc, [h0 + 2 * j - HALO, n0, w0, k0], bar, to)


@gluon.jit
def _load_pixels(
    x_desc, x_bufs, x_full, x_empty, block, n0, h0, w0, k0,
    HALO: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
    BLOCKS: gl.constexpr, FILTERS: gl.constexpr = 0,
):  # fmt: skip
    """Both. Returns slot and barrier."""
    stage, bar = _wait_for_slot(x_full, x_empty, block, HALO, ROWS, IMAGES, W, BLOCKS, FILTERS)
    _copy_pixels(x_desc, x_bufs, stage, bar, n0, h0, w0, k0, HALO, ROWS, IMAGES, W)
    return stage, bar


@gluon.jit
def _load_filters(w_desc, w_bufs, stage, bar, s, k0, c0, DGRAD: gl.constexpr):
    """The three of a column, which come with a block of pixels."""
    for r in range(3):
        at = place_of_filter(r, s, k0, c0, DGRAD)
        tma_load(w_desc, at, bar, w_bufs.index(stage * 3 + r))


@gluon.jit
def _load_pointwise(
    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, block, step,
    n0, h0, w0, c0, C,
    ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    for k0 in range(0, C, 64):
        stage, bar = _load_pixels(
            x_desc, x_bufs, x_full, x_empty, block, n0, h0, w0, k0, 0, ROWS, IMAGES, W, BLOCKS,
            1 if STEPS == 0 else 0,
        )  # fmt: skip
        if STEPS == 0:
            tma_load(w_desc, [0, c0, k0], bar, w_bufs.index(stage * 3))
        else:
            load_filter(w_desc, 0, c0, k0, w_bufs, w_full, w_empty, step, STEPS)
        block += 1
        step += 1
    return block, step


@gluon.jit
def _load(
    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
    x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
    K, C1, C2, tiles, tiles_h, blocks_c,
    ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr, COLUMNS: gl.constexpr,
    DGRAD: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    EARLY: gl.constexpr = OVERLAP and STEPS == 0  # filters are there before the launch in front
    if OVERLAP and not EARLY:
        await_inputs_alone()
    block = 0
    step = 0
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        c0 = i % blocks_c * 64
        n0, h0, w0, _ = _place_of_tile(i // blocks_c, tiles_h, ROWS, IMAGES, W, COLUMNS)
        for k0 in range(0, K, 64):
            for s in range(3):
                if EARLY:
                    stage, bar = _wait_for_slot(
                        x_full, x_empty, block, 1, ROWS, IMAGES, W, BLOCKS, 3
                    )
                    _load_filters(w_desc, w_bufs, stage, bar, s, k0, c0, DGRAD)
                    if (k0 == 0) & (s == 0):
                        await_inputs_alone()
                    _copy_pixels(
                        x_desc, x_bufs, stage, bar, n0, h0, w0 + s - 1, k0, 1, ROWS, IMAGES, W
                    )  # fmt: skip
                    block += 1
                else:
                    stage, bar = _load_pixels(
                        x_desc, x_bufs, x_full, x_empty, block, n0, h0, w0 + s - 1, k0,
                        1, ROWS, IMAGES, W, BLOCKS, 3 if STEPS == 0 else 0,
                    )  # fmt: skip
                    block += 1
                    if STEPS == 0:
                        _load_filters(w_desc, w_bufs, stage, bar, s, k0, c0, DGRAD)
                    else:
                        for r in range(3):
                            load_filter_of_tap(
                                w_desc, r, s, k0, c0, w_bufs, w_full, w_empty, step, DGRAD, STEPS
                            )
                            step += 1
        if extra1_desc is not None:
            block, step = _load_pointwise(
                extra1_desc, extra1_w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
                block, step, n0, h0, w0, c0, C1, ROWS, IMAGES, W, BLOCKS, STEPS,
            )  # fmt: skip
        if extra2_desc is not None:
            block, step = _load_pointwise(
                extra2_desc, extra2_w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
                block, step, n0, h0, w0, c0, C2, ROWS, IMAGES, W, BLOCKS, STEPS,
            )  # fmt: skip


@gluon.jit
def _load_beside(desc1, desc2, buf, bar, n0, h0, w0, c0, border, PIXELS: gl.constexpr):
    """What the epilogue reads, to where it will write."""
    mbarrier.expect(bar, PIXELS * 128)
    if desc2 is None:
        tma_load(desc1, [h0, n0, w0, c0], bar, buf)
    else:
        left = c0 < border
        right = c0 >= border
        tma_load(desc1, [h0, n0, w0, c0], bar, buf, left)
        tma_load(desc2, [h0, n0, w0, c0 - border], bar, buf, right)


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _multiply(
    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, stages, x_full, x_empty, w_full, w_empty,
    beside_full, turns, vectors_ptr, extra_bias_ptr, emb_ptr, partial_ptr, means_ptr, mean_sums_ptr,
    a_desc, x2_desc, norm_weight_ptr, norm_bias_ptr, slots_ptr, eps, kept_ptr, factor,
    K, extra_blocks, border, stride_emb, tiles, tiles_h, blocks_c, N, C, CX2,
    GROUP: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr, W: gl.constexpr,
    COLUMNS: gl.constexpr, DGRAD: gl.constexpr, HAS_EXTRA: gl.constexpr, ACT: gl.constexpr,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr, OVERLAP: gl.constexpr,
    CG: gl.constexpr, KEEP: gl.constexpr, TILES: gl.constexpr,
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
    HAS_BESIDE: gl.constexpr = beside1_desc is not None
    CHUNKS: gl.constexpr = block_chunks(ROWS * WIDTH, WIDTH)
    main_blocks = K // 64 * 3
    tile_blocks = main_blocks + extra_blocks
    tile_steps = main_blocks * 3 + extra_blocks
    block = GROUP * tile_blocks
    step = GROUP * tile_steps
    phase = 0
    stage_buf = stages.index(GROUP)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    pieces = reinterpret(stage_buf, stage_buf.dtype, [PIECES, PIECE, 64], MATRIX)
    programs = gl.num_programs(0)
    if OVERLAP:
        await_inputs_alone()
    for i in range(gl.program_id(0) + GROUP * programs, tiles, 2 * programs):
        c0 = i % blocks_c * 64
        tile = i // blocks_c
        n0, h0, w0, of_image = _place_of_tile(tile, tiles_h, ROWS, IMAGES, W, COLUMNS)
        tma.store_wait(0)  # of the last tile, from where this writes to
        if HAS_BESIDE:
            bar = beside_full.index(GROUP)
            _load_beside(beside1_desc, beside2_desc, stage_buf, bar, n0, h0, w0, c0, border, PIXELS)
        if EARLY:
            vectors = load_vectors(
                vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, n0, c0, N, C, IMAGES, DGRAD, SUMS
            )
        if a_desc is not None:
            channels = places_of(n0, c0, N, C, IMAGES, SUMS)[0]
            norm_weight = gl.load(norm_weight_ptr + channels)
            norm_bias = gl.load(norm_bias_ptr + channels)

        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        mbarrier.wait(turns.index(GROUP), phase ^ (1 - GROUP))
        if STEPS == 0:
            acc, block = multiply_blocks_with_filters(
                acc, x_bufs, w_bufs, x_full, x_empty, block, main_blocks, False,
                3, 3, CHUNKS, PIXELS, WIDTH, DGRAD, BLOCKS,
            )  # fmt: skip
        else:
            acc, block, step = multiply_blocks(
                acc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, block, step, main_blocks,
                PIXELS, WIDTH, DGRAD, BLOCKS, STEPS,
            )  # fmt: skip
        if HAS_EXTRA:
            for _ in range(extra_blocks):
                if STEPS == 0:
                    stage = wait_full(x_full, block, BLOCKS)
                    slot = stage * 3
                else:
                    stage, slot = wait_full_both(x_full, block, BLOCKS, w_full, step, STEPS)
                acc = multiply_tap(acc, x_bufs, w_bufs, stage * CHUNKS, slot, PIXELS, False)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                sync_threads()
                if STEPS > 0:
                    give_back(w_empty, step + STEPS - 1, STEPS)
                give_back(x_empty, block + BLOCKS - 1, BLOCKS)
                block += 1
                step += 1
        acc = finish_products(acc, x_empty, w_empty, turns, block, step, GROUP, BLOCKS, STEPS)
        block += tile_blocks  # those of the other warpgroup
        step += tile_steps

        accs = in_pieces(acc, PIXELS, PIECE)
        if not EARLY:
            vectors = load_vectors(
                vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, n0, c0, N, C, IMAGES, DGRAD, SUMS
            )
        offs, image, valid = places_of(n0, c0, N, C, IMAGES, SUMS)
        total = gl.zeros([64, IMAGES], gl.float32, SUMS)
        second = gl.zeros([64, IMAGES], gl.float32, SUMS)
        rounded = ()
        if DGRAD:
            mean, rstd, g, b = vectors
            shift = (-mean * rstd)[:, :, None]
            rstd = rstd[:, :, None]
            g = g[:, :, None]
            b = b[:, :, None]
        else:
            bias = vectors[0][:, :, None]
        if HAS_BESIDE:
            mbarrier.wait(beside_full.index(GROUP), phase)
        for i in gl.static_range(PIECES):
            y = by_image(accs[i], IMAGES, W)
            buf = pieces.index(i).permute((1, 0))
            if HAS_BESIDE:
                beside = by_image(widen_pairs(buf.load(PART)), IMAGES, W)
            if kept_ptr is not None:
                pixel = _pixels_of_piece(
                    i * PIECE, n0, h0, w0, tiles_h * ROWS, PART, PIECE, IMAGES, W, COLUMNS
                )
                keep = _kept(kept_ptr, pixel, N * tiles_h * ROWS * W * COLUMNS, c0, C, PART)
                y *= by_image(gl.where(keep, factor, 0.0), IMAGES, W)
            if DGRAD:
                xhat = beside * rstd + shift
                y *= activate_affine_grad(xhat, g, b, ACT)
                total += gl.sum(y, axis=2)
                second += gl.sum(y * xhat, axis=2)
            else:
                y += bias
                if HAS_BESIDE:
                    y += beside
            y = round_pairs(y, y_desc.dtype)
            if (partial_ptr is not None or a_desc is not None) and not DGRAD:
                total += gl.sum(widen_pairs(y), axis=2)
                rounded = rounded + (y,)
            if KEEP:
                store_piece(buf, y, PART, W)
        if slots_ptr is not None:
            second = squares_about_mean(rounded, total, second, PIECES)
            leave_sums(slots_ptr, n0, of_image, offs, C, total, second, TILES)
        if KEEP:
            fence_async_shared()
            tma_store(y_desc, [h0, n0, w0, c0], stage_buf)
        if a_desc is not None:
            if slots_ptr is None:
                mean, scale, shift = norm_of_tile(
                    rounded, total, norm_weight, norm_bias, eps, PIECES, CG, ROWS * W
                )
            else:
                mean, scale, shift = norm_of_image(
                    slots_ptr, n0, c0, C, norm_weight, norm_bias, eps, TILES, CG, PIXELS
                )
            tma.store_wait(0)  # of y, where a goes
            sync_threads()
            _store_normed(
                a_desc, stage_buf, pieces, rounded, mean, scale, shift, h0, n0, c0, PART, W, ACT,
                PIECES,
            )  # fmt: skip
        if partial_ptr is not None:
            if not DGRAD and slots_ptr is None:
                second = squares_about_mean(rounded, total, second, PIECES)
            row = image * (tiles_h * COLUMNS) + of_image
            store_sums(partial_ptr, row, C, offs, valid, total, second)
        if means_ptr is not None:
            means = ()
            for i in gl.static_range(PIECES):
                means = means + (means_of_piece(rounded[i], W),)
            store_means(means, means_ptr, mean_sums_ptr, tile, c0, C, PIECES)
        phase ^= 1
    if x2_desc is not None:
        phase = phase if HAS_BESIDE else 0
        blocks_c = CX2 // 64
        tiles = gl.cdiv(N, IMAGES) * blocks_c
        # Programs with few tiles of y, and the warpgroup with fewer, come first.
        last = programs - 1 - gl.program_id(0)
        for i in range(last + (1 - GROUP) * programs, tiles, 2 * programs):
            _normalize_second(
                x2_desc, a_desc, stage_buf, pieces, beside_full.index(GROUP), phase,
                norm_weight_ptr, norm_bias_ptr, eps, i // blocks_c * IMAGES, i % blocks_c * 64, N,
                C, CX2, PART, ROWS, IMAGES, W, ACT, CG, PIECES, SUMS,
            )  # fmt: skip
            phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


@gluon.jit
def _pixels_of_piece(
    first, n0, h0, w0, H, PART: gl.constexpr, PIECE: gl.constexpr, IMAGES: gl.constexpr,
    W: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Where in [N H W] the pixels of a tile are, from its `first` on."""
    p = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, PART))
    image = n0 + p // W % IMAGES
    return (image * H + h0 + p // (W * IMAGES)) * (W * COLUMNS) + w0 + p % W


@gluon.jit
def _kept(kept_ptr, pixel, pixels, c0, C, PART: gl.constexpr):
    """Which of 64 channels of these pixels dropout has kept: bool [64, pixels]."""
    to = kept_ptr + pixel.to(gl.int64) * (C // 64) + c0 // 64
    words = gl.load(to, mask=pixel < pixels, other=0)
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, PART)).to(gl.int64)
    return ((words[None, :] >> channel[:, None]) & 1) != 0


@gluon.jit
def _normalize_second(
    x2_desc, a_desc, stage_buf, pieces, bar, phase, norm_weight_ptr, norm_bias_ptr, eps,
    n0, c0, N, C, CX2, PART: gl.constexpr, ROWS: gl.constexpr, IMAGES: gl.constexpr,
    W: gl.constexpr, ACT: gl.constexpr, CG: gl.constexpr, PIECES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A tile of act(norm(x2)), which lies in a behind the channels of y."""
    tma.store_wait(0)  # of the last tile, from where this writes to
    _load_beside(x2_desc, None, stage_buf, bar, n0, 0, 0, c0, 0, ROWS * IMAGES * W)
    channels = C + places_of(n0, c0, N, CX2, IMAGES, SUMS)[0]
    norm_weight = gl.load(norm_weight_ptr + channels)
    norm_bias = gl.load(norm_bias_ptr + channels)
    mbarrier.wait(bar, phase)
    total = gl.zeros([64, IMAGES], gl.float32, SUMS)
    rounded = ()
    for i in gl.static_range(PIECES):
        x = by_image(pieces.index(i).permute((1, 0)).load(PART), IMAGES, W)
        total += gl.sum(widen_pairs(x), axis=2)
        rounded = rounded + (x,)
    mean, scale, shift = norm_of_tile(
        rounded, total, norm_weight, norm_bias, eps, PIECES, CG, ROWS * W
    )
    sync_threads()
    _store_normed(
        a_desc, stage_buf, pieces, rounded, mean, scale, shift, 0, n0, C + c0, PART, W, ACT, PIECES
    )


@gluon.jit
def _store_normed(
    a_desc, stage_buf, pieces, rounded, mean, scale, shift, h0, n0, c0,
    PART: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """act((y - mean) scale + shift) of a tile, by way of its shared memory."""
    for i in gl.static_range(PIECES):
        d = widen_pairs(rounded[i]) - mean[:, :, None]
        a = activate_affine(d, scale[:, :, None], shift[:, :, None], ACT)
        store_piece(pieces.index(i).permute((1, 0)), round_pairs(a, a_desc.dtype), PART, W)
    fence_async_shared()
    tma_store(a_desc, [h0, n0, 0, c0], stage_buf)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["N", "H"])
def conv_tiles_kernel(
    x_desc,  # [H, N, W, K] in boxes [2, IMAGES, W, 64]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64]
    beside1_desc,  # [H, N, W, C] in boxes [ROWS, IMAGES, W, 64], or None: residual; DGRAD: x
    beside2_desc,  # the second of two tensors that x concatenates, or None
    y_desc,  # [H, N, W, C] in boxes [ROWS, IMAGES, W, 64]: y, or dz
    extra1_desc,  # [H, N, W, C1] in boxes [2, IMAGES, W, 64], or None
    extra1_w_desc,  # [1, C, C1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, H / ROWS, 2, C] or None
    means_ptr,  # [N, H / 2, W / 2, C]: of y, over 2x2 pixels, with tiles of one image; or None
    mean_sums_ptr,  # [N, H / ROWS, 2, C] of these
    # [H, N, W, C + CX2] in the boxes of y_desc, or None: act(norm(y beside x2)) is to be written,
    # where a tile is whole images
    a_desc,
    x2_desc,  # [H, N, W, CX2] in such boxes, or None
    norm_weight_ptr,  # [C + CX2] of that norm
    norm_bias_ptr,
    slots_ptr,  # zeros, int64 [N, C, TILES], or None: tiles are whole images and groups
    eps,
    kept_ptr,  # int64 [N, H, W, C / 64]: which elements of dz dropout has kept; or None
    factor,  # of what is kept
    C1,
    C2,
    border,  # channels of the first of two tensors
    stride_emb,
    N,
    H,
    K,
    C,
    CX2,
    ROWS: gl.constexpr,  # of a tile
    IMAGES: gl.constexpr,  # of a tile, which they share unless it is one
    W: gl.constexpr,  # pixels of a tile's rows
    COLUMNS: gl.constexpr,  # of tiles in an image; 1: their rows are whole
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,  # as `activate_affine_grad` is told it, or behind the norm `activate_affine`
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    STEPS: gl.constexpr,  # of filters there; 0: three come with each block of pixels
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    CG: gl.constexpr,  # channels of a group of the norm
    KEEP: gl.constexpr,  # whether y is to be written
    TILES: gl.constexpr,  # of an image, if there are slots
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    CHUNKS: gl.constexpr = block_chunks(ROWS * IMAGES * W, IMAGES * W)
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [STEPS or 3 * BLOCKS, 1, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2, ROWS, IMAGES, W, 64], y_desc.layout)
    x_full, x_empty = new_barrier_pairs(BLOCKS)
    turns = new_barriers(2)
    w_full, w_empty = turns, turns  # unused where filters come with the pixels
    if STEPS > 0:
        w_full, w_empty = new_barrier_pairs(STEPS)
    beside_full = turns  # without `beside` unused
    if beside1_desc is not None or x2_desc is not None:
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    # tiles of the same pixels are neighbours, so pixels come from memory once and then from L2
    blocks_c = C // 64
    tiles_h = H // ROWS
    tiles = gl.cdiv(N, IMAGES) * tiles_h * COLUMNS * blocks_c
    HAS_EXTRA: gl.constexpr = extra1_desc is not None
    extra_blocks = (C1 + C2) // 64
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, stages, x_full, x_empty,
                    w_full, w_empty, beside_full, turns, vectors_ptr, extra_bias_ptr, emb_ptr,
                    partial_ptr, means_ptr, mean_sums_ptr,
                    a_desc, x2_desc, norm_weight_ptr, norm_bias_ptr, slots_ptr, eps, kept_ptr,
                    factor, K, extra_blocks, border, stride_emb, tiles, tiles_h, blocks_c, N, C,
                    CX2, role, ROWS, IMAGES, W, COLUMNS, DGRAD, HAS_EXTRA, ACT, BLOCKS, STEPS,
                    OVERLAP, CG, KEEP, TILES,
                ),
            )
            if role < 2
            else (
                _load,
                (
                    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
                    x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, K, C1, C2, tiles, tiles_h,
                    blocks_c, ROWS, IMAGES, W, COLUMNS, DGRAD, BLOCKS, STEPS, OVERLAP,
                ),
            )
            for role in (0, 1, 2)
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
