"""The kernel of `norm_attention`: from the input of an attention block to its heads, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper.compat import reinterpret, sync_threads, tma_load
from ..hopper.pairs import round_pairs
from ..hopper.pipeline import new_barriers
from ..runtime.dependent_launch import await_inputs
from .hopper_kernels import unseen_zero
from .kernels import LOG2_E


@gluon.jit
def _keep_affine(
    partial_ptr, g, b, kept, n, pixels, eps,
    C: gl.constexpr, K: gl.constexpr, CG: gl.constexpr, LANES: gl.constexpr,
    BLOCK_G: gl.constexpr, BLOCK_J: gl.constexpr,
):  # fmt: skip
    """mean, slope and offset of every channel of image n, to shared memory; by the formulas of
    `norm.statistics`, with lanes [BLOCK_G, BLOCK_J] of groups by their channels."""
    groups = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, LANES))
    j = gl.arange(0, BLOCK_J, layout=gl.SliceLayout(0, LANES))[None, :]
    lanes = groups[:, None] * CG + j
    there = (lanes < C) & (j < CG)
    ptrs = partial_ptr + n.to(gl.int64) * (K * 2 * C) + lanes
    sums = ()
    within = ()
    for k in gl.static_range(K):
        sums = sums + (gl.load(ptrs + k * 2 * C, mask=there, other=0.0),)
        within = within + (gl.load(ptrs + (2 * k + 1) * C, mask=there, other=0.0),)
    per_tile = (pixels // K).to(gl.float32)
    total = pixels.to(gl.float32)
    mean = sums[0]
    for k in gl.static_range(1, K):
        mean += sums[k]
    mean *= 1.0 / total
    m2 = gl.zeros([BLOCK_G, BLOCK_J], gl.float32, LANES)
    rest = gl.zeros([BLOCK_G, BLOCK_J], gl.float32, LANES)
    for k in gl.static_range(K):
        delta = sums[k] * (1.0 / per_tile) - mean
        m2 += within[k] + delta * delta * per_tile
        rest += delta
    rest *= 1.0 / K  # what the first sum has rounded off the mean
    mean += rest
    var = m2 / total - rest * rest

    group_mean = gl.sum(gl.where(there, mean, 0.0), 1) / CG
    delta = gl.where(there, mean - group_mean[:, None], 0.0)
    group_mean += gl.sum(delta, 1) / CG
    delta = gl.where(there, mean - group_mean[:, None], 0.0)
    group_var = gl.sum(gl.where(there, var + delta * delta, 0.0), 1) / CG
    rstd = 1.0 / gl.sqrt(group_var + eps)

    BLOCK_C: gl.constexpr = kept.shape[1]
    offs_c = gl.arange(0, BLOCK_C, layout=g.type.layout)
    group = gl.minimum(offs_c // CG, BLOCK_G - 1)
    kept.index(0).store(gl.gather(group_mean, group, 0))
    kept.index(1).store(gl.gather(rstd, group, 0) * g)
    kept.index(2).store(b)


@gluon.jit
def _products(
    full, x_bufs, kept, w_full, phase, wq_bufs, w_bufs, zero,
    ROUNDS: gl.constexpr, FETCHED: gl.constexpr, NORM: gl.constexpr, PIXELS: gl.constexpr,
):  # fmt: skip
    """Of all positions, M at a time, the products with the filters of q and with those of k and v.
    x is normalized first if it has just been fetched, 64 channels beside the products with those
    before."""
    dtype: gl.constexpr = x_bufs.dtype
    BLOCKS: gl.constexpr = x_bufs.shape[0]
    M: gl.constexpr = x_bufs.shape[1] // ROUNDS
    D: gl.constexpr = wq_bufs.shape[1]
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, D, 16])
    TWO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, 2 * D, 16])
    x_rows = reinterpret(x_bufs, dtype, [BLOCKS * ROUNDS, M, 64], MATRIX)
    kv_filters = reinterpret(w_bufs, dtype, [BLOCKS, 2 * D, 64], MATRIX)
    accs = ()
    for _ in gl.static_range(ROUNDS):
        q = gl.zeros([M, D], gl.float32, OUT)
        accs = accs + (q, gl.zeros([M, 2 * D], gl.float32, TWO))
    if FETCHED and NORM:
        sync_threads()
    for i in gl.static_range(BLOCKS):
        if FETCHED:
            mbarrier.wait(full.index(i), 0)
            if NORM:
                _normalize(x_bufs.index(i), kept, i * 64, PIXELS)
                fence_async_shared()
                sync_threads()
        if i == 0:
            mbarrier.wait(w_full.index(0), phase)
        sums = ()
        for r in gl.static_range(ROUNDS):
            x = x_rows.index(i * ROUNDS + r + zero)
            w = wq_bufs.index(i + zero).permute((1, 0))
            q = warpgroup_mma(x, w, accs[2 * r], use_acc=i > 0, is_async=True)
            w = kv_filters.index(i + zero).permute((1, 0))
            kv = warpgroup_mma(x, w, accs[2 * r + 1], use_acc=i > 0, is_async=True)
            sums = sums + (q, kv)
        accs = sums
    return warpgroup_mma_wait(0, deps=accs)


@gluon.jit
def _normalize(x_buf, kept, first: gl.constexpr, PIXELS: gl.constexpr):
    """norm(x) of [T, 64] in its place."""
    CHANNELS: gl.constexpr = gl.SliceLayout(0, PIXELS)
    mean = kept.index(0).slice(first, 64).load(CHANNELS)[None, :]
    slope = kept.index(1).slice(first, 64).load(CHANNELS)[None, :]
    offset = kept.index(2).slice(first, 64).load(CHANNELS)[None, :]
    x_buf.store(_affine_pairs(x_buf.load(PIXELS), mean, slope, offset))


@gluon.jit
def _affine_pairs(x, mean, slope, offset):
    """(x - mean) slope + offset, rounded: x slope + (offset - mean slope) would cancel with a large
    mean. Two numbers after the other, not every step of all: products under way have registers."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 bits;
            .reg .f32 low, high;
            shl.b32 bits, $1, 16;
            mov.b32 low, bits;
            and.b32 bits, $1, 0xffff0000;
            mov.b32 high, bits;
            sub.f32 low, low, $2;
            sub.f32 high, high, $3;
            fma.rn.f32 low, low, $4, $6;
            fma.rn.f32 high, high, $5, $7;
            cvt.rn.bf16x2.f32 $0, high, low;
            }""",
            "=r,r,f,f,f,f,f,f",
            [x, mean, slope, offset],
            gl.bfloat16,
            True,
            2,
        )
    else:
        return ((x.to(gl.float32) - mean) * slope + offset).to(x.dtype)


@gluon.jit
def _halves(acc, D: gl.constexpr, OUT: gl.constexpr):
    """[M, 2 D] as two of D columns; every thread keeps what it has."""
    first, second = acc.reshape([acc.shape[0], 2, D]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first, OUT, assert_trivial=True)
    second = gl.convert_layout(second, OUT, assert_trivial=True)
    return first, second


@gluon.jit
def _attend(queries, k_bufs, v_bufs, first, scale_log2, ROUNDS: gl.constexpr, dtype: gl.constexpr):
    """softmax(q k^T) v of queries in registers, ROUNDS of them, with keys and values [STEPS, STEP,
    D]. Products with the next keys run beside the softmax of these, and those with values beside
    what follows."""
    M: gl.constexpr = queries[0].shape[0]
    STEPS: gl.constexpr = k_bufs.shape[0]
    STEP: gl.constexpr = k_bufs.shape[1]
    D: gl.constexpr = k_bufs.shape[2]
    ALL: gl.constexpr = ROUNDS * STEPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    zeros = gl.zeros([M, STEP], gl.float32, SCORES)
    k = k_bufs.index(first).permute((1, 0))
    s_next = warpgroup_mma(queries[0], k, zeros, use_acc=False, is_async=True)
    results = ()
    for i in gl.static_range(ALL):
        # under way are these scores, and the product with the values before
        s, _q = warpgroup_mma_wait(min(i, 1), deps=(s_next, queries[i // STEPS]))
        if i + 1 < ALL:
            k = k_bufs.index(first + (i + 1) % STEPS).permute((1, 0))
            q = queries[(i + 1) // STEPS]
            s_next = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        here = gl.max(s, 1) * scale_log2
        if i > 0:
            acc, p = warpgroup_mma_wait(1 if i + 1 < ALL else 0, deps=(acc, p))  # noqa: F821
        if i % STEPS == 0:
            if i > 0:
                o = acc * (1 / gl.convert_layout(total, ROW))[:, None]  # noqa: F821
                results = results + (round_pairs(o, dtype),)
            m = here
            acc = gl.zeros([M, D], gl.float32, OUT)
            total = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))
        else:
            last = m  # noqa: F821
            m = gl.maximum(last, here)
            less = gl.exp2(last - m)
            total *= less
            acc *= gl.convert_layout(less, ROW)[:, None]
        p = gl.exp2(s * scale_log2 - m[:, None])
        total += gl.sum(p, 1)
        p = gl.convert_layout(round_pairs(p, dtype), LEFT)
        v = v_bufs.index(first + i % STEPS)
        acc = warpgroup_mma(p, v, acc, use_acc=i % STEPS > 0, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    o = acc * (1 / gl.convert_layout(total, ROW))[:, None]
    return results + (round_pairs(o, dtype),)


@gluon.jit
def norm_attention_kernel(
    x_desc,  # [N T, C] in boxes [T, 64]
    w_desc,  # [3C, C] in boxes [D, 64]
    bias_ptr,  # float32 [3C]
    partial_ptr,  # float32 [N, K, 2, C], of x; or None, and x is not normalized
    g_ptr,  # float32 [C] or None
    b_ptr,  # float32 [C] or None
    o_ptr,  # [N T, C], out
    scale,  # 1 / sqrt(d)
    eps,
    pixels,  # that the partials describe
    T: gl.constexpr,
    C: gl.constexpr,
    D: gl.constexpr,
    HEADS_QKV: gl.constexpr,
    HEADS: gl.constexpr,  # of a program, one after the other
    STEP: gl.constexpr,  # keys at a time
    K: gl.constexpr,
    CG: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_J: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    M: gl.constexpr = 16 * num_warps  # positions at a time
    ROUNDS: gl.constexpr = T // M
    BLOCKS: gl.constexpr = C // 64
    STEPS: gl.constexpr = T // STEP
    NORM: gl.constexpr = partial_ptr is not None
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * D, 16)
    PIXELS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BLOCK_J, BLOCK_J], [num_warps, 1], [1, 0])
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)

    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, T, 64], MATRIX)
    wq_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, D, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [2 * BLOCKS, D, 64], MATRIX)
    k_bufs = gl.allocate_shared_memory(dtype, [ROUNDS, M, D], NARROW)
    v_bufs = gl.allocate_shared_memory(dtype, [ROUNDS, M, D], NARROW)
    x_full = new_barriers(BLOCKS)
    w_full = new_barriers(1)
    fence_async_shared()
    sync_threads()

    PARTS: gl.constexpr = C // D // HEADS  # programs of an image
    n = gl.program_id(0) // PARTS
    head0 = gl.program_id(0) % PARTS * HEADS
    column = head0 * (3 * D) if HEADS_QKV else head0 * D
    next_head: gl.constexpr = 3 * D if HEADS_QKV else D
    part: gl.constexpr = D if HEADS_QKV else C  # from q to k and from k to v
    _fetch_filters(w_desc, column, part, w_full, wq_bufs, w_bufs)
    bias_bufs = gl.allocate_shared_memory(gl.float32, [3 * HEADS, D], FLAT)
    offs_d = gl.arange(0, D, layout=VECTOR)
    biases = ()
    for i in gl.static_range(3 * HEADS):
        ptrs = bias_ptr + column + i // 3 * next_head + i % 3 * part + offs_d
        biases = biases + (gl.load(ptrs),)
    kept = x_bufs
    if NORM:
        kept = gl.allocate_shared_memory(gl.float32, [3, BLOCK_C], FLAT)
        offs_c = gl.arange(0, BLOCK_C, layout=VECTOR)
        g = gl.full([BLOCK_C], 1.0, gl.float32, VECTOR)
        b = gl.zeros([BLOCK_C], gl.float32, VECTOR)
        if g_ptr is not None:
            g = gl.load(g_ptr + offs_c, mask=offs_c < C, other=0.0)
        if b_ptr is not None:
            b = gl.load(b_ptr + offs_c, mask=offs_c < C, other=0.0)
    for i in gl.static_range(3 * HEADS):
        bias_bufs.index(i).store(biases[i])
    await_inputs()
    _fetch_pixels(x_desc, n * T, x_full, x_bufs)

    k_steps = reinterpret(k_bufs, dtype, [STEPS, STEP, D], NARROW)
    v_steps = reinterpret(v_bufs, dtype, [STEPS, STEP, D], NARROW)
    if NORM:
        _keep_affine(partial_ptr, g, b, kept, n, pixels, eps, C, K, CG, LANES, BLOCK_G, BLOCK_J)
    accs = _products(
        x_full, x_bufs, kept, w_full, 0, wq_bufs, w_bufs, 0, ROUNDS, True, NORM, PIXELS,
    )  # fmt: skip
    for head in range(HEADS):
        zero = unseen_zero(head)
        bias_q = bias_bufs.index(3 * head).load(COLUMN)[None, :]
        bias_k = bias_bufs.index(3 * head + 1).load(COLUMN)[None, :]
        bias_v = bias_bufs.index(3 * head + 2).load(COLUMN)[None, :]
        queries = ()
        for r in gl.static_range(ROUNDS):
            k, v = _halves(accs[2 * r + 1], D, OUT)
            if r == 0 and HEADS > 1:
                sync_threads()  # all have done with these keys and values
            k_bufs.index(r + zero).store(round_pairs(k + bias_k, dtype))
            v_bufs.index(r + zero).store(round_pairs(v + bias_v, dtype))
            q = round_pairs(accs[2 * r] + bias_q, dtype)
            queries = queries + (gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2)),)
        fence_async_shared()
        sync_threads()
        if head + 1 < HEADS:  # all have done with these filters
            rows = column + (head + 1) * next_head
            _fetch_filters(w_desc, rows, part, w_full, wq_bufs, w_bufs)
            sync_threads()  # here they meet anyway; else the compiler has them meet behind softmax
        offs = (head0 + head) * D + gl.arange(0, D, layout=COLUMN)[None, :]
        results = _attend(queries, k_steps, v_steps, zero, scale * LOG2_E, ROUNDS, dtype)
        for r in gl.static_range(ROUNDS):
            row = n * T + r * M + gl.arange(0, M, layout=gl.SliceLayout(1, OUT))
            gl.store(o_ptr + row.to(gl.int64)[:, None] * C + offs, results[r])
        if head + 1 < HEADS:
            accs = _products(
                x_full, x_bufs, kept, w_full, head + 1 & 1, wq_bufs, w_bufs, zero, ROUNDS, False,
                NORM, PIXELS,
            )  # fmt: skip
    # barriers are used to the end, so that nothing else is put in their place
    mbarrier.wait(w_full.index(0), HEADS - 1 & 1)
    for i in gl.static_range(BLOCKS):
        mbarrier.wait(x_full.index(i), 0)


@gluon.jit
def _fetch_filters(w_desc, row, part: gl.constexpr, full, wq_bufs, w_bufs):
    """Those of a head: of q, and beside each other of k and v."""
    BLOCKS: gl.constexpr = wq_bufs.shape[0]
    D: gl.constexpr = wq_bufs.shape[1]
    bar = full.index(0)
    mbarrier.expect(bar, BLOCKS * 3 * D * 128)
    for i in gl.static_range(BLOCKS):
        tma_load(w_desc, [row, i * 64], bar, wq_bufs.index(i))
        tma_load(w_desc, [row + part, i * 64], bar, w_bufs.index(2 * i))
        v = w_bufs.index(2 * i + 1)
        tma_load(w_desc, [row + 2 * part, i * 64], bar, v)


@gluon.jit
def _fetch_pixels(x_desc, row, full, x_bufs):
    BLOCKS: gl.constexpr = x_bufs.shape[0]
    for i in gl.static_range(BLOCKS):
        mbarrier.expect(full.index(i), x_bufs.shape[1] * 128)
        tma_load(x_desc, [row, i * 64], full.index(i), x_bufs.index(i))
