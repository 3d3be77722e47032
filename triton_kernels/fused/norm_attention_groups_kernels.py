"""The kernel of `norm_attention` with a warpgroup for each of several heads, in Gluon.

The warpgroups normalize x together, a block of 64 channels each, and multiply it with the filters
of their heads one after the other, so that the products of one fall into the softmax of another.
Where memory is short, a head's keys and values lie where its filters were; and a head that finds no
room for its filters has those of an earlier one replaced once their products are done.
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

from ..attention_gluon_kernels import unseen_zero
from ..dependent_launch import await_inputs
from ..gluon.pairs import round_pairs
from ..gluon.pipeline import new_barriers, sync_threads
from .norm_attention_kernels import (
    attend,
    fetch_pixels,
    halves,
    keep_affine,
    load_affine,
    load_biases,
    normalize,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_STEP = gl.constexpr(64)  # keys or queries at a time
# If keys and values lie where filters were: of both, those of so many rounds find room beside the
# filters of k and v, whose pairs are in places 0, 2 and 4; those of q are in boxes 2, 3 and 6.
_EARLY = gl.constexpr(2)


@gluon.jit
def _fetch_filters(w_desc, row, part: gl.constexpr, bar, own, SHARED: gl.constexpr):
    """Those of a head: of q, and of k and v beside each other."""
    BLOCKS: gl.constexpr = own.shape[0] // 3
    D: gl.constexpr = own.shape[1]
    mbarrier.expect(bar, 3 * BLOCKS * D * 128)
    for i in gl.static_range(BLOCKS):
        q = own.index(_place_of_q(i, BLOCKS, SHARED))
        k = own.index(2 * _place_of_kv(i, SHARED))
        v = own.index(2 * _place_of_kv(i, SHARED) + 1)
        tma.async_copy_global_to_shared(w_desc, [row, i * 64], bar, q)
        tma.async_copy_global_to_shared(w_desc, [row + part, i * 64], bar, k)
        tma.async_copy_global_to_shared(w_desc, [row + 2 * part, i * 64], bar, v)


@gluon.constexpr_function
def _place_of_q(block: int, blocks: int, shared: bool) -> int:
    return (2, 3, 6)[block] if shared else 2 * blocks + block


@gluon.constexpr_function
def _place_of_kv(block: int, shared: bool) -> int:
    """In pairs of boxes."""
    return 2 * block if shared else block


@gluon.jit
def _keys_and_values(
    x_rows, filters, r: gl.constexpr, STEPS: gl.constexpr, BLOCKS: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Products with the filters of both, of some positions."""
    N: gl.constexpr = filters.shape[1]
    TWO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc = gl.zeros([_STEP, N], gl.float32, TWO)
    for i in gl.static_range(BLOCKS):
        w = filters.index(_place_of_kv(i, SHARED)).permute((1, 0))
        acc = warpgroup_mma(x_rows.index(i * STEPS + r), w, acc, use_acc=i > 0, is_async=True)
    return acc


