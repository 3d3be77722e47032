"""Specs: what to compute, without how. They have shapes, types and terms, but no tensors.

`n` is the batch in every spec. Channels are named by their role in the product: `k` channels are
multiplied and summed, `c` are the channels of the result. The input gradient of a convolution from
CI to CO channels therefore has k = CO and c = CI.
"""

from dataclasses import MISSING, dataclass, fields

import torch

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",  # of the reference alone
}
# Images up to which kernels were measured that have few programs, each of which asks for all that
# it reads at once. They are for evaluations of one image, and refuse more than these.
FEW_IMAGES = 4
WHOLE_PIXELS = 256  # of an image whose groups a norm reads whole, and may add parts of
MOST_CHANNELS = 8192  # of a pixel that one program normalises: 16 elements a thread
_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()} | {"tf32": 4}


# What the epilogue of a convolution may add to the sum, by the fields of `ConvSpec`. A kernel says
# which terms it adds (`Kernel.adds`) and refuses all others. Whole epilogues add these, of a
# forward pass and of an input gradient:
FORWARD_TERMS = ("emb", "residual", "extra", "stats")
GRAD_TERMS = ("activation", "mask", "drawn")
TERMS = (*FORWARD_TERMS, *GRAD_TERMS)  # all that there are


def dtype_name(dtype: torch.dtype, allow_tf32: bool = False) -> str:
    """bf16, fp16, fp32, or tf32 for float32 whose products may be rounded to TF32."""
    return "tf32" if dtype == torch.float32 and allow_tf32 else _NAMES[dtype]


def precision_of(dtype: torch.dtype, allow_tf32: bool) -> str:
    """How Triton is to multiply numbers of a type: "ieee", or "tf32", of 16 bits too."""
    return "ieee" if dtype == torch.float32 and not allow_tf32 else "tf32"


