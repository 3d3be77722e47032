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
# Kernels with few programs, each of which loads all of its input at once, were measured up to this
# many images. They are for evaluations of one image, and refuse larger batches.
FEW_IMAGES = 4
WHOLE_PIXELS = 256  # of an image up to which a norm reads whole groups, and may add split-K parts
MOST_CHANNELS = 8192  # of a pixel that one program normalises: 16 elements per thread
_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()} | {"tf32": 4}


# The terms that the epilogue of a convolution may add, by the fields of `ConvSpec`; a factor then
# multiplies their sum. A kernel states which it has (`Kernel.adds`) and refuses all others. Full
# epilogues have these, in a forward pass and in an input gradient:
FORWARD_TERMS = ("emb", "residual", "extra", "factor", "stats")
GRAD_TERMS = ("activation", "mask", "drawn")
TERMS = (*FORWARD_TERMS, *GRAD_TERMS)


def dtype_name(dtype: torch.dtype, allow_tf32: bool = False) -> str:
    """bf16, fp16, fp32, or tf32 for float32 whose products may be rounded to TF32."""
    return "tf32" if dtype == torch.float32 and allow_tf32 else _NAMES[dtype]


def precision_of(dtype: torch.dtype, allow_tf32: bool) -> str:
    """Triton's `input_precision` for this type: "ieee", or "tf32", for 16-bit types too."""
    return "ieee" if dtype == torch.float32 and not allow_tf32 else "tf32"


