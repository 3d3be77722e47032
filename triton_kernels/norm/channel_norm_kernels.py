"""Kernels of `channel_norm`: the norm over the channels of each pixel, and its gradients.

    xhat = (x - mean) r factor                r as in `_normalised`, the mean of LayerNorm alone
    z    = xhat gain + offset                 gain and offset as in `coefficients.affine`
    y    = act(z)

With dz = dy act'(z), D = sum over pixels of dz, E = sum over pixels of dz xhat, both per (n, c):

    dx = r factor (gain dz - m1 - xhat m2 slope / factor^2)

with m1 and m2 the means over channels of gain dz and of gain dz xhat.

A program has whole rows, BLOCK_P of them at a time, in blocks of BLOCK_C channels: a tuple of
tensors [BLOCK_P, BLOCK_C]. So 320 channels are five blocks of 64, without a column that is not
there, and a block is so narrow that a row of it is in one warp: sums over a row are first over its
blocks, then over the lanes of the warp, and no warp waits for another. Statistics stay in registers
and nothing is stored for backward; a program goes through the BLOCK_P pixels `tiles` times.
"""

import triton
import triton.language as tl

from ..activations import activate_affine, activate_affine_grad
from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .coefficients import affine
from .statistics import add_pairs


@triton.constexpr_function
def _count(C, BLOCK_C):
    return triton.cdiv(C, BLOCK_C)


@triton.jit
def _rows(offs_p, count, MASKED: tl.constexpr):
    """Which rows there are, of `count` that remain, [BLOCK_P, 1]."""
    if MASKED:
        return (offs_p < count)[:, None]
    else:
        return tl.full([offs_p.shape[0], 1], 1, tl.int1)


@triton.jit
def _mask(rows, offs_c, j: tl.constexpr, C: tl.constexpr):
    """What there is of block j."""
    if (j + 1) * offs_c.shape[0] > C:
        rows = rows & (offs_c < C - j * offs_c.shape[0])[None, :]
    return rows


@triton.jit
def _read(ptr, offs, offs_c, rows, C: tl.constexpr):
    """The blocks of BLOCK_P rows, zeros where there are none."""
    x = ()
    for j in tl.static_range(_count(C, offs_c.shape[0])):
        mask = _mask(rows, offs_c, j, C)
        x += (tl.load(ptr + offs + j * offs_c.shape[0], mask=mask, other=0.0),)
    return x


@triton.jit
def _write(ptr, v, offs, offs_c, rows, j: tl.constexpr, C: tl.constexpr, TF32: tl.constexpr):
    """Block j."""
    v = as_operand(v, ptr.dtype.element_ty, TF32)
    tl.store(ptr + offs + j * offs_c.shape[0], v, mask=_mask(rows, offs_c, j, C))


@triton.jit
def _write_sum(ptr, v, offs_p, c, C: tl.constexpr):
    """A sum over rows, [BLOCK_C], of channels c. The threads of the first row write it: those of a
    vector are others, and would get it by barriers."""
    mask = (offs_p == 0)[:, None] & (c < C)[None, :]
    at = c[None, :] + offs_p[:, None] * 0
    tl.store(ptr + at, tl.where(mask, v[None, :], 0.0), mask=mask)


@triton.jit
def _affine(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c,
    C: tl.constexpr,
):  # fmt: skip
    """gain and offset of the blocks of sample n, [1, BLOCK_C]. All are asked for before the first
    is used: each comes to its threads by a barrier, which loads do not pass."""
    loaded, gain, offset = (), (), ()
    for j in tl.static_range(_count(C, offs_c.shape[0])):
        c = j * offs_c.shape[0] + offs_c
        loaded += affine(
            weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, c, c < C
        )
    for j in tl.static_range(_count(C, offs_c.shape[0])):
        gain += (loaded[2 * j][None, :],)
        offset += (loaded[2 * j + 1][None, :],)
    return gain, offset


