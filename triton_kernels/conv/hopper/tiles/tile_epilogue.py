"""What the epilogue of `tile_multiply` is made of: tiles [64 channels, pixels] in
pieces, of one image or of several, and what belongs to their channels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....activations import activate_affine_grad
from ....hopper.compat import aggregate, tma_load
from ....hopper.pairs import widen_pairs
from ....norm.coefficients import load_table


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
def blocks_of(channels, RAGGED: gl.constexpr, SIZE: gl.constexpr = 64):
    """Blocks of SIZE channels, of which the last may have fewer if RAGGED."""
    if RAGGED:
        return gl.cdiv(channels, SIZE)
    else:
        return channels // SIZE


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


@aggregate
class Terms:
    """What an epilogue knows of each channel, or of each channel and image.

    y = factor (acc + bias + embedding + what lies beside);  dz = acc act'(xhat g + b),
    xhat = (x - mean) rstd, where x lies beside"""

    vectors_ptr: gl.tensor  # float32: bias [C]; DGRAD: table [N, 4, CV], or None: dz = acc
    extra_bias_ptr: gl.tensor  # [C] or None
    emb_ptr: gl.tensor  # [N, C] or None
    stride_emb: gl.tensor
    N: gl.tensor
    C: gl.tensor
    CV: gl.tensor
    DGRAD: gl.constexpr
    ACT: gl.constexpr
    RAGGED: gl.constexpr  # the last block may have fewer than 64 channels
    factor: gl.tensor  # or None

    @gluon.jit
    def load(self, n0, c0, IMAGES: gl.constexpr, SUMS: gl.constexpr):
        offs, image, valid = places_of(n0, c0, self.N, self.CV, IMAGES, SUMS)
        if self.vectors_ptr is None:
            return ()
        elif self.DGRAD:
            rows = self.vectors_ptr + image.to(gl.int64) * 4 * self.CV + offs
            return load_table(rows, self.CV, valid)
        else:
            there = offs < self.CV if self.RAGGED else None
            other: gl.constexpr = 0.0 if self.RAGGED else None
            bias = gl.load(self.vectors_ptr + offs, mask=there, other=other)
            if self.extra_bias_ptr is not None:
                bias += gl.load(self.extra_bias_ptr + offs, mask=there, other=other)
            if self.emb_ptr is not None:
                to = self.emb_ptr + image.to(gl.int64) * self.stride_emb + offs
                bias = bias + gl.load(to, mask=valid, other=0.0)
            return (bias,)

    @gluon.jit
    def over_pixels(self, loaded):
        """What `load` found, as `apply` wants it."""
        if self.vectors_ptr is None:
            return ()
        elif self.DGRAD:
            mean, rstd, g, b = loaded
            shift = (-mean * rstd)[:, :, None]
            return (shift, rstd[:, :, None], g[:, :, None], b[:, :, None])
        else:
            return (loaded[0][:, :, None],)

    @gluon.jit
    def apply(self, y, beside, vectors, total, second):
        """A piece of the result, before it is rounded. Of dz its sum and that of dz xhat are added
        to two others."""
        if self.vectors_ptr is None:
            return y, total, second
        elif self.DGRAD:
            shift, rstd, g, b = vectors
            xhat = beside * rstd + shift
            y *= activate_affine_grad(xhat, g, b, self.ACT)
            total += gl.sum(y, axis=2)
            second += gl.sum(y * xhat, axis=2)
            return y, total, second
        else:
            y += vectors[0]
            if beside is not None:
                y += beside
            if self.factor is not None:
                y *= self.factor
            return y, total, second


@aggregate
class Places:
    """Where [64, pixels] of a tile are in [N, H, W, C]."""

    corner: gl.tensor  # pixels before the tile's first, int64
    pixel: gl.tensor  # [pixels], from there on
    channel: gl.tensor  # [64]
    there: gl.tensor  # which of [64, pixels] there are; None: all
    C: gl.tensor

    @gluon.jit
    def of(self, ptr, channels):
        """Pointers into a tensor of so many channels."""
        corner = ptr + self.corner * channels
        return corner + (self.pixel * channels)[None, :] + self.channel[:, None]


@aggregate
class Beside:
    """What an epilogue reads beside each tile: a tensor, or two that are concatenated.

    Where a tile may have channels of both (STRADDLING), each of the two is zero where the other is
    not: the first comes as always, the second as one more block of the ring. In 32 bits a tile
    comes to registers at once (`read`), and is in no ring."""

    first: gl.tensor  # [H, N, W, C] in boxes of a tile, in 32 bits [N, H, W, C]; or None
    second: gl.tensor  # or None
    full: gl.shared_memory_descriptor  # a barrier for either warpgroup, or None
    border: gl.tensor  # channels of the first of two
    STRADDLING: gl.constexpr

    @gluon.jit
    def load(self, buf, GROUP: gl.constexpr, n0, h0, w0, c0, PIXELS: gl.constexpr):
        """To where the epilogue will write."""
        bar = self.full.index(GROUP)
        mbarrier.expect(bar, PIXELS * 128)
        if self.second is None or self.STRADDLING:
            tma_load(self.first, [h0, n0, w0, c0], bar, buf)
        else:
            left = c0 < self.border
            right = c0 >= self.border
            tma_load(self.first, [h0, n0, w0, c0], bar, buf, left)
            tma_load(self.second, [h0, n0, w0, c0 - self.border], bar, buf, right)

    @gluon.jit
    def wait(self, GROUP: gl.constexpr, phase):
        mbarrier.wait(self.full.index(GROUP), phase)

    @gluon.jit
    def read(self, places):
        """The numbers [64, pixels] at such places."""
        if self.second is None:
            return gl.load(places.of(self.first, places.C), mask=places.there)
        else:
            left = (places.channel < self.border)[:, None] & (places.pixel >= 0)[None, :]
            right = (places.channel >= self.border)[:, None] & (places.pixel >= 0)[None, :]
            if places.there is not None:
                left &= places.there
                right &= places.there
            x = gl.load(places.of(self.first, self.border), mask=left, other=0.0)
            second = places.of(self.second, places.C - self.border) - self.border
            return gl.where(left, x, gl.load(second, mask=right, other=0.0))


@gluon.jit
def by_pixel(y, PART: gl.constexpr, W: gl.constexpr):
    """What `by_image` has taken apart, as [64, pixels] again."""
    IMAGES: gl.constexpr = y.shape[1]
    PIXELS: gl.constexpr = IMAGES * y.shape[2]
    y = y.reshape([64, IMAGES, y.shape[2] // W, W]).permute((0, 2, 1, 3))
    return gl.convert_layout(y.reshape([64, PIXELS]), PART, assert_trivial=True)


@gluon.jit
def store_piece(buf, y, PART: gl.constexpr, W: gl.constexpr):
    """y, as `by_image` has it, to the shared memory [64, pixels] from where it leaves."""
    buf.store(by_pixel(y, PART, W))


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
