"""The kernels of a planned network that multiplies float32 in TF32.

A tensor core truncates the 13 bits of a float32 number that TF32 lacks: every product becomes too
small, and errors of one sign add up. Operands of products are therefore rounded to nearest once,
where they are written. This module alone decides which results are rounded. The residual stream has
other readers and stays float32: 1x1 skips and weight gradients round it in registers. In attention
that would take more registers than sm_80 has. q, k and v that nothing else reads are rounded by the
convolution that makes them, where the plan says so (`diffusion.plan.rounding`); others, and the
gradient of o, in a separate pass. The optimizer rounds parameters (`FlatParameters.low`). The three
products of the embedding, a thousandth of all, read unrounded operands.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from torch import Tensor

# Of these the first results are images or activations that convolutions read, or gradients that
# their input and weight gradients read; of `resample_parts` what is resampled. `skip_backward` and
# attention round what they write by themselves.
OPERANDS = (
    "apply",
    "begin_step",
    "channel_norm_backward",
    "channel_norm_forward",
    "norm_of_sums",
    "norm_single_cta",
    "resample_parts",
    "norm_apply",
    "norm_apply_upsampled",
    "norm_dx",
    "norm_backward",
    "avg_pool",
    "avg_pool_grad",
    "upsample",
    "upsample_grad",
    "pad_channels",
)


def in_tf32(kernels: ModuleType) -> SimpleNamespace:
    """`fused_ops`, or its reference, with results rounded that products in TF32 read."""
    named = {name: value for name, value in vars(kernels).items() if not name.startswith("_")}
    named |= {name: _rounding(named[name]) for name in OPERANDS}

    def rounded(x: Tensor) -> Tensor:
        return named["pad_channels"](x, x.shape[-1], x.dtype)

    def conv_down(x: Tensor, *args) -> Tensor:
        return kernels.conv_down(rounded(x), *args)

    def conv_down_input_grad(*args, **options) -> Tensor:
        return rounded(kernels.conv_down_input_grad(*args, **options))

    def attention_forward(qkv: Tensor, *args, is_rounded: bool = False) -> tuple[Tensor, Tensor]:
        return kernels.attention_forward(qkv if is_rounded else rounded(qkv), *args)

    def attention_backward(
        do: Tensor, qkv: Tensor, *args, is_rounded: bool = False
    ) -> tuple[Tensor, Tensor]:
        qkv = qkv if is_rounded else rounded(qkv)
        return kernels.attention_backward(rounded(do), qkv, *args)

    def cross_attention_forward(q: Tensor, kv: Tensor, *args) -> tuple[Tensor, Tensor]:
        return kernels.cross_attention_forward(rounded(q), rounded(kv), *args)

    def cross_attention_backward(do: Tensor, q: Tensor, kv: Tensor, *args) -> tuple[Tensor, Tensor]:
        return kernels.cross_attention_backward(rounded(do), rounded(q), rounded(kv), *args)

    wrapped = (
        *(conv_down, conv_down_input_grad, attention_forward, attention_backward),
        *(cross_attention_forward, cross_attention_backward),
    )
    named |= {wrapper.__name__: wrapper for wrapper in wrapped}
    return SimpleNamespace(**named, ROUNDS_OPERANDS=True)


def _rounding(kernel: Callable) -> Callable:
    def launch(*args, **options):
        return kernel(*args, **options, tf32=True)

    return launch
