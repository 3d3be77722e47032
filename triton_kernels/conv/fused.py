"""Convolutions with what surrounds them in a residual block done in their epilogues.

Forward, rounded once from the float32 accumulator, with sums of the rounded y for the next norm:

    y = factor (conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors)

Input gradient of y = conv(act(z)), z = xhat g + b, xhat = (x - mean) rstd, and the sums that the
norm's own backward pass needs:

    da = conv^T(dy),   dz = da act'(z),   sum dz,   sum dz xhat

All tensors are NHWC. Sums are taken per (image, channel) over a tile of pixels; K tiles make an
image, and their sums go to `partials` [N, K, 2, C] by plain stores: no atomics, so equal bits at
every run. All tiles have equally many pixels of their images: they divide an image, or where none
does they reach over its edges (`covering_box`). A tile of channels may straddle the two halves of a
concatenation, if none divides them. The GEMM is that of `conv.plain.tma`: stride 1, channels in
multiples of 16 bytes. Without a TMA unit, or of other channels, `conv.plain.pointer` does it.

Products of float32 are in TF32, or with `allow_tf32=False` in float32: three of TF32 each where
TMA fetches (`conv.plain.tf32x3`), else FMAs.
"""

from typing import Any

import torch
from torch import Tensor

from ..activations import check_activation
from ..noise.dropout import Mask
from ..registry.choose import select
from ..registry.kernel import Op
from ..registry.spec import ConvSpec, dtype_name, precision_of
from ..runtime.device import describe
from ..runtime.layout import is_aligned
from .conv2d import conv2d_input_grad
from .fused_spec import Terms, forward_spec
from .hopper import linear_mma, narrow_output
from .hopper.operands import Operands
from .hopper.stationary import stationary_weights
from .hopper.tiles import tile_mma
from .plain import fused_launch
from .plain.by_tma.tma_boxes import boxes_of_image
from .plain.fused_tiles import box_of, piece_of, summed_box
from .plain.pointers import pointer

FORWARD = Op(
    "conv_forward",
    key=("h", "w", "k", "c", "r", "s", "dtype", "residual", "extras", "stats"),
    kernels=(
        fused_launch.FORWARD,
        fused_launch.SPLIT_FORWARD,
        pointer.FORWARD,
        stationary_weights.KERNEL,
        tile_mma.KERNEL,
        linear_mma.FUSED,
        narrow_output.KERNEL,
    ),
)
INPUT_GRAD = Op(
    "conv_input_grad",
    key=("h", "w", "k", "c", "first", "r", "s", "dtype", "activation"),
    kernels=(
        fused_launch.INPUT_GRAD,
        fused_launch.SPLIT_INPUT_GRAD,
        pointer.INPUT_GRAD,
        stationary_weights.KERNEL,
        tile_mma.KERNEL,
        linear_mma.FUSED,
    ),
)


# --- forward --------------------------------------------------------------------------------------


