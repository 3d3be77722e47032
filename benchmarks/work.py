"""What the ops of a planned step cannot do without, of training or of sampling: bytes to move,
products to add up.

The ops of a step are noted while it runs once. Each moves the tensors that it is given and those
that it returns, once; nothing is said of what its kernels do beside (partial sums, tensors that are
fetched twice). A convolution in parts counts as what they add up to.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import triton_kernels
from diffusion.training import gradient_norm
from triton_kernels import fused_ops as fused
from triton_kernels.reductions.conv_parts import SplitConv

_FAMILIES = {
    "conv fwd": (
        "conv_forward",
        "conv_few",
        "conv_norm",
        "norm_conv",
        "conv_split",
        "conv_down",
        "conv_upsampled",
        "conv_of_upsampled",
        "conv2d",
    ),
    "conv dgrad": (
        "conv_input_grad",
        "conv_plain_input_grad",
        "conv2d_input_grad",
        "conv_down_input_grad",
        "conv_upsampled_input_grad",
        "conv_of_upsampled_input_grad",
    ),
    "conv wgrad": (
        "conv_weight_grad",
        "conv_weight_grads",
        "linear_grads",
        "bias_grad",
        "tensor_rows",
    ),
    "attention": (
        "attention_forward",
        "projected_attention",
        "attention_backward",
        "linear_attention_forward",
        "linear_attention_backward",
        "cross_attention_forward",
        "cross_attention_backward",
    ),
    "resample": (
        "avg_pool",
        "avg_pool_grad",
        "upsample",
        "upsample_grad",
        "resample_parts",
        "fir",
    ),
    "elementwise": (
        *("pad_channels", "sinusoids", "begin_step", "upsampled_filters"),
        *("gated_forward", "gated_backward"),
    ),
    "denoise": ("draw_timesteps", "draw_flips", "q_sample", "denoise_loss", "gather_images"),
    "optimizer": ("grad_norm", "adamw_step", "square_sums"),
}
_FAMILY_OF = {op: family for family, ops in _FAMILIES.items() for op in ops}
_REWRITTEN = {  # arguments that are read and written
    "adamw_step": (0, 2, 3, 4),
    "conv_weight_grad": (2,),
    "linear_grads": (3, 4),
}
_PRODUCTS = {"attention_forward": 2, "attention_backward": 5}  # T x T x d
_OF_HEADS = {"linear_attention_forward": 2, "linear_attention_backward": 4}  # T x d x d
# T x L x d, and where kv is among the arguments
_CROSS_PRODUCTS = {"cross_attention_forward": (2, 1), "cross_attention_backward": (5, 2)}


class Work(NamedTuple):
    """Of one call of an op."""

    family: str  # as in `benchmarks.profile`
    bytes: int
    flops: int

    def floor_us(self, bandwidth: float, peak: float) -> float:
        """Microseconds at so many TB/s and TFLOP/s, whichever takes longer."""
        return max(self.bytes / bandwidth, self.flops / peak) / 1e6


@contextmanager
def noted_work(
    around: Callable[[str, tuple], AbstractContextManager] | None = None,
) -> Iterator[list[Work]]:
    """The calls inside of the block, of the planned kernels, the optimizer and the public ops; of
    ops that are made of others the outer one. Each is made inside of `around(name, args)`."""
    calls: list[Work] = []
    under_way: list[str] = []

    def noted(name: str, op: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = around is not None and not under_way
            under_way.append(name)
            try:
                with around(name, args) if outer else nullcontext():
                    result = op(*args, **kwargs)
            finally:
                under_way.pop()
            if not under_way:
                calls.append(work_of(name, args, kwargs, result))
            return result

        return call

    with ExitStack() as stack:
        for module in (fused, triton_kernels):
            for name, op in list(vars(module).items()):
                if inspect.isfunction(op):
                    stack.enter_context(mock.patch.object(module, name, noted(name, op)))
        sums = noted("square_sums", gradient_norm.square_sums)
        stack.enter_context(mock.patch.object(gradient_norm, "square_sums", sums))
        yield calls


def work_of(name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> Work:
    """What this call of op `name` cannot do without."""
    index = kwargs.get("index")
    given = {x.data_ptr(): x for x in _tensors((args, list(kwargs.values()))) if x.numel()}
    moved = 0
    for x in given.values():
        used = 1.0
        if index is not None and x.ndim > 1 and len(x) != len(index):
            used = len(index) / len(x)  # a data set, of which a batch is read
        moved += round(x.nbytes * used)
    if name == "conv_split":
        moved += result[0].numel() * args[0].itemsize  # of parts that are added up
    elif name == "norm_single_cta" and isinstance(args[0], Tensor):
        moved += result[0].nbytes  # the other is what was given
    else:
        moved += sum(x.nbytes for x in _tensors(result))
    moved += sum(args[i].nbytes for i in _REWRITTEN.get(name, ()))
    if name == "conv_weight_grads":
        moved += sum(out.nbytes for _, _, out in args)
    moved = round(moved * _share(name, args))
    return Work(_FAMILY_OF.get(name, "norm"), moved, _flops(name, args, kwargs, result))


def _share(name: str, args: tuple) -> float:
    """Of what an op is given, the part that it has to do with."""
    if name == "square_sums":
        _, sums, _, count = args
        return count / len(sums)
    return 1.0


def _flops(name: str, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    if name in _PRODUCTS:
        n, t, c = args[0].shape  # of forward: [N, T, 3C], of backward: [N, T, C]
        c = c if name == "attention_backward" else c // 3
        return _PRODUCTS[name] * 2 * n * t * t * c
    if name in _OF_HEADS:
        return _OF_HEADS[name] * 2 * args[0].numel() * args[0].shape[3]
    if name in _CROSS_PRODUCTS:
        products, at = _CROSS_PRODUCTS[name]
        return products * 2 * args[0].numel() * args[at].shape[1]
    if name == "projected_attention":  # and the products that make q, k and v
        n, t, c = args[0].shape
        return 2 * n * t * args[2].numel() + 4 * n * t * t * c
    if "of_upsampled" in name or name.startswith("conv_upsampled"):
        summed, others = args[1]  # the former four for each of 2x2 pixels
        large = args[0] if "grad" in name else result[0]
        return 2 * large.shape[:3].numel() * (summed.numel() // 4 + others.numel())
    if name in _FAMILIES["conv fwd"]:
        y = result[2] if name == "conv_norm" else next(_tensors(result))  # its y may be left out
        pixels = y[0, :, 0].numel() if name == "conv_split" else y.shape[:3].numel()
        extra = sum(weight.numel() for _, weight in kwargs.get("extra", ()))
        weight = args[3 if name == "norm_conv" else 1]
        return 2 * pixels * (weight.numel() + extra)
    if name in (*_FAMILIES["conv dgrad"], "skip_dx", "skip_backward"):
        return 2 * args[0].shape[:3].numel() * args[1].numel()
    if name in ("conv_weight_grad", "conv_weight_grads"):
        grads = args if name == "conv_weight_grads" else [args[:3]]
        return sum(2 * dy.shape[:3].numel() * out.numel() for _, dy, out in grads)
    if name == "linear_grads":
        return 2 * len(args[0]) * args[2].numel() * (1 if result is None else 2)
    return 0


def by_family(calls: list[Work]) -> dict[str, list[Work]]:
    """The calls of each family."""
    families = defaultdict(list)
    for call in calls:
        families[call.family].append(call)
    return families


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, SplitConv):
        yield torch.empty(value.shape, dtype=value.dtype, device="meta")
        yield from _tensors((value.bias, value.extra_bias, value.emb, value.residual))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
