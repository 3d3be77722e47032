"""The two warpgroups of `tile_mma_kernels` and `upsampled_kernels` that multiply. They take turns:
while one runs the main loop of its tile, the other runs the epilogue of the tile before.

A kernel says what is multiplied, by an aggregate `products`:

    count()                               how many buffers a tile uses: blocks of pixels, further
                                          blocks of pixels (one more if `Beside` has one), and
                                          filters that are loaded without pixels
    multiply(blocks, acc, block, step)    issues the products of a tile (`tile_mma_loop.Blocks`)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....activations import activate_affine
from ....hopper.compat import aggregate, reinterpret, sync_threads, tma_store
from ....hopper.pairs import round_pairs, widen_pairs
from ....runtime.dependent_launch import await_inputs_alone, begin_next
from ....tf32 import as_operand
from ..epilogue_norm import norm_of_tile
from .tile_epilogue import (
    Beside,
    Places,
    blocks_of,
    by_image,
    by_pixel,
    in_pieces,
    places_of,
    squares_about_mean,
    store_piece,
    store_sums,
)
from .tile_mma_loop import pixels_from


@aggregate
class Dropout:
    """Dropout of dz, with the arguments of `conv_tile_mma_kernel`."""

    kept_ptr: gl.tensor
    factor: gl.tensor


@aggregate
class Results:
    """The outputs, with the arguments of `conv_tile_mma_kernel`. If the pixels of a tile have one
    parity, y is [H, 2, N, W, 2 C]."""

    y: gl.tensor
    stages: gl.shared_memory_descriptor  # a tile for either warpgroup; None in 32 bits
    partial_ptr: gl.tensor
    KEEP: gl.constexpr
    TF32: gl.constexpr  # y is rounded to it

    @gluon.jit
    def as_stored(self, buf, tiles):
        """The shared memory of a tile, in the shape of y's boxes."""
        if tiles.PARITIES == 1:
            return buf
        else:
            BOX: gl.constexpr = [tiles.ROWS, 1, tiles.IMAGES, tiles.W, 64]
            return reinterpret(buf, buf.dtype, BOX, self.y.layout)

    @gluon.jit
    def round(self, y):
        if self.stages is None:
            return as_operand(y, gl.float32, self.TF32)
        else:
            return round_pairs(y, self.y.dtype)

    @gluon.jit
    def write(self, y, places):
        """y [64, pixels] from registers. A warp has 8 channels of a pixel at a time, 32 bytes."""
        gl.store(places.of(self.y, places.C), y, mask=places.there)

    @gluon.jit
    def store(self, buf, tiles, n0, h0, w0, c0, parity, C):
        if tiles.PARITIES == 1:
            tma_store(self.y, [h0, n0, w0, c0], buf)
        else:
            tma_store(self.y, [h0, parity // 2, n0, 0, parity % 2 * C + c0], buf)


@aggregate
class ThenNorm:
    """The norm that follows, act(norm(concat(y, x2))), with the arguments of
    `conv_tile_mma_kernel`."""

    a_desc: gl.tensor
    x2_desc: gl.tensor
    weight_ptr: gl.tensor
    bias_ptr: gl.tensor
    eps: gl.tensor
    CX2: gl.tensor
    CG: gl.constexpr
    ACT: gl.constexpr


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, blocks, tiles, turns, terms, beside, dropout, results, norm, products,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """The loop of warpgroup GROUP over every other tile: the kernel's products, then the
    epilogue."""
    ROWS: gl.constexpr = tiles.ROWS
    IMAGES: gl.constexpr = tiles.IMAGES
    W: gl.constexpr = tiles.W
    WIDTH: gl.constexpr = blocks.WIDTH
    PIXELS: gl.constexpr = blocks.PIXELS
    DGRAD: gl.constexpr = terms.DGRAD
    # Tiles of 16 bits go to and from memory through shared memory
    SHARED: gl.constexpr = results.stages is not None
    K: gl.constexpr = 16 if SHARED else 8  # of an instruction
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, K])
    PIECE: gl.constexpr = max(64 if SHARED else 32, WIDTH)
    PIECES: gl.constexpr = PIXELS // PIECE
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    zeros = gl.zeros([64, PIECE], gl.float32, PART)
    BY_IMAGE: gl.constexpr = by_image(zeros, IMAGES, W).type.layout
    SUMS: gl.constexpr = gl.SliceLayout(2, BY_IMAGE)
    # Load the epilogue's vectors before the main loop, if registers can hold them until then
    EARLY: gl.constexpr = PIXELS * IMAGES <= 256 or not DGRAD
    HAS_BESIDE: gl.constexpr = beside.first is not None
    BOTH: gl.constexpr = beside.STRADDLING
    N, C = terms.N, terms.C
    tiles_h = tiles.tiles_h
    tile_blocks, more_blocks, tile_steps = products.count()
    block = GROUP * (tile_blocks + more_blocks)
    step = GROUP * tile_steps
    phase = 0
    if SHARED:
        stage_buf = results.stages.index(GROUP)
        MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        pieces = reinterpret(stage_buf, stage_buf.dtype, [PIECES, PIECE, 64], MATRIX)
        out = results.as_stored(stage_buf, tiles)
    programs = gl.num_programs(0)
    if OVERLAP:
        await_inputs_alone()
    for i in range(gl.program_id(0) + GROUP * programs, tiles.count, 2 * programs):
        c0 = tiles.channel(i)
        n0, h0, w0, of_image, parity = tiles.place(i)
        if SHARED:
            tma.store_wait(0)  # the store of the last tile reads the memory that this tile writes
        if SHARED and HAS_BESIDE:
            beside.load(stage_buf, GROUP, n0, h0, w0, c0, PIXELS)
        if EARLY:
            loaded = terms.load(n0, c0, IMAGES, SUMS)
        if norm.a_desc is not None:
            channels = places_of(n0, c0, N, C, IMAGES, SUMS)[0]
            norm_weight = gl.load(norm.weight_ptr + channels)
            norm_bias = gl.load(norm.bias_ptr + channels)

        acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
        turns.wait(GROUP, phase)
        acc, block, step = products.multiply(blocks, acc, block, step)
        acc = blocks.finish(acc, block, step, turns, GROUP)
        last = block
        if BOTH:
            block += 1
        block += tile_blocks + more_blocks  # skip those of the other warpgroup
        step += tile_steps

        accs = in_pieces(acc, PIXELS, PIECE)
        if not EARLY:
            loaded = terms.load(n0, c0, IMAGES, SUMS)
        offs, image, valid = places_of(n0, c0, N, C, IMAGES, SUMS)
        total = gl.zeros([64, IMAGES], gl.float32, SUMS)
        second = gl.zeros([64, IMAGES], gl.float32, SUMS)
        rounded = ()
        vectors = terms.over_pixels(loaded)
        if SHARED and HAS_BESIDE:
            beside.wait(GROUP, phase)
        if BOTH:
            slot = blocks.x.wait(last)
        for j in gl.static_range(PIECES):
            y = by_image(accs[j], IMAGES, W)
            read = None
            if SHARED:
                buf = pieces.index(j).permute((1, 0))
            else:
                places = _places_of_piece(
                    j * PIECE, n0, h0, w0, c0, N, tiles_h * ROWS, C, PART, PIECE, IMAGES, W,
                    tiles.COLUMNS, terms.RAGGED,
                )  # fmt: skip
            if HAS_BESIDE:
                if SHARED:
                    read = by_image(widen_pairs(buf.load(PART)), IMAGES, W)
                else:
                    read = by_image(beside.read(places), IMAGES, W)
            if BOTH:
                other = pixels_from(blocks, slot, j * (PIECE // 8), [PIECE, 64]).permute((1, 0))
                read += by_image(widen_pairs(other.load(PART)), IMAGES, W)
            if dropout.kept_ptr is not None:
                pixel = _pixels_of_piece(
                    j * PIECE, n0, h0, w0, tiles_h * ROWS, PART, PIECE, IMAGES, W, tiles.COLUMNS
                )
                pixels = N * tiles_h * ROWS * W * tiles.COLUMNS
                words = blocks_of(C, terms.RAGGED)
                keep = _kept(dropout.kept_ptr, pixel, pixels, c0, words, PART)
                y *= by_image(gl.where(keep, dropout.factor, 0.0), IMAGES, W)
            y, total, second = terms.apply(y, read, vectors, total, second)
            y = results.round(y)
            if (results.partial_ptr is not None or norm.a_desc is not None) and not DGRAD:
                total += gl.sum(widen_pairs(y), axis=2)
                rounded = rounded + (y,)
            if not SHARED:
                results.write(by_pixel(y, PART, W), places)
            elif results.KEEP:
                store_piece(buf, y, PART, W)
        if BOTH:
            sync_threads()
            blocks.x.release(last)
        if SHARED and results.KEEP:
            fence_async_shared()
            results.store(out, tiles, n0, h0, w0, c0, parity, C)
        if norm.a_desc is not None:
            mean, scale, shift = norm_of_tile(
                rounded, total, norm_weight, norm_bias, norm.eps, PIECES, norm.CG, ROWS * W
            )
            tma.store_wait(0)  # the store of y reads the memory that act(norm) is written to
            sync_threads()
            _store_normed(
                norm, stage_buf, pieces, rounded, mean, scale, shift, h0, n0, c0, PART, W, PIECES
            )
        if results.partial_ptr is not None:
            if not DGRAD:
                second = squares_about_mean(rounded, total, second, PIECES)
            row = tiles.row(image, of_image, parity)
            store_sums(results.partial_ptr, row, C, offs, valid, total, second)
        phase ^= 1
    if norm.x2_desc is not None:
        phase = phase if HAS_BESIDE else 0
        blocks_c = norm.CX2 // 64
        count = gl.cdiv(N, IMAGES) * blocks_c
        # Begin with the programs, and the warpgroup, that had fewer tiles of y
        last = programs - 1 - gl.program_id(0)
        for i in range(last + (1 - GROUP) * programs, count, 2 * programs):
            _normalize_second(
                norm, stage_buf, pieces, beside.full, phase, i // blocks_c * IMAGES,
                i % blocks_c * 64, N, C, tiles, GROUP, PART, PIECES, SUMS,
            )  # fmt: skip
            phase ^= 1
    if OVERLAP:
        begin_next()
    if SHARED:
        tma.store_wait(0)


@gluon.jit
def _places_of_piece(
    first, n0, h0, w0, c0, N, H, C, PART: gl.constexpr, PIECE: gl.constexpr, IMAGES: gl.constexpr,
    W: gl.constexpr, COLUMNS: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Where PIECE pixels of a tile are, from pixel `first` on."""
    p = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, PART))
    channel = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, PART))
    row = W * COLUMNS
    image = p // W % IMAGES
    there = None
    if RAGGED or IMAGES > 1:
        there = (channel < C)[:, None] & (n0 + image < N)[None, :]
    corner = n0.to(gl.int64) * (H * row) + h0 * row + w0
    return Places(corner, image * (H * row) + p // (W * IMAGES) * row + p % W, channel, there, C)


@gluon.jit
def _pixels_of_piece(
    first, n0, h0, w0, H, PART: gl.constexpr, PIECE: gl.constexpr, IMAGES: gl.constexpr,
    W: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The positions in [N H W] of PIECE pixels of a tile, from pixel `first` on."""
    p = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, PART))
    image = n0 + p // W % IMAGES
    return (image * H + h0 + p // (W * IMAGES)) * (W * COLUMNS) + w0 + p % W


@gluon.jit
def _kept(kept_ptr, pixel, pixels, c0, words, PART: gl.constexpr):
    """Whether dropout has kept an element: bool [64 channels, pixels]. A pixel has `words` words
    of 64 channels each."""
    to = kept_ptr + pixel.to(gl.int64) * words + c0 // 64
    words = gl.load(to, mask=pixel < pixels, other=0)
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, PART)).to(gl.int64)
    return ((words[None, :] >> channel[:, None]) & 1) != 0


@gluon.jit
def _normalize_second(
    norm, stage_buf, pieces, bars, phase, n0, c0, N, C, tiles,
    GROUP: gl.constexpr, PART: gl.constexpr, PIECES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Compute a tile of act(norm(x2)). Its channels follow those of y."""
    ROWS: gl.constexpr = tiles.ROWS
    IMAGES: gl.constexpr = tiles.IMAGES
    W: gl.constexpr = tiles.W
    tma.store_wait(0)  # the store of the last tile reads the memory that this tile writes
    second = Beside(norm.x2_desc, None, bars, None, False)
    second.load(stage_buf, GROUP, n0, 0, 0, c0, ROWS * IMAGES * W)
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
    """Write act((y - mean) scale + shift) of a tile through its shared memory."""
    for i in gl.static_range(PIECES):
        d = widen_pairs(rounded[i]) - mean[:, :, None]
        a = activate_affine(d, scale[:, :, None], shift[:, :, None], norm.ACT)
        store_piece(pieces.index(i).permute((1, 0)), round_pairs(a, norm.a_desc.dtype), PART, W)
    fence_async_shared()
    tma_store(norm.a_desc, [h0, n0, 0, c0], stage_buf)
