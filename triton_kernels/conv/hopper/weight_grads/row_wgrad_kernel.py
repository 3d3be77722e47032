"""The kernel of `conv.hopper.row_wgrad`.

A product sums over 16 pixels or more of a row. Where images are narrower, a row is one of several
images, with the same pixel of each of them side by side: to TMA that is one more order of the
dimensions, [H, W, N, C], and a tap is that many pixels further. Rows of more than 64 pixels, or of
which a piece divides more, are multiplied in COLUMNS pieces, and the pixels beside a piece are
fetched with it. Where a tile, or a block of 64 channels, reaches over an edge, TMA writes zeros.

Of a convolution from or to few channels, one of x and dy has blocks of 16 channels, not 64. The
kernel calls that one x: the gradient of its convolution is that of the other way round, with dy for
x, if the filters are turned (SWAP).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....hopper.compat import allocate_for_views, sync_threads
from ....hopper.pipeline import new_ring
from ....hopper.roles import launch_roles
from ....runtime.dependent_launch import await_inputs
from ..row_memory import block_chunks, clear_margins
from .wgrad_pieces import Gradient, Piece, Sums, Tiles, accumulate_piece, begin_of, load_piece


@gluon.jit
def new_row_ring(
    x_desc, dy_desc, W: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Of tiles of 256 pixels of dy, and of the rows of x that belong to them."""
    K: gl.constexpr = x_desc.block_shape[3]
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(2 * K, 16)
    dtype: gl.constexpr = x_desc.dtype
    MARGINS: gl.constexpr = 1 if COLUMNS == 1 else 2
    x_bufs = allocate_for_views(dtype, [STAGES * block_chunks(W, MARGINS), 8, K], PIXELS)
    dy_bufs = gl.allocate_shared_memory(dtype, [STAGES] + dy_desc.block_shape, dy_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, 3)
    if COLUMNS == 1:
        clear_margins(x_bufs, STAGES, 256 // W + 2, W, num_warps)
    else:
        fence_async_shared()
        sync_threads()
    return ring


@gluon.jit(do_not_specialize=["tiles"])
def conv_row_wgrad_kernel(
    x_desc,  # [N, H, W, CI] in boxes [1, 1, W, 64]; [H, W / IMAGES, N, CI] in boxes of one row;
    # or in boxes of 16 channels, of which there is one block and CI of them count
    dy_desc,  # [N, H, W, CO] in boxes of 256 pixels, or in that order too
    sides_desc,  # x in boxes of 8 pixels beside a piece of a row, or None: rows are whole
    part_ptr,  # float32 [splits, CO, 9, CI]
    stride_split,
    CI,
    CO,
    tiles,  # of 256 pixels
    tiles_h,  # of them in an image, or in a group of images
    W: gl.constexpr,  # pixels of a row, of all its images, or of a piece of one
    IMAGES: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,  # pieces of a row
    SWAP: gl.constexpr,  # of 16 channels: parts are [splits, CI, 9, CO], with the taps reversed
    RAGGED: gl.constexpr,  # channels are no multiple of 64
    num_warps: gl.constexpr,
):
    K: gl.constexpr = x_desc.block_shape[3]
    ring = new_row_ring(x_desc, dy_desc, W, COLUMNS, STAGES, num_warps)
    await_inputs()

    ci_blocks = gl.cdiv(CI, 64) if K == 64 else 1
    blocks = ci_blocks * gl.cdiv(CO, 64)
    block = gl.program_id(0) % blocks
    split = gl.program_id(0) // blocks
    splits = gl.num_programs(0) // blocks
    part_ptr += split.to(gl.int64) * stride_split
    ci0 = block % ci_blocks * 64
    co0 = block // ci_blocks * 64
    first = block * tiles + begin_of(split, splits, tiles)
    last = block * tiles + begin_of(split + 1, splits, tiles)
    left_co = None
    left_ci = None
    if RAGGED or K == 16:
        left_co = CO - co0
        left_ci = CI - ci0
    if SWAP:
        sums = Sums(part_ptr + co0 + 8 * CO, 1, 9 * CO, -CO, left_co, left_ci, False, False)
    else:
        to_ptr = part_ptr + co0 * 9 * CI + ci0
        sums = Sums(to_ptr, 9 * CI, 1, CI, left_co, left_ci, False, False)
    of_pixels = Tiles(tiles_h, W, IMAGES, COLUMNS, K)
    piece = Piece(first, last, tiles, True)
    gradients = (Gradient(x_desc, dy_desc, sides_desc, CI, CO),)
    launch_roles(
        accumulate_piece, (of_pixels, sums, ring, piece),
        load_piece, (gradients, of_pixels, ring, piece, 1),
        3, (160, 24 if COLUMNS == 1 else 32),
    )  # fmt: skip
