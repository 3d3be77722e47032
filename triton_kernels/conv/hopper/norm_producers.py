"""Warpgroups of their own that make act(norm(x)) of rows of pixels, for
`conv.hopper.stationary_weights`.

They read x by pointers, two pairs of rows ahead, so that no arithmetic waits for memory, and write
where TMA would have put x: into a ring of pairs of rows in shared memory. Those that multiply find
there what is convolved. One warpgroup makes both rows of a pair, or each of two makes one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...activations import activate_affine
from ...hopper.compat import reinterpret
from ...hopper.pairs import round_pairs
from ...runtime.dependent_launch import await_inputs_alone
from .norm_rows import keep_affine, load_affine, pixels_layout
from .row_memory import pair_chunks, row_from

_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_row(x_ptr, n, row, h, wanted, W: gl.constexpr, LAYOUT: gl.constexpr = _WORDS):
    """A row of image n, zeros outside of it: [W, 32] of two channels each, since what a loop hands
    on would take a register for either."""
    pixel = gl.arange(0, W, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    offs = pixel * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    pairs = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    ptrs = pairs + (n * h + row).to(gl.int64) * (W * 32) + offs
    mask = wanted & (row >= 0) & (row < h) & (pixel >= 0)
    return gl.load(ptrs, mask=mask, other=0, cache_modifier=".cg")


@gluon.jit
def widen_words(raw, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, 32] of two numbers each as [W, 64] of float32."""
    if dtype == gl.bfloat16:
        WIDEN: gl.constexpr = (
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t;"
            " and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }"
        )
    else:
        WIDEN: gl.constexpr = (
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        )
    low, high = gl.inline_asm_elementwise(
        WIDEN, "=f,=f,r", [raw], (gl.float32, gl.float32), True, 1
    )
    x = gl.join(low, high).reshape([raw.shape[0], 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def store_row(
    x_bufs, pair, j: gl.constexpr, raw, slope, offset, row, h, ACT: gl.constexpr, W: gl.constexpr
):
    """act(x slope + offset) of a row of an image of `h`, to the j-th of a pair in the ring."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_bufs.dtype
    to = row_from(x_bufs, pair, j, W, pair_chunks(W))
    buf = reinterpret(to, dtype, [W, 64], MATRIX)
    # outside of the image x is 0, and act(0) is 0
    z0 = gl.where((row >= 0) & (row < h), offset, 0.0)
    a = activate_affine(widen_words(raw, dtype, pixels_layout()), slope[None, :], z0[None, :], ACT)
    buf.store(round_pairs(a, dtype))


@gluon.jit
def _next(n, q, last):
    """The pair behind that one."""
    over = q == last
    return gl.where(over, n + 1, n), gl.where(over, 0, q + 1)


@gluon.jit
def make_rows(
    x_ptr, x, norm, work, h,
    FIRST: gl.constexpr, COUNT: gl.constexpr,
    ROWS: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr, TILES_OF_X: gl.constexpr,
    CG: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """COUNT rows from the FIRST on of all pairs of rows of the tiles of ROWS rows of a program, in
    their order, of images of `h`. A pair that one tile reads alone counts as returned by the
    other."""
    HALVES: gl.constexpr = ROWS // 2
    last = work.tiles_h * HALVES  # pair of an image
    n = work.first // work.tiles_h
    q = work.first % work.tiles_h * HALVES
    images = (work.first + work.count - 1) // work.tiles_h - n + 1
    total = work.count * HALVES + images
    row = FIRST - 1
    if OVERLAP:
        await_inputs_alone()
    n1, q1 = _next(n, q, last)
    n2, q2 = _next(n1, q1, last)
    raw0 = load_row(x_ptr, n, 2 * q + row, h, total > 0, W)
    if COUNT == 2:
        raw1 = load_row(x_ptr, n, 2 * q + row + 1, h, total > 0, W)
    raw2 = load_row(x_ptr, n1, 2 * q1 + row, h, total > 1, W)
    if COUNT == 2:
        raw3 = load_row(x_ptr, n1, 2 * q1 + row + 1, h, total > 1, W)
    image = n
    keep_affine(norm, n, h * W, FIRST, TILES_OF_X, CG)
    slope, offset = load_affine(norm, FIRST)
    for place in range(total):
        if n != image:
            image = n
            keep_affine(norm, n, h * W, FIRST, TILES_OF_X, CG)
            slope, offset = load_affine(norm, FIRST)
        slot, _ = x.acquire(place)
        if FIRST == 0:
            alone = (place == 0) | (place + 1 == total) | (q == 0) | (q == last)
            x.release(place, alone | (q % HALVES != 0))
        store_row(x.bufs, slot, FIRST, raw0, slope, offset, 2 * q + row, h, ACT, W)
        if COUNT == 2:
            store_row(x.bufs, slot, 1, raw1, slope, offset, 2 * q + row + 1, h, ACT, W)
        x.hand_over(place)
        raw0 = raw2
        raw2 = load_row(x_ptr, n2, 2 * q2 + row, h, place + 2 < total, W)
        if COUNT == 2:
            raw1 = raw3
            raw3 = load_row(x_ptr, n2, 2 * q2 + row + 1, h, place + 2 < total, W)
        n = n1
        q = q1
        n1 = n2
        q1 = q2
        n2, q2 = _next(n2, q2, last)
