"""The UNet for sampling: the forward half of its plan, with as few kernels as a small batch allows.

A step at batch 1 is a chain of kernels of two or three microseconds, each of which waits for the
one before, so time goes with their number and with how many multiprocessors each keeps busy. The
plan's layers (`planned.unet`) run over kernels that wait until they know who reads their result:

    table, apply                  -> one launch, `norm_whole` or `norm_of_sums`
    conv of few tiles             -> its sum in parts on all multiprocessors, `conv_split`;
                                     the norm that reads it adds them: still one launch each
    1x1 conv, norm of few pixels  -> one launch, `linear_norm_few`
    conv to q, k, v; attention    -> of few positions one launch, `qkv_attention`
    norm, conv to q, k, v         -> of more positions one launch, `norm_linear_few`
    norm, conv of large images    -> one launch, `norm_conv`, where there is such a kernel
    upsample, apply               -> one launch, `apply_upsampled`
    avg_pool, norm of few pixels  -> one launch, `norm_whole`
    avg_pool, its partials        -> one launch, `avg_pool_partials`

What depends on timesteps and labels alone is computed once for a chain: the embedding and every
block's projection of it, as a table [K, U, E] that a step reads one row of.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from triton_kernels.fused import ops as fused
from triton_kernels.fused.conv_split import SplitConv

from ..flat import FlatParameters
from ..objective import Denoiser
from ..unet import UNet
from .embedding import TOGETHER, Step
from .layers import SUM_PROGRAMS, Feature
from .unet import DTYPES, FusedUNet, missing_tile

_WHOLE_PIXELS = 256  # of an image that a program reads whole, where nobody has to add parts
_WHOLE_PARTS = 256  # the same, where somebody has to: of larger ones in a launch of its own
_FEW_TILES = 128  # whose sums every program may add up again
_VERY_FEW_TILES = 2  # likewise, of a tensor of any size
_POOLED_IMAGES = 4  # at most, of which a norm makes the means that it reads
_SMALL_ELEMENTS = 2**18  # of means that do not leave their sums: those have few programs
_TABLE_BYTES = 2**29  # of the embedding's table, at most; beyond it is computed in every step

log = logging.getLogger(__name__)


def sampling_network(model: nn.Module) -> "Denoiser | InferenceUNet":
    """What a sampler should ask in the place of `model.forward_nhwc`: the plan if there is one for
    this model, backend and GPU, else that; the log says why not. The plan has a copy of the
    parameters in 16 bits: it does not follow what happens to them afterwards."""
    backend = model.backend
    if backend.name != "triton" or backend.dtype not in DTYPES:
        return model.forward_nhwc
    refusal = FusedUNet.refusal(model) or missing_tile(model)
    if refusal is not None:
        log.warning("the layers run one by one, without the fused plan: %s", refusal)
        return model.forward_nhwc
    log.info("sampling with the fused plan")
    return InferenceUNet(model, fused)


class _Waiting:
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


class _NormNext:
    """A 1x1 convolution of an image of few pixels, until it is known whether a norm reads it next,
    which may be in the same launch."""

    def __init__(self, shape: tuple[int, ...], begin: Callable, fuse: Callable) -> None:
        self.shape, self.begin, self.fuse = shape, begin, fuse
        self.y: Tensor | _Waiting | None = None
        self.sums: Tensor | None = None

    def settled(self) -> Tensor | _Waiting:
        """Its result without the norm."""
        if self.y is None:
            self.y, sums = self.begin()
            self.sums = None if isinstance(sums, _Unmeasured) else sums
            self.begin, self.fuse = None, None
        return self.y

    def tensor(self) -> Tensor:
        return _tensor(self.settled())

    @property
    def partials(self) -> Tensor | None:
        return self.y.partials if isinstance(self.y, _Waiting) else self.sums


class _Upsampled:
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


class _Pooled:
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
class _Normed:
    """A tensor [N, H, W, C] as a norm without an activation leaves it, until it is wanted."""

    kernels: ModuleType
    x: Tensor
    sums: tuple  # partials, pixels, num_groups, weight, bias, eps

    def tensor(self) -> Tensor:
        return self.kernels.norm_of_sums(self.x, None, *self.sums, "identity")

    def linear(self, weight: Tensor, bias: Tensor) -> Tensor:
        """A 1x1 convolution of it."""
        (partials,), (pixels,), *norm = self.sums
        rows = weight[:, :, 0, 0]
        return self.kernels.norm_linear_few(self.x, partials, pixels, *norm, rows, bias)


@dataclass
class _Activated:
    """act(norm(x)), until it is wanted; a convolution may make it on its way."""

    kernels: ModuleType
    x: Tensor
    partials: Tensor
    pixels: int  # that these describe
    norm: tuple  # num_groups, weight, bias, eps, activation
    film: dict[str, Tensor | None]

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def tensor(self) -> Tensor:
        """By two launches, between which nothing comes."""
        *norm, activation = self.norm
        table = self.kernels.norm_table((self.partials,), (self.pixels,), *norm, **self.film)
        return self.kernels.apply(self.x, None, table, activation, early=True)

    def convolved(
        self, weight: Tensor, bias: Tensor, stats: bool, terms: dict, options: dict
    ) -> tuple[Tensor, Tensor | None] | None:
        """The convolution of it, if there is a kernel that makes it on its way and pays: with a
        residual, whose rows pass through shared memory too, two launches are as quick."""
        _, h, w, _ = self.x.shape
        others = [other for other, _ in terms["extra"]]
        given = self.x, weight, others, self.partials, self.norm[0]
        if (
            stats == bool(options)
            or terms["residual"] is not None
            or self.pixels != h * w
            or not self.kernels.serves_norm_conv(*given, **options)
        ):
            return None
        return self.kernels.norm_conv(
            self.x, self.partials, *self.norm, weight, bias, **self.film, **terms, **options
        )


@dataclass
class _Projection:
    """A 1x1 convolution [N, H, W, CO], whose pixels may be looked at as one dimension."""

    kernels: ModuleType
    x: Tensor | _Normed
    weight: Tensor
    bias: Tensor

    def flatten(self, *_: int) -> "_Projection":
        return self

    def input(self) -> Tensor:
        """x, or what a norm makes x of, which has the same shape."""
        return self.x.x if isinstance(self.x, _Normed) else self.x

    def tensor(self) -> Tensor:
        if isinstance(self.x, _Normed):
            return self.x.linear(self.weight, self.bias).flatten(1, 2)
        return self.kernels.conv_few(self.x, self.weight, self.bias)[0].flatten(1, 2)


@dataclass
class _Unmeasured:
    """The partials of a tensor that nobody has taken yet."""

    x: Tensor | _Waiting | _NormNext
    partials: Tensor | None = None

    def taken(self) -> Tensor | None:
        """Those from before, or of the launch that summed the parts, or nothing."""
        if self.partials is None and isinstance(self.x, _Waiting | _NormNext):
            self.partials = self.x.partials
        return self.partials


@dataclass
class _Table:
    """What `norm_table` was asked for."""

    partials: tuple[Tensor | _Unmeasured, ...]
    pixels: tuple[int, ...]
    num_groups: int
    arguments: tuple  # weight, bias, eps
    film: dict[str, Tensor | None]  # scale, shift


class WaitingKernels:
    """Stands for a module like `triton_kernels.fused` below the layers of the plan, and passes on
    what they ask for as soon as it is known in which launch to do it."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.pooled = None  # the last means that were made with their partials, and these

    def __getattr__(self, name: str):
        function = getattr(self.kernels, name)

        def called(*arguments, **options):
            return function(*map(_tensor, arguments), **options)

        return called if callable(function) else function

    def conv_forward(
        self,
        x: Tensor | _Upsampled | _Activated,
        weight: Tensor,
        bias: Tensor,
        *,
        residual: Tensor | _Waiting | None = None,
        extra: tuple = (),
        emb: Tensor | None = None,
        extra_bias: Tensor | None = None,
        stats: bool = False,
        **options,  # of convolutions that are not cut into parts
    ) -> tuple["Tensor | _Waiting | _NormNext | _Projection", Tensor | _Unmeasured | None]:
        extra = [(_tensor(other), w) for other, w in extra]
        residual = _tensor(residual)
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        if isinstance(x, _Activated):
            y = x.convolved(weight, bias, stats, terms, options)
            if y is not None:
                return y
        if weight.shape[2:] == (1, 1) and not stats:  # queries, keys and values
            assert residual is None and emb is None and not extra and not options
            x = x if isinstance(x, _Normed) else _tensor(x)
            return _Projection(self.kernels, x, weight, bias), None
        x = _tensor(x)
        begin = partial(self._conv, x, weight, bias, terms, stats, options)
        alone = emb is None and not extra
        if stats and alone and not options and self.kernels.postpones(x, weight):
            fuse = partial(self.kernels.linear_norm_few, x, weight, bias, residual)
            y = _NormNext((*x.shape[:3], weight.shape[0]), begin, fuse)
            return y, _Unmeasured(y)
        return begin()

    def _conv(
        self, x: Tensor, weight: Tensor, bias: Tensor, terms: dict, stats: bool, options: dict
    ) -> tuple[Tensor | _Waiting, Tensor | _Unmeasured | None]:
        beside = [other.shape[3] for other, _ in terms["extra"]]
        splits = stats and not options
        if splits and self.worth_splitting(x.shape, weight, x.device, beside):
            parts = self.kernels.conv_split(x, weight, extra=terms["extra"])
            shape = (*x.shape[:3], weight.shape[0])
            y = _Waiting(self.kernels, SplitConv(parts, shape, x.dtype, bias, **_of_sum(terms)))
            return y, _Unmeasured(y)
        return self.kernels.conv_few(x, weight, bias, **terms, stats=stats, **options)

    def attention_forward(self, qkv: _Projection, num_heads: int, order: str):
        if self.kernels.serves_qkv_attention(qkv.input().flatten(1, 2), num_heads):
            x, rows = _tensor(qkv.x).flatten(1, 2), qkv.weight[:, :, 0, 0]
            return self.kernels.qkv_attention(x, rows, qkv.bias, num_heads, order), None
        return self.kernels.attention_few(qkv.tensor(), num_heads, order), None

    def avg_pool(self, x: Tensor | _Waiting | _NormNext) -> Tensor | _Pooled:
        x = _settled(x)
        if _waits(x):
            return self._resampled(x, False)
        n, h, w, c = x.shape
        pixels = h // 2 * (w // 2)
        if h % 2 == w % 2 == 0 and self._pools_whole(n, pixels, c):
            return _Pooled(self.kernels, _tensor(x))
        if self._reads_whole(n * pixels * c, pixels) or n * pixels * c <= _SMALL_ELEMENTS:
            return self.kernels.avg_pool(_tensor(x))
        self.pooled = self.kernels.avg_pool_partials(_tensor(x))
        return self.pooled[0]

    def upsample(self, x: Tensor | _Waiting | _NormNext) -> Tensor | _Upsampled:
        x = _settled(x)
        return self._resampled(x, True) if _waits(x) else _Upsampled(self.kernels, _tensor(x))

    def _resampled(self, x: _Waiting, up: bool) -> Tensor:
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
    ) -> tuple[Tensor, _Table]:
        table = _Table(partials, pixels, num_groups, (weight, bias, eps), film)
        return self.apply(x1, x2, table, activation, mask=mask), table

    def serves_upsampled(
        self, small: Tensor | _Waiting | _NormNext, channels: tuple[int, int], co: int, *rest: bool
    ) -> bool:
        serves, small = self.kernels.serves_upsampled, _settled(small)
        return not _waits(small) and serves(_tensor(small), channels, co, *rest)

    def norm_apply_upsampled(
        self, x1: Tensor | _Waiting, x2, *statistics_and_activation, corners: bool = False
    ):
        *statistics, activation = statistics_and_activation
        partials, pixels, num_groups, *arguments = statistics
        large = self.upsample(x1)
        table = _Table(partials, pixels, num_groups, tuple(arguments), {})
        a = self.apply(large, x2, table, activation, corners=corners)
        return a, (table, None), large  # the second is for gradients

    def tensor_partials(self, x: Tensor, programs: int) -> Tensor | _Unmeasured:
        pooled, self.pooled = self.pooled, None
        return pooled[1] if pooled is not None and pooled[0] is x else _Unmeasured(x)

    def apply(
        self, x1, x2, table: _Table, activation: str, *, corners: bool = False, **options
    ) -> Tensor:
        options = {k: v for k, v in options.items() if v is not None}
        x2 = _tensor(x2)
        n, h, w, c1 = x1.shape
        c = c1 + (0 if x2 is None else x2.shape[3])
        film = any(v is not None for v in table.film.values())
        if isinstance(x1, _NormNext):
            if x1.y is None and not options and not film:
                groups = table.num_groups
                if self.kernels.serves_linear_norm(c1, c, groups):
                    a, x1.y = x1.fuse(x2, groups, *table.arguments, activation)
                    return a
            x1 = x1.settled()
        if _waits(x1) and h * w > _WHOLE_PARTS:
            x1.tensor()
        waits = _waits(x1)
        if (
            not options
            and (waits or self._reads_whole(n * h * w * c, h * w))
            and any(isinstance(p, _Unmeasured) and p.taken() is None for p in table.partials)
            and self.kernels.norm_whole_supported(c, table.num_groups, h * w)
        ):
            if isinstance(x1, _Pooled) and x1.means is None:
                a, x1.means = self.kernels.norm_whole(
                    x1.source, x2, table.num_groups, *table.arguments, activation, **table.film,
                    pool=True,
                )  # fmt: skip
                x1.source = None
                return a
            source, keep = (x1.split, not x1.once) if waits else (_tensor(x1), True)
            a, y = self.kernels.norm_whole(
                source, x2, table.num_groups, *table.arguments, activation, **table.film, keep=keep
            )
            if waits and keep:
                x1.sum, x1.split = y, None
            return a
        partials = tuple(map(self._measured, table.partials))
        sums = partials, table.pixels, table.num_groups, *table.arguments
        tiles = sum(part.shape[1] for part in partials)
        small_one = isinstance(x1, _Upsampled) and x1.large is None and not options
        if small_one and self._sums_pay(n * h * w * c, tiles):
            a, x1.large = self.kernels.norm_of_sums_upsampled(
                x1.source, x2, *sums, activation, **table.film
            )
            return a
        if not options and self._sums_pay(n * h * w * c, tiles):
            plain = activation == "identity" and x2 is None and not film
            if plain and self.kernels.serves_norm_linear(
                _tensor(x1), partials[0], table.num_groups
            ):
                return _Normed(self.kernels, _tensor(x1), sums)
            return self.kernels.norm_of_sums(_tensor(x1), x2, *sums, activation, **table.film)
        if x2 is None and not options and not isinstance(x1, _Upsampled):
            norm = (table.num_groups, *table.arguments, activation)
            sums = partials[0], table.pixels[0]
            return _Activated(self.kernels, _tensor(x1), *sums, norm, table.film)
        source = x1.source if small_one else _tensor(x1)
        # nothing comes between these two launches
        coefficients = self.kernels.norm_table(*sums, **table.film)
        options["early"] = True
        if small_one:
            a, x1.large = self.kernels.apply_upsampled(
                source, x2, coefficients, activation, corners=corners, **options
            )
            return a
        return self.kernels.apply(source, x2, coefficients, activation, **options)

    def _sums_pay(self, elements: int, tiles: int) -> bool:
        """Whether every program of a pass should make its part of the table itself."""
        most = _FEW_TILES if self.kernels.norm_of_sums_pays(elements) else _VERY_FEW_TILES
        return tiles <= most

    def _measured(self, partials: Tensor | _Unmeasured) -> Tensor:
        if not isinstance(partials, _Unmeasured):
            return partials
        if partials.taken() is None:
            partials.partials = self.kernels.tensor_partials(_tensor(partials.x), SUM_PROGRAMS)
        return partials.partials


