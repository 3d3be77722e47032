"""The kernels of `head`: a warpgroup or two do a head, which stays in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper.compat import reinterpret, sync_threads, tma_load, tma_store, view_from
from ..hopper.pairs import round_pairs
from ..hopper.pipeline import new_barriers
from ..runtime.dependent_launch import await_inputs
from .kernels import LOG2_E, head_offset

# --- tiles ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _columns(d):
    """The layout of products that are D wide."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])


@gluon.constexpr_function
def _lines(d, num_warps):
    """A layout of rows of D numbers, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // d, d // 8], [num_warps, 1], [1, 0])


@gluon.jit
def _matrix(
    buf, first, ROWS: gl.constexpr,
    more: gl.constexpr = 0, step: gl.constexpr = 1, count: gl.constexpr = None,
):  # fmt: skip
    """ROWS rows of [1, positions, D] from the (`first` + more)-th 64 on, as [ROWS, D]; step and
    count as in `view_from`."""
    D: gl.constexpr = buf.shape[2]
    WIDTH: gl.constexpr = buf.type.layout.swizzle_byte_width
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 16, rank=3)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 16, rank=2)
    blocks = reinterpret(buf, buf.dtype, [buf.shape[1] // 64, 1, 64, D], BLOCK)
    return view_from(blocks, first, [ROWS, D], LAYOUT, more, step, count)


@gluon.jit
def unseen_zero(i):
    """0, which the compiler cannot know. Addresses that depend on it are computed where they are
    needed instead of before the loop over i, which would cost two registers each."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 20;", "=r,r", [i], gl.int32, True, 1)


@gluon.jit
def _replaced(values, i: gl.constexpr, value, COUNT: gl.constexpr):
    """A tuple of COUNT with another value in place i."""
    result = ()
    for j in gl.static_range(COUNT):
        if i == j:
            result = result + (value,)
        else:
            result = result + (values[j],)
    return result


