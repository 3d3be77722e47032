"""The kernel of `conv.gluon.rows_meeting`: 3x3 convolutions to 64 channels, of 16, 64 or 128, and
the norm of the result, for which tiles of an image meet (`tile_meeting`).

As in `resident` the filters stay in shared memory, and two warpgroups take a tile of four rows in
turns, or of two. But the tiles of a program are not neighbours: all programs together have whole
images, then the next ones, so that the tiles that wait for one another are made at the same time.
Every tile has its rows of pixels to itself, two more than it is of. They pass through a ring one by
one, and a row goes back as soon as the taps that read it are done. So the next tile's first rows
come while this one multiplies, in little memory. Where 1x1 convolutions of other tensors are added
a block of 64 channels of their rows comes and goes behind each row of the filter.

Each warpgroup has memory for its own result: the residual comes there, y leaves from there, and
behind it a = act(norm(y)), and that of a second norm of y, if somebody else reads such a one.
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

from ...activations import activate_affine
from ...dependent_launch import await_inputs_alone, begin_next
from ...gluon.pairs import round_pairs, widen_pairs
from ...gluon.pipeline import (
    give_back,
    new_barrier_pairs,
    new_barriers,
    sync_threads,
    wait_empty,
    wait_full,
)
from .epilogue import load_bias
from .resident import Vectors, filters_of_tap, stage_of_row, sum_of_thread, sum_of_threads
from .resident_loads import FilterDescs, Filters, Ring, load_extra_row, load_filters
from .rows_memory import clear_margins, row_from, row_of_tap, rows_chunks
from .tile_meeting import leave_sums, moments_of_image


class _Results(NamedTuple):
    """Where they go, and what is beside them."""

    y: gl.tensor
    a: gl.tensor
    second_a: gl.tensor
    beside: gl.tensor
    slots: gl.tensor
    partial: gl.tensor


class _Norms(NamedTuple):
    """Of the result, and the second one, or None."""

    weight: gl.tensor
    bias: gl.tensor
    second_weight: gl.tensor
    second_bias: gl.tensor
    eps: gl.tensor


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _load_all_filters(
    descs, filters, FROM: gl.constexpr, BLOCKS: gl.constexpr, EXTRA1: gl.constexpr,
    EXTRA2: gl.constexpr,
):  # fmt: skip
    if BLOCKS == 1:
        for r in gl.static_range(FROM, 3 if FROM > 0 else 1):
            load_filters(descs, filters, 0, r, False, EXTRA1, EXTRA2)
    else:
        bufs = filters.bufs
        for r in gl.static_range(FROM, 3 * BLOCKS if FROM > 0 else 1):
            bar = filters.full.index(r)
            mbarrier.expect(bar, 3 * bufs.shape[2] * bufs.shape[3] * 2)
            for s in gl.static_range(3):
                at = [r % 3 * 3 + s, 0, r // 3 * 64]
                tma.async_copy_global_to_shared(descs.taps, at, bar, bufs.index(r * 3 + s))


@gluon.jit
def _load(
    x_desc, extra1_desc, extra2_desc, filter_descs, x, extra, filters, tiles, tiles_h,
    ROWS: gl.constexpr, W: gl.constexpr, BLOCKS: gl.constexpr, EXTRA1: gl.constexpr,
    EXTRA2: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The filters, and the rows of all tiles."""
    SLOTS: gl.constexpr = x.full.shape[0]
    BYTES: gl.constexpr = W * 2 * x.bufs.shape[2]
    EXTRA: gl.constexpr = EXTRA1 + EXTRA2
    _load_all_filters(filter_descs, filters, 0, BLOCKS, EXTRA1, EXTRA2)
    if OVERLAP:
        await_inputs_alone()  # filters are there before the launch in front
    place = 0
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile // tiles_h
        h0 = tile % tiles_h * ROWS
        first = place == 0
        for block in gl.static_range(BLOCKS):
            for r in gl.static_range(3):
                for i in range(0 if r == 0 else ROWS - 1 + r, ROWS + r):
                    slot, bar = wait_empty(x.full, x.empty, place, SLOTS, BYTES)
                    row = row_from(x.bufs, 0, slot, W)
                    at = [n, h0 - 1 + i, 0, block * 64]
                    tma.async_copy_global_to_shared(x_desc, at, bar, row)
                    place += 1
                if block + r == 0:
                    if first:  # the first products need only the filters of the first row
                        _load_all_filters(filter_descs, filters, 1, BLOCKS, EXTRA1, EXTRA2)
                if r < EXTRA:
                    _, bar = wait_empty(extra.full, extra.empty, step, 1, ROWS * W * 128)
                    for j in range(ROWS):
                        row = extra.bufs.index(j)
                        if r < EXTRA1:
                            load_extra_row(extra1_desc, n, h0 + j, r * 64, bar, row)
                        else:
                            load_extra_row(extra2_desc, n, h0 + j, (r - EXTRA1) * 64, bar, row)
                    step += 1


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _products(
    x, extra, filters, turns, phase, place, step,
    GROUP: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, BLOCKS: gl.constexpr,
    EXTRA: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Those of a tile when its turn has come: ROWS of [64, W]."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SLOTS: gl.constexpr = x.full.shape[0]
    FIRST: gl.constexpr = 1 if GROUP == 0 else 0
    nought = step >> 30  # what does not change from tile to tile would be kept in registers
    accs = ()
    for _ in gl.static_range(ROWS):
        accs = accs + (gl.zeros([64, W], gl.float32, LAYOUT),)
    mbarrier.wait(turns.index(GROUP), phase ^ FIRST)
    for block in gl.static_range(BLOCKS):
        rows = ()
        for r in gl.static_range(3):
            for i in gl.static_range(0 if r == 0 else ROWS - 1 + r, ROWS + r):
                rows = rows + (wait_full(x.full, place + i, SLOTS),)
            mbarrier.wait(filters.full.index(block * 3 + r), 0)
            for s in gl.static_range(3):
                w = filters_of_tap(filters.bufs, (block * 3 + r) * 3 + s, False, LAYOUT)
                if block + 1 == BLOCKS and EXTRA < 3 and r + s == 4:
                    # all rows are there, and the last products are about to be under way
                    mbarrier.arrive(turns.index(1 - GROUP), count=1)
                out = ()
                for j in gl.static_range(ROWS):
                    row = row_of_tap(x.bufs, 0, rows[j + r], s, W)
                    out = out + (warpgroup_mma(w, row.permute((1, 0)), accs[j], is_async=True),)
                accs = out
                if block + r + s > 0:  # filters of two taps are in registers
                    accs = warpgroup_mma_wait(ROWS, deps=accs)
                # what was begun before these is done, and nobody else reads what it has read
                if s == 0 and r + block > 0:
                    sync_threads()
                    if r > 0 and r <= EXTRA:
                        give_back(extra.empty, step + r - 1, 1)
                    elif r > 0:
                        give_back(x.empty, place + r - 1, SLOTS)
                    else:
                        for i in gl.static_range(2, ROWS + 2):
                            give_back(x.empty, place - (ROWS + 2) + i, SLOTS)
            if r < EXTRA:
                wait_full(extra.full, step + r, 1)
                w = filters_of_tap(filters.bufs, 9 + r, False, LAYOUT)
                if r == 2:
                    mbarrier.arrive(turns.index(1 - GROUP), count=1)
                out = ()
                for j in gl.static_range(ROWS):
                    row = extra.bufs.index(nought + j)
                    row = row._reinterpret(row.dtype, [W, 64], MATRIX)
                    out = out + (warpgroup_mma(w, row.permute((1, 0)), accs[j], is_async=True),)
                accs = warpgroup_mma_wait(ROWS, deps=out)
                if r < 2:
                    sync_threads()
                    give_back(x.empty, place + r, SLOTS)
        place += ROWS + 2
    accs = warpgroup_mma_wait(0, deps=accs)
    sync_threads()
    for i in gl.static_range(2, ROWS + 2):
        give_back(x.empty, place - (ROWS + 2) + i, SLOTS)
    if EXTRA == 3:
        give_back(extra.empty, step + 2, 1)
    return accs


@gluon.jit
def _over_group(x, CG: gl.constexpr):
    """The sums of x [64] over each group of CG channels, for each of them."""
    if CG == 1:
        return x
    else:
        LAYOUT: gl.constexpr = x.type.layout
        groups = x.reshape([64 // CG, CG])
        GROUPS: gl.constexpr = groups.type.layout
        each = gl.sum(groups, axis=1)[:, None] + gl.zeros([64 // CG, CG], gl.float32, GROUPS)
        return gl.convert_layout(each.reshape([64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _store_rows(
    desc, stages, rows, n, h0, GROUP: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr
):
    """ROWS of a tile, as many at a time as there is memory for."""
    STAGE: gl.constexpr = stages.shape[2]
    for piece in gl.static_range(ROWS // STAGE):
        tma.store_wait(0)  # of what was there
        sync_threads()
        for j in gl.static_range(STAGE):
            stage_of_row(stages, GROUP, j, W, STAGE).store(rows[piece * STAGE + j])
        fence_async_shared()
        at = [n, h0 + piece * STAGE, 0, 0]
        tma.async_copy_shared_to_global(desc, at, stages.index(GROUP))


@gluon.jit
def _store_normed(
    desc, stages, rounded, mean, scale, shift, n, h0,
    GROUP: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """act((y - mean) scale + shift) of a tile."""
    STAGE: gl.constexpr = stages.shape[2]
    mean = mean[:, None]
    scale = scale[:, None]
    shift = shift[:, None]
    for piece in gl.static_range(ROWS // STAGE):
        tma.store_wait(0)  # of what was there
        sync_threads()
        for j in gl.static_range(STAGE):
            d = widen_pairs(rounded[piece * STAGE + j]) - mean
            a = round_pairs(activate_affine(d, scale, shift, ACT), stages.dtype)
            stage_of_row(stages, GROUP, j, W, STAGE).store(a)
        fence_async_shared()
        at = [n, h0 + piece * STAGE, 0, 0]
        tma.async_copy_shared_to_global(desc, at, stages.index(GROUP))


@gluon.jit
def _multiply(
    results, stages, x, extra, filters, beside_full, turns, vectors, norms, tiles, tiles_h,
    GROUP: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, BLOCKS: gl.constexpr,
    EXTRA: gl.constexpr, ACT: gl.constexpr, CG: gl.constexpr, CG2: gl.constexpr,
    KEEP: gl.constexpr, TILES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    PIXELS: gl.constexpr = ROWS * W
    HAS_BESIDE: gl.constexpr = results.beside is not None
    HAS_SECOND: gl.constexpr = results.second_a is not None
    dtype: gl.constexpr = stages.dtype
    offs = gl.arange(0, 64, layout=VECTOR)
    bar = beside_full.index(GROUP)
    if OVERLAP:
        await_inputs_alone()
    g = gl.load(norms.weight + offs)
    b = gl.load(norms.bias + offs)
    if HAS_SECOND:
        second_g = gl.load(norms.second_weight + offs)
        second_b = gl.load(norms.second_bias + offs)
    programs = gl.num_programs(0)
    SHARE: gl.constexpr = BLOCKS * (ROWS + 2)  # of the ring
    place = GROUP * SHARE
    step = GROUP * EXTRA
    phase = 0
    for tile in range(gl.program_id(0) + GROUP * programs, tiles, 2 * programs):
        n = tile // tiles_h
        h0 = tile % tiles_h * ROWS
        if HAS_BESIDE:
            tma.store_wait(0)  # of the last tile, from where the residual goes
            mbarrier.expect(bar, PIXELS * 128)
            tma.async_copy_global_to_shared(results.beside, [n, h0, 0, 0], bar, stages.index(GROUP))
        bias = load_bias(
            vectors.first, vectors.extra_bias, vectors.emb, vectors.stride_emb, n, offs
        )[:, None]
        accs = _products(
            x, extra, filters, turns, phase, place, step, GROUP, ROWS, W, BLOCKS, EXTRA, LAYOUT
        )
        place += 2 * SHARE
        step += 2 * EXTRA

        if HAS_BESIDE:
            mbarrier.wait(bar, phase)
        rounded = ()
        for j in gl.static_range(ROWS):
            y = accs[j] + bias
            if HAS_BESIDE:
                y += widen_pairs(stage_of_row(stages, GROUP, j, W, ROWS).load(LAYOUT))
            y = round_pairs(y, dtype)
            if j == 0:
                total = sum_of_thread(widen_pairs(y))
            else:
                total += sum_of_thread(widen_pairs(y))
            rounded = rounded + (y,)
        total = sum_of_threads(total, VECTOR)
        # about the mean of the tile, since a difference of large sums would cancel
        mean = (total / PIXELS)[:, None]
        d = widen_pairs(rounded[0]) - mean
        second = sum_of_thread(d * d)
        for j in gl.static_range(1, ROWS):
            d = widen_pairs(rounded[j]) - mean
            second += sum_of_thread(d * d)
        second = sum_of_threads(second, VECTOR)
        # a word for the whole group: fewer to wait for
        of_group = _over_group(total, CG)
        d = (total - of_group / CG) * (1.0 / PIXELS)
        squares = _over_group(second + d * d * PIXELS, CG)
        leave_sums(results.slots, n, tile % tiles_h, offs, 64, of_group, squares, TILES)
        if KEEP:
            _store_rows(results.y, stages, rounded, n, h0, GROUP, ROWS, W)
        mean, rest, var = moments_of_image(results.slots, n, 0, 64, TILES, 1, CG * PIXELS, VECTOR)
        scale = g / gl.sqrt(var + norms.eps)
        shift = b - rest * scale
        _store_normed(results.a, stages, rounded, mean, scale, shift, n, h0, GROUP, ROWS, W, ACT)
        if HAS_SECOND:  # its groups are several of the first one's
            common = _over_group(mean, CG2) * (1.0 / CG2)
            d = mean - common + rest
            rest = _over_group(d, CG2) * (1.0 / CG2)
            var = _over_group(var + d * d, CG2) * (1.0 / CG2) - rest * rest
            scale = second_g / gl.sqrt(var + norms.eps)
            shift = second_b - rest * scale
            _store_normed(
                results.second_a, stages, rounded, common, scale, shift, n, h0, GROUP, ROWS, W, ACT
            )
        if results.partial is not None:
            to = results.partial + tile.to(gl.int64) * 128 + offs
            gl.store(to, total)
            gl.store(to + 64, second)
        phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["tiles"])
def conv_resident_meeting_kernel(
    x_desc,  # [N, H, W, K] in boxes [1, 1, W, K or 64], where K is 16, 64 or 128
    w_desc,  # [9, 64, K] in boxes [1, 64, K or 64]
    beside_desc,  # [N, H, W, 64] in boxes [1, ROWS, W, 64]: the residual, or None
    y_desc,  # [N, H, W, 64] in boxes [1, STAGE, W, 64]
    # [N, H, W, 64 EXTRA1] in boxes [1, 1, W, 64], or [N, H / 2, W / 2, 2, 64 EXTRA1] in boxes
    # [1, 1, W / 2, 2, 64]: every pixel for 2x2; or None
    extra1_desc,
    extra1_w_desc,  # [1, 64, 64 EXTRA1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32 [64]: bias
    extra_bias_ptr,  # [64] or None
    emb_ptr,  # [N, 64] or None
    partial_ptr,  # [N, TILES, 2, 64] or None
    a_desc,  # [N, H, W, 64] in the boxes of y_desc
    norm_weight_ptr,  # [64]
    norm_bias_ptr,  # [64]
    second_a_desc,  # [N, H, W, 64] in the boxes of y_desc, or None
    second_weight_ptr,  # [64] of its norm
    second_bias_ptr,
    slots_ptr,  # zeros, int64 [N, 64, TILES]
    eps,
    stride_emb,
    tiles,  # N * TILES
    ROWS: gl.constexpr,  # of a tile
    STAGE: gl.constexpr,  # rows that leave at a time: ROWS, or one
    W: gl.constexpr,
    BLOCKS: gl.constexpr,  # of channels of x
    EXTRA1: gl.constexpr,
    EXTRA2: gl.constexpr,
    ACT: gl.constexpr,
    SLOTS: gl.constexpr,  # for rows of pixels
    CG: gl.constexpr,  # channels of a group
    CG2: gl.constexpr,  # of the second norm, a multiple of it
    KEEP: gl.constexpr,  # whether y is to be written
    TILES: gl.constexpr,  # of an image
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,
):
    EXTRA: gl.constexpr = EXTRA1 + EXTRA2
    gl.static_assert(EXTRA == 0 or BLOCKS == 1)
    gl.static_assert(beside_desc is None or STAGE == ROWS)
    dtype: gl.constexpr = x_desc.dtype
    K: gl.constexpr = x_desc.block_shape[3]
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(2 * K, 16)
    x_bufs = gl.allocate_shared_memory(dtype, [rows_chunks(SLOTS, W), 8, K], PIXELS)
    w_bufs = gl.allocate_shared_memory(dtype, [9 * BLOCKS + EXTRA, 1, 64, K], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2, 1, STAGE, W, 64], a_desc.layout)
    x_full, x_empty = new_barrier_pairs(SLOTS)
    w_full = new_barriers(3 * BLOCKS)
    turns = new_barriers(2)
    beside_full = turns  # without a residual unused
    if beside_desc is not None:
        beside_full = new_barriers(2)
    extra_bufs, extra_full, extra_empty = stages, turns, turns  # without extra terms unused
    if EXTRA > 0:
        extra_bufs = gl.allocate_shared_memory(
            dtype, [ROWS, 1, 1, W, 64], gl.NVMMASharedLayout(128, 16, rank=4)
        )
        extra_full, extra_empty = new_barrier_pairs(1)
    clear_margins(x_bufs, 1, SLOTS, W, num_warps)
    extra = Ring(extra_bufs, extra_full, extra_empty)
    x = Ring(x_bufs, x_full, x_empty)
    filters = Filters(w_bufs, w_full)
    filter_descs = FilterDescs(w_desc, extra1_w_desc, extra2_w_desc)
    vectors = Vectors(vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb)
    norms = _Norms(norm_weight_ptr, norm_bias_ptr, second_weight_ptr, second_bias_ptr, eps)
    results = _Results(y_desc, a_desc, second_a_desc, beside_desc, slots_ptr, partial_ptr)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    results, stages, x, extra, filters, beside_full, turns, vectors, norms, tiles,
                    TILES, role, ROWS, W, BLOCKS, EXTRA, ACT, CG, CG2, KEEP, TILES, OVERLAP,
                ),
            )
            if role < 2
            else (
                _load,
                (
                    x_desc, extra1_desc, extra2_desc, filter_descs, x, extra, filters, tiles, TILES,
                    ROWS, W, BLOCKS, EXTRA1, EXTRA2, OVERLAP,
                ),
            )
            for role in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