def conv_forward(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    stats: bool = False,  # whether to return partials
    width: int | None = None,  # channels of y, up to the next multiple of 16; None: CO
    allow_tf32: bool = True,  # here and below: of float32
    tf32: bool = False,
    config: tuple | None = None,  # of a kernel of `FORWARD`
    **terms: Any,  # of `Terms`
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """conv(x) + bias + the terms, times their factor, and its partials: of each tile of H W / K
    pixels, the sum of y and that of (y - mean of the tile)^2, with y as it was rounded. Beyond CO,
    y has zeros. With `tf32` y of float32 is rounded to TF32: products in that read it."""
    n, h, w, _ = x.shape
    added, options = Terms(**terms), {"width": width, "allow_tf32": allow_tf32, "tf32": tf32}
    if config is None:
        asked = added.asked | {"stats": stats, "allow_tf32": allow_tf32}
        spec = forward_spec(x, weight, width, **asked)

        def run(c: tuple) -> Tensor:
            return conv_forward(x, weight, bias, **options, stats=stats, config=c, **terms)[0]

        config = select(FORWARD, spec, describe(x.device), run).config
    tiles = None
    if stats:
        tiles = boxes_of_image(summed_box(config, box_of(config, n, h, w, even=True)), h, w)
    given = forward_operands(x, weight, bias, tiles, added, **options)
    if n:
        FORWARD.kernel_of(config).launch(config, given)
    return given.y, given.partials


def forward_operands(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    tiles: int | None,  # of an image, of which partials are wanted
    terms: Terms,
    *,
    width: int | None = None,
    allow_tf32: bool = True,
    tf32: bool = False,
) -> Operands:
    """Those of `conv_forward`, checked, and its results, to be written."""
    n, h, w, _ = x.shape
    co, _, _, _ = weight.shape
    _check(weight, x)
    width = co if width is None else width
    assert width == co or (co < width <= -(-co // 16) * 16 and tiles is None)
    y = x.new_empty((n, h, w, width))
    terms.check(y, co)
    partials = None if tiles is None else _partials(tiles, y)
    given = Operands(x, weight, y, bias, partials, *terms.operands)
    return given._replace(precision=precision_of(x.dtype, allow_tf32), tf32=tf32)


# --- input gradient -------------------------------------------------------------------------------


def conv_input_grad(
    dy: Tensor,  # [N, H, W, CO or more]: what is behind the filters does not count
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    *,
    inputs: Tensor | tuple[Tensor, ...],  # x [N, H, W, CI], or the two that it concatenates
    table: Tensor,  # float32 [N, 4, CI]: mean, rstd, g, b
    activation: str,  # of `activations`
    mask: Mask | None = None,
    allow_tf32: bool = True,
    config: tuple | None = None,  # of a kernel of `INPUT_GRAD`
) -> tuple[Tensor, Tensor]:  # [N, H, W, CI]; float32 [N, K, 2, CI]
    """dz of a = act(z), z = (x - mean) rstd g + b, from the gradient dy of conv(a), or of
    conv(dropout(a)) if there is a mask; and its partials: of each tile, the sums of dz and of
    dz (x - mean) rstd, before dz is rounded."""
    check_activation(activation)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    n, h, w, k = dy.shape
    co, ci, r, s = weight.shape
    _check(weight, dy, *inputs)
    assert sum(x.shape[3] for x in inputs) == ci and len(inputs) <= 2
    assert table.shape == (n, 4, ci) and table.is_contiguous()
    dz = dy.new_empty((n, h, w, ci))
    if config is None:
        rest = {"inputs": inputs, "table": table, "activation": activation, "mask": mask}
        rest["allow_tf32"] = allow_tf32
        dtype, first = dtype_name(dy.dtype, allow_tf32), inputs[0].shape[3]
        added = {"activation": activation, "mask": mask is not None}
        added["drawn"] = mask is not None and mask.words is None
        spec = ConvSpec(n, dtype, h, w, k, ci, r, s, filters=(co, ci), first=first, **added)

        def run(c: tuple) -> Tensor:
            return conv_input_grad(dy, weight, **rest, config=c)[0]

        config = select(INPUT_GRAD, spec, describe(dy.device), run).config
    piece = piece_of(config, box_of(config, n, h, w, even=True))
    partials = _partials(boxes_of_image(piece, h, w), dz)
    if n:
        given = Operands(dy, weight, dz, table, partials, inputs, activation=activation, mask=mask)
        given = given._replace(precision=precision_of(dy.dtype, allow_tf32))
        INPUT_GRAD.kernel_of(config).launch(config, given)
    return dz, partials


def conv_plain_input_grad(
    dy: Tensor,  # [N, H, W, CO]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    *,
    allow_tf32: bool = True,
) -> Tensor:  # [N, H, W, CI]
    """The gradient of x of conv(x)."""
    _check(weight, dy)
    padding = weight.shape[2] // 2, weight.shape[3] // 2
    return conv2d_input_grad(dy, weight, dy.shape[1:3], 1, padding, allow_tf32)


def _partials(tiles: int, y: Tensor) -> Tensor:
    return y.new_empty((len(y), tiles, 2, y.shape[3]), dtype=torch.float32)


def _check(weight: Tensor, *tensors: Tensor) -> None:
    assert weight.permute(0, 2, 3, 1).is_contiguous() and is_aligned(weight)
    assert weight.shape[2] % 2 == weight.shape[3] % 2 == 1
    for x in tensors:
        assert x.is_contiguous() and x.dtype == weight.dtype
