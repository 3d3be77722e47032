"""Weight gradient of `conv2d` in TF32, or in float32 by three such products, on tensor cores.

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - pad, w + s - pad, ci]

over copies of dy and x with the pixels innermost (`conv.plain.transpose_weights`), which is what
wgmma wants in four bytes. A tile has to begin at a multiple of 16 bytes, which a step along a row
of pixels is not: the operand with fewer channels has a copy for each s, moved by it, and these
copies are like channels, [s, channel]. A step to another row is a distance in memory. Images have
rows of zeros below them, so that a step over an edge ends in zeros, of this image or of the one
before, and TMA gives zeros in front of the first.

In TF32 that is one product. For float32 both operands come in two parts, and three products
(`triton_kernels.tf32`) are added up per step before they get to the sum: tensor cores round every
addition towards zero, and over thousands of steps that would be seen.

A 1x1 filter needs none of this; most go by `conv.plain.pointwise_wgrad`, which has no copies. Nor
do `conv.hopper.mma_wgrad` and `conv.hopper.fp16_split_wgrad`, whose tiles are configurations here.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...reductions.column_sum import num_splits
from ...reductions.long_sums import fewest_parts
from ...registry.kernel import configures
from ...registry.spec import dtype_name
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import describe
from ..configs import WgradTile, choose_plan, plans_around
from ..hopper import fp16_split_wgrad as half_wgrad
from ..hopper import mma_wgrad
from . import gather
from . import pointwise_wgrad as points_wgrad
from .tma_boxes import addressable, is_pointwise
from .transpose_weights import turn_pixels


@configures("transposed_wgrad")
class WgradConfig(NamedTuple):
    """What one program of the weight gradient computes."""

    block_c: int  # channels of the operand that has one copy
    block_j: int  # channels of the other one's copies
    block_m: int  # pixels a step
    rows: int  # of the filter, which share a load of the copies: 1 or 3
    num_warps: int
    num_stages: int
    # 0: `conv.plain.gather` with its first tile, whose float32 products are FMAs;
    # 2: `conv.plain.pointwise_wgrad`, of 1x1 filters; 3: `conv.hopper.mma_wgrad`, whose tile this
    # is then; 4: the same, in float32 with the small products in bfloat16;
    # 5: `conv.hopper.fp16_split_wgrad`
    tensor_cores: int = 1


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
WGRAD_CONFIGS = [
    WgradConfig(64, 64, 32, 1, 4, 4),
    WgradConfig(64, 64, 32, 3, 4, 3),
    WgradConfig(128, 128, 32, 1, 4, 3),
    WgradConfig(128, 128, 32, 1, 8, 3),
    WgradConfig(64, 128, 32, 3, 4, 3),  # from here on only where they were measured to be faster
    WgradConfig(64, 128, 32, 1, 4, 3),
    WgradConfig(128, 64, 32, 1, 4, 3),
]
_FEW, _SOME = 64, 256  # pixels of a 1x1 layer
_WORTH = 2**27  # multiplications that pay for two copies; fewer are left to `conv.plain.gather`,
_MOST_MEMORY = 2**32  # and so are copies of more bytes


@triton.jit(do_not_specialize=["num_tiles", "tiles_per_split"])
def _turned_wgrad_kernel(
    a_desc,  # [C, M] in boxes [BLOCK_C, BLOCK_M]: dy, or x
    b_desc,  # [S * D, M] in boxes [BLOCK_J, BLOCK_M]: x in S copies, or dy
    a_small_desc,  # the second parts, or None: one product in TF32
    b_small_desc,
    dw_ptr,  # [splits, CO, R, S, CI]
    C,
    D,
    step,  # in a, for a step to the filter's next row
    num_tiles,  # of pixels
    tiles_per_split,
    R: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,  # rows of the filter of this program: 1 or 3
    PAD_H: tl.constexpr,
    A_IS_DY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    await_inputs()
    j_blocks = tl.cdiv(S * D, BLOCK_J)
    c0 = tl.program_id(0) // j_blocks * BLOCK_C
    j0 = tl.program_id(0) % j_blocks * BLOCK_J
    r = tl.program_id(1) * GROUP
    split = tl.program_id(2)

    acc0 = tl.zeros([BLOCK_C, BLOCK_J], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_C, BLOCK_J], dtype=tl.float32)  # these two cost nothing if GROUP == 1
    acc2 = tl.zeros([BLOCK_C, BLOCK_J], dtype=tl.float32)
    start = split * tiles_per_split
    for tile in range(start, tl.minimum(start + tiles_per_split, num_tiles)):
        m = tile * BLOCK_M
        b = tl.trans(b_desc.load([j0, m]))
        b_small = b if b_small_desc is None else tl.trans(b_small_desc.load([j0, m]))
        m += (r - PAD_H) * step
        acc0 = _add_product(acc0, a_desc, a_small_desc, c0, m, b, b_small)
        if GROUP == 3:
            acc1 = _add_product(acc1, a_desc, a_small_desc, c0, m + step, b, b_small)
            acc2 = _add_product(acc2, a_desc, a_small_desc, c0, m + 2 * step, b, b_small)

    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_j = j0 + tl.arange(0, BLOCK_J)
    mask = (offs_c < C)[:, None] & (offs_j < S * D)[None, :]
    dw_ptr += split.to(tl.int64) * (C * R * S * D)
    if A_IS_DY:  # a row of the result is [R, S, CI]
        offs = offs_c[:, None] * (R * S * D) + offs_j[None, :]
        row = S * D
    else:
        offs = offs_c[:, None] + ((offs_j % D * R * S + offs_j // D) * C)[None, :]
        row = S * C
    dw_ptrs = dw_ptr + offs + r * row
    tl.store(dw_ptrs, acc0.to(dw_ptr.dtype.element_ty), mask=mask)
    if GROUP == 3:
        tl.store(dw_ptrs + row, acc1.to(dw_ptr.dtype.element_ty), mask=mask)
        tl.store(dw_ptrs + 2 * row, acc2.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_product(acc, a_desc, a_small_desc, c0, m, b, b_small):
    """acc + a b, in one product or in three."""
    a = a_desc.load([c0, m])
    if a_small_desc is None:
        return tl.dot(a, b, acc, input_precision="tf32")
    else:
        part = tl.dot(a_small_desc.load([c0, m]), b, input_precision="tf32")
        part = tl.dot(a, b_small, part, input_precision="tf32")
        return acc + tl.dot(a, b, part, input_precision="tf32")


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
        if c.tensor_cores >= 3:
            return mma_wgrad.mma_splits(x, dy, weight, padding, precision, _mma_tile(c))
        slots = describe(x.device).num_sms * 8 // c.num_warps
        tiles = triton.cdiv(x.shape[0] * math.prod(_image(x, dy, weight, padding)), c.block_m)
        return num_splits(math.prod(_blocks(weight, c)), tiles, slots, fewest)

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
        config = _pick(x, weight, precision)
        return config, splits(config)

    def candidates() -> list[tuple[WgradConfig, int]]:
        tiles = [c for c in WGRAD_CONFIGS if _fits(c, x, weight, precision)]
        tiles += POINTS_CONFIGS if pointwise else []
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
    if config.tensor_cores >= 3:
        tile = _mma_tile(config)
        mma_wgrad.launch_mma(
            x, dy, weight, partial, padding, products(config, precision), tile, splits
        )
        return
    co, ci, r, s = weight.shape
    rows, columns = _image(x, dy, weight, padding)
    parts = _parts(precision)
    if co < ci:
        a = turn_pixels(x, rows, columns, parts)
        b = turn_pixels(dy, rows, columns, parts, range(padding[1], padding[1] - s, -1))
    else:
        a = turn_pixels(dy, rows, columns, parts)
        b = turn_pixels(x, rows, columns, parts, range(-padding[1], s - padding[1]))
    boxes = zip(
        _in_boxes(a, config.block_c, config.block_m),
        _in_boxes(b, config.block_j, config.block_m),
        strict=True,
    )
    num_tiles = triton.cdiv(a.shape[-1], config.block_m)
    _turned_wgrad_kernel[(*_blocks(weight, config), splits)](
        *next(boxes),
        *next(boxes, (None, None)),
        partial,
        max(co, ci),
        min(co, ci),
        columns if co < ci else -columns,
        num_tiles,
        triton.cdiv(num_tiles, splits),
        R=r,
        S=s,
        GROUP=config.rows,
        PAD_H=padding[0],
        A_IS_DY=co >= ci,
        BLOCK_C=config.block_c,
        BLOCK_J=config.block_j,
        BLOCK_M=config.block_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(x.device),
    )


def serves_wgrad(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: tuple[int, int], precision: str
) -> bool:
    """Whether `launch_wgrad` can do this weight gradient."""
    co, ci, _, s = weight.shape
    wide = min(co, ci) >= 32  # few channels would leave most of a tile to nothing
    if not (stride == 1 and x.itemsize == 4 and wide and addressable(x, dy)):
        return False
    pixels = x.shape[0] * math.prod(_image(x, dy, weight, padding))
    copies = _parts(precision) * (max(co, ci) + s * min(co, ci)) * pixels * 4
    return pixels < 2**31 and copies <= _MOST_MEMORY


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


def _parts(precision: str) -> int:
    """Of each operand."""
    return 2 if precision == "ieee" else 1


def _image(x: Tensor, dy: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of an image in the copies, of rows as many beyond those of x and dy as the
    filter steps over the edge."""
    h, p, r = x.shape[1], dy.shape[1], weight.shape[2]
    rows = max(h + padding[0], p + r - 1 - padding[0], p)
    # those of the operand without copies; a copy has what stands beside them
    columns = (x if dy.shape[3] < x.shape[3] else dy).shape[2]
    return rows, triton.cdiv(columns, 4) * 4


