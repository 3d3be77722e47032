"""The kernel of `norm_attention` for one head a program and 64 positions a warpgroup, in Gluon.

A warpgroup normalizes its own positions and makes queries, keys and values of them. It begins with
its own keys, and takes those of the others as they come.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..dependent_launch import await_inputs
from ..gluon.pairs import round_pairs
from ..gluon.pipeline import new_barriers, sync_threads
from .norm_attention_kernels import (
    attend,
    fetch_filters,
    fetch_pixels,
    halves,
    keep_affine,
    load_affine,
    load_biases,
    normalize,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_STEP = gl.constexpr(64)  # positions of a warpgroup


@gluon.jit
def _rows(
    x_bufs, x_full, wq_bufs, w_bufs, w_full, k_bufs, v_bufs, ready, kept, bias_bufs, o_ptr,
    row, head, scale_log2, GROUP: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Of a warpgroup."""
    dtype: gl.constexpr = x_bufs.dtype
    BLOCKS: gl.constexpr = x_bufs.shape[0]
    STEPS: gl.constexpr = k_bufs.shape[0]
    D: gl.constexpr = k_bufs.shape[2]
    C: gl.constexpr = BLOCKS * 64
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PIXELS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _STEP, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    TWO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * D, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    x_rows = x_bufs._reinterpret(dtype, [BLOCKS * STEPS, _STEP, 64], MATRIX)
    kv_filters = w_bufs._reinterpret(dtype, [BLOCKS, 2 * D, 64], MATRIX)

    q = gl.zeros([_STEP, D], gl.float32, OUT)
    kv = gl.zeros([_STEP, 2 * D], gl.float32, TWO)
    for i in gl.static_range(BLOCKS):
        x = x_rows.index(i * STEPS + GROUP)
        mbarrier.wait(x_full.index(i), 0)
        if NORM:
            normalize(x, kept, i * 64, PIXELS)
            fence_async_shared()
            sync_threads()
        if i == 0:
            mbarrier.wait(w_full.index(0), 0)
        w = wq_bufs.index(i).permute((1, 0))
        q = warpgroup_mma(x, w, q, use_acc=i > 0, is_async=True)
        w = kv_filters.index(i).permute((1, 0))
        kv = warpgroup_mma(x, w, kv, use_acc=i > 0, is_async=True)
    q, kv = warpgroup_mma_wait(0, deps=(q, kv))
    k, v = halves(kv, D, OUT)
    k_bufs.index(GROUP).store(round_pairs(k + bias_bufs.index(1).load(COLUMN)[None, :], dtype))
    v_bufs.index(GROUP).store(round_pairs(v + bias_bufs.index(2).load(COLUMN)[None, :], dtype))
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(ready.index(GROUP), count=1)
    q = round_pairs(q + bias_bufs.index(0).load(COLUMN)[None, :], dtype)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2))
    result = attend((q,), k_bufs, v_bufs, 0, scale_log2, ready, 1, STEPS, GROUP, 0, False, dtype)
    offs = head * D + gl.arange(0, D, layout=COLUMN)[None, :]
    rows = row + GROUP * _STEP + gl.arange(0, _STEP, layout=gl.SliceLayout(1, OUT))
    gl.store(o_ptr + rows.to(gl.int64)[:, None] * C + offs, result[0])


@gluon.jit
def norm_attention_rows_kernel(
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
    K: gl.constexpr,
    CG: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_J: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    BLOCKS: gl.constexpr = C // 64
    NORM: gl.constexpr = partial_ptr is not None
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * D, 16)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BLOCK_J, BLOCK_J], [num_warps, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gl.static_assert(T == 256)  # four warpgroups

    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, T, 64], MATRIX)
    wq_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, D, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [2 * BLOCKS, D, 64], MATRIX)
    k_bufs = gl.allocate_shared_memory(dtype, [4, _STEP, D], NARROW)
    v_bufs = gl.allocate_shared_memory(dtype, [4, _STEP, D], NARROW)
    bias_bufs = gl.allocate_shared_memory(gl.float32, [3, D], FLAT)
    x_full = new_barriers(BLOCKS)
    w_full = new_barriers(1)
    ready = new_barriers(4)
    fence_async_shared()
    sync_threads()

    HEADS: gl.constexpr = C // D
    n = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    column = head * (3 * D) if HEADS_QKV else head * D
    part: gl.constexpr = D if HEADS_QKV else C  # from q to k and from k to v
    fetch_filters(w_desc, column, part, w_full, wq_bufs, w_bufs)
    biases = load_biases(bias_ptr, column, 0, part, 1, D, num_warps)
    kept = bias_bufs
    if NORM:
        kept = gl.allocate_shared_memory(gl.float32, [3, BLOCK_C], FLAT)
        g, b = load_affine(g_ptr, b_ptr, C, BLOCK_C, num_warps)
    for i in gl.static_range(3):
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
                _rows,
                (
                    x_bufs, x_full, wq_bufs, w_bufs, w_full, k_bufs, v_bufs, ready, kept,
                    bias_bufs, o_ptr, n * T, head, scale_log2, group, NORM,
                ),
            )
            for group in (0, 1, 2, 3)
        ],
        [4, 4, 4],
        [128, 128, 128],
    )  # fmt: skip
