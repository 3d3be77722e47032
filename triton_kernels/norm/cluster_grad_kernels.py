"""The backward kernel of `norm.cluster`, where the names of the sizes are; tasks and their tiles
are as in `norm.cluster_kernels`, with dy beside x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..activations import activate_affine_grad, activate_grad
from ..hopper.compat import cp_async
from ..hopper.pairs import round_pairs, widen_pairs
from .cluster_parts import (
    affine_of_sample,
    cluster_barrier,
    groups_layout,
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
from .statistics import add_pairs


@gluon.jit
def _coefficients(
    mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
    n, stride_scale, stride_shift, offs_c, C: gl.constexpr, CG: gl.constexpr,
):  # fmt: skip
    """mean, rstd, slope and offset of a sample's channels."""
    gain, offset = affine_of_sample(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, n * stride_scale, n * stride_shift, offs_c
    )
    groups = n * (C // CG) + offs_c // CG
    rstd = gl.load(rstd_ptr + groups)
    return gl.load(mean_ptr + groups)[None, :], rstd, (rstd * gain)[None, :], offset[None, :]


@gluon.jit
def _add_tiles(
    acc_d, acc_e, xs, dys, FIRST: gl.constexpr, COUNT: gl.constexpr,
    mean, slope, offset, ACT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """D, and E without rstd, of each thread."""
    for i in gl.static_range(FIRST, FIRST + COUNT):
        delta = widen_pairs(xs[i].load(TILE)) - mean
        dz = widen_pairs(dys[i].load(TILE))
        dz *= activate_grad(delta * slope + offset, ACT)
        acc_d += dz
        acc_e += dz * delta
    return acc_d, acc_e


@gluon.jit
def _leave_sums(
    row_ptr, rstd_row, acc_d, acc_e, warps, c1, C, CG: gl.constexpr,
    CTAS: gl.constexpr, num_warps: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Those of a thread block, for the others."""
    d, e = gl.reduce(
        (of_warps(acc_d, CTAS, num_warps), of_warps(acc_e, CTAS, num_warps)), 2, add_pairs
    )
    warps.index(0).store(d)
    warps.index(1).store(e)
    d = gl.sum(warps.index(0).load(WARPS), 1)
    e = gl.sum(warps.index(1).load(WARPS), 1)
    columns = c1 + gl.arange(0, d.shape[1], gl.SliceLayout(0, d.type.layout))
    e *= gl.load(rstd_row + columns // CG)[None, :]
    store_partial(row_ptr + c1, d, e, C, CTAS)


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
    LAG: gl.constexpr,  # see `ClusterConfig`
    num_warps: gl.constexpr,
):
    TILE: gl.constexpr = tile_layout(CTAS, num_warps, BLOCK_C)
    WARPS: gl.constexpr = warps_layout(CTAS, num_warps)
    ROWS: gl.constexpr = CTAS * num_warps * 256 // BLOCK_C
    HW: gl.constexpr = ROWS * TILES
    STEP: gl.constexpr = ROWS * C  # from tile to tile
    ALL: gl.constexpr = PARTS * TILES
    GROUP: gl.constexpr = tiles_at_a_time(TILES)
    SETS: gl.constexpr = TILES // GROUP
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
    n, c0, place = place_of_task(tasks - 1 - gl.program_id(0), HW, C, PARTS * BLOCK_C)
    for i in gl.static_range(ALL):
        there = place_of_tile(place, i, TILES, STEP, BLOCK_C)
        cp_async(xs[i], x_ptr + there + offs)
        cp_async(dys[i], dy_ptr + there + offs)
        if i % GROUP == GROUP - 1:
            async_copy.commit_group()
    if LAG > 0:  # the sums of a task are taken while the one before it is written
        mean, rstd, slope, offset = _coefficients(
            mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
            n, stride_scale, stride_shift, c0 + offs_c, C, CG,
        )  # fmt: skip
        acc_d = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
        acc_e = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
        for k in gl.static_range(SETS):
            async_copy.wait_group(SETS - 1 - k)
            if tasks > k - SETS:  # always; without a branch ptxas spills what it moves past waits
                acc_d, acc_e = _add_tiles(
                    acc_d, acc_e, xs, dys, k * GROUP, GROUP, mean, slope, offset, ACT, TILE
                )

    for task in range(gl.program_id(0), tasks, programs):
        n, c0, place = place_of_task(tasks - 1 - task, HW, C, PARTS * BLOCK_C)
        more = task + programs < tasks
        after = gl.where(more, task + programs, task)  # itself, and then it is not used
        n_after, c0_after, place_after = place_of_task(tasks - 1 - after, HW, C, PARTS * BLOCK_C)
        row_ptr = partial_ptr + n * (CTAS * 2) * C
        rstd_row = rstd_ptr + n * (C // CG)
        if LAG > 0:
            _leave_sums(row_ptr, rstd_row, acc_d, acc_e, warps, c0, C, CG, CTAS, num_warps, WARPS)
        else:
            for part in gl.static_range(PARTS):
                c1 = c0 + part * BLOCK_C
                mean, rstd, slope, offset = _coefficients(
                    mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
                    n, stride_scale, stride_shift, c1 + offs_c, C, CG,
                )  # fmt: skip
                acc_d = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
                acc_e = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
                for k in gl.static_range(SETS):
                    async_copy.wait_group((PARTS - part) * SETS - 1 - k)
                    acc_d, acc_e = _add_tiles(
                        acc_d, acc_e, xs, dys, part * TILES + k * GROUP, GROUP,
                        mean, slope, offset, ACT, TILE,
                    )  # fmt: skip
                _leave_sums(
                    row_ptr, rstd_row, acc_d, acc_e, warps, c1, C, CG, CTAS, num_warps, WARPS
                )

        group_gain, group_offset = affine_of_sample(
            weight_ptr, None, scale_ptr, None, n * stride_scale, 0,
            c0 + gl.where(in_group, member, 0),
        )  # fmt: skip
        if LAG > 0:  # asked for before the others are waited for
            mean_after, rstd_after, slope_after, offset_after = _coefficients(
                mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
                n_after, stride_scale, stride_shift, c0_after + offs_c, C, CG,
            )  # fmt: skip
        zero = cluster_barrier(task) - task
        ptrs, live = pointers_to_partials(row_ptr + c0, member, in_group, zero, C, MERGE, CTAS)
        d = gl.load(ptrs, mask=live, other=0.0, cache_modifier=".cg")
        e = gl.load(ptrs + C, mask=live, other=0.0, cache_modifier=".cg")
        d, e = gl.reduce((d, e), 0, add_pairs)
        sums_row = sums_ptr + n * (2 * C) + c0
        gl.store(sums_row + member, d, mask=in_group)
        gl.store(sums_row + C + member, e, mask=in_group)
        m1, m2 = gl.reduce((d * group_gain, e * group_gain), 1, add_pairs)
        m1 *= 1.0 / (HW * CG)
        m2 *= 1.0 / (HW * CG)
        if LAG > 0:
            acc_d = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
            acc_e = gl.zeros([ROWS, BLOCK_C], gl.float32, TILE)
        for part in gl.static_range(PARTS):
            if PARTS > 1:  # else they are still in registers
                mean, rstd, slope, offset = _coefficients(
                    mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr,
                    n, stride_scale, stride_shift, c0 + part * BLOCK_C + offs_c, C, CG,
                )  # fmt: skip
            group = (part * BLOCK_C + offs_c) // CG
            r = (gl.gather(m1, group, 0) * rstd)[None, :]
            q = (gl.gather(m2, group, 0) * rstd * rstd)[None, :]
            for k in gl.static_range(SETS):
                for i in gl.static_range(part * TILES + k * GROUP, part * TILES + (k + 1) * GROUP):
                    delta = widen_pairs(xs[i].load(TILE)) - mean
                    dz = widen_pairs(dys[i].load(TILE))
                    dz *= activate_affine_grad(delta, slope, offset, ROUNDED_ACT)
                    dx = slope * dz - (r + delta * q)
                    there = place_of_tile(place, i, TILES, STEP, BLOCK_C)
                    gl.store(dx_ptr + there + offs, round_pairs(dx, dtype))
                if more:
                    for i in gl.static_range(
                        part * TILES + k * GROUP, part * TILES + (k + 1) * GROUP
                    ):
                        there = place_of_tile(place_after, i, TILES, STEP, BLOCK_C)
                        cp_async(xs[i], x_ptr + there + offs)
                        cp_async(dys[i], dy_ptr + there + offs)
                async_copy.commit_group()
                if LAG > 0 and k >= LAG:
                    async_copy.wait_group(LAG)
                    if more:
                        acc_d, acc_e = _add_tiles(
                            acc_d, acc_e, xs, dys, (k - LAG) * GROUP, GROUP,
                            mean_after, slope_after, offset_after, ACT, TILE,
                        )  # fmt: skip
        if LAG > 0:
            for k in gl.static_range(max(SETS - LAG, 0), SETS):
                async_copy.wait_group(SETS - 1 - k)
                if more:
                    acc_d, acc_e = _add_tiles(
                        acc_d, acc_e, xs, dys, k * GROUP, GROUP,
                        mean_after, slope_after, offset_after, ACT, TILE,
                    )  # fmt: skip
            mean, rstd, slope, offset = mean_after, rstd_after, slope_after, offset_after
