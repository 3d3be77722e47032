"""Results of `plan.fusion` that wait until it is known who reads them.

Each holds what its launch needs, and `tensor()` makes it, by a launch of its own if nobody else
has made it on the way. `tensor_of` asks for that where anything will do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from torch import Tensor

from triton_kernels.conv.plain.split_k import SplitConv


class InParts:
    """A convolution in parts, until its sum is wanted, and its sum from then on."""

    def __init__(self, kernels: ModuleType, split: SplitConv) -> None:
        self.kernels, self.split, self.sum, self.partials = kernels, split, None, None
        self.shape = split.shape
        # with the embedding it is in the middle of a residual block, where but a norm reads it
        self.once = split.emb is not None

    def tensor(self) -> Tensor:
        """The sum, by a launch of its own if nobody else has made it."""
        if self.sum is None:
            (self.sum, self.partials), self.split = self.kernels.sum_parts(self.split), None
        return self.sum


class NormNext:
    """A convolution, until it is known whether a norm reads it next, or 2x2 means of it, which may
    be in the same launch."""

    def __init__(
        self,
        shape: tuple[int, ...],
        begin: Callable,
        fuse: Callable | None,  # with a norm
        pool: Callable | None,  # with means
    ) -> None:
        self.shape, self.begin, self.fuse, self.pool = shape, begin, fuse, pool
        self.y: Tensor | InParts | None = None
        self.sums: Tensor | None = None

    def settled(self) -> Tensor | InParts:
        """Its result without the norm."""
        if self.y is None:
            y, sums = self.begin()
            self._launched(y, None if isinstance(sums, Unmeasured) else sums)
        return self.y

    def normed(self, x2: Tensor | None, *norm: Tensor | float | str) -> Tensor | None:
        """act(norm(.)) of it beside x2 in its launch, if it may be there and is not launched yet;
        num_groups, weight, bias, eps and activation. There is no result afterwards if nobody else
        reads it."""
        made = self.fuse(x2, *norm) if self.fuse is not None else None
        if made is None:
            return None
        y, sums, a = made
        self._launched(y, sums)
        return a

    def pooled(self) -> tuple[Tensor, Tensor] | None:
        """The means in its launch, and their partials, if they may be there and it is not launched
        yet."""
        if self.pool is None:
            return None
        y, sums, means = self.pool()
        self._launched(y, sums)
        return means

    def _launched(self, y: Tensor | InParts | None, sums: Tensor | None) -> None:
        self.y, self.sums = y, sums
        self.begin = self.fuse = self.pool = None

    def tensor(self) -> Tensor:
        return tensor_of(self.settled())

    @property
    def partials(self) -> Tensor | None:
        return self.y.partials if isinstance(self.y, InParts) else self.sums


class Upsampled:
    """A tensor of which every pixel stands for 2x2 of them, until these are wanted."""

    def __init__(self, kernels: ModuleType, source: Tensor) -> None:
        n, h, w, c = source.shape
        self.kernels, self.source, self.large = kernels, source, None
        self.shape, self.nbytes = (n, 2 * h, 2 * w, c), 4 * source.nbytes

    def tensor(self) -> Tensor:
        """All of them, by a launch of its own if nobody else has made them."""
        if self.large is None:
            self.large = self.kernels.upsample(self.source)
        return self.large


class Pooled:
    """The 2x2 means of a tensor, until they are wanted."""

    def __init__(self, kernels: ModuleType, source: Tensor) -> None:
        n, h, w, c = source.shape
        self.kernels, self.source, self.means = kernels, source, None
        self.shape = (n, h // 2, w // 2, c)

    def tensor(self) -> Tensor:
        """All of them, by a launch of its own if nobody else has made them."""
        if self.means is None:
            self.means, self.source = self.kernels.avg_pool(self.source), None
        return self.means


@dataclass
class Normed:
    """A tensor [N, H, W, C] as a norm without an activation leaves it, until it is wanted."""

    kernels: ModuleType
    x: Tensor
    partials: Tensor
    pixels: int  # that these describe
    norm: tuple  # num_groups, weight, bias, eps

    def tensor(self) -> Tensor:
        sums = (self.partials,), (self.pixels,)
        return self.kernels.norm_of_sums(self.x, None, *sums, *self.norm, "identity")

    def linear(self, weight: Tensor, bias: Tensor) -> Tensor:
        """A 1x1 convolution of it."""
        given = self.x, self.partials
        if not self.kernels.serves_norm_linear(*given, self.norm[0]):
            return self.kernels.conv_few(self.tensor(), weight, bias)[0]
        rows = weight[:, :, 0, 0]
        return self.kernels.norm_linear_few(*given, self.pixels, *self.norm, rows, bias)


@dataclass
class Activated:
    """act(norm(x)), or act(norm([x, x2])), until it is wanted; a convolution may make it on its
    way."""

    kernels: ModuleType
    x: Tensor
    x2: Tensor | None
    partials: tuple[Tensor, ...]  # of x, and of x2
    pixels: tuple[int, ...]  # that these describe
    norm: tuple  # num_groups, weight, bias, eps, activation
    film: dict[str, Tensor | None]

    @property
    def shape(self) -> tuple[int, ...]:
        second = 0 if self.x2 is None else self.x2.shape[3]
        return (*self.x.shape[:3], self.x.shape[3] + second)

    def tensor(self) -> Tensor:
        given = self.x, self.x2, self.partials, self.pixels, *self.norm
        return self.kernels.norm_of_sums(*given, **self.film)

    def convolution(
        self, weight: Tensor, bias: Tensor, stats: bool, terms: dict, options: dict
    ) -> Callable | None:
        """What makes the convolution of it, if there is a kernel that makes it on its way; of one
        tensor with means as well."""
        _, h, w, _ = self.x.shape
        if any(pixels != h * w for pixels in self.pixels):
            return None
        convolution = self._of_one if self.x2 is None else self._of_two
        return convolution(weight, bias, stats, terms, options)

    def _of_one(
        self, weight: Tensor, bias: Tensor, stats: bool, terms: dict, options: dict
    ) -> Callable | None:
        """What 1x1 convolutions are added of may be upsampled there, too."""
        extra = []
        for other, w1x1 in terms["extra"]:
            small = isinstance(other, Upsampled) and other.large is None
            extra.append((other.source if small else tensor_of(other), w1x1))
        terms = terms | {"extra": extra}
        others = [other for other, _ in extra]
        given = self.x, weight, others, *self.partials, self.norm[0]
        if stats == bool(options) or not self.kernels.serves_norm_conv(*given, **options):
            return None
        given = self.x, *self.partials, *self.norm, weight, bias
        return partial(self.kernels.norm_conv, *given, **self.film, **terms, **options)

    def _of_two(
        self, weight: Tensor, bias: Tensor, stats: bool, terms: dict, options: dict
    ) -> Callable | None:
        given = self.x, self.x2, weight, self.partials, self.norm[0]
        if (
            not stats
            or options
            or terms["residual"] is not None
            or terms["extra"]
            or any(v is not None for v in self.film.values())
            or not self.kernels.serves_norm_conv_of_two(*given)
        ):
            return None
        given = self.x, self.x2, self.partials, *self.norm, weight, bias
        return partial(self.kernels.norm_conv_of_two, *given, emb=terms["emb"])


@dataclass
class Projection:
    """A 1x1 convolution [N, H, W, CO], whose pixels may be looked at as one dimension."""

    kernels: ModuleType
    x: Tensor | Normed
    weight: Tensor
    bias: Tensor

    def flatten(self, *_: int) -> "Projection":
        return self

    def input(self) -> Tensor:
        """x, or what a norm makes x of, which has the same shape."""
        return self.x.x if isinstance(self.x, Normed) else self.x

    def tensor(self) -> Tensor:
        if isinstance(self.x, Normed):
            return self.x.linear(self.weight, self.bias).flatten(1, 2)
        return self.kernels.conv_few(self.x, self.weight, self.bias)[0].flatten(1, 2)

    def attention(self, num_heads: int, order: str) -> Tensor | None:
        """Attention over it, if there is a kernel that makes queries, keys and values on its way,
        and their norm if it waits: [N, H W, CO / 3]."""
        x, norm = self.input().flatten(1, 2), None
        if isinstance(self.x, Normed):
            norm = self.x.partials, self.x.pixels, *self.x.norm
        if not self.kernels.serves_norm_attention(x, num_heads, norm):
            return None
        rows = self.weight[:, :, 0, 0]
        return self.kernels.norm_attention(x, norm, rows, self.bias, num_heads, order)


@dataclass
class Unmeasured:
    """The partials of a tensor that nobody has taken yet."""

    x: Tensor | InParts | NormNext
    partials: Tensor | None = None

    def taken(self) -> Tensor | None:
        """Those from before, or of the launch that summed the parts, or nothing."""
        if self.partials is None and isinstance(self.x, InParts | NormNext):
            self.partials = self.x.partials
        return self.partials


@dataclass
class Table:
    """What `norm_table` was asked for."""

    partials: tuple[Tensor | Unmeasured, ...]
    pixels: tuple[int, ...]
    num_groups: int
    arguments: tuple  # weight, bias, eps
    film: dict[str, Tensor | None]  # scale, shift


_LATER = InParts | NormNext | Upsampled | Pooled | Normed | Activated


def tensor_of(x: object) -> object:
    """x, or what it waits to be."""
    return x.tensor() if isinstance(x, _LATER) else x


def settled(x: object) -> object:
    """x, but a convolution that waits for its reader, without it."""
    return x.settled() if isinstance(x, NormNext) else x


def unsummed(x: object) -> bool:
    """Whether x is a convolution whose parts nobody has added up yet."""
    return isinstance(x, InParts) and x.sum is None
