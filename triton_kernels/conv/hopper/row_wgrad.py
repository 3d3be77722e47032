"""The weight gradient of `conv.hopper.row_mma`.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load
from ...hopper.pipeline import new_ring
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from .row_memory import block_chunks, clear_margins, row_from, row_of_tap, side_from


@gluon.jit
def _load(
    x_desc, dy_desc, x2_desc, dy2_desc, sides_desc, ring, second, first, last, co0, ci0, tiles_h,
    W: gl.constexpr, IMAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    if x2_desc is None:
        load_tiles(
            x_desc, dy_desc, ring, first, last, co0, ci0, tiles_h, W, IMAGES, sides_desc, COLUMNS
        )
    elif second:
        load_tiles(x2_desc, dy2_desc, ring, first, last, co0, ci0, tiles_h, W, IMAGES)
    else:
        load_tiles(x_desc, dy_desc, ring, first, last, co0, ci0, tiles_h, W, IMAGES)


@gluon.jit
def load_tiles(
    x_desc, dy_desc, ring, first, last, co0, ci0, tiles_h,
    W: gl.constexpr, IMAGES: gl.constexpr, sides_desc=None, COLUMNS: gl.constexpr = 1,
):  # fmt: skip
    for tile in range(first, last):
        load_tile(
            x_desc, dy_desc, ring, tile, tile - first, co0, ci0, tiles_h, W, IMAGES, sides_desc,
            COLUMNS,
        )  # fmt: skip


@gluon.jit
def load_tile(
    x_desc, dy_desc, ring, tile, block, co0, ci0, tiles_h,
    W: gl.constexpr, IMAGES: gl.constexpr, sides_desc=None, COLUMNS: gl.constexpr = 1,
):  # fmt: skip
    """256 pixels of dy, and those of x that they are multiplied by, as the ring's `block`-th."""
    x_bufs, dy_bufs = ring.bufs
    ROWS: gl.constexpr = 256 // W
    MARGINS: gl.constexpr = 1 if COLUMNS == 1 else 2
    w0 = 0
    n = tile // tiles_h * IMAGES
    h0 = tile % tiles_h * ROWS
    if COLUMNS > 1:
        w0 = tile % tiles_h % COLUMNS * W
        h0 = tile % tiles_h // COLUMNS * ROWS
    BESIDE: gl.constexpr = 0 if COLUMNS == 1 else 16
    BYTES: gl.constexpr = (ROWS + 2) * (W + BESIDE) * 2 * x_bufs.shape[2] + 256 * 128
    stage, bar = ring.acquire(block, BYTES)
    at = place_in_rows(n, h0, w0, co0, IMAGES)
    tma_load(dy_desc, at, bar, dy_bufs.index(stage))
    first_chunk = stage * block_chunks(W, MARGINS)
    for j in gl.static_range(ROWS + 2):
        row = row_from(x_bufs, first_chunk, j, W, IMAGES, MARGINS)
        at = place_in_rows(n, h0 + j - 1, w0, ci0, IMAGES)
        tma_load(x_desc, at, bar, row)
        if COLUMNS > 1:
            left, right = (
                side_from(x_bufs, first_chunk, j, 0, W),
                side_from(x_bufs, first_chunk, j, 1, W),
            )
            tma_load(sides_desc, [n, h0 + j - 1, w0 - 8, ci0], bar, left)
            tma_load(sides_desc, [n, h0 + j - 1, w0 + W, ci0], bar, right)


@gluon.jit
def place_in_rows(n, h, w, c, IMAGES: gl.constexpr):
    return [n, h, w, c] if IMAGES == 1 else [h, w, n, c]


@gluon.jit
def multiply_tile(
    accs, ring, block,
    R: gl.constexpr, W: gl.constexpr, IMAGES: gl.constexpr, MARGINS: gl.constexpr = 1,
):  # fmt: skip
    """What the ring's `block`-th tile adds to the three taps of row R of the filter."""
    ROWS: gl.constexpr = 256 // W
    LAYOUT: gl.constexpr = accs[0].type.layout
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    x_bufs, dy_bufs = ring.bufs
    rows = reinterpret(dy_bufs, dy_bufs.dtype, [ring.SLOTS * ROWS, W, 64], MATRIX)
    stage = ring.wait(block)
    for j in gl.static_range(ROWS):
        dy = rows.index(stage * ROWS + j).permute((1, 0))
        dy = dy.load(gl.DotOperandLayout(0, LAYOUT, 2))
        first_chunk = stage * block_chunks(W, MARGINS)
        x = ()
        for s in gl.static_range(3):
            x = x + (row_of_tap(x_bufs, first_chunk, j + R, s, W, IMAGES, MARGINS),)
        begun = ()
        for s in gl.static_range(3):
            begun = begun + (warpgroup_mma(dy, x[s], accs[s], is_async=True),)
        accs = begun
        if j > 0:
            accs = warpgroup_mma_wait(3, deps=accs)
    accs = warpgroup_mma_wait(0, deps=accs)
    sync_threads()
    ring.release(block)
    return accs


