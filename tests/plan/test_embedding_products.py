"""Products of an image with an embedding, where no norm is, are one pass with what follows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.build import plan
from tests.plan.strangers import Embedded
from triton_kernels import fused_ops
from triton_kernels.registry.chips import chip


class Net(nn.Module):
    """Between two convolutions; `function` has the image, and two rows of the embedding."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first = function, nn.Conv2d(3, 8, 3, padding=1)
        self.last, self.emb = nn.Conv2d(8, 3, 3, padding=1), nn.Linear(5, 16)

    def forward(self, x, emb):
        g, b = self.emb(emb)[:, :, None, None].chunk(2, dim=1)
        return self.last(self.function(self.first(x), g, b))


ONE = {
    "EDM2": lambda y, g, b: F.silu(y * (g + 1)),
    "factors in the other order": lambda y, g, b: F.silu((g + 1) * y),
    "a shift, too": lambda y, g, b: F.gelu(b + y * g),
    "no activation": lambda y, g, b: y * (1 + g) + b,
    "one vector as both": lambda y, g, b: F.mish(y * g + g),
    "a sum read twice": lambda y, g, b: (lambda z: F.relu(z) + z)(y * g + b),
    "dropout behind it": lambda y, g, b: F.dropout(F.silu(y * g), 0.0),
}
NONE = {
    "a product alone": lambda y, g, b: y * g,
    "a sum, which the convolution adds": lambda y, g, b: F.silu(y + b),
    "a product read twice": lambda y, g, b: (lambda z: F.relu(z) + z)(y * g),
    "of pixels": lambda y, g, b: F.silu(y * y[:, :1]) + g + b,
    "of all images": lambda y, g, b: F.silu(y * g[:1]),
    "another shape": lambda y, g, b: F.silu(y[:, :, :1, :1] * g),
}


@pytest.mark.parametrize("name", ONE | NONE)
def test_is_one_pass(name):
    """And its results and gradients are the module's, of the embedding, too."""
    module = Net((ONE | NONE)[name]).double()
    args = tuple(
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((2, 3, 6, 5), (2, 5))
    )
    nodes = plan(module, args, trains=True).graph.count()
    assert nodes.get("norm_apply", 0) == (name in ONE)
    sources, found = [*module.parameters(), *args], []
    for net in (accelerate(module), module):
        y = net(*args)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        found.append((y, *torch.autograd.grad(y, sources, dy)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("trains", [False, True])
def test_in_16_bits_too(trains):
    """Where the embedding's row is cast to the table's type, and the image is not."""
    args, module = (torch.randn(2, 3, 8, 12), torch.randn(2, 6)), Embedded(16, 6).train(trains)
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, args, trains=trains, kernels=(fused_ops, chip("h100").gpu))
    nodes = [node for node in made.graph.nodes if node.op == "norm_apply"]
    assert len(nodes) == 3
    for node in nodes:
        assert node.out.dtype == torch.bfloat16 and node.inputs["table"].dtype == torch.float32
