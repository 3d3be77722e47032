"""The path of `conv.fused` for Hopper where one side has 16 channels: the head of a network.

Its bytes take a fifth of the time that products of 64 channels with 64 pixels do, the least that
the tensor cores take where channels of the result are their rows, as in `stationary_weights` and
`tile_mma`: see `narrow_output_kernel`. The 16 channels are 3 or 6 and zeros.
"""

from typing import NamedTuple

from ...hopper.descriptors import SUPPORTED
from ...registry.cost import Work
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ..refusals import BITS_16, Only
from .operands import Operands, filters_in_boxes, in_rows

if SUPPORTED:
    from .narrow_output_kernel import conv_narrow_output_kernel

_RESERVED = 6144  # bytes of shared memory for barriers, 2 KB of y a warpgroup, and the hardware


@configures("narrow_output")
class NarrowOutput(NamedTuple):
    """Pairs of rows of 64 or 128 pixels, 16 channels of the result."""

    block_m: int
    rows = 1


OUT_TILE = NarrowOutput(128)

_ROWS = ((64, 64), (128, 64), (64, 128))  # pixels and channels of a row, perhaps of two images


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why `launch` cannot do it, or None."""
    if reason := Only(hopper=True, dtypes=BITS_16, filters=(3, 3))(spec, gpu):
        return reason
    if spec.c != 16 or spec.of_filters[1] != spec.k:
        return f"{spec.k} channels to {spec.c}, filters of {spec.of_filters}; it does 16"
    row = spec.w * _images_of_row(spec.w), spec.k
    return None if row in _ROWS else f"rows of {spec.w} pixels of {spec.k} channels"


def work(spec: ConvSpec, gpu: Device, _: NarrowOutput) -> Work:
    """What its programs do."""
    images = _images_of_row(spec.w)
    width = spec.w * images
    return Work(
        tiles=-(-spec.n // images) * ((spec.h + 1) // 2),
        resident=programs(width, spec.k),
        products=2 * width * spec.c * 9 * spec.k,
        fetched=2 * width * spec.k * spec.itemsize,
        steps=spec.k // 64,
        written=2 * width * spec.c,
        memory=spec.bytes,
    )


def launch(config: NarrowOutput, operands: Operands) -> None:
    """The convolution."""
    n, h, w, c = operands.x.shape
    co = operands.weight.shape[0]
    device = describe(operands.x.device)
    images = _images_of_row(w)
    width = w * images
    rounds = (h + 1) // 2
    tiles = -(-n // images) * rounds
    blocks = min(programs(width, c) * device.num_sms, tiles)
    overlap = overlapping(operands.x.device, 0)
    conv_narrow_output_kernel[(blocks,)](
        in_rows(operands.x, 1, images), filters_in_boxes(operands.weight, 16), operands.y,
        operands.vectors, tiles, rounds, None if images == 1 else n, h, co,
        W=width, IMAGES=images, K_BLOCKS=c // 64, PAIRS=pairs(width, c, device.shared_memory),
        OVERLAP=bool(overlap), num_warps=4, maxnreg=80 if programs(width, c) == 2 else 168,
        **overlap,
    )  # fmt: skip


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


KERNEL = Kernel(
    "narrow_output",
    NarrowOutput,
    refuse,
    lambda spec, gpu: [OUT_TILE],
    launch=launch,
    work=work,
)