@gluon.jit
def multiply_tiles(
    ring, first, last,
    R: gl.constexpr, W: gl.constexpr, IMAGES: gl.constexpr, MARGINS: gl.constexpr = 1,
):  # fmt: skip
    """The sums of tiles, the ring's first ones, of the three taps of row R of the filter."""
    K: gl.constexpr = ring.bufs[0].shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    accs = ()
    for _ in gl.static_range(3):
        accs = accs + (gl.zeros([64, K], gl.float32, LAYOUT),)
    for tile in range(first, last):
        accs = multiply_tile(accs, ring, tile - first, R, W, IMAGES, MARGINS)
    return accs


@gluon.jit
def store_taps(to, accs, tap, mask):
    """The three of them, so far from one another."""
    for s in gl.static_range(3):
        gl.store(to + s * tap, accs[s], mask=mask)


@gluon.jit
def _accumulate(
    R: gl.constexpr, part_ptr, ring, first, last, CI, CO, left_ci, left_co,
    W: gl.constexpr, IMAGES: gl.constexpr, SWAP: gl.constexpr, MARGINS: gl.constexpr,
):  # fmt: skip
    """The three taps of row R of the filter, of a block of which so many channels are left, or None
    if all are."""
    K: gl.constexpr = ring.bufs[0].shape[2]
    accs = multiply_tiles(ring, first, last, R, W, IMAGES, MARGINS)
    LAYOUT: gl.constexpr = accs[0].type.layout
    offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_ci = gl.arange(0, K, layout=gl.SliceLayout(0, LAYOUT))
    if K == 64:
        to = part_ptr + (R * 3 * CI + offs_co * 9 * CI)[:, None] + offs_ci[None, :]
        mask = None
        if left_ci is not None:
            mask = (offs_co < left_co)[:, None] & (offs_ci < left_ci)[None, :]
        store_taps(to, accs, CI, mask)
    else:
        mask = (offs_co < 64)[:, None] & (offs_ci < CI)[None, :]
        if SWAP:
            to = part_ptr + (8 - R * 3) * CO + offs_co[:, None] + (offs_ci * 9 * CO)[None, :]
            tap = -CO
        else:
            to = part_ptr + R * 3 * CI + (offs_co * 9 * CI)[:, None] + offs_ci[None, :]
            tap = CI
        store_taps(to, accs, tap, mask)


@gluon.jit(do_not_specialize=["tiles"])
def conv_row_wgrad_kernel(
    x_desc,  # [N, H, W, CI] in boxes [1, 1, W, 64]; [H, W / IMAGES, N, CI] in boxes of one row;
    # or in boxes of 16 channels, of which there is one block and CI of them count
    dy_desc,  # [N, H, W, CO] in boxes of 256 pixels, or in that order too
    x2_desc,  # of a second convolution of as many pixels, or None
    dy2_desc,
    sides_desc,  # x in boxes of 8 pixels beside a piece of a row, or None: rows are whole
    part_ptr,  # float32 [splits, CO, 9, CI], each row followed by [CO2, 9, CI2]
    stride_split,
    CI,
    CO,
    CI2,
    CO2,  # 0 if there is no second one
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
    await_inputs()

    blocks1 = (gl.cdiv(CI, 64) if K == 64 else 1) * gl.cdiv(CO, 64)
    blocks = blocks1 + CI2 // 64 * (CO2 // 64)
    block = gl.program_id(0) % blocks
    split = gl.program_id(0) // blocks
    splits = gl.num_programs(0) // blocks
    part_ptr += split.to(gl.int64) * stride_split
    second = block >= blocks1
    if x2_desc is not None:
        part_ptr += gl.where(second, CO * 9 * CI, 0)
        block = gl.where(second, block - blocks1, block)
        CI = gl.where(second, CI2, CI)
    ci_blocks = gl.cdiv(CI, 64) if K == 64 else 1
    ci0 = block % ci_blocks * 64
    co0 = block // ci_blocks * 64
    first = (split.to(gl.int64) * tiles // splits).to(gl.int32)
    last = ((split + 1).to(gl.int64) * tiles // splits).to(gl.int32)
    part_ptr += co0 if SWAP else co0 * 9 * CI + ci0
    launch_roles(
        _accumulate,
        (
            part_ptr, ring, first, last, CI, CO if SWAP else None,
            CI - ci0 if RAGGED else None, CO - co0 if RAGGED else None, W, IMAGES, SWAP, MARGINS,
        ),
        _load,
        (
            x_desc, dy_desc, x2_desc, dy2_desc, sides_desc, ring, second, first, last, co0, ci0,
            tiles_h, W, IMAGES, COLUMNS,
        ),
        3, (160, 24 if COLUMNS == 1 else 32),
    )  # fmt: skip
