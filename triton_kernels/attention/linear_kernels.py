"""Kernels of linear attention (Shen et al. 2021): softmaxes over channels of queries and over
positions of keys, and no scores. Of each head of each sample, with S the positions of the image and
those of a memory that all samples share:

    context[d, e] = sum_s exp(k[s, d]) v[s, e] / sum_s exp(k[s, d])
    o[t, e]       = scale sum_d p[t, d] context[d, e],          p = softmax over d of q

    d_context     = scale sum_t p[t, d] do[t, e]
    dp            = scale do context^T                          dq = p (dp - sum_d p dp)
    kw            = exp(k - lse)                                dv = kw d_context
    dk            = kw (v d_context^T - sum_e context d_context)

The sum in dk is over positions of kw times its gradient, which needs no pass over them. A sum over
positions is cut into SPLITS programs a head, whose parts a second launch merges in order. q, k and
v may be parts of one tensor: rows of a head are D numbers, heads and positions lie wherever strides
say. Exponents are of base 2. Operands of products have the type of q; float32 is rounded to TF32
where products are in that, and else each product is three of TF32.
"""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand, dot_of_split
from .kernels import LOG2_E


@triton.jit
def _locate(SPLITS, HEADS):
    """The split, head and sample of a program."""
    pid = tl.program_id(0)
    return pid % SPLITS, pid // SPLITS % HEADS, (pid // SPLITS // HEADS).to(tl.int64)


@triton.jit
def _channels(D, BLOCK_D: tl.constexpr):
    """Those of a head and which there are; and of a matrix [D, D] where its numbers are, and
    which."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    square = offs_d[:, None] * D + offs_d[None, :]
    return offs_d, mask_d, square, mask_d[:, None] & mask_d[None, :]


@triton.jit
def _product(a, b, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """a b, of operands in that type."""
    if PRECISION == "ieee":
        return dot_of_split(a.to(tl.float32), b.to(tl.float32))
    else:
        a, b = as_operand(a, dtype, True), as_operand(b, dtype, True)
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load_keys(ptr, offs, rows, mask_d):
    """Keys in base 2: -inf where there is no row, 0 where there is no channel."""
    k = tl.load(ptr + offs, mask=rows[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    return tl.where(rows[:, None], k * LOG2_E, float("-inf"))


@triton.jit
def _merge_rows(top, total, acc, k, v, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The sums with those of a tile of keys and values."""
    new = tl.maximum(top, tl.max(k, 0))
    less = tl.exp2(top - new)
    w = tl.exp2(k - new[None, :])
    total = total * less + tl.sum(w, 0)
    product = _product(tl.trans(w), v, dtype, PRECISION)
    return new, total, acc * less[:, None] + product


