"""The planned network in TF32: what its products read has been rounded, and what that costs.

A tensor core cuts off the bits of a float32 number that TF32 lacks. Products are in float64 or
float32 here, so what it would cut off is asked for, or done to their operands.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import triton_kernels
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.network import TrainingUNet
from diffusion.runtime.backend import Backend
from triton_kernels import fused_ops
from triton_kernels.fused_tf32 import in_tf32
from triton_kernels.reference import fused as reference
from triton_kernels.registry.kernel import Op
from triton_kernels.tf32 import rounded_to_tf32

from .test_fused_unet import MODELS, ODD, given, make
from .test_fused_unet_kernels import ONE_LEVEL, TWO_LEVELS

See = Callable[[Tensor], Tensor]


def rounded(x: Tensor) -> Tensor:
    return rounded_to_tf32(x.float()).to(x.dtype)


def cut_off(x: Tensor) -> Tensor:
    """What a tensor core sees of a float32 number."""
    return (x.float().view(torch.int32) & -0x2000).view(torch.float32).to(x.dtype)


def already(x: Tensor) -> Tensor:
    """x, of which a tensor core cuts off nothing."""
    assert torch.equal(cut_off(x), x)
    return x


def products(
    kernels: SimpleNamespace,
    seen: See,  # of activations and gradients
    weights: See,
    in_kernel: See,  # of operands that the planned kernels round themselves
) -> SimpleNamespace:
    """`kernels` whose convolutions see this of their operands."""
    k, base = SimpleNamespace(**vars(kernels)), kernels

    def conv_forward(x, w, *rest, extra=(), **options):
        extra = [(in_kernel(other), weights(columns)) for other, columns in extra]
        return base.conv_forward(seen(x), weights(w), *rest, extra=extra, **options)

    def weight_grads(*gradients, **options):
        gradients = [(in_kernel(x), in_kernel(dy), out) for x, dy, out in gradients]
        base.conv_weight_grads(*gradients, **options)

    k.conv_forward, k.conv_weight_grads = conv_forward, weight_grads
    k.conv_weight_grad = lambda x, dy, *rest, **o: base.conv_weight_grad(
        in_kernel(x), in_kernel(dy), *rest, **o
    )
    for name in ("conv_input_grad", "conv_plain_input_grad", "conv_down_input_grad"):
        k.__dict__[name] = _seeing(getattr(base, name), seen, weights)
    k.skip_backward = _seeing(base.skip_backward, seen, weights)
    k.conv_down = _seeing(base.conv_down, in_kernel, weights)
    k.OPS = k.OPS | {"conv_upsampled": Op("conv_upsampled", (), ())}  # its kernels are for 16 bits
    return k


def _seeing(kernel: Callable, seen: See, weights: See) -> Callable:
    return lambda x, w, *rest, **options: kernel(seen(x), weights(w), *rest, **options)


def attending(kernels: ModuleType, seen: See) -> SimpleNamespace:
    """`kernels` whose attention sees this of its operands."""
    k = SimpleNamespace(**{name: value for name, value in vars(kernels).items() if name[0] != "_"})
    k.attention_forward = lambda qkv, *rest: kernels.attention_forward(seen(qkv), *rest)
    k.attention_backward = _seeing(kernels.attention_backward, seen, seen)
    k.cross_attention_forward = _seeing(kernels.cross_attention_forward, seen, seen)
    k.cross_attention_backward = lambda do, q, kv, *rest: kernels.cross_attention_backward(
        seen(do), seen(q), seen(kv), *rest
    )
    return k


def planned(seen: See) -> SimpleNamespace:
    """The reference as planned kernels do it: those of skips and attention round what they write
    themselves."""
    k = products(in_tf32(attending(reference, seen)), seen, rounded, rounded)
    skip, forward, backward = k.skip_backward, k.attention_forward, k.attention_backward

    def skip_backward(*args, **options):
        dx1, dx2, rows = skip(*args, **options)
        return rounded(dx1), None if dx2 is None else rounded(dx2), rows

    def attention_forward(*args, **options):
        o, state = forward(*args, **options)
        return rounded(o), state

    def attention_backward(*args, **options):
        d_qkv, rows = backward(*args, **options)
        return rounded(d_qkv), rows

    k.skip_backward, k.attention_forward = skip_backward, attention_forward
    k.attention_backward = attention_backward
    cross, cross_grad = k.cross_attention_forward, k.cross_attention_backward
    k.cross_attention_forward = lambda *args: (rounded(cross(*args)[0]), None)
    k.cross_attention_backward = lambda *args: tuple(map(rounded, cross_grad(*args)))
    return k


def in_place(seen: See) -> SimpleNamespace:
    """Whatever a product reads is seen like this as it reads it, and nothing is rounded before."""
    return products(attending(reference, seen), seen, seen, seen)


def gradient(options: dict, size: tuple[int, int], kernels: SimpleNamespace) -> Tensor:
    model = make(options | {"dropout": 0.0}, size)
    flat = FlatParameters(model, together=TOGETHER)
    plan = TrainingUNet(model, flat, kernels)
    for draw in range(2):
        torch.manual_seed(draw)
        x, t = torch.randn(2, *size, 3).double(), torch.tensor([3, 700])
        y = plan(x, t, given(model))
        y.backward(torch.randn_like(y))
    return flat.grad.clone()


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


CASES = {name: (options, (8, 12)) for name, options in MODELS.items()}
CASES["24 channels"] = ODD["24 channels"]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_as_with_operands_rounded_in_place(name):
    """PyTorch rounds each operand as a product reads it."""
    exact = gradient(*CASES[name], reference)
    theirs = error(gradient(*CASES[name], in_place(rounded)), exact)
    ours = gradient(*CASES[name], planned(already))  # and nothing is left to be cut off
    assert error(ours, exact) <= 1.2 * theirs


def test_operands_that_are_cut_off_give_worse_gradients():
    exact = gradient(*CASES["three_levels"], reference)
    errors = [
        error(gradient(*CASES["three_levels"], in_place(s)), exact) for s in (cut_off, rounded)
    ]
    assert errors[0] > 1.3 * errors[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "size"),
    [
        (ONE_LEVEL | {"use_scale_shift_norm": True}, (4, 4)),
        (TWO_LEVELS | {"conv_resample": True}, (8, 8)),
        (TWO_LEVELS | {"resblock_updown": True}, (8, 8)),
        (TWO_LEVELS | {"model_channels": 24, "num_groups": 8, "num_head_channels": 24}, (6, 6)),
    ],
    ids=["film, attention", "strided", "resampling blocks", "24 channels"],
)
def test_kernels_write_what_products_take(options, size):
    backend = Backend("triton", triton_kernels, torch.float32, allow_tf32=True)
    model = make(options | {"backend": backend}, size).float()
    flat = FlatParameters(model, together=TOGETHER)
    kernels = products(in_tf32(attending(fused_ops, already)), already, already, lambda x: x)
    y = TrainingUNet(model, flat, kernels)(torch.randn(1, *size, 3), torch.tensor([500]))
    y.backward(torch.randn_like(y))
    assert flat.grad.isfinite().all()
