"""The head of a network, conv(act(norm(x))) from 64 channels to few: 3x3 filters, rows of 64
pixels, 16 channels written.

    act(norm(x)) = act(x slope + offset)                                  see `norm_rows`
    p[r, s, c] = sum over k of filter[c, r, s, k] act(norm(x))[k]         of every pixel
    y[h, w, c] = bias[c] + sum over r, s of p[r, s, c] at (h + r - 1, w + s - 1)

So a pixel is a row of three products, one for each r, whose columns are (s, c), and each of these
adds to the sums of another row of the result; the neighbours to the left and the right are added
last, through shared memory. x goes from memory to registers and from there to the tensor cores: it
is made once, and nowhere written.

A program takes some successive rows of an image, and one more above and below. What a thread loads,
16 bytes twice, are not the channels that the tensor cores want of it; so they are multiplied in
another order, in which the filters are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...activations import activate_affine
from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, view_from
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import wait_for
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .norm_producers import load_row, widen_words
from .norm_rows import Norm, keep_affine, load_weights, new_affine


@gluon.constexpr_function
def _words_layout():
    """A row of [64 pixels, 32 words of two channels]: a quad of lanes has pixels g and g + 8 of the
    16 of its warp, 16 bytes of either half a lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.constexpr_function
def _channels_layout():
    """The same of [64 pixels, 64 channels]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


@gluon.jit
def _in_order(x, rows: gl.constexpr):
    """[rows, 64 channels] in an order in which no thread has to hand on anything for a product."""
    return x.reshape([rows, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([rows, 64])


@gluon.jit
def _load_filters(w_ptr, CO, C: gl.constexpr):
    """[CO, 3, 3, 64] as [4 C, 64] of every r: the row s C + c has the tap (r, s) of channel c."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 4 * C, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    s = row // C
    c = row % C
    there = (s < 3) & (c < CO) & (channel >= 0)
    filters = ()
    for r in gl.static_range(3):
        ptrs = w_ptr + ((c * 3 + r) * 3 + s) * 64 + channel
        filters = filters + (gl.load(ptrs, mask=there, other=0.0),)
    return filters


@gluon.jit
def _filters_of(w_bufs, r: gl.constexpr):
    """[4 C, 64]."""
    w = w_bufs.index(r)
    N: gl.constexpr = w_bufs.shape[2]
    return reinterpret(w, w.dtype, [N, 64], gl.NVMMASharedLayout(128, 16))


