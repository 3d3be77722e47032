"""The main loop of `tile_mma`, `unfused_tiles` and `upsampled`: 3x3 filters over blocks of pixels.

A block is 64 channels, or 32 of float32, of the pixels of a tile and of the row above and below it,
moved by a column.
The three taps of that column of the filter are the block from another row on, so that three
products are made of what is fetched once. Filters of one tap, 64 by 64, pass through a ring of
their own. Two warpgroups take tiles in turn (`turns`), and the rings hold what one needs and then
what the other does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...hopper.compat import aggregate, reinterpret, sync_threads, tma_load, view_from
from ...hopper.pipeline import Ring


@gluon.constexpr_function
def block_chunks(pixels, width):
    """Size of a block in chunks of 8 pixels: those of a tile, and two more rows of `width`."""
    return (pixels + 2 * width) // 8


@gluon.jit
def pixels_from(blocks, stage, chunk: gl.constexpr, shape: gl.constexpr):
    """Pixels from a chunk of a block on, in a shape whose last size is that of 128 bytes."""
    x_bufs = blocks.x.bufs
    BITS: gl.constexpr = x_bufs.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=len(shape))
    CHUNKS: gl.constexpr = blocks.CHUNKS
    return view_from(x_bufs, stage * CHUNKS, shape, LAYOUT, chunk, CHUNKS)


@gluon.jit
def place_of_filter(r, s, k0, c0, DGRAD: gl.constexpr):
    """Where the filter of row r and column s lies in [9, CO, CI]: of an input gradient the opposite
    one, transposed when it is multiplied."""
    if DGRAD:
        return 8 - 3 * r - s, k0, c0
    else:
        return 3 * r + s, c0, k0


@aggregate
class Tiles:
    """Tiles of a result, of 64 channels and ROWS x W pixels of IMAGES images, in the order of their
    numbers. Those of the same pixels are neighbours, so pixels come from memory once and then from
    L2."""

    count: gl.tensor
    tiles_h: gl.tensor  # of an image, one below the other
    blocks_c: gl.tensor  # of 64 channels
    ROWS: gl.constexpr
    IMAGES: gl.constexpr
    W: gl.constexpr
    COLUMNS: gl.constexpr  # of tiles, one beside the other
    PARITIES: gl.constexpr  # of tiles in the same place, of pixels of another parity each

    @gluon.jit
    def place(self, i):
        """Image, row and column where a tile of pixels begins, and its number within the image."""
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
        """Where the sums of its images are, among those of all tiles."""
        if self.PARITIES > 1:
            first = image * self.tiles_h * self.PARITIES + of_image * self.PARITIES
            return first + parity
        else:
            return image * (self.tiles_h * self.COLUMNS) + of_image

    @gluon.jit
    def channel(self, i):
        """The first of its channels."""
        return i % self.blocks_c * 64


@aggregate
class Blocks:
    """What products of tiles read: a ring of blocks of pixels, and filters of one tap each."""

    x: Ring
    w_bufs: gl.shared_memory_descriptor  # [., 1, 64, channels of a block]
    w: Ring  # of these; or None: FILTERS of them come with each block of pixels
    FILTERS: gl.constexpr
    CHUNKS: gl.constexpr  # of 8 pixels, of a block
    PIXELS: gl.constexpr  # of a tile
    WIDTH: gl.constexpr  # of these, those of a row of all its images
    DGRAD: gl.constexpr  # filters are transposed

    @gluon.jit
    def load_filter(self, w_desc, tap, row, column, step):
        """The filter [64, 64] of a tap from (row, column) on, into the next slot of its ring."""
        slot, bar = self.w.acquire(step, 64 * 128)
        tma_load(w_desc, [tap, row, column], bar, self.w_bufs.index(slot))

    @gluon.jit
    def multiply_tap(self, acc, stage, chunk: gl.constexpr, slot, DGRAD: gl.constexpr):
        """The product of a filter with the tile, begun but not waited for."""
        BITS: gl.constexpr = self.w_bufs.dtype.primitive_bitwidth
        CHANNELS: gl.constexpr = 1024 // BITS
        w = self.w_bufs.index(slot)
        w = reinterpret(w, w.dtype, [64, CHANNELS], gl.NVMMASharedLayout(128, BITS))
        if DGRAD:
            w = w.permute((1, 0))
        x = pixels_from(self, stage, chunk, [self.PIXELS, CHANNELS]).permute((1, 0))
        return warpgroup_mma(w, x, acc, is_async=True)

    @gluon.jit
    def multiply(self, acc, block, step, count, TAPS: gl.constexpr = 3, later=False):
        """The products of `count` blocks with TAPS filters each. The last ones are still under way
        at the end, and what they read is not given back; see `finish`. `later`: those of a block
        before these are still under way."""
        ROW: gl.constexpr = self.WIDTH // 8
        for j in range(count):
            stage = self.x.wait(block)
            for r in gl.static_range(TAPS):
                if self.w is None:
                    slot = stage * self.FILTERS + r
                    acc = self.multiply_tap(acc, stage, r * ROW, slot, self.DGRAD)
                else:
                    slot = self.w.wait(step)
                    acc = self.multiply_tap(acc, stage, r * ROW, slot, self.DGRAD)
                    acc = warpgroup_mma_wait(1, deps=(acc,))  # the tap before is done
                    sync_threads()
                    begun = j + r > 0
                    self.w.release_before(step, begun)
                    if r == 0:
                        self.x.release_before(block, begun)
                    step += 1
            if self.w is None:  # the threads meet once a block, not once a product
                acc = warpgroup_mma_wait(TAPS, deps=(acc,))  # the block before is done
                sync_threads()
                self.x.release_before(block, (j > 0) | later)
            block += 1
        return acc, block, step

    @gluon.jit
    def finish(self, acc, block, step, turns, GROUP: gl.constexpr):
        """The other warpgroup may begin; then the sums, when the last product is done."""
        turns.give(GROUP)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        sync_threads()
        if self.w is not None:
            self.w.release_before(step)
        self.x.release_before(block)
        return acc