@triton.jit
def _normalised(
    x, rows, offs_c, eps, factor, CENTRED: tl.constexpr, EPS_IN: tl.constexpr, C: tl.constexpr
):
    """The blocks of xhat, zeros in rows that there are not; r factor, by which x has been
    multiplied; and slope, which says how r changes with x: dr = -slope r^2 (x r) dx / C summed over
    channels. The latter two are [BLOCK_P, 1]. x has zeros where there is nothing.

    With s = mean of (x - mean)^2 over channels, r is 1 / sqrt(s + eps), 1 / max(sqrt(s), eps) or
    1 / (sqrt(s) + eps), as `EPS_IN` has it."""
    v = ()
    for j in tl.static_range(len(x)):
        v += (x[j].to(tl.float32),)
    rest = 0.0
    if CENTRED:
        total = v[0]
        for j in tl.static_range(1, len(x)):
            total += v[j]
        mean = (tl.sum(total, 1) / C)[:, None]
        less, total = (), tl.zeros(total.shape, tl.float32)
        for j in tl.static_range(len(x)):
            part = v[j] - mean
            if (j + 1) * offs_c.shape[0] > C:
                part = tl.where(_mask(rows, offs_c, j, C), part, 0.0)
            total += part
            less += (part,)
        v = less
        rest = (tl.sum(total, 1) / C)[:, None]  # what the sum has lost of a large mean
    squares = v[0] * v[0]
    for j in tl.static_range(1, len(x)):
        squares += v[j] * v[j]
    square = (tl.sum(squares, 1) / C)[:, None]
    if CENTRED:
        square = tl.maximum(square - rest * rest, 0.0)
    if EPS_IN == "root":
        r = 1.0 / tl.sqrt(square + eps)
        slope = tl.full(r.shape, 1.0, tl.float32)
    elif EPS_IN == "max":
        root = tl.sqrt(square)
        r = 1.0 / tl.maximum(root, eps)
        slope = tl.where(root >= eps, 1.0, 0.0)
    else:
        tl.static_assert(EPS_IN == "sum", "unknown place of eps")
        root = tl.sqrt(square)
        r = 1.0 / (root + eps)
        slope = tl.where(root > 0, (root + eps) / tl.where(root > 0, root, 1.0), 0.0)
    r = tl.where(rows, r * factor, 0.0)  # where there is no row, it may be infinite
    xhat = ()
    for j in tl.static_range(len(x)):
        xhat += ((v[j] - rest) * r,)
    return xhat, r, slope


