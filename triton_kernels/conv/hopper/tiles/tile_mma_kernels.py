"""The kernel of `conv.hopper.tile_mma`: a 3x3 convolution, or its input gradient, with its
epilogue.

A program has three concurrent roles. One warp, `_load`, fills two rings in shared memory: blocks of
the pixels of a tile, moved by a column, and filters of one tap. Two warpgroups multiply
(`tile_multiply.multiply_tiles`), each every other tile. The rings hold the blocks of one
warpgroup's tile and then those of the other's, so that one runs its epilogue while the other
multiplies. A warpgroup waits for its turn before it multiplies (`turns`): a barrier tells only an
even phase from an odd one, so no warpgroup may be two phases behind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ....hopper.compat import aggregate, allocate_for_views, sync_threads, tma_load
from ....hopper.pipeline import new_barriers, new_ring, new_turns
from ....hopper.roles import launch_roles
from ....runtime.dependent_launch import await_inputs_alone
from ....tf32 import as_operand
from .tile_epilogue import Beside, Terms, blocks_of
from .tile_mma_loop import Blocks, Tiles, block_chunks, pixels_from, place_of_filter, swizzled
from .tile_multiply import Dropout, Results, ThenNorm, multiply_tiles


@aggregate
class _Pointwise:
    """The inputs and filters of the added 1x1 convolutions."""

    x1_desc: gl.tensor  # as in `conv_tile_mma_kernel`
    w1_desc: gl.tensor
    x2_desc: gl.tensor
    w2_desc: gl.tensor
    C1: gl.tensor
    C2: gl.tensor
    blocks: gl.tensor  # blocks of channels of both


@aggregate
class _Products:
    """The products of a 3x3 convolution and of the added 1x1 convolutions."""

    extra: _Pointwise
    K: gl.tensor
    CHANNELS: gl.constexpr  # of a block
    RAGGED: gl.constexpr
    STRADDLING: gl.constexpr

    @gluon.jit
    def count(self):
        main_blocks = blocks_of(self.K, self.RAGGED, self.CHANNELS) * 3
        more: gl.constexpr = 1 if self.STRADDLING else 0
        return main_blocks + self.extra.blocks, more, main_blocks * 3 + self.extra.blocks

    @gluon.jit
    def multiply(self, blocks, acc, block, step):
        main_blocks = blocks_of(self.K, self.RAGGED, self.CHANNELS) * 3
        acc, block, step = blocks.multiply(acc, block, step, main_blocks)
        if self.extra.x1_desc is not None:
            for _ in range(self.extra.blocks):
                stage = blocks.x.wait(block)
                if blocks.w_bufs.dtype == gl.float32:
                    _round_pixels(blocks, stage)
                if blocks.w is None:
                    slot = stage * 3
                else:
                    slot = blocks.w.wait(step)
                acc = blocks.multiply_tap(acc, stage, 0, slot, False)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                sync_threads()
                if blocks.w is not None:
                    blocks.w.release_before(step)
                blocks.x.release_before(block)
                block += 1
                step += 1
        return acc, block, step


@gluon.jit
def _round_pixels(blocks, stage):
    """Round the pixels of a tile in their slot to TF32."""
    ROWS: gl.constexpr = 64  # at a time, which need few registers
    SHAPE: gl.constexpr = [ROWS, 32]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for j in gl.static_range(blocks.PIXELS // ROWS):
        part = pixels_from(blocks, stage, j * (ROWS // 8), SHAPE)
        part.store(as_operand(part.load(LAYOUT), gl.float32, True))
    fence_async_shared()
    sync_threads()


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _wait_for_slot(blocks, block, HALO: gl.constexpr, FILTERS: gl.constexpr):
    """Acquire the next slot for the rows of a tile. HALO = 1: with a row above and one below. The
    barrier also counts FILTERS filters if they are stored with the pixels."""
    x_bufs = blocks.x.bufs
    ROW: gl.constexpr = x_bufs.shape[2] * x_bufs.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (blocks.PIXELS + 2 * HALO * blocks.WIDTH) * ROW
    if blocks.w is None:
        return blocks.x.acquire(block, BYTES + FILTERS * 64 * ROW)
    else:
        return blocks.x.acquire(block, BYTES)


@gluon.jit
def _load_pixels(x_desc, blocks, tiles, stage, bar, n0, h0, w0, k0, HALO: gl.constexpr):
    """Load the rows of a tile into their slot."""
    BOX: gl.constexpr = [2, tiles.IMAGES, tiles.W, blocks.x.bufs.shape[2]]
    for j in gl.static_range((tiles.ROWS + 2 * HALO) // 2):
        to = pixels_from(blocks, stage, j * (blocks.WIDTH // 4), BOX)
        tma_load(x_desc, [h0 + 2 * j - HALO, n0, w0, k0], bar, to)


@gluon.jit
def _load_filters(w_desc, blocks, stage, bar, s, k0, c0):
    """Load the three filters of column s, which are stored with a block of pixels."""
    for r in range(3):
        tap, row, column = place_of_filter(r, s, k0, c0, blocks.TRANSPOSED)
        tma_load(w_desc, [tap, row, column], bar, blocks.w_bufs.index(stage * 3 + r))


@gluon.jit
def _load_pointwise(x_desc, w_desc, blocks, tiles, block, step, n0, h0, w0, c0, C):
    for k0 in range(0, C, blocks.x.bufs.shape[2]):
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
def _load_beside(beside, blocks, tiles, block, n0, h0, w0, c0):
    """Load the tile of the second tensor that the epilogue reads into the next slot."""
    stage, bar = blocks.x.acquire(block, blocks.PIXELS * 128)
    BOX: gl.constexpr = [tiles.ROWS, tiles.IMAGES, tiles.W, 64]
    to = pixels_from(blocks, stage, 0, BOX)
    tma_load(beside.second, [h0, n0, w0, c0 - beside.border], bar, to)
    return block + 1


@gluon.jit
def _load(
    x_desc, w_desc, blocks, tiles, extra, beside, K, OVERLAP: gl.constexpr, FILTERS: gl.constexpr
):  # fmt: skip
    # if filters are there, load the first ones before the wait
    EARLY: gl.constexpr = OVERLAP and FILTERS and blocks.w is None
    CHANNELS: gl.constexpr = blocks.x.bufs.shape[2]
    if OVERLAP and not EARLY:
        await_inputs_alone()
    block = 0
    step = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        c0 = tiles.channel(i)
        n0, h0, w0, _, _ = tiles.place(i)
        for k0 in range(0, K, CHANNELS):
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
                        tap, row, column = place_of_filter(r, s, k0, c0, blocks.TRANSPOSED)
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
        if beside.STRADDLING:
            block = _load_beside(beside, blocks, tiles, block, n0, h0, w0, c0)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["N", "H"])
def conv_tile_mma_kernel(
    x_desc,  # [H, N, W, K] in boxes [2, IMAGES, W, channels of a block]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, channels of a block], DGRAD the other way round
    beside1,  # as y, or None: residual; DGRAD: x
    beside2,  # the second of two tensors that x concatenates, or None
    y,  # [H, N, W, C] in boxes [ROWS, IMAGES, W, 64], in TF32 [N, H, W, C]: y, or dz
    extra1_desc,  # [H, N, W, C1] in boxes as x_desc, or None
    extra1_w_desc,  # [1, C, C1] in boxes [1, 64, channels of a block]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, H / ROWS, 2, C] or None
    # [H, N, W, C + CX2] in boxes as y, or None: act(norm(concat(y, x2))) is written here;
    # needs tiles of whole images
    a_desc,
    x2_desc,  # [H, N, W, CX2] in boxes as y, or None
    norm_weight_ptr,  # [C + CX2]
    norm_bias_ptr,
    eps,
    kept_ptr,  # int64 [N, H, W, words]: which channels of dz dropout has kept; or None
    kept_factor,  # multiplies the elements that are kept
    factor,  # of a forward pass, or None: multiplies the sum
    C1,
    C2,
    border,  # channels of the first of the two tensors that x concatenates
    stride_emb,
    N,
    H,
    K,
    C,
    CX2,
    ROWS: gl.constexpr,  # rows of a tile
    IMAGES: gl.constexpr,  # images of a tile
    W: gl.constexpr,  # pixels of a tile's rows
    COLUMNS: gl.constexpr,  # tiles across an image
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,  # for `activate_affine_grad`; of the norm that follows, `activate_affine`
    BLOCKS: gl.constexpr,  # slots of the ring of pixels
    STEPS: gl.constexpr,  # slots of the ring of filters; 0: three are stored with each block
    REGISTERS: gl.constexpr,  # per thread of the warpgroups that multiply
    RAGGED: gl.constexpr,  # the last block of channels may have fewer than 64
    STRADDLING: gl.constexpr,  # a tile may have channels of both tensors that x concatenates
    OVERLAP: gl.constexpr,  # the previous kernel may still be running
    FILTERS: gl.constexpr,  # and does not write the filters
    TF32: gl.constexpr,  # y of float32 is rounded to it
    CG: gl.constexpr,  # channels of a group of the norm
    KEEP: gl.constexpr,  # y is written
):
    dtype: gl.constexpr = x_desc.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    CHANNELS: gl.constexpr = x_desc.block_type.shape[3]  # of a block
    WIDTH: gl.constexpr = IMAGES * W
    CHUNKS: gl.constexpr = block_chunks(ROWS * WIDTH, WIDTH)
    chunks: gl.constexpr = [BLOCKS * CHUNKS, 8, CHANNELS]
    x_bufs = allocate_for_views(dtype, chunks, swizzled([8, CHANNELS], dtype))
    slots: gl.constexpr = [STEPS or 3 * BLOCKS] + w_desc.block_type.shape
    w_bufs = gl.allocate_shared_memory(dtype, slots, w_desc.layout)
    stages = None
    if BITS == 16:
        stages = gl.allocate_shared_memory(dtype, [2, ROWS, IMAGES, W, 64], y.layout)
    x = new_ring(x_bufs, BLOCKS)
    turns = new_turns(2)
    w = None
    if STEPS > 0:
        w = new_ring(w_bufs, STEPS)
    beside_full = None
    if BITS == 16 and (beside1 is not None or x2_desc is not None):
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    blocks_c = blocks_of(C, RAGGED)
    if RAGGED:
        extra_blocks = blocks_of(C1, True, CHANNELS) + blocks_of(C2, True, CHANNELS)
    else:
        extra_blocks = (C1 + C2) // CHANNELS
    tiles_h = H // ROWS
    count = gl.cdiv(N, IMAGES) * tiles_h * COLUMNS * blocks_c
    tiles = Tiles(count, tiles_h, blocks_c, ROWS, IMAGES, W, COLUMNS, 1)
    blocks = Blocks(x, w_bufs, w, 3, CHUNKS, ROWS * WIDTH, WIDTH, DGRAD and BITS == 16)
    extra = _Pointwise(
        extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc, C1, C2, extra_blocks
    )  # fmt: skip
    products = _Products(extra, K, CHANNELS, RAGGED, STRADDLING)
    terms = Terms(
        vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, N, C, C, DGRAD, ACT, RAGGED, factor
    )  # fmt: skip
    beside = Beside(beside1, beside2, beside_full, border, STRADDLING)
    dropout = Dropout(kept_ptr, kept_factor)
    results = Results(y, stages, partial_ptr, KEEP, TF32)
    norm = ThenNorm(a_desc, x2_desc, norm_weight_ptr, norm_bias_ptr, eps, CX2, CG, ACT)
    launch_roles(
        multiply_tiles, (
            blocks, tiles, turns, terms, beside, dropout, results, norm, products, OVERLAP,
        ),
        _load, (x_desc, w_desc, blocks, tiles, extra, beside, K, OVERLAP, FILTERS),
        2, (REGISTERS, 24),
    )  # fmt: skip