def _said(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    between = ", " if any(isinstance(v, Spec) for v in value) else ","
    return f"({between.join(map(_said, value))})"


@dataclass(frozen=True)
class Spec:
    """Of any operation."""

    n: int
    dtype: str  # bf16 | fp16 | tf32 | fp32

    def __str__(self) -> str:
        """What differs from defaults: "n=128 dtype=bf16 h=64 w=64 k=64 c=64 stats"."""
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return " ".join(
            name if value is True else f"{name}={_said(value)}"
            for name, value, default in given
            if default is MISSING or value != default
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number in memory."""
        return _BYTES[self.dtype]

    @property
    def added(self) -> tuple[str, ...]:
        """The terms of an epilogue that there are, of `TERMS`."""
        return ()

    @property
    def flops(self) -> int:
        """Of its products: norms have none."""
        return 0


@dataclass(frozen=True)
class ConvSpec(Spec):
    """y [n, p, q, c] = conv(x [n, h, w, k]), or one of its gradients, and what its epilogue adds.

    An input gradient reads dy [n, h, w, k] and writes dx [n, p, q, c]; a weight gradient reads x
    [n, h, w, k] and dy [n, p, q, c].
    """

    h: int
    w: int
    k: int
    c: int
    r: int = 3  # rows and columns of the filter
    s: int = 3
    p: int | None = None  # rows and columns of the result; None: h and w
    q: int | None = None
    stride: int = 1
    padding: tuple[int, int] | None = None  # None: (r // 2, s // 2)
    filters: tuple[int, int] | None = None  # CO, CI, where k or c have been padded
    # channels of the first of two tensors that x concatenates: of k, in an input gradient of c
    first: int | None = None
    emb: bool = False  # + embedding[n, c]
    residual: bool = False  # + a tensor like y
    extra: tuple[int, ...] = ()  # + 1x1 convolutions of other tensors, of so many channels
    stats: bool = False  # also sums of y by tiles, for the next norm
    activation: str | None = None  # of an input gradient: dz = dx act'(z), and sums
    mask: bool = False  # likewise: dropout
    drawn: bool = False  # of its mask no bits are stored: it has to be drawn
    upsampled: bool = False  # what is read beside the product is half as high and wide
    aligned: bool = True  # whether tensors begin at multiples of 16 bytes
    rounded: bool = False  # whether a weight gradient is stored in 16 bits
    groups: int | None = None  # of a norm, of x on the way or of the result in the same launch
    tiles: tuple[int, ...] = ()  # an image is in the partial sums of that norm of x; of each half
    beside: int = 0  # channels of another tensor in the norm of the result
    keep: bool = True  # whether the result itself is wanted as well

    @property
    def added(self) -> tuple[str, ...]:
        """As in `Spec`."""
        return tuple(term for term in TERMS if getattr(self, term))

    @property
    def of_filters(self) -> tuple[int, int]:
        """CO, CI of a weight gradient."""
        return self.filters or (self.c, self.k)

    @property
    def padded(self) -> bool:
        """Whether the tensors of a weight gradient have channels that the filters lack."""
        return self.of_filters != (self.c, self.k)

    @property
    def extras(self) -> int:
        """1x1 convolutions that are added."""
        return len(self.extra)

    @property
    def taps(self) -> int:
        """Of the filter."""
        return self.r * self.s

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return (self.h if self.p is None else self.p), (self.w if self.q is None else self.q)

    @property
    def pads(self) -> tuple[int, int]:
        """Zeros above and left of an image."""
        return (self.r // 2, self.s // 2) if self.padding is None else self.padding

    @property
    def moved(self) -> str:
        """The filter and how it is moved, in words: "3x3 of stride 2"."""
        stride = f" of stride {self.stride}" if self.stride != 1 else ""
        padding = "" if self.pads == (self.r // 2, self.s // 2) else f", padding {self.pads}"
        return f"{self.r}x{self.s}{stride}{padding}"

    @property
    def pointwise(self) -> bool:
        """Whether it is a matrix product over pixels."""
        return self.taps == 1 and self.stride == 1 and self.pads == (0, 0)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Images, rows and columns of the result; one row, if to the product all are alike."""
        rows, columns = self.size
        return (1, 1, self.n * rows * columns) if self.pointwise else (self.n, rows, columns)

    @property
    def precision(self) -> str:
        """Of products, as Triton names it."""
        return "ieee" if self.dtype == "fp32" else "tf32"

    @property
    def flops(self) -> int:
        """Of its products, without those of padded tiles."""
        rows, columns = self.size
        # an input gradient of stride 2 multiplies as much as the forward pass
        pixels = self.n * min(rows * columns, self.h * self.w)
        return 2 * pixels * self.c * (self.taps * self.k + sum(self.extra))

    @property
    def bytes(self) -> int:
        """Read and written at least once."""
        rows, columns = self.size
        result = self.n * rows * columns * self.c
        beside = self.residual + (self.activation is not None)
        read = self.n * self.h * self.w * (self.k + sum(self.extra)) + beside * result
        return (read + result + self.taps * self.k * self.c) * self.itemsize


@dataclass(frozen=True)
class WeightGradsSpec(Spec):
    """Weight gradients of several convolutions of stride 1 over images of one size."""

    convs: tuple[ConvSpec, ...]
    contiguous: bool = True  # whether rows of each result follow one another in memory

    @property
    def flops(self) -> int:
        """Of all."""
        return sum(conv.flops for conv in self.convs)

    @property
    def bytes(self) -> int:
        """Of all, each read and written at least once."""
        return sum(conv.bytes for conv in self.convs)


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """o = softmax(q k^T / sqrt(d)) v of n heads of whatever samples, or the gradient of q, k, v."""

    t: int  # positions
    d: int  # channels of a head
    grad: bool = False
    fetchable: bool = True  # whether TMA can read what is read: contiguous, and 16 bytes
    keys: int | None = None  # of k and v in a tensor of their own; None: positions, beside q
    masked: bool = False  # whether samples have only some of the keys

    @property
    def seen(self) -> int:
        """Positions of k and v."""
        return self.t if self.keys is None else self.keys

    @property
    def flops(self) -> int:
        """Of its products: two, or five."""
        return (10 if self.grad else 4) * self.n * self.t * self.seen * self.d

    @property
    def bytes(self) -> int:
        """q, k, v and o; backward also their gradients."""
        return (4 if self.grad else 2) * self.n * (self.t + self.seen) * self.d * self.itemsize


@dataclass(frozen=True)
class ProjectedSpec(Spec):
    """Attention of n images, where q, k and v are products of x [n, t, c], or of its norm."""

    t: int  # positions
    c: int  # channels of all heads
    heads: int
    groups: int | None = None  # of that norm
    tiles: int = 0  # an image is in its partial sums

    @property
    def d(self) -> int:
        """Channels of a head."""
        return self.c // self.heads

    @property
    def flops(self) -> int:
        """Of the projection, and of attention."""
        return self.n * self.t * self.c * (6 * self.c + 4 * self.t)

    @property
    def bytes(self) -> int:
        """x, filters and the result."""
        return (2 * self.n * self.t * self.c + 3 * self.c**2) * self.itemsize


@dataclass(frozen=True)
class NormSpec(Spec):
    """act(norm(x) g + b) of images [n, h, w, c1 + c2], or one of its passes, or its gradient.

    x may be a concatenation of two tensors, and the first of them upsampled on the way.
    """

    h: int
    w: int
    c1: int  # channels of x, or of the first of two
    c2: int = 0
    groups: int = 32
    activation: str = "identity"
    grad: bool = False
    dx: bool = True  # of a gradient: whether that of x is wanted, not of parameters alone
    upsampled: bool = False  # x1 is half as high and wide
    tiles: tuple[int, ...] = ()  # an image is in its partial sums, if there are any; of each half
    keep: bool = False  # x1 upsampled is returned as well
    mask: bool = False  # dropout
    corners: bool = False  # only one pixel of four that are equal is written
    aligned: bool = True  # whether tensors begin at multiples of 16 bytes

    @property
    def c(self) -> int:
        """Channels of both."""
        return self.c1 + self.c2

    @property
    def pixels(self) -> int:
        """Of an image."""
        return self.h * self.w

    @property
    def elements(self) -> int:
        """Of x."""
        return self.n * self.pixels * self.c

    @property
    def bytes(self) -> int:
        """x and the result; backward also the gradient that comes."""
        return (3 if self.grad else 2) * self.elements * self.itemsize


@dataclass(frozen=True)
class ChannelNormSpec(Spec):
    """act(norm(x) g + b) of n images [pixels, c], with norm over the channels of each pixel; or its
    gradients."""

    pixels: int
    c: int
    centred: bool = False  # the mean is subtracted
    eps_in: str = "root"  # root | max | sum: where eps is, see `reference.channel_norm`
    activation: str = "identity"
    grad: bool = False
    dx: bool = True  # of a gradient: whether that of x is wanted, not of parameters alone
    add: bool = False  # and a tensor is added to it
    # bytes of a number of the result and of what is added to it, or of its gradient; None: as of x
    result: int | None = None

    @property
    def elements(self) -> int:
        """Of x."""
        return self.n * self.pixels * self.c

    @property
    def moved(self) -> int:
        """Bytes a number of x: x and the result; backward x, the gradient that comes, and those
        that go."""
        of_x = 1 + (self.grad and self.dx) + self.add
        return of_x * self.itemsize + (self.result or self.itemsize)

    @property
    def bytes(self) -> int:
        """Of all of x."""
        return self.elements * self.moved
