"""The kernel of `conv.gluon.rows` for 3x3 convolutions of 64 channels, or their input gradients.

The filters stay in shared memory, which 64 channels in and 64 out leave room for. A program takes
successive tiles of two rows of an image, so every row is fetched once: they pass through a ring, in
pairs, and a tile uses two pairs, of which the next tile uses the second one again.

Three warpgroups take every third tile. They have the tensor cores in turn (`turns`), so that the
epilogues of two fall into the products of the third. Where 1x1 convolutions of other tensors are
added there are two, since the memory is needed for those: blocks of 64 channels of a tile, which
come and go between the rows of the filter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...activations import activate_affine_grad
from ...gluon.pairs import round_pairs, widen_pairs
from ...gluon.pipeline import (
    give_back,
    new_barrier_pairs,
    sync_threads,
    wait_empty,
    wait_full,
)
from .epilogue import load_beside, load_bias, load_table
from .rows_memory import clear_margins, row_from, row_of_tap, rows_chunks

# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _load_extra(
    desc1, desc2, extra_bufs, full, empty, step, n, h0,
    BLOCK: gl.constexpr, EXTRA1: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A block of channels of the tensors of which 1x1 convolutions are added."""
    slot, bar = wait_empty(full, empty, step, 2, 2 * W * 128)
    for j in gl.static_range(2):
        buf = extra_bufs.index(slot * 2 + j)
        if BLOCK < EXTRA1:
            tma.async_copy_global_to_shared(desc1, [n, h0 + j, 0, BLOCK * 64], bar, buf)
        else:
            at = [n, h0 + j, 0, (BLOCK - EXTRA1) * 64]
            tma.async_copy_global_to_shared(desc2, at, bar, buf)