def _in_boxes(parts: Tensor, block_c: int, block_m: int) -> list[TensorDescriptor]:
    """Each part as [copies * C, M]."""
    *_, m = parts.shape
    shape = [parts[0].numel() // m, m]
    return [TensorDescriptor(part, shape, [m, 1], [block_c, block_m]) for part in parts]


def _blocks(weight: Tensor, config: WgradConfig) -> tuple[int, int]:
    """Programs by blocks of channels, and by rows of the filter."""
    co, ci, r, s = weight.shape
    assert r % config.rows == 0, "a program takes all rows of a filter, or one"
    blocks = triton.cdiv(max(co, ci), config.block_c) * triton.cdiv(s * min(co, ci), config.block_j)
    return blocks, r // config.rows


def _pick(x: Tensor, weight: Tensor, precision: str) -> WgradConfig:
    """Large tiles where channels fill them, else three rows of the filter a program. Sums of two
    parts need the registers of eight warps in a large tile."""
    safe, rows, large, large_in_parts = WGRAD_CONFIGS[:4]
    if min(weight.shape[:2]) >= 128:
        return large if precision == "tf32" else large_in_parts
    return rows if _fits(rows, x, weight, precision) else safe


def _fits(c: WgradConfig, x: Tensor, weight: Tensor, precision: str) -> bool:
    """Whether rows of the filter are shared evenly, and the pipeline fits into shared memory."""
    parts = _parts(precision)
    fetched = c.num_stages * c.block_m * (c.rows * c.block_c + c.block_j) * 4 * parts
    fits = fetched + 1024 <= describe(x.device).shared_memory
    # the sums, and products on their way to them, have to find registers
    sums = (c.rows + parts - 1) * c.block_c * c.block_j // (32 * c.num_warps)
    return fits and sums <= 192 and weight.shape[2] % c.rows == 0
