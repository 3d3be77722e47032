"""GroupNorm and activation in one launch, from partial sums:

    z = (x - mean) rstd g + b,   a = act(z),   mean and rstd over a group of channels of an image

This is `norm_table` and `apply` in one launch. Every program computes the table of its channels
again, so there should be few programs, each with few channels and many pixels. x is one tensor, or
the concatenation of x1 and x2 over channels, which never exists in memory, and the pass may
upsample x1. `norm_small_batch` computes few images. Two launches are faster if a program would read
many sums compared with its pixels.
"""

import math
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ..activations import check_activation, rounded_grad
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import NormSpec, dtype_name
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_second
from .pass_grid import MOST_HELD
from .passes import apply, apply_upsampled, launch_apply
from .small_batch import SMALL_BATCH, norm_small_batch
from .tables import Statistics, covering_groups, norm_table

# Elements of a tensor up to which one more launch costs more than reading the sums in every program
SMALL_NORM = 2**20
_MANY_SUMS = 512  # of each kind, which a program of 32 channels loads
_MOST_SUMS = MOST_HELD // 2  # of each kind, which fit registers
_SMALL_IMAGE = 256  # pixels


@configures("from_partials")
class SumsConfig(NamedTuple):
    """The channels, tiles and warps of a program."""

    block_c: int
    tile: int  # elements
    tiles: int  # in a large image
    num_warps: int


# 32 channels and many pixels need the fewest sums per pixel
_LARGE, _SMALL = SumsConfig(32, 4096, 2, 8), SumsConfig(32, 2048, 2, 4)
_WIDE = SumsConfig(64, 4096, 4, 8)  # where the groups of 64 channels need no more lanes than of 32


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    """Why it cannot compute this: the sums do not fit registers."""
    sums = loaded_sums(32, spec, max(spec.tiles))
    return f"{sums} sums of either kind a program; {_MOST_SUMS}" if sums > _MOST_SUMS else None


def _untimed(spec: NormSpec, gpu: Device) -> str | None:
    """One launch instead of two makes every program load the sums of its channels, which costs more
    where there are many programs."""
    many = spec.elements > gpu.busy * _LARGE.tile * _LARGE.tiles
    most = _MANY_SUMS if many else 2 * _MANY_SUMS
    sums = loaded_sums(32, spec, max(spec.tiles))
    return f"{sums} sums of either kind a program; at most {most}" if sums > most else None


def sums_config(spec: NormSpec) -> SumsConfig:
    """As measured with 16 and 64 images of the decoder's shapes."""
    wide, narrow = (loaded_sums(block_c, spec, max(spec.tiles)) for block_c in (64, 32))
    if wide <= narrow >= _MANY_SUMS:
        return _WIDE
    return _SMALL if spec.pixels <= _SMALL_IMAGE else _LARGE


def loaded_sums(block_c: int, spec: NormSpec, *tiles: int) -> int:
    """Sums of each kind that a program of block_c channels loads, with padding, of so many tiles of
    an image, or of those of each tensor."""
    border = spec.c1 if spec.c2 else 0
    groups = covering_groups(block_c, border, spec.c // spec.groups)
    return math.prod(groups) * sum(map(triton.next_power_of_2, tiles))


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
        Kernel(
            "from_partials",
            SumsConfig,
            _refuse,
            lambda spec, _: [sums_config(spec)],
            untimed=_untimed,
        ),
        Kernel("two_launches"),
    ),
    similar=False,
)


def norm_of_sums(
    x1: Tensor,  # [N, H, W, C1]; with `up` [N, H / 2, W / 2, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    norm: Statistics,
    activation: str,
    *,
    up: bool = False,
    corners: bool = False,
    keep: bool = False,
    tf32: bool = False,
    config: tuple | None = None,  # of a kernel of `NORM_OF_SUMS`
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; [N, H, W, C1]
    """`apply` with the table of `norm_table`. With `up` x1 stands for upsample(x1), where every
    pixel becomes a 2x2 block; with `keep` that is the second result. With `corners` only the first
    pixel of each 2x2 block is written in the first C1 channels. With `tf32` a float32 result is
    rounded to TF32, for products that read it."""
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    h, w = (2 * h, 2 * w) if up else (h, w)
    c2 = check_second(x2, n, h, w)
    norm.check(n, c1, c2)
    options = {"corners": corners, "keep": keep}
    if config is None:
        written = 2 if corners else 1  # every second pixel has all channels

        def run(config: tuple) -> Tensor:
            given = {"up": up, **options, "tf32": tf32, "config": config}
            return norm_of_sums(x1, x2, norm, activation, **given)[0][:, ::written, ::written]

        shape = (n, dtype_name(x1.dtype), h, w, c1, c2, norm.num_groups, activation)
        tiles = tuple(part.shape[1] for part in norm.partials)
        spec = NormSpec(*shape, upsampled=up, tiles=tiles, **options)
        config = select(NORM_OF_SUMS, spec, describe(x1.device), run).config
    if config.kernel == "small_batch":
        return norm_small_batch(x1, x2, norm, activation, up, tf32)
    if config.kernel == "two_launches":
        table = norm_table(*norm)
        if not up:
            return apply(x1, x2, table, activation, early=True, tf32=tf32), None
        return apply_upsampled(x1, x2, table, activation, **options, early=True, tf32=tf32)
    act = rounded_grad(activation, x1.dtype)
    return launch_apply(x1, x2, act, config, norm=norm, up=up, **options, tf32=tf32)
