"""The weight gradients of up to four convolutions over images of one size, in one launch.

A weight gradient is a sum over pixels, of tiles of dy times tiles of x. All tiles of pixels of all
blocks of channels of all gradients make one list. The first blocks of it may be whole: a program
has one, and writes the gradient itself. Of the rest every program takes as long a piece as the
others: the end of the sum of one block, perhaps, and the beginning of the next one's. So no
multiprocessor is idle, however many blocks there are, and of all these sums together there are at
most two parts a program, which `conv.wgrad_parts` adds up.

A tile is that of `row_wgrad`. What belongs to a gradient are arguments with its number, and
no tuples, since Triton 3.6 and 3.7 launch no kernel with descriptors of tensors in a tuple.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....hopper.roles import launch_roles
from ....runtime.dependent_launch import await_inputs
from ...wgrad_parts import gradient_of
from .row_wgrad_kernel import new_row_ring
from .wgrad_pieces import (
    NUMBERS,
    Gradient,
    Piece,
    Sums,
    Tiles,
    accumulate_piece,
    begin_of,
    load_piece,
)


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
    sums = Sums(to_ptr, stride_co, 1, stride_tap, left_co, left_ci, is_whole, ADD)
    piece = Piece(first, last, tiles, ALONE)
    of_pixels = Tiles(tiles_h, W, IMAGES, COLUMNS, 64)
    launch_roles(
        accumulate_piece, (of_pixels, sums, ring, piece),
        load_piece, (gradients, of_pixels, ring, piece, COUNT),
        3, (160, 32 if ALONE or W != 16 else 40),
    )  # fmt: skip