def _said(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    between = ", " if any(isinstance(v, Spec) for v in value) else ","
    return f"({between.join(map(_said, value))})"


@dataclass(frozen=True)
class Spec:
    """What all operations have."""

    n: int
    dtype: str  # bf16 | fp16 | tf32 | fp32

    def __str__(self) -> str:
        """Fields that differ from their defaults: "n=128 dtype=bf16 h=64 w=64 k=64 c=64 stats"."""
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
        """The terms of the epilogue, from `TERMS`."""
        return ()

    @property
    def flops(self) -> int:
        """Floating-point operations of the products; a norm has none."""
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
    filters: tuple[int, int] | None = None  # CO, CI, if k or c are padded
    # channels of x1 if x is the concatenation of x1 and x2; an input gradient's x has c channels
    first: int | None = None
    emb: bool = False  # + embedding[n, c]
    residual: bool = False  # + a tensor like y
    extra: tuple[int, ...] = ()  # + 1x1 convolutions of other tensors: the channels of each
    factor: bool = False  # a number multiplies the sum of all that
    stats: bool = False  # partial sums of y per tile, for the next norm
    activation: str | None = None  # of an input gradient: dz = dx act'(z), and its partial sums
    mask: bool = False  # of an input gradient: dropout
    drawn: bool = False  # the dropout mask is not stored: the kernel draws it again
    upsampled: bool = False  # tensors that the epilogue reads have half the height and width
    aligned: bool = True  # tensors begin at multiples of 16 bytes
    rounded: bool = False  # a weight gradient is stored in 16 bits
    groups: int | None = None  # of the norm in the same launch: that of x, or that of the result
    tiles: tuple[int, ...] = ()  # per image, in the partial sums for the norm of x; of each half
    beside: int = 0  # channels of another tensor in the norm of the result
    keep: bool = True  # the result is written as well as its norm

    @property
    def added(self) -> tuple[str, ...]:
        """See `Spec`."""
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
        """Number of 1x1 convolutions that are added."""
        return len(self.extra)

    @property
    def border(self) -> int:
        """The first channel of x2 in the concatenation of x1 and x2; 0: x is one tensor."""
        return 0 if self.first in (None, self.c) else self.first

    @property
    def taps(self) -> int:
        """Taps of the filter."""
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
        """The filter, its stride and padding, in words: "3x3 of stride 2"."""
        stride = f" of stride {self.stride}" if self.stride != 1 else ""
        padding = "" if self.pads == (self.r // 2, self.s // 2) else f", padding {self.pads}"
        return f"{self.r}x{self.s}{stride}{padding}"

    @property
    def pointwise(self) -> bool:
        """Whether the convolution is a matrix product over pixels."""
        return self.taps == 1 and self.stride == 1 and self.pads == (0, 0)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Images, rows and columns of the result; of a pointwise convolution, one row of pixels."""
        rows, columns = self.size
        return (1, 1, self.n * rows * columns) if self.pointwise else (self.n, rows, columns)

    @property
    def precision(self) -> str:
        """Triton's `input_precision`."""
        return "ieee" if self.dtype == "fp32" else "tf32"

    @property
    def flops(self) -> int:
        """Operations of the products, without those on the padding of tiles."""
        rows, columns = self.size
        # an input gradient of stride 2 multiplies as much as the forward pass
        pixels = self.n * min(rows * columns, self.h * self.w)
        return 2 * pixels * self.c * (self.taps * self.k + sum(self.extra))

    @property
    def bytes(self) -> int:
        """Bytes that are read and written at least once."""
        rows, columns = self.size
        result = self.n * rows * columns * self.c
        beside = self.residual + (self.activation is not None)
        read = self.n * self.h * self.w * (self.k + sum(self.extra)) + beside * result
        return (read + result + self.taps * self.k * self.c) * self.itemsize


@dataclass(frozen=True)
class WeightGradsSpec(Spec):
    """Weight gradients of several convolutions of stride 1 over images of one size."""

    convs: tuple[ConvSpec, ...]
    contiguous: bool = True  # the rows of each result are contiguous in memory

    @property
    def flops(self) -> int:
        """The sum over the convolutions."""
        return sum(conv.flops for conv in self.convs)

    @property
    def bytes(self) -> int:
        """The sum over the convolutions."""
        return sum(conv.bytes for conv in self.convs)


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """o = softmax(q k^T / sqrt(d)) v, or its gradient. n is the number of samples times heads."""

    t: int  # positions
    d: int  # channels of a head
    grad: bool = False
    fetchable: bool = True  # TMA can read the inputs: contiguous, aligned to 16 bytes
    keys: int | None = None  # of cross-attention; None: q, k and v are one tensor
    masked: bool = False  # a mask says which keys a sample has

    @property
    def seen(self) -> int:
        """Positions of k and v."""
        return self.t if self.keys is None else self.keys

    @property
    def flops(self) -> int:
        """Operations of the two products; backward has five."""
        return (10 if self.grad else 4) * self.n * self.t * self.seen * self.d

    @property
    def bytes(self) -> int:
        """q, k, v and o; backward also their gradients."""
        return (4 if self.grad else 2) * self.n * (self.t + self.seen) * self.d * self.itemsize


@dataclass(frozen=True)
class ProjectedSpec(Spec):
    """Attention of n images whose q, k and v are projections of x [n, t, c], or of norm(x)."""

    t: int  # positions
    c: int  # channels of all heads
    heads: int
    groups: int | None = None  # of the norm
    tiles: int = 0  # per image, in the partial sums for the norm

    @property
    def d(self) -> int:
        """Channels of a head."""
        return self.c // self.heads

    @property
    def flops(self) -> int:
        """Operations of the projection and of attention."""
        return self.n * self.t * self.c * (6 * self.c + 4 * self.t)

    @property
    def bytes(self) -> int:
        """x, filters and the result."""
        return (2 * self.n * self.t * self.c + 3 * self.c**2) * self.itemsize


@dataclass(frozen=True)
class NormSpec(Spec):
    """act(norm(x) g + b) of images [n, h, w, c1 + c2], or one of its passes, or its gradient.

    x may be a concatenation of two tensors, and the kernel may upsample the first of them.
    """

    h: int
    w: int
    c1: int  # channels of x, or of the first of two
    c2: int = 0
    groups: int = 32
    activation: str = "identity"
    grad: bool = False
    dx: bool = True  # backward computes the gradient of x, and not only that of the parameters
    upsampled: bool = False  # x1 has half the height and width
    tiles: tuple[int, ...] = ()  # per image, in the partial sums, if there are any; of each half
    keep: bool = False  # upsample(x1) is returned as well
    mask: bool = False  # dropout
    corners: bool = False  # only one of four equal pixels is written
    aligned: bool = True  # tensors begin at multiples of 16 bytes

    @property
    def c(self) -> int:
        """Channels of x."""
        return self.c1 + self.c2

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.h * self.w

    @property
    def elements(self) -> int:
        """Of x."""
        return self.n * self.pixels * self.c

    @property
    def bytes(self) -> int:
        """Of x and the result; backward also of the gradient of the result."""
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
    dx: bool = True  # backward computes the gradient of x, and not only that of the parameters
    add: bool = False  # a tensor is added to the result
    # bytes per number of the result and of the added tensor, or of the gradient; None: as of x
    result: int | None = None

    @property
    def elements(self) -> int:
        """Of x."""
        return self.n * self.pixels * self.c

    @property
    def moved(self) -> int:
        """Bytes moved per number of x: x and the result; backward x, the gradient of the result,
        and the gradients that are written."""
        of_x = 1 + (self.grad and self.dx) + self.add
        return of_x * self.itemsize + (self.result or self.itemsize)

    @property
    def bytes(self) -> int:
        """Bytes moved for all of x."""
        return self.elements * self.moved
