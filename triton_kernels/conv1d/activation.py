"""The input of a stage, made in registers of what the launches before it left.

Jit functions of `conv1d_kernels`, where the legend of dimensions is.
"""

import triton
import triton.language as tl

from ..activations import activate
from ..tf32 import round_to_tf32


@triton.jit
def places(offs_c, offs_t, C: tl.constexpr, T: tl.constexpr, LAST: tl.constexpr):
    """Where channels at times are in a sample [C, T], or [T, C] if channels are LAST."""
    if LAST:
        return offs_t[None, :] * C + offs_c[:, None]
    else:
        return offs_c[:, None] * T + offs_t[None, :]


@triton.jit
def _add_sums(v, sums_ptr, n, N, within, mask, C, T, SPLITS: tl.constexpr):
    """v + the partial sums of a convolution, in their order: [CG, BT]."""
    sums_ptr += n * C * T + within
    parts = ()
    for s in tl.static_range(SPLITS):  # all are on their way before the first is waited for
        part = tl.load(sums_ptr + s * N * C * T, mask=mask, other=0.0, cache_modifier=".cg")
        parts = parts + (part,)
    for s in tl.static_range(SPLITS):
        v += parts[s]
    return v


@triton.jit
def _stem_weights(weight_ptr, k, C: tl.constexpr, CG: tl.constexpr, TERMS: tl.constexpr):
    """Of channels k CG and up: [CG, terms], from [terms, C]; without a stem just a zero."""
    if weight_ptr is None:
        return 0.0
    else:
        offs_c = k * CG + tl.arange(0, CG)
        offs_k = tl.arange(0, _power_of_2(TERMS))
        mask = (offs_k < TERMS)[None, :]
        return tl.load(weight_ptr + offs_k[None, :] * C + offs_c[:, None], mask, 0.0)


