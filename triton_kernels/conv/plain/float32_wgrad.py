"""Which kernel makes a weight gradient of `conv2d` in float32 or in TF32, stride 1.

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - pad, w + s - pad, ci]

On Hopper `conv.hopper.fp16_split_wgrad` for 3x3 filters, in products of float16 numbers, and
`conv.hopper.mma_wgrad` for any; `conv.plain.pointwise_wgrad` for 1x1 filters over few pixels, and
on other GPUs that have TMA; else `conv.plain.gather`, which also has what is too small to be worth
more. A configuration here is a tile of one of them.
"""

from typing import NamedTuple

from torch import Tensor

from ...reductions.long_sums import fewest_parts
from ...registry.kernel import configures
from ...registry.spec import dtype_name
from ..configs import WgradTile, choose_plan, plans_around
from ..hopper import fp16_split_wgrad as half_wgrad
from ..hopper import mma_wgrad
from . import gather
from . import pointwise_wgrad as points_wgrad
from .tma_boxes import addressable, is_pointwise


@configures("float32_wgrad")
class WgradConfig(NamedTuple):
    """What one program of the weight gradient computes."""

    block_c: int  # output channels
    block_j: int  # input channels, and taps
    block_m: int  # pixels a step
    rows: int  # of mma_wgrad: programs that share a multiprocessor
    num_warps: int
    num_stages: int
    # 0: `conv.plain.gather` with its first tile, whose float32 products are FMAs;
    # 2: `conv.plain.pointwise_wgrad`, of 1x1 filters; 3: `conv.hopper.mma_wgrad`, whose tile this
    # is then; 4: the same, in float32 with the small products in bfloat16;
    # 5: `conv.hopper.fp16_split_wgrad`
    tensor_cores: int


POINTS_CONFIGS = [
    WgradConfig(t.block_co, t.block_ci, t.block_m, 1, t.num_warps, t.num_stages, 2)
    for t in points_wgrad.TILES
]
MMA_CONFIGS = [
    *(WgradConfig(*t, 3) for t in mma_wgrad.TILES),
    *(WgradConfig(*t, 4) for t in mma_wgrad.TILES[:4]),
]
HALF_CONFIG = WgradConfig(64, 64, 128, 3, 13, 2, 5)
_GATHER = WgradConfig(64, 64, 32, 1, 4, 3, 0)
WEIGHT_GRAD = (WgradConfig,)
_FEW, _SOME = 64, 256  # pixels of a 1x1 layer
_WORTH = 2**27  # multiplications; fewer are left to `conv.plain.gather`


def plan_wgrad(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    stride: int,
    padding: tuple[int, int],
    precision: str,
    config: WgradConfig | None,
) -> tuple[WgradConfig, int]:
    """The configuration, and the number of parts that the sum over pixels is split into."""
    assert stride == 1
    co, ci, r, s = weight.shape
    pointwise = is_pointwise(weight, padding)
    fewest = fewest_parts(dy.numel() // co, x.dtype, precision)

    def splits(c: WgradConfig) -> int:
        if not c.tensor_cores:
            tile = gather.WGRAD_CONFIGS[0]
            return gather.plan_wgrad(x, dy, weight, 1, padding, precision, tile)[1]
        if c.tensor_cores == 2:
            return points_wgrad.points_splits(x, weight, precision, _tile(c))
        if c == HALF_CONFIG:
            return half_wgrad.half_splits(x, weight, precision)
        return mma_wgrad.mma_splits(x, dy, weight, padding, precision, _mma_tile(c))

    if config is not None:
        return config, splits(config)

    def default() -> tuple[WgradConfig, int]:
        pixels = x.numel() // ci
        if pointwise and pixels > _SOME and mma_wgrad.serves(x):
            return MMA_CONFIGS[0], splits(MMA_CONFIGS[0])
        if pointwise and (precision == "tf32" or pixels <= _SOME):
            config = _pick_points(pixels, precision)
            return config, splits(config)
        if dy.numel() // co * weight.numel() < _WORTH:
            return _GATHER, splits(_GATHER)
        if half_wgrad.applies(x, dy, weight, padding):
            return HALF_CONFIG, splits(HALF_CONFIG)
        config = MMA_CONFIGS[0] if mma_wgrad.serves(x) else _GATHER
        return config, splits(config)

    def candidates() -> list[tuple[WgradConfig, int]]:
        tiles = [*POINTS_CONFIGS] if pointwise else []
        if mma_wgrad.serves(x):
            kinds = (3,) if precision == "tf32" else (3, 4)
            mma = (c for c in MMA_CONFIGS if c.tensor_cores in kinds)
            tiles += [c for c in mma if mma_wgrad.fits(_mma_tile(c), x, precision)]
        if half_wgrad.applies(x, dy, weight, padding):
            tiles.append(HALF_CONFIG)
        return plans_around([*tiles, _GATHER], splits, fewest)

    def launch(parts: Tensor, config: WgradConfig, splits: int) -> None:
        launch_wgrad(x, dy, weight, parts, 1, padding, precision, config, splits)

    n, h, w, k = x.shape
    dtype = dtype_name(x.dtype, precision != "ieee")
    shape = {"h": h, "w": w, "k": k, "c": co, "r": r, "s": s, "dtype": dtype}
    op = "conv_weight_grad_turned"
    return choose_plan(op, n, shape, candidates, default, weight, launch)


def launch_wgrad(
    x: Tensor,  # float32 [N, H, W, CI]
    dy: Tensor,  # float32 [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S], of which only the shape matters
    partial: Tensor,  # [splits, CO * R * S * CI], or one part alone, to be written
    stride: int,
    padding: tuple[int, int],
    precision: str,
    config: WgradConfig,
    splits: int,
) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    assert stride == 1
    if not config.tensor_cores:
        tile = gather.WGRAD_CONFIGS[0]
        gather.launch_wgrad(x, dy, weight, partial, 1, padding, precision, tile, splits)
        return
    if config.tensor_cores == 2:
        tile = _tile(config)
        points_wgrad.launch_points(x, dy, weight, partial, precision, tile, splits)
        return
    if config == HALF_CONFIG:
        half_wgrad.launch_half(x, dy, weight, partial, 1 if precision == "tf32" else 3, splits)
        return
    tile = _mma_tile(config)
    mma_wgrad.launch_mma(x, dy, weight, partial, padding, products(config, precision), tile, splits)


def serves_wgrad(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: tuple[int, int], precision: str
) -> bool:
    """Whether `launch_wgrad` can do this weight gradient."""
    wide = min(weight.shape[:2]) >= 32  # few channels would leave most of a tile to nothing
    return stride == 1 and x.itemsize == 4 and wide and addressable(x, dy)


def _pick_points(pixels: int, precision: str) -> WgradConfig:
    few, some, many = POINTS_CONFIGS
    if pixels <= _FEW or precision == "ieee":
        return few
    return some if pixels <= _SOME else many


def _tile(c: WgradConfig) -> WgradTile:
    return WgradTile(c.block_c, c.block_j, c.block_m, c.num_warps, c.num_stages)


def products(c: WgradConfig, precision: str) -> int:
    """What `mma_wgrad` calls so."""
    return 1 if precision == "tf32" else 3 if c.tensor_cores == 3 else 2


def _mma_tile(c: WgradConfig) -> mma_wgrad.Tile:
    return mma_wgrad.Tile(*c[:-1])