@triton.jit(do_not_specialize=["K", "tiles"])
def channel_norm_fwd_kernel(
    x_ptr,  # [N, HW, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    residual_ptr,  # [N, HW, C], of any type, or None: added to y
    y_ptr,  # [N, HW, C], of any type
    stride_scale,
    stride_shift,
    HW,
    K,  # programs an image
    tiles,
    eps,
    factor,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    EPS_IN: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,  # the last tile reaches over the last pixel
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    await_inputs()
    n = (tl.program_id(0) // K).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs = offs_p[:, None] * C + offs_c[None, :]
    gain, offset = _affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, C
    )
    first = tl.program_id(0) % K * tiles * BLOCK_P
    for i in range(tl.minimum(tiles, tl.cdiv(HW - first, BLOCK_P))):
        p = first + i * BLOCK_P
        at = (n * HW + p) * C
        rows = _rows(offs_p, HW - p, MASKED)
        x = _read(x_ptr + at, offs, offs_c, rows, C)
        if residual_ptr is not None:
            residual = _read(residual_ptr + at, offs, offs_c, rows, C)
        xhat, _, _ = _normalised(x, rows, offs_c, eps, factor, CENTRED, EPS_IN, C)
        for j in tl.static_range(len(x)):
            y = activate_affine(xhat[j], gain[j], offset[j], ACT)
            if residual_ptr is not None:
                y += residual[j].to(tl.float32)
            _write(y_ptr + at, y, offs, offs_c, rows, j, C, TF32)


@triton.jit(do_not_specialize=["K", "tiles"])
def channel_norm_bwd_kernel(
    dy_ptr,  # [N, HW, C], of any type
    x_ptr,  # [N, HW, C]
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    shift_ptr,  # [N, C] or None
    add_ptr,  # [N, HW, C] or None: added to dx
    dx_ptr,  # [N, HW, C] or None
    sums_ptr,  # float32 [N, K, 2, C] or None: D and E of a program
    rows_ptr,  # float32 [N, K, C] or None: sums of dx of a program
    stride_scale,
    stride_shift,
    HW,
    K,
    tiles,
    eps,
    factor,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    EPS_IN: tl.constexpr,
    ACT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TF32: tl.constexpr,
):
    await_inputs()
    n = (tl.program_id(0) // K).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    offs = offs_p[:, None] * C + offs_c[None, :]
    first = tl.program_id(0) % K * tiles * BLOCK_P
    tiles = tl.minimum(tiles, tl.cdiv(HW - first, BLOCK_P))
    rows = _rows(offs_p, HW - first, MASKED)
    x_next = _read(x_ptr + (n * HW + first) * C, offs, offs_c, rows, C)
    dy_next = _read(dy_ptr + (n * HW + first) * C, offs, offs_c, rows, C)
    gain, offset = _affine(
        weight_ptr, bias_ptr, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, C
    )
    sum_d, sum_e, sum_dx = (), (), ()
    for _ in tl.static_range(_count(C, BLOCK_C)):
        zeros = (tl.zeros([BLOCK_P, BLOCK_C], tl.float32),)
        sum_d, sum_e, sum_dx = sum_d + zeros, sum_e + zeros, sum_dx + zeros
    for i in range(tiles):
        p = first + i * BLOCK_P
        at = (n * HW + p) * C
        rows = _rows(offs_p, HW - p, MASKED)
        x, dy = x_next, dy_next
        # the next tile is asked for before work on this one; the last one again
        p_next = first + tl.minimum(i + 1, tiles - 1) * BLOCK_P
        rows_next = _rows(offs_p, HW - p_next, MASKED)
        x_next = _read(x_ptr + (n * HW + p_next) * C, offs, offs_c, rows_next, C)
        dy_next = _read(dy_ptr + (n * HW + p_next) * C, offs, offs_c, rows_next, C)
        if add_ptr is not None:
            add = _read(add_ptr + at, offs, offs_c, rows, C)
        xhat, r, slope = _normalised(x, rows, offs_c, eps, factor, CENTRED, EPS_IN, C)
        to_m1 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        to_m2 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        dz, more_d, more_e, more_dx = (), (), (), ()
        for j in tl.static_range(len(x)):
            v = dy[j].to(tl.float32)
            if ACT != "identity":
                v *= activate_affine_grad(xhat[j], gain[j], offset[j], ACT)
            more_d += (sum_d[j] + v,)
            more_e += (sum_e[j] + v * xhat[j],)
            v *= gain[j]
            to_m1 += v
            to_m2 += v * xhat[j]
            dz += (v,)
        if sums_ptr is not None:
            sum_d, sum_e = more_d, more_e
        if dx_ptr is not None:
            m1 = (tl.sum(to_m1, 1) / C)[:, None] if CENTRED else 0.0
            m2 = tl.sum(to_m2, 1)[:, None] * (slope / (C * factor * factor))
            for j in tl.static_range(len(x)):
                v = r * (dz[j] - m1 - xhat[j] * m2)
                if add_ptr is not None:
                    v += add[j].to(tl.float32)
                _write(dx_ptr + at, v, offs, offs_c, rows, j, C, TF32)
                more_dx += (sum_dx[j] + v,)
            if rows_ptr is not None:
                sum_dx = more_dx
    pid = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(_count(C, BLOCK_C)):
        c = j * BLOCK_C + offs_c
        if sums_ptr is not None:
            d, e = tl.reduce((sum_d[j], sum_e[j]), 0, add_pairs)
            _write_sum(sums_ptr + pid * 2 * C, d, offs_p, c, C)
            _write_sum(sums_ptr + (pid * 2 + 1) * C, e, offs_p, c, C)
        if rows_ptr is not None:
            _write_sum(rows_ptr + pid * C, tl.sum(sum_dx[j], 0), offs_p, c, C)
