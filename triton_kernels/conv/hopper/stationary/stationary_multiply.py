"""The warpgroups of `stationary_weights` that multiply: the main loop over the nine taps, and the
epilogue. A tile is ROWS rows of W pixels by 64 output channels. Rows of x come in pairs, and a pair
serves all output rows that its rows are a tap of.

The warpgroups take turns, so that one multiplies while another runs its epilogue.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....activations import activate_affine_grad
from ....hopper.compat import reinterpret, sync_threads, tma_store
from ....hopper.pairs import round_pairs, widen_pairs
from ....runtime.dependent_launch import await_inputs_alone, begin_next
from ..norm_rows import activate_rows, keep_affine, load_affine, load_table
from ..row_memory import pair_chunks, row_of_tap


class Vectors(NamedTuple):
    """What the epilogue reads of each channel, and the number that multiplies its sum."""

    first: gl.tensor  # bias; of an input gradient, the norm's table
    extra_bias: gl.tensor
    emb: gl.tensor
    stride_emb: gl.tensor
    factor: gl.tensor  # of a forward pass, or None


@gluon.jit
def _load_bias(vectors, n, offs):
    """The sum of the vectors that the epilogue adds to every pixel of image n."""
    bias = gl.load(vectors.first + offs)
    if vectors.extra_bias is not None:
        bias += gl.load(vectors.extra_bias + offs)
    if vectors.emb is not None:
        bias += gl.load(vectors.emb + n.to(gl.int64) * vectors.stride_emb + offs)
    return bias


@gluon.jit
def _stage_of_row(stages, slot, j: gl.constexpr, W: gl.constexpr):
    """Row j of a pair of rows of the result in shared memory, [64 channels, W pixels]."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    rows = reinterpret(stages.index(slot), stages.dtype, [2, W, 64], MATRIX)
    return rows.index(j).permute((1, 0))


