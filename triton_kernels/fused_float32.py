"""The kernels of the planned network where products of float32 are in float32.

Each is three products in TF32, of two parts of each number (`conv.plain.tf32x3`), or a chain of
FMAs; none is one product in TF32. Nothing is rounded before, and parameters are read as they are.
What `fused_ops` has for 16 bits and TF32 alone is left out.
"""

from functools import partial
from types import ModuleType, SimpleNamespace

PRODUCTS = (  # of these every product is as told
    "attention_backward",
    "attention_forward",
    "conv_down",
    "conv_down_input_grad",
    "conv_forward",
    "conv_input_grad",
    "conv_plain_input_grad",
    "conv_two_weight_grads",
    "conv_weight_grad",
    "conv_weight_grads",
    "cross_attention_backward",
    "cross_attention_forward",
    "linear_grads",
    "skip_backward",
    "skip_dx",
)
_NONE = (  # and these have no products
    "OPS",
    "RowSums",
    "activation_grad",
    "apply",
    "apply_upsampled",
    "avg_pool",
    "avg_pool_grad",
    "begin_step",
    "bias_grad",
    "norm_apply",
    "norm_apply_upsampled",
    "norm_backward",
    "norm_dx",
    "norm_grad_table",
    "norm_table",
    "pad_channels",
    "sinusoids",
    "tensor_partials",
    "tensor_rows",
    "upsample",
    "upsample_grad",
)


def in_float32(kernels: ModuleType) -> SimpleNamespace:
    """`fused_ops` with products of float32 that are not rounded to TF32."""
    exact = {name: partial(getattr(kernels, name), allow_tf32=False) for name in PRODUCTS}
    return SimpleNamespace(**exact, **{name: getattr(kernels, name) for name in _NONE})
