"""The warps of `conv.hopper.stationary_weights` that load, and the structures that they share with
the warpgroups that multiply.

One warp loads pairs of rows of pixels, the filters once, and the blocks of channels of 1x1
convolutions. If epilogues read a tensor, such as a residual, another warp loads its tiles.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....hopper.compat import reinterpret, tma_load
from ....runtime.dependent_launch import await_inputs_alone
from ..row_memory import pair_chunks, row_from

# --- what the parts of a program share ------------------------------------------------------------


class Filters(NamedTuple):
    """Shared memory of the filters: nine taps, then the blocks of 1x1 convolutions; and a barrier
    for each row of taps."""

    bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


class FilterDescs(NamedTuple):
    """Descriptors of the filters: 3x3, and 1x1 of up to two tensors."""

    taps: gl.tensor
    extra1: gl.tensor
    extra2: gl.tensor


class Work(NamedTuple):
    """The tiles of a program, and its first channel of the result."""

    first: gl.tensor
    count: gl.tensor
    tiles_h: gl.tensor  # of an image
    c0: gl.tensor


# --- loads ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _upsamples(desc):
    """Whether a box has every pixel of a row twice, as nearest upsampling does."""
    return len(desc.block_shape) == 5


@gluon.jit
def _load_extra_row(desc, n, h, c0, bar, buf):
    """Load a row of 64 channels."""
    if _upsamples(desc):
        at = [n, h // 2, 0, 0, c0]
        buf = reinterpret(buf, buf.dtype, desc.block_shape, desc.layout)
        tma_load(desc, at, bar, buf)
    else:
        tma_load(desc, [n, h, 0, c0], bar, buf)


@gluon.jit
def _load_extra(
    desc1, desc2, extra, step, n, h0,
    BLOCK: gl.constexpr, EXTRA1: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load a block of channels of the inputs of the added 1x1 convolutions."""
    slot, bar = extra.acquire(step, 2 * W * 128)
    for j in gl.static_range(2):
        buf = extra.bufs.index(slot * 2 + j)
        if BLOCK < EXTRA1:
            _load_extra_row(desc1, n, h0 + j, BLOCK * 64, bar, buf)
        else:
            _load_extra_row(desc2, n, h0 + j, (BLOCK - EXTRA1) * 64, bar, buf)


@gluon.jit
def _load_filters(
    descs, filters, c0,
    r: gl.constexpr, DGRAD: gl.constexpr, EXTRA1: gl.constexpr, EXTRA2: gl.constexpr,
):  # fmt: skip
    """Row r of the filters, and those of the r-th 1x1 block, which is multiplied with that row."""
    bar = filters.full.index(r)
    bufs = filters.bufs
    TAP: gl.constexpr = bufs.shape[2] * bufs.shape[3] * 2
    mbarrier.expect(bar, (3 + (1 if r < EXTRA1 + EXTRA2 else 0)) * TAP)
    for tap in gl.static_range(3 * r, 3 * r + 3):
        at = [8 - tap, 0, c0] if DGRAD else [tap, c0, 0]
        tma_load(descs.taps, at, bar, bufs.index(tap))
    if r < EXTRA1:
        tma_load(descs.extra1, [0, c0, r * 64], bar, bufs.index(9 + r))
    elif r < EXTRA1 + EXTRA2:
        at = [0, c0, (r - EXTRA1) * 64]
        tma_load(descs.extra2, at, bar, bufs.index(9 + r))


@gluon.jit
def load_rows(
    x_desc, filter_descs, extra1_desc, extra2_desc, x, filters, extra, work,
    ROWS: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr,
    EXTRA1: gl.constexpr, EXTRA2: gl.constexpr, OVERLAP: gl.constexpr, PRODUCES: gl.constexpr,
):  # fmt: skip
    """Rows, filters and extra blocks; if PRODUCES, where other warpgroups make rows, only these."""
    _load_filters(filter_descs, filters, work.c0, 0, DGRAD, EXTRA1, EXTRA2)
    if PRODUCES:
        for r in gl.static_range(1, 3):
            _load_filters(filter_descs, filters, work.c0, r, DGRAD, EXTRA1, EXTRA2)
    if OVERLAP:
        await_inputs_alone()  # filters are there before the previous kernel
    place = 0
    step = 0
    for index in range(work.count):
        tile = work.first + index
        n = tile // work.tiles_h
        h = tile % work.tiles_h
        h0 = h * ROWS
        if not PRODUCES:
            begins = (index == 0) | (h == 0)
            ends = (index + 1 == work.count) | (h + 1 == work.tiles_h)
            for i in range(gl.where(begins, 0, 1), ROWS // 2 + 1):
                slot, bar = x.acquire(place, 2 * W * 2 * x.bufs.shape[2])
                # two tiles use the last pair of one and the first of the next; or nobody else will
                x.release(place, (i < ROWS // 2) | ends)
                for j in gl.static_range(2):
                    at = [n, h0 - 1 + 2 * i + j, 0, 0]
                    row = row_from(x.bufs, slot, j, W, pair_chunks(W))
                    tma_load(x_desc, at, bar, row)
                place += 1
            if index == 0:  # the first products need only those of the first row
                for r in gl.static_range(1, 3):
                    _load_filters(filter_descs, filters, work.c0, r, DGRAD, EXTRA1, EXTRA2)
        for i in gl.static_range(EXTRA1 + EXTRA2):
            _load_extra(extra1_desc, extra2_desc, extra, step + i, n, h0, i, EXTRA1, W)
        step += EXTRA1 + EXTRA2


@gluon.jit
def load_beside(
    desc1, desc2, beside, filters, work, border,
    ROWS: gl.constexpr, W: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """What the epilogues read beside their tiles, of one tensor or of two that are concatenated, to
    where they will write."""
    c0 = work.c0
    if OVERLAP:
        await_inputs_alone()
    place = 0
    mbarrier.wait(filters.full.index(0), 0)  # what the products need comes first
    for index in range(work.count):
        tile = work.first + index
        n = tile // work.tiles_h
        for half in gl.static_range(ROWS // 2):
            h0 = tile % work.tiles_h * ROWS + 2 * half
            slot, bar = beside.acquire(place, 2 * W * 128)
            buf = beside.bufs.index(slot)
            if desc2 is None:
                tma_load(desc1, [n, h0, 0, c0], bar, buf)
            else:
                left = c0 < border
                right = c0 >= border
                tma_load(desc1, [n, h0, 0, c0], bar, buf, left)
                tma_load(desc2, [n, h0, 0, c0 - border], bar, buf, right)
            place += 1
