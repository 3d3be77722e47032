"""A convolution that computes its input, act(norm(x)), in the same launch.

    y = factor (conv(act(z)) + bias + emb + residual + 1x1 convolutions of other tensors)
    z = (x - mean) rstd g + b                                   of partials, as in `norm.tables`

It is for callers that need only y: act(z) is never in memory, which saves a pass that reads and
writes as much as the convolution, and the launch of its table. The kernel is
`conv.hopper.stationary_weights`, which fetches each pixel once. Some warpgroups compute act(z) of
rows of pixels in shared memory while others multiply; or those that multiply compute it between two
tiles, for the rows that are new. A configuration says which, and whether an earlier launch computes
the norm's table.

The inputs of the added 1x1 convolutions may have half the height and width: the kernel then
upsamples them.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..activations import check_activation
from ..norm.tables import Statistics, norm_table
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device, describe
from .fused import forward_operands
from .fused_spec import Terms, forward_spec
from .hopper.operands import Norm
from .hopper.stationary import stationary_weights

_LEAST_TILES, _MOST_TILES = 4, 64  # of an image: a warp loads their sums at once


@configures("stationary_weights")
class NormConv(NamedTuple):
    """The tile, and how act(norm(x)) is computed."""

    block_m: int  # pixels of a tile
    producers: int  # warpgroups that only compute act(norm(x)); 0: those that multiply do it
    table: bool  # an earlier launch computes the norm's table


def _refuse_sums(spec: ConvSpec) -> str | None:
    """Why a warpgroup cannot compute slopes and offsets from these partial sums, or None."""
    if spec.n == 0:
        return "there are no images"
    if spec.groups is None:  # the spec has no norm
        return None
    group = spec.k // spec.groups
    if 8 % group:
        return f"groups of {group} channels; they have to divide 8"
    if odd := [k for k in spec.tiles if not _LEAST_TILES <= k <= _MOST_TILES or k & (k - 1)]:
        return f"{odd[0]} tiles an image; a power of two from {_LEAST_TILES} to {_MOST_TILES}"
    return None


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.first is not None:
        return "it does a norm of one tensor"
    return stationary_weights.KERNEL.refuse(spec, gpu) or _refuse_sums(spec)


def _configs(spec: ConvSpec, gpu: Device) -> list[NormConv]:
    """The first is the one that was fastest with 16 images of 64x64, or with 64."""
    many = (2 if spec.residual and not spec.extra else 0), True
    forms = dict.fromkeys([many, (1, False)] if _is_many(spec, gpu) else [(1, False), many])
    found = [NormConv(stationary_weights.TILE.block_m, *form) for form in forms]
    if not spec.extra:  # with tiles of four rows, producers would have too few registers
        found += [
            NormConv(stationary_weights.TILE_OF_4.block_m, 0, table) for table in (False, True)
        ]
    return found


def _is_many(spec: ConvSpec, gpu: Device) -> bool:
    """Whether there are more tiles than keep the GPU busy."""
    return spec.n * spec.h * spec.w >= gpu.busy * stationary_weights.TILE.block_m


def _apart(spec: ConvSpec, gpu: Device) -> str | None:
    wide = spec.upsampled and spec.c != 64
    return "what is added is upsampled on the way to 64 channels alone" if wide else None


NORM_CONV = Op(
    "norm_conv",
    ("h", "w", "k", "c", "dtype", "residual", "extras"),
    (Kernel("stationary_weights", NormConv, _refuse, _configs, adds=FORWARD_TERMS),),
    apart=_apart,
)


def norm_conv(
    x: Tensor,  # [N, H, W, CI]
    norm: Statistics,  # of x
    activation: str,  # of `activations`
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    config: NormConv | None = None,
    **terms: Any,  # of `Terms`, where tensors of `extra` may have half of the rows and columns
) -> tuple[Tensor, Tensor]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """conv(act(norm(x))) + bias + the terms, times their factor, and its partial sums, as in
    `conv_forward`."""
    check_activation(activation)
    n, h, w, ci = x.shape
    norm.check(n, ci)
    for row in (norm.scale, norm.shift):
        assert row is None or (row.shape == (n, ci) and row.stride(1) == 1)
    added = Terms(**terms)
    if config is None:

        def run(c: NormConv) -> Tensor:
            return norm_conv(x, norm, activation, weight, bias, config=c, **terms)[0]

        of_norm = {"groups": norm.num_groups, "tiles": (norm.tiles[0],)}
        spec = forward_spec(x, weight, **added.asked, **of_norm)
        config = select(NORM_CONV, spec, describe(x.device), run).config
    given = forward_operands(x, weight, bias, h * w // config.block_m, added)
    table = norm_table(*norm) if config.table else None
    given = given._replace(norm=Norm(activation, norm, table, config.producers))
    stationary_weights.launch(stationary_weights.StationaryWeights(config.block_m), given)
    return given.y, given.partials
