"""`unfused_single_tile` for the input gradient of 1x1 filters in TF32, which it transposes.

In four bytes wgmma takes its operands from shared memory only with the sum's index innermost, and
that of an input gradient, CO, is outermost in the filters. To turn them before is a launch, half of
the time of a small layer. The left operand may also come from registers: there the filters go, in
the order that is wanted, and are rounded to the nearest TF32.
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

from ....hopper.compat import sync_threads, tma_load, tma_store


@gluon.jit
def _load(
    dy_desc, w_desc, dy_bufs, w_bufs, bars, m0, c0, k: gl.constexpr, slot: gl.constexpr
):  # fmt: skip
    """The pixels and the filters of the k-th 32 channels of the sum."""
    tma_load(dy_desc, [m0, k * 32], bars[2 * slot], dy_bufs[slot])
    tma_load(w_desc, [k * 32, c0], bars[2 * slot + 1], w_bufs[slot])


@gluon.jit
def _transposed_filters(
    w_bufs, bars, k: gl.constexpr, BLOCKS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """[64 channels, 32 of the sum], when they are there."""
    mbarrier.wait(bars[2 * (k % BLOCKS) + 1], k // BLOCKS & 1)
    w = w_bufs[k % BLOCKS].permute((1, 0)).load(gl.DotOperandLayout(0, LAYOUT, 1))
    return gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [w], gl.float32, True, 1)


@gluon.jit
def conv_unfused_single_tile_tf32_kernel(
    dy_desc,  # float32 [M, K] in boxes [PIXELS, 32]
    w_desc,  # float32 [K, C] in boxes [32, 64]
    dx_desc,  # float32 [M, C] in boxes [PIXELS, 64]
    C,
    PIXELS: gl.constexpr,  # of a tile, of 64 channels
    K_BLOCKS: gl.constexpr,  # of 32 channels of dy
    BLOCKS: gl.constexpr,  # of K_BLOCKS, in shared memory
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 8])
    dy_bufs = ()
    w_bufs = ()
    bars = ()
    for _ in gl.static_range(BLOCKS):
        dy_bufs = dy_bufs + (gl.allocate_shared_memory(gl.float32, [PIXELS, 32], dy_desc.layout),)
        w_bufs = w_bufs + (gl.allocate_shared_memory(gl.float32, [32, 64], w_desc.layout),)
    for _ in gl.static_range(2 * BLOCKS):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(2 * BLOCKS):
        mbarrier.init(bars[i], count=1)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same pixels
    groups = (C + 63) // 64
    c0 = gl.program_id(0) % groups * 64
    m0 = gl.program_id(0) // groups * PIXELS
    for k in gl.static_range(BLOCKS):
        mbarrier.expect(bars[2 * k], PIXELS * 128)
        mbarrier.expect(bars[2 * k + 1], 64 * 128)
    for k in gl.static_range(BLOCKS):
        _load(dy_desc, w_desc, dy_bufs, w_bufs, bars, m0, c0, k, k)

    acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
    w = _transposed_filters(w_bufs, bars, 0, BLOCKS, LAYOUT)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.wait(bars[2 * (k % BLOCKS)], k // BLOCKS & 1)
        dy = dy_bufs[k % BLOCKS].permute((1, 0))
        acc = warpgroup_mma(w, dy, acc, use_acc=k > 0, is_async=True)
        if k + 1 < K_BLOCKS:  # while that is under way
            w = _transposed_filters(w_bufs, bars, k + 1, BLOCKS, LAYOUT)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if k + BLOCKS < K_BLOCKS:
            sync_threads()
            mbarrier.expect(bars[2 * (k % BLOCKS)], PIXELS * 128)
            mbarrier.expect(bars[2 * (k % BLOCKS) + 1], 64 * 128)
            _load(dy_desc, w_desc, dy_bufs, w_bufs, bars, m0, c0, k + BLOCKS, k % BLOCKS)
    sync_threads()  # where the result goes the products of other warps may have read from

    buf = gl.allocate_shared_memory(gl.float32, [PIXELS, 64], dx_desc.layout)
    buf.permute((1, 0)).store(acc)
    fence_async_shared()
    tma_store(dx_desc, [m0, c0], buf)
    tma.store_wait(0)
