"""The first convolution behind nearest upsampling: of the upsampled channels of a concatenation the
products are made on the small image, see `conv.hopper.upsampled`.

    forward          y = conv([up(a1), a2]) + bias + emb, and its partials
    input gradient   dz1 = (sum over 2x2 pixels of (dy * conv^T)) act'(z1), as large as a1
                     dz2 = (dy * conv^T) act'(z2), and the partials of both
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import check_activation
from ..registry.choose import select
from ..registry.cost import Work
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import ConvSpec, dtype_name
from ..runtime.device import Device, describe
from .fused import conv_input_grad
from .hopper import upsampled as gluon_upsampled
from .upsampled_filters import BLOCK_C, UpsampledFilters

# Forward alone it is faster at 16 images, and with fewer not measured. A step makes the filters
# anew: of 32 images it took 4.11 ms in place of 4.15, of 128 12.56 in place of 12.88.
_FEWEST_IMAGES, _FEWEST_IN_STEP = 16, 32


@configures("upsampled")
class Tile(NamedTuple):
    """What may be chosen."""

    pixels: int


def _configs(spec: ConvSpec, gpu: Device) -> list[Tile]:
    return [Tile(pixels) for pixels in gluon_upsampled.tiles(spec)]


def _work(spec: ConvSpec, gpu: Device, tile: Tile, forward: bool = False) -> Work:
    """What its programs do. A tile is of pixels of one kind, in an input gradient of small ones,
    with the sums of 16 filters of 2x2 taps."""
    co, ci = spec.of_filters
    first = ci if spec.first is None else spec.first
    written, terms = (co, 4 * first + 9 * (ci - first)) if forward else (first, 16 * co)
    small = spec.n * (spec.h // 2) * (spec.w // 2)
    return Work(
        tiles=triton.cdiv((4 if forward else 1) * small * (written // 64), tile.pixels),
        resident=2,
        products=64 * tile.pixels * terms,
        fetched=(64 + tile.pixels) * terms * spec.itemsize,
        steps=terms // 64,
        written=64 * tile.pixels,
        memory=spec.bytes,
        grad=not forward,
    )


def _key(spec: ConvSpec) -> dict[str, Any]:
    """Of the small image; channels of both halves, and CO."""
    co, ci = spec.of_filters
    first = ci if spec.first is None else spec.first
    size = {"h": spec.h // 2, "w": spec.w // 2}
    return size | {"c1": first, "c2": ci - first, "co": co, "dtype": spec.dtype}


_GRAD = Kernel(
    "upsampled", Tile, gluon_upsampled.refuse, _configs, work=_work, fitted_by=("pixels",)
)
_FORWARD = replace(_GRAD, work=partial(_work, forward=True))


def _apart(spec: ConvSpec, gpu: Device) -> str | None:
    tiles = spec.n * spec.h * spec.w // 64 * (spec.c // 64)
    if spec.n < _FEWEST_IMAGES or tiles < gpu.num_sms:
        return f"{spec.n} images, {tiles} tiles; {_FEWEST_IMAGES} and {gpu.num_sms} at least"
    return None


def _apart_in_step(spec: ConvSpec, gpu: Device) -> str | None:
    few = spec.n < _FEWEST_IN_STEP
    return f"filters are made anew for {spec.n} images; {_FEWEST_IN_STEP} at least" if few else None


UPSAMPLED = Op("conv_upsampled", _key, (_FORWARD,), similar=False, apart=_apart)
UPSAMPLED_GRAD = Op(
    "conv_upsampled_input_grad", _key, (_GRAD,), similar=False, apart=_apart_in_step
)


def upsampled_spec(
    small: Tensor,  # [N, H, W, .], of this shape and type
    c1: int,
    c2: int,
    co: int,
    *,
    grad: bool = False,
    factor: bool = False,
) -> ConvSpec:
    """What the functions below compute of such tensors."""
    n, h, w, _ = small.shape
    k, c = (co, c1 + c2) if grad else (c1 + c2, co)
    size = n, dtype_name(small.dtype), 2 * h, 2 * w, k, c
    return ConvSpec(*size, filters=(co, c1 + c2), first=c1, factor=factor)


def conv_upsampled(
    a: Tensor,  # [N, H, W, C1 + C2], of which the first C1 channels were upsampled
    filters: UpsampledFilters,
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    config: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """conv(a) + bias + emb, and its partials as `conv_forward` has them: a part is of pixels whose
    rows have one parity, and their columns."""
    _, co, c1 = filters.summed.shape
    assert filters.others.shape == (co, a.shape[3] - c1, 3, 3)
    assert emb is None or (emb.shape == (len(a), co) and emb.stride(1) == 1)
    return _forward(a, *filters, bias, emb, config)


def conv_of_upsampled(
    x: Tensor,  # [N, H, W, CI]
    filters: UpsampledFilters,
    bias: Tensor,  # float32 [CO]
    *,
    config: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # [N, 2 H, 2 W, CO]; float32 [N, K, 2, CO]
    """conv(upsample(x)) + bias, and its partials as those of `conv_upsampled`."""
    assert x.shape[3] == filters.summed.shape[2]
    return _forward(x, filters.summed, None, bias, None, config)


def _forward(
    a: Tensor,  # as in `conv_upsampled`; or x [N, H, W, C1], if nothing else is convolved
    summed: Tensor,
    others: Tensor | None,
    bias: Tensor,
    emb: Tensor | None,
    config: Tile | None,
) -> tuple[Tensor, Tensor]:
    assert a.is_contiguous()
    given = a, summed, others, bias, emb
    if config is None:

        def run(tile: Tile) -> Tensor:
            return _forward(*given, tile)[0]

        small, (_, co, c1) = a if others is None else a[:, ::2, ::2], summed.shape
        spec = upsampled_spec(small, c1, a.shape[3] - c1, co)
        config = select(UPSAMPLED, spec, describe(a.device), run).config
    return gluon_upsampled.forward(config.pixels, *given)


def conv_upsampled_input_grad(
    dy: Tensor,  # [N, H, W, CO]
    filters: UpsampledFilters,
    *,
    inputs: tuple[Tensor, Tensor],  # x1 [N, H / 2, W / 2, C1], x2 [N, H, W, C2]
    tables: tuple[Tensor, Tensor],  # float32 [N, 4, C1 + C2]: mean, rstd, g, b; [N, 4, C2] of x2
    activation: str,  # of `activations`
    config: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # as x1; as x2; float32 [N, 1, 2, C1 + C2]
    """dz1, dz2 and their partials, each as `conv_input_grad` has it, but dz1 is the sum over the
    2x2 pixels that are one."""
    check_activation(activation)
    (x1, x2), (table, table2) = inputs, tables
    assert x1.is_contiguous() and table.is_contiguous()
    assert table.shape == (len(dy), 4, x1.shape[3] + x2.shape[3])
    dz1, partials1 = _small_grad(dy, filters, x2.shape[3], (x1, table, activation), config)
    rest = {"inputs": x2, "table": table2, "activation": activation}
    dz2, partials2 = conv_input_grad(dy, filters.others, **rest)
    return dz1, dz2, _join(partials1, partials2)


def conv_of_upsampled_input_grad(
    dy: Tensor,  # [N, 2 H, 2 W, CO]
    filters: UpsampledFilters,
    *,
    config: Tile | None = None,
) -> Tensor:  # [N, H, W, CI]
    """The gradient of x in conv(upsample(x))."""
    return _small_grad(dy, filters, 0, None, config)[0]


def _small_grad(
    dy: Tensor,  # [N, 2 H, 2 W, CO]
    filters: UpsampledFilters,
    c2: int,  # channels that were not upsampled
    norm: tuple[Tensor, Tensor, str] | None,  # x1, its table and activation
    config: Tile | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the small image, and with a norm the partials of dz1, which it then is."""
    _, co, c1 = filters.summed.shape
    assert dy.is_contiguous() and dy.shape[3] == co
    if config is None:

        def run(tile: Tile) -> Tensor:
            return _small_grad(dy, filters, c2, norm, tile)[0]

        spec = upsampled_spec(dy[:, ::2, ::2], c1, c2, co, grad=True)
        config = select(UPSAMPLED_GRAD, spec, describe(dy.device), run).config
    return gluon_upsampled.input_grad(config.pixels, dy, filters.summed, norm)


