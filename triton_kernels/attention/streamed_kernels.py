"""The kernels of `streamed`: warps keep queries, and blocks of keys and values come by.

In both the scores of the next block and the values of this one are products that run together,
behind the softmax of this block. A step of the loop, j being the block:

    p = softmax(s)    s' = q k_{j+1}^T    acc = acc alpha + p v_j    wait for both
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper.compat import aggregate, reinterpret, sync_threads, tma_load, tma_store
from ..hopper.pairs import round_pairs
from ..hopper.pipeline import new_barriers, new_ring
from ..hopper.roles import launch_roles
from ..runtime.dependent_launch import await_inputs
from .hopper_kernels import log2
from .kernels import LOG2_E, head_offset

# --- what both do ---------------------------------------------------------------------------------


@gluon.jit
def matrix(buf):
    """[1, ROWS, 1, BLOCK_D] as [ROWS, BLOCK_D]."""
    WIDTH: gl.constexpr = buf.type.layout.swizzle_byte_width
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 16, rank=2)
    return reinterpret(buf, buf.dtype, [buf.shape[1], buf.shape[3]], LAYOUT)


@gluon.jit
def first_part(head, num_heads, HEADS_QKV: gl.constexpr):
    """Of the 3 num_heads parts of the channels that of q of a head, and the step from there to its
    k, and from k to v."""
    return head_offset(head, num_heads, 1, HEADS_QKV)


@gluon.jit
def _softmax(s, m, total, first, scale_log2, T: gl.constexpr):
    """Of scores of the keys from `first` on: e^(s - m) with the running maximum m, their running
    total, and the factor that what was summed before is multiplied by."""
    STEP: gl.constexpr = s.shape[1]
    if T % STEP != 0:
        keys = first + gl.arange(0, STEP, layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where((keys < T)[None, :], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _rescaled(s, m, total, acc, first, scale_log2, dtype: gl.constexpr, T: gl.constexpr):
    """The softmax of scores as the left operand of its product with values, and what was summed
    before, in its units."""
    OUT: gl.constexpr = acc.type.layout
    weights, m, total, alpha = _softmax(s, m, total, first, scale_log2, T)
    acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    p = gl.convert_layout(round_pairs(weights, dtype), gl.DotOperandLayout(0, OUT, 2))
    return p, m, total, acc


@gluon.jit
def _finish(
    acc, p, m, total, buf, o_desc, lse_ptr, row, n, t0, head, T: gl.constexpr
):  # fmt: skip
    """lse and o of the queries in `buf` from t0 on, when the last product is done."""
    ROWS: gl.constexpr = m.shape[0]
    VECTOR: gl.constexpr = m.type.layout
    offs = t0 + gl.arange(0, ROWS, layout=VECTOR)
    gl.store(lse_ptr + row.to(gl.int64) * T + offs, m + log2(total), mask=offs < T)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    OUT: gl.constexpr = acc.type.layout
    acc *= gl.convert_layout(1 / total, gl.SliceLayout(1, OUT))[:, None]
    sync_threads()  # all have done with q
    matrix(buf).store(round_pairs(acc, buf.dtype))
    fence_async_shared()
    sync_threads()
    tma_store(o_desc, [n, t0, head, 0], buf)
    tma.store_wait(0)


# --- streamed: warpgroups that multiply, and a warp that loads ------------------------------------


@aggregate
class _Block:
    """The queries of a program: of which head, and where q, k and v of it begin."""

    row: gl.tensor  # sample and head as one number
    n: gl.tensor
    head: gl.tensor
    t0: gl.tensor
    query: gl.tensor  # its q among the parts of the channels
    step: gl.tensor  # from q to k, and from k to v


@aggregate
class _Memory:
    """Queries in shared memory, and rings of keys and of values."""

    q_bufs: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    keys: gl.tensor
    values: gl.tensor


@gluon.jit
def _load(q_desc, kv_desc, memory, block, STEPS: gl.constexpr, GROUPS: gl.constexpr):
    STEP: gl.constexpr = kv_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = kv_desc.block_type.shape[3]
    mbarrier.expect(memory.q_full.index(0), GROUPS * 64 * BLOCK_D * 2)
    for i in gl.static_range(GROUPS):
        where = [block.n, block.t0 + i * 64, block.query, 0]
        tma_load(q_desc, where, memory.q_full.index(0), memory.q_bufs.index(i))
    for j in range(STEPS):
        slot, bar = memory.keys.acquire(j, STEP * BLOCK_D * 2)
        where = [block.n, j * STEP, block.query + block.step, 0]
        tma_load(kv_desc, where, bar, memory.keys.bufs.index(slot))
        slot, bar = memory.values.acquire(j, STEP * BLOCK_D * 2)
        where = [block.n, j * STEP, block.query + 2 * block.step, 0]
        tma_load(kv_desc, where, bar, memory.values.bufs.index(slot))


@gluon.jit
def _attend(
    GROUP: gl.constexpr, memory, block, o_desc, lse_ptr, scale,
    T: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = memory.q_bufs.shape[4]
    STEP: gl.constexpr = memory.keys.bufs.shape[2]
    dtype: gl.constexpr = memory.q_bufs.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    scale_log2 = scale * LOG2_E
    zeros = gl.zeros([64, STEP], gl.float32, SCORES)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, BLOCK_D], gl.float32, OUT)
    q = matrix(memory.q_bufs.index(GROUP))

    mbarrier.wait(memory.q_full.index(0), 0)
    k = matrix(memory.keys.bufs.index(memory.keys.wait(0))).permute((1, 0))
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for j in range(STEPS - 1):
        sync_threads()  # all have done with the products of the step before
        memory.keys.release(j)
        memory.values.release_before(j, pred=j > 0)
        k = matrix(memory.keys.bufs.index(memory.keys.wait(j + 1))).permute((1, 0))
        p, m, total, acc = _rescaled(s, m, total, acc, j * STEP, scale_log2, dtype, T)
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        v = matrix(memory.values.bufs.index(memory.values.wait(j)))
        acc = warpgroup_mma(p, v, acc, is_async=True)
        s, acc, p = warpgroup_mma_wait(0, deps=(scores, acc, p))
    p, m, total, acc = _rescaled(s, m, total, acc, (STEPS - 1) * STEP, scale_log2, dtype, T)
    v = matrix(memory.values.bufs.index(memory.values.wait(STEPS - 1)))
    acc = warpgroup_mma(p, v, acc, is_async=True)
    t0 = block.t0 + GROUP * 64
    _finish(
        acc, p, m, total, memory.q_bufs.index(GROUP), o_desc, lse_ptr, block.row, block.n, t0,
        block.head, T,
    )  # fmt: skip


@gluon.jit
def attention_fwd_streamed_kernel(
    q_desc,  # qkv [N, T, 3 heads, D] in boxes [1, 64, 1, BLOCK_D]
    kv_desc,  # the same in boxes [1, STEP, 1, BLOCK_D]
    o_desc,  # [N, T, heads, D] in boxes [1, 64, 1, BLOCK_D]
    lse_ptr,  # float32 [N, heads, T], base 2
    num_heads,
    scale,  # 1 / sqrt(d)
    T: gl.constexpr,
    HEADS_QKV: gl.constexpr,
    BLOCK_D: gl.constexpr,  # D as a power of two
    GROUPS: gl.constexpr,  # warpgroups, each of which keeps 64 queries
    STEP: gl.constexpr,  # keys at a time
    SLOTS: gl.constexpr,  # blocks of keys, and of values, in shared memory
    REGISTERS: gl.constexpr,  # of a thread that multiplies
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = kv_desc.dtype
    STEPS: gl.constexpr = (T + STEP - 1) // STEP
    PARTS: gl.constexpr = (T + 64 * GROUPS - 1) // (64 * GROUPS)
    q_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 64, 1, BLOCK_D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], kv_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], kv_desc.layout)
    q_full = new_barriers(1)
    memory = _Memory(
        q_bufs, q_full, new_ring(k_bufs, SLOTS, GROUPS), new_ring(v_bufs, SLOTS, GROUPS)
    )
    fence_async_shared()
    sync_threads()
    await_inputs()

    row = gl.program_id(0) // PARTS
    n, head = row // num_heads, row % num_heads
    query, step = first_part(head, num_heads, HEADS_QKV)
    block = _Block(row, n, head, gl.program_id(0) % PARTS * (64 * GROUPS), query, step)
    launch_roles(
        _attend, (memory, block, o_desc, lse_ptr, scale, T, STEPS),
        _load, (q_desc, kv_desc, memory, block, STEPS, GROUPS),
        GROUPS, (REGISTERS, 24),
    )  # fmt: skip


# --- kept: all warps alike ------------------------------------------------------------------------


@gluon.jit
def _fetch(kv_desc, k_bufs, v_bufs, full, j, n, query, step, SLOTS: gl.constexpr):
    """Block j of keys and values, to its slot."""
    STEP: gl.constexpr = kv_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = kv_desc.block_type.shape[3]
    bar = full.index(j % SLOTS)
    mbarrier.expect(bar, 2 * STEP * BLOCK_D * 2)
    tma_load(kv_desc, [n, j * STEP, query + step, 0], bar, k_bufs.index(j % SLOTS))
    tma_load(kv_desc, [n, j * STEP, query + 2 * step, 0], bar, v_bufs.index(j % SLOTS))


@gluon.jit
def attention_fwd_kept_kernel(
    q_desc,  # qkv [N, T, 3 heads, D] in boxes [1, KEEP, 1, BLOCK_D]
    kv_desc,  # the same in boxes [1, STEP, 1, BLOCK_D]
    o_desc,  # [N, T, heads, D] in boxes [1, KEEP, 1, BLOCK_D]
    lse_ptr,  # float32 [N, heads, T], base 2
    num_heads,
    scale,  # 1 / sqrt(d)
    T: gl.constexpr,
    HEADS_QKV: gl.constexpr,
    BLOCK_D: gl.constexpr,  # D as a power of two
    STEP: gl.constexpr,  # keys at a time
    SLOTS: gl.constexpr,  # blocks of keys and values in shared memory
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = kv_desc.dtype
    KEEP: gl.constexpr = 16 * num_warps
    STEPS: gl.constexpr = (T + STEP - 1) // STEP
    PARTS: gl.constexpr = (T + KEEP - 1) // KEEP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_D, 16])
    q_buf = gl.allocate_shared_memory(dtype, [1, KEEP, 1, BLOCK_D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], kv_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], kv_desc.layout)
    q_full = new_barriers(1)
    full = new_barriers(SLOTS)
    fence_async_shared()
    sync_threads()
    await_inputs()

    row = gl.program_id(0) // PARTS
    t0 = gl.program_id(0) % PARTS * KEEP
    n, head = row // num_heads, row % num_heads
    query, step = first_part(head, num_heads, HEADS_QKV)
    mbarrier.expect(q_full.index(0), KEEP * BLOCK_D * 2)
    tma_load(q_desc, [n, t0, query, 0], q_full.index(0), q_buf)
    for j in gl.static_range(min(SLOTS, STEPS)):
        _fetch(kv_desc, k_bufs, v_bufs, full, j, n, query, step, SLOTS)

    scale_log2 = scale * LOG2_E
    zeros = gl.zeros([KEEP, STEP], gl.float32, SCORES)
    m = gl.full([KEEP], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([KEEP], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([KEEP, BLOCK_D], gl.float32, OUT)
    q = matrix(q_buf)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(
        q, matrix(k_bufs.index(0)).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=(s,))
    for j in range(STEPS - 1):
        slot = j % SLOTS
        after = (j + 1) % SLOTS
        mbarrier.wait(full.index(after), (j + 1) // SLOTS & 1)
        k = matrix(k_bufs.index(after)).permute((1, 0))
        p, m, total, acc = _rescaled(s, m, total, acc, j * STEP, scale_log2, dtype, T)
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, matrix(v_bufs.index(slot)), acc, is_async=True)
        s, acc, p = warpgroup_mma_wait(0, deps=(scores, acc, p))
        sync_threads()  # all have done with this block
        if j + SLOTS < STEPS:
            _fetch(kv_desc, k_bufs, v_bufs, full, j + SLOTS, n, query, step, SLOTS)
    p, m, total, acc = _rescaled(s, m, total, acc, (STEPS - 1) * STEP, scale_log2, dtype, T)
    acc = warpgroup_mma(p, matrix(v_bufs.index((STEPS - 1) % SLOTS)), acc, is_async=True)
    _finish(acc, p, m, total, q_buf, o_desc, lse_ptr, row, n, t0, head, T)
