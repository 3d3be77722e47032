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

from ...activations import activate_affine
from ...hopper.compat import (
    aggregate,
    allocate_for_views,
    reinterpret,
    sync_threads,
    tma_load,
    tma_store,
)
from ...hopper.pairs import round_pairs, widen_pairs
from ...hopper.pipeline import new_barriers, new_ring, new_turns
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .epilogue_avg_pool import means_of_piece, store_means
from .epilogue_grid_sync import leave_sums, norm_of_image
from .epilogue_norm import norm_of_tile
from .tile_epilogue import (
    Beside,
    Terms,
    blocks_of,
    by_image,
    in_pieces,
    places_of,
    squares_about_mean,
    store_piece,
    store_sums,
)
from .tile_mma_loop import Blocks, Tiles, block_chunks, pixels_from, place_of_filter


@aggregate
class _Pointwise:
    """Tensors of which 1x1 convolutions are added."""

    x1_desc: gl.tensor  # as in `conv_tile_mma_kernel`
    w1_desc: gl.tensor
    x2_desc: gl.tensor
    w2_desc: gl.tensor
    C1: gl.tensor
    C2: gl.tensor
    blocks: gl.tensor  # of 64 channels of both


@aggregate
class _Dropout:
    """What it has kept of dz, as in `conv_tile_mma_kernel`."""

    kept_ptr: gl.tensor
    factor: gl.tensor


@aggregate
class _Results:
    """What is written, as in `conv_tile_mma_kernel`."""

    y_desc: gl.tensor
    partial_ptr: gl.tensor
    means_ptr: gl.tensor
    mean_sums_ptr: gl.tensor
    KEEP: gl.constexpr


@aggregate
class _Norm:
    """act(norm(y beside x2)), as in `conv_tile_mma_kernel`."""

    a_desc: gl.tensor
    x2_desc: gl.tensor
    weight_ptr: gl.tensor
    bias_ptr: gl.tensor
    slots_ptr: gl.tensor
    eps: gl.tensor
    CX2: gl.tensor
    CG: gl.constexpr
    TILES: gl.constexpr
    ACT: gl.constexpr


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _wait_for_slot(blocks, block, HALO: gl.constexpr, FILTERS: gl.constexpr):
    """The next slot for the rows of a tile, with HALO = 1 those above and below too, and the
    barrier for them and for so many filters if they come with them."""
    BYTES: gl.constexpr = (blocks.PIXELS + 2 * HALO * blocks.WIDTH) * 128
    if blocks.w is None:
        return blocks.x.acquire(block, BYTES + FILTERS * 64 * 128)
    else:
        return blocks.x.acquire(block, BYTES)


