"""The warps of the 16-bit weight gradients, which a kernel tells what a tile is.

A weight gradient is a sum over pixels, of tiles of dy times tiles of x. The tiles of all blocks of
channels make one list, of all gradients of a launch; a program has a piece of it. One warp loads,
and every warpgroup multiplies what it has of each tile, by an aggregate `products`:

    load(gradient, ring, block, tile, place)  a tile of a block of channels, as the `place`-th in
                                              the ring
    dy(GROUP, ring, stage, step)              [pixels, 64] of a step of a tile, STEPS of them, and
    x(GROUP, ring, stage, step, i)            [pixels, WIDTH], with which they are the i-th product
                                              of a warpgroup, of ACCS
    first_row(GROUP, sums)                    where the first of these goes
    CI_SIZE, CO_SIZE                          channels of a block
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ....hopper.compat import aggregate, sync_threads
from ....hopper.pipeline import wait_for


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
class Sums:
    """Where a program writes [64 channels of dy, 64 or 16 of x] and more of them."""

    ptr: gl.tensor  # of the first block of its piece
    stride_co: gl.tensor
    stride_ci: gl.tensor
    stride_next: gl.tensor  # from one such matrix to the next
    left_co: gl.tensor  # channels that there are, or None: all
    left_ci: gl.tensor
    is_whole: gl.tensor  # it is the gradient itself
    NUMBERS: gl.constexpr  # of a block
    ADD: gl.constexpr  # to a gradient that is whole

    @gluon.jit
    def store(self, to, accs, COUNT: gl.constexpr):
        LAYOUT: gl.constexpr = accs[0].type.layout
        WIDTH: gl.constexpr = accs[0].shape[1]
        offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        offs_ci = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        to = to + (offs_co * self.stride_co)[:, None] + (offs_ci * self.stride_ci)[None, :]
        mask = None
        if self.left_co is not None:
            mask = (offs_co < self.left_co)[:, None] & (offs_ci < self.left_ci)[None, :]
        for i in gl.static_range(COUNT):
            acc = accs[i]
            if self.ADD:
                if self.is_whole:
                    acc += gl.load(to + i * self.stride_next, mask=mask)
            gl.store(to + i * self.stride_next, acc, mask=mask)


# --- what loads, and what multiplies --------------------------------------------------------------


@gluon.jit
def _load_block(gradients, products, ring, piece, block, COUNT: gl.constexpr):
    begin, end = piece.of_block(block)
    start = 0  # of the blocks of a gradient
    for i in gl.static_range(COUNT):
        count = gradients[i].blocks(products.CI_SIZE, products.CO_SIZE)
        if (block >= start) & (block < start + count):
            for tile in range(begin, end):
                products.load(
                    gradients[i], ring, block - start, tile - block * piece.tiles,
                    tile - piece.first,
                )  # fmt: skip
        start += count


@gluon.jit
def load_piece(gradients, products, ring, piece, COUNT: gl.constexpr):
    """The tiles of a piece, block by block."""
    if piece.ALONE:
        _load_block(gradients, products, ring, piece, piece.first // piece.tiles, COUNT)
    else:
        for block in range(piece.first // piece.tiles, gl.cdiv(piece.last, piece.tiles)):
            _load_block(gradients, products, ring, piece, block, COUNT)


@gluon.jit
def _multiply(GROUP: gl.constexpr, products, accs, ring, place):
    """What a tile adds to the sums of a warpgroup."""
    LAYOUT: gl.constexpr = accs[0].type.layout
    stage = ring.wait(place)
    for step in gl.static_range(products.STEPS):
        dy = products.dy(GROUP, ring, stage, step).permute((1, 0))
        dy = dy.load(gl.DotOperandLayout(0, LAYOUT, 2))
        begun = ()
        for i in gl.static_range(products.ACCS):
            x = products.x(GROUP, ring, stage, step, i)
            begun = begun + (warpgroup_mma(dy, x, accs[i], is_async=True),)
        accs = begun
        if step > 0:
            accs = wait_for(products.ACCS, accs, products.ACCS)
    accs = wait_for(0, accs, products.ACCS)
    sync_threads()
    ring.release(place)
    return accs


@gluon.jit
def _accumulate_block(GROUP: gl.constexpr, products, sums, ring, piece, block, to):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, products.WIDTH, 16])
    accs = ()
    for _ in gl.static_range(products.ACCS):
        accs = accs + (gl.zeros([64, products.WIDTH], gl.float32, LAYOUT),)
    begin, end = piece.of_block(block)
    for tile in range(begin, end):
        accs = _multiply(GROUP, products, accs, ring, tile - piece.first)
    sums.store(to, accs, products.ACCS)


@gluon.jit
def accumulate_piece(GROUP: gl.constexpr, products, sums, ring, piece):
    """What a warpgroup has of each block of the piece."""
    to = sums.ptr + products.first_row(GROUP, sums)
    if piece.ALONE:
        block = piece.first // piece.tiles
        _accumulate_block(GROUP, products, sums, ring, piece, block, to)
    else:
        for block in range(piece.first // piece.tiles, gl.cdiv(piece.last, piece.tiles)):
            _accumulate_block(GROUP, products, sums, ring, piece, block, to)
            to += sums.NUMBERS
