"""`conv.hopper.stationary_weights` for two tensors of 64 channels side by side, of which a norm is
the first thing: a 3x3 convolution of act(norm([x1, x2])) to 64 channels.

Eighteen filters of 64 x 64 stay in shared memory, and leave room for three pairs of rows. So no
rows are kept from tile to tile: two warpgroups make the four rows of each half of each tile, see
`norm_producers`, and two others multiply, a tile each in turn. A pair goes back as soon as its rows
have been multiplied, which of the upper one is two thirds of the way.
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

from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import new_barriers, new_ring, new_turns
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .epilogue import load_bias
from .norm_producers import load_row, store_row
from .norm_rows import Norm, keep_affine, load_affine, new_affine
from .row_memory import clear_margins, pair_chunks, row_of_tap, rows_chunks
from .stationary_loads import Work
from .stationary_multiply import sums_of_rows


@gluon.jit
def _load_filters(w_desc, w_bufs, w_full):
    for r in gl.static_range(6):
        bar = w_full.index(r)
        mbarrier.expect(bar, 3 * 64 * 128)
        for s in gl.static_range(3):
            at = [r % 3 * 3 + s, 0, r // 3 * 64]
            tma_load(w_desc, at, bar, w_bufs.index(r * 3 + s))


@gluon.jit
def _make_row(
    x, place, raw, norm, q, h, FIRST: gl.constexpr, HALF: gl.constexpr, ACT: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    slope, offset = load_affine(norm, 2 * HALF + FIRST)
    slot, _ = x.acquire(place)
    store_row(x.bufs, slot, FIRST, raw, slope, offset, 2 * q - 1 + FIRST, h, ACT, W)
    x.hand_over(place)


@gluon.jit
def _make(
    x1_ptr, x2_ptr, x, norm1, norm2, work, h, FIRST: gl.constexpr, TILES_OF_X1: gl.constexpr,
    TILES_OF_X2: gl.constexpr, CG: gl.constexpr,
    W: gl.constexpr, ACT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The FIRST or second of rows h0 - 1 and h0, h0 + 1 and h0 + 2 of the first tensor, and of the
    second, for every tile."""
    row = FIRST - 1
    if OVERLAP:
        await_inputs_alone()
    last = work.first + work.count
    n = work.first // work.tiles_h
    q = work.first % work.tiles_h
    upper = load_row(x1_ptr, n, 2 * q + row, h, True, W)
    lower = load_row(x1_ptr, n, 2 * q + 2 + row, h, True, W)
    image = -1
    place = 0
    for tile in range(work.first, last):
        n = tile // work.tiles_h
        q = tile % work.tiles_h
        n_next = (tile + 1) // work.tiles_h
        q_next = (tile + 1) % work.tiles_h
        more = tile + 1 < last
        if n != image:
            image = n
            keep_affine(norm1, n, h * W, FIRST, TILES_OF_X1, CG)
            keep_affine(norm2, n, h * W, 2 + FIRST, TILES_OF_X2, CG)
        _make_row(x, place, upper, norm1, q, h, FIRST, 0, ACT, W)
        upper = load_row(x2_ptr, n, 2 * q + row, h, True, W)
        _make_row(x, place + 1, lower, norm1, q + 1, h, FIRST, 0, ACT, W)
        lower = load_row(x2_ptr, n, 2 * q + 2 + row, h, True, W)
        _make_row(x, place + 2, upper, norm2, q, h, FIRST, 1, ACT, W)
        upper = load_row(x1_ptr, n_next, 2 * q_next + row, h, more, W)
        _make_row(x, place + 3, lower, norm2, q + 1, h, FIRST, 1, ACT, W)
        lower = load_row(x1_ptr, n_next, 2 * q_next + 2 + row, h, more, W)
        place += 4


