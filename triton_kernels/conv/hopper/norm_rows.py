"""Replace rows of 64 channels of x in shared memory by act(norm(x)).

    act(x slope + offset),   slope = rstd g,   offset = b - mean slope

This rounds differently from (x - mean) slope + b. The difference is smaller than the rounding of x
to 16 bits. Rows outside of the image stay zero, since the convolution pads the activation.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...activations import activate_affine
from ...hopper.compat import reinterpret
from ...hopper.pairs import round_pairs, widen_pairs
from .row_memory import pair_chunks, row_from


class Norm(NamedTuple):
    """The statistics and parameters of the norm, and shared memory for slopes and offsets."""

    sums: gl.tensor  # float32 [N, K, 2, 64]
    weight: gl.tensor  # [64]
    bias: gl.tensor  # [64]
    scale: gl.tensor  # [N, 64] or None
    shift: gl.tensor  # [N, 64] or None
    stride_scale: gl.tensor
    stride_shift: gl.tensor
    eps: gl.tensor
    kept: gl.shared_memory_descriptor  # float32 [2 * warpgroups, 64]
    table: gl.tensor  # float32 [N, 4, 64]: mean, rstd, g, b of a launch before; or None


@gluon.jit
def load_table(table_ptr, n, offs, C):
    """mean, rstd, g and b of the channels `offs` of image n."""
    table_ptr += n.to(gl.int64) * 4 * C + offs
    mean = gl.load(table_ptr)
    rstd = gl.load(table_ptr + C)
    g = gl.load(table_ptr + 2 * C)
    b = gl.load(table_ptr + 3 * C)
    return mean, rstd, g, b


@gluon.constexpr_function
def pixels_layout():
    """Layout of [pixels, 64 channels]: each thread of a warpgroup has 16 bytes."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def new_affine(GROUPS: gl.constexpr):
    """Shared memory for the slopes and offsets of every warpgroup."""
    return gl.allocate_shared_memory(
        gl.float32, [2 * GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def keep_affine(norm, n, pixels, GROUP: gl.constexpr, K: gl.constexpr, CG: gl.constexpr):
    """Compute slope and offset of image n, and store them in a warpgroup's shared memory."""
    if norm.table is None:
        slope, offset = _of_sums(norm, n, pixels, K, CG)
    else:
        offs = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
        mean, rstd, g, b = load_table(norm.table, n, offs, 64)
        slope = rstd * g
        offset = b - mean * slope
    norm.kept.index(2 * GROUP).store(slope)
    norm.kept.index(2 * GROUP + 1).store(offset)


@gluon.jit
def load_affine(norm, GROUP: gl.constexpr):
    """Load slope and offset, in the layout of `activate_rows`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, pixels_layout())
    return norm.kept.index(2 * GROUP).load(LAYOUT), norm.kept.index(2 * GROUP + 1).load(LAYOUT)


@gluon.constexpr_function
def _sums_layout():
    """[tiles, 64 channels]: every warp has 16 channels, so that none waits for another."""
    return gl.BlockedLayout([1, 4], [8, 4], [1, 4], [1, 0])


@gluon.jit
def _of_sums(norm, n, pixels, K: gl.constexpr, CG: gl.constexpr):
    """Of the sums of K tiles, and of groups of CG channels. The formulas are those of
    `norm.tables`."""
    LAYOUT: gl.constexpr = _sums_layout()
    offs = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    offs_k = gl.arange(0, K, layout=gl.SliceLayout(1, LAYOUT))
    ptrs = norm.sums + n.to(gl.int64) * (K * 128) + (offs_k * 128)[:, None] + offs[None, :]
    total = gl.load(ptrs)
    within = gl.load(ptrs + 64)
    g, b = gl.load(norm.weight + offs), gl.load(norm.bias + offs)
    if norm.scale is not None:
        gain = 1.0 + gl.load(norm.scale + n.to(gl.int64) * norm.stride_scale + offs)
        g *= gain
        b *= gain
    if norm.shift is not None:
        b += gl.load(norm.shift + n.to(gl.int64) * norm.stride_shift + offs)
    inverse = 1.0 / (pixels // K).to(gl.float32)
    means = total * inverse
    mean = gl.sum(means, axis=0) * (1.0 / K)
    delta = means - mean[None, :]
    var = gl.sum(within * inverse + delta * delta, axis=0) * (1.0 / K)
    mean = mean.reshape([64 // CG, CG])
    var = var.reshape([64 // CG, CG])
    group_mean = (gl.sum(mean, axis=1) * (1.0 / CG))[:, None]
    delta = mean - group_mean
    group_var = (gl.sum(var + delta * delta, axis=1) * (1.0 / CG))[:, None]
    slope = g.reshape([64 // CG, CG]) * (1.0 / gl.sqrt(group_var + norm.eps))
    offset = b.reshape([64 // CG, CG]) - group_mean * slope
    return slope.reshape([64]), offset.reshape([64])


@gluon.jit
def activate_rows(
    x_bufs, pair, slope, offset, inside, EDGE: gl.constexpr, ACT: gl.constexpr, W: gl.constexpr
):
    """act(x slope + offset) of a pair of rows, in their place. The EDGE-th of them is
    outside of the image unless `inside`: there x is 0, and act(0) is 0."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_bufs.dtype
    raw = ()
    for j in gl.static_range(2):
        row = row_from(x_bufs, pair, j, W, pair_chunks(W))
        buf = reinterpret(row, dtype, [W, 64], MATRIX)
        raw = raw + (buf.load(pixels_layout()),)
    for j in gl.static_range(2):
        row = row_from(x_bufs, pair, j, W, pair_chunks(W))
        buf = reinterpret(row, dtype, [W, 64], MATRIX)
        z0 = gl.where(inside, offset, 0.0) if j == EDGE else offset
        a = activate_affine(widen_pairs(raw[j]), slope[None, :], z0[None, :], ACT)
        buf.store(round_pairs(a, dtype))