@gluon.jit
def _load_pixels(x_desc, blocks, tiles, stage, bar, n0, h0, w0, k0, HALO: gl.constexpr):
    """These rows, to their slot."""
    for j in gl.static_range((tiles.ROWS + 2 * HALO) // 2):
        chunk = stage * blocks.CHUNKS + j * (blocks.WIDTH // 4)
        to = pixels_from(blocks.x.bufs, chunk, [2, tiles.IMAGES, tiles.W, 64])
        tma_load(x_desc, [h0 + 2 * j - HALO, n0, w0, k0], bar, to)


@gluon.jit
def _load_filters(w_desc, blocks, stage, bar, s, k0, c0):
    """The three of a column, which come with a block of pixels."""
    for r in range(3):
        tap, row, column = place_of_filter(r, s, k0, c0, blocks.DGRAD)
        tma_load(w_desc, [tap, row, column], bar, blocks.w_bufs.index(stage * 3 + r))


@gluon.jit
def _load_pointwise(x_desc, w_desc, blocks, tiles, block, step, n0, h0, w0, c0, C):
    for k0 in range(0, C, 64):
        stage, bar = _wait_for_slot(blocks, block, 0, 1)
        _load_pixels(x_desc, blocks, tiles, stage, bar, n0, h0, w0, k0, 0)
        if blocks.w is None:
            tma_load(w_desc, [0, c0, k0], bar, blocks.w_bufs.index(stage * 3))
        else:
            blocks.load_filter(w_desc, 0, c0, k0, step)
        block += 1
        step += 1
    return block, step


@gluon.jit
def _load(x_desc, w_desc, blocks, tiles, extra, K, OVERLAP: gl.constexpr):
    # filters are there before the launch in front
    EARLY: gl.constexpr = OVERLAP and blocks.w is None
    if OVERLAP and not EARLY:
        await_inputs_alone()
    block = 0
    step = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        n0, h0, w0, _ = tiles.place(i)
        for k0 in range(0, K, 64):
            for s in range(3):
                stage, bar = _wait_for_slot(blocks, block, 1, 3)
                if EARLY:
                    _load_filters(w_desc, blocks, stage, bar, s, k0, c0)
                    if (k0 == 0) & (s == 0):
                        await_inputs_alone()
                _load_pixels(x_desc, blocks, tiles, stage, bar, n0, h0, w0 + s - 1, k0, 1)
                block += 1
                if blocks.w is not None:
                    for r in range(3):
                        tap, row, column = place_of_filter(r, s, k0, c0, blocks.DGRAD)
                        blocks.load_filter(w_desc, tap, row, column, step)
                        step += 1
                elif not EARLY:
                    _load_filters(w_desc, blocks, stage, bar, s, k0, c0)
        if extra.x1_desc is not None:
            block, step = _load_pointwise(
                extra.x1_desc, extra.w1_desc, blocks, tiles, block, step, n0, h0, w0, c0, extra.C1
            )
        if extra.x2_desc is not None:
            block, step = _load_pointwise(
                extra.x2_desc, extra.w2_desc, blocks, tiles, block, step, n0, h0, w0, c0, extra.C2
            )


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, blocks, tiles, turns, stages, terms, beside, dropout, results, norm,
    extra, K,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = tiles.ROWS
    IMAGES: gl.constexpr = tiles.IMAGES
    W: gl.constexpr = tiles.W
    WIDTH: gl.constexpr = blocks.WIDTH
    PIXELS: gl.constexpr = blocks.PIXELS
    DGRAD: gl.constexpr = blocks.DGRAD
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    PIECE: gl.constexpr = max(64, WIDTH)
    PIECES: gl.constexpr = PIXELS // PIECE
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    zeros = gl.zeros([64, PIECE], gl.float32, PART)
    BY_IMAGE: gl.constexpr = by_image(zeros, IMAGES, W).type.layout
    SUMS: gl.constexpr = gl.SliceLayout(2, BY_IMAGE)
    # Before the products, where nothing waits for them, if there are registers to keep them in.
    EARLY: gl.constexpr = PIXELS * IMAGES <= 256 or not DGRAD
    HAS_BESIDE: gl.constexpr = beside.desc1 is not None
    HAS_EXTRA: gl.constexpr = extra.x1_desc is not None
    N, C = terms.N, terms.C
    tiles_h = tiles.tiles_h
    extra_blocks = extra.blocks
    main_blocks = blocks_of(K, terms.RAGGED) * 3
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
    for i in range(gl.program_id(0) + GROUP * programs, tiles.count, 2 * programs):
        c0 = tiles.channel(i)
        n0, h0, w0, of_image = tiles.place(i)
        tma.store_wait(0)  # of the last tile, from where this writes to
        if HAS_BESIDE:
            beside.load(stage_buf, GROUP, n0, h0, w0, c0, PIXELS)
        if EARLY:
            loaded = terms.load(n0, c0, IMAGES, SUMS)
        if norm.a_desc is not None:
            channels = places_of(n0, c0, N, C, IMAGES, SUMS)[0]
            norm_weight = gl.load(norm.weight_ptr + channels)
            norm_bias = gl.load(norm.bias_ptr + channels)

        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        turns.wait(GROUP, phase)
        acc, block, step = blocks.multiply(acc, block, step, main_blocks)
        if HAS_EXTRA:
            for _ in range(extra_blocks):
                stage = blocks.x.wait(block)
                if blocks.w is None:
                    slot = stage * 3
                else:
                    slot = blocks.w.wait(step)
                acc = blocks.multiply_tap(acc, stage * blocks.CHUNKS, slot, False)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                sync_threads()
                if blocks.w is not None:
                    blocks.w.release_before(step)
                blocks.x.release_before(block)
                block += 1
                step += 1
        acc = blocks.finish(acc, block, step, turns, GROUP)
        block += tile_blocks  # those of the other warpgroup
        step += tile_steps

        accs = in_pieces(acc, PIXELS, PIECE)
        if not EARLY:
            loaded = terms.load(n0, c0, IMAGES, SUMS)
        offs, image, valid = places_of(n0, c0, N, C, IMAGES, SUMS)
        total = gl.zeros([64, IMAGES], gl.float32, SUMS)
        second = gl.zeros([64, IMAGES], gl.float32, SUMS)
        rounded = ()
        vectors = terms.over_pixels(loaded)
        if HAS_BESIDE:
            beside.wait(GROUP, phase)
        for j in gl.static_range(PIECES):
            y = by_image(accs[j], IMAGES, W)
            buf = pieces.index(j).permute((1, 0))
            read = None
            if HAS_BESIDE:
                read = by_image(widen_pairs(buf.load(PART)), IMAGES, W)
            if dropout.kept_ptr is not None:
                pixel = _pixels_of_piece(
                    j * PIECE, n0, h0, w0, tiles_h * ROWS, PART, PIECE, IMAGES, W, tiles.COLUMNS
                )
                keep = _kept(
                    dropout.kept_ptr, pixel, N * tiles_h * ROWS * W * tiles.COLUMNS, c0, C, PART
                )
                y *= by_image(gl.where(keep, dropout.factor, 0.0), IMAGES, W)
            y, total, second = terms.apply(y, read, vectors, total, second)
            y = round_pairs(y, results.y_desc.dtype)
            if (results.partial_ptr is not None or norm.a_desc is not None) and not DGRAD:
                total += gl.sum(widen_pairs(y), axis=2)
                rounded = rounded + (y,)
            if results.KEEP:
                store_piece(buf, y, PART, W)
        if norm.slots_ptr is not None:
            second = squares_about_mean(rounded, total, second, PIECES)
            leave_sums(norm.slots_ptr, n0, of_image, offs, C, total, second, norm.TILES)
        if results.KEEP:
            fence_async_shared()
            tma_store(results.y_desc, [h0, n0, w0, c0], stage_buf)
        if norm.a_desc is not None:
            if norm.slots_ptr is None:
                mean, scale, shift = norm_of_tile(
                    rounded, total, norm_weight, norm_bias, norm.eps, PIECES, norm.CG, ROWS * W
                )
            else:
                mean, scale, shift = norm_of_image(
                    norm.slots_ptr, n0, c0, C, norm_weight, norm_bias, norm.eps, norm.TILES,
                    norm.CG, PIXELS,
                )  # fmt: skip
            tma.store_wait(0)  # of y, where a goes
            sync_threads()
            _store_normed(
                norm, stage_buf, pieces, rounded, mean, scale, shift, h0, n0, c0, PART, W, PIECES
            )
        if results.partial_ptr is not None:
            if not DGRAD and norm.slots_ptr is None:
                second = squares_about_mean(rounded, total, second, PIECES)
            row = image * (tiles_h * tiles.COLUMNS) + of_image
            store_sums(results.partial_ptr, row, C, offs, valid, total, second)
        if results.means_ptr is not None:
            means = ()
            for j in gl.static_range(PIECES):
                means = means + (means_of_piece(rounded[j], W),)
            store_means(
                means, results.means_ptr, results.mean_sums_ptr, i // tiles.blocks_c, c0, C, PIECES
            )
        phase ^= 1
    if norm.x2_desc is not None:
        phase = phase if HAS_BESIDE else 0
        blocks_c = norm.CX2 // 64
        count = gl.cdiv(N, IMAGES) * blocks_c
        # Programs with few tiles of y, and the warpgroup with fewer, come first.
        last = programs - 1 - gl.program_id(0)
        for i in range(last + (1 - GROUP) * programs, count, 2 * programs):
            _normalize_second(
                norm, stage_buf, pieces, beside.full, phase, i // blocks_c * IMAGES,
                i % blocks_c * 64, N, C, tiles, GROUP, PART, PIECES, SUMS,
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
    norm, stage_buf, pieces, bars, phase, n0, c0, N, C, tiles,
    GROUP: gl.constexpr, PART: gl.constexpr, PIECES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A tile of act(norm(x2)), which lies in a behind the channels of y."""
    ROWS: gl.constexpr = tiles.ROWS
    IMAGES: gl.constexpr = tiles.IMAGES
    W: gl.constexpr = tiles.W
    tma.store_wait(0)  # of the last tile, from where this writes to
    Beside(norm.x2_desc, None, bars, None).load(stage_buf, GROUP, n0, 0, 0, c0, ROWS * IMAGES * W)
    channels = C + places_of(n0, c0, N, norm.CX2, IMAGES, SUMS)[0]
    norm_weight = gl.load(norm.weight_ptr + channels)
    norm_bias = gl.load(norm.bias_ptr + channels)
    mbarrier.wait(bars.index(GROUP), phase)
    total = gl.zeros([64, IMAGES], gl.float32, SUMS)
    rounded = ()
    for i in gl.static_range(PIECES):
        x = by_image(pieces.index(i).permute((1, 0)).load(PART), IMAGES, W)
        total += gl.sum(widen_pairs(x), axis=2)
        rounded = rounded + (x,)
    mean, scale, shift = norm_of_tile(
        rounded, total, norm_weight, norm_bias, norm.eps, PIECES, norm.CG, ROWS * W
    )
    sync_threads()
    _store_normed(
        norm, stage_buf, pieces, rounded, mean, scale, shift, 0, n0, C + c0, PART, W, PIECES
    )


@gluon.jit
def _store_normed(
    norm, stage_buf, pieces, rounded, mean, scale, shift, h0, n0, c0,
    PART: gl.constexpr, W: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """act((y - mean) scale + shift) of a tile, by way of its shared memory."""
    for i in gl.static_range(PIECES):
        d = widen_pairs(rounded[i]) - mean[:, :, None]
        a = activate_affine(d, scale[:, :, None], shift[:, :, None], norm.ACT)
        store_piece(pieces.index(i).permute((1, 0)), round_pairs(a, norm.a_desc.dtype), PART, W)
    fence_async_shared()
    tma_store(norm.a_desc, [h0, n0, 0, c0], stage_buf)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["N", "H"])
def conv_tile_mma_kernel(
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
    RAGGED: gl.constexpr,  # the last block of channels may have fewer than 64
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    CG: gl.constexpr,  # channels of a group of the norm
    KEEP: gl.constexpr,  # whether y is to be written
    TILES: gl.constexpr,  # of an image, if there are slots
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    WIDTH: gl.constexpr = IMAGES * W
    CHUNKS: gl.constexpr = block_chunks(ROWS * WIDTH, WIDTH)
    x_bufs = allocate_for_views(dtype, [BLOCKS * CHUNKS, 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [STEPS or 3 * BLOCKS, 1, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2, ROWS, IMAGES, W, 64], y_desc.layout)
    x = new_ring(x_bufs, BLOCKS)
    turns = new_turns(2)
    w = None
    if STEPS > 0:
        w = new_ring(w_bufs, STEPS)
    beside_full = None
    if beside1_desc is not None or x2_desc is not None:
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    blocks_c = blocks_of(C, RAGGED)
    if RAGGED:
        extra_blocks = blocks_of(C1, True) + blocks_of(C2, True)
    else:
        extra_blocks = (C1 + C2) // 64
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * COLUMNS * blocks_c
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, COLUMNS)
    blocks = Blocks(x, w_bufs, w, 3, CHUNKS, ROWS * WIDTH, WIDTH, DGRAD)
    extra = _Pointwise(
        extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc, C1, C2, extra_blocks
    )  # fmt: skip
    terms = Terms(vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, N, C, C, DGRAD, ACT, RAGGED)
    beside = Beside(beside1_desc, beside2_desc, beside_full, border)
    dropout = _Dropout(kept_ptr, factor)
    results = _Results(y_desc, partial_ptr, means_ptr, mean_sums_ptr, KEEP)
    norm = _Norm(
        a_desc, x2_desc, norm_weight_ptr, norm_bias_ptr, slots_ptr, eps, CX2, CG, TILES, ACT
    )
    launch_roles(
        _multiply, (
            blocks, tiles, turns, stages, terms, beside, dropout, results, norm,
            extra, K, OVERLAP,
        ),
        _load, (x_desc, w_desc, blocks, tiles, extra, K, OVERLAP),
        2, (REGISTERS, 24),
    )  # fmt: skip