@gluon.jit
def _sums_from(sums_buf, pixel: gl.constexpr, column: gl.constexpr, N: gl.constexpr):
    """[64, N] of the sums [68, N], from there on; a pixel of zeros is in front of the row's."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return view_from(sums_buf, (pixel * N + column) // 4, [64, N], FLAT)


@gluon.constexpr_function
def _out_layout():
    return gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])


@gluon.jit
def _write_row(y_ptr, sums_buf, acc, bias, CO, C: gl.constexpr):
    """A row of the result of its sums [64, (s, c)]: channel c of a pixel adds what its left
    neighbour has of s = 0, it has itself of s = 1, and its right neighbour of s = 2."""
    N: gl.constexpr = 4 * C
    LAYOUT: gl.constexpr = _out_layout()
    _sums_from(sums_buf, 1, 0, N).store(acc)
    y = bias
    for s in gl.static_range(3):
        y += _sums_from(sums_buf, s, s * C, N).slice(0, 16, 1).load(LAYOUT)
    channel = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    offs = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None] * 16 + channel
    y = gl.where(channel < CO, y, 0.0)  # what is beside the sums of c is of other taps
    gl.store(y_ptr + offs, round_pairs(y, y_ptr.dtype.element_ty))


@gluon.jit(do_not_specialize=["H", "CO"])
def conv_head_kernel(
    x_ptr,  # [N, H, 64, 64]
    w_ptr,  # [CO, 3, 3, 64]
    y_ptr,  # [N, H, 64, 16], to be written
    bias_ptr,  # float32 [CO]
    sums_ptr,  # of the norm, and what follows, as in `norm_rows`
    norm_weight_ptr,
    norm_bias_ptr,
    scale_ptr,
    shift_ptr,
    stride_scale,
    stride_shift,
    eps,
    H,
    CO,
    C: gl.constexpr,  # CO, rounded up to 4, 8 or 16
    ROWS: gl.constexpr,  # of a program
    ACT: gl.constexpr,
    TILES_OF_X: gl.constexpr,
    CG: gl.constexpr,
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,  # 4
):
    N: gl.constexpr = 4 * C
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_X: gl.constexpr = gl.SliceLayout(0, _channels_layout())
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_bufs = gl.allocate_shared_memory(dtype, [3, 1, N, 64], MATRIX)
    sums_buf = allocate_for_views(gl.float32, [17 * N, 4], FLAT)
    kept = new_affine(1)
    norm = Norm(
        sums_ptr, norm_weight_ptr, norm_bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, eps, kept, None, 64,
    )  # fmt: skip

    strips = gl.cdiv(H, ROWS)
    n = gl.program_id(0) // strips
    h0 = gl.program_id(0) % strips * ROWS
    filters = _load_filters(w_ptr, CO, C)
    channels = gl.arange(0, 16, layout=gl.SliceLayout(0, _out_layout()))
    bias = gl.load(bias_ptr + channels, mask=channels < CO, other=0.0)[None, :]
    zeros = gl.zeros([64, N], gl.float32, gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
    for pixel in gl.static_range(0, 5, 4):  # there are 68
        _sums_from(sums_buf, pixel, 0, N).store(zeros)
    for r in gl.static_range(3):
        _filters_of(w_bufs, r).store(_in_order(filters[r], N))
    weights = load_weights(norm)
    fence_async_shared()
    sync_threads()

    if OVERLAP:
        await_inputs_alone()  # parameters are there before the launch in front
    raw0 = load_row(x_ptr, n, h0 - 1, H, True, 64, _words_layout())
    raw1 = load_row(x_ptr, n, h0, H, True, 64, _words_layout())
    keep_affine(norm, n, H * 64, 0, TILES_OF_X, CG, weights)
    slope = kept.index(0).load(OF_X)[None, :]
    offset = kept.index(1).load(OF_X)[None, :]
    w0 = _filters_of(w_bufs, 0).permute((1, 0))
    w1 = _filters_of(w_bufs, 1).permute((1, 0))
    w2 = _filters_of(w_bufs, 2).permute((1, 0))
    above = gl.zeros([64, N], gl.float32, ACC)  # sums of the row above that of x
    same = gl.zeros([64, N], gl.float32, ACC)
    for j in range(ROWS + 2):
        row = h0 - 1 + j
        # outside of the image x is 0, and act(0) is 0
        z0 = gl.where((row >= 0) & (row < H), offset, 0.0)
        a = activate_affine(widen_words(raw0, dtype, _channels_layout()), slope, z0, ACT)
        a = _in_order(round_pairs(a, dtype), 64)
        a = gl.convert_layout(a, OPERAND, assert_trivial=True)
        raw0 = raw1
        raw1 = load_row(x_ptr, n, row + 2, H, j < ROWS, 64, _words_layout())
        below = gl.zeros([64, N], gl.float32, ACC)
        below = warpgroup_mma(a, w0, below, use_acc=False, is_async=True)
        same = warpgroup_mma(a, w1, same, is_async=True)
        above = warpgroup_mma(a, w2, above, is_async=True)
        above, same, below = wait_for(0, (above, same, below), 3)
        if (j >= 2) & (row <= H):
            to = y_ptr + (n * H + row - 1).to(gl.int64) * (64 * 16)
            _write_row(to, sums_buf, above, bias, CO, C)
        above = same
        same = below
    if OVERLAP:
        begin_next()