@gluon.jit
def _head(
    x_bufs, x_full, normed, turns, kept, own, kv_bufs, w_desc, w_full, bias_bufs, o_ptr,
    row, head0, next_row, scale_log2, part: gl.constexpr,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, SHARED: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """Of a warpgroup: its blocks of x normalized, and then its head."""
    dtype: gl.constexpr = x_bufs.dtype
    BLOCKS: gl.constexpr = x_bufs.shape[0]
    T: gl.constexpr = x_bufs.shape[1]
    D: gl.constexpr = own.shape[1]
    C: gl.constexpr = BLOCKS * 64
    STEPS: gl.constexpr = T // _STEP
    EARLY: gl.constexpr = _EARLY if SHARED else STEPS
    FIRST: gl.constexpr = 2 if SHARED else 0  # of keys, and behind all of these of values
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PIXELS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)

    for i in gl.static_range(GROUP, BLOCKS, GROUPS):
        mbarrier.wait(x_full.index(i), 0)
        if NORM:
            normalize(x_bufs.index(i), kept, i * 64, PIXELS)
            fence_async_shared()
            sync_threads()
        mbarrier.arrive(normed.index(i), count=1)

    x_rows = x_bufs._reinterpret(dtype, [BLOCKS * STEPS, _STEP, 64], MATRIX)
    kv_filters = own._reinterpret(dtype, [own.shape[0] // 2, 2 * D, 64], MATRIX)
    mbarrier.wait(w_full.index(GROUP), 0)
    if GROUP > 0:
        mbarrier.wait(turns.index(GROUP - 1), 0)
    for i in gl.static_range(BLOCKS):
        mbarrier.wait(x_full.index(i), 0)
        mbarrier.wait(normed.index(i), 0)
    accs = ()
    for r in gl.static_range(STEPS):
        q = gl.zeros([_STEP, D], gl.float32, OUT)
        for i in gl.static_range(BLOCKS):
            w = own.index(_place_of_q(i, BLOCKS, SHARED)).permute((1, 0))
            q = warpgroup_mma(x_rows.index(i * STEPS + r), w, q, use_acc=i > 0, is_async=True)
        accs = accs + (q,)
    kv_next = _keys_and_values(x_rows, kv_filters, 0, STEPS, BLOCKS, SHARED)
    if STEPS == 1:
        if GROUP + 1 < GROUPS:
            sync_threads()
            mbarrier.arrive(turns.index(GROUP), count=1)
        accs = (warpgroup_mma_wait(BLOCKS, deps=accs),)  # but for the last
    else:
        accs = warpgroup_mma_wait(BLOCKS, deps=accs)
    queries = ()
    for r in gl.static_range(STEPS):
        bias = bias_bufs.index(3 * GROUP).load(COLUMN)[None, :]
        q = round_pairs(accs[r] + bias, dtype)
        queries = queries + (gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2)),)
    if SHARED:
        sync_threads()  # all have done with the filters of q
    keys = ()
    values = ()
    for r in gl.static_range(STEPS):
        kv = kv_next
        if r + 1 < STEPS:
            kv_next = _keys_and_values(x_rows, kv_filters, r + 1, STEPS, BLOCKS, SHARED)
        if r + 2 == STEPS and GROUP + 1 < GROUPS:
            sync_threads()
            mbarrier.arrive(turns.index(GROUP), count=1)
        kv = warpgroup_mma_wait(BLOCKS if r + 1 < STEPS else 0, deps=(kv,))
        k, v = halves(kv, D, OUT)
        k = round_pairs(k + bias_bufs.index(3 * GROUP + 1).load(COLUMN)[None, :], dtype)
        v = round_pairs(v + bias_bufs.index(3 * GROUP + 2).load(COLUMN)[None, :], dtype)
        if r < EARLY:
            kv_bufs.index((FIRST + r) % STEPS).store(k)
            kv_bufs.index(STEPS + (FIRST + r) % STEPS).store(v)
        else:
            keys = keys + (k,)
            values = values + (v,)
    if SHARED:
        sync_threads()  # all have done with those of k and v
    for r in gl.static_range(EARLY, STEPS):
        kv_bufs.index((FIRST + r) % STEPS).store(keys[r - EARLY])
        kv_bufs.index(STEPS + (FIRST + r) % STEPS).store(values[r - EARLY])
    fence_async_shared()
    sync_threads()
    if GROUP + SLOTS < GROUPS:
        _fetch_filters(w_desc, next_row, part, w_full.index(GROUP + SLOTS), own, SHARED)

    offs = (head0 + GROUP) * D + gl.arange(0, D, layout=COLUMN)[None, :]
    for r in range(STEPS):
        zero = unseen_zero(r)
        given = (queries[0],), kv_bufs, kv_bufs, zero, scale_log2, None
        result = attend(*given, 1, STEPS, FIRST, STEPS, True, dtype)
        queries = _turned(queries, STEPS)
        rows = row + r * _STEP + gl.arange(0, _STEP, layout=gl.SliceLayout(1, OUT))
        gl.store(o_ptr + rows.to(gl.int64)[:, None] * C + offs, result[0])