@gluon.jit
def _load(
    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
    x_bufs, w_bufs, extra_bufs, x_full, x_empty, w_full, extra_full, extra_empty,
    first, last, tiles_h, c0,
    W: gl.constexpr, DGRAD: gl.constexpr, PAIRS: gl.constexpr,
    EXTRA1: gl.constexpr, EXTRA2: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = x_bufs.shape[2]
    bar = w_full.index(0)
    mbarrier.expect(bar, (9 * K + (EXTRA1 + EXTRA2) * 64) * 128)
    for i in gl.static_range(EXTRA1):
        buf = w_bufs.index(9 + i)
        tma.async_copy_global_to_shared(extra1_w_desc, [0, c0, i * 64], bar, buf)
    for i in gl.static_range(EXTRA2):
        buf = w_bufs.index(9 + EXTRA1 + i)
        tma.async_copy_global_to_shared(extra2_w_desc, [0, c0, i * 64], bar, buf)
    for tap in gl.static_range(9):
        if DGRAD:
            tma.async_copy_global_to_shared(w_desc, [8 - tap, 0, c0], bar, w_bufs.index(tap))
        else:
            tma.async_copy_global_to_shared(w_desc, [tap, c0, 0], bar, w_bufs.index(tap))
    place = 0
    step = 0
    for tile in range(first, last):
        n = tile // tiles_h
        h0 = tile % tiles_h * 2
        known = gl.where((tile == first) | (h0 == 0), 0, 1)
        for i in range(known, 2):
            slot, bar = wait_empty(x_full, x_empty, place, PAIRS, 2 * W * 2 * K)
            for j in gl.static_range(2):
                at = [n, h0 - 1 + 2 * i + j, 0, 0]
                row = row_from(x_bufs, 0, slot * 2 + j, W)
                tma.async_copy_global_to_shared(x_desc, at, bar, row)
            place += 1
        for i in gl.static_range(EXTRA1 + EXTRA2):
            _load_extra(
                extra1_desc, extra2_desc, extra_bufs, extra_full, extra_empty, step + i, n, h0,
                i, EXTRA1, W,
            )  # fmt: skip
        step += EXTRA1 + EXTRA2


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _stage(stages, GROUP: gl.constexpr, j: gl.constexpr, W: gl.constexpr):
    """[64 channels, W pixels] of a row of the result."""
    buf = stages.index(GROUP * 2 + j)
    return buf._reinterpret(buf.dtype, [W, 64], gl.NVMMASharedLayout(128, 16)).permute((1, 0))


@gluon.jit
def _filters(w_bufs, tap: gl.constexpr, DGRAD: gl.constexpr, LAYOUT: gl.constexpr):
    """Those of a tap, [64 channels of the result, K]."""
    w = w_bufs.index(tap)
    ROWS: gl.constexpr = w_bufs.shape[2]
    COLUMNS: gl.constexpr = w_bufs.shape[3]
    w = w._reinterpret(w.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16))
    if DGRAD:
        w = w.permute((1, 0))
    return w.load(gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _multiply_extra(
    acc0, acc1, extra_bufs, w_bufs, full, step, BLOCK: gl.constexpr, W: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The products of one block of channels with its 1x1 filters, begun but not waited for."""
    slot = wait_full(full, step, 2)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w = w_bufs.index(9 + BLOCK)._reinterpret(w_bufs.dtype, [64, 64], MATRIX)
    w = w.load(gl.DotOperandLayout(0, LAYOUT, 2))
    x0 = extra_bufs.index(slot * 2)._reinterpret(w_bufs.dtype, [W, 64], MATRIX)
    x1 = extra_bufs.index(slot * 2 + 1)._reinterpret(w_bufs.dtype, [W, 64], MATRIX)
    acc0 = warpgroup_mma(w, x0.permute((1, 0)), acc0, is_async=True)
    acc1 = warpgroup_mma(w, x1.permute((1, 0)), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def _multiply(
    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, extra_bufs, stages, x_full, x_empty, w_full,
    extra_full, extra_empty, beside_full, turns, vectors_ptr, extra_bias_ptr, emb_ptr, partial_ptr,
    border, stride_emb, first, last, tiles_h, c0, C,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr,
    ACT: gl.constexpr, PAIRS: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HAS_BESIDE: gl.constexpr = beside1_desc is not None
    FIRST: gl.constexpr = 1 if GROUP == 0 else 0
    STAY: gl.constexpr = x_bufs.shape[2] == 16  # filters in registers: four a tap
    phase = 0
    offs = c0 + gl.arange(0, 64, layout=VECTOR)
    first_n = first // tiles_h
    filters = ()
    if STAY:
        mbarrier.wait(w_full.index(0), 0)
        for tap in gl.static_range(9):
            filters = filters + (_filters(w_bufs, tap, DGRAD, LAYOUT),)
    for tile in range(first + GROUP, last, GROUPS):
        n = tile // tiles_h
        h = tile % tiles_h
        if HAS_BESIDE:
            tma.store_wait(0)  # of the last tile, from where this writes to
            bar = beside_full.index(GROUP)
            load_beside(beside1_desc, beside2_desc, stages, bar, n, h * 2, c0, border, GROUP, 2, W)
        if DGRAD:
            mean, rstd, g, b = load_table(vectors_ptr, n, offs, C)
        else:
            bias = load_bias(vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs)

        place = tile - first + n - first_n
        above = place % PAIRS
        below = (place + 1) % PAIRS
        acc0 = gl.zeros([64, W], gl.float32, LAYOUT)
        acc1 = gl.zeros([64, W], gl.float32, LAYOUT)
        if not STAY:
            mbarrier.wait(w_full.index(0), 0)
        mbarrier.wait(turns.index(GROUP), phase ^ FIRST)
        mbarrier.wait(x_full.index(above), place // PAIRS & 1)
        mbarrier.wait(x_full.index(below), (place + 1) // PAIRS & 1)
        step = (tile - first) * EXTRA
        for r in gl.static_range(3):
            if r < EXTRA:
                acc0, acc1 = _multiply_extra(
                    acc0, acc1, extra_bufs, w_bufs, extra_full, step + r, r, W, LAYOUT
                )
                if r > 0:
                    acc0, acc1 = warpgroup_mma_wait(4, deps=(acc0, acc1))
            for s in gl.static_range(3):
                if STAY:
                    w = filters[r * 3 + s]
                else:
                    w = _filters(w_bufs, r * 3 + s, DGRAD, LAYOUT)
                if r == 0:
                    x0 = row_of_tap(x_bufs, 0, above * 2, s, W)
                    x1 = row_of_tap(x_bufs, 0, above * 2 + 1, s, W)
                elif r == 1:
                    x0 = row_of_tap(x_bufs, 0, above * 2 + 1, s, W)
                    x1 = row_of_tap(x_bufs, 0, below * 2, s, W)
                else:
                    x0 = row_of_tap(x_bufs, 0, below * 2, s, W)
                    x1 = row_of_tap(x_bufs, 0, below * 2 + 1, s, W)
                if r + s == 4:  # two taps are under way, and the last one is about to be
                    mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)
                acc0 = warpgroup_mma(w, x0.permute((1, 0)), acc0, is_async=True)
                acc1 = warpgroup_mma(w, x1.permute((1, 0)), acc1, is_async=True)
                # filters of three taps are in registers
                if not STAY and (r * 3 + s > 1 or r < EXTRA):
                    acc0, acc1 = warpgroup_mma_wait(4, deps=(acc0, acc1))
                if r < EXTRA and s == 1:  # that term has been waited for
                    sync_threads()
                    give_back(extra_empty, step + r, 2)
        acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        sync_threads()
        # two tiles use a pair of rows, or one at the ends of an image and of what this program does
        mbarrier.arrive(x_empty.index(above), count=1)
        mbarrier.arrive(x_empty.index(above), count=1, pred=(h == 0) | (tile == first))
        mbarrier.arrive(x_empty.index(below), count=1)
        mbarrier.arrive(x_empty.index(below), count=1, pred=(h + 1 == tiles_h) | (tile + 1 == last))

        if HAS_BESIDE:
            mbarrier.wait(beside_full.index(GROUP), phase)
        else:
            tma.store_wait(0)
        to = partial_ptr
        if partial_ptr is not None:
            to += tile.to(gl.int64) * 2 * C + offs
        if DGRAD:
            shift = -mean * rstd
            total = gl.zeros([64], gl.float32, VECTOR)
            second = gl.zeros([64], gl.float32, VECTOR)
            for j in gl.static_range(2):
                stage = _stage(stages, GROUP, j, W)
                xhat = widen_pairs(stage.load(LAYOUT)) * rstd[:, None] + shift[:, None]
                slope = activate_affine_grad(xhat, g[:, None], b[:, None], ACT)
                dz = (acc0, acc1)[j] * slope
                total += gl.sum(dz, axis=1)
                second += gl.sum(dz * xhat, axis=1)
                stage.store(round_pairs(dz, stages.dtype))
        else:
            acc0 += bias[:, None]
            acc1 += bias[:, None]
            stage0 = _stage(stages, GROUP, 0, W)
            stage1 = _stage(stages, GROUP, 1, W)
            if HAS_BESIDE:
                acc0 += widen_pairs(stage0.load(LAYOUT))
                acc1 += widen_pairs(stage1.load(LAYOUT))
            y0 = round_pairs(acc0, stages.dtype)
            y1 = round_pairs(acc1, stages.dtype)
            stage0.store(y0)
            stage1.store(y1)
        fence_async_shared()
        for j in gl.static_range(2):
            tma.async_copy_shared_to_global(
                y_desc, [n, h * 2 + j, 0, c0], stages.index(GROUP * 2 + j)
            )
        if partial_ptr is not None:
            if not DGRAD:
                # about the mean of the tile, since a difference of large sums would cancel
                total = gl.sum(widen_pairs(y0) + widen_pairs(y1), axis=1)
                mean = (total / (2 * W))[:, None]
                d0 = widen_pairs(y0) - mean
                d1 = widen_pairs(y1) - mean
                second = gl.sum(d0 * d0 + d1 * d1, axis=1)
            gl.store(to, total)
            gl.store(to + C, second)
        phase ^= 1
    tma.store_wait(0)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["tiles", "tiles_h"])
def conv_resident_kernel(
    x_desc,  # [N, H, W, K] in boxes [1, 1, W, K], where K is 64 or 16: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, K]; DGRAD: [1, K, 64]
    beside1_desc,  # [N, H, W, C] in boxes [1, 1, W, 64], or None: the residual; DGRAD: x
    beside2_desc,  # the second of two tensors that x concatenates, or None
    y_desc,  # [N, H, W, C] in boxes [1, 1, W, 64]: y, or dz
    extra1_desc,  # [N, H, W, 64 EXTRA1] in boxes [1, 1, W, 64], or None
    extra1_w_desc,  # [1, C, 64 EXTRA1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, H / 2, 2, C] or None
    border,  # channels of the first of two tensors
    stride_emb,
    tiles,  # N * H / 2
    tiles_h,  # H / 2
    C,
    W: gl.constexpr,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    PAIRS: gl.constexpr,  # of rows in shared memory
    EXTRA1: gl.constexpr,
    EXTRA2: gl.constexpr,
    num_warps: gl.constexpr,
):
    EXTRA: gl.constexpr = EXTRA1 + EXTRA2
    GROUPS: gl.constexpr = 2 if EXTRA > 0 else 3
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = x_desc.dtype
    K: gl.constexpr = x_desc.block_shape[3]
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(2 * K, 16)
    FILTER_ROWS: gl.constexpr = w_desc.block_shape[1]
    FILTER_COLUMNS: gl.constexpr = w_desc.block_shape[2]
    x_bufs = gl.allocate_shared_memory(dtype, [rows_chunks(2 * PAIRS, W), 8, K], PIXELS)
    w_bufs = gl.allocate_shared_memory(
        dtype, [9 + EXTRA, 1, FILTER_ROWS, FILTER_COLUMNS], w_desc.layout
    )
    stages = gl.allocate_shared_memory(dtype, [GROUPS * 2, 1, 1, W, 64], y_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BAR)
    x_empty = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BAR)
    w_full = gl.allocate_shared_memory(gl.int64, [1, 1], BAR)
    beside_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    extra_bufs, extra_full, extra_empty = stages, turns, turns  # without extra terms unused
    if EXTRA > 0:
        extra_bufs = gl.allocate_shared_memory(dtype, [2 * 2, 1, 1, W, 64], y_desc.layout)
        extra_full, extra_empty = new_barrier_pairs(2)
    for i in gl.static_range(PAIRS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    mbarrier.init(w_full.index(0), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(beside_full.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    clear_margins(x_bufs, 1, 2 * PAIRS, W, num_warps)

    # programs that are neighbours do the same tiles of other channels
    blocks_c = C // 64
    c0 = gl.program_id(0) % blocks_c * 64
    part = gl.program_id(0) // blocks_c
    parts = gl.num_programs(0) // blocks_c
    first = (tiles * part) // parts
    last = (tiles * (part + 1)) // parts
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, extra_bufs, stages,
                    x_full, x_empty, w_full, extra_full, extra_empty, beside_full, turns,
                    vectors_ptr, extra_bias_ptr, emb_ptr, partial_ptr, border, stride_emb,
                    first, last, tiles_h, c0, C, role, GROUPS, W, DGRAD, ACT, PAIRS, EXTRA,
                ),
            )
            if role < GROUPS
            else (
                _load,
                (
                    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
                    x_bufs, w_bufs, extra_bufs, x_full, x_empty, w_full, extra_full,
                    extra_empty, first, last, tiles_h, c0, W, DGRAD, PAIRS, EXTRA1, EXTRA2,
                ),
            )
            for role in ((0, 1, 2) if GROUPS == 2 else (0, 1, 2, 3))
        ],
        [4, 1] if GROUPS == 2 else [4, 4, 1],
        [240, 24] if GROUPS == 2 else [160, 160, 24],
    )  # fmt: skip
