"""The weight gradients of up to four convolutions over images of one size, in one launch.

A weight gradient is a sum over pixels, of tiles of dy times tiles of x. All tiles of pixels of all
blocks of channels of all gradients make one list. The first blocks of it may be whole: a program
has one, and writes the gradient itself. Of the rest every program takes as long a piece as the
others: the end of the sum of one block, perhaps, and the beginning of the next one's. So no
multiprocessor is idle, however many blocks there are, and of all these sums together there are at
most two parts a program, which `conv.wgrad_parts` adds up.

Two kernels share that, and differ in what a tile is (`wgrad_pieces`): of 3x3 filters that of
`row_wgrad`, of 1x1 filters `_Points`. What belongs to a gradient are arguments with its number, and
no tuples, since Triton 3.6 and 3.7 launch no kernel with descriptors of tensors in a tuple.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import aggregate, sync_threads, tma_load
from ...hopper.pipeline import new_ring
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from ..wgrad_parts import gradient_of
from .row_wgrad_kernel import Rows, new_row_ring
from .wgrad_pieces import Gradient, Piece, Sums, accumulate_piece, begin_of, load_piece

# --- 3x3 filters ----------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["tiles", "whole", "spread"])
def conv_row_group_wgrad_kernel(
    x1_desc,  # as in `conv_row_wgrad_kernel`
    dy1_desc,
    sides1_desc,  # or None: rows are whole
    x2_desc,
    dy2_desc,
    sides2_desc,
    x3_desc,  # or None, as many as there are
    dy3_desc,
    sides3_desc,
    x4_desc,
    dy4_desc,
    sides4_desc,
    out1_ptr,  # float32 [CO1, 9, CI1], with rows any distance apart; None: no block is whole
    out2_ptr,
    out3_ptr,
    out4_ptr,
    part_ptr,  # float32 [programs without a whole block, 2, 64, 9, 64], or 1 if ALONE
    stride1,
    stride2,
    stride3,
    stride4,
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    tiles,  # of 256 pixels, of a block
    tiles_h,  # of them in an image, or in a group of images
    whole,  # blocks of which a program has one each, the first in the list
    spread,  # of so many pieces that follow one another each is in another round of programs
    COUNT: gl.constexpr,  # of gradients, from 2 to 4
    ALONE: gl.constexpr,  # no piece has tiles of two blocks
    ADD: gl.constexpr,  # to what is there, of whole blocks
    W: gl.constexpr,  # pixels of a row, of all its images, or of a piece of one
    IMAGES: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,  # pieces of a row
    RAGGED: gl.constexpr,  # channels are no multiple of 64
    num_warps: gl.constexpr,
):
    NUMBERS: gl.constexpr = 9 * 64 * 64
    ring = new_row_ring(x1_desc, dy1_desc, W, COLUMNS, STAGES, num_warps)
    await_inputs()

    gradients = (
        Gradient(x1_desc, dy1_desc, sides1_desc, CI1, CO1),
        Gradient(x2_desc, dy2_desc, sides2_desc, CI2, CO2),
        Gradient(x3_desc, dy3_desc, sides3_desc, CI3, CO3),
        Gradient(x4_desc, dy4_desc, sides4_desc, CI4, CO4),
    )
    blocks = 0
    for i in gl.static_range(COUNT):
        blocks += gradients[i].blocks(64, 64)
    program = gl.program_id(0)
    pieces = gl.maximum(gl.num_programs(0) - whole, 1)
    place = program - whole
    place = place % (pieces // spread) * spread + place // (pieces // spread)
    cut_tiles = (blocks - whole) * tiles
    first = whole * tiles + begin_of(place, pieces, cut_tiles)
    last = whole * tiles + begin_of(place + 1, pieces, cut_tiles)
    to_ptr = part_ptr + place.to(gl.int64) * (NUMBERS if ALONE else 2 * NUMBERS)
    stride_co = 9 * 64
    stride_tap = 64
    left_co = None
    left_ci = None
    is_whole = False
    if out1_ptr is not None:
        outs = (
            (CI1, CO1, stride1, out1_ptr),
            (CI2, CO2, stride2, out2_ptr),
            (CI3, CO3, stride3, out3_ptr),
            (CI4, CO4, stride4, out4_ptr),
        )
        is_whole = program < whole
        if RAGGED:
            left_co = 64
            left_ci = 64
        if is_whole:
            first = program * tiles
            last = first + tiles
            CI, CO, stride_co, out_ptr, ci0, co0 = gradient_of(program, outs, COUNT, 64, 64)
            stride_tap = CI
            to_ptr = out_ptr + co0.to(gl.int64) * stride_co + ci0
            if RAGGED:
                left_co = CO - co0
                left_ci = CI - ci0
    sums = Sums(to_ptr, stride_co, 1, stride_tap, left_co, left_ci, is_whole, NUMBERS, ADD)
    piece = Piece(first, last, tiles, ALONE)
    products = Rows(tiles_h, W, IMAGES, COLUMNS, 256 // W, 3, 64, 64, 64)
    launch_roles(
        accumulate_piece, (products, sums, ring, piece),
        load_piece, (gradients, products, ring, piece, COUNT),
        3, (160, 32 if ALONE or W != 16 else 40),
    )  # fmt: skip


# --- 1x1 filters ----------------------------------------------------------------------------------


@aggregate
class _Points:
    """Tiles are STEPS times 64 pixels, blocks GROUPS x BLOCKS times 64x64 channels; a warpgroup has
    64 channels of dy, with all of x."""

    GROUPS: gl.constexpr
    STEPS: gl.constexpr
    ACCS: gl.constexpr
    WIDTH: gl.constexpr
    CI_SIZE: gl.constexpr
    CO_SIZE: gl.constexpr

    @gluon.jit
    def load(self, gradient, ring, block, tile, place):
        BYTES: gl.constexpr = self.STEPS * (self.GROUPS + self.ACCS) * 64 * 128
        x_bufs, dy_bufs = ring.bufs
        ci_blocks = gl.cdiv(gradient.CI, self.CI_SIZE)
        ci0 = block % ci_blocks * self.CI_SIZE
        co0 = block // ci_blocks * self.CO_SIZE
        stage, bar = ring.acquire(place, BYTES)
        for step in gl.static_range(self.STEPS):
            slot = stage * self.STEPS + step
            pixel = (tile * self.STEPS + step) * 64
            for i in gl.static_range(self.GROUPS):
                buf = dy_bufs.index(slot * self.GROUPS + i)
                tma_load(gradient.dy_desc, [pixel, co0 + i * 64], bar, buf)
            for i in gl.static_range(self.ACCS):
                buf = x_bufs.index(slot * self.ACCS + i)
                tma_load(gradient.x_desc, [pixel, ci0 + i * 64], bar, buf)

    @gluon.jit
    def dy(self, GROUP: gl.constexpr, ring, stage, step: gl.constexpr):
        return ring.bufs[1].index((stage * self.STEPS + step) * self.GROUPS + GROUP)

    @gluon.jit
    def x(self, GROUP: gl.constexpr, ring, stage, step: gl.constexpr, i: gl.constexpr):
        return ring.bufs[0].index((stage * self.STEPS + step) * self.ACCS + i)

    @gluon.jit
    def first_row(self, GROUP: gl.constexpr, sums):
        return GROUP * 64 * sums.stride_co


@gluon.jit(do_not_specialize=["tiles"])
def conv_pointwise_group_wgrad_kernel(
    x1_desc,  # [pixels, CI] in boxes [64, 64]
    dy1_desc,  # [pixels, CO] in such boxes
    x2_desc,
    dy2_desc,
    x3_desc,  # or None, as many as there are
    dy3_desc,
    x4_desc,
    dy4_desc,
    part_ptr,  # float32 [programs, 2, GROUPS * 64, BLOCKS * 64]
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    tiles,  # of STEPS * 64 pixels, of a block
    COUNT: gl.constexpr,  # of gradients, from 2 to 4
    GROUPS: gl.constexpr,  # of 64 channels of dy, of a program: a warpgroup each
    BLOCKS: gl.constexpr,  # of 64 channels of x, of a program
    STEPS: gl.constexpr,  # of 64 pixels
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x1_desc.dtype
    SLOTS: gl.constexpr = STAGES * STEPS
    CI_SIZE: gl.constexpr = BLOCKS * 64
    CO_SIZE: gl.constexpr = GROUPS * 64
    x_bufs = gl.allocate_shared_memory(dtype, [SLOTS * BLOCKS, 64, 64], x1_desc.layout)
    dy_bufs = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, 64, 64], dy1_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, GROUPS)
    fence_async_shared()
    sync_threads()

    gradients = (
        Gradient(x1_desc, dy1_desc, None, CI1, CO1),
        Gradient(x2_desc, dy2_desc, None, CI2, CO2),
        Gradient(x3_desc, dy3_desc, None, CI3, CO3),
        Gradient(x4_desc, dy4_desc, None, CI4, CO4),
    )
    blocks = 0
    for i in gl.static_range(COUNT):
        blocks += gradients[i].blocks(CI_SIZE, CO_SIZE)
    all_tiles = blocks.to(gl.int64) * tiles
    first = gl.program_id(0) * all_tiles // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * all_tiles // gl.num_programs(0)
    piece = Piece(first.to(gl.int32), last.to(gl.int32), tiles, False)
    NUMBERS: gl.constexpr = CO_SIZE * CI_SIZE
    part_ptr += gl.program_id(0).to(gl.int64) * (2 * NUMBERS)
    sums = Sums(part_ptr, CI_SIZE, 1, 64, None, None, False, NUMBERS, False)
    products = _Points(GROUPS, STEPS, BLOCKS, 64, CI_SIZE, CO_SIZE)
    launch_roles(
        accumulate_piece, (products, sums, ring, piece),
        load_piece, (gradients, products, ring, piece, COUNT),
        GROUPS, (240 if GROUPS == 2 else 160, 24),
    )  # fmt: skip
