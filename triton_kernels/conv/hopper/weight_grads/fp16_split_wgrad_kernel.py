"""The kernel of `conv.hopper.fp16_split_wgrad`: that of `row_wgrad`, also for operands in two
parts.

A tile is 128 pixels, whole rows, of each part of x and of dy. Three warpgroups take a row of the
filter each. In two parts there are three products of 32 pixels for each of its taps, which are
added up by themselves before they get to the sum: tensor cores round every addition towards zero.
While one warpgroup adds, the others multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ....hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load, view_from
from ....hopper.pipeline import new_ring
from ....runtime.dependent_launch import await_inputs
from ..row_memory import clear_margins, row_from, rows_chunks
from .wgrad_pieces import place_in_rows

PIXELS = gl.constexpr(128)  # of a tile


@gluon.constexpr_function
def part_chunks(w):
    """Size of a part of x: the rows of a tile, and those above and below it."""
    return rows_chunks(128 // w + 2, w)


@gluon.jit
def _load_part(
    x_desc, dy_desc, x_bufs, dy_bufs, bar, n, h0, co0, ci0, place,
    W: gl.constexpr, IMAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = PIXELS // W
    at = place_in_rows(n, h0, 0, co0, IMAGES)
    tma_load(dy_desc, at, bar, dy_bufs.index(place))
    for j in gl.static_range(ROWS + 2):
        row = row_from(x_bufs, place, j, W, part_chunks(W), IMAGES)
        tma_load(x_desc, place_in_rows(n, h0 + j - 1, 0, ci0, IMAGES), bar, row)


@gluon.jit
def _load(
    x_desc, x_small_desc, dy_desc, dy_small_desc, ring, first, last,
    co0, ci0, tiles_h, W: gl.constexpr, IMAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = PIXELS // W
    PARTS: gl.constexpr = 1 if x_small_desc is None else 2
    BYTES: gl.constexpr = PARTS * ((ROWS + 2) * W + PIXELS) * 128
    x_bufs, dy_bufs = ring.bufs
    for tile in range(first, last):
        n = tile // tiles_h * IMAGES
        h0 = tile % tiles_h * ROWS
        stage, bar = ring.acquire(tile - first, BYTES)
        _load_part(x_desc, dy_desc, x_bufs, dy_bufs, bar, n, h0, co0, ci0, stage * PARTS, W, IMAGES)
        if PARTS == 2:
            _load_part(
                x_small_desc, dy_small_desc, x_bufs, dy_bufs, bar, n, h0, co0, ci0, stage * 2 + 1,
                W, IMAGES,
            )  # fmt: skip


@gluon.jit
def _pixels(
    x_bufs, stage, part: gl.constexpr, k, i: gl.constexpr, R: gl.constexpr, s: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, IMAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Of a part of x those that a tap sees at STEP pixels of a tile, from 32 k + i STEP on."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pixels = reinterpret(x_bufs, x_bufs.dtype, [x_bufs.shape[0] * 8, 64], FLAT)
    PART: gl.constexpr = part_chunks(W) * 8
    ROW: gl.constexpr = W + 8
    PIXEL: gl.constexpr = part * PART + (R + i) * ROW + 8 + (s - 1) * IMAGES
    # Where 32 pixels begin: a stage, rows of it, and a place in a row.
    ACROSS: gl.constexpr = max(W // 32, 1)
    ROWS: gl.constexpr = 32 // STEP  # of 32 pixels
    STEPS: gl.constexpr = (PARTS * PART, ROWS * ROW, 32)
    COUNTS: gl.constexpr = (pixels.shape[0] // (PARTS * PART), 4 // ACROSS, ACROSS)
    first = (stage * STEPS[0], k // ACROSS * STEPS[1], k % ACROSS * STEPS[2])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return view_from(pixels, first, [STEP, 64], MATRIX, PIXEL, STEPS, COUNTS)


@gluon.jit
def _add_tap(
    acc, dy, dy_small, x_bufs, stage, k, R: gl.constexpr, s: gl.constexpr,
    W: gl.constexpr, IMAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """acc + the three products of 32 pixels, from 32 k on."""
    LAYOUT: gl.constexpr = acc.type.layout
    part = gl.zeros([64, 64], gl.float32, LAYOUT)
    for i in gl.static_range(32 // STEP):
        x = _pixels(x_bufs, stage, 0, k, i, R, s, 2, W, IMAGES, STEP)
        part = warpgroup_mma(dy_small[i], x, part, use_acc=i > 0, is_async=True)
    for i in gl.static_range(32 // STEP):
        x = _pixels(x_bufs, stage, 1, k, i, R, s, 2, W, IMAGES, STEP)
        part = warpgroup_mma(dy[i], x, part, is_async=True)
    for i in gl.static_range(32 // STEP):
        x = _pixels(x_bufs, stage, 0, k, i, R, s, 2, W, IMAGES, STEP)
        part = warpgroup_mma(dy[i], x, part, is_async=True)
    return acc + warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def _begin_tap(
    acc, dy, x_bufs, stage, k, R: gl.constexpr, s: gl.constexpr, W: gl.constexpr,
    IMAGES: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """acc + the one product of 32 pixels, begun but not waited for."""
    for i in gl.static_range(32 // STEP):
        x = _pixels(x_bufs, stage, 0, k, i, R, s, 1, W, IMAGES, STEP)
        acc = warpgroup_mma(dy[i], x, acc, is_async=True)
    return acc


@gluon.jit
def _gradients(dy_bufs, part, k, LAYOUT: gl.constexpr, STEP: gl.constexpr):
    """Of a part of dy 32 pixels, from 32 k on, in registers: [64 channels, STEP] each."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    COUNT: gl.constexpr = dy_bufs.shape[0] * (PIXELS // STEP)
    pieces = reinterpret(dy_bufs, dy_bufs.dtype, [COUNT, STEP, 64], MATRIX)
    found = ()
    for i in gl.static_range(32 // STEP):
        piece = pieces.index(part * (PIXELS // STEP) + k * (32 // STEP) + i).permute((1, 0))
        found = found + (piece.load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return found


@gluon.jit
def _accumulate(
    R: gl.constexpr, part_ptr, x_factors_ptr, dy_factors_ptr, ring, first, last, CI,
    PARTS: gl.constexpr, W: gl.constexpr, IMAGES: gl.constexpr,
):  # fmt: skip
    """The three taps of row R of the filter."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    STEP: gl.constexpr = min(W, 32)
    x_bufs, dy_bufs = ring.bufs
    accs = ()
    for _ in gl.static_range(3):
        accs = accs + (gl.zeros([64, 64], gl.float32, LAYOUT),)
    for tile in range(first, last):
        stage = ring.wait(tile - first)
        for k in range(PIXELS // 32):
            dy = _gradients(dy_bufs, stage * PARTS, k, LAYOUT, STEP)
            if PARTS == 2:
                dy_small = _gradients(dy_bufs, stage * 2 + 1, k, LAYOUT, STEP)
            taps = ()
            for s in gl.static_range(3):
                if PARTS == 2:
                    acc = _add_tap(accs[s], dy, dy_small, x_bufs, stage, k, R, s, W, IMAGES, STEP)
                else:
                    acc = _begin_tap(accs[s], dy, x_bufs, stage, k, R, s, W, IMAGES, STEP)
                taps = taps + (acc,)
            accs = taps
            if PARTS == 1:
                pending: gl.constexpr = 3 * (32 // STEP)  # the 32 pixels before are done
                accs = warpgroup_mma_wait(pending, deps=accs)
        if PARTS == 1:
            accs = warpgroup_mma_wait(0, deps=accs)
        sync_threads()
        ring.release(tile - first)
    offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_ci = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    factor = gl.load(dy_factors_ptr + offs_co)[:, None] * gl.load(x_factors_ptr + offs_ci)[None, :]
    to = part_ptr + (R * 3 * CI + offs_co * 9 * CI)[:, None] + offs_ci[None, :]
    dtype: gl.constexpr = part_ptr.dtype.element_ty
    for s in gl.static_range(3):
        gl.store(to + s * CI, (accs[s] * factor * factor).to(dtype))


@gluon.jit(do_not_specialize=["tiles"])
def conv_fp16_split_wgrad_kernel(
    x_desc,  # float16 [N, H, W, CI] in boxes [1, 1, W, 64]; [H, W / IMAGES, N, CI] in boxes of one
    x_small_desc,  # row; the second part, or None: one product
    dy_desc,  # float16 [N, H, W, CO] in boxes of 128 pixels, or in that order too
    dy_small_desc,
    part_ptr,  # [splits, CO, 9, CI]
    factors_ptr,  # float32 [CI + CO], twice of a sum
    CI,
    CO,
    tiles,  # of 128 pixels
    tiles_h,  # of them one below the other
    W: gl.constexpr,  # pixels of a row, of all its images
    IMAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    PARTS: gl.constexpr = 1 if x_small_desc is None else 2
    PLACES: gl.constexpr = STAGES * PARTS
    x_bufs = allocate_for_views(dtype, [PLACES * part_chunks(W), 8, 64], MATRIX)
    dy_bufs = gl.allocate_shared_memory(dtype, [PLACES] + dy_desc.block_shape, dy_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, 3)
    clear_margins(x_bufs, PLACES, PIXELS // W + 2, W, num_warps)
    await_inputs()

    blocks = CI // 64 * (CO // 64)
    block = gl.program_id(0) % blocks
    split = gl.program_id(0) // blocks
    splits = gl.num_programs(0) // blocks
    ci0 = block % (CI // 64) * 64
    co0 = block // (CI // 64) * 64
    first = (tiles * split) // splits
    last = (tiles * (split + 1)) // splits
    part_ptr += split.to(gl.int64) * (CO * 9 * CI) + co0 * 9 * CI + ci0
    # What loads comes first: the compiler gives the first role no more registers than the mean.
    gl.warp_specialize(
        [
            (
                _load,
                (
                    x_desc, x_small_desc, dy_desc, dy_small_desc, ring, first, last, co0, ci0,
                    tiles_h, W, IMAGES,
                ),
            )
            if row < 0
            else (
                _accumulate,
                (
                    row, part_ptr, factors_ptr + ci0, factors_ptr + CI + co0, ring, first, last,
                    CI, PARTS, W, IMAGES,
                ),
            )
            for row in (-1, 0, 1, 2)
        ],
        [4, 4, 4],
        [160, 160, 160],
    )  # fmt: skip