@gluon.jit
def _turned(values, COUNT: gl.constexpr):
    """A tuple of COUNT, its first one last."""
    result = ()
    for i in gl.static_range(COUNT):
        result = result + (values[(i + 1) % COUNT],)
    return result


@gluon.jit
def norm_attention_groups_kernel(
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
    GROUPS: gl.constexpr,  # warpgroups, a head each: 3 or 4
    SLOTS: gl.constexpr,  # heads whose filters find room
    SHARED: gl.constexpr,  # keys and values lie where filters were
    K: gl.constexpr,
    CG: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_J: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    BLOCKS: gl.constexpr = C // 64
    STEPS: gl.constexpr = T // _STEP
    NORM: gl.constexpr = partial_ptr is not None
    BOXES: gl.constexpr = 10 if SHARED else 3 * BLOCKS  # of filters
    gl.static_assert((BLOCKS == 3 and STEPS == 4 and D == 32) or not SHARED)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * D, 16)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BLOCK_J, BLOCK_J], [num_warps, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, T, 64], MATRIX)
    filters = ()
    for _ in gl.static_range(SLOTS):
        filters = filters + (gl.allocate_shared_memory(dtype, [BOXES, D, 64], MATRIX),)
    kv = ()
    for j in gl.static_range(GROUPS):
        if SHARED:
            kv = kv + (filters[j]._reinterpret(dtype, [BOXES, _STEP, D], NARROW),)
        else:
            kv = kv + (gl.allocate_shared_memory(dtype, [2 * STEPS, _STEP, D], NARROW),)
    bias_bufs = gl.allocate_shared_memory(gl.float32, [3 * GROUPS, D], FLAT)
    x_full = new_barriers(BLOCKS)
    normed = new_barriers(BLOCKS)
    w_full = new_barriers(GROUPS)
    turns = new_barriers(GROUPS - 1)
    fence_async_shared()
    sync_threads()

    PARTS: gl.constexpr = C // D // GROUPS  # programs of an image
    n = gl.program_id(0) // PARTS
    head0 = gl.program_id(0) % PARTS * GROUPS
    column = head0 * (3 * D) if HEADS_QKV else head0 * D
    next_head: gl.constexpr = 3 * D if HEADS_QKV else D
    part: gl.constexpr = D if HEADS_QKV else C  # from q to k and from k to v
    for j in gl.static_range(SLOTS):
        _fetch_filters(w_desc, column + j * next_head, part, w_full.index(j), filters[j], SHARED)
    biases = load_biases(bias_ptr, column, next_head, part, GROUPS, D, num_warps)
    kept = bias_bufs
    if NORM:
        kept = gl.allocate_shared_memory(gl.float32, [3, BLOCK_C], FLAT)
        g, b = load_affine(g_ptr, b_ptr, C, BLOCK_C, num_warps)
    for i in gl.static_range(3 * GROUPS):
        bias_bufs.index(i).store(biases[i])
    await_inputs()
    fetch_pixels(x_desc, n * T, x_full, x_bufs)
    if NORM:
        keep_affine(partial_ptr, g, b, kept, n, pixels, eps, C, K, CG, LANES, BLOCK_G, BLOCK_J)
    sync_threads()
    scale_log2 = scale * _LOG2_E
    gl.warp_specialize(
        [
            (
                _head,
                (
                    x_bufs, x_full, normed, turns, kept, filters[group % SLOTS], kv[group], w_desc,
                    w_full, bias_bufs, o_ptr, n * T, head0, column + (group + SLOTS) * next_head,
                    scale_log2, part, group, GROUPS, SLOTS, SHARED, NORM,
                ),
            )
            for group in ((0, 1, 2), (0, 1, 2, 3))[GROUPS - 3]
        ],
        ([4, 4], [4, 4, 4])[GROUPS - 3],
        ([168, 168], [128, 128, 128])[GROUPS - 3],
    )  # fmt: skip
