"""The functions of `conv.fused` without a TMA unit, or where it cannot address the tensors.

Tiles are fetched by cp.async through pointers, see `conv.plain.pointer_products`. Any number of
channels will do, and any image; what is no multiple of 8 channels is fetched number by number.
"""

import math

from ....activations import rounded_grad
from ....noise.dropout import mask_arguments
from ....registry.cost import AMPERE
from ....registry.kernel import Kernel
from ....registry.spec import FORWARD_TERMS, GRAD_TERMS, ConvSpec
from ....runtime.device import Device
from ...configs import ConvOperands
from ...hopper.operands import Operands
from ..by_tma.tma_boxes import is_ragged, tile_sizes
from ..fused_tiles import box_of, programs
from .pointer_kernels import conv_pointer_forward_kernel, conv_pointer_input_grad_kernel
from .pointer_tiles import FITTED_BY, PointerTile, cost, divide, fitting, refuse, work

# --- forward --------------------------------------------------------------------------------------


def forward(
    config: PointerTile,
    operands: Operands,
    transposed: bool = False,  # x is the gradient of a result, y of its input
    steps: int | None = None,  # of each part of the sum, y then float32 [parts, N, C, H * W]
) -> None:
    """As `fused_launch.forward`."""
    x, weight, y, stats = operands.x, operands.weight, operands.y, operands.partials is not None
    n, h, w, k = x.shape
    co, ci, r, s = weight.shape
    c, stride_w = ci if transposed else co, r * s * ci
    width, parts = (y.shape[3], ()) if steps is None else (c, (len(y),))
    box = box_of(config, n, h, w, even=stats)
    pairs = [t for pair in operands.extra for t in pair]
    beside, absent = operands.extra_channels, 2 - len(operands.extra)
    rows = [filters.stride(0) for _, filters in operands.extra] + [0] * absent
    for other, filters in operands.extra:
        assert filters.shape == (c, other.shape[3]) and filters.stride(1) == 1
    unit = math.gcd(8, k, width, stride_w, *beside, *rows)
    conv_pointer_forward_kernel[(programs(config, box, n, h, w, width), *parts)](
        x, weight, y, operands.vectors, operands.extra_bias, operands.emb,
        operands.beside[0] if operands.beside else None, *pairs, *[None] * (2 * absent),
        operands.partials, n, h, w, k, k // unit, c, width // unit, *[v // unit for v in beside],
        stride_w // unit, *[v // unit for v in rows], operands.emb_stride, steps, operands.factor,
        R=r, S=s, TRANSPOSED=transposed, PADDED=c != width,
        EXACT=c == width and divide(config, width, k, *beside),
        RAGGED=stats and is_ragged(box, h, w), UNIT=unit, ROWS=config.rows, TF32=operands.tf32,
        PRECISION=operands.precision, **tile_sizes(box, config),
    )  # fmt: skip


def _plain(config: PointerTile, operands: ConvOperands) -> None:
    """A forward pass with a bias at most, or its input gradient."""
    x, weight, bias, y, _, _, precision, dgrad, *_ = operands
    assert precision == "tf32"
    forward(config, Operands(x, weight, y, bias, None), dgrad)


def _refuse_plain(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.dtype == "fp32":
        return "float32 that is not rounded to TF32"
    if spec.pads != (spec.r // 2, spec.s // 2):
        return f"it pads {spec.r // 2, spec.s // 2} pixels, not {spec.pads}"
    if gpu.tma and (spec.itemsize == 4 or min(spec.k, spec.c) < 16):
        return "of what a TMA unit could fetch it takes 16 bits, 16 channels and more"
    return refuse(spec, gpu)


# --- input gradient -------------------------------------------------------------------------------


def input_grad(config: PointerTile, operands: Operands) -> None:
    """As `fused_launch.input_grad`."""
    dy, weight, dz, inputs = operands.x, operands.weight, operands.y, operands.beside
    n, h, w, kx = dy.shape
    co, ci, r, s = weight.shape
    c1 = inputs[0].shape[3]
    box = box_of(config, n, h, w, even=True)
    unit = math.gcd(8, kx, ci, c1)
    conv_pointer_input_grad_kernel[(programs(config, box, *dz.shape),)](
        dy, weight, dz, inputs[0], inputs[1] if len(inputs) == 2 else None, operands.vectors,
        operands.partials, n, h, w, co, kx // unit, ci // unit, c1 // unit,
        *mask_arguments(operands.mask),
        R=r, S=s, ACT=rounded_grad(operands.activation, dy.dtype), PADDED=co != kx,
        EXACT=co == kx and divide(config, ci, kx), RAGGED=is_ragged(box, h, w),
        STRADDLING=len(inputs) == 2 and c1 % config.block_c > 0, UNIT=unit, ROWS=config.rows,
        PRECISION=operands.precision, **tile_sizes(box, config),
    )  # fmt: skip


FORWARD, INPUT_GRAD = (
    Kernel(
        "pointer",
        PointerTile,
        refuse,
        fitting,
        cost,
        launch,
        work,
        FITTED_BY,
        borrows=AMPERE,
        adds=adds,
    )
    for launch, adds in ((forward, FORWARD_TERMS), (input_grad, GRAD_TERMS))
)
PLAIN_FORWARD = PLAIN_INPUT_GRAD = Kernel(
    "pointer", PointerTile, _refuse_plain, fitting, cost, _plain, work, FITTED_BY, borrows=AMPERE
)