@gluon.jit
def _filters(w_bufs, tap: gl.constexpr, DGRAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the filters of a tap, [64 channels of the result, K], into registers."""
    w = w_bufs.index(tap)
    ROWS: gl.constexpr = w_bufs.shape[2]
    COLUMNS: gl.constexpr = w_bufs.shape[3]
    w = reinterpret(w, w.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16))
    if DGRAD:
        w = w.permute((1, 0))
    return w.load(gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _multiply_extra(
    accs, extra, w_bufs, step, BLOCK: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr
):
    """Issue the products of one block of channels with its 1x1 filters, without waiting."""
    slot = extra.wait(step)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w = reinterpret(w_bufs.index(9 + BLOCK), w_bufs.dtype, [64, 64], MATRIX)
    w = w.load(gl.DotOperandLayout(0, LAYOUT, 2))
    x0 = reinterpret(extra.bufs.index(slot * 2), w_bufs.dtype, [W, 64], MATRIX)
    x1 = reinterpret(extra.bufs.index(slot * 2 + 1), w_bufs.dtype, [W, 64], MATRIX)
    acc0 = warpgroup_mma(w, x0.permute((1, 0)), accs[0], is_async=True)
    acc1 = warpgroup_mma(w, x1.permute((1, 0)), accs[1], is_async=True)
    return acc0, acc1


@gluon.jit
def _sum_of_thread(x):
    """Sum [64, W] over the pixels that one thread has: [64, 4]."""
    x = x.reshape([64, x.shape[1] // 8, 4, 2]).permute((0, 2, 1, 3))
    return gl.sum(x.reshape([64, 4, x.shape[2] * 2]), axis=2)


@gluon.jit
def _sum_of_threads(x, LAYOUT: gl.constexpr):
    """Sum [64, 4] over the four threads that share a row."""
    return gl.convert_layout(gl.sum(x, axis=1), LAYOUT, assert_trivial=True)


@gluon.jit
def sums_of_rows(rows, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum over the pixels of a tile's rows [64, W], and the sum of squares about the tile's
    mean. A difference of large sums would cancel."""
    total = _sum_of_thread(widen_pairs(rows[0]))
    for j in gl.static_range(1, COUNT):
        total += _sum_of_thread(widen_pairs(rows[j]))
    total = _sum_of_threads(total, LAYOUT)
    mean = (total / (COUNT * rows[0].shape[1]))[:, None]
    for j in gl.static_range(COUNT):
        d = widen_pairs(rows[j]) - mean
        if j == 0:
            second = _sum_of_thread(d * d)
        else:
            second += _sum_of_thread(d * d)
    return total, _sum_of_threads(second, LAYOUT)


@gluon.jit
def multiply_rows(
    GROUP: gl.constexpr, y_desc, x, filters, extra, beside, stages, turns, vectors, norm,
    partial_ptr, work, C, ROWS: gl.constexpr, W: gl.constexpr,
    DGRAD: gl.constexpr, ACT: gl.constexpr, EXTRA: gl.constexpr, OVERLAP: gl.constexpr,
    TILES_OF_X: gl.constexpr, CG: gl.constexpr, PRODUCES: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    GROUPS: gl.constexpr = turns.GROUPS
    SLOTS: gl.constexpr = stages.shape[0]
    HAS_BESIDE: gl.constexpr = beside is not None
    HALVES: gl.constexpr = ROWS // 2
    OWN: gl.constexpr = SLOTS // GROUPS
    AHEAD: gl.constexpr = 4 // ROWS  # taps whose products run while the next filters are loaded
    NORM: gl.constexpr = (norm.sums is not None or norm.table is not None) and not PRODUCES
    if OVERLAP:
        await_inputs_alone()
    first = work.first
    tiles_h = work.tiles_h
    c0 = work.c0
    phase = 0
    offs = c0 + gl.arange(0, 64, layout=VECTOR)
    image = -1
    for index in range(GROUP, work.count, GROUPS):
        tile = first + index
        n = tile // tiles_h
        h0 = tile % tiles_h * ROWS
        if DGRAD:
            mean, rstd, g, b = load_table(vectors.first, n, offs, C)
        else:
            bias = _load_bias(vectors, n, offs)

        place = index * HALVES + n - first // tiles_h
        if NORM:
            if n != image:
                image = n
                keep_affine(norm, n, tiles_h * (ROWS * W), GROUP, TILES_OF_X, CG)
            slope, offset = load_affine(norm, GROUP)
            if (index == 0) | (h0 == 0):
                if x.SLOTS < 2 * (HALVES + 1):
                    # Barriers tell only odd rounds from even ones: wait for the pairs before
                    turns.wait(GROUP, phase)
                pair = x.wait(place)
                activate_rows(x.bufs, pair, slope, offset, h0 > 0, 0, ACT, W)
            below = h0 + ROWS < tiles_h * ROWS
            for i in gl.static_range(1, HALVES + 1):
                pair = x.wait(place + i)
                if i < HALVES:
                    activate_rows(x.bufs, pair, slope, offset, True, -1, ACT, W)
                else:
                    activate_rows(x.bufs, pair, slope, offset, below, 1, ACT, W)
            fence_async_shared()
            sync_threads()
        accs = ()
        for _ in gl.static_range(ROWS):
            accs = accs + (gl.zeros([64, W], gl.float32, LAYOUT),)
        turns.wait(GROUP, phase)
        pairs = ()
        for i in gl.static_range(HALVES + 1):
            pairs = pairs + (x.wait(place + i),)
        step = index * EXTRA
        for r in gl.static_range(3):
            mbarrier.wait(filters.full.index(r), 0)
            if r < EXTRA:
                accs = _multiply_extra(accs, extra, filters.bufs, step + r, r, W, LAYOUT)
                if r > 0:
                    accs = warpgroup_mma_wait(4, deps=accs)
            for s in gl.static_range(3):
                w = _filters(filters.bufs, r * 3 + s, DGRAD, LAYOUT)
                if r + s == 4:  # the last tap, after which the next warpgroup may multiply
                    if HAS_BESIDE and SLOTS < GROUPS * HALVES:
                        # Barriers tell only odd rounds from even ones: wait for this slot before
                        # the next warpgroup can wait for it
                        beside.wait(index * HALVES)
                    turns.give(GROUP)
                out = ()
                for j in gl.static_range(ROWS):
                    pair = pairs[(j + r) // 2]
                    row = row_of_tap(x.bufs, pair, (j + r) % 2, s, W, pair_chunks(W))
                    out = out + (warpgroup_mma(w, row.permute((1, 0)), accs[j], is_async=True),)
                accs = out
                # registers hold the filters of AHEAD + 1 taps
                if r * 3 + s >= AHEAD or r < EXTRA:
                    accs = warpgroup_mma_wait(4, deps=accs)
                if r < EXTRA and s == 1:  # the products of the 1x1 term are complete
                    sync_threads()
                    extra.release(step + r)
        accs = warpgroup_mma_wait(0, deps=accs)
        sync_threads()
        for i in gl.static_range(HALVES + 1):
            x.release(place + i)

        to = partial_ptr
        if partial_ptr is not None:
            to += tile.to(gl.int64) * 2 * C + offs
        if DGRAD:
            shift = (-mean * rstd)[:, None]
            rstd = rstd[:, None]
            g = g[:, None]
            b = b[:, None]
        else:
            bias = bias[:, None]
        rounded = ()
        result = index * HALVES
        for half in gl.static_range(HALVES):
            if HAS_BESIDE:
                slot = beside.wait(result + half)
            else:
                slot = GROUP * OWN + half % OWN
                tma.store_wait(OWN - 1)  # the last store from this slot is complete
            for j in gl.static_range(2):
                stage = _stage_of_row(stages, slot, j, W)
                acc = accs[2 * half + j]
                if DGRAD:
                    xhat = widen_pairs(stage.load(LAYOUT)) * rstd + shift
                    y = acc * activate_affine_grad(xhat, g, b, ACT)
                    first_sum = _sum_of_thread(y)
                    second_sum = _sum_of_thread(y * xhat)
                    if half + j == 0:
                        total = first_sum
                        second = second_sum
                    else:
                        total += first_sum
                        second += second_sum
                    stage.store(round_pairs(y, stages.dtype))
                else:
                    y = acc + bias
                    if HAS_BESIDE:
                        y += widen_pairs(stage.load(LAYOUT))
                    if vectors.factor is not None:
                        y *= vectors.factor
                    y = round_pairs(y, stages.dtype)
                    rounded = rounded + (y,)
                    stage.store(y)
            fence_async_shared()
            at = [n, h0 + 2 * half, 0, c0]
            tma_store(y_desc, at, stages.index(slot))
        if partial_ptr is not None:
            if DGRAD:
                total = _sum_of_threads(total, VECTOR)
                second = _sum_of_threads(second, VECTOR)
            else:
                total, second = sums_of_rows(rounded, ROWS, VECTOR)
            gl.store(to, total)
            gl.store(to + C, second)
        if HAS_BESIDE:
            tma.store_wait(0)
            sync_threads()
            for half in gl.static_range(HALVES):
                beside.release(result + half)
        phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)
