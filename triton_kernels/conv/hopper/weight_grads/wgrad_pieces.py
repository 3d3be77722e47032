"""The warps of 3x3 weight gradients in 16 bits (`row_wgrad_kernel`, `group_wgrad_kernels`).

A weight gradient is a sum over pixels, of tiles of dy times tiles of x. The tiles of all blocks of
channels make one list, of all gradients of a launch; a program has a piece of it. One warp loads
tiles of 256 pixels, of 64 channels of dy and 64 of x, or 16, and three warpgroups multiply: each
has the taps of a row of the filter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ....hopper.compat import aggregate, reinterpret, sync_threads, tma_load
from ....hopper.pipeline import wait_for
from ..row_memory import block_chunks, row_from, row_of_tap, side_from

NUMBERS = gl.constexpr(9 * 64 * 64)  # of a block


@aggregate
class Gradient:
    """What one is made of, as in `conv_row_group_wgrad_kernel`."""

    x_desc: gl.tensor
    dy_desc: gl.tensor
    sides_desc: gl.tensor
    CI: gl.tensor
    CO: gl.tensor

    @gluon.jit
    def blocks(self, CI_SIZE: gl.constexpr, CO_SIZE: gl.constexpr):
        """Of channels, in the list."""
        return gl.cdiv(self.CI, CI_SIZE) * gl.cdiv(self.CO, CO_SIZE)


@gluon.jit
def begin_of(piece, pieces, tiles):
    """The first tile of a piece, of so many that divide `tiles` among themselves."""
    return (piece.to(gl.int64) * tiles // pieces).to(gl.int32)


@aggregate
class Piece:
    """The tiles of the list that a program has."""

    first: gl.tensor
    last: gl.tensor  # the one behind them
    tiles: gl.tensor  # of a block
    ALONE: gl.constexpr  # all are of one block

    @gluon.jit
    def of_block(self, block):
        """Its tiles of that block: first and last."""
        if self.ALONE:
            return self.first, self.last
        else:
            start = block * self.tiles
            return gl.maximum(self.first, start), gl.minimum(self.last, start + self.tiles)


@aggregate
class Tiles:
    """Of 256 pixels: rows of W of all images of a row, or pieces of rows."""

    tiles_h: gl.tensor  # in an image, or in a group of images
    W: gl.constexpr
    IMAGES: gl.constexpr
    COLUMNS: gl.constexpr  # pieces of a row
    K: gl.constexpr  # channels of x: 64 or 16


@aggregate
class Sums:
    """Where a program writes [64 channels of dy, 64 or 16 of x] of each tap."""

    ptr: gl.tensor  # of the first block of its piece
    stride_co: gl.tensor
    stride_ci: gl.tensor
    stride_tap: gl.tensor
    left_co: gl.tensor  # channels that there are, or None: all
    left_ci: gl.tensor
    is_whole: gl.tensor  # it is the gradient itself
    ADD: gl.constexpr  # to a gradient that is whole

    @gluon.jit
    def store(self, to, accs):
        """The three taps from `to` on."""
        LAYOUT: gl.constexpr = accs[0].type.layout
        WIDTH: gl.constexpr = accs[0].shape[1]
        offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        offs_ci = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        to = to + (offs_co * self.stride_co)[:, None] + (offs_ci * self.stride_ci)[None, :]
        mask = None
        if self.left_co is not None:
            mask = (offs_co < self.left_co)[:, None] & (offs_ci < self.left_ci)[None, :]
        for s in gl.static_range(3):
            acc = accs[s]
            if self.ADD:
                if self.is_whole:
                    acc += gl.load(to + s * self.stride_tap, mask=mask)
            gl.store(to + s * self.stride_tap, acc, mask=mask)


# --- what loads -----------------------------------------------------------------------------------


@gluon.jit
def place_in_rows(n, h, w, c, IMAGES: gl.constexpr):
    return [n, h, w, c] if IMAGES == 1 else [h, w, n, c]


@gluon.jit
def _load_tile(tiles, gradient, ring, block, tile, place):
    """256 pixels of dy, and those of x that they are multiplied by, as the `place`-th in the
    ring."""
    x_bufs, dy_bufs = ring.bufs
    W: gl.constexpr = tiles.W
    IMAGES: gl.constexpr = tiles.IMAGES
    ROWS: gl.constexpr = 256 // W
    MARGINS: gl.constexpr = 1 if tiles.COLUMNS == 1 else 2
    ci_blocks = gl.cdiv(gradient.CI, tiles.K)
    ci0 = block % ci_blocks * tiles.K
    co0 = block // ci_blocks * 64
    w0 = 0
    n = tile // tiles.tiles_h * IMAGES
    h0 = tile % tiles.tiles_h * ROWS
    if tiles.COLUMNS > 1:
        w0 = tile % tiles.tiles_h % tiles.COLUMNS * W
        h0 = tile % tiles.tiles_h // tiles.COLUMNS * ROWS
    BESIDE: gl.constexpr = 0 if tiles.COLUMNS == 1 else 16
    BYTES: gl.constexpr = (ROWS + 2) * (W + BESIDE) * 2 * x_bufs.shape[2] + 256 * 128
    stage, bar = ring.acquire(place, BYTES)
    tma_load(gradient.dy_desc, place_in_rows(n, h0, w0, co0, IMAGES), bar, dy_bufs.index(stage))
    BLOCK: gl.constexpr = block_chunks(W, MARGINS)
    first_chunk = stage * BLOCK
    for j in gl.static_range(ROWS + 2):
        row = row_from(x_bufs, stage, j, W, BLOCK, IMAGES, MARGINS)
        tma_load(gradient.x_desc, place_in_rows(n, h0 + j - 1, w0, ci0, IMAGES), bar, row)
        if tiles.COLUMNS > 1:
            left = side_from(x_bufs, first_chunk, j, 0, W)
            tma_load(gradient.sides_desc, [n, h0 + j - 1, w0 - 8, ci0], bar, left)
            right = side_from(x_bufs, first_chunk, j, 1, W)
            tma_load(gradient.sides_desc, [n, h0 + j - 1, w0 + W, ci0], bar, right)


@gluon.jit
def _load_block(gradients, tiles, ring, piece, block, COUNT: gl.constexpr):
    begin, end = piece.of_block(block)
    start = 0  # of the blocks of a gradient
    for i in gl.static_range(COUNT):
        count = gradients[i].blocks(tiles.K, 64)
        if (block >= start) & (block < start + count):
            for tile in range(begin, end):
                _load_tile(
                    tiles, gradients[i], ring, block - start, tile - block * piece.tiles,
                    tile - piece.first,
                )  # fmt: skip
        start += count


@gluon.jit
def load_piece(gradients, tiles, ring, piece, COUNT: gl.constexpr):
    """The tiles of a piece, block by block."""
    if piece.ALONE:
        _load_block(gradients, tiles, ring, piece, piece.first // piece.tiles, COUNT)
    else:
        for block in range(piece.first // piece.tiles, gl.cdiv(piece.last, piece.tiles)):
            _load_block(gradients, tiles, ring, piece, block, COUNT)


# --- what multiplies ------------------------------------------------------------------------------


@gluon.jit
def _multiply(R: gl.constexpr, tiles, accs, ring, place):
    """What a tile adds to the sums of row R of the filter."""
    LAYOUT: gl.constexpr = accs[0].type.layout
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    W: gl.constexpr = tiles.W
    ROWS: gl.constexpr = 256 // W
    MARGINS: gl.constexpr = 1 if tiles.COLUMNS == 1 else 2
    BLOCK: gl.constexpr = block_chunks(W, MARGINS)
    x_bufs, dy_bufs = ring.bufs
    dy_rows = reinterpret(dy_bufs, dy_bufs.dtype, [ring.SLOTS * ROWS, W, 64], MATRIX)
    stage = ring.wait(place)
    for row in gl.static_range(ROWS):
        dy = dy_rows.index(stage * ROWS + row).permute((1, 0))
        dy = dy.load(gl.DotOperandLayout(0, LAYOUT, 2))
        begun = ()
        for s in gl.static_range(3):
            x = row_of_tap(x_bufs, stage, row + R, s, W, BLOCK, tiles.IMAGES, MARGINS)
            begun = begun + (warpgroup_mma(dy, x, accs[s], is_async=True),)
        accs = begun
        if row > 0:
            accs = wait_for(3, accs, 3)
    accs = wait_for(0, accs, 3)
    sync_threads()
    ring.release(place)
    return accs


@gluon.jit
def _accumulate_block(R: gl.constexpr, tiles, sums, ring, piece, block, to):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.K, 16])
    accs = ()
    for _ in gl.static_range(3):
        accs = accs + (gl.zeros([64, tiles.K], gl.float32, LAYOUT),)
    begin, end = piece.of_block(block)
    for tile in range(begin, end):
        accs = _multiply(R, tiles, accs, ring, tile - piece.first)
    sums.store(to, accs)


@gluon.jit
def accumulate_piece(R: gl.constexpr, tiles, sums, ring, piece):
    """The taps of row R of the filter, of each block of the piece."""
    to = sums.ptr + R * 3 * sums.stride_tap
    if piece.ALONE:
        _accumulate_block(R, tiles, sums, ring, piece, piece.first // piece.tiles, to)
    else:
        for block in range(piece.first // piece.tiles, gl.cdiv(piece.last, piece.tiles)):
            _accumulate_block(R, tiles, sums, ring, piece, block, to)
            to += NUMBERS
