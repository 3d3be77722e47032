"""The kernel of `conv.hopper.row_mma`: a 3x3 convolution, or its input gradient, and what surrounds
it.

A program has three parts that run side by side. `_load` is one warp that fills two rings in shared
memory: blocks of 64 channels of the pixels of a tile, and filters of one tap. `_multiply`, twice,
is a warpgroup that takes every other tile. They have the tensor cores in turn (`turns`), so that
the epilogue of one falls into the products of the other.
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
from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...hopper.pipeline import (
    give_back,
    new_barrier_pairs,
    new_barriers,
    wait_empty,
    wait_full,
    wait_full_both,
)
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .epilogue import load_beside, load_bias, load_table
from .row_memory import clear_margins, row_from, row_of_tap, rows_chunks


@gluon.constexpr_function
def block_chunks(w):
    """Size of a block in chunks of 8 pixels: 256 of a tile, and the rows above and below it."""
    return rows_chunks(256 // w + 2, w)


# --- loads ----------------------------------------------------------------------------------------


@gluon.jit
def _load_filters(
    w_desc, tap, direction: gl.constexpr, COUNT: gl.constexpr, row, column,
    w_bufs, w_full, w_empty, step, STEPS: gl.constexpr,
):  # fmt: skip
    """The filters of taps `tap`, `tap + direction`, ..."""
    slot, bar = wait_empty(w_full, w_empty, step, STEPS, COUNT * 64 * 128)
    for i in gl.static_range(COUNT):
        buf = w_bufs.index(slot * 3 + i)
        tma_load(w_desc, [tap + i * direction, row, column], bar, buf)


@gluon.jit
def _load_pixels(
    x_desc, x_bufs, x_full, x_empty, block, n, h0, k0,
    HALO: gl.constexpr, W: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The rows of a tile, with HALO = 1 those above and below too."""
    ROWS: gl.constexpr = 256 // W + 2 * HALO
    stage, bar = wait_empty(x_full, x_empty, block, BLOCKS, ROWS * W * 128)
    for j in gl.static_range(ROWS):
        row = row_from(x_bufs, stage * block_chunks(W), j + 1 - HALO, W)
        tma_load(x_desc, [n, h0 + j - HALO, 0, k0], bar, row)


