"""The kernel of `relayed`: programs keep keys, queries come by, and dq goes round the programs.

The programs of a head keep KEYS keys each, which are SHARE = KEYS / STEP blocks of queries. In its
m-th step program j takes block (SHARE j + m) % BLOCKS of the head, so that no two of them are ever
at the same one if they keep step. A block's sum of dq, float32 in memory, is then added to by
program j, j - 1, ..., always in this order: in step m a program is the (m // SHARE)-th there.
A flag a block counts those that have been, and each waits for it before it adds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..hopper.compat import aggregate, sync_threads, tma_load, tma_store
from ..hopper.pairs import round_pairs
from ..hopper.pipeline import Ring, new_barriers, new_ring
from ..runtime.dependent_launch import await_inputs
from .hopper_kernels import unseen_zero
from .kernels import LOG2_E
from .streamed_kernels import first_part, matrix


@aggregate
class _Program:
    """The keys of a program: of which head, and where q, k and v of it begin."""

    n: gl.tensor
    head: gl.tensor
    j: gl.tensor  # which keys
    query: gl.tensor  # its q among the parts of the channels
    step: gl.tensor  # from q to k, and from k to v
    sum_ptr: gl.tensor  # of the head
    rows_ptr: gl.tensor  # or None
    SHARE: gl.constexpr  # blocks of queries a program
    BLOCKS: gl.constexpr  # of queries

    @gluon.jit
    def block(self, m):
        """Of queries, in the m-th step."""
        return (self.SHARE * self.j + m) % self.BLOCKS


@aggregate
class _Memory:
    """Keys and values in shared memory, a ring of q, do, lse and delta, ds, and barriers."""

    k_buf: gl.shared_memory_descriptor
    v_buf: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # keys and values
    ring: Ring
    ds_bufs: gl.shared_memory_descriptor
    p_bufs: gl.shared_memory_descriptor  # or None: p is in registers
    done: gl.shared_memory_descriptor  # with a slot of the ring, dq being added
    allowed: gl.shared_memory_descriptor  # to add dq of an even step, or of an odd one

    @gluon.jit
    def await_step(self, m, pred=True):
        """Until the warps that multiply have done with step m, and added its dq."""
        SLOTS: gl.constexpr = self.ring.SLOTS
        mbarrier.wait(self.done.index(m % SLOTS), m // SLOTS & 1, pred=pred)


# --- the warps that multiply ----------------------------------------------------------------------


@gluon.constexpr_function
def _of_keys(keys, columns, warps):
    """The layout of [keys, columns]. Warpgroups that have no keys of their own share columns."""
    sharing = 16 * warps // keys
    return gl.NVMMADistributedLayout(
        [3, 0], [warps // sharing, sharing], [16, columns // sharing, 16]
    )


@gluon.constexpr_function
def _of_dq(step, d, warps):
    """The layout of dq [step, d] or, where there are not 64 queries, of its transpose."""
    if step < 64:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, step, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, d // (warps // 4), 16])


@gluon.jit
def _within(rows, columns, ROWS: gl.constexpr):
    """Where in the sum of a block the elements of a product are: four of a thread side by side, and
    those of the threads of a warp."""
    of_lane = (rows & 7) * 16 + ((columns >> 1) & 3) * 4 + ((rows >> 3) & 1) * 2 + (columns & 1)
    return (columns >> 3) * (8 * ROWS) + (rows >> 4) * 128 + of_lane


@gluon.jit
def _add(ptrs, values):
    """To what is in memory; four of a thread, which lie side by side, at once."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [ptrs.to(gl.int64), values],
        gl.int8,
        False,
        4,
    )


@gluon.jit
def _weights(s, memory, program, m, scale_log2, T: gl.constexpr):
    """The softmax of step m's scores [KEYS, STEP]."""
    KEYS: gl.constexpr = s.shape[0]
    SLOTS: gl.constexpr = memory.ring.SLOTS
    lse = memory.ring.bufs[2].index(m % SLOTS).load(gl.SliceLayout(0, s.type.layout))
    weights = gl.exp2(s * scale_log2 - lse[None, :])
    if T % KEYS != 0:
        keys = program.j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s.type.layout))
        weights = gl.where((keys < T)[:, None], weights, 0.0)
    return weights


