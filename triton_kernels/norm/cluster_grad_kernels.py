"""The backward kernel of `norm.cluster`, where the names of the sizes are; tasks and their tiles
are as in `norm.cluster_kernels`, with dy beside x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..activations import activate_affine_grad, activate_grad
from ..gluon.pairs import round_pairs, widen_pairs
from .cluster_parts import (
    add_pairs,
    affine_of_sample,
    groups_layout,
    meet,
    members,
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


@gluon.jit(do_not_specialize=["tasks"])
def group_norm_cluster_bwd_kernel(
    x_ptr,  # [N, HW, C]
    dy_ptr,  # [N, HW, C]
    partial_ptr,  # float32 [N, CTAS, 2, C]: D and E of a thread block's pixels
    sums_ptr,  # float32 [N, 2, C]: D and E, out
    mean_ptr,  # float32 [N, G]
    rstd_ptr,  # float32 [N, G]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    dx_ptr,  # [N, HW, C]
    stride_scale,
    stride_shift,
    tasks,  # samples times the clusters' blocks of channels
    C: gl.constexpr,
    CG: gl.constexpr,
    ACT: gl.constexpr,
    ROUNDED_ACT: gl.constexpr,  # act' of dx, which is rounded; the sums want it exact
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
    xs = new_tiles(dtype, ALL, ROWS, BLOCK_C, CTAS)
    dys = new_tiles(dtype, ALL, ROWS, BLOCK_C, CTAS)
    warps = gl.allocate_shared_memory(
        gl.float32, [2, CTAS, num_warps, BLOCK_C], warps_memory_layout(CTAS)
    )
    programs = gl.num_programs(0)
    # the last first: the forward pass has left them in L2
    _, _, place = place_of_task(tasks - 1 - gl.program_id(0), HW, C, PARTS * BLOCK_C)
    for i in gl.static_range(ALL):
        there = place_of_tile(place, i, TILES, STEP, BLOCK_C)
        async_copy.async_copy_global_to_shared(xs[i], x_ptr + there + offs)
        async_copy.async_copy_global_to_shared(dys[i], dy_ptr + there + offs)
        if i % GROUP == GROUP - 1:
            async_copy.commit_group()

    for task in range(gl.program_id(0), tasks, programs):
        n, c0, place = place_of_task(tasks - 1 - task, HW, C, PARTS * BLOCK_C)
        _, _, place_next = place_of_task(tasks - 1 - task - programs, HW, C, PARTS * BLOCK_C)
        scale_row = n * stride_scale
        shift_row = n * stride_shift
        mean_row = mean_ptr + n * (C // CG)
        rstd_row = rstd_ptr + n * (C // CG)

        row_ptr = partial_ptr + n * (CTAS * 2) * C
        for part in gl.static_range(PARTS):
            c1 = c0 + part * BLOCK_C
            gain, offset = affine_of_sample(
                weight_ptr, bias_ptr, scale_ptr, shift_ptr, scale_row, shift_row, c1 + offs_c
            )
            mean = gl.load(mean_row + (c1 + offs_c) // CG)[None, :]
            slope = (gl.load(rstd_row + (c1 + offs_c) // CG) * gain)[None, :]
            offset = offset[None, :]
            acc_d = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
            acc_e = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
            for i in gl.static_range(TILES):
                if i % GROUP == 0:
                    async_copy.wait_group((ALL - part * TILES - i) // GROUP - 1)
                delta = widen_pairs(xs[part * TILES + i].load(TILE)) - mean
                dz = widen_pairs(dys[part * TILES + i].load(TILE))
                dz *= activate_grad(delta * slope + offset, ACT)
                acc_d += dz
                acc_e += dz * delta
            d, e = gl.reduce(
                (of_warps(acc_d, CTAS, num_warps), of_warps(acc_e, CTAS, num_warps)), 2, add_pairs
            )
            warps.index(0).store(d)
            warps.index(1).store(e)
            d = gl.sum(warps.index(0).load(WARPS), 1)
            e = gl.sum(warps.index(1).load(WARPS), 1)
            columns = c1 + gl.arange(0, BLOCK_C, gl.SliceLayout(0, d.type.layout))
            e *= gl.load(rstd_row + columns // CG)[None, :]
            store_partial(row_ptr + c0 + part * BLOCK_C, d, e, C, CTAS)

        zero = meet(task) - task
        ptrs, live = pointers_to_partials(row_ptr + c0, member, in_group, zero, C, MERGE, CTAS)
        d = gl.load(ptrs, mask=live, other=0.0, cache_modifier=".cg")
        e = gl.load(ptrs + C, mask=live, other=0.0, cache_modifier=".cg")
        group_gain, group_offset = affine_of_sample(
            weight_ptr, None, scale_ptr, None, scale_row, 0, c0 + gl.where(in_group, member, 0)
        )
        d, e = gl.reduce((d, e), 0, add_pairs)
        sums_row = sums_ptr + n * (2 * C) + c0
        gl.store(sums_row + member, d, mask=in_group)
        gl.store(sums_row + C + member, e, mask=in_group)
        m1, m2 = gl.reduce((d * group_gain, e * group_gain), 1, add_pairs)
        m1 *= 1.0 / (HW * CG)
        m2 *= 1.0 / (HW * CG)
        for part in gl.static_range(PARTS):
            c1 = c0 + part * BLOCK_C
            gain, offset = affine_of_sample(
                weight_ptr, bias_ptr, scale_ptr, shift_ptr, scale_row, shift_row, c1 + offs_c
            )
            mean = gl.load(mean_row + (c1 + offs_c) // CG)[None, :]
            rstd = gl.load(rstd_row + (c1 + offs_c) // CG)
            group = (part * BLOCK_C + offs_c) // CG
            r = (gl.gather(m1, group, 0) * rstd)[None, :]
            q = (gl.gather(m2, group, 0) * rstd * rstd)[None, :]
            slope = (rstd * gain)[None, :]
            offset = offset[None, :]
            for i in gl.static_range(TILES):
                delta = widen_pairs(xs[part * TILES + i].load(TILE)) - mean
                dz = widen_pairs(dys[part * TILES + i].load(TILE))
                dz *= activate_affine_grad(delta, slope, offset, ROUNDED_ACT)
                dx = slope * dz - (r + delta * q)
                there = place_of_tile(place, part * TILES + i, TILES, STEP, BLOCK_C)
                gl.store(dx_ptr + there + offs, round_pairs(dx, dtype))
                if i % GROUP == GROUP - 1:
                    if task + programs < tasks:
                        for j in gl.static_range(
                            part * TILES + i - GROUP + 1, part * TILES + i + 1
                        ):
                            ahead = place_of_tile(place_next, j, TILES, STEP, BLOCK_C)
                            async_copy.async_copy_global_to_shared(xs[j], x_ptr + ahead + offs)
                            async_copy.async_copy_global_to_shared(dys[j], dy_ptr + ahead + offs)
                    async_copy.commit_group()
