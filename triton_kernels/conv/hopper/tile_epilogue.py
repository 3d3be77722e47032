"""The epilogue of `tiles_kernels` and `upsampled_kernels`: tiles [64 channels, pixels] in pieces,
of one image or of several, and what belongs to their channels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...hopper.pairs import widen_pairs


@gluon.jit
def in_pieces(acc, PIXELS: gl.constexpr, PIECE: gl.constexpr):
    """A tile in pieces, one after the other: the epilogue wants registers of its own, and where it
    has too few it waits for every number instead of for several at a time."""
    if PIXELS == PIECE:
        return (acc,)
    else:
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIXELS // 2, 16])
        first, second = acc.reshape([64, 2, PIXELS // 2]).permute((0, 2, 1)).split()
        first = gl.convert_layout(first, HALF, assert_trivial=True)
        second = gl.convert_layout(second, HALF, assert_trivial=True)
        return in_pieces(first, PIXELS // 2, PIECE) + in_pieces(second, PIXELS // 2, PIECE)


@gluon.jit
def by_image(x, IMAGES: gl.constexpr, W: gl.constexpr):
    """[64, pixels] as [64, images, pixels of each]; every thread keeps what it has."""
    PIXELS: gl.constexpr = x.shape[1]
    x = x.reshape([64, PIXELS // (IMAGES * W), IMAGES, W]).permute((0, 2, 1, 3))
    return x.reshape([64, IMAGES, PIXELS // IMAGES])


@gluon.jit
def places_of(n0, c0, N, C, IMAGES: gl.constexpr, SUMS: gl.constexpr):
    """Channels and images of a tile, and which of [64, IMAGES] there are."""
    offs = c0 + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))[:, None]
    image = n0 + gl.arange(0, IMAGES, layout=gl.SliceLayout(0, SUMS))[None, :]
    return offs, image, (image < N) & (offs < C)


@gluon.jit
def load_vectors(
    vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, n0, c0, N, C,
    IMAGES: gl.constexpr, DGRAD: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """What the epilogue wants for each channel, or for each channel and image."""
    offs, image, valid = places_of(n0, c0, N, C, IMAGES, SUMS)
    if DGRAD:
        table = vectors_ptr + image.to(gl.int64) * 4 * C + offs
        mean = gl.load(table, mask=valid, other=0.0)
        rstd = gl.load(table + C, mask=valid, other=0.0)
        g = gl.load(table + 2 * C, mask=valid, other=0.0)
        b = gl.load(table + 3 * C, mask=valid, other=0.0)
        return (mean, rstd, g, b)
    else:
        bias = gl.load(vectors_ptr + offs)
        if extra_bias_ptr is not None:
            bias += gl.load(extra_bias_ptr + offs)
        if emb_ptr is not None:
            to = emb_ptr + image.to(gl.int64) * stride_emb + offs
            bias = bias + gl.load(to, mask=valid, other=0.0)
        return (bias,)


@gluon.jit
def store_piece(buf, y, PART: gl.constexpr, W: gl.constexpr):
    """y, as `by_image` has it, to the shared memory [64, pixels] from where it leaves."""
    IMAGES: gl.constexpr = y.shape[1]
    PIXELS: gl.constexpr = IMAGES * y.shape[2]
    y = y.reshape([64, IMAGES, y.shape[2] // W, W]).permute((0, 2, 1, 3))
    buf.store(gl.convert_layout(y.reshape([64, PIXELS]), PART, assert_trivial=True))


@gluon.jit
def squares_about_mean(pieces, total, second, PIECES: gl.constexpr):
    """`second` and the squares of all pieces about the mean of the tile, of which `total` is the
    sum: a difference of large sums would cancel."""
    PIXELS: gl.constexpr = PIECES * pieces[0].shape[2]
    mean = (total / PIXELS)[:, :, None]
    for i in gl.static_range(PIECES):
        d = widen_pairs(pieces[i]) - mean
        second += gl.sum(d * d, axis=2)
    return second


@gluon.jit
def store_sums(partial_ptr, row, C, offs, valid, total, second):
    """Both sums of a tile's images, in their rows of [., 2, C]."""
    to = partial_ptr + row.to(gl.int64) * 2 * C + offs
    gl.store(to, total, mask=valid)
    gl.store(to + C, second, mask=valid)
