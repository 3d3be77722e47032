"""The operations of a node's matrix products."""

import math

from ..graph import Node, Value

# of which each multiplies a gradient with all filters
INPUT_GRADS = (
    "conv_dx", "linear_dx", "conv_input_grad", "skip_dx", "conv_down_dx", "skip_backward",
)  # fmt: skip

_PRODUCTS = (  # which multiply each pixel with all filters
    *INPUT_GRADS, "conv", "linear", "conv_fused", "conv_down", "conv_few", "conv_split",
    "conv_norm", "norm_conv",
    "projected_attention", "head", "project",
)  # fmt: skip


def flops_of(node: Node) -> int:
    """Of matrix products."""
    op, inputs, out = node.op, node.inputs, node.out
    if op in ("attention", "attention_grad"):
        o = inputs.get("dy", out)
        keys = next(inputs[role] for role in ("qkv", "kv", "k") if role in inputs)
        return (10 if "dy" in inputs else 4) * math.prod(keys.shape[1:-1]) * o.numel
    if op in ("linear_attention", "linear_attention_grad"):
        each = inputs.get("dy", out)
        return (8 if "dy" in inputs else 4) * each.numel * each.shape[-1] // node.attrs["heads"]
    if op in ("conv_dw", "linear_dw"):
        return 2 * _pixels(inputs["dy"]) * out.numel
    if op == "weight_grads":
        pairs = zip(node.many("dy"), node.outputs.values(), strict=True)
        return sum(2 * _pixels(dy) * y.numel for dy, y in pairs)
    if op == "stage":  # sums [..., N, C, T]
        _, n, _, t = out.shape
        return 2 * (n * t // 2 if node.attrs["transposed"] else n * t) * inputs["weight"].numel
    if "taps" in inputs:  # 4 of 16 are of a pixel in each of 4 places of a block
        pixels = _pixels(inputs.get("dy", inputs.get("a", inputs.get("x"))))
        small = pixels if op == "conv_of_upsampled" else pixels // 4
        return 2 * (small * inputs["taps"].numel + pixels * inputs["rest"].numel)
    if op not in _PRODUCTS:
        return 0
    each = inputs["weight"].numel + sum(value.numel for value in node.many("columns"))
    if op == "conv_split":  # parts [P, N, CO, pixels]
        _, n, _, pixels = out.shape
        return 2 * n * pixels * each
    flops = 2 * _pixels(inputs["dy"] if op in INPUT_GRADS else out) * each
    if op == "projected_attention":
        flops += 4 * math.prod(out.shape[1:-1]) * out.numel
    return flops


def _pixels(image: Value) -> int:
    return image.numel // image.shape[-1]
