"""The epilogue of `tiles_kernels` and `upsampled_kernels`: tiles [64 channels, pixels] in pieces,
of one image or of several, and what belongs to their channels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
