"""Convolutions with what surrounds them in a residual block done in their epilogues.

Forward, rounded once from the float32 accumulator, with sums of the rounded y for the next norm:

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors

Input gradient of y = conv(act(z)), z = xhat g + b, xhat = (x - mean) rstd, and the sums that the
norm's own backward pass needs:

    da = conv^T(dy),   dz = da act'(z),   sum dz,   sum dz xhat

All tensors are NHWC. Sums are taken per (image, channel) over a tile of pixels; K tiles make an
image, and their sums go to `partials` [N, K, 2, C] by plain stores: no atomics, so equal bits at
every run. All tiles have equally many pixels of their images: they divide an image, or where none
does they reach over its edges (`covering_box`). A tile of channels may straddle the two halves of a
concatenation, if none divides them. The GEMM is that of `conv.plain.tma`: stride 1, channels in
multiples of 16 bytes. Without a TMA unit all of it is done by `conv.plain.pointer` and
`conv.plain.pointer_wgrad`, of any channels.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..activations import check_activation, rounded_grad
from ..noise.dropout import Mask, mask_arguments
from ..reductions.column_sum import sum_partials
from ..runtime.dependent_launch import overlapping
from ..runtime.device import describe
from ..runtime.tuning import choose, same
from .hopper import narrow as gluon_narrow
from .hopper import row_mma as gluon_rows
from .hopper import tile_mma as gluon_tiles
from .hopper.operands import Operands
from .plain import gather as conv_gather
from .plain import pointer, pointer_wgrad
from .plain import tma_stride as conv_stride
from .plain import tma_wgrad as conv_tma_wgrad
from .plain import transposed_wgrad as conv_turned_wgrad
from .plain.fused_kernels import conv_forward_kernel, conv_input_grad_kernel
from .plain.fused_tiles import box_of as _box
from .plain.fused_tiles import pick as _pick
from .plain.fused_tiles import piece_of as _piece
from .plain.fused_tiles import programs as _programs
from .plain.fused_tiles import valid as _valid
from .plain.tma import Config, launch_fwd, worth_turning
from .plain.tma_boxes import boxes_of_image, in_boxes, is_ragged, weight_in_boxes
from .plain.tma_wgrad import WgradConfig
from .plain.transpose_weights import turn_filters

_FWD_CONFIGS = [
    Config(64, 64, 64, 4, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 256, 64, 8, 3),
    Config(64, 64, 32, 4, 4),  # few input channels, and TF32: a row of a box is at most 128 bytes
    Config(128, 128, 32, 4, 4),
    Config(64, 64, 32, 4, 3, 4),  # few output channels in large images
    Config(64, 64, 64, 4, 2, 4),
    Config(64, 128, 32, 4, 2, 2),
    Config(64, 128, 64, 4, 4),
    Config(64, 256, 64, 8, 3),
    Config(128, 128, 64, 8, 3),
    Config(128, 256, 64, 8, 4),
    Config(64, 128, 64, 4, 6),  # few tiles, which wait for their loads
]
_DGRAD_CONFIGS = [
    Config(64, 64, 64, 4, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 128, 64, 8, 3),
    Config(128, 256, 64, 8, 3),
    Config(64, 64, 32, 4, 4),
    Config(64, 128, 32, 4, 4),
    Config(64, 64, 32, 4, 3, 4),  # few output channels in large images
    Config(64, 64, 64, 4, 2, 4),
    Config(64, 128, 32, 4, 2, 2),
    Config(64, 128, 64, 4, 4),
    Config(64, 128, 64, 8, 3),
    Config(64, 256, 64, 8, 3),
    Config(128, 128, 64, 8, 4),
]

_empty = torch.empty  # every output is allocated here; tests replace it to poison the memory


# --- forward --------------------------------------------------------------------------------------


def conv_forward(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] | None = None,  # up to two: [N, H, W, C], [CO, C]
    extra_bias: Tensor | None = None,  # float32 [CO]
    stats: bool = False,  # whether to return partials
    width: int | None = None,  # channels of y, up to the next multiple of 16; None: CO
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """conv(x) + bias + emb + residual, and its partials: of each tile of H W / K pixels, the sum of
    y and that of (y - mean of the tile)^2, with y as it was rounded. Beyond CO, y has zeros.

    `extra` adds 1x1 convolutions of other tensors in the same accumulator. Their filters are rows
    any multiple of 16 bytes apart: columns of the filter of a concatenation.
    """
    extra = extra or ()
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    _check(weight, x, residual, *(x for x, _ in extra))
    assert emb is None or (emb.shape == (n, co) and emb.stride(1) == 1)
    assert len(extra) <= 2
    if pointer.serves(x, config):
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        terms |= {"stats": stats, "width": width, "config": config}
        return pointer.conv_forward(x, weight, bias, **terms)
    width = co if width is None else width
    assert width == co or (co < width <= triton.cdiv(co, 16) * 16 and not stats)
    y = _empty((n, h, w, width), dtype=x.dtype, device=x.device)
    others = [other for other, _ in extra]
    if config is None:
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        terms["width"] = width
        gluon = _gluon(x, y, weight, extra=others)
        if emb is None and residual is None and not extra and not stats:
            gluon += [Config(*tile) for tile in gluon_narrow.tiles(x, y, weight)]
        config = choose(
            "conv_forward",
            (n, h, w, ci, width, r, s, x.dtype, residual is not None, len(extra), stats),
            lambda: _valid(_FWD_CONFIGS, x, y, r, stats) + gluon,
            lambda: _pick(_FWD_CONFIGS, x, y, (r, s), stats),
            lambda c: conv_forward(x, weight, bias, **terms, stats=stats, config=c)[0],
            same,
        )
        if _gluon_path(config) and config not in gluon:
            config = _pick(_FWD_CONFIGS, x, y, (r, s), stats)
    box = _box(config, n, h, w, even=stats)
    partials = _partials(box, y) if stats else None
    if n == 0:
        return y, partials
    if gluon_path := _gluon_path(config):
        beside = () if residual is None else (residual,)
        given = Operands(x, weight, y, bias, partials, beside, extra, extra_bias, emb)
        gluon_path.launch(config, given)
        return y, partials
    tile = [*box, config.block_c]
    extra_descs, extra_channels = [], []
    for other, w1x1 in extra:
        assert w1x1.shape == (co, other.shape[3]) and w1x1.stride(1) == 1
        block = [config.block_c, config.block_k]
        filters = TensorDescriptor(w1x1, list(w1x1.shape), list(w1x1.stride()), block)
        extra_descs += [in_boxes(other, [*box, config.block_k]), filters]
        extra_channels += [other.shape[3]]
    conv_forward_kernel[(_programs(config, box, y),)](
        in_boxes(x, [*box, config.block_k]),
        weight_in_boxes(weight, config.block_c, config.block_k),
        bias,
        emb,
        None if residual is None else in_boxes(residual, tile),
        in_boxes(y, tile),
        partials,
        *extra_descs,
        *[None] * (4 - len(extra_descs)),
        extra_bias,
        *extra_channels,
        *[0] * (2 - len(extra)),
        0 if emb is None else emb.stride(0),
        n,
        ci,
        h,
        w,
        co,
        R=r,
        S=s,
        PRECISION="tf32",
        ROWS=config.rows,
        TILE_N=box[0],
        TILE_H=box[1],
        TILE_W=box[2],
        BLOCK_C=config.block_c,
        BLOCK_K=config.block_k,
        RAGGED=stats and is_ragged(box, h, w),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(x.device, n * h * w),
    )
    return y, partials


# --- input gradient -------------------------------------------------------------------------------


def conv_input_grad(
    dy: Tensor,  # [N, H, W, CO or more]: what is behind the filters does not count
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    *,
    inputs: Tensor | tuple[Tensor, ...],  # x [N, H, W, CI], or the two that it concatenates
    table: Tensor,  # float32 [N, 4, CI]: mean, rstd, g, b
    activation: str,  # of `activations`
    mask: Mask | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # [N, H, W, CI]; float32 [N, K, 2, CI]
    """dz of a = act(z), z = (x - mean) rstd g + b, from the gradient dy of conv(a), or of
    conv(dropout(a)) if there is a mask; and its partials: of each tile, the sums of dz and of
    dz (x - mean) rstd, before dz is rounded."""
    check_activation(activation)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    n, h, w, co = dy.shape
    _, ci, r, s = weight.shape
    _check(weight, dy, *inputs)
    assert sum(x.shape[3] for x in inputs) == ci and len(inputs) <= 2
    assert table.shape == (n, 4, ci) and table.is_contiguous()
    if pointer.serves(dy, config):
        rest = {"inputs": inputs, "table": table, "activation": activation, "mask": mask}
        return pointer.conv_input_grad(dy, weight, **rest, config=config)
    dz = _empty((n, h, w, ci), dtype=dy.dtype, device=dy.device)
    c1 = inputs[0].shape[3]
    if config is None:
        rest = {"inputs": inputs, "table": table, "activation": activation, "mask": mask}
        gluon = _gluon(dy, dz, weight, inputs=inputs) if mask is None else []
        config = choose(
            "conv_input_grad",
            (n, h, w, co, ci, c1, r, s, dy.dtype, activation),
            lambda: _valid(_DGRAD_CONFIGS, dy, dz, r, True, inputs) + gluon,
            lambda: _pick(_DGRAD_CONFIGS, dy, dz, (r, s), True, inputs),
            lambda c: conv_input_grad(dy, weight, **rest, config=c)[0],
            same,
        )
        if _gluon_path(config) and config not in gluon:
            config = _pick(_DGRAD_CONFIGS, dy, dz, (r, s), True, inputs)
    box = _box(config, n, h, w, even=True)
    piece = _piece(config, box)
    partials = _partials(piece, dz)
    if n == 0:
        return dz, partials
    if gluon_path := _gluon_path(config):
        given = Operands(dy, weight, dz, table, partials, inputs, activation=activation)
        gluon_path.launch(config, given)
        return dz, partials
    tile = [*piece, config.block_c]
    # of an even number of rows the input gradient has another padding
    if turned := r % 2 == s % 2 == 1 and weight.shape[0] % 4 == 0 and worth_turning(dz):
        filters = weight_in_boxes(turn_filters(weight, 1)[0], config.block_c, config.block_k)
    else:
        filters = weight_in_boxes(weight, config.block_k, config.block_c)
    conv_input_grad_kernel[(_programs(config, box, dz),)](
        in_boxes(dy, [*box, config.block_k]),
        filters,
        in_boxes(inputs[0], tile),
        in_boxes(inputs[1], tile) if len(inputs) == 2 else None,
        table,
        in_boxes(dz, tile),
        partials,
        n,
        co,
        h,
        w,
        ci,
        c1,
        *mask_arguments(mask),
        R=r,
        S=s,
        ACT=rounded_grad(activation, dy.dtype),
        TURNED=turned,
        PRECISION="tf32",
        ROWS=config.rows,
        TILE_N=box[0],
        TILE_H=box[1],
        TILE_W=box[2],
        PIECE_N=piece[0],
        PIECE_H=piece[1],
        PIECE_W=piece[2],
        BLOCK_C=config.block_c,
        BLOCK_K=config.block_k,
        RAGGED=is_ragged(box, h, w),
        STRADDLING=len(inputs) == 2 and c1 % config.block_c > 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(dy.device),
    )
    return dz, partials


def conv_plain_input_grad(
    dy: Tensor,  # [N, H, W, CO]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    config: Config | None = None,  # of `conv.plain.tma`
) -> Tensor:  # [N, H, W, CI]
    """The gradient of x of conv(x)."""
    _check(weight, dy)
    if pointer.serves(dy, config):
        return pointer.conv_plain_input_grad(dy, weight, config)
    _, ci, r, s = weight.shape
    dx = _empty((*dy.shape[:3], ci), dtype=dy.dtype, device=dy.device)
    if dx.numel():
        padding = (r // 2, s // 2)
        launch_fwd(dy, weight, None, dx, 1, padding, "tf32", dgrad=True, config=config)
    return dx


# --- weight gradient ------------------------------------------------------------------------------


def conv_weight_grad(
    x: Tensor,  # [N, H, W, CI or more]
    dy: Tensor,  # [N, H, W, CO or more]
    out: Tensor,  # float32 [CO, CI, R, S] to be written; a channel of y is a row [R, S, CI]
    *,
    accumulate: bool = False,  # add to `out`
    stride: int = 1,
    padding: int | None = None,  # None: R // 2; the image is padded below as far as dy needs it
    config: WgradConfig | None = None,
    splits: int | None = None,  # parts that the sum over pixels is split into
) -> None:
    """out = or += the gradient of the filters. The rows of `out` may be any distance apart, as in
    the columns of a 1x1 filter that belong to one half of a concatenation. Channels of x and dy
    behind those of the filters, which pad them, do not count."""
    co, ci, r, s = out.shape
    assert out.dtype == torch.float32 and out[0].permute(1, 2, 0).is_contiguous()
    assert x.is_contiguous() and dy.is_contiguous() and x.shape[3] >= ci and dy.shape[3] >= co
    if dy.shape[0] == 0:
        if not accumulate:
            out.zero_()
        return
    padding = (r // 2, s // 2) if padding is None else (padding, padding)
    if pointer_wgrad.serves_wgrad(x, config):
        path = pointer_wgrad
    elif x.itemsize == 2 and stride == 1:
        path = conv_tma_wgrad
    elif conv_stride.serves_wgrad(x, dy, out, stride, padding):
        path = conv_stride
    elif conv_turned_wgrad.serves_wgrad(x, dy, out, stride, padding, "tf32"):
        path = conv_turned_wgrad
    else:
        path = conv_gather
    pads = path in (pointer_wgrad, conv_tma_wgrad)
    assert pads or (x.shape[3], dy.shape[3]) == (ci, co)
    config, planned = path.plan_wgrad(x, dy, out, stride, padding, "tf32", config)
    splits = planned if splits is None else splits
    if splits == 1 and path is conv_tma_wgrad and not gluon_rows.serves(config):
        place = {"stride_co": out.stride(0), "accumulate": accumulate}
        conv_tma_wgrad.launch_wgrad(x, dy, out, out, 1, padding, "tf32", config, 1, **place)
        return
    row = r * s * ci
    rows = out.permute(0, 2, 3, 1)
    if alone := splits == 1 and rows.is_contiguous() and not accumulate:
        parts = rows.view(1, co * row)
    else:
        parts = _empty((splits, co * row), dtype=torch.float32, device=x.device)
    path.launch_wgrad(x, dy, out, parts, stride, padding, "tf32", config, splits)
    if not alone:
        sum_partials(parts, out, accumulate=accumulate)


# --- what applies where ---------------------------------------------------------------------------


def conv_fused_supported(
    weight_shape: Sequence[int],  # CO, CI, R, S
    dtype: torch.dtype,
    c1: int | None = None,  # channels of the first of two inputs, if x is a concatenation
) -> bool:
    """Whether every function of this file can do this convolution, of stride 1 and padding R // 2
    on the current device, with images of any size. In float32 they multiply in TF32."""
    co, ci, r, s = weight_shape
    if r % 2 == 0 or s % 2 == 0:
        return False
    if not describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")).tma:
        return pointer.takes((r, s))
    row = 16 // dtype.itemsize
    return ci % row == co % row == 0 and (c1 is None or c1 % row == 0)


def _gluon(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    inputs: Sequence[Tensor] = (),  # of an input gradient
    extra: Sequence[Tensor] = (),  # of which 1x1 convolutions are added
) -> list[Config]:
    """The tiles of `conv.hopper` that apply: to be measured, not defaults."""
    tiles = [path.tiles(x, y, weight, inputs, extra) for path in (gluon_rows, gluon_tiles)]
    return [Config(*tile) for tile in sum(tiles, [])]


def _gluon_path(config: Config) -> ModuleType | None:
    """The file of `conv.hopper` that a config belongs to."""
    paths = (gluon_rows, gluon_tiles, gluon_narrow)
    return next((path for path in paths if path.serves(config)), None)


def _partials(box: tuple[int, int, int], y: Tensor) -> Tensor:
    n, h, w, c = y.shape
    k = boxes_of_image(box, h, w)
    return _empty((n, k, 2, c), dtype=torch.float32, device=y.device)


def _check(weight: Tensor, *tensors: Tensor | None) -> None:
    assert weight.permute(0, 2, 3, 1).is_contiguous() and weight.data_ptr() % 16 == 0
    assert weight.shape[2] % 2 == weight.shape[3] % 2 == 1
    for x in tensors:
        assert x is None or (x.is_contiguous() and x.dtype == weight.dtype)