# --- sums of both halves --------------------------------------------------------------------------


@triton.jit
def _join_kernel(
    first_ptr,  # [N, K1, 2, C1]
    second_ptr,  # [N, K2, 2, C - C1]
    out_ptr,  # [N, 2, C]
    C,
    C1,
    K1: tl.constexpr,
    K2: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    C2 = C - C1
    k = tl.arange(0, BLOCK_K1)
    mask = (k < K1)[:, None] & (c < C1)[None, :]
    at = ((n * K1 + k) * 2 + row)[:, None] * C1 + c[None, :]
    total = tl.sum(tl.load(first_ptr + at, mask=mask, other=0.0), 0)
    k = tl.arange(0, BLOCK_K2)
    mask = (k < K2)[:, None] & ((c >= C1) & (c < C))[None, :]
    at = ((n * K2 + k) * 2 + row)[:, None] * C2 + (c - C1)[None, :]
    total += tl.sum(tl.load(second_ptr + at, mask=mask, other=0.0), 0)
    tl.store(out_ptr + (n * 2 + row) * C + c, total, mask=c < C)


def _join(first: Tensor, second: Tensor) -> Tensor:
    """Partials of a gradient [N, K1, 2, C1], [N, K2, 2, C2] as those of one tile: sums of sums."""
    (n, k1, _, c1), (_, k2, _, c2) = first.shape, second.shape
    out = first.new_empty((n, 1, 2, c1 + c2), dtype=torch.float32)
    blocks = triton.next_power_of_2(k1), triton.next_power_of_2(k2)
    _join_kernel[(n, 2, triton.cdiv(c1 + c2, BLOCK_C))](
        first, second, out, c1 + c2, c1, k1, k2, *blocks, BLOCK=BLOCK_C
    )
    return out
