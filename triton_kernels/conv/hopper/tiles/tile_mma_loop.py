"""The main loop of `tile_mma` and `upsampled`: 3x3 filters over blocks of pixels.

A block has 64 channels (32 in TF32), or half as many, of the pixels of a tile, and of the row above
and the row below it, moved by one column. The three taps of that column of the filter read the
block from different rows on, so one fetch serves three products. Filters of one tap have a ring of
their own. Two warpgroups take turns (`turns`), and the rings hold the blocks of one warpgroup's
tile and then those of the other's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ....hopper.compat import aggregate, reinterpret, sync_threads, tma_load, view_from
from ....hopper.pipeline import Ring


@gluon.constexpr_function
def block_chunks(pixels, width):
    """Size of a block in chunks of 8 pixels: the pixels of a tile and two rows of `width`."""
    return (pixels + 2 * width) // 8


@gluon.constexpr_function
def swizzled(shape, dtype):
    """The layout of shared memory whose rows have as many bytes as the last dimension."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(shape[-1] * bits // 8, bits, rank=len(shape))


@gluon.jit
def pixels_from(blocks, stage, chunk: gl.constexpr, shape: gl.constexpr):
    """A view of a block from a chunk on. The last dimension of the shape is a pixel's channels."""
    x_bufs = blocks.x.bufs
    LAYOUT: gl.constexpr = swizzled(shape, x_bufs.dtype)
    CHUNKS: gl.constexpr = blocks.CHUNKS
    return view_from(x_bufs, stage * CHUNKS, shape, LAYOUT, chunk, CHUNKS)


@gluon.jit
def place_of_filter(r, s, k0, c0, TRANSPOSED: gl.constexpr):
    """The position in [9, CO, CI] of the filter of row r and column s. An input gradient uses the
    opposite tap, and transposes it in the product, unless a copy of the filters has both done."""
    if TRANSPOSED:
        return 8 - 3 * r - s, k0, c0
    else:
        return 3 * r + s, c0, k0


@aggregate
class Tiles:
    """The tiles of the result and their order. A tile has 64 channels of ROWS x W pixels of IMAGES
    images. Tiles that share pixels are neighbours, so pixels come from memory once and then from
    L2."""

    count: gl.tensor
    tiles_h: gl.tensor  # tiles down an image
    blocks_c: gl.tensor  # blocks of 64 channels
    ROWS: gl.constexpr
    IMAGES: gl.constexpr
    W: gl.constexpr
    COLUMNS: gl.constexpr  # tiles across an image
    PARITIES: gl.constexpr  # 4: there is a tile for each parity of rows and columns; else 1

    @gluon.jit
    def place(self, i):
        """First image, row and column of tile i, its number within the image, and its parity."""
        tile = i // self.blocks_c
        if self.PARITIES > 1:
            parity = tile % self.PARITIES
            tile = tile // self.PARITIES
            n0 = tile // self.tiles_h * self.IMAGES
            return n0, tile % self.tiles_h * self.ROWS, 0, tile % self.tiles_h, parity
        elif self.COLUMNS == 1:
            h = tile % self.tiles_h
            return tile // self.tiles_h * self.IMAGES, h * self.ROWS, 0, h, 0
        else:
            of_image = tile % (self.tiles_h * self.COLUMNS)
            n0 = tile // (self.tiles_h * self.COLUMNS) * self.IMAGES
            h0 = of_image // self.COLUMNS * self.ROWS
            return n0, h0, of_image % self.COLUMNS * self.W, of_image, 0

    @gluon.jit
    def row(self, image, of_image, parity):
        """The row of a tile's sums among the partial sums of all tiles."""
        if self.PARITIES > 1:
            first = image * self.tiles_h * self.PARITIES + of_image * self.PARITIES
            return first + parity
        else:
            return image * (self.tiles_h * self.COLUMNS) + of_image

    @gluon.jit
    def channel(self, i):
        """First channel of tile i."""
        return i % self.blocks_c * 64


@aggregate
class Blocks:
    """The operands of the products: a ring of blocks of pixels, and a ring of filters."""

    x: Ring
    w_bufs: gl.shared_memory_descriptor  # [., 1, 64, channels of a block], or TRANSPOSED
    w: Ring  # of filters of one tap; None: each block of pixels comes with FILTERS filters
    FILTERS: gl.constexpr
    CHUNKS: gl.constexpr  # chunks of 8 pixels of a block
    PIXELS: gl.constexpr  # pixels of a tile
    WIDTH: gl.constexpr  # pixels of one row of all images of a tile
    TRANSPOSED: gl.constexpr  # filters are, in the product

    @gluon.jit
    def load_filter(self, w_desc, tap, row, column, step):
        """Load the filter of a tap, from (row, column) on, into the next slot."""
        SHAPE: gl.constexpr = self.w_bufs.shape
        BYTES: gl.constexpr = SHAPE[2] * SHAPE[3] * self.w_bufs.dtype.primitive_bitwidth // 8
        slot, bar = self.w.acquire(step, BYTES)
        tma_load(w_desc, [tap, row, column], bar, self.w_bufs.index(slot))

    @gluon.jit
    def multiply_tap(self, acc, stage, chunk: gl.constexpr, slot, TRANSPOSED: gl.constexpr):
        """Issue the product of one tap, without waiting for it."""
        CHANNELS: gl.constexpr = self.x.bufs.shape[2]
        FILTER: gl.constexpr = [self.w_bufs.shape[2], self.w_bufs.shape[3]]
        w = self.w_bufs.index(slot)
        w = reinterpret(w, w.dtype, FILTER, swizzled(FILTER, w.dtype))
        if TRANSPOSED:
            w = w.permute((1, 0))
        x = pixels_from(self, stage, chunk, [self.PIXELS, CHANNELS]).permute((1, 0))
        return warpgroup_mma(w, x, acc, is_async=True)

    @gluon.jit
    def multiply(self, acc, block, step, count, TAPS: gl.constexpr = 3, later=False):
        """Multiply `count` blocks by TAPS filters each. At the end the last products are still
        running, and their slots are not released; see `finish`. `later`: products of an earlier
        block are still running at the beginning."""
        ROW: gl.constexpr = self.WIDTH // 8
        for j in range(count):
            stage = self.x.wait(block)
            for r in gl.static_range(TAPS):
                if self.w is None:
                    slot = stage * self.FILTERS + r
                    acc = self.multiply_tap(acc, stage, r * ROW, slot, self.TRANSPOSED)
                else:
                    slot = self.w.wait(step)
                    acc = self.multiply_tap(acc, stage, r * ROW, slot, self.TRANSPOSED)
                    acc = warpgroup_mma_wait(1, deps=(acc,))  # the tap before is complete
                    sync_threads()
                    begun = j + r > 0
                    self.w.release_before(step, begun)
                    if r == 0:
                        self.x.release_before(block, begun)
                    step += 1
            if self.w is None:  # one barrier per block, not one per product
                acc = warpgroup_mma_wait(TAPS, deps=(acc,))  # the block before is complete
                sync_threads()
                self.x.release_before(block, (j > 0) | later)
            block += 1
        return acc, block, step

    @gluon.jit
    def finish(self, acc, block, step, turns, GROUP: gl.constexpr):
        """Let the other warpgroup multiply, wait for the last product, and release its slots."""
        turns.give(GROUP)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        sync_threads()
        if self.w is not None:
            self.w.release_before(step)
        self.x.release_before(block)
        return acc
