"""The main loop of `tiles_kernels`, `bare_tiles` and their kin: 3x3 filters over blocks of pixels.

A block is 64 channels, or 32 of float32, of the pixels of a tile and of the row above and below it,
moved by a column.
The three taps of that column of the filter are the block from another row on, so that three
products are made of what is fetched once. Filters of one tap, 64 by 64, pass through a ring of
their own. Two warpgroups take tiles in turn (`turns`), and the rings hold what one needs and then
what the other does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper.compat import reinterpret, sync_threads, tma_load, view_from
from ...hopper.pipeline import give_back, wait_empty, wait_full


@gluon.constexpr_function
def block_chunks(pixels, width):
    """Size of a block in chunks of 8 pixels: those of a tile, and two more rows of `width`."""
    return (pixels + 2 * width) // 8


@gluon.jit
def pixels_from(x_bufs, chunk, shape: gl.constexpr):
    """Pixels from a chunk on, in a shape whose last size is that of 128 bytes."""
    BITS: gl.constexpr = x_bufs.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, rank=len(shape))
    return view_from(x_bufs, chunk, shape, LAYOUT)


@gluon.jit
def place_of_filter(r, s, k0, c0, DGRAD: gl.constexpr):
    """Where the filter of row r and column s lies in [9, CO, CI]; see `load_filter_of_tap`."""
    if DGRAD:
        return 8 - 3 * r - s, k0, c0
    else:
        return 3 * r + s, c0, k0


@gluon.jit
def load_filter(w_desc, tap, row, column, w_bufs, w_full, w_empty, step, STEPS: gl.constexpr):
    """The filter [64, 64] of a tap from (row, column) on, into the ring's next slot."""
    slot, bar = wait_empty(w_full, w_empty, step, STEPS, 64 * 128)
    tma_load(w_desc, [tap, row, column], bar, w_bufs.index(slot))


@gluon.jit
def load_filter_of_tap(
    w_desc, r, s, k0, c0, w_bufs, w_full, w_empty, step, DGRAD: gl.constexpr, STEPS: gl.constexpr
):
    """The filter of row r and column s: of an input gradient the opposite one, transposed when it
    is multiplied."""
    tap, row, column = place_of_filter(r, s, k0, c0, DGRAD)
    load_filter(w_desc, tap, row, column, w_bufs, w_full, w_empty, step, STEPS)


@gluon.jit
def multiply_tap(acc, x_bufs, w_bufs, chunk, slot, PIXELS: gl.constexpr, DGRAD: gl.constexpr):
    """The product of a filter with the tile, begun but not waited for."""
    BITS: gl.constexpr = w_bufs.dtype.primitive_bitwidth
    CHANNELS: gl.constexpr = 1024 // BITS
    w = w_bufs.index(slot)
    w = reinterpret(w, w.dtype, [64, CHANNELS], gl.NVMMASharedLayout(128, BITS))
    if DGRAD:
        w = w.permute((1, 0))
    x = pixels_from(x_bufs, chunk, [PIXELS, CHANNELS]).permute((1, 0))
    return warpgroup_mma(w, x, acc, is_async=True)


@gluon.jit
def multiply_blocks(
    acc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, block, step, count,
    PIXELS: gl.constexpr, WIDTH: gl.constexpr, DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The products of `count` blocks with three filters each. The last one is still under way at
    the end, and what it reads is not given back; see `finish_products`."""
    CHUNKS: gl.constexpr = block_chunks(PIXELS, WIDTH)
    for j in range(count):
        stage = wait_full(x_full, block, BLOCKS)
        for r in gl.static_range(3):
            slot = wait_full(w_full, step, STEPS)
            chunk = stage * CHUNKS + r * (WIDTH // 8)
            acc = multiply_tap(acc, x_bufs, w_bufs, chunk, slot, PIXELS, DGRAD)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the tap before is done
            sync_threads()
            later = j + r > 0
            give_back(w_empty, step + STEPS - 1, STEPS, later)
            if r == 0:
                give_back(x_empty, block + BLOCKS - 1, BLOCKS, later)
            step += 1
        block += 1
    return acc, block, step


@gluon.jit
def multiply_blocks_with_filters(
    acc, x_bufs, w_bufs, full, empty, block, count, later,
    TAPS: gl.constexpr, FILTERS: gl.constexpr, CHUNKS: gl.constexpr,
    PIXELS: gl.constexpr, WIDTH: gl.constexpr, DGRAD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """`multiply_blocks` where filters come and go with a block of pixels, of CHUNKS: the threads
    meet once a block, not once a product. There is room for FILTERS, and TAPS are multiplied.
    `later`: those of a block before these are still under way."""
    for j in range(count):
        stage = wait_full(full, block, BLOCKS)
        for r in gl.static_range(TAPS):
            chunk = stage * CHUNKS + r * (WIDTH // 8)
            acc = multiply_tap(acc, x_bufs, w_bufs, chunk, stage * FILTERS + r, PIXELS, DGRAD)
        acc = warpgroup_mma_wait(TAPS, deps=(acc,))  # the block before is done
        sync_threads()
        give_back(empty, block + BLOCKS - 1, BLOCKS, (j > 0) | later)
        block += 1
    return acc, block


@gluon.jit
def finish_products(
    acc, x_empty, w_empty, turns, block, step,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The other warpgroup may begin; then the sums, when the last product is done."""
    mbarrier.arrive(turns.index(1 - GROUP), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    sync_threads()
    if STEPS > 0:
        give_back(w_empty, step + STEPS - 1, STEPS)
    give_back(x_empty, block + BLOCKS - 1, BLOCKS)
    return acc
