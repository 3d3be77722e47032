"""3x3 convolutions to 64 channels of large images, and the norm of the result in the same launch,
for inference (`resident_meeting`): what `fused.conv_meeting` takes where rows have 64 pixels.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...dependent_launch import overlapping
from ...device import describe
from ...gluon.descriptors import SUPPORTED, in_boxes
from . import rows
from .operands import NormOfResult, Operands

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .resident_meeting import conv_resident_meeting_kernel

_WIDTH = 64  # pixels of a row
_GROUPS = (1, 2, 4, 8, 16)  # channels of one
_MOST_TILES = 32  # of an image: a thread waits for half as many words


class Form(NamedTuple):
    """How shared memory is used beside the filters."""

    rows: int  # of a tile
    stage: int  # of the result that leave at a time
    slots: int  # for rows of pixels, of which a tile of 64 channels has two more than it is of


# By the channels of x, and by the blocks of 64 channels of which 1x1 convolutions are added, one of
# which has room beside the others
FORMS = {
    (16, 0): Form(4, 4, 24),
    (64, 0): Form(4, 4, 9),
    (64, 1): Form(4, 2, 9),
    (64, 2): Form(4, 2, 8),
    (64, 3): Form(4, 2, 7),
    (128, 0): Form(2, 1, 7),
}

_WARPS = 9  # two warpgroups that multiply, and a warp that loads


def _tile(form: Form) -> tuple:
    """As a `Config` of `conv.tma`. Warps and stages say that it belongs here."""
    return (64, form.rows * _WIDTH, 64, _WARPS, form.slots + 32 * form.stage)


_TILES = {_tile(form) for form in FORMS.values()}


def serves(config: tuple) -> bool:
    """Whether a `Config` is one of this path."""
    return tuple(config[:5]) in _TILES


def tiles(
    x: Tensor,  # [N, H, W, K]
    weight: Tensor,  # [CO, CI, R, S]
    channels: int,  # of a group
    extra: Sequence[Tensor] = (),  # of which 1x1 convolutions are added; or half of H and W
    residual: bool = False,
) -> list[tuple]:
    """Those with which `launch` can do it."""
    n, h, w, k = x.shape
    form = FORMS.get((k, sum(other.shape[3] for other in extra) // 64))
    if form is None or w != _WIDTH or weight.shape[0] != 64 or channels not in _GROUPS:
        return []
    if (residual and form.stage < form.rows) or h % form.rows:
        return []
    of_image = h // form.rows
    if of_image & (of_image - 1) or not 4 <= of_image <= _MOST_TILES:
        return []
    y = x.new_empty((n, h, w, 64), device="meta")
    large = [other for other in extra if other.shape[2] == w]
    small = [other for other in extra if other.shape[2] != w]
    if not rows.tiles(x, y, weight, extra=large):
        return []
    if any(2 * other.shape[1] != h or not rows.takes_small(other, 64) for other in small):
        return []
    # or they would wait for one another for ever
    return [_tile(form)] if of_image <= describe(x.device).num_sms else []


def launch(operands: Operands, normed: NormOfResult) -> None:
    """The convolution and the norm of it, and a second norm if one is asked for."""
    n, h, w, k = operands.x.shape
    blocks = [c // 64 for c in operands.extra_channels]
    form = FORMS[k, sum(blocks)]
    of_image = h // form.rows
    # whole images at a time, all programs at once
    programs = describe(operands.x.device).num_sms // of_image * of_image
    assert programs > 0 and normed.slots.shape == (n, 64, of_image)
    overlap = overlapping(operands.x.device, 0)
    written = partial(_in_rows, rows=form.stage)
    x, filters, residual, _, y, *rest = operands.tensors(partial(rows.in_rows_of, w), written)
    also = normed.also
    conv_resident_meeting_kernel[(min(programs, n * of_image),)](
        x,
        filters,
        residual,
        y,
        *rest,
        written(normed.a),
        normed.weight,
        normed.bias,
        None if also is None else written(also.a),
        None if also is None else also.weight,
        None if also is None else also.bias,
        normed.slots,
        normed.eps,
        operands.numbers[1],
        n * of_image,
        ROWS=form.rows,
        STAGE=form.stage,
        W=w,
        BLOCKS=max(1, k // 64),
        EXTRA1=blocks[0],
        EXTRA2=blocks[1],
        ACT=normed.slope,
        SLOTS=form.slots,
        CG=normed.channels,
        CG2=normed.channels if also is None else also.channels,
        KEEP=normed.keep,
        TILES=of_image,
        OVERLAP=bool(overlap),
        num_warps=4,
        maxnreg=168,
        **overlap,
    )


def _in_rows(y: Tensor, rows: int) -> "TensorDescriptor":
    """y, whose pixels may be some channels apart."""
    return in_boxes(y, list(y.shape), [*y.stride()[:3], 1], [1, rows, y.shape[2], 64])