@triton.jit(do_not_specialize=["SPLITS", "chunk"])
def linear_context_kernel(
    k_ptr,  # [N, T, H, D]
    v_ptr,  # [N, T, H, D]
    memory_k_ptr,  # [M, H, D] or None
    memory_v_ptr,  # [M, H, D] or None
    acc_ptr,  # float32 [N, H, SPLITS, D, D]: sums of w v^T
    sums_ptr,  # float32 [N, H, SPLITS, 2, D]: largest keys, and sums of w
    stride_k,
    stride_v,
    head_k,
    head_v,
    T,
    M,
    D,
    HEADS,
    SPLITS,
    chunk,  # positions of a program
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    await_inputs()
    split, head, n = _locate(SPLITS, HEADS)
    dtype = v_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    top = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    if memory_k_ptr is not None:
        if split == 0:
            offs_m = tl.arange(0, BLOCK_M)
            rows = offs_m < M
            offs = (offs_m[:, None] * HEADS + head) * D + offs_d[None, :]
            k = _load_keys(memory_k_ptr, offs, rows, mask_d)
            v = tl.load(memory_v_ptr + offs, mask=rows[:, None] & mask_d[None, :], other=0.0)
            top, total, acc = _merge_rows(top, total, acc, k, v, dtype, PRECISION)
    k_ptr += n * T * stride_k + head * head_k
    v_ptr += n * T * stride_v + head * head_v
    end = tl.minimum((split + 1) * chunk, T)
    for start in range(split * chunk, end, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        rows = offs_p < end
        k = _load_keys(k_ptr, offs_p[:, None] * stride_k + offs_d[None, :], rows, mask_d)
        v = tl.load(
            v_ptr + offs_p[:, None] * stride_v + offs_d[None, :],
            mask=rows[:, None] & mask_d[None, :],
            other=0.0,
        )
        top, total, acc = _merge_rows(top, total, acc, k, v, dtype, PRECISION)
    part = tl.program_id(0).to(tl.int64)  # (n HEADS + head) SPLITS + split
    tl.store(sums_ptr + part * 2 * D + offs_d, top, mask=mask_d)
    tl.store(sums_ptr + part * 2 * D + D + offs_d, total, mask=mask_d)
    offs = offs_d[:, None] * D + offs_d[None, :]
    tl.store(acc_ptr + part * D * D + offs, acc, mask=mask_d[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["SPLITS"])
def linear_merge_kernel(
    acc_ptr,  # float32 [N, H, SPLITS, D, D]
    sums_ptr,  # float32 [N, H, SPLITS, 2, D]
    context_ptr,  # float32 [N, H, D, D]
    lse_ptr,  # float32 [N, H, D]
    D,
    SPLITS,
    BLOCK_D: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0).to(tl.int64)
    offs_d, mask_d, square, mask = _channels(D, BLOCK_D)
    top = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for split in range(SPLITS):
        part = pid * SPLITS + split
        largest = tl.load(sums_ptr + part * 2 * D + offs_d, mask=mask_d, other=0.0)
        sums = tl.load(sums_ptr + part * 2 * D + D + offs_d, mask=mask_d, other=1.0)
        new = tl.maximum(top, largest)
        less, more = tl.exp2(top - new), tl.exp2(largest - new)
        total = total * less + sums * more
        product = tl.load(acc_ptr + part * D * D + square, mask=mask, other=0.0)
        acc = acc * less[:, None] + product * more[:, None]
        top = new
    tl.store(context_ptr + pid * D * D + square, acc / total[:, None], mask=mask)
    tl.store(lse_ptr + pid * D + offs_d, top + tl.log2(total), mask=mask_d)


@triton.jit
def _softmax_rows(q_ptr, offs, rows, mask_d):
    q = tl.load(q_ptr + offs, mask=rows[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    q = tl.where(mask_d[None, :], q * LOG2_E, float("-inf"))
    w = tl.exp2(q - tl.max(q, 1)[:, None])
    return w / tl.sum(w, 1)[:, None]


@triton.jit(do_not_specialize=["SPLITS", "chunk"])
def linear_attention_kernel(
    q_ptr,  # [N, T, H, D]
    context_ptr,  # float32 [N, H, D, D]
    o_ptr,  # [N, T, H, D], contiguous
    stride_q,
    head_q,
    scale,
    T,
    D,
    HEADS,
    SPLITS,
    chunk,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    await_inputs()
    split, head, n = _locate(SPLITS, HEADS)
    dtype = o_ptr.dtype.element_ty
    offs_d, mask_d, square, mask_dd = _channels(D, BLOCK_D)
    context_ptr += (n * HEADS + head) * D * D
    context = tl.load(context_ptr + square, mask=mask_dd, other=0.0)
    q_ptr += n * T * stride_q + head * head_q
    o_ptr += (n * T * HEADS + head) * D
    end = tl.minimum((split + 1) * chunk, T)
    for start in range(split * chunk, end, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        rows = offs_p < end
        p = _softmax_rows(q_ptr, offs_p[:, None] * stride_q + offs_d[None, :], rows, mask_d)
        o = _product(p, context, dtype, PRECISION) * scale
        offs = offs_p[:, None] * (HEADS * D) + offs_d[None, :]
        tl.store(o_ptr + offs, o.to(dtype), mask=rows[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["SPLITS", "chunk"])
def linear_bwd_q_kernel(
    q_ptr,  # [N, T, H, D]
    do_ptr,  # [N, T, H, D], contiguous
    context_ptr,  # float32 [N, H, D, D]
    dq_ptr,  # as q
    d_context_ptr,  # float32 [SPLITS, N, H, D, D]
    stride_q,
    head_q,
    scale,
    T,
    D,
    HEADS,
    SPLITS,
    chunk,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    await_inputs()
    split, head, n = _locate(SPLITS, HEADS)
    dtype = do_ptr.dtype.element_ty
    offs_d, mask_d, square, mask_dd = _channels(D, BLOCK_D)
    at = n * HEADS + head
    context = tl.load(context_ptr + at * D * D + square, mask=mask_dd, other=0.0)
    context = tl.trans(context)
    q_ptr += n * T * stride_q + head * head_q
    dq_ptr += n * T * stride_q + head * head_q
    do_ptr += (n * T * HEADS + head) * D
    acc = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    end = tl.minimum((split + 1) * chunk, T)
    for start in range(split * chunk, end, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        rows = offs_p < end
        mask = rows[:, None] & mask_d[None, :]
        offs_q = offs_p[:, None] * stride_q + offs_d[None, :]
        p = _softmax_rows(q_ptr, offs_q, rows, mask_d)
        offs = offs_p[:, None] * (HEADS * D) + offs_d[None, :]
        do = tl.load(do_ptr + offs, mask=mask, other=0.0)
        acc += _product(tl.trans(p), do, dtype, PRECISION)
        dp = _product(do, context, dtype, PRECISION) * scale
        dq = p * (dp - tl.sum(p * dp, 1)[:, None])
        tl.store(dq_ptr + offs_q, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    d_context_ptr += (split * (tl.num_programs(0) // SPLITS) + at) * D * D
    tl.store(d_context_ptr + square, acc * scale, mask=mask_dd)


@triton.jit
def _of_keys(k, v, lse, d_context, of_sum, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv of a tile."""
    kw = tl.exp2(k - lse[None, :])
    dkw = _product(v, tl.trans(d_context), dtype, PRECISION)
    dv = _product(kw, d_context, dtype, PRECISION)
    return kw * (dkw - of_sum[None, :]), dv


@triton.jit(do_not_specialize=["SPLITS", "chunk"])
def linear_bwd_kv_kernel(
    k_ptr,  # [N, T, H, D]
    v_ptr,  # [N, T, H, D]
    memory_k_ptr,  # [M, H, D] or None
    memory_v_ptr,  # [M, H, D] or None
    context_ptr,  # float32 [N, H, D, D]
    d_context_ptr,  # float32 [N, H, D, D]
    lse_ptr,  # float32 [N, H, D]
    dk_ptr,  # as k
    dv_ptr,  # as v
    d_memory_k_ptr,  # float32 [N, M, H, D] or None
    d_memory_v_ptr,  # float32 [N, M, H, D] or None
    stride_k,
    stride_v,
    head_k,
    head_v,
    T,
    M,
    D,
    HEADS,
    SPLITS,
    chunk,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    await_inputs()
    split, head, n = _locate(SPLITS, HEADS)
    dtype = v_ptr.dtype.element_ty
    offs_d, mask_d, square, mask_dd = _channels(D, BLOCK_D)
    at = n * HEADS + head
    context = tl.load(context_ptr + at * D * D + square, mask=mask_dd, other=0.0)
    d_context = tl.load(d_context_ptr + at * D * D + square, mask=mask_dd, other=0.0)
    of_sum = tl.sum(context * d_context, 1)
    lse = tl.load(lse_ptr + at * D + offs_d, mask=mask_d, other=0.0)
    if memory_k_ptr is not None:
        if split == 0:
            offs_m = tl.arange(0, BLOCK_M)
            rows = offs_m < M
            mask = rows[:, None] & mask_d[None, :]
            offs = (offs_m[:, None] * HEADS + head) * D + offs_d[None, :]
            k = _load_keys(memory_k_ptr, offs, rows, mask_d)
            v = tl.load(memory_v_ptr + offs, mask=mask, other=0.0)
            dk, dv = _of_keys(k, v, lse, d_context, of_sum, dtype, PRECISION)
            offs += n * M * HEADS * D
            tl.store(d_memory_k_ptr + offs, dk, mask=mask)
            tl.store(d_memory_v_ptr + offs, dv, mask=mask)
    k_ptr += n * T * stride_k + head * head_k
    dk_ptr += n * T * stride_k + head * head_k
    v_ptr += n * T * stride_v + head * head_v
    dv_ptr += n * T * stride_v + head * head_v
    end = tl.minimum((split + 1) * chunk, T)
    for start in range(split * chunk, end, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        rows = offs_p < end
        mask = rows[:, None] & mask_d[None, :]
        offs_k = offs_p[:, None] * stride_k + offs_d[None, :]
        offs_v = offs_p[:, None] * stride_v + offs_d[None, :]
        k = _load_keys(k_ptr, offs_k, rows, mask_d)
        v = tl.load(v_ptr + offs_v, mask=mask, other=0.0)
        dk, dv = _of_keys(k, v, lse, d_context, of_sum, dtype, PRECISION)
        tl.store(dk_ptr + offs_k, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_ptr + offs_v, dv.to(dv_ptr.dtype.element_ty), mask=mask)
