"""The kernel of `conv.hopper.unfused_1x1`: a product [pixels, K] times [K, C].

Such a convolution is bound by memory, and a matrix product in the usual tiles by the L2 cache: it
fetches the filters again for every tile of pixels, and the pixels for every block of channels. Here
a program keeps the filters of its channels, all of K, and lets the pixels pass by; two warpgroups
take a tile each in turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from ....hopper.compat import aggregate, sync_threads, tma_load, tma_store
from ....hopper.pairs import round_pairs
from ....hopper.pipeline import new_barriers, new_ring, new_turns, wait_for
from ....hopper.roles import launch_roles


@aggregate
class _Product:
    """y = x w + bias and its tiles, of PIXELS and C_BLOCKS times 64 channels."""

    x_desc: gl.tensor  # [M, K] in boxes [PIXELS, 64]: x, or dy
    w_desc: gl.tensor  # [CO, CI] in boxes [64, 64]
    y_desc: gl.tensor  # [M, C] in boxes [PIXELS, 64]: y, or dx
    bias_ptr: gl.tensor  # [C] or None
    C: gl.tensor
    PIXELS: gl.constexpr
    K_BLOCKS: gl.constexpr  # of 64 channels of x
    C_BLOCKS: gl.constexpr
    DGRAD: gl.constexpr


@gluon.jit
def _load_filters(p, bufs, slot, bar, k, c0):
    """Those of the k-th 64 channels of the sum."""
    for j in gl.static_range(p.C_BLOCKS):
        c = c0 + j * 64
        at = [k * 64, c] if p.DGRAD else [c, k * 64]
        tma_load(p.w_desc, at, bar, bufs.index(slot * p.C_BLOCKS + j))


@gluon.jit
def _multiply_block(p, acc, x_bufs, stage, w_bufs, slot, k: gl.constexpr):
    w = w_bufs.index(slot)
    if p.DGRAD:
        w = w.permute((1, 0))
    x = x_bufs.index(stage).permute((1, 0))
    return warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)


@gluon.jit
def _add_bias(p, acc, c):
    if p.bias_ptr is not None:
        offs = c + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        bias = gl.load(p.bias_ptr + offs, mask=offs < p.C, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    return acc


@gluon.jit
def _stage(acc, buf):
    buf.permute((1, 0)).store(round_pairs(acc, buf.dtype))
    fence_async_shared()


@gluon.jit
def _load(p, x, w_bufs, w_full, first, stride, tiles, c0):
    mbarrier.expect(w_full.index(0), p.K_BLOCKS * p.C_BLOCKS * 64 * 128)
    for k in range(p.K_BLOCKS):
        _load_filters(p, w_bufs, k, w_full.index(0), k, c0)
    block = 0
    for tile in range(first, tiles, stride):
        for k in range(p.K_BLOCKS):
            stage, bar = x.acquire(block, p.PIXELS * 128)
            tma_load(p.x_desc, [tile * p.PIXELS, k * 64], bar, x.bufs.index(stage))
            block += 1


@gluon.jit
def _multiply(GROUP: gl.constexpr, p, x, w_bufs, w_full, y_bufs, turns, first, stride, tiles, c0):
    """Every other tile, beginning with that of GROUP. The groups multiply in turn: a barrier knows
    two states, and so would take blocks of the other's tile for those of this one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.PIXELS, 16])
    OUT: gl.constexpr = y_bufs.shape[0] // 2
    block = GROUP * p.K_BLOCKS
    stored = 0
    phase = 0
    mbarrier.wait(w_full.index(0), 0)
    for tile in range(first + GROUP * stride, tiles, 2 * stride):
        accs = ()
        for _ in gl.static_range(p.C_BLOCKS):
            accs = accs + (gl.zeros([64, p.PIXELS], gl.float32, LAYOUT),)
        turns.wait(GROUP, phase)
        for k in gl.static_range(p.K_BLOCKS):
            stage = x.wait(block + k)
            sums = ()
            for j in gl.static_range(p.C_BLOCKS):
                slot = k * p.C_BLOCKS + j
                sums = sums + (_multiply_block(p, accs[j], x.bufs, stage, w_bufs, slot, k),)
            accs = sums
            if k > 0:  # those of the block before are done
                accs = wait_for(p.C_BLOCKS, accs, p.C_BLOCKS)
                sync_threads()
                x.release(block + k - 1)
        turns.give(GROUP)
        accs = wait_for(0, accs, p.C_BLOCKS)
        sync_threads()
        x.release(block + p.K_BLOCKS - 1)
        block += 2 * p.K_BLOCKS

        for j in gl.static_range(p.C_BLOCKS):
            c = c0 + j * 64
            y = _add_bias(p, accs[j], c)
            slot = GROUP * OUT + stored % OUT
            tma.store_wait(OUT - 1)  # the one that was there
            _stage(y, y_bufs.index(slot))
            tma_store(p.y_desc, [tile * p.PIXELS, c], y_bufs.index(slot))
            stored += 1
        phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def conv_unfused_pointwise_kernel(
    x_desc,  # as in `_Product`
    w_desc,
    y_desc,
    bias_ptr,
    M,
    C,
    PIXELS: gl.constexpr,  # of a tile: 128 or 256
    K_BLOCKS: gl.constexpr,
    C_BLOCKS: gl.constexpr,  # of 64 channels of y, of a program
    DGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,  # of pixels in shared memory
    OUT: gl.constexpr,  # of results there, for either warpgroup
):
    p = _Product(x_desc, w_desc, y_desc, bias_ptr, C, PIXELS, K_BLOCKS, C_BLOCKS, DGRAD)
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [BLOCKS, PIXELS, 64], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [K_BLOCKS * C_BLOCKS, 64, 64], w_desc.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [2 * OUT, PIXELS, 64], y_desc.layout)
    x = new_ring(x_bufs, BLOCKS)
    w_full = new_barriers(1)
    turns = new_turns(2)
    fence_async_shared()
    sync_threads()

    # programs that are neighbours do the same tile
    groups = (C + C_BLOCKS * 64 - 1) // (C_BLOCKS * 64)
    c0 = gl.program_id(0) % groups * (C_BLOCKS * 64)
    first = gl.program_id(0) // groups
    stride = gl.num_programs(0) // groups
    tiles = (M + PIXELS - 1) // PIXELS
    launch_roles(
        _multiply, (p, x, w_bufs, w_full, y_bufs, turns, first, stride, tiles, c0),
        _load, (p, x, w_bufs, w_full, first, stride, tiles, c0),
        2, (240, 24),
    )  # fmt: skip