_LATER = _Waiting | _NormNext | _Upsampled | _Pooled | _Normed | _Activated


def _tensor(x: object) -> object:
    return x.tensor() if isinstance(x, _LATER) else x


def _settled(x: object) -> object:
    return x.settled() if isinstance(x, _NormNext) else x


def _of_sum(terms: dict) -> dict:
    """What is added to the parts of a convolution."""
    return {k: v for k, v in terms.items() if k != "extra"}


def _waits(x: object) -> bool:
    return isinstance(x, _Waiting) and x.sum is None


class InferenceUNet(FusedUNet):
    """A `UNet` as a TabulatedDenoiser (see `chain`), for images of its `image_size`, without
    gradients."""

    trains = False

    def __init__(self, model: UNet, kernels: ModuleType) -> None:
        flat = FlatParameters(model, together=TOGETHER, trains=False)
        super().__init__(model, flat, WaitingKernels(kernels))
        self.stem_weight = self._padded(self.stem.weight.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # of a class, or of the null class
        self.num_labels = model.label_emb.num_embeddings if model.num_classes is not None else 1

    @torch.no_grad()
    def tabulate(
        self,
        timesteps: Tensor,  # [K]
        labels: Tensor | None,  # int64 [N]
        n: int,
    ) -> tuple[Tensor, ...]:
        """The projections of every block, float32 [K, U, E], and each sample's u, int64 [N]; or, if
        that were too large, timesteps and labels. ValueError: labels missing, or not wanted."""
        steps, classes = len(timesteps), self.model.num_classes
        if (labels is None) != (classes is None):
            given = "missing" if labels is None else "given"
            raise ValueError(f"labels are {given}; the model has num_classes={classes}")
        if labels is None:
            return (self.embedding(timesteps, None, None, 0)[:, None],)
        # a row a class, or if that is less, a row a sample
        rows, index = torch.arange(self.num_labels, device=timesteps.device), labels
        if self.num_labels > n:
            rows, index = labels, torch.arange(n, device=timesteps.device)
        width = self.embedding.projection.bias.shape[0]
        if 4 * steps * len(rows) * width > _TABLE_BYTES:
            return timesteps, labels.clone()
        table = [self.embedding(timesteps, row.expand(steps), None, 0) for row in rows]
        return torch.stack(table, dim=1), index.clone()

    @torch.no_grad()
    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """[N, H, W, CO] at this row; the pixels of the result are some channels apart."""
        first, *labels = tables
        table = (first, row, *labels) if first.ndim == 3 else ()
        image, emb = self.kernels.begin_step(x, self.stem_weight.shape[1], self.dtype, *table)
        if not table:
            emb = self.embedding(first[row.expand(len(x))], *labels, None, 0)
        return self.run(image, emb.expand(len(x), -1))

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `UNet.forward_nhwc`."""
        image, _ = self.kernels.begin_step(x, self.stem_weight.shape[1], self.dtype)
        return self.run(image, self.embedding(t, labels, None, 0))

    def run(self, image: Tensor, emb: Tensor) -> Tensor:  # [N, H, W, 16], [N, E]
        self.step = Step(emb, None, None, 0)
        h = self._features(image, self.stem_weight)
        return self._output(self.head_norm.apply((h,), "silu")[0])

    def _run(self, block: list, h: Feature, other: Feature | None) -> Feature:
        h = super()._run(block, h, other)
        for layer in block:
            layer.tape = None  # there is no way back
        return h