@gluon.jit
def _multiply(
    y_desc, x, w_bufs, w_full, stages, turns, bias_ptr, emb_ptr, stride_emb, partial_ptr, work,
    GROUP: gl.constexpr, W: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if OVERLAP:
        await_inputs_alone()
    offs = gl.arange(0, 64, layout=VECTOR)
    phase = 0
    for index in range(GROUP, work.count, 2):
        tile = work.first + index
        n = tile // work.tiles_h
        h0 = tile % work.tiles_h * 2
        bias = load_bias(bias_ptr, None, emb_ptr, stride_emb, n, offs)
        accs = (gl.zeros([64, W], gl.float32, LAYOUT), gl.zeros([64, W], gl.float32, LAYOUT))
        turns.wait(GROUP, phase)
        place = index * 4
        for r in gl.static_range(6):
            mbarrier.wait(w_full.index(r), 0)
            if r % 3 == 0:
                upper = x.wait(place + r // 3 * 2)
            if r % 3 == 1:
                lower = x.wait(place + r // 3 * 2 + 1)
            for s in gl.static_range(3):
                w = reinterpret(w_bufs.index(r * 3 + s), w_bufs.dtype, [64, 64], MATRIX)
                w = w.load(gl.DotOperandLayout(0, LAYOUT, 2))
                if r + s == 7:
                    turns.give(GROUP)
                out = ()
                for j in gl.static_range(2):
                    pair = upper if j + r % 3 < 2 else lower
                    row = row_of_tap(x.bufs, pair, (j + r % 3) % 2, s, W, pair_chunks(W))
                    row = row.permute((1, 0))
                    out = out + (warpgroup_mma(w, row, accs[j], is_async=True),)
                accs = out
                if r * 3 + s >= 2:
                    accs = warpgroup_mma_wait(4, deps=accs)
                if s == 1 and r == 3:  # the rows of the first tensor are multiplied
                    sync_threads()
                    x.release(place + 1)
                if s == 1 and r % 3 == 2:
                    sync_threads()
                    x.release(place + r // 3 * 2)
        accs = warpgroup_mma_wait(0, deps=accs)
        sync_threads()
        x.release(place + 3)

        to = partial_ptr + tile.to(gl.int64) * 128 + offs
        bias = bias[:, None]
        rounded = ()
        for j in gl.static_range(2):
            tma.store_wait(0)
            stage = reinterpret(stages.index(GROUP), stages.dtype, [W, 64], MATRIX)
            y = round_pairs(accs[j] + bias, stages.dtype)
            rounded = rounded + (y,)
            stage.permute((1, 0)).store(y)
            fence_async_shared()
            tma_store(y_desc, [n, h0 + j, 0, 0], stages.index(GROUP))
        total, second = sums_of_rows(rounded, 2, VECTOR)
        gl.store(to, total)
        gl.store(to + 64, second)
        phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


@gluon.jit
def _load(w_desc, w_bufs, w_full):
    _load_filters(w_desc, w_bufs, w_full)


@gluon.jit(do_not_specialize=["tiles", "tiles_h"])
def conv_stationary_weights_concat_kernel(
    x1_ptr,  # [N, H, W, 64]
    x2_ptr,  # [N, H, W, 64]
    w_desc,  # [9, 64, 128] in boxes [1, 64, 64]
    y_desc,  # [N, H, W, 64] in boxes [1, 1, W, 64]
    sums1_ptr,  # float32 [N, TILES_OF_X1, 2, 64], of x1
    sums2_ptr,  # float32 [N, TILES_OF_X2, 2, 64], of x2
    norm_weight_ptr,  # [128]
    norm_bias_ptr,  # [128]
    eps,
    table_ptr,  # float32 [N, 4, 128]: the norm's table, in place of these; or None
    bias_ptr,  # float32 [64]
    emb_ptr,  # float32 [N, 64] or None
    partial_ptr,  # float32 [N, H / 2, 2, 64]
    stride_emb,
    tiles,  # N * H / 2
    tiles_h,  # H / 2
    W: gl.constexpr,
    ACT: gl.constexpr,
    PAIRS: gl.constexpr,  # of rows in shared memory
    TILES_OF_X1: gl.constexpr,
    TILES_OF_X2: gl.constexpr,
    CG: gl.constexpr,  # channels of a group
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = y_desc.dtype
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    x_bufs = allocate_for_views(dtype, [rows_chunks(2 * PAIRS, W), 8, 64], PIXELS)
    w_bufs = gl.allocate_shared_memory(dtype, [18, 1, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2, 1, 1, W, 64], y_desc.layout)
    x = new_ring(x_bufs, PAIRS, WRITERS=2)
    w_full = new_barriers(6)
    turns = new_turns(2)
    clear_margins(x_bufs, 1, 2 * PAIRS, W, num_warps)
    first = (tiles * gl.program_id(0)) // gl.num_programs(0)
    last = (tiles * (gl.program_id(0) + 1)) // gl.num_programs(0)
    work = Work(first, last - first, tiles_h, 0)
    kept = new_affine(4)
    weight2_ptr, bias2_ptr, table2_ptr = norm_weight_ptr, norm_bias_ptr, table_ptr
    if table_ptr is None:
        weight2_ptr += 64
        bias2_ptr += 64
    else:
        table2_ptr += 64
    norm1 = Norm(
        sums1_ptr, norm_weight_ptr, norm_bias_ptr, None, None, None, None, eps, kept, table_ptr, 128
    )
    norm2 = Norm(
        sums2_ptr, weight2_ptr, bias2_ptr, None, None, None, None, eps, kept, table2_ptr, 128
    )
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y_desc, x, w_bufs, w_full, stages, turns, bias_ptr, emb_ptr, stride_emb,
                    partial_ptr, work, role, W, OVERLAP,
                ),
            )
            if role < 2
            else (
                _make,
                (
                    x1_ptr, x2_ptr, x, norm1, norm2, work, tiles_h * 2, role - 2,
                    TILES_OF_X1, TILES_OF_X2, CG, W, ACT, OVERLAP,
                ),
            )
            if role < 4
            else (_load, (w_desc, w_bufs, w_full))
            for role in (0, 1, 2, 3, 4)
        ],
        [4, 4, 4, 1],
        [144, 80, 80, 24],
    )  # fmt: skip
