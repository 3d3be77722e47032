"""GroupNorm and activation in one launch, of statistics that are partial sums:

    z = (x - mean) rstd g + b,   a = act(z),   mean and rstd over a group of channels of an image

`norm_table` and `apply` in one. Every program makes its part of the table anew, so that there
should be few of them, each of few channels and many pixels. x is one tensor or the concatenation of
x1 and x2 over channels, which never exists in memory, and x1 may be upsampled on the way. Of few
images `norm_small_batch` does it; and where sums are many, beside a program's pixels, two launches.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..activations import check_activation, rounded_grad
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_second, row_stride
from .from_partials_kernels import norm_from_partials_kernel
from .passes import apply, apply_upsampled
from .small_batch import SMALL_BATCH, SmallBatch, norm_small_batch
from .tables import check_partials_of, covering_groups, norm_table

_empty = torch.empty  # tests put a function here that returns NaNs

# Elements of a tensor whose partial sums so few programs read that a launch costs more.
SMALL_NORM = 2**20
_MANY_SUMS, _MOST_SUMS = 512, 2**13  # of either kind, that a program of 32 channels loads
_SMALL_IMAGE = 256  # pixels
_PROGRAMS = 2  # a multiprocessor: where there are fewer, a program has fewer tiles


@configures("from_partials")
class SumsConfig(NamedTuple):
    """What a program does."""

    block_c: int
    tile: int  # elements
    tiles: int  # of a large image
    num_warps: int


_CONFIGS = [
    SumsConfig(32, 4096, 2, 8),
    SumsConfig(32, 2048, 2, 4),  # small images
    SumsConfig(64, 4096, 4, 8),  # groups of which 64 channels have as many lanes as 32
    SumsConfig(32, 4096, 1, 8),
    SumsConfig(32, 4096, 8, 8),
    SumsConfig(32, 8192, 4, 8),
    SumsConfig(64, 2048, 4, 4),
]


@configures("table_and_apply")
class TableAndApply(NamedTuple):
    """Two launches, of `norm_table` and of `apply`."""


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    """Registers have to hold the sums."""
    sums = _sums(32, spec)
    return f"{sums} sums of either kind a program; {_MOST_SUMS}" if sums > _MOST_SUMS else None


def _untimed(spec: NormSpec, gpu: Device) -> str | None:
    """Of a launch less is the price that programs of 32 channels load more sums; what it costs is
    less than that, if there are many programs."""
    many = spec.elements > gpu.busy * _CONFIGS[0].tile * _CONFIGS[0].tiles
    most = _MANY_SUMS if many else 2 * _MANY_SUMS
    sums = _sums(32, spec)
    many = sums > most and spec.elements > SMALL_NORM
    return f"{sums} sums of either kind a program; at most {most}" if many else None


def _configs(spec: NormSpec, gpu: Device) -> list[SumsConfig]:
    """The first as of 16 and 64 images of the decoder's shapes."""
    first = _CONFIGS[1 if spec.pixels <= _SMALL_IMAGE else 0]
    if _sums(64, spec) <= _sums(32, spec) >= _MANY_SUMS:
        first = _CONFIGS[2]
    return [first, *_CONFIGS]


