"""Kernels that wait until they know who reads their result: few launches for a small batch.

A step at batch 1 is a chain of kernels of two or three microseconds, each of which waits for the
one before, so time goes with their number and with how many multiprocessors each keeps busy.
`WaitingKernels` takes the place of the module of kernels below the layers of the plan, and makes of

    table, apply                  -> one launch, `norm_whole` or `norm_of_sums`
    conv of few tiles             -> its sum in parts on all multiprocessors, `conv_split`;
                                     the norm that reads it adds them: still one launch each
    conv, norm of few pixels      -> of more images one launch, `conv_norm`
    conv to q, k, v; attention    -> of few positions one launch, `qkv_attention`
    norm, conv to q, k, v         -> of more positions one launch, `norm_linear_few`
    these and attention           -> of many images one launch, `norm_attention`
    norm, conv of large images    -> one launch, `norm_conv` or `norm_conv_of_two`, where there is
                                     such a kernel; what is upsampled beside it is so there, too
    upsample, apply               -> one launch, `norm_of_sums_upsampled`
    avg_pool, norm of few pixels  -> one launch, `norm_whole`
    avg_pool, its partials        -> one launch, `avg_pool_partials`
    conv, these                   -> one launch, where there is a kernel: `norm_conv`, `conv_means`

What waits meanwhile is in `plan.lazy`.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import Tensor

from triton_kernels.conv.plain.split_k import SplitConv

from .layers import SUM_PROGRAMS
from .lazy import (
    Activated,
    InParts,
    Normed,
    NormNext,
    Pooled,
    Projection,
    Table,
    Unmeasured,
    Upsampled,
    settled,
    tensor_of,
    unsummed,
)
from .zeroed_workspace import Zeros

_WHOLE_PIXELS = 256  # of an image that a program reads whole, where nobody has to add parts
_WHOLE_PARTS = 256  # the same, where somebody has to: of larger ones in a launch of its own
_MEASURED_WHOLE = 1024  # of one that a program reads whole though its partials are there,
_MEASURED_BATCHES = range(5, 9)  # if there are so many
_NORM_NEXT_PIXELS = 64  # of an image at most, whose norm may be in the launch of its convolution
_MEETING_PIXELS = 1024  # the same, of at least so many images
_MEETING_IMAGES = 8
_MEANS_IMAGES = 8  # at least, of which the means may be in the launch of their convolution
_FEW_TILES = 128  # whose sums every program may add up again
_VERY_FEW_TILES = 2  # likewise, of a tensor of any size
_POOLED_IMAGES = 4  # at most, of which a norm makes the means that it reads
_SMALL_ELEMENTS = 2**18  # of means that do not leave their sums: those have few programs


def _of_sum(terms: dict) -> dict:
    """What is added to the parts of a convolution."""
    return {k: v for k, v in terms.items() if k != "extra"}


class WaitingKernels:
    """Stands for a module like `triton_kernels.fused_ops` below the layers of the plan, and passes
    on what they ask for as soon as it is known in which launch to do it."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.zeros = Zeros()
        self.pooled = None  # the last means that were made with their partials, and these

    def __getattr__(self, name: str):
        function = getattr(self.kernels, name)

        def called(*arguments, **options):
            return function(*map(tensor_of, arguments), **options)

        return called if callable(function) else function

    def conv_forward(
        self,
        x: Tensor | Upsampled | Activated,
        weight: Tensor,
        bias: Tensor,
        *,
        residual: Tensor | InParts | None = None,
        extra: tuple = (),
        emb: Tensor | None = None,
        extra_bias: Tensor | None = None,
        stats: bool = False,
        **options,  # of convolutions that are not cut into parts
    ) -> tuple["Tensor | InParts | NormNext | Projection", Tensor | Unmeasured | None]:
        residual = tensor_of(residual)
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        if isinstance(x, Activated):
            begin = x.convolution(weight, bias, stats, terms, options)
            if begin is not None:
                pools = stats and x.x2 is None and self._may_pool(x, terms)
                pool = partial(begin, means=True) if pools else None
                return self._next(x, weight, begin, None, pool)
        terms["extra"] = extra = [(tensor_of(other), w) for other, w in extra]
        if weight.shape[2:] == (1, 1) and not stats:  # queries, keys and values
            assert residual is None and emb is None and not extra and not options
            x = x if isinstance(x, Normed) else tensor_of(x)
            return Projection(self.kernels, x, weight, bias), None
        x = tensor_of(x)
        beside = [other.shape[3] for other, _ in extra]
        plain = stats and not options
        splits = plain and self.worth_splitting(x.shape, weight, x.device, beside)
        begin = partial(self._conv, x, weight, bias, terms, stats, options, splits)
        fuse = self._norm_next(x, weight, bias, terms, splits) if plain else None
        pool = self._means_next(x, weight, bias, terms) if plain and not splits else None
        return self._next(x, weight, begin, fuse, pool)

    def _next(
        self, x: Tensor | Activated, weight: Tensor, begin: Callable,
        fuse: Callable | None, pool: Callable | None,
    ) -> tuple[Tensor | InParts | NormNext, Tensor | Unmeasured | None]:  # fmt: skip
        """The convolution, if nobody may be in its launch."""
        if fuse is None and pool is None:
            return begin()
        y = NormNext((*x.shape[:3], weight.shape[0]), begin, fuse, pool)
        return y, Unmeasured(y)

    def _may_pool(self, x: Tensor | Activated, terms: dict) -> bool:
        """Whether means may read a convolution of x: with the embedding a norm does."""
        return x.shape[1] % 2 == x.shape[2] % 2 == 0 and terms["emb"] is None

    def _means_next(self, x: Tensor, weight: Tensor, bias: Tensor, terms: dict) -> Callable | None:
        """What makes a convolution and means of it in one launch, if anything may."""
        if x.shape[0] < _MEANS_IMAGES or not self._may_pool(x, terms):
            return None
        if not self.kernels.serves_conv_means(x, weight, terms["extra"]):
            return None
        return partial(self.kernels.conv_means, x, weight, bias, **terms)

    def _norm_next(
        self, x: Tensor, weight: Tensor, bias: Tensor, terms: dict, splits: bool
    ) -> Callable | None:
        """What makes a convolution and the norm behind it in one launch, if anything may."""
        given, pixels = (x, weight, bias), x.shape[1] * x.shape[2]
        if not splits and pixels <= _NORM_NEXT_PIXELS:
            return partial(self._conv_norm, given, terms)
        if not splits and x.shape[0] >= _MEETING_IMAGES and pixels <= _MEETING_PIXELS:
            return partial(self._conv_meeting, given, terms)
        return None

    def _conv_norm(
        self, given: tuple, terms: dict, x2: Tensor | None, num_groups: int, *norm
    ) -> tuple[Tensor | None, Tensor | None, Tensor] | None:
        x, weight, _ = given
        second = 0 if x2 is None else x2.shape[3]
        if not self.kernels.norms_in_conv(x, weight, num_groups, terms["extra"], second):
            return None
        g, b, eps, activation = norm
        # with the embedding it is in the middle of a residual block, where but a norm reads it
        keep = terms["emb"] is None
        pixels = x.shape[1] * x.shape[2]
        elements = 2 * x.shape[0] * pixels * weight.shape[0]  # of a concatenation that reads it
        stats = keep and not self._reads_whole(elements, pixels)
        then = self.kernels.NextNorm(g, b, num_groups, eps, activation, keep, stats)
        return self.kernels.conv_norm(*given, then, **terms, x2=x2)

    def _conv_meeting(
        self, given: tuple, terms: dict, x2: Tensor | None, num_groups: int, *norm
    ) -> tuple[Tensor | None, Tensor | None, Tensor] | None:
        x, weight, _ = given
        if x2 is not None or not self.kernels.meets(x, weight, num_groups, terms["extra"]):
            return None
        g, b, eps, activation = norm
        keep = terms["emb"] is None  # as of _conv_norm
        then = self.kernels.NextNorm(g, b, num_groups, eps, activation, keep, keep)
        return self.kernels.conv_meeting(*given, then, **terms, zeros=self.zeros)

    def _conv(
        self, x: Tensor, weight: Tensor, bias: Tensor, terms: dict, stats: bool, options: dict,
        splits: bool,
    ) -> tuple[Tensor | InParts, Tensor | Unmeasured | None]:  # fmt: skip
        if splits:
            parts = self.kernels.conv_split(x, weight, extra=terms["extra"])
            shape = (*x.shape[:3], weight.shape[0])
            y = InParts(self.kernels, SplitConv(parts, shape, x.dtype, bias, **_of_sum(terms)))
            return y, Unmeasured(y)
        return self.kernels.conv_few(x, weight, bias, **terms, stats=stats, **options)

    def attention_forward(self, qkv: Projection, num_heads: int, order: str):
        if self.kernels.serves_qkv_attention(qkv.input().flatten(1, 2), num_heads):
            x, rows = tensor_of(qkv.x).flatten(1, 2), qkv.weight[:, :, 0, 0]
            return self.kernels.qkv_attention(x, rows, qkv.bias, num_heads, order), None
        o = qkv.attention(num_heads, order)
        if o is None:
            o, _ = self.kernels.attention_forward(qkv.tensor(), num_heads, order)
        return o, None

    def avg_pool(self, x: Tensor | InParts | NormNext) -> Tensor | Pooled:
        n, h, w, c = x.shape
        pixels = h // 2 * (w // 2)
        means = x.pooled() if isinstance(x, NormNext) else None
        if means is not None:
            self.pooled = None if self._reads_whole(n * pixels * c, pixels) else means
            return means[0]
        x = settled(x)
        if unsummed(x):
            return self._resampled(x, False)
        if h % 2 == w % 2 == 0 and self._pools_whole(n, pixels, c):
            return Pooled(self.kernels, tensor_of(x))
        if self._reads_whole(n * pixels * c, pixels) or n * pixels * c <= _SMALL_ELEMENTS:
            return self.kernels.avg_pool(tensor_of(x))
        self.pooled = self.kernels.avg_pool_partials(tensor_of(x))
        return self.pooled[0]

    def upsample(self, x: Tensor | InParts | NormNext) -> Tensor | Upsampled:
        x = settled(x)
        return self._resampled(x, True) if unsummed(x) else Upsampled(self.kernels, tensor_of(x))

    def _resampled(self, x: InParts, up: bool) -> Tensor:
        x.sum, resampled, x.partials = self.kernels.resample_parts(x.split, up)
        x.split = None
        return resampled

    def _pools_whole(self, n: int, pixels: int, c: int) -> bool:
        """Whether the norm behind means of so few pixels should make them."""
        return n <= _POOLED_IMAGES and self._reads_whole(n * pixels * c, pixels)

    def _reads_whole(self, elements: int, pixels: int) -> bool:
        """Whether a norm does not want the partials of a tensor so small."""
        return self.kernels.norm_of_sums_pays(elements) and pixels <= _WHOLE_PIXELS

    def norm_apply(
        self, x1, x2, partials, pixels, num_groups, weight, bias, eps, activation, mask=None, **film
    ) -> tuple[Tensor, Table]:
        assert mask is None  # of dropout, of which there is none
        table = Table(partials, pixels, num_groups, (weight, bias, eps), film)
        return self.apply(x1, x2, table, activation), table

    def serves_upsampled(
        self, small: Tensor | InParts | NormNext, channels: tuple[int, int], co: int, *rest: bool
    ) -> bool:
        serves, small = self.kernels.serves_upsampled, settled(small)
        return not unsummed(small) and serves(tensor_of(small), channels, co, *rest)

    def norm_apply_upsampled(
        self, x1, x2, partials, pixels, num_groups, weight, bias, eps, activation,
        *, corners=False, keep=True,
    ) -> tuple[Tensor, tuple[Table, None], Tensor | Upsampled]:  # fmt: skip
        large = self.upsample(x1)
        table = Table(partials, pixels, num_groups, (weight, bias, eps), {})
        a = self.apply(large, x2, table, activation, corners=corners, keep=keep)
        return a, (table, None), large  # the second is for gradients

    def tensor_partials(self, x: Tensor, programs: int) -> Tensor | Unmeasured:
        pooled, self.pooled = self.pooled, None
        return pooled[1] if pooled is not None and pooled[0] is x else Unmeasured(x)

    def apply(
        self,
        x1,
        x2,
        table: Table,
        activation: str,
        *,
        corners: bool = False,
        keep: bool = True,
    ) -> Tensor:
        x2 = tensor_of(x2)
        n, h, w, c1 = x1.shape
        c = c1 + (0 if x2 is None else x2.shape[3])
        film = any(v is not None for v in table.film.values())
        if isinstance(x1, NormNext):
            if not film:
                a = x1.normed(x2, table.num_groups, *table.arguments, activation)
                if a is not None:
                    return a
            x1 = x1.settled()
        if unsummed(x1) and h * w > _WHOLE_PARTS:
            x1.tensor()
        waits = unsummed(x1)
        small_one = isinstance(x1, Upsampled) and x1.large is None
        unmeasured = any(isinstance(p, Unmeasured) and p.taken() is None for p in table.partials)
        wants_whole = (waits or self._reads_whole(n * h * w * c, h * w)) and unmeasured
        wants_whole |= self._better_whole(n, h * w) and not small_one
        if wants_whole and self.kernels.norm_whole_supported(c, table.num_groups, h * w):
            if isinstance(x1, Pooled) and x1.means is None:
                a, x1.means = self.kernels.norm_whole(
                    x1.source, x2, table.num_groups, *table.arguments, activation, **table.film,
                    pool=True,
                )  # fmt: skip
                x1.source = None
                return a
            source, keep = (x1.split, not x1.once) if waits else (tensor_of(x1), True)
            a, y = self.kernels.norm_whole(
                source, x2, table.num_groups, *table.arguments, activation, **table.film, keep=keep
            )
            if waits and keep:
                x1.sum, x1.split = y, None
            return a
        partials = tuple(map(self._measured, table.partials))
        sums = partials, table.pixels, table.num_groups, *table.arguments
        tiles = sum(part.shape[1] for part in partials)
        if small_one:
            a, x1.large = self.kernels.norm_of_sums_upsampled(
                x1.source, x2, *sums, activation, **table.film, corners=corners, keep=keep
            )
            return a
        source = tensor_of(x1)
        if self._sums_pay(n * h * w * c, tiles):
            if activation == "identity" and x2 is None and not film:
                norm = (table.num_groups, *table.arguments)
                return Normed(self.kernels, source, partials[0], table.pixels[0], norm)
        elif not isinstance(x1, Upsampled):
            norm = (table.num_groups, *table.arguments, activation)
            given = source, x2, partials, tuple(table.pixels)
            return Activated(self.kernels, *given, norm, table.film)
        return self.kernels.norm_of_sums(source, x2, *sums, activation, **table.film)

    def _better_whole(self, n: int, pixels: int) -> bool:
        """Whether a norm rather reads an image whole than the partials that there are."""
        return pixels == _MEASURED_WHOLE and n in _MEASURED_BATCHES

    def _sums_pay(self, elements: int, tiles: int) -> bool:
        """Whether to make act(norm(x)) without asking a convolution behind it to do so."""
        most = _FEW_TILES if self.kernels.norm_of_sums_pays(elements) else _VERY_FEW_TILES
        return tiles <= most

    def _measured(self, partials: Tensor | Unmeasured) -> Tensor:
        if not isinstance(partials, Unmeasured):
            return partials
        if partials.taken() is None:
            partials.partials = self.kernels.tensor_partials(tensor_of(partials.x), SUM_PROGRAMS)
        return partials.partials
