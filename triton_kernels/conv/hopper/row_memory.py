"""Rows of pixels in shared memory, with zeros between them, which are the padding of a convolution.

A pixel is 64 channels of 16 bits, 128 bytes, or 16. Rows of W pixels have a chunk of 8 pixels of
zeros before, between and after them. So a row moved by a pixel is the same row from another
address; the swizzle allows that because it goes by the address. It is as wide as a pixel.

Of a piece of a row the chunks around it are the pixels beside it, so that each piece has two of its
own (MARGINS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import reinterpret, sync_threads, view_from


@gluon.constexpr_function
def rows_chunks(rows, w, margins=1):
    """Size of some rows, and of what is around them, in chunks of 8 pixels."""
    return rows * (w // 8 + margins) + (2 - margins)


@gluon.constexpr_function
def pair_chunks(w):
    """From a pair of rows to the next, in chunks of 8 pixels."""
    return 2 * (w // 8 + 1)


@gluon.constexpr_function
def block_chunks(w, margins=1):
    """Size of a block in chunks of 8 pixels: 256 of a tile, and the rows above and below it."""
    return rows_chunks(256 // w + 2, w, margins)


@gluon.jit
def clear_margins(
    x_bufs, BLOCKS: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, num_warps: gl.constexpr
):
    """The chunks of zeros of BLOCKS times ROWS rows, which nothing ever overwrites."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    K: gl.constexpr = x_bufs.shape[2]
    zeros = gl.zeros([8, K], x_bufs.dtype, LAYOUT)
    for i in gl.static_range(BLOCKS):
        for j in gl.static_range(ROWS + 1):
            x_bufs.index(i * rows_chunks(ROWS, W) + j * (W // 8 + 1)).store(zeros)
    fence_async_shared()
    sync_threads()


@gluon.jit
def side_from(x_bufs, first, row, right: gl.constexpr, W: gl.constexpr):
    """Where TMA writes 8 pixels to the left or right of a piece of a row, which has two margins."""
    chunk = first + row * (W // 8 + 2) + right * (W // 8 + 1)
    K: gl.constexpr = x_bufs.shape[2]
    return view_from(x_bufs, chunk, [1, 1, 8, K], gl.NVMMASharedLayout(2 * K, 16, rank=4))


@gluon.jit
def row_from(
    x_bufs, block, row: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr,
    IMAGES: gl.constexpr = 1, MARGINS: gl.constexpr = 1, BEFORE: gl.constexpr = 0,
    BLOCKS: gl.constexpr = None,
):  # fmt: skip
    """Where TMA writes a row of the `block`-th block of BLOCK chunks behind the first BEFORE:
    W / IMAGES pixels of each of some images. BLOCKS: how many there are; None: all."""
    K: gl.constexpr = x_bufs.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * K, 16, rank=4)
    SHAPE: gl.constexpr = [1, 1, W, K] if IMAGES == 1 else [1, W // IMAGES, IMAGES, K]
    CHUNK: gl.constexpr = BEFORE + row * (W // 8 + MARGINS) + 1
    return view_from(x_bufs, block * BLOCK, SHAPE, LAYOUT, CHUNK, BLOCK, BLOCKS)


@gluon.jit
def row_of_tap(
    x_bufs, block, row: gl.constexpr, s: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr,
    IMAGES: gl.constexpr = 1, MARGINS: gl.constexpr = 1, BEFORE: gl.constexpr = 0,
    BLOCKS: gl.constexpr = None, PIXELS: gl.constexpr = 0,
):  # fmt: skip
    """That row moved by s - 1 pixels of each of its images, [W, K], or of it PIXELS pixels."""
    K: gl.constexpr = x_bufs.shape[2]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pixels = reinterpret(x_bufs, x_bufs.dtype, [x_bufs.shape[0] * 8, K], FLAT)
    SHAPE: gl.constexpr = [PIXELS if PIXELS else W, K]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * K, 16)
    PIXEL: gl.constexpr = BEFORE * 8 + row * (W + 8 * MARGINS) + 8 + (s - 1) * IMAGES
    return view_from(pixels, block * BLOCK * 8, SHAPE, LAYOUT, PIXEL, BLOCK * 8, BLOCKS)