def _sums(block_c: int, spec: NormSpec) -> int:
    """Sums of either kind that a program of so many channels loads, the padding too."""
    border = spec.c1 if spec.c2 else 0
    groups = covering_groups(block_c, border, spec.c // spec.groups)
    return math.prod(groups) * triton.next_power_of_2(max(spec.tiles))


def _key(spec: NormSpec) -> dict[str, Any]:
    names = ("h", "w", "c1", "c2", "upsampled", "corners", "keep")
    tiles = dict(zip(("tiles1", "tiles2"), (*spec.tiles, 1), strict=False))
    shape = {name: getattr(spec, name) for name in names} | tiles
    return shape | {"dtype": spec.dtype, "activation": spec.activation}


NORM_OF_SUMS = Op(
    "norm_of_sums",
    _key,
    (
        SMALL_BATCH,
        Kernel("from_partials", SumsConfig, _refuse, _configs, untimed=_untimed),
        Kernel("table_and_apply", TableAndApply, lambda *_: None, lambda *_: [TableAndApply()]),
    ),
    similar=False,
)


def norm_of_sums(
    x1: Tensor,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    partials: tuple[Tensor, ...],  # of each: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    *,
    config: tuple | None = None,  # of a kernel of `NORM_OF_SUMS`
) -> Tensor:  # [N, H, W, C1 + C2]
    """`apply` of the table that `norm_table` would make of these partials."""
    norm = (num_groups, weight, bias, eps, activation, scale, shift)
    return _launch(x1, x2, partials, pixels, *norm, config=config)[0]


def norm_of_sums_upsampled(
    x1: Tensor,  # [N, H / 2, W / 2, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    partials: tuple[Tensor, ...],  # of each: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    *,
    corners: bool = False,
    keep: bool = True,
    config: tuple | None = None,  # of a kernel of `NORM_OF_SUMS`
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; [N, H, W, C1]
    """`norm_of_sums` of upsample(x1), where every pixel becomes a 2x2 block, beside x2; and
    upsample(x1), to `keep` it for its other readers. With `corners` only the first pixel of the 2x2
    that are equal need be there, in the first C1 channels."""
    norm = (num_groups, weight, bias, eps, activation, scale, shift)
    options = {"up": True, "corners": corners, "keep": keep, "config": config}
    return _launch(x1, x2, partials, pixels, *norm, **options)


def _launch(
    x1: Tensor,
    x2: Tensor | None,
    partials: tuple[Tensor, ...],
    pixels: tuple[int, ...],
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    up: bool = False,
    corners: bool = False,
    keep: bool = False,
    config: tuple | None = None,  # of a kernel of `NORM_OF_SUMS`
) -> tuple[Tensor, Tensor | None]:
    check_activation(activation)
    check_nhwc("x1", x1)
    n, small_h, small_w, c1 = x1.shape
    h, w = (2 * small_h, 2 * small_w) if up else (small_h, small_w)
    c2 = check_second(x2, n, h, w)
    for part, count, channels in zip(partials, pixels, (c1, c2), strict=False):
        check_partials_of(part, count, n, channels)
    c = c1 + c2
    norm, film = (partials, pixels, num_groups, weight, bias, eps), (scale, shift)
    options = {"corners": corners, "keep": keep}
    if config is None:
        written = 2 if corners else 1  # every so many pixels all channels are

        def run(config: tuple) -> Tensor:
            given = {"up": up, **options, "config": config}
            return _launch(x1, x2, *norm, activation, *film, **given)[0][:, ::written, ::written]

        spec = NormSpec(
            n,
            dtype_name(x1.dtype),
            h,
            w,
            c1,
            c2,
            num_groups,
            activation,
            upsampled=up,
            tiles=tuple(part.shape[1] for part in partials),
            **options,
        )
        config = select(NORM_OF_SUMS, spec, describe(x1.device), run).config
    if isinstance(config, SmallBatch):
        return norm_small_batch(x1, x2, *norm, activation, *film, up=up)
    if isinstance(config, TableAndApply):
        table = norm_table(*norm, *film)
        if not up:
            return apply(x1, x2, table, activation, early=True), None
        return apply_upsampled(x1, x2, table, activation, **options, early=True)
    if n == 0:
        shape = (0, h, w, c1)
        return x1.new_empty((0, h, w, c)), x1.new_empty(shape) if keep else None
    a = _empty((n, h, w, c), dtype=x1.dtype, device=x1.device)
    large = _empty((n, h, w, c1), dtype=x1.dtype, device=x1.device) if keep else None
    act, overlap = rounded_grad(activation, x1.dtype), overlapping(x1.device, 0)  # they are few
    launch_from_partials(
        x1, x2, *norm, act, *film, a, config, overlap, large=large, up=up, corners=corners
    )
    return a, large


def launch_from_partials(
    x1: Tensor,
    x2: Tensor | None,
    partials: tuple[Tensor, ...],
    pixels: tuple[int, ...],
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    scale: Tensor | None,
    shift: Tensor | None,
    a: Tensor,  # [N, H, W, C1 + C2], out
    config: SumsConfig,
    overlap: dict[str, bool],  # of `overlapping`
    *,
    large: Tensor | None = None,  # [N, H, W, C1], out: x1 upsampled
    table: Tensor | None = None,  # float32 [N, 4, C1 + C2], out: that of `norm_table`
    up: bool = False,
    corners: bool = False,
    tf32: bool = False,
    wanted: int | None = None,  # programs; where there are fewer, each has less to do
    least_tile: int | None = None,  # elements, then
) -> None:
    """The kernel of `norm_of_sums`, whose arguments these are."""
    n, h, w, c = a.shape
    _, small_h, small_w, c1 = x1.shape
    c2, cg = c - c1, c // num_groups
    first, second = partials[0], partials[1] if x2 is not None else None
    ks = first.shape[1], 1 if second is None else second.shape[1]
    halves = ((small_h * small_w, c1), (h * w if c2 else 0, c2))
    wanted = wanted or _PROGRAMS * describe(x1.device).num_sms
    programs, blocks, masked, tile = _cut(n, halves, config, wanted, least_tile)
    norm_from_partials_kernel[(programs,)](
        x1, x2, first, second, weight, bias, scale, shift, a, large, table,
        row_stride(scale), row_stride(shift), pixels[0], pixels[-1], h * w, c1, c2, *blocks, eps,
        activation, small_w if up else None, corners, *ks, cg, masked, *tile,
        *covering_groups(tile[-1], c1 if c2 else 0, cg), triton.next_power_of_2(max(ks)), tf32,
        num_warps=config.num_warps, **overlap,
    )  # fmt: skip


def _cut(
    n: int,
    halves: tuple[tuple[int, int], ...],
    config: SumsConfig,
    wanted: int,
    least_tile: int | None,
) -> tuple[int, tuple[int, int, int, int], bool, tuple[int, int, int]]:
    """How many programs; blocks of pixels and of channels, of both halves; whether some tiles reach
    over an edge; TILES, BLOCK_P and BLOCK_C. Halves are (pixels, channels), `wanted` programs."""
    present = [half for half in halves if half[1]]
    block_c = min(config.block_c, triton.next_power_of_2(max(c for _, c in present)))
    least = min(p for p, _ in present)
    block_p = min(max(config.tile // block_c, 1), triton.next_power_of_2(least))
    tiles = config.tiles

    def cut() -> list[tuple[int, int]]:
        return [(triton.cdiv(p, tiles * block_p), triton.cdiv(c, block_c)) for p, c in halves]

    def programs() -> int:
        return n * sum(pb * cb for pb, cb in cut())

    while tiles > 1 and programs() < wanted:
        tiles //= 2
    while least_tile and block_p * block_c > least_tile and programs() < wanted:
        block_p //= 2
    masked = any(p % block_p or c % block_c for p, c in present)
    (pb1, cb1), (pb2, cb2) = cut()
    return programs(), (pb1, pb2, cb1, cb2), masked, (tiles, block_p, block_c)
