"""The kernels of the planned network, under the names that `fused.reference` specifies."""

from collections.abc import Sequence

from torch import Tensor

from ..attention import attention_bwd_rows, attention_fwd
from ..column_sum import column_rows
from ..conv.gluon.once import conv_once, serves_once
from ..conv.gluon.once_wide import conv_once_wide, serves_once_wide
from ..resample import gather, spread, spread_add
from ..row_sums import RowSums
from .activation_grad import activation_grad
from .attention_few import attention_few as _attention_few
from .attention_few import qkv_attention, serves_attention, serves_qkv_attention
from .begin_step import begin_step
from .conv import (
    conv_forward,
    conv_fused_supported,
    conv_input_grad,
    conv_plain_input_grad,
    conv_weight_grad,
)
from .conv_down import conv_down, conv_down_input_grad
from .conv_early import conv_early, serves_whole
from .conv_meeting import conv_meeting, meets
from .conv_norm import NextNorm, conv_norm, norms_in_conv
from .conv_one_row import conv_one_row, serves_one_row
from .conv_split import conv_split, worth_splitting
from .conv_upsampled import (
    conv_of_upsampled,
    conv_of_upsampled_input_grad,
    conv_upsampled,
    conv_upsampled_input_grad,
    serves_upsampled,
    upsampled_filters,
)
from .linear_grads import linear_grads
from .linear_norm_few import linear_norm_few, postpones, serves_linear_norm
from .norm_attention import norm_attention, serves_norm_attention
from .norm_conv import (
    norm_conv,
    norm_conv_of_two,
    serves_norm_conv,
    serves_norm_conv_of_two,
    serves_small_terms,
)
from .norm_fold import norm_apply, norm_apply_upsampled, norm_backward, skip_backward
from .norm_linear_few import norm_linear_few, serves_norm_linear
from .norm_passes import apply, apply_upsampled, norm_dx
from .norm_tables import bias_grad, norm_grad_table, norm_table, tensor_partials
from .norm_whole import (
    norm_of_sums,
    norm_of_sums_pays,
    norm_of_sums_upsampled,
    norm_whole,
    norm_whole_supported,
    resample_parts,
    sum_parts,
)
from .pad_channels import pad_channels
from .pool_partials import avg_pool_partials
from .sinusoids import sinusoids
from .skip_dx import skip_dx
from .two_weight_grads import conv_two_weight_grads
from .weight_grads import conv_weight_grads

__all__ = [
    "NextNorm",
    "RowSums",
    "activation_grad",
    "apply",
    "apply_upsampled",
    "attention_backward",
    "attention_few",
    "attention_forward",
    "avg_pool",
    "avg_pool_grad",
    "avg_pool_partials",
    "begin_step",
    "bias_grad",
    "conv_down",
    "conv_down_input_grad",
    "conv_few",
    "conv_forward",
    "conv_fused_supported",
    "conv_input_grad",
    "conv_meeting",
    "conv_norm",
    "conv_of_upsampled",
    "conv_of_upsampled_input_grad",
    "conv_plain_input_grad",
    "conv_split",
    "conv_two_weight_grads",
    "conv_upsampled",
    "conv_upsampled_input_grad",
    "conv_weight_grad",
    "conv_weight_grads",
    "linear_grads",
    "linear_norm_few",
    "meets",
    "norm_apply",
    "norm_apply_upsampled",
    "norm_attention",
    "norm_backward",
    "norm_conv",
    "norm_conv_of_two",
    "norm_dx",
    "norm_grad_table",
    "norm_linear_few",
    "norm_of_sums",
    "norm_of_sums_pays",
    "norm_of_sums_upsampled",
    "norm_table",
    "norm_whole",
    "norm_whole_supported",
    "norms_in_conv",
    "pad_channels",
    "postpones",
    "qkv_attention",
    "resample_parts",
    "serves_linear_norm",
    "serves_norm_attention",
    "serves_norm_conv",
    "serves_norm_conv_of_two",
    "serves_norm_linear",
    "serves_qkv_attention",
    "serves_small_terms",
    "serves_upsampled",
    "sinusoids",
    "skip_backward",
    "skip_dx",
    "sum_parts",
    "tensor_partials",
    "tensor_rows",
    "upsample",
    "upsample_grad",
    "upsampled_filters",
    "worth_splitting",
]


def conv_few(x: Tensor, weight: Tensor, bias: Tensor, **options) -> tuple[Tensor, Tensor | None]:
    """`conv_forward` where nothing runs beside it: there are other kernels for few images, and for
    few tiles of 1x1 filters."""
    if serves_one_row(x, weight, options.get("extra", ()), options.get("width")):
        return conv_one_row(x, weight, bias, **{k: v for k, v in options.items() if k != "width"})
    if serves_whole(x.shape, weight, x.dtype, x.device):
        return conv_early(x, weight, bias, **options)
    once = {k: v for k, v in options.items() if k in ("residual", "stats")}
    others = [v for k, v in options.items() if k not in once and v is not None]
    if all(isinstance(v, Sequence) and not v for v in others):
        if serves_once(x, weight):
            return conv_once(x, weight, bias, **once)
        if serves_once_wide(x, weight):
            return conv_once_wide(x, weight, bias, **once)
    return conv_forward(x, weight, bias, **options)


def tensor_rows(x: Tensor, sums: RowSums) -> Tensor:
    """Rows [rows, C] in a place of `sums`, whose sum is that of x [..., C] over all but the
    channels."""
    return column_rows(x, sums.rows)


def attention_forward(qkv: Tensor, num_heads: int, order: str) -> tuple[Tensor, Tensor]:
    """(o [N, T, C], logsumexp) of qkv [N, T, 3C]"""
    return attention_fwd(qkv, num_heads, order, allow_tf32=True)


def attention_few(qkv: Tensor, num_heads: int, order: str) -> Tensor:
    """o alone, where nothing runs beside it: for few images there is another kernel."""
    if serves_attention(qkv, num_heads):
        return _attention_few(qkv, num_heads, order)
    return attention_forward(qkv, num_heads, order)[0]


def attention_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, num_heads: int, order: str, sums: RowSums
) -> tuple[Tensor, Tensor]:
    """dqkv [N, T, 3C], and rows [rows, 3C] in a place of `sums`, whose sum is that of it over
    samples and positions."""
    return attention_bwd_rows(do, qkv, o, lse, num_heads, order, True, sums.rows)


def avg_pool(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, H / 2, W / 2, C]
    """2x2 means."""
    return gather(x, 0.25)


def avg_pool_grad(
    dy: Tensor, add: Tensor | None = None, sums: RowSums | None = None
) -> tuple[Tensor, Tensor | None]:
    """(its input gradient for even sizes, plus `add` [N, H, W, C]; rows [rows, C] in a place of
    `sums`, whose sum is that of it over samples and pixels, or None)"""
    n, h, w, c = dy.shape
    return spread_add(dy, (n, 2 * h, 2 * w, c), 0.25, add, sums)


def upsample(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, 2H, 2W, C]
    """Each pixel becomes a 2x2 block."""
    n, h, w, c = x.shape
    return spread(x, (n, 2 * h, 2 * w, c), 1.0)


def upsample_grad(dy: Tensor) -> Tensor:  # [N, 2H, 2W, C] -> [N, H, W, C]
    """Its input gradient: the sum over each 2x2 block."""
    return gather(dy, 1.0)
