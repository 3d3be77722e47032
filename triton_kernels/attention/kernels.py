"""The kernels of attention in plain Triton: one forward and two backward, and delta by itself."""

import triton
import triton.language as tl

from ..runtime.dependent_launch import await_inputs
from ..tf32 import as_operand

LOG2_E = tl.constexpr(1.4426950408889634)

# --- tiles ----------------------------------------------------------------------------------------


@triton.jit
def head_offset(head, num_heads, D: tl.constexpr, HEADS_QKV: tl.constexpr):
    """Where in the 3C channels the q of a head starts, and the step from q to k and from k to v."""
    if HEADS_QKV:
        return head * (3 * D), D
    else:
        return head * D, num_heads * D


@triton.jit
def of_head(
    q_ptr,  # in qkv [N, T, 3C], and no kv_ptr; or q [N, T, C],
    kv_ptr,  # and [N, L, 2C]
    n,
    head,
    num_heads,
    T: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
):
    """Where the q of a head begins behind q_ptr, and where its k and v do; and the steps from
    position to position of q, and of k and v."""
    channels = num_heads * D
    if kv_ptr is None:
        offset, part = head_offset(head, num_heads, D, HEADS_QKV)
        q = n.to(tl.int64) * T * (3 * channels) + offset
        return q, q_ptr + (q + part), q_ptr + (q + part + part), 3 * channels, 3 * channels
    else:
        q = n.to(tl.int64) * T * channels + head * D
        k = n.to(tl.int64) * L * (2 * channels) + head * D
        return q, kv_ptr + k, kv_ptr + (k + channels), channels, 2 * channels


@triton.jit
def seen_keys(mask_ptr, n, offs_n, L: tl.constexpr):
    """Which of these keys a sample has."""
    inside = offs_n < L
    if mask_ptr is None:
        return inside
    else:
        return tl.load(mask_ptr + n.to(tl.int64) * L + offs_n, mask=inside, other=0) != 0


@triton.jit
def _locate(num_heads, T: tl.constexpr, BLOCK_T: tl.constexpr):
    """The block of positions of a program, its (sample, head) as one number, and as two. The blocks
    of one head run side by side, so that what they share comes from L2."""
    pid = tl.program_id(0)
    block = pid % tl.cdiv(T, BLOCK_T)
    row = pid // tl.cdiv(T, BLOCK_T)
    return block, row, row // num_heads, row % num_heads


