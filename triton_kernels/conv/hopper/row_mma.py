"""The path of `conv.fused` for Hopper: 3x3 convolutions in 16 bits, written in Gluon.

What plain Triton cannot say, and what it gains:

- Pixels are fetched once, not once a tap. In shared memory 8 zeros lie between the rows, so that
  each tap is the same rows from another address: a pixel to the right is 128 bytes further, which
  the swizzle allows because it goes by the address. The products are of one row of pixels each,
  with the filters from registers, since two operands from shared memory would be its limit.
- Epilogues overlap the other warpgroups' products. Programs stay on their multiprocessor; one warp
  loads, and warpgroups multiply, a tile each.
- 64 channels are multiplied, whose filters stay in shared memory. Rows of pixels pass through a
  ring, and three warpgroups take tiles of two rows (STATIONARY_TILE), or two of four rows
  (STATIONARY_TILE_OF_4). Where there are 16 channels, as of a padded image, the filters even stay
  in registers (NARROW_TILE). Of more channels tiles are those of `tile_mma`.
- In the weight gradient three warpgroups take a row of the filter each: they share dy and x, and
  the nine taps need x once.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, missing
from ...registry.cost import Work
from ...registry.kernel import Kernel, configures
from ...registry.spec import FORWARD_TERMS, ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ..configs import WgradOperands, fewest_of, split_kernel
from .operands import Operands, filters_in_boxes, norm_of
from .refusals import refuse_3x3, refuse_filters, refuse_rows

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .row_wgrad import conv_row_wgrad_kernel
    from .stationary_weights import conv_stationary_weights_kernel
    from .stationary_weights_concat import conv_stationary_weights_concat_kernel

_PIXELS = 256  # of a tile
STAGES = 2  # of pixels, and of three filters
_STAGES_OF_16 = 4  # of pixels of 64 channels and of 16

_MOST_EXTRA = 192  # channels of 1x1 convolutions whose filters have room there too


@configures("stationary_weights")
class StationaryWeights(NamedTuple):
    """Tiles of two or four rows of 64 pixels; the filters of 64 channels stay in shared memory."""

    block_m: int  # pixels of a tile
    rows = 1  # tiles one below the other


@configures("narrow_input")
class NarrowInput(NamedTuple):
    """The same of 16 channels, whose filters stay in registers."""

    block_m: int
    rows = 1


@configures("row_wgrad")
class RowWgrad(NamedTuple):
    """A block of 64x64 channels and all nine taps a program, or of 64x16."""

    block_ci: int
    block_m = _PIXELS  # a step


STATIONARY_TILE, STATIONARY_TILE_OF_4 = StationaryWeights(128), StationaryWeights(256)
NARROW_TILE = NarrowInput(128)
WGRAD_TILE, NARROW_WGRAD_TILE = RowWgrad(64), RowWgrad(16)

_WIDTHS = (64,)  # pixels of a row
_NARROW_WIDTHS = (64, 32)  # of NARROW_TILE, of two rows or of four
WGRAD_WIDTHS = (64, 32, 16, 8)  # of whole rows
_PIECES = (64, 32, 16)  # pixels of other rows that are multiplied together
_NARROW_WGRAD_WIDTHS = (64, 32, 16)
PART = 6  # tiles that take as long as a part of a sum does to begin, to write and to add up


# --- forward and input gradient -------------------------------------------------------------------


def _refuse_stationary(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := refuse_3x3(spec, gpu, _WIDTHS) or refuse_rows(spec, _PIXELS):
        return reason
    if spec.k != 64:
        return f"filters of {spec.k} channels do not fit into shared memory; those of 64 do"
    if sum(spec.extra) > _MOST_EXTRA:
        return f"nor do those of 1x1 convolutions of more than {_MOST_EXTRA} channels"
    return None


def _refuse_narrow(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := missing(gpu, spec.itemsize):
        return reason
    if spec.k != 16 or min(spec.filters or (spec.k,)) > 16:
        return f"it multiplies 16 channels, not {spec.k}"
    return refuse_3x3(spec, gpu, _NARROW_WIDTHS, narrow=True) or refuse_rows(spec, _PIXELS)


def _stationary(spec: ConvSpec, gpu: Device) -> list[StationaryWeights]:
    return [STATIONARY_TILE] if spec.extra else [STATIONARY_TILE, STATIONARY_TILE_OF_4]


def launch(config: StationaryWeights | NarrowInput, operands: Operands) -> None:
    """The convolution, or its input gradient, with filters that stay where they are."""
    n, h, w, k = operands.x.shape
    c = operands.y.shape[3]
    rows = config.block_m // w
    blocks = c // 64
    programs = max(1, min(describe(operands.x.device).num_sms // blocks, n * h // rows)) * blocks
    groups, pairs, slots = _stationary_rings(operands, rows)
    overlap = overlapping(operands.x.device, 0)
    norm_arguments, norm_options = norm_of(operands)
    norm = operands.norm
    makers = norm.makers if norm else 0
    made = [operands.x if makers else None, norm and norm.table]
    conv_stationary_weights_kernel[(programs,)](
        *operands.tensors(partial(_in_rows_of, w), partial(in_rows, rows=2)),
        *(operands.means or (None, None)), *norm_arguments, *made, *operands.numbers, n * h // rows,
        h // rows, c,
        ROWS=rows, W=w, DGRAD=operands.activation is not None, ACT=operands.activation_name,
        GROUPS=groups, PAIRS=pairs, SLOTS=slots, MAKERS=makers,
        EXTRA1=operands.extra_channels[0] // 64, EXTRA2=operands.extra_channels[1] // 64,
        OVERLAP=bool(overlap), **norm_options, num_warps=4,
        maxnreg=96 if makers == 2 else 128 if groups == 3 or makers else 168, **overlap,
    )  # fmt: skip


STATIONARY = Kernel(
    "stationary_weights",
    StationaryWeights,
    _refuse_stationary,
    _stationary,
    launch=launch,
    adds=(*FORWARD_TERMS, "activation"),
)
KERNELS = (
    STATIONARY,
    Kernel(
        "narrow_input",
        NarrowInput,
        _refuse_narrow,
        lambda spec, gpu: [NARROW_TILE],
        launch=launch,
        adds=("emb", "residual", "stats", "activation"),
    ),
)


def refuse_two(spec: ConvSpec, gpu: Device) -> str | None:
    """Why `launch_two` cannot do it."""
    if reason := missing(gpu, spec.itemsize):
        return reason
    if (spec.first, spec.k, spec.c, spec.r, spec.s) != (64, 128, 64, 3, 3):
        return "it does 3x3 filters of 64 and 64 channels to 64"
    if spec.w not in _WIDTHS or spec.h % 2:
        return f"it does images of 64 columns and even rows, not {spec.h}x{spec.w}"
    return None


def launch_two(
    x1: Tensor,  # [N, H, 64, 64]
    x2: Tensor,  # [N, H, 64, 64]
    norm: Sequence[Tensor | float | None],  # sums of x1 and of x2, weight, bias, eps, or a table
    groups: int,  # of channels
    slope: str,  # the activation as `activate_affine` is told
    weight: Tensor,  # [64, 128, 3, 3] in channels_last memory
    bias: Tensor,  # float32 [64]
    emb: Tensor | None,  # float32 [N, 64]
    y: Tensor,  # [N, H, 64, 64] to be written
    partials: Tensor,  # float32 [N, H / 2, 2, 64] to be written
) -> None:
    """conv(act(norm([x1, x2]))) + bias + emb."""
    n, h, w, _ = x1.shape
    tiles = n * h // 2
    overlap = overlapping(x1.device, 0)
    conv_stationary_weights_concat_kernel[(min(describe(x1.device).num_sms, tiles),)](
        x1, x2, filters_in_boxes(weight), in_rows(y), *norm, bias, emb, partials,
        0 if emb is None else emb.stride(0), tiles, h // 2,
        W=w, ACT=slope, PAIRS=3, TILES_OF_X1=None if norm[0] is None else norm[0].shape[1],
        TILES_OF_X2=None if norm[1] is None else norm[1].shape[1],
        CG=None if norm[0] is None else 128 // groups, OVERLAP=bool(overlap), num_warps=4,
        maxnreg=96, **overlap,
    )  # fmt: skip


def _stationary_rings(operands: Operands, rows: int) -> tuple[int, int, int]:
    """Warpgroups that multiply; pairs of rows of pixels, and pairs of rows of the result, that
    there is shared memory for."""
    if operands.x.shape[3] == 16:
        return 3, 12, 3 * rows // 2
    if operands.norm and operands.norm.makers and not operands.extra:
        return (2, 5, 3) if operands.beside else (2, 6, 2)
    if operands.extra:
        fourth = operands.norm is not None and sum(operands.extra_channels) < _MOST_EXTRA
        return 2, 4 if fourth else 3, 2
    if rows == 4:
        return (2, 5, 3) if operands.beside else (2, 6, 2)
    return 3, 5, 3


# --- weight gradient ------------------------------------------------------------------------------


def refuse_wgrad(spec: ConvSpec, gpu: Device) -> str | None:
    """Why `weight_grad` cannot do one convolution, or None."""
    co, ci = spec.of_filters
    narrow = _is_narrow(spec)
    if not narrow and (co, ci) != (spec.c, spec.k):
        return f"x and dy have {spec.k} and {spec.c} channels, the filters {ci} and {co}"
    if reason := refuse_wgrad_rows(spec, gpu, narrow, whole=narrow):
        return reason
    splits = wgrad_splits(spec, gpu)
    if splits < 1 + narrow:
        return "there are too few tiles to share"
    if spec.rounded and splits == 1:
        return "a sum in one part is stored as it is, not rounded"
    return None


def refuse_wgrad_rows(
    spec: ConvSpec, gpu: Device, narrow: bool = False, whole: bool = True
) -> str | None:
    """Why there are no tiles of rows for a weight gradient, or None. Unless blocks have to be
    `whole`, images are of any size, and blocks of channels too, with zeros beyond their edges."""
    if reason := missing(gpu, spec.itemsize) or refuse_filters(spec):
        return reason
    if spec.size != (spec.h, spec.w):
        return f"{spec.size} pixels of the result, and {spec.h} x {spec.w} of x"
    channels = [spec.c, spec.k]
    if narrow:
        channels.remove(16)
    least = 64 if whole else 8
    if odd := [c for c in channels if c % least]:
        return f"{odd[0]} channels are no multiple of {least}"
    if not whole:
        few = min(channels)
        return f"{few} channels are less than a block of 64" if few < 64 else None
    widths = _NARROW_WGRAD_WIDTHS if narrow else WGRAD_WIDTHS
    if spec.w not in widths:
        return f"rows of {spec.w} pixels; it takes {', '.join(map(str, widths))}"
    rows = _PIXELS // (piece_of_row(spec.w) * images_of_row(spec.w))
    return f"{spec.h} rows are no multiple of {rows}" if spec.h % rows else None


def _is_narrow(spec: ConvSpec) -> bool:
    """Whether one of x and dy has 16 channels, of which the filters may have fewer, and the other
    those of the filters."""
    co, ci = spec.of_filters
    of_x, of_dy = (ci, spec.k), (co, spec.c)
    few, many = (of_x, of_dy) if spec.k == 16 else (of_dy, of_x)
    return few[0] <= 16 == few[1] and many[0] == many[1]


def wgrad_splits(spec: ConvSpec, gpu: Device, *others: ConvSpec) -> int:
    """Into how many parts to cut the sum over pixels: the fewest rounds of programs, which have a
    multiprocessor each, times their length. One part if there are blocks of channels for most
    multiprocessors; 0 if there are too few tiles to share."""
    if _is_narrow(spec):  # those that would fill as many
        co, ci = spec.of_filters
        blocks = -(-co * ci // 64**2)
    else:
        blocks = sum(wgrad_blocks(*conv.of_filters) for conv in (spec, *others))
    tiles = math.prod(wgrad_tiles(spec.n, spec.h, spec.w))

    def time(splits: int) -> int:
        rounds = triton.cdiv(blocks * splits, gpu.num_sms)
        return rounds * (triton.cdiv(tiles, splits) + (PART if splits > 1 else 0))

    fewest = max(1 if 2 * blocks > gpu.num_sms else 2, fewest_wgrad_splits(spec))
    most = min(tiles, max(4 * gpu.num_sms // blocks, fewest + gpu.num_sms // blocks))
    return min(range(most, fewest - 1, -1), key=time, default=0)


def wgrad_blocks(co: int, ci: int) -> int:
    """Blocks of 64x64 channels."""
    return -(-co // 64) * -(-ci // 64)


def fewest_wgrad_splits(spec: ConvSpec) -> int:
    """What `long_sums` says of the sum over pixels."""
    return fewest_of(spec, math.prod(wgrad_tiles(spec.n, spec.h, spec.w)) * _PIXELS)


def _wgrad_tile(spec: ConvSpec, gpu: Device) -> list[RowWgrad]:
    return [NARROW_WGRAD_TILE if _is_narrow(spec) else WGRAD_TILE]


def _launch_wgrad(tile: RowWgrad, splits: int, operands: WgradOperands) -> None:
    assert operands.parts.dtype == torch.float32
    weight_grad(operands.x, operands.dy, operands.parts.view(splits, -1))


def _wgrad_work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    co, ci = spec.of_filters
    width = piece_of_row(spec.w) * images_of_row(spec.w)
    beside = 16 if pieces_of_row(spec.w) > 1 else 0
    blocks = wgrad_blocks(co, ci) if c.block_ci == 64 else -(-co * ci // (64 * c.block_ci))
    steps = math.prod(wgrad_tiles(spec.n, spec.h, spec.w)) / c.splits
    return Work(
        tiles=blocks * c.splits,
        resident=1,
        products=64 * c.block_ci * 9 * _PIXELS * steps,
        fetched=((_PIXELS // width + 2) * (width + beside) * 2 * c.block_ci + _PIXELS * 128)
        * steps,
        steps=steps,
        written=0,
        memory=spec.n * spec.h * spec.w * (spec.k + spec.c) * 2,
        parts=c.splits * co * ci * 9 * 4,
        splits=c.splits,
    )


WEIGHT_GRAD = split_kernel(
    RowWgrad,
    refuse_wgrad,
    _wgrad_tile,
    lambda spec, gpu, tile: wgrad_splits(spec, gpu),
    _launch_wgrad,
    around=False,
    pads=True,
    work=_wgrad_work,
    fitted_by=("block_ci",),
)


def weight_grad(
    x: Tensor,  # [N, H, W, CI], or 16 channels of which CI count
    dy: Tensor,  # [N, H, W, CO], or 16
    parts: Tensor,  # float32 [splits, CO * 9 * CI], or its like, to be written; one may be the sum
) -> None:
    """The gradient of the filters, in parts that have to be added up."""
    swap = dy.shape[3] == 16  # then the kernel takes it for x
    few, many = (dy, x) if swap else (x, dy)
    n, h, w, ci = few.shape
    co = many.shape[3]
    if ci == 16:
        ci = parts.shape[1] // (9 * co)
    narrow = few.shape[3] == 16
    images, width = images_of_row(w), piece_of_row(w)
    groups, tiles_h = wgrad_tiles(n, h, w)
    rows = _PIXELS // (width * images)
    columns = pieces_of_row(w)
    ragged = not narrow and (ci % 64 > 0 or co % 64 > 0)
    assert (columns == 1 and not ragged) or not narrow
    blocks = co // 64 if narrow else wgrad_blocks(co, ci)
    conv_row_wgrad_kernel[(blocks * parts.shape[0],)](
        in_rows(few, 1, images, width, 16 if narrow else 64),
        in_rows(many, rows, images, width, 64), None if columns == 1 else in_rows(few, 1, 1, 8, 64),
        parts, parts.stride(0), ci, co, groups * tiles_h, tiles_h,
        W=width * images, IMAGES=images, COLUMNS=columns,
        STAGES=_STAGES_OF_16 if narrow else STAGES, SWAP=swap, RAGGED=ragged, num_warps=4,
        maxnreg=128,
    )  # fmt: skip


def images_of_row(w: int) -> int:
    """Of how many images a row is, so that it has 16 pixels and more."""
    return 1 if w >= 16 else 64 // piece_of_row(w)


def piece_of_row(w: int) -> int:
    """Pixels of a row that a weight gradient multiplies together: the whole row, or a piece of it,
    with the fewest pixels beyond its end."""
    if w < 16:
        return 8 if w <= 8 else 16
    return min(_PIECES, key=lambda piece: -(-w // piece) * piece)


def pieces_of_row(w: int) -> int:
    """How many there are."""
    return -(-w // piece_of_row(w))


def wgrad_tiles(n: int, h: int, w: int) -> tuple[int, int]:
    """Groups of images, and tiles of one."""
    images = images_of_row(w)
    rows = _PIXELS // (piece_of_row(w) * images)
    return -(-n // images), -(-h // rows) * pieces_of_row(w)


# --- tensors as the TMA unit is told of them ----------------------------------------------------


def _in_rows_of(width: int, x: Tensor) -> "TensorDescriptor":
    """x, or upsample(x) if that has this width: TMA reads a pixel twice, 0 further on."""
    n, h, w, c = x.shape
    if w == width:
        return in_rows(x)
    strides = [h * w * c, w * c, c, 0, 1]
    return in_boxes(x, [n, h, w, 2, c], strides, [1, 1, w, 2, min(c, 64)])


def in_rows(
    x: Tensor,
    rows: int = 1,
    images: int = 1,
    width: int | None = None,
    channels: int | None = None,
) -> "TensorDescriptor":
    """[N, H, W, C], or [H, W, N, C] of several images, in boxes of whole rows, or of so many of
    their pixels; and of so many channels, or of 64 at most."""
    n, h, w, c = x.shape
    block = channels or min(c, 64)
    if images > 1:
        box = [rows, width or w, images, block]
        return in_boxes(x, [h, w, n, c], [w * c, c, h * w * c, 1], box)
    return in_boxes(x, [n, h, w, c], [h * w * c, w * c, c, 1], [1, rows, width or w, block])
