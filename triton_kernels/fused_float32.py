"""The kernels of a planned network that multiplies float32 in float32.

A product is three TF32 products of two parts of each number (`conv.plain.tf32x3`), or a chain of
FMAs, and never a single TF32 product. Nothing is rounded, and parameters are read directly. Kernels
of `fused_ops` for 16-bit types and TF32 only are missing here.
"""

from functools import partial
from types import ModuleType, SimpleNamespace

PRODUCTS = (  # of these every product is as told
    "attention_backward",
    "attention_forward",
    "conv2d_input_grad",
    "conv_down",
    "conv_down_input_grad",
    "conv_few",
    "conv_forward",
    "conv_input_grad",
    "conv_plain_input_grad",
    "conv_split",
    "conv_weight_grad",
    "conv_weight_grads",
    "cross_attention_backward",
    "cross_attention_forward",
    "linear_attention_backward",
    "linear_attention_forward",
    "linear_grads",
    "skip_backward",
    "skip_dx",
)
_NONE = (  # and these have no products
    "OPS",
    "RowSums",
    "SMALL_NORM",
    "activation_grad",
    "apply",
    "avg_pool",
    "avg_pool_grad",
    "begin_step",
    "bias_grad",
    "channel_norm_backward",
    "channel_norm_forward",
    "elementwise",
    "fir",
    "gated_backward",
    "gated_forward",
    "norm_apply",
    "norm_apply_upsampled",
    "norm_backward",
    "norm_dx",
    "norm_grad_table",
    "norm_of_sums",
    "norm_single_cta",
    "norm_table",
    "pad_channels",
    "resample_parts",
    "sinusoids",
    "sum_parts",
    "tensor_partials",
    "tensor_rows",
    "upsample",
    "upsample_grad",
)


def in_float32(kernels: ModuleType) -> SimpleNamespace:
    """`fused_ops` with products of float32 that are not rounded to TF32."""
    exact = {name: partial(getattr(kernels, name), allow_tf32=False) for name in PRODUCTS}
    return SimpleNamespace(**exact, **{name: getattr(kernels, name) for name in _NONE})
