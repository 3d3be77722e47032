"""The simulated arithmetic of `benchmarks.fp8_errors`."""

import torch
from torch import nn

from benchmarks.fp8_errors import E4M3, E5M2, Types, round_operands, rounded
from benchmarks.harness import relative_error


def test_rounding_keeps_as_many_bits_as_the_type_has():
    x = torch.randn(4, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    for dtype, bits in ((E4M3, 3), (E5M2, 2), (torch.bfloat16, 7)):
        large = x.abs() > 0.1  # smaller ones are subnormal, once they are scaled
        error = ((rounded(x, dtype) - x) / x)[large].abs().max().item()
        assert 2.0 ** -(bits + 2) < error <= 2.0 ** -(bits + 1)
    scaled = x * torch.tensor([1.0, 1e3, 1e-3, 1.0]).view(-1, 1, 1, 1)  # each by its own scale
    assert relative_error(rounded(scaled, E4M3, by=0)[2], scaled[2]) < 0.04


def test_a_convolution_multiplies_what_is_rounded():
    """Forward with rounded operands; both gradients from their own, the bias as it is."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(16, 24, 3, padding=1), torch.randn(2, 16, 6, 5, requires_grad=True)
    inputs = x, layer.weight, layer.bias
    y = layer(x)
    dy = torch.randn_like(y)
    exact = y, *torch.autograd.grad(y, inputs, dy)

    def errors(types: Types) -> list[float]:
        round_operands(layer, types)
        y = layer(x)
        got = y, *torch.autograd.grad(y, inputs, dy)
        return [relative_error(a, b) for a, b in zip(got, exact, strict=True)]

    low, forward, saved, dx = map(
        errors, (Types(), Types(x=E4M3), Types(saved=E4M3), Types(dy=E4M3))
    )
    assert max(low) < 4e-3
    for i, wrong in enumerate((forward, dx, saved)):  # y, dx, dw
        assert [w > 5 * e for w, e in zip(wrong[:3], low[:3], strict=True)] == [
            i == k for k in range(3)
        ]
