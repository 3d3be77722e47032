"""The weight gradients of up to four convolutions over images of one size, in one launch.

A weight gradient is a sum over pixels, of tiles of dy times tiles of x. All tiles of pixels of all
blocks of channels of all gradients make one list, of which every program takes as long a piece as
the others: the end of the sum of one block, perhaps, and the beginning of the next one's. So no
multiprocessor is idle, however many blocks there are, and of all sums together there are at most
two parts a program, which `conv.wgrad_group` adds up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...hopper.compat import allocate_for_views, sync_threads, tma_load
from ...hopper.pipeline import new_ring, wait_for
from ...hopper.roles import launch_roles
from .row_memory import block_chunks, clear_margins
from .row_wgrad import load_tile, multiply_tile, store_taps


@gluon.jit
def _first(program, blocks, tiles):
    """The first tile of a program's piece of the list."""
    return (program.to(gl.int64) * (blocks * tiles) // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _first_part(part_ptr, NUMBERS: gl.constexpr):
    """Where the first of a program's two parts goes."""
    return part_ptr + gl.program_id(0).to(gl.int64) * (2 * NUMBERS)


@gluon.jit
def _blocks(CI, CO, CI_SIZE: gl.constexpr, CO_SIZE: gl.constexpr):
    return ((CI + CI_SIZE - 1) // CI_SIZE) * ((CO + CO_SIZE - 1) // CO_SIZE)


@gluon.jit
def _ends(
    CI1, CI2, CI3, CI4, CO1, CO2, CO3, CO4,
    COUNT: gl.constexpr, CI_SIZE: gl.constexpr, CO_SIZE: gl.constexpr,
):  # fmt: skip
    """Where the blocks of each of the gradients end in the list."""
    end1 = _blocks(CI1, CO1, CI_SIZE, CO_SIZE)
    end2 = end1 + _blocks(CI2, CO2, CI_SIZE, CO_SIZE)
    end3 = end2 + _blocks(CI3, CO3, CI_SIZE, CO_SIZE) if COUNT > 2 else end2
    end4 = end3 + _blocks(CI4, CO4, CI_SIZE, CO_SIZE) if COUNT > 3 else end3
    return end1, end2, end3, end4


# --- what loads ---------------------------------------------------------------------------------


@gluon.jit
def _load_block(
    x_desc, dy_desc, ring, first, begin, end, start, block, CI, options,
    POINTS: gl.constexpr,
):  # fmt: skip
    """Of one block, whose first tile is `start` in the list, the tiles from `begin` to `end`."""
    if POINTS:
        GROUPS: gl.constexpr = options[0]
        BLOCKS: gl.constexpr = options[1]
        STEPS: gl.constexpr = options[2]
        BYTES: gl.constexpr = STEPS * (GROUPS + BLOCKS) * 64 * 128
        x_bufs, dy_bufs = ring.bufs
        ci_blocks = (CI + BLOCKS * 64 - 1) // (BLOCKS * 64)
        ci0 = block % ci_blocks * (BLOCKS * 64)
        co0 = block // ci_blocks * (GROUPS * 64)
        for tile in range(begin, end):
            stage, bar = ring.acquire(tile - first, BYTES)
            for step in gl.static_range(STEPS):
                slot = stage * STEPS + step
                pixel = ((tile - start) * STEPS + step) * 64
                for i in gl.static_range(GROUPS):
                    buf = dy_bufs.index(slot * GROUPS + i)
                    tma_load(dy_desc, [pixel, co0 + i * 64], bar, buf)
                for i in gl.static_range(BLOCKS):
                    buf = x_bufs.index(slot * BLOCKS + i)
                    tma_load(x_desc, [pixel, ci0 + i * 64], bar, buf)
    else:
        tiles_h = options[0]
        W: gl.constexpr = options[1]
        IMAGES: gl.constexpr = options[2]
        ci_blocks = CI // 64
        ci0 = block % ci_blocks * 64
        co0 = block // ci_blocks * 64
        for tile in range(begin, end):
            load_tile(
                x_desc, dy_desc, ring, tile - start, tile - first, co0, ci0, tiles_h, W, IMAGES
            )


@gluon.jit
def _load_any(
    descs, ring, CI, ends, first, last, tiles, options, POINTS: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """The tiles of a piece, block by block. `options`: (GROUPS, BLOCKS, STEPS) of 1x1
    filters, (tiles_h, W, IMAGES) of 3x3."""
    for block in range(first // tiles, (last + tiles - 1) // tiles):
        start = block * tiles
        begin = gl.maximum(first, start)
        end = gl.minimum(last, start + tiles)
        for i in gl.static_range(COUNT):
            here = block
            if i > 0:
                here = block - ends[i - 1]
            if i == 0:
                inside = block < ends[0]
            elif i == 3:
                inside = block >= ends[2]
            else:
                inside = (block >= ends[i - 1]) & (block < ends[i])
            if inside:
                _load_block(
                    descs[i][0], descs[i][1], ring, first, begin, end, start, here, CI[i],
                    options, POINTS,
                )  # fmt: skip


# --- 3x3 filters ----------------------------------------------------------------------------------


@gluon.jit
def _accumulate_rows(
    R: gl.constexpr, part_ptr, ring, first, last, tiles, W: gl.constexpr, IMAGES: gl.constexpr
):
    """The three taps of row R of the filter, of each block of the piece."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_ci = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    offs = (R * 3 * 64 + offs_co * 9 * 64)[:, None] + offs_ci[None, :]
    part_ptr = _first_part(part_ptr, 9 * 64 * 64)
    for block in range(first // tiles, (last + tiles - 1) // tiles):
        accs = ()
        for _ in gl.static_range(3):
            accs = accs + (gl.zeros([64, 64], gl.float32, LAYOUT),)
        begin = gl.maximum(first, block * tiles)
        end = gl.minimum(last, block * tiles + tiles)
        for tile in range(begin, end):
            accs = multiply_tile(accs, ring, tile - first, R, W, IMAGES)
        store_taps(part_ptr + offs, accs, 64, None)
        part_ptr += 9 * 64 * 64


@gluon.jit(do_not_specialize=["tiles"])
def conv_row_group_wgrad_kernel(
    x1_desc,  # as in `conv_row_wgrad_kernel`
    dy1_desc,
    x2_desc,
    dy2_desc,
    x3_desc,  # or None, as many as there are
    dy3_desc,
    x4_desc,
    dy4_desc,
    part_ptr,  # float32 [programs, 2, 64, 9, 64]
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    tiles,  # of 256 pixels
    tiles_h,  # of them one below the other
    COUNT: gl.constexpr,  # of gradients, from 2 to 4
    W: gl.constexpr,  # pixels of a row, of all its images
    IMAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x1_desc.dtype
    x_bufs = allocate_for_views(dtype, [STAGES * block_chunks(W), 8, 64], PIXELS)
    dy_bufs = gl.allocate_shared_memory(dtype, [STAGES] + dy1_desc.block_shape, dy1_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, 3)
    clear_margins(x_bufs, STAGES, 256 // W + 2, W, num_warps)

    end1, end2, end3, blocks = _ends(CI1, CI2, CI3, CI4, CO1, CO2, CO3, CO4, COUNT, 64, 64)
    first = _first(gl.program_id(0), blocks, tiles)
    last = _first(gl.program_id(0) + 1, blocks, tiles)
    launch_roles(
        _accumulate_rows, (part_ptr, ring, first, last, tiles, W, IMAGES),
        _load_any,
        (
            ((x1_desc, dy1_desc), (x2_desc, dy2_desc), (x3_desc, dy3_desc), (x4_desc, dy4_desc)),
            ring, (CI1, CI2, CI3, CI4), (end1, end2, end3), first, last, tiles,
            (tiles_h, W, IMAGES), False, COUNT,
        ),
        3, (160, 40 if W == 16 else 32),
    )  # fmt: skip


# --- 1x1 filters ----------------------------------------------------------------------------------


@gluon.jit
def _accumulate_points(
    GROUP: gl.constexpr, part_ptr, ring, first, last, tiles,
    GROUPS: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """64 of a block's channels of dy, with all of its channels of x."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    CI: gl.constexpr = BLOCKS * 64
    offs_co = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    offs_ci = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    offs = (offs_co * CI)[:, None] + offs_ci[None, :]
    x_bufs, dy_bufs = ring.bufs
    part_ptr = _first_part(part_ptr, GROUPS * 64 * CI)
    for block in range(first // tiles, (last + tiles - 1) // tiles):
        accs = ()
        for _ in gl.static_range(BLOCKS):
            accs = accs + (gl.zeros([64, 64], gl.float32, LAYOUT),)
        begin = gl.maximum(first, block * tiles)
        end = gl.minimum(last, block * tiles + tiles)
        for tile in range(begin, end):
            stage = ring.wait(tile - first)
            for step in gl.static_range(STEPS):
                slot = stage * STEPS + step
                dy = dy_bufs.index(slot * GROUPS + GROUP).permute((1, 0))
                dy = dy.load(gl.DotOperandLayout(0, LAYOUT, 2))
                sums = ()
                for i in gl.static_range(BLOCKS):
                    x = x_bufs.index(slot * BLOCKS + i)
                    sums = sums + (warpgroup_mma(dy, x, accs[i], is_async=True),)
                accs = sums
                if step > 0:
                    accs = wait_for(BLOCKS, accs, BLOCKS)
            accs = wait_for(0, accs, BLOCKS)
            sync_threads()
            ring.release(tile - first)
        for i in gl.static_range(BLOCKS):
            gl.store(part_ptr + offs + i * 64, accs[i])
        part_ptr += GROUPS * 64 * CI


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
    tiles,  # of STEPS * 64 pixels
    COUNT: gl.constexpr,  # of gradients, from 2 to 4
    GROUPS: gl.constexpr,  # of 64 channels of dy, of a program: a warpgroup each
    BLOCKS: gl.constexpr,  # of 64 channels of x, of a program
    STEPS: gl.constexpr,  # of 64 pixels
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x1_desc.dtype
    SLOTS: gl.constexpr = STAGES * STEPS
    x_bufs = gl.allocate_shared_memory(dtype, [SLOTS * BLOCKS, 64, 64], x1_desc.layout)
    dy_bufs = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, 64, 64], dy1_desc.layout)
    ring = new_ring((x_bufs, dy_bufs), STAGES, GROUPS)
    fence_async_shared()
    sync_threads()

    end1, end2, end3, blocks = _ends(
        CI1, CI2, CI3, CI4, CO1, CO2, CO3, CO4, COUNT, BLOCKS * 64, GROUPS * 64
    )
    first = _first(gl.program_id(0), blocks, tiles)
    last = _first(gl.program_id(0) + 1, blocks, tiles)
    launch_roles(
        _accumulate_points, (part_ptr, ring, first, last, tiles, GROUPS, BLOCKS, STEPS),
        _load_any,
        (
            ((x1_desc, dy1_desc), (x2_desc, dy2_desc), (x3_desc, dy3_desc), (x4_desc, dy4_desc)),
            ring, (CI1, CI2, CI3, CI4), (end1, end2, end3), first, last, tiles,
            (GROUPS, BLOCKS, STEPS), True, COUNT,
        ),
        GROUPS, (240 if GROUPS == 2 else 160, 24),
    )  # fmt: skip
