"""The kernel of `conv.hopper.linear_mma`: a product [pixels, K] times [K, C] and its epilogue.

One warp loads blocks of 64 channels of a tile's pixels and filters into a ring, and two warpgroups
multiply. There are two ways:

- TOGETHER: both warpgroups compute the same tile, each half of its channels, so the pixels are
  fetched once for both. One warpgroup may be ahead by as many blocks as the ring has slots, so it
  can run its epilogue while the other one still multiplies.
- in turn: each warpgroup computes whole tiles, and one runs its epilogue while the other
  multiplies.

Results are stored in pieces of 64 pixels by 64 channels. A warpgroup has shared memory for a few
pieces only, which leaves more for the ring. If the epilogue reads a tensor, such as a residual, all
pieces of the tile are loaded before its products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from ...hopper.compat import aggregate, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...hopper.pipeline import Ring, Turns, new_barriers, new_ring, new_turns, wait_for
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .tiles.tile_epilogue import (
    Terms,
    by_image,
    in_pieces,
    places_of,
    squares_about_mean,
    store_piece,
    store_sums,
)

# Tiles are numbered in bands of this many tiles of pixels. Programs that run at the same time then
# share pixels as well as filters in the L2 cache.
BAND = gl.constexpr(8)
PIECE = gl.constexpr(64)  # pixels of a piece


@aggregate
class _Tiles:
    """The tiles of the result and their order."""

    count: gl.tensor
    rows: gl.tensor  # tiles of pixels
    of_image: gl.tensor  # tiles of pixels per image, or per group of images that share a tile
    columns: gl.tensor  # tiles of channels
    ROWS: gl.constexpr  # pixels of each image of a tile
    IMAGES: gl.constexpr  # images of a tile
    CHANNELS: gl.constexpr  # channels of a tile

    @gluon.jit
    def place(self, i):
        """The first pixel within its image, image and channel of tile i, and its number within the
        image."""
        within = i % (BAND * self.columns)
        first = i // (BAND * self.columns) * BAND
        band = gl.minimum(self.rows - first, BAND)
        row = first + within % band
        of_image = row % self.of_image
        return (
            of_image * self.ROWS,
            row // self.of_image * self.IMAGES,
            within // band * self.CHANNELS,
            of_image,
        )


@aggregate
class _Product:
    """The operands of the product."""

    x_desc: gl.tensor  # as in `conv_linear_mma_kernel`
    w_desc: gl.tensor
    ring: Ring  # of blocks of pixels and their filters
    w_bufs: gl.shared_memory_descriptor  # [SLOTS * BLOCKS, 64, 64]
    turns: Turns  # whose turn it is to multiply; None: TOGETHER
    blocks: gl.tensor  # blocks of 64 channels of K
    BLOCKS: gl.constexpr  # blocks of 64 channels of a tile
    TRANSPOSED: gl.constexpr  # filters are [K, C]

    @gluon.jit
    def load(self, block, k, p0, n0, c0, BOX: gl.constexpr):
        """Load channels k to k + 63 of a tile's pixels and filters into the next slot."""
        PIXELS: gl.constexpr = self.ring.bufs.shape[1]
        slot, bar = self.ring.acquire(block, (PIXELS + 64 * self.BLOCKS) * 128)
        buf = self.ring.bufs.index(slot)
        tma_load(
            self.x_desc, [p0, n0, k], bar, reinterpret(buf, buf.dtype, BOX, self.x_desc.layout)
        )
        for j in gl.static_range(self.BLOCKS):
            to = self.w_bufs.index(slot * self.BLOCKS + j)
            if self.TRANSPOSED:
                tma_load(self.w_desc, [k, c0 + 64 * j], bar, to)
            else:
                tma_load(self.w_desc, [c0 + 64 * j, k], bar, to)

    @gluon.jit
    def multiply(self, accs, block, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Multiply for COUNT of the tile's blocks of channels, from block FIRST on. At the end the
        last products are still running, and their slot is not released."""
        for k in range(self.blocks):
            slot = self.ring.wait(block)
            x = self.ring.bufs.index(slot).permute((1, 0))
            sums = ()
            for j in gl.static_range(COUNT):
                w = self.w_bufs.index(slot * self.BLOCKS + FIRST + j)
                if self.TRANSPOSED:
                    w = w.permute((1, 0))
                sums = sums + (warpgroup_mma(w, x, accs[j], is_async=True),)
            accs = wait_for(COUNT, sums, COUNT)  # the products of the block before are complete
            sync_threads()
            self.ring.release_before(block, k > 0)
            block += 1
        return accs, block

    @gluon.jit
    def skip(self, block):
        """Release the slots of a tile in which this warpgroup has no channels."""
        for _ in range(self.blocks):
            self.ring.wait(block)
            sync_threads()
            self.ring.release(block)
            block += 1
        return block


@aggregate
class _Epilogue:
    """The operands and results of the epilogue, as in `conv_linear_mma_kernel`."""

    beside_desc: gl.tensor
    beside_full: gl.shared_memory_descriptor  # a barrier for each warpgroup, or None
    y_desc: gl.tensor
    pieces: gl.shared_memory_descriptor  # [2 * HELD, PIECE, 64]
    partial_ptr: gl.tensor
    terms: Terms
    PIXELS: gl.constexpr  # pixels of a tile
    COUNT: gl.constexpr  # blocks of 64 channels of a warpgroup
    HELD: gl.constexpr  # pieces in shared memory per warpgroup

    @gluon.jit
    def as_stored(self, buf):
        """The shared memory of a piece in the shape of y_desc's boxes."""
        return reinterpret(buf, buf.dtype, self.y_desc.block_type.shape, self.y_desc.layout)

    @gluon.jit
    def load_beside(self, GROUP: gl.constexpr, p0, n0, c0, IMAGES: gl.constexpr):
        """Load the residual, or x, of a tile into the memory of its results."""
        tma.store_wait(0)  # the stores of the last tile read that memory
        bar = self.beside_full.index(GROUP)
        mbarrier.expect(bar, self.HELD * PIECE * 128)
        PIECES: gl.constexpr = self.PIXELS // PIECE
        for i in gl.static_range(self.HELD):
            at = [p0 + i % PIECES * (PIECE // IMAGES), n0, c0 + i // PIECES * 64]
            buf = self.pieces.index(GROUP * self.HELD + i)
            tma_load(self.beside_desc, at, bar, self.as_stored(buf))

    @gluon.jit
    def finish(
        self, acc, loaded, GROUP: gl.constexpr, j: gl.constexpr, p0, n0, c0, of_image, tiles,
        SUMS: gl.constexpr,
    ):  # fmt: skip
        """The epilogue of block j of the warpgroup's channels; c0 is its first channel."""
        IMAGES: gl.constexpr = tiles.IMAGES
        PIECES: gl.constexpr = self.PIXELS // PIECE
        PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
        terms = self.terms
        GRAD: gl.constexpr = terms.DGRAD
        BESIDE: gl.constexpr = self.beside_desc is not None
        accs = in_pieces(acc, self.PIXELS, PIECE)
        vectors = terms.over_pixels(loaded)
        total = gl.zeros([64, IMAGES], gl.float32, SUMS)
        second = gl.zeros([64, IMAGES], gl.float32, SUMS)
        rounded = ()
        for i in gl.static_range(PIECES):
            y = by_image(accs[i], IMAGES, 1)
            buf = self.pieces.index(GROUP * self.HELD + (j * PIECES + i) % self.HELD)
            piece = buf.permute((1, 0))
            read = None
            if BESIDE:
                read = by_image(widen_pairs(piece.load(PART)), IMAGES, 1)
            y, total, second = terms.apply(y, read, vectors, total, second)
            y = round_pairs(y, self.y_desc.dtype)
            if self.partial_ptr is not None and not GRAD:
                total += gl.sum(widen_pairs(y), axis=2)
                rounded = rounded + (y,)
            if not BESIDE:
                tma.store_wait(self.HELD - 1)  # the store of the piece that was there is complete
                sync_threads()
            store_piece(piece, y, PART, 1)
            fence_async_shared()
            tma_store(self.y_desc, [p0 + i * (PIECE // IMAGES), n0, c0], self.as_stored(buf))
        if self.partial_ptr is not None:
            if not GRAD:
                second = squares_about_mean(rounded, total, second, PIECES)
            offs, image, valid = places_of(n0, c0, terms.N, terms.C, IMAGES, SUMS)
            row = image * tiles.of_image + of_image
            store_sums(self.partial_ptr, row, terms.C, offs, valid, total, second)


@gluon.jit
def _load(product, tiles, OVERLAP: gl.constexpr):
    BOX: gl.constexpr = [tiles.ROWS, tiles.IMAGES, 64]
    if OVERLAP:
        await_inputs_alone()
    block = 0
    for i in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        p0, n0, c0, _ = tiles.place(i)
        for k in range(product.blocks):
            product.load(block, k * 64, p0, n0, c0, BOX)
            block += 1


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, product, tiles, epilogue, OVERLAP: gl.constexpr
):  # fmt: skip
    """The loop of a warpgroup: over all tiles if TOGETHER, else over every other tile."""
    COUNT: gl.constexpr = epilogue.COUNT
    TOGETHER: gl.constexpr = product.turns is None
    PIXELS: gl.constexpr = epilogue.PIXELS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    SUMS: gl.constexpr = gl.SliceLayout(
        2, by_image(gl.zeros([64, PIECE], gl.float32, PART), tiles.IMAGES, 1).type.layout
    )
    FIRST: gl.constexpr = GROUP * COUNT if TOGETHER else 0
    BESIDE: gl.constexpr = epilogue.beside_desc is not None
    # Load the epilogue's vectors before the main loop, if registers can hold them until then
    EARLY: gl.constexpr = not epilogue.terms.DGRAD or tiles.IMAGES * COUNT <= 2
    programs = gl.num_programs(0)
    begin = gl.program_id(0)
    step = programs
    block = 0
    if not TOGETHER:
        begin += GROUP * programs
        step = 2 * programs
        block = GROUP * product.blocks
    phase = 0
    if OVERLAP:
        await_inputs_alone()
    for i in range(begin, tiles.count, step):
        p0, n0, c0, of_image = tiles.place(i)
        c0 += FIRST * 64
        if not TOGETHER or c0 < epilogue.terms.C:
            if BESIDE:
                epilogue.load_beside(GROUP, p0, n0, c0, tiles.IMAGES)
            loads = ()
            accs = ()
            for j in gl.static_range(COUNT):
                if EARLY:
                    loads = loads + (epilogue.terms.load(n0, c0 + 64 * j, tiles.IMAGES, SUMS),)
                accs = accs + (gl.zeros([64, PIXELS], gl.float32, LAYOUT),)
            if not TOGETHER:
                product.turns.wait(GROUP, phase)
            accs, block = product.multiply(accs, block, FIRST, COUNT)
            if not TOGETHER:
                product.turns.give(GROUP)
            accs = wait_for(0, accs, COUNT)
            sync_threads()
            product.ring.release_before(block)
            if BESIDE:
                mbarrier.wait(epilogue.beside_full.index(GROUP), phase)
            for j in gl.static_range(COUNT):
                if EARLY:
                    loaded = loads[j]
                else:
                    loaded = epilogue.terms.load(n0, c0 + 64 * j, tiles.IMAGES, SUMS)
                epilogue.finish(
                    accs[j], loaded, GROUP, j, p0, n0, c0 + 64 * j, of_image, tiles, SUMS
                )
            phase ^= 1
        else:
            block = product.skip(block)
        if not TOGETHER:
            block += product.blocks  # skip those of the other warpgroup
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "P"])
def conv_linear_mma_kernel(
    x_desc,  # [P, N, K] in boxes [ROWS, IMAGES, 64]: x, or dy
    w_desc,  # [C, K] in boxes [64, 64]; TRANSPOSED: [K, C]
    y_desc,  # [P, N, C] in boxes [64 / IMAGES, IMAGES, 64]: y, or dz
    beside_desc,  # as y_desc: the residual, or with GRAD x of the norm; None: neither
    vectors_ptr,  # bias [C], or None; GRAD: float32 table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, P / ROWS, 2, C] or None
    stride_emb,
    factor,  # of a forward pass, or None: multiplies the sum
    N,  # images, or 1: all pixels are alike
    P,  # pixels of each
    K,
    C,
    ROWS: gl.constexpr,  # pixels of each image of a tile
    IMAGES: gl.constexpr,  # images of a tile
    COUNT: gl.constexpr,  # blocks of 64 channels of a warpgroup
    TOGETHER: gl.constexpr,  # both warpgroups compute the same tile; else they take turns
    TRANSPOSED: gl.constexpr,
    GRAD: gl.constexpr,  # the epilogue multiplies by act'(norm(x))
    ACT: gl.constexpr,  # the activation, for `activate_affine_grad`
    SLOTS: gl.constexpr,  # slots of the ring
    HELD: gl.constexpr,  # pieces in shared memory per warpgroup
    REGISTERS: gl.constexpr,  # per thread of the warpgroups that multiply
    RAGGED: gl.constexpr,  # C is no multiple of a warpgroup's channels
    OVERLAP: gl.constexpr,  # the previous kernel may still be running
):
    PIXELS: gl.constexpr = ROWS * IMAGES
    READERS: gl.constexpr = 2 if TOGETHER else 1
    BLOCKS: gl.constexpr = COUNT * READERS
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [SLOTS, PIXELS, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [SLOTS * BLOCKS, 64, 64], MATRIX)
    pieces = gl.allocate_shared_memory(dtype, [2 * HELD, PIECE, 64], MATRIX)
    ring = new_ring(x_bufs, SLOTS, READERS)
    turns = None
    if not TOGETHER:
        turns = new_turns(2)
    beside_full = None
    if beside_desc is not None:
        beside_full = new_barriers(2)
    fence_async_shared()
    sync_threads()

    columns = gl.cdiv(C, 64 * BLOCKS)
    of_image = gl.cdiv(P, ROWS)
    rows = of_image * gl.cdiv(N, IMAGES)
    tiles = _Tiles(rows * columns, rows, of_image, columns, ROWS, IMAGES, 64 * BLOCKS)
    product = _Product(x_desc, w_desc, ring, w_bufs, turns, gl.cdiv(K, 64), BLOCKS, TRANSPOSED)
    terms = Terms(
        vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, N, C, C, GRAD, ACT, RAGGED, factor
    )  # fmt: skip
    epilogue = _Epilogue(
        beside_desc, beside_full, y_desc, pieces, partial_ptr, terms, PIXELS, COUNT, HELD
    )  # fmt: skip
    launch_roles(
        _multiply, (product, tiles, epilogue, OVERLAP),
        _load, (product, tiles, OVERLAP),
        2, (REGISTERS, 24),
    )  # fmt: skip
