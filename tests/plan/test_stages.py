"""Networks over short rows as stages: which there are, what they compute, and what has no place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.models.layers import Conv1d, ConvTranspose1d, GroupNorm, Linear
from diffusion.models.unet1d import UNet1d
from diffusion.plan.execute import run
from diffusion.plan.graph import PlanError
from diffusion.plan.inference1d import real_time_plan
from diffusion.plan.join.stages import stages
from diffusion.plan.launch.table import launcher_of
from diffusion.plan.ops import STAGED
from diffusion.plan.trace import trace
from diffusion.runtime.backend import Backend
from triton_kernels import fused_ops, reference
from triton_kernels.reference import fused
from triton_kernels.runtime.device import Device

GPU = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
EXACT = Backend("torch", reference, torch.float64)


def test_the_stages_of_a_policy():
    """A stage a convolution, but for the first, which its reader makes; 1x1 filters go along."""
    model = UNet1d(2, 10, 32, (32, 64, 128), backend=Backend("triton", fused_ops, torch.bfloat16))
    graph = real_time_plan(model, 2, 16, fused_ops, GPU).graph
    counts = graph.count()
    assert (counts["stage"], counts["head"], counts["project"]) == (28, 1, 2)
    found = [node for node in graph.nodes if node.op == "stage"]
    assert sum("skip" in node.inputs for node in found) == 2
    assert sum(node.attrs["side"] for node in found) == 4
    assert sum(node.attrs["transposed"] for node in found) == 2
    assert sum("columns" in node.attrs for node in found) == 12  # a FiLM a block
    # what somebody reads beside a convolution; of the first level nobody does: see `UNet1d`
    assert sum("kept" in node.outputs for node in found) == 8
    behind = [n.op for n in graph.nodes[graph.nodes.index(found[0]) :] if "weights" not in n.op]
    assert set(behind) == {"stage", "head", "slice", "cast"}, "nothing between them"
    assert {value.dtype for n in found for value in n.outputs.values()} == {torch.float32}
    assert {n.inputs["weight"].dtype for n in found} == {torch.bfloat16}


class Row(nn.Module):
    """No network of the framework: no skip connection, a norm behind every convolution, a FiLM of
    shifts alone."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change
        self.first = Conv1d(2, 16, 3, backend=EXACT)
        self.halve = Conv1d(16, 32, 5, stride=2, backend=EXACT)
        self.same = Conv1d(32, 32, 3, backend=EXACT)
        self.twice = ConvTranspose1d(32, backend=EXACT)
        self.last = Conv1d(32, 32, 1 if change == "a last stage of 1x1" else 3, backend=EXACT)
        self.wide = Conv1d(16, 32, 3, backend=EXACT)
        self.out = Conv1d(32, 2, backend=EXACT)
        self.film = Linear(6, 32, backend=EXACT)
        activation = "silu" if change == "another activation" else "mish"
        widths = (16, 32, 32, 32)
        self.norms = nn.ModuleList(
            [GroupNorm(4, c, activation=activation, backend=EXACT) for c in widths]
        )

    def forward(self, x, emb):
        shift = self.film(emb if self.change == "no mish" else F.mish(emb))[:, None, None, :]
        before = self.norms[1](self.halve(self.norms[0](self.first(x))))
        before = before * 2 if self.change == "a product" else before
        h = before + shift
        h = self.norms[2](self.same(h)) + (before if self.change == "half made" else h)
        if self.change == "two readers":
            h = self.norms[2](self.same(h)) + self.norms[2](self.twice(h)[:, :, ::2])
        h = self.twice(h)
        if self.change == "another shape":
            n, one, t, c = h.shape
            h = self.wide(self.last(h).view(n, one, 2 * t, c // 2))
        return self.out(self.norms[3](self.last(h)))


def staged(module: nn.Module, n: int, t: int):
    x = torch.randn(n, 1, t, 2, dtype=torch.float64)
    emb = torch.randn(n, 6, dtype=torch.float64)
    graph = trace(module, (x, emb), dtype=torch.float64).graph
    image, given = graph.inputs
    parameters = dict(module.named_parameters())
    stages(graph, parameters, fused, GPU, dtype=torch.float64, tf32=False)
    return graph, {image: x, given: emb}, (x, emb)


def test_another_network():
    module = Row().double()
    for p in module.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    graph, values, args = staged(module, 3, 8)
    assert graph.count()["stage"] == 4 and set(STAGED) <= set(graph.count())
    tensors = dict(module.named_parameters())
    values |= {v: tensors[name].detach() for name, v in graph.parameters.items()}
    values[graph.inputs[-1]] = None  # each sample has a row of its own
    with torch.no_grad():
        found = run(graph.nodes, values | graph.constants, launcher_of(fused))
        expected = module(*args)
    y = found[graph.outputs[0]]
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("another activation", "a norm that is not of a convolution, with Mish behind it"),
        ("a product", "affine has no place in a stage"),
        ("half made", "the residual of a block is a tensor that no stage keeps"),
        ("no mish", "linear of something that is no Mish"),
        ("another shape", "a convolution under another shape"),
        ("two readers", "two convolutions of one activation"),
        ("a last stage of 1x1", "a 1x1 convolution that is not beside another"),
    ],
)
def test_what_has_no_place(change, said):
    with pytest.raises(PlanError) as error:
        staged(Row(change).double(), 2, 8)
    assert said in str(error.value)
    assert ".py:" in str(error.value)