@triton.jit
def _stem(weight, x_ptr, n, T, BT: tl.constexpr, CX: tl.constexpr, TAPS: tl.constexpr):
    """The network's first convolution, or its 1x1 skip, made here of its few terms: [CG, BT]."""
    offs_k, offs_t = tl.arange(0, _power_of_2(CX * TAPS)), tl.arange(0, BT)
    t = offs_t[None, :] + (offs_k % TAPS - TAPS // 2)[:, None]
    mask = (t >= 0) & (t < T) & (offs_k < CX * TAPS)[:, None]
    x_ptr += (n * T + t) * CX + (offs_k // TAPS)[:, None]
    x = tl.load(x_ptr, mask, 0.0, cache_modifier=".cg")
    return tl.dot(weight, x, input_precision="ieee")


@triton.jit
def as_operand(v, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """What is to be multiplied, rounded once."""
    if dtype == tl.float32 and PRECISION == "tf32":
        return round_to_tf32(v)
    else:
        return v.to(dtype)


@triton.constexpr_function
def _power_of_2(terms):
    """The depth of a product that holds so many terms."""
    return max(16, triton.next_power_of_2(terms))


@triton.jit
def _normalise(v, mask, eps, T: tl.constexpr, CPG: tl.constexpr, CG: tl.constexpr):
    """(v - mean) rstd per group of the slice; two passes over registers."""
    count: tl.constexpr = CPG * T
    if CG == CPG:
        d = tl.where(mask, v - tl.sum(tl.where(mask, v, 0.0)) / count, 0.0)
        return d * tl.rsqrt(tl.sum(d * d) / count + eps)
    else:
        mean = _of_groups(tl.sum(tl.where(mask, v, 0.0), axis=1), CPG, CG) / count
        d = tl.where(mask, v - mean[:, None], 0.0)
        rstd = tl.rsqrt(_of_groups(tl.sum(d * d, axis=1), CPG, CG) / count + eps)
        return d * rstd[:, None]


@triton.jit
def _of_groups(x, CPG: tl.constexpr, CG: tl.constexpr):
    """The sum over the group of each channel: [CG] -> [CG]. Positions have been added up before:
    triton 3.6 adds up the wrong lanes of a tile that is reshaped so that both are one dimension."""
    sums = tl.sum(tl.reshape(x, (CG // CPG, CPG)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (CG // CPG, CPG)), (CG,))


@triton.jit
def load_constants(
    bias_ptr,  # float32 [C], of what the activation is made of
    gamma_ptr,  # float32 [C], or None: neither norm nor activation
    beta_ptr,
    film_ptr,  # float32 [rows, F] from this block's columns on: scale [C] and shift [C], or
    cond_ptr,  # shift [C]; and float32 [N, F], what the condition adds to it; None: none
    row_ptr,  # int64 [1], the row of film; None: row n
    residual_bias_ptr,  # float32 [C], or None
    stem_ptr,  # float32 [CX, TAPS_X, C], or None
    residual_stem_ptr,  # float32 [CX, 1, C], or None
    n,
    k,
    film_stride,
    cond_stride,
    C: tl.constexpr,
    CG: tl.constexpr,
    SCALE: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
):
    """What an activation needs besides the results of other launches: bias, gamma, beta, scale and
    shift of channels k CG and up, float32 [CG] each, and the weights of stems. Nothing of it is
    written by a launch that overlaps with its successor, so it can be loaded before the wait."""
    offs_c = tl.minimum(k, C // CG - 1) * CG + tl.arange(0, CG)  # behind C is the skip connection
    bias, shift = tl.load(bias_ptr + offs_c), tl.zeros([CG], tl.float32)
    gamma, beta, scale = shift, shift, shift
    if gamma_ptr is not None:
        gamma, beta = tl.load(gamma_ptr + offs_c), tl.load(beta_ptr + offs_c)
    if film_ptr is not None:
        row = n.to(tl.int64) if row_ptr is None else tl.load(row_ptr)
        film_ptr += row * film_stride + offs_c
        shift = tl.load(film_ptr + (C if SCALE else 0))
        if SCALE:
            scale = tl.load(film_ptr)
        if cond_ptr is not None:
            cond_ptr += n * cond_stride + offs_c
            shift += tl.load(cond_ptr + (C if SCALE else 0))
            if SCALE:
                scale += tl.load(cond_ptr)
    if residual_bias_ptr is not None:
        shift += tl.load(residual_bias_ptr + offs_c)
    bias, gamma, beta = bias[:, None], gamma[:, None], beta[:, None]
    scale, shift = scale[:, None], shift[:, None]
    stem = _stem_weights(stem_ptr, k, C, CG, CX * TAPS_X)
    side_stem = _stem_weights(residual_stem_ptr, k, C, CG, CX)
    return bias, gamma, beta, scale, shift, stem, side_stem


@triton.jit
def make_activation(
    sums_ptr,  # float32 [SPLITS, N, C, T], or None; this and other samples [T, C] if LAST
    x_ptr,  # float32 [N, T, CX], or None
    stem_ptr,  # float32 [CX, TAPS_X, C]: the first convolution in the place of sums, or None
    residual_ptr,  # float32 [N, C, T]; with RES_SPLITS, [RES_SPLITS, N, C, T]; None: none
    residual_stem_ptr,  # float32 [CX, 1, C], or None
    constants,
    n,
    N,
    k,  # the slice
    eps,
    C: tl.constexpr,
    T: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
    LAST: tl.constexpr,
):
    """film(mish(norm(v))) + residual of channels k CG and up of sample n: float32 [CG, BT]."""
    bias, gamma, beta, scale, shift, stem, side_stem = constants
    offs_c = k * CG + tl.arange(0, CG)
    offs_t = tl.arange(0, BT)
    within = places(offs_c, offs_t, C, T, LAST)
    mask = tl.broadcast_to((offs_t < T)[None, :], (CG, BT))
    # Everything is loaded before the statistics, whose barriers no load passes
    v, r = tl.zeros([CG, BT], tl.float32), tl.zeros([CG, BT], tl.float32)
    if stem_ptr is not None:
        v = _stem(stem, x_ptr, n, T, BT, CX, TAPS_X)
    else:
        v = _add_sums(v, sums_ptr, n, N, within, mask, C, T, SPLITS)
    if residual_stem_ptr is not None:
        r = _stem(side_stem, x_ptr, n, T, BT, CX, 1)
    elif residual_ptr is not None:
        if RES_SPLITS > 0:
            r = _add_sums(r, residual_ptr, n, N, within, mask, C, T, RES_SPLITS)
        else:
            residual_ptr += n * C * T + within
            r = tl.load(residual_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    v += bias
    if NORM:
        v = _normalise(v, mask, eps, T, CPG, CG) * gamma + beta
        v = activate(v, "mish")
    if SCALE:
        v *= scale
    return tl.where(mask, v + shift + r, 0.0)


@triton.jit
def make_input_slice(
    sums_ptr,
    x_ptr,
    stem_ptr,
    residual_ptr,
    residual_stem_ptr,
    keep_ptr,  # float32 [N, C, T], out: the activation, or None
    skip_ptr,  # float32 [N, C2, T]: the channels behind the first C, or None
    constants,
    n,
    N,
    k,
    eps,
    keeps,  # whether this program is the one to write the activation
    C: tl.constexpr,
    C2: tl.constexpr,
    T: tl.constexpr,
    CG: tl.constexpr,
    CPG: tl.constexpr,
    BT: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    RES_SPLITS: tl.constexpr,
    CX: tl.constexpr,
    TAPS_X: tl.constexpr,
    LAST: tl.constexpr,
):
    """Slice k of the activation beside the skip connection, for sample n: float32 [CG, BT]."""
    offs_c, offs_t = tl.arange(0, CG), tl.arange(0, BT)
    if C2 == 0 or k < C // CG:
        a = make_activation(
            sums_ptr, x_ptr, stem_ptr, residual_ptr, residual_stem_ptr, constants, n, N, k, eps,
            C, T, CG, CPG, BT, NORM, SCALE, SPLITS, RES_SPLITS, CX, TAPS_X, LAST,
        )  # fmt: skip
        if keep_ptr is not None and keeps:
            kept = keep_ptr + n * C * T + places(k * CG + offs_c, offs_t, C, T, LAST)
            tl.store(kept, a, mask=(offs_t < T)[None, :])
    else:
        skip = skip_ptr + n * C2 * T + places(k * CG - C + offs_c, offs_t, C2, T, LAST)
        a = tl.load(skip, mask=(offs_t < T)[None, :], other=0.0, cache_modifier=".cg")
    return a