@gluon.jit
def _load_pointwise(
    x_desc, w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, block, step, n, h0, c0, C,
    W: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    for k0 in range(0, C, 64):
        _load_pixels(x_desc, x_bufs, x_full, x_empty, block, n, h0, k0, 0, W, BLOCKS)
        _load_filters(w_desc, 0, 1, 1, c0, k0, w_bufs, w_full, w_empty, step, STEPS)
        block += 1
        step += 1
    return block, step


@gluon.jit
def _load(
    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
    x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
    K, C1, C2, first, stride, tiles, tiles_h, c0,
    W: gl.constexpr, DGRAD: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    block = 0
    step = 0
    for tile in range(first, tiles, stride):
        n = tile // tiles_h
        h0 = tile % tiles_h * (256 // W)
        for k0 in range(0, K, 64):
            _load_pixels(x_desc, x_bufs, x_full, x_empty, block, n, h0, k0, 1, W, BLOCKS)
            block += 1
            for r in range(3):
                if DGRAD:
                    _load_filters(
                        w_desc, 8 - 3 * r, -1, 3, k0, c0, w_bufs, w_full, w_empty, step, STEPS
                    )
                else:
                    _load_filters(w_desc, 3 * r, 1, 3, c0, k0, w_bufs, w_full, w_empty, step, STEPS)
                step += 1
        if extra1_desc is not None:
            block, step = _load_pointwise(
                extra1_desc, extra1_w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
                block, step, n, h0, c0, C1, W, BLOCKS, STEPS,
            )  # fmt: skip
        if extra2_desc is not None:
            block, step = _load_pointwise(
                extra2_desc, extra2_w_desc, x_bufs, w_bufs, x_full, x_empty, w_full, w_empty,
                block, step, n, h0, c0, C2, W, BLOCKS, STEPS,
            )  # fmt: skip


# --- products and epilogue ------------------------------------------------------------------------


@gluon.jit
def _multiply_tap(
    accs, x_bufs, w_buf, stage, r: gl.constexpr, s: gl.constexpr,
    W: gl.constexpr, DGRAD: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The products of one filter with every row of the tile, begun but not waited for."""
    w = reinterpret(w_buf, w_buf.dtype, [64, 64], gl.NVMMASharedLayout(128, 16))
    if DGRAD:
        w = w.permute((1, 0))
    w = w.load(gl.DotOperandLayout(0, LAYOUT, 2))
    out = ()
    for j in gl.static_range(256 // W):
        x = row_of_tap(x_bufs, stage * block_chunks(W), j + r, s, W).permute((1, 0))
        out = out + (warpgroup_mma(w, x, accs[j], is_async=True),)
    return out


@gluon.jit
def _multiply_block(
    accs, x_bufs, w_bufs, w_full, w_empty, stage, step,
    W: gl.constexpr, DGRAD: gl.constexpr, LAYOUT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Nine taps, of which the last is still under way at the end; its filters are not given back.
    This is unrolled, or ptxas would not let products and loads overlap."""
    for r in gl.static_range(3):
        slot = wait_full(w_full, step + r, STEPS)
        for s in gl.static_range(3):
            accs = _multiply_tap(
                accs, x_bufs, w_bufs.index(slot * 3 + s), stage, r, s, W, DGRAD, LAYOUT
            )
            if r + s > 0:
                accs = warpgroup_mma_wait(256 // W, deps=accs)  # the tap before is done
            if r > 0 and s == 0:
                sync_threads()
                give_back(w_empty, step + r - 1, STEPS)
    return accs


@gluon.jit
def _multiply(
    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, stages, x_full, x_empty, w_full, w_empty,
    beside_full, turns, vectors_ptr, extra_bias_ptr, emb_ptr, partial_ptr,
    K, extra_blocks, border, stride_emb, first, stride, tiles, tiles_h, c0, C,
    GROUP: gl.constexpr, W: gl.constexpr, DGRAD: gl.constexpr, HAS_EXTRA: gl.constexpr,
    ACT: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 256 // W
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HAS_BESIDE: gl.constexpr = beside1_desc is not None
    k_blocks = K // 64
    tile_blocks = k_blocks + extra_blocks
    tile_steps = k_blocks * 3 + extra_blocks
    block = GROUP * tile_blocks
    step = GROUP * tile_steps
    phase = 0
    offs = c0 + gl.arange(0, 64, layout=VECTOR)
    for tile in range(first + GROUP * stride, tiles, 2 * stride):
        n = tile // tiles_h
        h0 = tile % tiles_h * ROWS
        if HAS_BESIDE:
            tma.store_wait(0)  # of the last tile, from where this writes to
            bar = beside_full.index(GROUP)
            load_beside(beside1_desc, beside2_desc, stages, bar, n, h0, c0, border, GROUP, ROWS, W)

        accs = ()
        for _ in gl.static_range(ROWS):
            accs = accs + (gl.zeros([64, W], gl.float32, LAYOUT),)
        mbarrier.wait(turns.index(GROUP), phase ^ (1 - GROUP))
        for i in range(k_blocks):
            stage = wait_full(x_full, block, BLOCKS)
            accs = _multiply_block(
                accs, x_bufs, w_bufs, w_full, w_empty, stage, step, W, DGRAD, LAYOUT, STEPS
            )
            mbarrier.arrive(turns.index(1 - GROUP), count=1, pred=i + 1 == tile_blocks)
            accs = warpgroup_mma_wait(0, deps=accs)
            sync_threads()
            give_back(w_empty, step + 2, STEPS)
            give_back(x_empty, block, BLOCKS)
            block += 1
            step += 3
        if HAS_EXTRA:
            for i in range(extra_blocks):
                stage, slot = wait_full_both(x_full, block, BLOCKS, w_full, step, STEPS)
                accs = _multiply_tap(
                    accs, x_bufs, w_bufs.index(slot * 3), stage, 1, 1, W, False, LAYOUT
                )
                mbarrier.arrive(turns.index(1 - GROUP), count=1, pred=i + 1 == extra_blocks)
                accs = warpgroup_mma_wait(0, deps=accs)
                sync_threads()
                give_back(w_empty, step, STEPS)
                give_back(x_empty, block, BLOCKS)
                block += 1
                step += 1
        block += tile_blocks  # those of the other warpgroup
        step += tile_steps

        total = gl.zeros([64], gl.float32, VECTOR)
        second = gl.zeros([64], gl.float32, VECTOR)
        rounded = ()
        if DGRAD:
            mean, rstd, g, b = load_table(vectors_ptr, n, offs, C)
            shift = (-mean * rstd)[:, None]
            rstd = rstd[:, None]
            g = g[:, None]
            b = b[:, None]
        else:
            bias = load_bias(vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs)[:, None]
        if HAS_BESIDE:
            mbarrier.wait(beside_full.index(GROUP), phase)
        else:
            tma.store_wait(0)
        for j in gl.static_range(ROWS):
            buf = stages.index(GROUP * ROWS + j)
            buf = reinterpret(buf, buf.dtype, [W, 64], gl.NVMMASharedLayout(128, 16))
            buf = buf.permute((1, 0))
            if DGRAD:
                xhat = widen_pairs(buf.load(LAYOUT)) * rstd + shift
                dz = accs[j] * activate_affine_grad(xhat, g, b, ACT)
                total += gl.sum(dz, axis=1)
                second += gl.sum(dz * xhat, axis=1)
                buf.store(round_pairs(dz, buf.dtype))
            else:
                y = accs[j] + bias
                if HAS_BESIDE:
                    y += widen_pairs(buf.load(LAYOUT))
                y = round_pairs(y, buf.dtype)
                buf.store(y)
                if partial_ptr is not None:
                    total += gl.sum(y.to(gl.float32), axis=1)
                    rounded = rounded + (y,)
        fence_async_shared()
        for j in gl.static_range(ROWS):
            tma_store(y_desc, [n, h0 + j, 0, c0], stages.index(GROUP * ROWS + j))
        if partial_ptr is not None:
            if not DGRAD:
                # about the mean of the tile, since a difference of large sums would cancel
                mean = (total / 256)[:, None]
                for j in gl.static_range(ROWS):
                    d = rounded[j].to(gl.float32) - mean
                    second += gl.sum(d * d, axis=1)
            to = partial_ptr + tile.to(gl.int64) * 2 * C + offs
            gl.store(to, total)
            gl.store(to + C, second)
        phase ^= 1
    if OVERLAP:
        begin_next()
    tma.store_wait(0)


# --- the whole ------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["N", "H"])
def conv_rows_kernel(
    x_desc,  # [N, H, W, K] in boxes [1, 1, W, 64]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64]
    beside1_desc,  # [N, H, W, C] in boxes [1, 1, W, 64], or None: the residual; DGRAD: x
    beside2_desc,  # the second of two tensors that x concatenates, or None
    y_desc,  # [N, H, W, C] in boxes [1, 1, W, 64]: y, or dz
    extra1_desc,  # [N, H, W, C1] in boxes [1, 1, W, 64], or None
    extra1_w_desc,  # [1, C, C1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, H * W / 256, 2, C] or None
    C1,
    C2,
    border,  # channels of the first of two tensors
    stride_emb,
    N,
    H,
    K,
    C,
    W: gl.constexpr,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    STEPS: gl.constexpr,  # of three filters there
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,
):
    ROWS: gl.constexpr = 256 // W
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = allocate_for_views(dtype, [BLOCKS * block_chunks(W), 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [STEPS * 3, 1, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [2 * ROWS, 1, 1, W, 64], y_desc.layout)
    x_full, x_empty = new_barrier_pairs(BLOCKS)
    w_full, w_empty = new_barrier_pairs(STEPS)
    turns = new_barriers(2)
    beside_full = turns  # without `beside` unused
    if beside1_desc is not None:
        beside_full = new_barriers(2)
    clear_margins(x_bufs, BLOCKS, ROWS + 2, W, num_warps)
    if OVERLAP:
        await_inputs_alone()

    # programs that are neighbours do neighbouring tiles of the same channels, or the same tile
    blocks_c = C // 64
    c0 = gl.program_id(0) % blocks_c * 64
    first = gl.program_id(0) // blocks_c
    stride = gl.num_programs(0) // blocks_c
    tiles_h = H // ROWS
    tiles = N * tiles_h
    HAS_EXTRA: gl.constexpr = extra1_desc is not None
    extra_blocks = (C1 + C2) // 64
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    beside1_desc, beside2_desc, y_desc, x_bufs, w_bufs, stages, x_full, x_empty,
                    w_full, w_empty, beside_full, turns, vectors_ptr, extra_bias_ptr, emb_ptr,
                    partial_ptr, K, extra_blocks, border, stride_emb, first, stride, tiles,
                    tiles_h, c0, C, role, W, DGRAD, HAS_EXTRA, ACT, BLOCKS, STEPS, OVERLAP,
                ),
            )
            if role < 2
            else (
                _load,
                (
                    x_desc, w_desc, extra1_desc, extra1_w_desc, extra2_desc, extra2_w_desc,
                    x_bufs, w_bufs, x_full, x_empty, w_full, w_empty, K, C1, C2, first, stride,
                    tiles, tiles_h, c0, W, DGRAD, BLOCKS, STEPS,
                ),
            )
            for role in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
