"""3x3 filters of `conv2d` for Hopper: the kernel of `tile_mma`, whose epilogue adds a bias at most.
As those of `unfused_1x1` it is taken only where it was measured to be faster than `conv.plain.tma`.
"""

from ....registry.kernel import Kernel
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ...configs import ConvOperands
from ..operands import Operands
from ..tiles import tile_mma
from ..tiles.tile_mma import TileMma


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if not spec.aligned:
        return "tensors do not begin at multiples of 16 bytes"
    return tile_mma.refuse(spec, gpu)


def _refuse_grad(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.dtype == "tf32":
        return "it multiplies filters that are transposed first"
    return _refuse(spec, gpu)


def _launch(config: TileMma, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = operands
    given = Operands(x, weight, y, bias, None, activation="identity" if dgrad else None)
    tile_mma.launch(config, given, filters_follow=operands.follows)


FORWARD = Kernel("tile_mma", TileMma, _refuse, tile_mma.configs, launch=_launch)
INPUT_GRAD = Kernel("tile_mma", TileMma, _refuse_grad, tile_mma.configs, launch=_launch)
