"""The kernel of `conv.hopper.single_tile`: a tile of a 1x1 convolution with its epilogue.

Every buffer and every barrier is an allocation of its own, as in `unfused_single_tile`.
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

from ...activations import activate
from ...hopper.compat import sync_threads, tma_load, tma_store
from ...hopper.pairs import round_pairs, widen_pairs
from ...runtime.dependent_launch import await_inputs
from .epilogue_avg_pool import means_of_piece, store_means
from .epilogue_norm import norm_of_tile


@gluon.jit
def conv_single_tile_kernel(
    x_desc,  # [M, K] in boxes [PIXELS, 64]
    w_desc,  # [C, K] in boxes [64, 64]
    residual_desc,  # [M, C] in boxes [PIXELS, 64], or None
    y_desc,  # likewise
    bias_ptr,  # float32 [C]
    partial_ptr,  # float32 [M / PIXELS, 2, C] or None
    means_ptr,  # [M / 4, C]: of y, over 2x2 pixels of images of W columns, or None
    mean_sums_ptr,  # float32 [M / PIXELS, 2, C] of these
    # [M, C + CX2] in such boxes, or None: act(norm(y beside x2)) is to be written, where a tile is
    # an image
    a_desc,
    x2_desc,  # [M, CX2] in such boxes, or None
    norm_weight_ptr,  # [C + CX2] of that norm
    norm_bias_ptr,
    eps,
    M,
    C,
    CX2,
    PIXELS: gl.constexpr,  # of a tile
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    W: gl.constexpr,  # of an image, with means
    ACT: gl.constexpr,  # behind the norm
    CG: gl.constexpr,  # channels of a group of it
    KEEP: gl.constexpr,  # whether y is to be written
    num_warps: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS, 16])
    stage, beside_bar = None, None
    if KEEP or residual_desc is not None or x2_desc is not None:
        stage = gl.allocate_shared_memory(x_desc.dtype, [PIXELS, 64], y_desc.layout)
    if residual_desc is not None or x2_desc is not None:
        beside_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(beside_bar, count=1)
    # programs that are neighbours do the same pixels
    blocks_c = C // 64
    tiles = M // PIXELS * blocks_c
    if x2_desc is None or gl.program_id(0) < tiles:
        _convolve(
            x_desc, w_desc, residual_desc, y_desc, bias_ptr, partial_ptr, means_ptr, mean_sums_ptr,
            a_desc, norm_weight_ptr, norm_bias_ptr, eps, stage, beside_bar,
            gl.program_id(0) // blocks_c, gl.program_id(0) % blocks_c * 64, C,
            LAYOUT, PIXELS, K_BLOCKS, W, ACT, CG, KEEP,
        )  # fmt: skip
    else:
        i = gl.program_id(0) - tiles
        blocks_c = CX2 // 64
        _normalize_second(
            x2_desc, a_desc, norm_weight_ptr + C, norm_bias_ptr + C, eps, stage, beside_bar,
            i // blocks_c * PIXELS, i % blocks_c * 64, C, LAYOUT, PIXELS, ACT, CG,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _convolve(
    x_desc, w_desc, residual_desc, y_desc, bias_ptr, partial_ptr, means_ptr, mean_sums_ptr,
    a_desc, norm_weight_ptr, norm_bias_ptr, eps, stage, beside_bar, tile, c0, C,
    LAYOUT: gl.constexpr, PIXELS: gl.constexpr, K_BLOCKS: gl.constexpr, W: gl.constexpr,
    ACT: gl.constexpr, CG: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = ()
    w_bufs = ()
    bars = ()
    for _ in gl.static_range(K_BLOCKS):
        x_bufs = x_bufs + (gl.allocate_shared_memory(dtype, [PIXELS, 64], x_desc.layout),)
        w_bufs = w_bufs + (gl.allocate_shared_memory(dtype, [64, 64], w_desc.layout),)
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.init(bars[k], count=1)
    fence_async_shared()
    sync_threads()

    m0 = tile * PIXELS
    for k in gl.static_range(K_BLOCKS):
        mbarrier.expect(bars[k], (64 + PIXELS) * 128)
        tma_load(w_desc, [c0, k * 64], bars[k], w_bufs[k])
    # [64, images, pixels], of one image, as the norm of a tile has it
    acc = gl.zeros([64, PIXELS], gl.float32, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(2, acc.reshape([64, 1, PIXELS]).type.layout)
    offs = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))[:, None]
    bias = gl.load(bias_ptr + offs)[:, :, None]
    if a_desc is not None:
        norm_weight = gl.load(norm_weight_ptr + offs)
        norm_bias = gl.load(norm_bias_ptr + offs)
    await_inputs()
    for k in gl.static_range(K_BLOCKS):
        tma_load(x_desc, [m0, k * 64], bars[k], x_bufs[k])
    if residual_desc is not None:
        mbarrier.expect(beside_bar, PIXELS * 128)
        tma_load(residual_desc, [m0, c0], beside_bar, stage)
    for k in gl.static_range(K_BLOCKS):
        mbarrier.wait(bars[k], 0)
        x = x_bufs[k].permute((1, 0))
        acc = warpgroup_mma(w_bufs[k], x, acc, use_acc=k > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    y = acc.reshape([64, 1, PIXELS]) + bias
    if residual_desc is not None:
        mbarrier.wait(beside_bar, 0)
        y += widen_pairs(stage.permute((1, 0)).load(LAYOUT)).reshape([64, 1, PIXELS])
    y = round_pairs(y, dtype)
    if KEEP:
        flat = gl.convert_layout(y.reshape([64, PIXELS]), LAYOUT, assert_trivial=True)
        stage.permute((1, 0)).store(flat)
        fence_async_shared()
        tma_store(y_desc, [m0, c0], stage)
    total = gl.sum(widen_pairs(y), axis=2)
    if a_desc is not None:
        a_buf = gl.allocate_shared_memory(dtype, [PIXELS, 64], a_desc.layout)
        _store_normed(
            a_desc, a_buf, y, total, norm_weight, norm_bias, eps, m0, c0, LAYOUT, PIXELS, ACT, CG
        )
    if partial_ptr is not None:
        # about the mean of the tile, since a difference of large sums would cancel
        d = widen_pairs(y) - (total * (1.0 / PIXELS))[:, :, None]
        to = partial_ptr + tile.to(gl.int64) * 2 * C + offs
        gl.store(to, total)
        gl.store(to + C, gl.sum(d * d, axis=2))
    if means_ptr is not None:
        store_means((means_of_piece(y, W),), means_ptr, mean_sums_ptr, tile, c0, C, 1)


@gluon.jit
def _normalize_second(
    x2_desc, a_desc, norm_weight_ptr, norm_bias_ptr, eps, buf, bar, m0, c0, C,
    LAYOUT: gl.constexpr, PIXELS: gl.constexpr, ACT: gl.constexpr, CG: gl.constexpr,
):  # fmt: skip
    """A tile of act(norm(x2)), which lies in a behind the C channels of y."""
    fence_async_shared()
    sync_threads()
    zeros = gl.zeros([64, PIXELS], gl.float32, LAYOUT).reshape([64, 1, PIXELS])
    SUMS: gl.constexpr = gl.SliceLayout(2, zeros.type.layout)
    offs = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))[:, None]
    norm_weight = gl.load(norm_weight_ptr + offs)
    norm_bias = gl.load(norm_bias_ptr + offs)
    await_inputs()
    mbarrier.expect(bar, PIXELS * 128)
    tma_load(x2_desc, [m0, c0], bar, buf)
    mbarrier.wait(bar, 0)
    x = buf.permute((1, 0)).load(LAYOUT).reshape([64, 1, PIXELS])
    total = gl.sum(widen_pairs(x), axis=2)
    _store_normed(
        a_desc, buf, x, total, norm_weight, norm_bias, eps, m0, C + c0, LAYOUT, PIXELS, ACT, CG
    )


@gluon.jit
def _store_normed(
    a_desc, buf, y, total, norm_weight, norm_bias, eps, m0, c0,
    LAYOUT: gl.constexpr, PIXELS: gl.constexpr, ACT: gl.constexpr, CG: gl.constexpr,
):  # fmt: skip
    """act(norm(y)) of a tile, of whose pixels `total` is the sum, by way of `buf`."""
    mean, scale, shift = norm_of_tile((y,), total, norm_weight, norm_bias, eps, 1, CG, PIXELS)
    d = widen_pairs(y) - mean[:, :, None]
    a = round_pairs(activate(d * scale[:, :, None] + shift[:, :, None], ACT), a_desc.dtype)
    # Memory that y still leaves from is free to the compiler, which may have put `buf` there.
    tma.store_wait(0)
    sync_threads()
    buf.permute((1, 0)).store(
        gl.convert_layout(a.reshape([64, PIXELS]), LAYOUT, assert_trivial=True)
    )
    fence_async_shared()
    tma_store(a_desc, [m0, c0], buf)
