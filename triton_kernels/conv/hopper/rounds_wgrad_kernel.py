"""The weight gradients of up to four 3x3 convolutions in one launch, most blocks of channels whole.

The blocks of all gradients make one list. Programs take the first WHOLE of them, one each, over all
pixels, and write the gradient itself. Each of the rest is cut into SPLITS parts, which
`conv.wgrad_group` adds up. The first are whole rounds of programs over the multiprocessors, so that
only the last round is cut; what a program does is what it does in `row_wgrad`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...hopper.compat import allocate_for_views, sync_threads
from ...hopper.pipeline import new_ring
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs
from .row_memory import block_chunks, clear_margins
from .row_wgrad import load_tiles, multiply_tiles


@gluon.jit
def _load(
    descs, ring, gradient, first, last, co0, ci0, tiles_h,
    W: gl.constexpr, IMAGES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(4):
        x_desc, dy_desc, sides_desc = descs[i]
        if x_desc is not None:
            if gradient == i:
                load_tiles(
                    x_desc, dy_desc, ring, first, last, co0, ci0, tiles_h, W, IMAGES,
                    sides_desc, COLUMNS,
                )  # fmt: skip


@gluon.jit
def _accumulate(
    R: gl.constexpr, to_ptr, stride_co, stride_tap, left_co, left_ci, is_whole, ring, first, last,
    W: gl.constexpr, IMAGES: gl.constexpr, MARGINS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The three taps of row R of the filter, of a block of which so many channels are left, or None
    if all are."""
    accs = multiply_tiles(ring, first, last, R, W, IMAGES, MARGINS)
    LAYOUT: gl.constexpr = accs[0].type.layout
    offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_ci = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    to = to_ptr + (R * 3 * stride_tap + offs_co * stride_co)[:, None] + offs_ci[None, :]
    mask = None
    if left_co is not None:
        mask = (offs_co < left_co)[:, None] & (offs_ci < left_ci)[None, :]
    for tap in gl.static_range(3):
        acc = accs[tap]
        place = to + tap * stride_tap
        if ADD:
            if is_whole:
                acc += gl.load(place, mask=mask)
        gl.store(place, acc, mask=mask)


@gluon.jit(do_not_specialize=["tiles", "whole"])
def conv_rounds_wgrad_kernel(
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
    out1_ptr,  # float32 [CO1, 9, CI1], with rows any distance apart
    out2_ptr,
    out3_ptr,
    out4_ptr,
    part_ptr,  # float32 [blocks - whole, splits, 64, 9, 64]
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
    tiles,  # of 256 pixels
    tiles_h,  # of them in an image, or in a group of images
    whole,  # blocks that are not cut, the first
    splits,  # of each of the others
    ADD: gl.constexpr,  # to what is there
    W: gl.constexpr,  # pixels of a row, of all its images, or of a piece of one
    IMAGES: gl.constexpr,
    STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,  # pieces of a row
    RAGGED: gl.constexpr,  # channels are no multiple of 64
    num_warps: gl.constexpr,
):
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x1_desc.dtype
    MARGINS: gl.constexpr = 1 if COLUMNS == 1 else 2
    x_bufs = allocate_for_views(dtype, [STAGES * block_chunks(W, MARGINS), 8, 64], PIXELS)
    dy_bufs = gl.allocate_shared_memory(dtype, [STAGES] + dy1_desc.block_shape, dy1_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, 3)
    if COLUMNS == 1:
        clear_margins(x_bufs, STAGES, 256 // W + 2, W, num_warps)
    else:
        fence_async_shared()
        sync_threads()
    await_inputs()

    # the block, and which of its parts: those of all blocks that begin with one pixel come together
    end1 = gl.cdiv(CI1, 64) * gl.cdiv(CO1, 64)
    end2 = end1 + gl.cdiv(CI2, 64) * gl.cdiv(CO2, 64)
    end3 = end2 + gl.cdiv(CI3, 64) * gl.cdiv(CO3, 64)
    blocks = end3 + gl.cdiv(CI4, 64) * gl.cdiv(CO4, 64)
    program = gl.program_id(0)
    is_whole = program < whole
    cut = gl.maximum(blocks - whole, 1)
    block = gl.where(is_whole, program, whole + (program - whole) % cut)
    split = gl.where(is_whole, 0, (program - whole) // cut)
    count = gl.where(is_whole, 1, splits)
    part = (block - whole) * splits + split
    first = (split.to(gl.int64) * tiles // count).to(gl.int32)
    last = ((split + 1).to(gl.int64) * tiles // count).to(gl.int32)

    gradient = (block >= end1).to(gl.int32) + (block >= end2).to(gl.int32)
    gradient += (block >= end3).to(gl.int32)
    CI = CI1
    CO = CO1
    stride = stride1
    to_ptr = out1_ptr
    others = (
        (CI2, CO2, stride2, out2_ptr, end1),
        (CI3, CO3, stride3, out3_ptr, end2),
        (CI4, CO4, stride4, out4_ptr, end3),
    )
    for i in gl.static_range(3):
        if gradient == i + 1:
            CI, CO, stride, to_ptr, start = others[i]
            block -= start
    co0 = block // gl.cdiv(CI, 64) * 64
    ci0 = block % gl.cdiv(CI, 64) * 64
    to_ptr += co0.to(gl.int64) * stride + ci0
    stride_tap = CI
    if not is_whole:
        to_ptr = part_ptr + part.to(gl.int64) * (9 * 64 * 64)
        stride = 9 * 64
        stride_tap = 64
    launch_roles(
        _accumulate,
        (
            to_ptr, stride, stride_tap, CO - co0 if RAGGED else None, CI - ci0 if RAGGED else None,
            is_whole, ring, first, last, W, IMAGES, MARGINS, ADD,
        ),
        _load,
        (
            (
                (x1_desc, dy1_desc, sides1_desc), (x2_desc, dy2_desc, sides2_desc),
                (x3_desc, dy3_desc, sides3_desc), (x4_desc, dy4_desc, sides4_desc),
            ),
            ring, gradient, first, last, co0, ci0, tiles_h, W, IMAGES, COLUMNS,
        ),
        3, (160, 32),
    )  # fmt: skip
