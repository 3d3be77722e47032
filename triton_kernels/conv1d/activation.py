"""The input of a stage, made in registers of what the launches before it left.

Jit functions of `conv1d_kernels`, where the legend of dimensions is.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..activations import activate
from ..tf32 import round_to_tf32


class Given(NamedTuple):
    """What an activation is made of: pointers, numbers, and constants of the compilation. Those
    down to `residual_stem` are read before the previous kernel has ended: no launch that overlaps
    with its successor writes them."""

    bias: tl.tensor  # float32 [C], of what the activation is made of
    gamma: tl.tensor  # float32 [C], or None: neither norm nor activation
    beta: tl.tensor
    film: tl.tensor  # float32 [rows, F] from this block's columns on: scale [C] and shift [C], or
    cond: tl.tensor  # shift [C]; and float32 [N, F], what the condition adds to it; None: none
    row: tl.tensor  # int64 [1], the row of film; None: row n
    residual_bias: tl.tensor  # float32 [C], or None
    stem: tl.tensor  # float32 [CX, TAPS_X, C]: the first convolution in the place of sums, or None
    residual_stem: tl.tensor  # float32 [CX, 1, C], or None
    sums: tl.tensor  # float32 [SPLITS, N, C, T], or None; this and other samples [T, C] if LAST
    x: tl.tensor  # float32 [N, T, CX], or None
    residual: tl.tensor  # float32 [N, C, T]; with RES_SPLITS, [RES_SPLITS, N, C, T]; None: none
    keep: tl.tensor  # float32 [N, C, T], out: the activation, or None
    skip: tl.tensor  # float32 [N, C2, T]: the channels behind the first C, or None
    film_stride: tl.tensor
    cond_stride: tl.tensor
    eps: tl.tensor
    C: tl.constexpr
    C2: tl.constexpr
    T: tl.constexpr
    CG: tl.constexpr
    CPG: tl.constexpr
    BT: tl.constexpr
    SCALE: tl.constexpr
    SPLITS: tl.constexpr
    RES_SPLITS: tl.constexpr
    CX: tl.constexpr
    TAPS_X: tl.constexpr
    LAST: tl.constexpr


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
def _load_constants(given, n, k):
    """What an activation needs besides the results of other launches: bias, gamma, beta, scale and
    shift of channels k CG and up, float32 [CG] each, and the weights of stems."""
    C: tl.constexpr = given.C
    CG: tl.constexpr = given.CG
    offs_c = tl.minimum(k, C // CG - 1) * CG + tl.arange(0, CG)  # behind C is the skip connection
    bias, shift = tl.load(given.bias + offs_c), tl.zeros([CG], tl.float32)
    gamma, beta, scale = shift, shift, shift
    if given.gamma is not None:
        gamma, beta = tl.load(given.gamma + offs_c), tl.load(given.beta + offs_c)
    if given.film is not None:
        row = n.to(tl.int64) if given.row is None else tl.load(given.row)
        film_ptr = given.film + (row * given.film_stride + offs_c)
        shift = tl.load(film_ptr + (C if given.SCALE else 0))
        if given.SCALE:
            scale = tl.load(film_ptr)
        if given.cond is not None:
            cond_ptr = given.cond + (n * given.cond_stride + offs_c)
            shift += tl.load(cond_ptr + (C if given.SCALE else 0))
            if given.SCALE:
                scale += tl.load(cond_ptr)
    if given.residual_bias is not None:
        shift += tl.load(given.residual_bias + offs_c)
    bias, gamma, beta = bias[:, None], gamma[:, None], beta[:, None]
    scale, shift = scale[:, None], shift[:, None]
    stem = _stem_weights(given.stem, k, C, CG, given.CX * given.TAPS_X)
    side_stem = _stem_weights(given.residual_stem, k, C, CG, given.CX)
    return bias, gamma, beta, scale, shift, stem, side_stem


@triton.jit
def _make_activation(given, constants, n, N, k):
    """film(mish(norm(v))) + residual of channels k CG and up of sample n: float32 [CG, BT]."""
    C: tl.constexpr = given.C
    T: tl.constexpr = given.T
    CG: tl.constexpr = given.CG
    BT: tl.constexpr = given.BT
    bias, gamma, beta, scale, shift, stem, side_stem = constants
    offs_c = k * CG + tl.arange(0, CG)
    offs_t = tl.arange(0, BT)
    within = places(offs_c, offs_t, C, T, given.LAST)
    mask = tl.broadcast_to((offs_t < T)[None, :], (CG, BT))
    # Everything is loaded before the statistics, whose barriers no load passes
    v, r = tl.zeros([CG, BT], tl.float32), tl.zeros([CG, BT], tl.float32)
    if given.stem is not None:
        v = _stem(stem, given.x, n, T, BT, given.CX, given.TAPS_X)
    else:
        v = _add_sums(v, given.sums, n, N, within, mask, C, T, given.SPLITS)
    if given.residual_stem is not None:
        r = _stem(side_stem, given.x, n, T, BT, given.CX, 1)
    elif given.residual is not None:
        if given.RES_SPLITS > 0:
            r = _add_sums(r, given.residual, n, N, within, mask, C, T, given.RES_SPLITS)
        else:
            residual_ptr = given.residual + (n * C * T + within)
            r = tl.load(residual_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    v += bias
    if given.gamma is not None:
        v = _normalise(v, mask, given.eps, T, given.CPG, CG) * gamma + beta
        v = activate(v, "mish")
    if given.SCALE:
        v *= scale
    return tl.where(mask, v + shift + r, 0.0)


@triton.jit
def make_input_slice(
    given,
    n,
    N,
    k,
    keeps,  # whether this program is the one to write the activation
    PDL: tl.constexpr,
):
    """Slice k of the activation beside the skip connection, for sample n: float32 [CG, BT]. What
    the previous kernel has written is read when it has ended."""
    constants = _load_constants(given, n, k)
    if PDL:
        gdc_wait()
    C: tl.constexpr = given.C
    T: tl.constexpr = given.T
    CG: tl.constexpr = given.CG
    offs_c, offs_t = tl.arange(0, CG), tl.arange(0, given.BT)
    if given.C2 == 0 or k < C // CG:
        a = _make_activation(given, constants, n, N, k)
        if given.keep is not None and keeps:
            kept = given.keep + n * C * T + places(k * CG + offs_c, offs_t, C, T, given.LAST)
            tl.store(kept, a, mask=(offs_t < T)[None, :])
    else:
        skip = given.skip + n * given.C2 * T
        skip += places(k * CG - C + offs_c, offs_t, given.C2, T, given.LAST)
        a = tl.load(skip, mask=(offs_t < T)[None, :], other=0.0, cache_modifier=".cg")
    return a
