"""3x3 convolutions in 16 bits for Hopper, forward and input gradient, whose filters stay on the
multiprocessor. Written in Gluon.

What plain Triton cannot say, and what it gains:

- Pixels are fetched once, not once a tap. In shared memory 8 zeros lie between the rows, so that
  each tap is the same rows from another address: a pixel to the right is 128 bytes further, which
  the swizzle allows because it goes by the address. The products are of one row of pixels each,
  with the filters from registers, since two operands from shared memory would be its limit.
- Epilogues overlap the other warpgroups' products. Programs stay on their multiprocessor; one warp
  loads, and warpgroups multiply, a tile each.
- 64 channels are multiplied, whose filters stay in shared memory. Rows of pixels pass through a
  ring, and three warpgroups take tiles of two rows (TILE), or two of four rows
  (TILE_OF_4). Other numbers of channels have the tiles of `tile_mma`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ....hopper.descriptors import SUPPORTED, TensorDescriptor, in_boxes
from ....registry.kernel import Kernel, configures
from ....registry.spec import FORWARD_TERMS, ConvSpec
from ....runtime.dependent_launch import overlapping
from ....runtime.device import Device, describe
from ...refusals import BITS_16, Only, odd_rows
from ..operands import Operands, in_rows, norm_of

if SUPPORTED:
    from .stationary_weights_kernel import conv_stationary_weights_kernel

_ONLY = Only(hopper=True, dtypes=BITS_16, filters=(3, 3), multiple=64, widths=(64,))
_PIXELS = 256  # of a tile
_MOST_EXTRA = 192  # channels of 1x1 convolutions whose filters have room there too


@configures("stationary_weights")
class StationaryWeights(NamedTuple):
    """Tiles of two or four rows of 64 pixels; the filters of 64 channels stay in shared memory."""

    block_m: int  # pixels of a tile
    rows = 1  # tiles one below the other


TILE, TILE_OF_4 = StationaryWeights(128), StationaryWeights(256)


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := _ONLY(spec, gpu) or odd_rows(spec, _PIXELS // spec.w):
        return reason
    if spec.k != 64:
        return f"filters of {spec.k} channels do not fit into shared memory; those of 64 do"
    if sum(spec.extra) > _MOST_EXTRA:
        return f"nor do those of 1x1 convolutions of more than {_MOST_EXTRA} channels"
    return None


def _configs(spec: ConvSpec, gpu: Device) -> list[StationaryWeights]:
    return [TILE] if spec.extra else [TILE, TILE_OF_4]


def launch(config: StationaryWeights, operands: Operands) -> None:
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
    producers = norm.producers if norm else 0
    made = [operands.x if producers else None, norm and norm.table]
    conv_stationary_weights_kernel[(programs,)](
        *operands.tensors(partial(_in_rows_of, w), partial(in_rows, rows=2)),
        *norm_arguments, *made, *operands.numbers, operands.factor,
        n * h // rows, h // rows, c,
        ROWS=rows, W=w, DGRAD=operands.activation is not None, ACT=operands.activation_name,
        GROUPS=groups, PAIRS=pairs, SLOTS=slots, PRODUCERS=producers,
        EXTRA1=operands.extra_channels[0] // 64, EXTRA2=operands.extra_channels[1] // 64,
        OVERLAP=bool(overlap), **norm_options, num_warps=4,
        maxnreg=96 if producers == 2 else 128 if groups == 3 or producers else 168, **overlap,
    )  # fmt: skip


KERNEL = Kernel(
    "stationary_weights",
    StationaryWeights,
    _refuse,
    _configs,
    launch=launch,
    adds=(*FORWARD_TERMS, "activation"),
)


def _stationary_rings(operands: Operands, rows: int) -> tuple[int, int, int]:
    """Warpgroups that multiply; pairs of rows of pixels, and pairs of rows of the result, that
    there is shared memory for."""
    if operands.norm and operands.norm.producers and not operands.extra:
        return (2, 5, 3) if operands.beside else (2, 6, 2)
    if operands.extra:
        fourth = operands.norm is not None and sum(operands.extra_channels) < _MOST_EXTRA
        return 2, 4 if fourth else 3, 2
    if rows == 4:
        return (2, 5, 3) if operands.beside else (2, 6, 2)
    return 3, 5, 3


def _in_rows_of(width: int, x: Tensor) -> TensorDescriptor:
    """x, or upsample(x) if that has this width: TMA reads a pixel twice, 0 further on."""
    n, h, w, c = x.shape
    if w == width:
        return in_rows(x)
    strides = [h * w * c, w * c, c, 0, 1]
    return in_boxes(x, [n, h, w, 2, c], [1, 1, w, 2, min(c, 64)], strides)
