"""Attention where all keys fit one tile, in plain Triton: a program keeps the keys and values of a
head, and walks over queries, which the compiler fetches ahead.

    forward    s = q k^T    p = softmax(s)    o = p v
    backward   p = softmax(s)   dp = do v^T   delta = sum_keys p dp   ds = p (dp - delta)
               dv += p^T do   dk += ds^T q   dq = ds k

Since a program sees all keys it needs no running maximum, finishes dq, and has delta without o. The
channels of a head are a block of a power of two and the rest behind it, which has a block of its
own: 40 are 32 and 16, not 64.
"""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand
from .kernels import LOG2_E, add_product, load_tile, of_head, seen_keys, store_tile

# --- tiles of a block and the rest ----------------------------------------------------------------


@triton.jit
def _locate_part(num_heads, parts):
    """The part of the queries of a program, its sample and its head; and how many samples there
    are. Heads run side by side: their channels share sectors of memory."""
    pid = tl.program_id(0)
    samples = tl.num_programs(0) // (parts * num_heads)
    row = pid // num_heads
    return row // samples, row % samples, pid % num_heads, samples


@triton.jit
def _load_first(
    ptr,
    offs_t,
    stride_t,
    stride_d,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """These positions of one head, its first channels; zeros outside."""
    inside: tl.constexpr = D if D < BLOCK_D else BLOCK_D
    return load_tile(ptr, offs_t, tl.arange(0, BLOCK_D), stride_t, stride_d, T, inside)


@triton.jit
def _load_rest(
    ptr,
    offs_t,
    stride_t,
    stride_d,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    """The channels behind these; None, which no tuple of both could hold, if there are none."""
    if REST > 0:
        inside: tl.constexpr = D - BLOCK_D
        ptr += BLOCK_D * stride_d
        return load_tile(ptr, offs_t, tl.arange(0, REST), stride_t, stride_d, T, inside)


@triton.jit
def _store(
    ptr,
    first,
    rest,
    offs_t,
    stride_t,
    T: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    offs = tl.arange(0, first.shape[1])
    if rest is None:
        store_tile(ptr, first, offs_t, offs, stride_t, T, D, PRECISION)
    else:
        store_tile(ptr, first, offs_t, offs, stride_t, T, first.shape[1], PRECISION)
        offs = first.shape[1] + tl.arange(0, rest.shape[1])
        store_tile(ptr, rest, offs_t, offs, stride_t, T, D, PRECISION)


@triton.jit
def _product(a, a_rest, b, b_rest, PRECISION: tl.constexpr):
    """a b^T over the channels of both blocks."""
    product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if a_rest is not None:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision=PRECISION)
    return product


@triton.jit
def _of_inside(x, L: tl.constexpr):
    """x [queries, keys], and zeros beyond L, which are known when this is compiled: nothing is
    computed there."""
    if L < x.shape[1]:
        return tl.where((tl.arange(0, x.shape[1]) < L)[None, :], x, 0.0)
    else:
        return x


@triton.jit
def _zeros_of_rest(BLOCK_N: tl.constexpr, REST: tl.constexpr):
    if REST > 0:
        return tl.zeros([BLOCK_N, REST], tl.float32)


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def attention_few_keys_fwd_kernel(
    q_ptr,  # qkv [N, T, 3C], or q [N, T, C]
    kv_ptr,  # None, or [N, L, 2C]
    mask_ptr,  # uint8 [N, L], keys that a sample has, or None: all
    o_ptr,  # [N, T, C]
    lse_ptr,  # float32 [N, heads, T], base 2; infinite where no key is seen
    num_heads,
    scale,  # 1 / sqrt(d)
    parts,  # programs of a head, and queries of one, in whole blocks
    walk,
    T: tl.constexpr,  # queries
    L: tl.constexpr,  # keys
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys, at least L
):
    await_inputs()
    part, n, head, _ = _locate_part(num_heads, parts)
    channels = num_heads * D
    q_offset, k_ptr, v_ptr, q_row, kv_row = of_head(
        q_ptr, kv_ptr, n, head, num_heads, T, L, D, HEADS_QKV
    )
    q_ptr += q_offset
    o_ptr += n.to(tl.int64) * T * channels + head * D
    lse_ptr += (n * num_heads + head).to(tl.int64) * T
    offs_n = tl.arange(0, BLOCK_N)
    k = _load_first(k_ptr, offs_n, kv_row, 1, L, D, BLOCK_D)
    k_rest = _load_rest(k_ptr, offs_n, kv_row, 1, L, D, BLOCK_D, REST)
    v = _load_first(v_ptr, offs_n, kv_row, 1, L, D, BLOCK_D)
    v_rest = _load_rest(v_ptr, offs_n, kv_row, 1, L, D, BLOCK_D, REST)
    seen = seen_keys(mask_ptr, n, offs_n, L)
    scale_log2 = scale * LOG2_E
    for start in range(part * walk, min(part * walk + walk, T), BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        q = _load_first(q_ptr, offs_m, q_row, 1, T, D, BLOCK_D)
        q_rest = _load_rest(q_ptr, offs_m, q_row, 1, T, D, BLOCK_D, REST)
        s = _product(q, q_rest, k, k_rest, PRECISION)  # [BM, BN]
        if L % BLOCK_N != 0 or mask_ptr is not None:
            s = tl.where(seen[None, :], s, float("-inf"))
        m = tl.max(s, 1) * scale_log2
        if mask_ptr is not None:  # of a sample without keys
            m = tl.where(m == float("-inf"), 0.0, m)
        p = tl.exp2(s * scale_log2 - m[:, None])
        l = tl.sum(p, 1)  # noqa: E741
        if mask_ptr is not None:
            m = tl.where(l > 0, m, float("inf"))
            l = tl.where(l > 0, l, 1.0)  # noqa: E741
        p = as_operand(p, q.dtype, PRECISION == "tf32")
        o = tl.dot(p, v, input_precision=PRECISION) / l[:, None]
        o_rest = None
        if REST > 0:
            o_rest = tl.dot(p, v_rest, input_precision=PRECISION) / l[:, None]
        _store(o_ptr, o, o_rest, offs_m, channels, T, D, PRECISION)
        tl.store(lse_ptr + offs_m, m + tl.log2(l), mask=offs_m < T)


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def attention_few_keys_bwd_kernel(
    do_ptr,  # [N, T, C], any strides
    q_ptr,  # [N, T, C]
    kv_ptr,  # [N, L, 2C]
    mask_ptr,  # uint8 [N, L] or None
    lse_ptr,  # float32 [N, heads, T], base 2
    dq_ptr,  # as q_ptr
    dkv_ptr,  # as kv_ptr; or of several parts, float32 [parts, N, L, 2C]
    num_heads,
    scale,  # 1 / sqrt(d)
    parts,  # programs of a head, and queries of one, in whole blocks
    walk,
    stride_don,
    stride_dot,
    stride_doc,
    T: tl.constexpr,  # queries
    L: tl.constexpr,  # keys
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys, at least L
    BY_QUERY: tl.constexpr,  # scores are [queries, keys], and channels one block; or the other way
):
    await_inputs()
    part, n, head, samples = _locate_part(num_heads, parts)
    do_ptr += n.to(tl.int64) * stride_don + head * D * stride_doc
    lse_ptr += (n * num_heads + head).to(tl.int64) * T
    offs_n = tl.arange(0, BLOCK_N)
    q_offset, k_ptr, v_ptr, q_row, kv_row = of_head(
        q_ptr, kv_ptr, n, head, num_heads, T, L, D, HEADS_QKV
    )
    k = _load_first(k_ptr, offs_n, kv_row, 1, L, D, BLOCK_D)
    k_rest = _load_rest(k_ptr, offs_n, kv_row, 1, L, D, BLOCK_D, REST)
    v = _load_first(v_ptr, offs_n, kv_row, 1, L, D, BLOCK_D)
    v_rest = _load_rest(v_ptr, offs_n, kv_row, 1, L, D, BLOCK_D, REST)
    seen = seen_keys(mask_ptr, n, offs_n, L)
    if BY_QUERY and mask_ptr is not None:  # keys that are not seen add nothing to dq and delta
        k = tl.where(seen[:, None], k, 0.0).to(k.dtype)
        v = tl.where(seen[:, None], v, 0.0).to(v.dtype)
    scale_log2 = scale * LOG2_E

    # By query, a sum over keys is one of a thread and its neighbours, and dk and dv are [d, keys],
    # so that what products read is in shared memory. The other way round p and ds are the left
    # operands of dv and dk as they lie in registers, and channels may be two blocks.
    if BY_QUERY:
        dk = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        dv = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    else:
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_rest = _zeros_of_rest(BLOCK_N, REST)
    dv_rest = _zeros_of_rest(BLOCK_N, REST)
    for start in range(part * walk, min(part * walk + walk, T), BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        q = _load_first(q_ptr + q_offset, offs_m, q_row, 1, T, D, BLOCK_D)
        q_rest = _load_rest(q_ptr + q_offset, offs_m, q_row, 1, T, D, BLOCK_D, REST)
        do = _load_first(do_ptr, offs_m, stride_dot, stride_doc, T, D, BLOCK_D)
        do_rest = _load_rest(do_ptr, offs_m, stride_dot, stride_doc, T, D, BLOCK_D, REST)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T, other=float("inf"))
        dq_rest = None
        if BY_QUERY:
            s = _product(q, None, k, None, PRECISION)  # [BM, BN]
            dp = _product(do, None, v, None, PRECISION)
            logarithm = s * scale_log2 - lse[:, None]
            if mask_ptr is not None:  # of keys that are not seen as well
                logarithm = tl.minimum(logarithm, 0.0)
            p = _of_inside(tl.exp2(logarithm), L)
            weighed = _of_inside(p * dp, L)
            ds = _of_inside(weighed - p * tl.sum(weighed, 1)[:, None], L)
            ds = as_operand(ds, q.dtype, PRECISION == "tf32")
            p = as_operand(p, do.dtype, PRECISION == "tf32")
            dv = add_product(tl.trans(do), p, dv, PRECISION)
            dk = add_product(tl.trans(q), ds, dk, PRECISION)
            dq = tl.dot(ds, k, input_precision=PRECISION) * scale
        else:
            s = _product(k, k_rest, q, q_rest, PRECISION)  # [BN, BM]
            p = tl.exp2(s * scale_log2 - lse[None, :])
            if L % BLOCK_N != 0 or mask_ptr is not None:
                p = tl.where(seen[:, None], p, 0.0)
            p_operand = as_operand(p, do.dtype, PRECISION == "tf32")
            dv = add_product(p_operand, do, dv, PRECISION)
            if REST > 0:
                dv_rest = add_product(p_operand, do_rest, dv_rest, PRECISION)
            dp = _product(v, v_rest, do, do_rest, PRECISION)  # [BN, BM]
            delta = tl.sum(p * dp, 0)
            ds = as_operand(p * (dp - delta[None, :]), q.dtype, PRECISION == "tf32")
            dk = add_product(ds, q, dk, PRECISION)
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * scale
            if REST > 0:
                dk_rest = add_product(ds, q_rest, dk_rest, PRECISION)
                dq_rest = tl.dot(tl.trans(ds), k_rest, input_precision=PRECISION) * scale
        _store(dq_ptr + q_offset, dq, dq_rest, offs_m, q_row, T, D, PRECISION)
    if BY_QUERY:
        dk, dv = tl.trans(dk), tl.trans(dv)
        if mask_ptr is not None:  # read again, since registers are few in the loop
            seen = seen_keys(mask_ptr, n, offs_n, L)
            dk = tl.where(seen[:, None], dk, 0.0)
            dv = tl.where(seen[:, None], dv, 0.0)
    dk *= scale
    if REST > 0:
        dk_rest *= scale
    n = part * samples + n
    _, dk_ptr, dv_ptr, _, _ = of_head(dq_ptr, dkv_ptr, n, head, num_heads, T, L, D, HEADS_QKV)
    _store(dk_ptr, dk, dk_rest, offs_n, kv_row, L, D, PRECISION)
    _store(dv_ptr, dv, dv_rest, offs_n, kv_row, L, D, PRECISION)