@gluon.jit
def log2(x):
    """The hardware's, within 2^-22: good for a sum that is at least 1 and at most T."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


# --- forward --------------------------------------------------------------------------------------


@gluon.jit
def attention_fwd_head_kernel(
    q_desc,  # qkv [N, T, 3C] in boxes [1, KEEP, D]
    kv_desc,  # the same in boxes [1, ROWS, D]
    o_desc,  # [N, T, C] in boxes [1, KEEP, D]
    lse_ptr,  # float32 [N, heads, T], base 2
    num_heads,
    scale,  # 1 / sqrt(d)
    T: gl.constexpr,
    D: gl.constexpr,
    HEADS_QKV: gl.constexpr,
    ROWS: gl.constexpr,  # positions in shared memory: at least T, 64 times a power of 2
    KEEP: gl.constexpr,  # queries of a program: 64 times a power of 2
    STEP: gl.constexpr,  # keys at a time; the products with one run beside the softmax of another
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = kv_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    OUT: gl.constexpr = _columns(D)
    STEPS: gl.constexpr = ROWS // STEP
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    q_buf = gl.allocate_shared_memory(dtype, [1, KEEP, D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], kv_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], kv_desc.layout)
    bars = new_barriers(2)
    fence_async_shared()
    sync_threads()
    await_inputs()

    PARTS: gl.constexpr = (T + KEEP - 1) // KEEP
    row = gl.program_id(0) // PARTS
    t0 = gl.program_id(0) % PARTS * KEEP
    n, head = row // num_heads, row % num_heads
    column, part = head_offset(head, num_heads, D, HEADS_QKV)
    mbarrier.expect(bars.index(0), (ROWS + KEEP) * D * 2)
    tma_load(kv_desc, [n, 0, column + part], bars.index(0), k_buf)
    tma_load(q_desc, [n, t0, column], bars.index(0), q_buf)
    mbarrier.expect(bars.index(1), ROWS * D * 2)
    tma_load(kv_desc, [n, 0, column + 2 * part], bars.index(1), v_buf)
    scale_log2 = scale * LOG2_E
    zeros = gl.zeros([64, STEP], gl.float32, SCORES)

    mbarrier.wait(bars.index(0), 0)
    for i in range(KEEP // 64):
        zero = unseen_zero(i)
        q = _matrix(q_buf, i, 64)
        scores = ()
        for j in gl.static_range(STEPS):
            k = _matrix(k_buf, zero, STEP, j * (STEP // 64), count=1).permute((1, 0))
            scores = scores + (warpgroup_mma(q, k, zeros, use_acc=False, is_async=True),)
        if STEPS == 1:
            scores = (warpgroup_mma_wait(0, deps=scores),)
        else:
            scores = warpgroup_mma_wait(0, deps=scores)
        if T != ROWS:
            masked = ()
            for j in gl.static_range(STEPS):
                keys = j * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, SCORES))
                masked = masked + (gl.where((keys < T)[None, :], scores[j], float("-inf")),)
            scores = masked
        m = gl.max(scores[0], 1)
        for j in gl.static_range(1, STEPS):
            m = gl.maximum(m, gl.max(scores[j], 1))
        m *= scale_log2
        mbarrier.wait(bars.index(1), 0)  # once is as good as often
        acc = gl.zeros([64, D], gl.float32, OUT)
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        operands = ()
        for j in gl.static_range(STEPS):
            p = gl.exp2(scores[j] * scale_log2 - m[:, None])
            total += gl.sum(p, 1)
            p = gl.convert_layout(round_pairs(p, dtype), gl.DotOperandLayout(0, OUT, 2))
            v = _matrix(v_buf, zero, STEP, j * (STEP // 64), count=1)
            acc = warpgroup_mma(p, v, acc, use_acc=j > 0, is_async=True)
            operands = operands + (p,)
        acc = warpgroup_mma_wait(0, deps=(acc,) + operands)[0]
        total_o = gl.convert_layout(total, ROW)
        acc = acc * (1 / total_o)[:, None]
        sync_threads()  # all have done with this q
        q.store(round_pairs(acc, dtype))
        offs = t0 + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        gl.store(lse_ptr + row.to(gl.int64) * T + offs, m + log2(total), mask=offs < T)
    fence_async_shared()
    sync_threads()
    tma_store(o_desc, [n, t0, head * D], q_buf)
    tma.store_wait(0)


# --- backward -------------------------------------------------------------------------------------


@gluon.jit
def _keep_vectors(
    o_ptr, lse_ptr, stride, do_buf, lse_buf, delta_buf, do_full, T: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """lse and delta of a head, to shared memory."""
    ROWS: gl.constexpr = lse_buf.shape[0]
    D: gl.constexpr = do_buf.shape[2]
    LINES: gl.constexpr = _lines(D, num_warps)
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    offs_t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    offs_d = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    o_ptrs = o_ptr + offs_t[:, None] * stride + offs_d[None, :]
    o = gl.load(o_ptrs, mask=(offs_t < T)[:, None], other=0.0)
    offs = gl.arange(0, ROWS, layout=VECTOR)
    lse_buf.store(gl.load(lse_ptr + offs, mask=offs < T, other=float("inf")))
    mbarrier.wait(do_full, 0)
    do = _matrix(do_buf, 0, ROWS).load(LINES)
    delta_buf.store(gl.sum(o.to(gl.float32) * do.to(gl.float32), 1))
    sync_threads()


@gluon.jit
def _store_sums(bufs, ones, rows_ptr, part, OUT: gl.constexpr):
    """The sums over positions of dq, dk and dv, as products with a matrix of ones."""
    D: gl.constexpr = bufs[0].shape[2]
    sums = ()
    for i in gl.static_range(3):
        acc = gl.zeros([64, D], gl.float32, OUT)
        for j in gl.static_range(bufs[0].shape[1] // 64):
            acc = warpgroup_mma(ones, _matrix(bufs[i], j, 64), acc, use_acc=j > 0, is_async=True)
        sums = sums + (acc,)
    sums = warpgroup_mma_wait(0, deps=sums)
    offs_d = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))[None, :]
    copy = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))[:, None]
    for i in gl.static_range(3):
        gl.store(rows_ptr + i * part + offs_d + copy * 0, sums[i], mask=copy + offs_d * 0 == 0)


@gluon.jit
def attention_bwd_head_kernel(
    qkv_desc,  # [N, T, 3C] in boxes [1, ROWS, D]
    do_desc,  # [N, T, C] in boxes [1, ROWS, D]
    dqkv_desc,  # [N, T, 3C] in boxes [1, ROWS, D]
    o_ptr,  # [N, T, C]
    lse_ptr,  # float32 [N, heads, T], base 2
    rows_ptr,  # float32 [N, 3C] or None: sums of dq, dk and dv
    num_heads,
    scale,  # 1 / sqrt(d)
    T: gl.constexpr,
    D: gl.constexpr,
    HEADS_QKV: gl.constexpr,
    ROWS: gl.constexpr,  # positions in shared memory: at least T, 64 times a power of 2
    BUFFERS: gl.constexpr,  # of ds: 2, or 1 and a barrier more
    HELD: gl.constexpr,  # k and v are operands from registers
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = qkv_desc.dtype
    BLOCKS: gl.constexpr = ROWS // 64
    KEYS: gl.constexpr = 16 * num_warps  # at a time
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    SPLIT: gl.constexpr = num_warps // 4  # of the channels of dq
    OUT_Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, D // SPLIT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    KEPT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], qkv_desc.layout)
    k_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], qkv_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], qkv_desc.layout)
    do_buf = gl.allocate_shared_memory(dtype, [1, ROWS, D], do_desc.layout)
    ds_bufs = (gl.allocate_shared_memory(dtype, [KEYS, 64], SQUARE),)
    if BUFFERS == 2:
        ds_bufs = ds_bufs + (gl.allocate_shared_memory(dtype, [KEYS, 64], SQUARE),)
    lse_buf = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    delta_buf = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    bars = new_barriers(2)
    fence_async_shared()
    sync_threads()
    await_inputs()

    row = gl.program_id(0)
    n, head = row // num_heads, row % num_heads
    column, part = head_offset(head, num_heads, D, HEADS_QKV)
    mbarrier.expect(bars.index(0), ROWS * D * 2)
    tma_load(do_desc, [n, 0, head * D], bars.index(0), do_buf)
    mbarrier.expect(bars.index(1), 3 * ROWS * D * 2)
    tma_load(qkv_desc, [n, 0, column + part], bars.index(1), k_buf)
    tma_load(qkv_desc, [n, 0, column], bars.index(1), q_buf)
    tma_load(qkv_desc, [n, 0, column + 2 * part], bars.index(1), v_buf)

    o_ptr += n.to(gl.int64) * (T * num_heads * D) + head * D
    lse_ptr += row.to(gl.int64) * T
    _keep_vectors(
        o_ptr, lse_ptr, num_heads * D, do_buf, lse_buf, delta_buf, bars.index(0), T, num_warps
    )
    scale_log2 = scale * LOG2_E

    # Scores are transposed, [keys, queries]: p and ds are the left operands of dv and dk as they
    # lie in registers. dq needs ds the other way round, by way of shared memory.
    dqs = ()
    for _ in gl.static_range(BLOCKS):
        dqs = dqs + (gl.zeros([64, D], gl.float32, OUT_Q),)
    zeros = gl.zeros([KEYS, 64], gl.float32, SCORES)
    mbarrier.wait(bars.index(1), 0)
    for j in range(ROWS // KEYS):
        k = _matrix(k_buf, j * (KEYS // 64), KEYS, step=KEYS // 64)
        v = _matrix(v_buf, j * (KEYS // 64), KEYS, step=KEYS // 64)
        zero = unseen_zero(j)
        k_left = k
        v_left = v
        if HELD:
            k_left = k.load(KEPT)
            v_left = v.load(KEPT)
        q = _matrix(q_buf, zero, 64)
        do = _matrix(do_buf, zero, 64)
        dk = gl.zeros([KEYS, D], gl.float32, OUT)
        dv = gl.zeros([KEYS, D], gl.float32, OUT)
        s = warpgroup_mma(k_left, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        for i in gl.static_range(BLOCKS):
            lse = lse_buf.slice(i * 64, 64).load(QUERY)
            if i == 0:
                s = warpgroup_mma_wait(0, deps=(s,))
            else:  # dk and dq of the block before may be under way
                s, dv, _p = warpgroup_mma_wait(2, deps=(s, dv, p))  # noqa: F821  of the block before
            dp = warpgroup_mma(v_left, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            weights = gl.exp2(s * scale_log2 - lse[None, :])
            if T != ROWS:
                keys = j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
                weights = gl.where((keys < T)[:, None], weights, 0.0)
            p = gl.convert_layout(round_pairs(weights, dtype), LEFT)
            dv = warpgroup_mma(p, do, dv, use_acc=i > 0, is_async=True)
            if i == 0:
                dp = warpgroup_mma_wait(1, deps=(dp,))
            else:
                before = (dp, dk, dqs[i - 1], ds_left)  # noqa: F821
                dp, dk, dq, _ds = warpgroup_mma_wait(1, deps=before)
                dqs = _replaced(dqs, i - 1, dq, BLOCKS)
            delta = delta_buf.slice(i * 64, 64).load(QUERY)
            ds = round_pairs(weights * (dp - delta[None, :]), dtype)
            last_q = q
            if i + 1 < BLOCKS:
                q = _matrix(q_buf, i + 1 + zero, 64)
                do = _matrix(do_buf, i + 1 + zero, 64)
                s = warpgroup_mma(k_left, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            ds_buf = ds_bufs[i % BUFFERS]
            if BUFFERS == 1:
                sync_threads()  # all have done with the one before
            ds_buf.store(ds)
            fence_async_shared()
            sync_threads()
            ds_left = gl.convert_layout(ds, LEFT)
            dk = warpgroup_mma(ds_left, last_q, dk, use_acc=i > 0, is_async=True)
            dq = warpgroup_mma(ds_buf.permute((1, 0)), k, dqs[i], is_async=True)
            dqs = _replaced(dqs, i, dq, BLOCKS)
        dk, dv, dq, _p, _ds = warpgroup_mma_wait(0, deps=(dk, dv, dqs[BLOCKS - 1], p, ds_left))
        dqs = _replaced(dqs, BLOCKS - 1, dq, BLOCKS)
        sync_threads()  # all have done with this k and v, and results take their place
        k.store(round_pairs(dk * scale, dtype))
        v.store(round_pairs(dv, dtype))
    for i in gl.static_range(BLOCKS):
        _matrix(q_buf, i, 64).store(round_pairs(dqs[i] * scale, dtype))
    if rows_ptr is not None:
        ds_bufs[0].store(gl.full([KEYS, 64], 1.0, dtype, SCORES))
    fence_async_shared()
    sync_threads()
    tma_store(dqkv_desc, [n, 0, column + part], k_buf)
    tma_store(dqkv_desc, [n, 0, column + 2 * part], v_buf)
    tma_store(dqkv_desc, [n, 0, column], q_buf)
    if rows_ptr is not None:
        rows_ptr += n.to(gl.int64) * (3 * num_heads * D) + column
        _store_sums((q_buf, k_buf, v_buf), ds_bufs[0].slice(0, 64), rows_ptr, part, OUT_Q)
    tma.store_wait(0)
