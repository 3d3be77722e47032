"""The path of `conv.fused` for Hopper where one side has 16 channels: the head of a network.

Its bytes take a fifth of the time that products of 64 channels with 64 pixels do, the least that
the tensor cores take where channels of the result are their rows, as in `rows` and `tiles`: see
`narrow_out`, and of act(norm(x)) `head`. The 16 channels are 3 or 6 and zeros.

Used where `rows` is: with versions it was tried with, where it was measured to be faster.
"""

import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED, takes
from ...runtime.dependent_launch import overlapping
from ...runtime.device import describe
from .operands import Operands, filters_in_boxes, norm_of
from .row_mma import in_rows

if SUPPORTED:
    from .narrow_output import conv_narrow_out_kernel
    from .norm_head import conv_head_kernel

_WARPS = 9  # two warpgroups that multiply, and a warp that loads
_RESERVED = 6144  # bytes of shared memory for barriers, 2 KB of y a warpgroup, and the hardware

OUT_TILE = (16, 128, 64, _WARPS, 2)  # a `Config` of `conv.plain.tma`

_HEADS = 4  # programs of a head on a multiprocessor, or fewer where there are more channels
_ROWS_OF_HEAD = (4, 8, 16)  # of an image, a program
_HEAD_REGISTERS = {4: 128, 8: 168, 16: 232}  # of a thread

_ROWS = ((64, 64), (128, 64), (64, 128))  # pixels and channels of a row, perhaps of two images


def serves(config: tuple) -> bool:
    """Whether a `Config` is one of this path. Elsewhere tiles have 64 channels and more."""
    return config.block_c == 16


def tiles(
    x: Tensor,  # [N, H, W, CI]
    y: Tensor,  # [N, H, W, C], the result
    weight: Tensor,  # [CO, CI, R, S]
) -> list[tuple]:
    """Those with which `launch` can do it, if there is nothing to it but a bias."""
    narrow = x.shape[3] == weight.shape[1] and y.shape[3] == 16
    width = x.shape[2] * _images_of_row(x.shape[2])
    fits = (width, x.shape[3]) in _ROWS and tuple(weight.shape[2:]) == (3, 3)
    return [OUT_TILE] if narrow and fits and takes(x) else []


def launch(config: tuple, operands: Operands) -> None:
    """The convolution, with a `Config` of `tiles`."""
    n, h, w, c = operands.x.shape
    co = operands.weight.shape[0]
    device = describe(operands.x.device)
    images = _images_of_row(w)
    width = w * images
    rounds = (h + 1) // 2
    tiles = -(-n // images) * rounds
    blocks = min(programs(width, c) * device.num_sms, tiles)
    overlap = overlapping(operands.x.device, 0)
    conv_narrow_out_kernel[(blocks,)](
        in_rows(operands.x, 1, images),
        filters_in_boxes(operands.weight, 16),
        operands.y,
        operands.vectors,
        tiles,
        rounds,
        None if images == 1 else n,
        h,
        co,
        W=width,
        IMAGES=images,
        K_BLOCKS=c // 64,
        PAIRS=pairs(width, c, device.shared_memory),
        OVERLAP=bool(overlap),
        num_warps=4,
        maxnreg=80 if programs(width, c) == 2 else 168,
        **overlap,
    )


def launch_head(operands: Operands) -> None:
    """The same of act(norm(x)), where a row is 64 pixels."""
    n, h, _, _ = operands.x.shape
    co = operands.weight.shape[0]
    overlap = overlapping(operands.x.device, 0)
    norm_arguments, norm_options = norm_of(operands)
    channels = max(4, triton.next_power_of_2(co))
    rows = rows_of_program(n, h, describe(operands.x.device).num_sms)
    conv_head_kernel[(n * -(-h // rows),)](
        operands.x,
        operands.weight,
        operands.y,
        operands.vectors,
        *norm_arguments,
        h,
        co,
        C=channels,
        ROWS=rows,
        ACT=operands.slope,
        **norm_options,
        OVERLAP=bool(overlap),
        num_warps=4,
        maxnreg=_HEAD_REGISTERS[channels],
        **overlap,
    )


def rows_of_program(n: int, h: int, num_sms: int) -> int:
    """So that all programs run at once, if they can."""
    fits = [rows for rows in _ROWS_OF_HEAD if n * -(-h // rows) <= _HEADS * num_sms]
    return (*fits, _ROWS_OF_HEAD[-1])[0]


def _images_of_row(w: int) -> int:
    """Whose pixels are side by side in a row of a product, which has 64 at least."""
    return 2 if w == 32 else 1


def programs(width: int, channels: int) -> int:
    """Programs on a multiprocessor, so that every one has room for rows that are on their way."""
    return 2 if width * channels <= 64 * 64 else 1


def pairs(width: int, channels: int, shared_memory: int) -> int:
    """Pairs of rows that the shared memory of a program holds beside the filters."""
    blocks = channels // 64
    room = shared_memory // programs(width, channels) - _RESERVED - blocks * 9 * 16 * 128
    return (room // blocks - 1024) // (2 * (width + 8) * 128)
