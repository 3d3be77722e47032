"""Launches of the fused convolutions that TMA fetches: forward and input gradient."""

from triton.tools.tensor_descriptor import TensorDescriptor

from ...activations import rounded_grad
from ...noise.dropout import mask_arguments
from ...runtime.dependent_launch import overlapping
from ..hopper.operands import Operands
from .fused_kernels import conv_forward_kernel, conv_input_grad_kernel
from .fused_tiles import box_of, piece_of, programs
from .tma import Config, worth_turning
from .tma_boxes import in_boxes, is_ragged, weight_in_boxes
from .transpose_weights import turn_filters


def forward(config: Config, operands: Operands) -> None:
    """The convolution, its terms and its partials."""
    x, weight, y, emb = operands.x, operands.weight, operands.y, operands.emb
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    stats = operands.partials is not None
    box = box_of(config, n, h, w, even=stats)
    tile = [*box, config.block_c]
    extra_descs, extra_channels = [], []
    for other, w1x1 in operands.extra:
        assert w1x1.stride(1) == 1
        block = [config.block_c, config.block_k]
        filters = TensorDescriptor(w1x1, list(w1x1.shape), list(w1x1.stride()), block)
        extra_descs += [in_boxes(other, [*box, config.block_k]), filters]
        extra_channels += [other.shape[3]]
    residual = operands.beside[0] if operands.beside else None
    conv_forward_kernel[(programs(config, box, *y.shape),)](
        in_boxes(x, [*box, config.block_k]),
        weight_in_boxes(weight, config.block_c, config.block_k),
        operands.vectors,
        emb,
        None if residual is None else in_boxes(residual, tile),
        in_boxes(y, tile),
        operands.partials,
        *extra_descs,
        *[None] * (4 - len(extra_descs)),
        operands.extra_bias,
        *extra_channels,
        *[0] * (2 - len(operands.extra)),
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


def input_grad(config: Config, operands: Operands) -> None:
    """dz and its partials."""
    dy, weight, dz, inputs = operands.x, operands.weight, operands.y, operands.beside
    n, h, w, co = dy.shape
    _, ci, r, s = weight.shape
    c1 = inputs[0].shape[3]
    box = box_of(config, n, h, w, even=True)
    piece = piece_of(config, box)
    tile = [*piece, config.block_c]
    # of an even number of rows the input gradient has another padding
    if turned := r % 2 == s % 2 == 1 and weight.shape[0] % 4 == 0 and worth_turning(dz):
        filters = weight_in_boxes(turn_filters(weight, 1)[0], config.block_c, config.block_k)
    else:
        filters = weight_in_boxes(weight, config.block_k, config.block_c)
    conv_input_grad_kernel[(programs(config, box, *dz.shape),)](
        in_boxes(dy, [*box, config.block_k]),
        filters,
        in_boxes(inputs[0], tile),
        in_boxes(inputs[1], tile) if len(inputs) == 2 else None,
        operands.vectors,
        in_boxes(dz, tile),
        operands.partials,
        n,
        co,
        h,
        w,
        ci,
        c1,
        *mask_arguments(operands.mask),
        R=r,
        S=s,
        ACT=rounded_grad(operands.activation, dy.dtype),
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
