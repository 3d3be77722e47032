"""The kernel of `norm.cluster`, where the formulas and the names of the sizes are.

A program is a cluster of CTAS thread blocks. A task of it is one sample's PARTS blocks of BLOCK_C
channels, which the thread blocks keep in shared memory together: of each block of channels every
one has TILES tiles of pixels, of a tile a thread 16 bytes. They share nothing but what they put
into global memory before the `cluster_barrier`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..activations import activate
from ..hopper.compat import cp_async
from ..hopper.pairs import round_pairs, widen_pairs
from .cluster_parts import (
    affine_of_sample,
    cluster_barrier,
    groups_layout,
    members,
    merge_moments,
    new_tiles,
    of_warps,
    place_of_task,
    place_of_tile,
    pointers_to_partials,
    power_of_two,
    store_partial,
    tile_layout,
    tiles_at_a_time,
    warps_layout,
    warps_memory_layout,
)
from .statistics import add_pairs


@gluon.jit(do_not_specialize=["tasks"])
def group_norm_cluster_fwd_kernel(
    x_ptr,  # [N, HW, C]
    partial_ptr,  # float32 [N, CTAS, 2, C]: mean and M2 of a thread block's pixels
    mean_ptr,  # float32 [N, G], out
    rstd_ptr,  # float32 [N, G], out
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    y_ptr,  # [N, HW, C]
    stride_scale,
    stride_shift,
    eps,
    tasks,  # samples times the clusters' blocks of channels
    C: gl.constexpr,
    CG: gl.constexpr,
    ACT: gl.constexpr,
    CTAS: gl.constexpr,
    TILES: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_C: gl.constexpr,
    num_warps: gl.constexpr,
):
    TILE: gl.constexpr = tile_layout(CTAS, num_warps, BLOCK_C)
    WARPS: gl.constexpr = warps_layout(CTAS, num_warps)
    ROWS: gl.constexpr = CTAS * num_warps * 256 // BLOCK_C
    HW: gl.constexpr = ROWS * TILES
    STEP: gl.constexpr = ROWS * C  # from tile to tile
    ALL: gl.constexpr = PARTS * TILES
    GROUP: gl.constexpr = tiles_at_a_time(TILES)
    GROUPS: gl.constexpr = PARTS * BLOCK_C // CG
    MERGE: gl.constexpr = groups_layout(CTAS, num_warps, GROUPS, power_of_two(CG))
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    offs_p = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    offs_c = gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE))
    offs = offs_p[:, None] * C + offs_c[None, :]
    member, in_group = members(MERGE, GROUPS, CG)
    tiles = new_tiles(dtype, ALL, ROWS, BLOCK_C, CTAS)
    warps = gl.allocate_shared_memory(
        gl.float32, [2, CTAS, num_warps, BLOCK_C], warps_memory_layout(CTAS)
    )
    programs = gl.num_programs(0)
    _, _, place = place_of_task(gl.program_id(0), HW, C, PARTS * BLOCK_C)
    for i in gl.static_range(ALL):
        there = place_of_tile(place, i, TILES, STEP, BLOCK_C)
        cp_async(tiles[i], x_ptr + there + offs)
        if i % GROUP == GROUP - 1:
            async_copy.commit_group()

    for task in range(gl.program_id(0), tasks, programs):
        n, c0, place = place_of_task(task, HW, C, PARTS * BLOCK_C)
        _, _, place_next = place_of_task(task + programs, HW, C, PARTS * BLOCK_C)
        scale_row = n * stride_scale
        shift_row = n * stride_shift

        row_ptr = partial_ptr + n * (CTAS * 2) * C
        for part in gl.static_range(PARTS):
            # Of each thread the first pixel is subtracted from the others. So no more cancels than
            # TILES pixels weigh against one: the first itself adds to M2 what it is off the rest.
            async_copy.wait_group((ALL - part * TILES) // GROUP - 1)
            origin = widen_pairs(tiles[part * TILES].load(TILE))
            acc = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
            squares = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
            for i in gl.static_range(1, TILES):
                if i % GROUP == 0:
                    async_copy.wait_group((ALL - part * TILES - i) // GROUP - 1)
                delta = widen_pairs(tiles[part * TILES + i].load(TILE)) - origin
                acc += delta
                squares += delta * delta
            shift = acc * (1.0 / TILES)
            mean = of_warps(origin + shift, CTAS, num_warps)
            m2 = of_warps(squares - acc * shift, CTAS, num_warps)
            count = gl.full(mean.shape, TILES * 1.0, gl.float32, mean.type.layout)
            mean, m2, count = gl.reduce((mean, m2, count), 2, merge_moments)
            warps.index(0).store(mean)
            warps.index(1).store(m2)
            mean = warps.index(0).load(WARPS)
            m2 = warps.index(1).load(WARPS)
            count = gl.full(mean.shape, ROWS // (CTAS * num_warps) * TILES * 1.0, gl.float32, WARPS)
            mean, m2, count = gl.reduce((mean, m2, count), 1, merge_moments)
            store_partial(row_ptr + c0 + part * BLOCK_C, mean, m2, C, CTAS)

        zero = cluster_barrier(task) - task
        ptrs, live = pointers_to_partials(row_ptr + c0, member, in_group, zero, C, MERGE, CTAS)
        means = gl.load(ptrs, mask=live, other=0.0, cache_modifier=".cg")
        m2 = gl.load(ptrs + C, mask=live, other=0.0, cache_modifier=".cg")
        group_mean = gl.sum(gl.sum(means, 0), 1) * (1.0 / (CTAS * CG))
        wide = gl.expand_dims(gl.expand_dims(group_mean, 1), 0)
        delta = gl.where(live, means - wide, 0.0)
        m2 += delta * delta * (HW // CTAS)
        m2, rest = gl.reduce((m2, delta), 0, add_pairs)
        m2, rest = gl.reduce((m2, rest), 1, add_pairs)
        group_mean += rest * (1.0 / (CTAS * CG))  # what the first sum has rounded off
        group_rstd = 1.0 / gl.sqrt(m2 * (1.0 / (HW * CG)) + eps)
        stats = n * (C // CG) + c0 // CG + gl.arange(0, GROUPS, group_mean.type.layout)
        gl.store(mean_ptr + stats, group_mean)
        gl.store(rstd_ptr + stats, group_rstd)
        for part in gl.static_range(PARTS):
            gain, offset = affine_of_sample(
                weight_ptr, bias_ptr, scale_ptr, shift_ptr, scale_row, shift_row,
                c0 + part * BLOCK_C + offs_c,
            )  # fmt: skip
            group = (part * BLOCK_C + offs_c) // CG
            mean = gl.gather(group_mean, group, 0)[None, :]
            slope = (gl.gather(group_rstd, group, 0) * gain)[None, :]
            offset = offset[None, :]
            for i in gl.static_range(TILES):
                x = widen_pairs(tiles[part * TILES + i].load(TILE))
                # x - mean first: x slope + (offset - mean slope) would cancel with a large mean
                y = activate((x - mean) * slope + offset, ACT)
                there = place_of_tile(place, part * TILES + i, TILES, STEP, BLOCK_C)
                gl.store(y_ptr + there + offs, round_pairs(y, dtype))
                if i % GROUP == GROUP - 1:
                    if task + programs < tasks:
                        for j in gl.static_range(
                            part * TILES + i - GROUP + 1, part * TILES + i + 1
                        ):
                            ahead = place_of_tile(place_next, j, TILES, STEP, BLOCK_C)
                            cp_async(tiles[j], x_ptr + ahead + offs)
                    async_copy.commit_group()