@gluon.jit
def _weigh(weights, memory, m, LAYOUT: gl.constexpr):
    """p of step m, the left operand of dv: in registers or, where a warp has not all queries of its
    keys, in shared memory."""
    p = round_pairs(weights, memory.k_buf.dtype)
    if memory.p_bufs is None:
        return gl.convert_layout(p, LAYOUT)
    else:
        buf = memory.p_bufs.index(m % 2)
        buf.store(p)
        fence_async_shared()
        sync_threads()
        return buf


@gluon.jit
def _left_of(ds, ds_buf, memory, LAYOUT: gl.constexpr):
    """The left operand of dk, where that of dv is."""
    if memory.p_bufs is None:
        return gl.convert_layout(ds, LAYOUT)
    else:
        return ds_buf


@gluon.jit
def _differentiate(memory, program, dkv_desc, dq_desc, scale, T: gl.constexpr, D: gl.constexpr):
    dtype: gl.constexpr = memory.k_buf.dtype
    KEYS: gl.constexpr = memory.k_buf.shape[2]
    BLOCK_D: gl.constexpr = memory.k_buf.shape[4]
    STEP: gl.constexpr = memory.ds_bufs.shape[2]
    SHARE: gl.constexpr = program.SHARE
    BLOCKS: gl.constexpr = program.BLOCKS
    SLOTS: gl.constexpr = memory.ring.SLOTS
    WARPS: gl.constexpr = gl.num_warps()
    TURNED: gl.constexpr = STEP < 64  # dq^T is computed
    ROWS: gl.constexpr = BLOCK_D if TURNED else STEP
    COLUMNS: gl.constexpr = STEP if TURNED else BLOCK_D
    SCORES: gl.constexpr = _of_keys(KEYS, STEP, WARPS)
    OUT: gl.constexpr = _of_keys(KEYS, BLOCK_D, WARPS)
    OUT_Q: gl.constexpr = _of_dq(STEP, BLOCK_D, WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    ring = memory.ring
    scale_log2 = scale * LOG2_E
    k = matrix(memory.k_buf.index(0))
    v = matrix(memory.v_buf.index(0))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT_Q))[:, None]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT_Q))[None, :]
    within = _within(rows, columns, ROWS)

    # Scores are transposed, [keys, queries]: p and ds are the left operands of dv and dk as they
    # lie in registers. dq needs ds the other way round, by way of shared memory.
    zeros = gl.zeros([KEYS, STEP], gl.float32, SCORES)
    dk = warpgroup_mma_init(gl.zeros([KEYS, BLOCK_D], gl.float32, OUT))
    dv = warpgroup_mma_init(gl.zeros([KEYS, BLOCK_D], gl.float32, OUT))
    no_dq = gl.zeros([ROWS, COLUMNS], gl.float32, OUT_Q)
    mbarrier.wait(memory.full.index(0), 0)
    slot = ring.wait(0)
    q = matrix(ring.bufs[0].index(slot))
    do = matrix(ring.bufs[1].index(slot))
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    weights = _weights(s, memory, program, 0, scale_log2, T)
    p = _weigh(weights, memory, 0, LEFT)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    # A step ends with the softmax of the next one, when dp of that is there. So nothing but dv is
    # under way where the loop begins again.
    for m in range(BLOCKS - 1):
        zero = unseen_zero(m)
        k_here = matrix(memory.k_buf.index(zero))
        v_here = matrix(memory.v_buf.index(zero))
        slot = m % SLOTS
        delta = ring.bufs[3].index(slot).load(QUERY)
        ds = round_pairs(weights * (dp - delta[None, :]), dtype)
        after = ring.wait(m + 1)
        q_after = matrix(ring.bufs[0].index(after)).permute((1, 0))
        do_after = matrix(ring.bufs[1].index(after))
        s = warpgroup_mma(k_here, q_after, zeros, use_acc=False, is_async=True)
        ds_buf = memory.ds_bufs.index(m % 2)
        ds_buf.store(ds)
        fence_async_shared()
        sync_threads()
        # all have added dq of the step before, and done with its q and do
        mbarrier.arrive(memory.done.index((m + SLOTS - 1) % SLOTS), count=1, pred=m > 0)
        ds_left = _left_of(ds, ds_buf, memory, LEFT)
        q = matrix(ring.bufs[0].index(slot))
        dk = warpgroup_mma(ds_left, q, dk, is_async=True)
        if TURNED:
            dq = warpgroup_mma(k_here.permute((1, 0)), ds_buf, no_dq, use_acc=False, is_async=True)
        else:
            dq = warpgroup_mma(ds_buf.permute((1, 0)), k_here, no_dq, use_acc=False, is_async=True)
        s, dv, p = warpgroup_mma_wait(2, deps=(s, dv, p))
        do_right = do_after.permute((1, 0))
        dp = warpgroup_mma(v_here, do_right, zeros, use_acc=False, is_async=True)
        weights = _weights(s, memory, program, m + 1, scale_log2, T)
        p = _weigh(weights, memory, m + 1, LEFT)
        dv = warpgroup_mma(p, do_after, dv, is_async=True)
        dp, dk, dq, ds_left = warpgroup_mma_wait(1, deps=(dp, dk, dq, ds_left))
        dk = warpgroup_mma_init(dk)
        mbarrier.wait(memory.allowed.index(m % 2), m // 2 & 1)
        _add(program.sum_ptr + program.block(m) * (STEP * BLOCK_D) + within, dq)
    LAST: gl.constexpr = BLOCKS - 1
    delta = ring.bufs[3].index(LAST % SLOTS).load(QUERY)
    ds = round_pairs(weights * (dp - delta[None, :]), dtype)
    ds_buf = memory.ds_bufs.index(LAST % 2)
    ds_buf.store(ds)
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(memory.done.index((LAST - 1) % SLOTS), count=1)
    ds_left = _left_of(ds, ds_buf, memory, LEFT)
    q = matrix(ring.bufs[0].index(LAST % SLOTS))
    dk = warpgroup_mma(ds_left, q, dk, is_async=True)
    if TURNED:
        dq = warpgroup_mma(k.permute((1, 0)), ds_buf, no_dq, use_acc=False, is_async=True)
    else:
        dq = warpgroup_mma(ds_buf.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
    # Nobody adds to the last SHARE blocks after this program.
    mbarrier.wait(memory.allowed.index(LAST % 2), LAST // 2 & 1)
    sums = ()
    for i in gl.static_range(SHARE):
        place = program.sum_ptr + program.block(BLOCKS - SHARE + i) * (STEP * BLOCK_D)
        sums = sums + (gl.load(place + within, cache_modifier=".cg"),)
    dk, dv, dq, p, ds_left = warpgroup_mma_wait(0, deps=(dk, dv, dq, p, ds_left))
    sync_threads()  # all have done with k, v and q, and results take their place
    k.store(round_pairs(dk * scale, dtype))
    v.store(round_pairs(dv, dtype))
    for i in gl.static_range(SHARE):
        total = sums[i]
        if i == SHARE - 1:
            total += dq
        target = matrix(ring.bufs[0].index(i))
        if TURNED:
            target = target.permute((1, 0))
        target.store(round_pairs(total * scale, dtype))
    fence_async_shared()
    sync_threads()
    t0 = program.j * KEYS
    where = [program.n, t0, program.query + program.step, 0]
    tma_store(dkv_desc, where, memory.k_buf.index(0))
    where = [program.n, t0, program.query + 2 * program.step, 0]
    tma_store(dkv_desc, where, memory.v_buf.index(0))
    for i in gl.static_range(SHARE):
        where = [program.n, program.block(BLOCKS - SHARE + i) * STEP, program.query, 0]
        tma_store(dq_desc, where, ring.bufs[0].index(i))
    if program.rows_ptr is not None:
        LINES: gl.constexpr = gl.BlockedLayout(
            [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [WARPS, 1], [1, 0]
        )
        offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LINES))
        ptrs, there = program.rows_ptr + offs_d, offs_d < D
        gl.store(ptrs + program.step * D, gl.sum(k.load(LINES).to(gl.float32), 0), mask=there)
        gl.store(ptrs + 2 * program.step * D, gl.sum(v.load(LINES).to(gl.float32), 0), mask=there)
        total = gl.zeros([BLOCK_D], gl.float32, gl.SliceLayout(0, LINES))
        for i in gl.static_range(SHARE):
            total += gl.sum(matrix(ring.bufs[0].index(i)).load(LINES).to(gl.float32), 0)
        gl.store(ptrs, total, mask=there)
    tma.store_wait(0)


# --- the warps beside them ------------------------------------------------------------------------


@gluon.jit
def _load(memory, program, q_desc, do_desc, lse_ptr, delta_ptr, T: gl.constexpr):
    """What the steps take. lse and delta of a step are on their way during the one before it."""
    STEP: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring = memory.ring
    offs = program.block(0) * STEP + gl.arange(0, STEP, layout=VECTOR)
    lse = gl.load(lse_ptr + offs, mask=offs < T, other=float("inf"))
    delta = gl.load(delta_ptr + offs, mask=offs < T, other=0.0)
    for m in range(program.BLOCKS):
        t0 = program.block(m) * STEP
        slot, bar = ring.acquire(m, 2 * STEP * BLOCK_D * 2)
        tma_load(q_desc, [program.n, t0, program.query, 0], bar, ring.bufs[0].index(slot))
        tma_load(do_desc, [program.n, t0, program.head, 0], bar, ring.bufs[1].index(slot))
        ring.bufs[2].index(slot).store(lse)
        ring.bufs[3].index(slot).store(delta)
        sync_threads()
        mbarrier.arrive(bar, count=1)
        offs = program.block(m + 1) * STEP + gl.arange(0, STEP, layout=VECTOR)
        lse = gl.load(lse_ptr + offs, mask=offs < T, other=float("inf"))
        delta = gl.load(delta_ptr + offs, mask=offs < T, other=0.0)


@gluon.jit
def _count(ptr):
    """What programs have added to a block so far; what they have added is seen behind it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], gl.int32, False, 1
    )


@gluon.jit
def _await_others(memory, program, flags_ptr, SIZE: gl.constexpr):
    """Let dq of a step be added when the programs before this one have. The first blocks have none
    before: they are made zero."""
    SHARE: gl.constexpr = program.SHARE
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    zeros = gl.zeros([128], gl.float32, FLAT)
    first = program.sum_ptr + program.block(0) * SIZE + gl.arange(0, 128, layout=FLAT)
    for i in range(SHARE * SIZE // 128):
        gl.store(first + i * 128, zeros)
    for m in range(program.BLOCKS):
        flag_ptr = flags_ptr + program.block(m)
        while _count(flag_ptr) < m // SHARE:
            pass
        # a barrier has two phases, so nobody may be three steps ahead
        memory.await_step(gl.maximum(m - 2, 0), pred=m > 1)
        sync_threads()
        mbarrier.arrive(memory.allowed.index(m % 2), count=1)


@gluon.jit
def _tell_others(memory, program, flags_ptr):
    """That dq of a step was added, and the ring that its slot may be filled again."""
    SHARE: gl.constexpr = program.SHARE
    for m in range(program.BLOCKS - SHARE):
        memory.await_step(m)
        memory.ring.release(m)
        gl.atomic_xchg(flags_ptr + program.block(m), m // SHARE + 1, sem="release")


@gluon.jit
def attention_bwd_relayed_kernel(
    q_desc,  # qkv [N, T, 3 heads, D] in boxes [1, STEP, 1, BLOCK_D]
    kv_desc,  # the same in boxes [1, KEYS, 1, BLOCK_D]
    do_desc,  # [N, T, heads, D] in boxes [1, STEP, 1, BLOCK_D]
    dq_desc,  # dqkv as qkv in boxes [1, STEP, 1, BLOCK_D]
    dkv_desc,  # the same in boxes [1, KEYS, 1, BLOCK_D]
    lse_ptr,  # float32 [N, heads, T], base 2
    delta_ptr,  # float32 [N, heads, T]
    sum_ptr,  # float32 [N, heads, BLOCKS, STEP, BLOCK_D]: dq; of any contents
    flags_ptr,  # int32 [N, heads, BLOCKS]: zeros
    rows_ptr,  # float32 [N, T in blocks of KEYS, 3C] or None: sums of dq, dk and dv
    num_heads,
    scale,  # 1 / sqrt(d)
    T: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,  # D as a power of two
    HEADS_QKV: gl.constexpr,
    KEYS: gl.constexpr,
    STEP: gl.constexpr,  # queries at a time
    SLOTS: gl.constexpr,  # blocks of queries in shared memory
    num_warps: gl.constexpr,  # that multiply
):
    dtype: gl.constexpr = q_desc.dtype
    PARTS: gl.constexpr = (T + KEYS - 1) // KEYS
    SHARE: gl.constexpr = KEYS // STEP
    BLOCKS: gl.constexpr = PARTS * SHARE
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SQUARE: gl.constexpr = gl.NVMMASharedLayout(2 * STEP, 16, rank=2)
    k_buf = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, BLOCK_D], kv_desc.layout)
    v_buf = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, BLOCK_D], kv_desc.layout)
    q_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, BLOCK_D], do_desc.layout)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [SLOTS, STEP], FLAT)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [SLOTS, STEP], FLAT)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, STEP], SQUARE)
    if KEYS < 16 * num_warps:
        p_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, STEP], SQUARE)
    else:
        p_bufs = None
    full = new_barriers(1)
    # of a slot TMA and the threads beside it write a part each
    ring = new_ring((q_bufs, do_bufs, lse_bufs, delta_bufs), SLOTS, 1, 2)
    memory = _Memory(
        k_buf, v_buf, full, ring, ds_bufs, p_bufs, new_barriers(SLOTS), new_barriers(2)
    )
    fence_async_shared()
    sync_threads()
    await_inputs()

    row = gl.program_id(0) // PARTS  # sample and head as one number
    j = gl.program_id(0) % PARTS
    n, head = row // num_heads, row % num_heads
    query, step = first_part(head, num_heads, HEADS_QKV)
    mbarrier.expect(full.index(0), 2 * KEYS * BLOCK_D * 2)
    tma_load(kv_desc, [n, j * KEYS, query + step, 0], full.index(0), k_buf.index(0))
    tma_load(kv_desc, [n, j * KEYS, query + 2 * step, 0], full.index(0), v_buf.index(0))
    lse_ptr += row.to(gl.int64) * T
    delta_ptr += row.to(gl.int64) * T
    sum_ptr += row.to(gl.int64) * (BLOCKS * STEP * BLOCK_D)
    flags_ptr += row * BLOCKS
    if rows_ptr is not None:
        rows_ptr += (n * PARTS + j).to(gl.int64) * (3 * num_heads * D) + query * D
    program = _Program(n, head, j, query, step, sum_ptr, rows_ptr, SHARE, BLOCKS)
    gl.warp_specialize(
        [
            (_differentiate, (memory, program, dkv_desc, dq_desc, scale, T, D)),
            (_load, (memory, program, q_desc, do_desc, lse_ptr, delta_ptr, T)),
            (_await_others, (memory, program, flags_ptr, STEP * BLOCK_D)),
            (_tell_others, (memory, program, flags_ptr)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )
