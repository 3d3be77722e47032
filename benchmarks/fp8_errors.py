"""How wrong gradients are whose convolutions multiply 8-bit numbers, beside 16-bit ones.

    python -m benchmarks.fp8_errors [key=value ...]

    model=unet64     configs/model
    batch=2          images
    device=cpu       or cuda

The arithmetic is simulated, on any device: operands are rounded, products are summed in float32,
and results are rounded to bf16. What is rounded to 8 bits is first scaled to the largest number of
the type, by its largest magnitude: an image or a gradient as a whole, filters by output channel (by
input channel in input gradients). Weight gradients multiply dy in bf16 by what is saved of x, for
`wgmma` transposes no 8-bit operands. Convolutions of fewer than 16 channels stay in bf16.

Errors are relative to the same network in float32, in the norm: the output's, and the gradient's,
all parameters as one vector. Layers that begin as zeros get random numbers, as if trained.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.cases import images_of
from benchmarks.steps import baseline_model, random_labels

DEFAULTS = {"model": "unet64", "batch": 2, "device": "cpu"}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FEWEST = 16  # channels


class Types(NamedTuple):
    """What operands are rounded to."""

    x: torch.dtype = torch.bfloat16
    saved: torch.dtype = torch.bfloat16  # x of weight gradients
    dy: torch.dtype = torch.bfloat16  # of input gradients


E4M3, E5M2 = _FP8
WAYS = {
    "bf16": Types(),
    "forward in e4m3": Types(x=E4M3),
    "input gradients in e4m3": Types(dy=E4M3),
    "input gradients in e5m2": Types(dy=E5M2),
    "saved images in e4m3": Types(saved=E4M3),
    "all three in e4m3": Types(E4M3, E4M3, E4M3),
}


def rounded(x: Tensor, dtype: torch.dtype, by: int | None = None) -> Tensor:
    """To a type and back, scaled as a whole or by dimension `by`."""
    if dtype not in _FP8:
        return x.to(dtype).float()
    others = [i for i in range(x.ndim) if i != by]
    largest = x.abs().amax(others, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.finfo(dtype).max / largest
    return (x * scale).to(dtype).float() / scale


class _Conv(torch.autograd.Function):
    """A convolution without bias of float32 tensors, whose operands are rounded."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: nn.Conv2d, types: Types) -> Tensor:
        ctx.save_for_backward(rounded(x, types.saved), weight)
        ctx.layer, ctx.types = layer, types
        x, weight = rounded(x, types.x), rounded(weight, types.x, by=0)
        return F.conv2d(x, weight, None, layer.stride, layer.padding).bfloat16().float()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        padding, types = (ctx.layer.stride, ctx.layer.padding), ctx.types
        filters = rounded(weight, E4M3 if types.dy in _FP8 else types.dy, by=1)
        dx = nn.grad.conv2d_input(x.shape, filters, rounded(dy, types.dy), *padding)
        dw = nn.grad.conv2d_weight(x, weight.shape, rounded(dy, torch.bfloat16), *padding)
        return dx.bfloat16().float(), dw, None, None


def round_operands(network: nn.Module, types: Types) -> None:
    """Let the convolutions of a network round what they multiply."""

    def forward(layer: nn.Conv2d, x: Tensor) -> Tensor:
        few = min(layer.in_channels, layer.out_channels) < _FEWEST
        y = _Conv.apply(x, layer.weight, layer, Types() if few else types)
        return y if layer.bias is None else y + layer.bias.view(1, -1, 1, 1)

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.forward = forward.__get__(layer)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    model, batch, device = settings["model"], settings["batch"], torch.device(settings["device"])
    images, generator = images_of(model), torch.Generator(device).manual_seed(1)
    shape = batch, images.channels, images.size, images.size
    x = torch.randn(shape, device=device, generator=generator)
    t = torch.randint(1000, (batch,), device=device, generator=generator)
    network = baseline_model(model, device).eval()
    for weight in network.parameters():
        if weight.ndim > 1 and not weight.any():
            nn.init.normal_(weight, 0, 0.5 / weight[0].numel() ** 0.5, generator=generator)
    labels = random_labels(network.num_classes, batch, device)
    weights = list(network.parameters())

    def output_and_gradient() -> tuple[Tensor, Tensor]:
        y = network(x, t, labels)
        dy = torch.randn(y.shape, device=device, generator=generator.manual_seed(2))
        return y.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(y, weights, dy)])

    exact = output_and_gradient()
    for name, types in WAYS.items():
        round_operands(network, types)
        got = output_and_gradient()
        errors = [harness.relative_error(*pair) for pair in zip(got, exact, strict=True)]
        print("{}: output {:.1e}, gradient {:.1e}".format(name, *errors), flush=True)
    return 0


if __name__ == "__main__":
    harness.run_entry(main)