@triton.jit
def load_tile(
    ptr,
    offs_t,
    offs_d,
    stride_t,
    stride_d,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """These positions and channels of one head; zeros outside of it."""
    ptrs = ptr + offs_t[:, None] * stride_t + offs_d[None, :] * stride_d
    if T // offs_t.shape[0] * offs_t.shape[0] == T and D == offs_d.shape[0]:  # no tile is ragged
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(offs_t < T)[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def store_tile(
    ptr,
    value,
    offs_t,
    offs_d,
    stride_t,
    T: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ptrs = ptr + offs_t[:, None] * stride_t + offs_d[None, :]
    value = as_operand(value, ptr.dtype.element_ty, PRECISION == "tf32")
    if T // offs_t.shape[0] * offs_t.shape[0] == T and D == offs_d.shape[0]:  # no tile is ragged
        tl.store(ptrs, value)
    else:
        tl.store(ptrs, value, mask=(offs_t < T)[:, None] & (offs_d < D)[None, :])


@triton.jit
def add_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. A product of float32 is a chain of FMAs, each of which rounds: it ends with its
    tile, since over a row of thousands of positions it would lose more than all else does."""
    if PRECISION == "ieee" and b.dtype == tl.float32:
        # with the last argument the compiler does not make the sum an operand of the product
        product = tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=b.shape[0])
        return acc + product
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


# --- forward --------------------------------------------------------------------------------------


@triton.jit
def attention_fwd_kernel(
    q_ptr,  # qkv [N, T, 3C], or q [N, T, C]
    kv_ptr,  # None, or [N, L, 2C]
    mask_ptr,  # uint8 [N, L], keys that a sample has, or None: all
    o_ptr,  # [N, T, C]
    lse_ptr,  # float32 [N, heads, T], base 2; infinite where no key is seen
    num_heads,
    scale,  # 1 / sqrt(d)
    T: tl.constexpr,  # queries
    L: tl.constexpr,  # keys
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
):
    await_inputs()
    pid_m, row, n, head = _locate(num_heads, T, BLOCK_M)
    channels = num_heads * D
    q_offset, k_ptr, v_ptr, q_row, kv_row = of_head(
        q_ptr, kv_ptr, n, head, num_heads, T, L, D, HEADS_QKV
    )

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + q_offset, offs_m, offs_d, q_row, 1, T, D)
    scale_log2 = scale * LOG2_E

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum
    l = tl.zeros([BLOCK_M], tl.float32)  # running denominator  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_n in range(0, L, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, offs_n, offs_d, kv_row, 1, L, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if L % BLOCK_N != 0 or mask_ptr is not None:
            s = tl.where(seen_keys(mask_ptr, n, offs_n, L)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        if mask_ptr is None:
            shift = m_new
        else:  # of a block without keys, before any other
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        v = load_tile(v_ptr, offs_n, offs_d, kv_row, 1, L, D)
        acc = add_product(
            as_operand(p, v.dtype, PRECISION == "tf32"), v, acc * alpha[:, None], PRECISION
        )
        m = m_new

    if mask_ptr is not None:  # of a sample without keys
        l = tl.where(l > 0, l, 1.0)  # noqa: E741
        m = tl.where(m == float("-inf"), float("inf"), m)
    o_ptr += n.to(tl.int64) * T * channels + head * D
    store_tile(o_ptr, acc / l[:, None], offs_m, offs_d, channels, T, D, PRECISION)
    tl.store(lse_ptr + row.to(tl.int64) * T + offs_m, m + tl.log2(l), mask=offs_m < T)


# --- backward -------------------------------------------------------------------------------------


@triton.jit
def attention_bwd_dq_kernel(
    do_ptr,  # [N, T, C], any strides
    q_ptr,  # qkv [N, T, 3C], or q [N, T, C]
    kv_ptr,  # None, or [N, L, 2C]
    mask_ptr,  # uint8 [N, L] or None
    o_ptr,  # [N, T, C]
    lse_ptr,  # float32 [N, heads, T], base 2
    delta_ptr,  # float32 [N, heads, T], written for the other kernel
    dq_ptr,  # as q_ptr
    rows_ptr,  # float32 [N, blocks of T, 3C] of qkv, or None: sums of dq over a block
    num_heads,
    scale,  # 1 / sqrt(d)
    stride_don,
    stride_dot,
    stride_doc,
    T: tl.constexpr,  # queries
    L: tl.constexpr,  # keys
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
):
    await_inputs()
    pid_m, row, n, head = _locate(num_heads, T, BLOCK_M)
    channels = num_heads * D
    q_offset, k_ptr, v_ptr, q_row, kv_row = of_head(
        q_ptr, kv_ptr, n, head, num_heads, T, L, D, HEADS_QKV
    )
    do_ptr += n.to(tl.int64) * stride_don + head * D * stride_doc
    o_ptr += n.to(tl.int64) * T * channels + head * D

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + q_offset, offs_m, offs_d, q_row, 1, T, D)
    do = load_tile(do_ptr, offs_m, offs_d, stride_dot, stride_doc, T, D)
    o = load_tile(o_ptr, offs_m, offs_d, channels, 1, T, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    offs_row = row.to(tl.int64) * T + offs_m
    tl.store(delta_ptr + offs_row, delta, mask=offs_m < T)
    lse = tl.load(lse_ptr + offs_row, mask=offs_m < T, other=float("inf"))
    scale_log2 = scale * LOG2_E

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_n in range(0, L, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, offs_n, offs_d, kv_row, 1, L, D)
        v = load_tile(v_ptr, offs_n, offs_d, kv_row, 1, L, D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if L % BLOCK_N != 0 or mask_ptr is not None:
            p = tl.where(seen_keys(mask_ptr, n, offs_n, L)[None, :], p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # [BM, BN]
        ds = as_operand(p * (dp - delta[:, None]), k.dtype, PRECISION == "tf32")
        dq = add_product(ds, k, dq, PRECISION)
    dq *= scale
    store_tile(dq_ptr + q_offset, dq, offs_m, offs_d, q_row, T, D, PRECISION)
    if rows_ptr is not None:  # beyond T dq is zero, since lse is infinite
        offset, _ = head_offset(head, num_heads, D, HEADS_QKV)
        rows_ptr += (n * tl.cdiv(T, BLOCK_M) + pid_m).to(tl.int64) * (3 * channels) + offset
        tl.store(rows_ptr + offs_d, tl.sum(dq, 0), mask=offs_d < D)


@triton.jit
def attention_bwd_dkdv_kernel(
    do_ptr,  # [N, T, C], any strides
    q_ptr,  # qkv [N, T, 3C], or q [N, T, C]
    kv_ptr,  # None, or [N, L, 2C]
    mask_ptr,  # uint8 [N, L] or None
    o_ptr,  # [N, T, C]
    lse_ptr,  # float32 [N, heads, T], base 2
    delta_ptr,  # float32 [N, heads, T]; None if ONE_PASS
    dq_ptr,  # as q_ptr
    dkv_ptr,  # as kv_ptr
    # float32 [N, blocks of T, 3C] of qkv, or None: sums of dk and dv; of dq too if ONE_PASS
    rows_ptr,
    num_heads,
    scale,  # 1 / sqrt(d)
    stride_don,
    stride_dot,
    stride_doc,
    T: tl.constexpr,  # queries
    L: tl.constexpr,  # keys
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_N: tl.constexpr,  # keys
    ONE_PASS: tl.constexpr,  # BLOCK_N >= L: this program sees all keys, so it can finish dq as well
):
    await_inputs()
    pid_n, row, n, head = _locate(num_heads, L, BLOCK_N)
    channels = num_heads * D
    do_ptr += n.to(tl.int64) * stride_don + head * D * stride_doc
    o_ptr += n.to(tl.int64) * T * channels + head * D
    lse_ptr += row.to(tl.int64) * T
    if not ONE_PASS:
        delta_ptr += row.to(tl.int64) * T

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    q_offset, k_ptr, v_ptr, q_row, kv_row = of_head(
        q_ptr, kv_ptr, n, head, num_heads, T, L, D, HEADS_QKV
    )
    k = load_tile(k_ptr, offs_n, offs_d, kv_row, 1, L, D)
    v = load_tile(v_ptr, offs_n, offs_d, kv_row, 1, L, D)
    seen = seen_keys(mask_ptr, n, offs_n, L)
    scale_log2 = scale * LOG2_E

    # Scores are transposed, [keys, queries]: p and ds are the left operands of dv and dk as they
    # lie in registers. Only dq needs ds the other way round.
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dq_sum = tl.zeros([BLOCK_D], tl.float32)
    for start_m in range(0, T, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + q_offset, offs_m, offs_d, q_row, 1, T, D)
        do = load_tile(do_ptr, offs_m, offs_d, stride_dot, stride_doc, T, D)
        if ONE_PASS:
            o = load_tile(o_ptr, offs_m, offs_d, channels, 1, T, D)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        else:
            delta = tl.load(delta_ptr + offs_m, mask=offs_m < T, other=0.0)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T, other=float("inf"))
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
        p = tl.exp2(s * scale_log2 - lse[None, :])
        if L % BLOCK_N != 0 or mask_ptr is not None:
            p = tl.where(seen[:, None], p, 0.0)
        dv = add_product(as_operand(p, do.dtype, PRECISION == "tf32"), do, dv, PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BN, BM]
        ds = as_operand(p * (dp - delta[None, :]), q.dtype, PRECISION == "tf32")
        dk = add_product(ds, q, dk, PRECISION)
        if ONE_PASS:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * scale
            store_tile(dq_ptr + q_offset, dq, offs_m, offs_d, q_row, T, D, PRECISION)
            if rows_ptr is not None:
                dq_sum += tl.sum(dq, 0)
    dk *= scale
    _, dk_ptr, dv_ptr, _, _ = of_head(dq_ptr, dkv_ptr, n, head, num_heads, T, L, D, HEADS_QKV)
    store_tile(dk_ptr, dk, offs_n, offs_d, kv_row, L, D, PRECISION)
    store_tile(dv_ptr, dv, offs_n, offs_d, kv_row, L, D, PRECISION)
    if rows_ptr is not None:
        offset, part = head_offset(head, num_heads, D, HEADS_QKV)
        rows_ptr += (n * tl.cdiv(L, BLOCK_N) + pid_n).to(tl.int64) * (3 * channels) + offset
        mask_d = offs_d < D
        if ONE_PASS:
            tl.store(rows_ptr + offs_d, dq_sum, mask=mask_d)
        tl.store(rows_ptr + part + offs_d, tl.sum(dk, 0), mask=mask_d)
        tl.store(rows_ptr + 2 * part + offs_d, tl.sum(dv, 0), mask=mask_d)


@triton.jit
def attention_bwd_delta_kernel(
    do_ptr,  # [N, T, C]
    o_ptr,  # [N, T, C]
    delta_ptr,  # float32 [N, heads, T]
    flags_ptr,  # int32 [N, heads, blocks of T, FLAGS]: zeros are written
    num_heads,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    FLAGS: tl.constexpr,  # of a block of ROWS positions
):
    """What `relayed` needs before it begins."""
    await_inputs()
    block, row, n, head = _locate(num_heads, T, ROWS)
    tl.store(flags_ptr + tl.program_id(0) * FLAGS + tl.arange(0, FLAGS), 0)
    channels = num_heads * D
    start = n.to(tl.int64) * T * channels + head * D
    offs_t = block * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    do = load_tile(do_ptr + start, offs_t, offs_d, channels, 1, T, D)
    o = load_tile(o_ptr + start, offs_t, offs_d, channels, 1, T, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + row.to(tl.int64) * T + offs_t, delta, mask=offs_t < T)
