"""Calls of each element that stay PyTorch's: where their results lie, and quotients in 16 bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.trace import trace
from tests.plan.compare import compare

OF_TWO = {
    "lerp": lambda y, z, w: torch.lerp(y, z, 0.3),
    "where": lambda y, z, w: torch.where(y > z, y, z.sin()),
    "maximum": lambda y, z, w: torch.maximum(y, z) - torch.minimum(y, w),
    "a power": lambda y, z, w: torch.pow(y.abs() + 1, z),
    "a row": lambda y, z, w: torch.lerp(y, w, z.sigmoid()),
    "a mask": lambda y, z, w: y.masked_fill(w > 0, 0.5),
    "angles": lambda y, z, w: torch.atan2(y, z.exp()),
    "of one": lambda y, z, w: F.hardswish(y) + F.prelu(z, w.flatten()),
    "another order": lambda y, z, w: torch.lerp(y, z.transpose(2, 3).contiguous().mT, 0.3),
}


class OfTwo(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.last, self.row = nn.Conv2d(4, 3, 3), nn.Parameter(torch.randn(1, 4, 1, 1))
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x), self.second(x), self.row))


@pytest.mark.parametrize("name", OF_TWO)
def test_results_lie_as_the_tensors_they_are_of(name):
    """Between two convolutions nothing is copied into another order."""
    torch.manual_seed(0)
    module, x = OfTwo(OF_TWO[name]).double(), torch.randn(2, 3, 7, 7, dtype=torch.float64)
    compared = compare(module, (x,))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    graph = trace(module, (x,)).graph
    assert graph.count()["layout"] == 2  # of the image and of the result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quotients_in_16_bits_are_rounded_once(dtype):
    """1 / b has another rounding, and in float16 is infinite for small b."""

    class Quotient(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.tensor([1e-6, 0.3, 7.0]).to(dtype))

        def forward(self, a):
            return a / self.b

    torch.manual_seed(0)
    module, a = Quotient(), ((torch.rand(5, 3) + 0.5) * torch.tensor([1e-6, 1, 1])).to(dtype)
    a.requires_grad_()
    found = []
    for net in (module, accelerate(module)):
        y = net(a)
        found.append((y, *torch.autograd.grad(y, (a, module.b), torch.full_like(y, 1e-3))))
    assert found[0][0].isfinite().all()
    (*each, of_b), (*ours, ours_of_b) = found
    assert all(map(torch.equal, each, ours))
    eps = torch.finfo(dtype).eps
    # sums of five; that of the smallest b is no number of float16
    torch.testing.assert_close(ours_of_b[1:], of_b[1:], rtol=2 * eps, atol=0)
