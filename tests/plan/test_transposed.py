"""Filters that input gradients in TF32 read transposed are copied by one launch of a backward pass.
Here the interpreter multiplies float32, so the bits are those of float32 products."""

import pytest
import torch
from torch import nn

import triton_kernels
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan import build, transposed
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.launch.products import asked
from diffusion.plan.launch.table import launch_kernels
from diffusion.plan.planned import Planned
from diffusion.plan.step import plan as step
from diffusion.plan.step.network import TrainingUNet
from diffusion.runtime.backend import Backend
from tests.diffusion.test_fused_unet import make
from triton_kernels import fused_ops
from triton_kernels.conv.plain import tma, transpose_weights
from triton_kernels.fused_tf32 import in_tf32
from triton_kernels.registry import choose
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import describe


@pytest.fixture
def counted(monkeypatch):
    """How many filters each launch has copied."""
    found = []
    one, together = transpose_weights.transpose_weights, transpose_weights.transposed_filters

    def each(weight, parts):
        found.append(1)
        return one(weight, parts)

    def several(weights):
        before = len(found)
        made = together(weights)
        found[before:] = [len(weights)] * (1 + len(found) - before)
        return made

    monkeypatch.setattr(transpose_weights, "transpose_weights", each)
    monkeypatch.setattr(fused_ops, "transposed_filters", several)
    return found


def one_by_one(monkeypatch):
    """Plans without copies that are made before."""
    for module in (build, step):
        monkeypatch.setattr(module, "transposed_together", lambda graph, nodes, gpu: list(nodes))


def test_a_step_copies_all_at_once(counted, device, monkeypatch):
    """In front of backward, and its gradient has the same bits as with a copy in front of each
    input gradient."""
    monkeypatch.setattr(choose, "_decided", {})
    monkeypatch.setattr(tma, "_TRANSPOSE_FROM", 64)  # pixels, so that the interpreter takes seconds
    options = {"model_channels": 16, "num_res_blocks": 1, "channel_mult": (1,)}
    options |= {"attention_resolutions": (), "num_head_channels": 16}
    backend = Backend("triton", triton_kernels, torch.float32, allow_tf32=True)

    def gradient():
        torch.manual_seed(0)
        network = make(options | {"backend": backend}, (8, 8)).float().to(device)
        flat = FlatParameters(network, together=TOGETHER)
        planned = TrainingUNet(network, flat, in_tf32(fused_ops), recompute=True)
        x, t = torch.randn(1, 8, 8, 3, device=device), torch.tensor([500], device=device)
        y = planned(x, t)
        y.backward(torch.randn_like(y))
        (made,) = planned.plans.values()
        return flat.grad.clone(), made.schedule.backward

    grad, moves = gradient()
    first = next(move for move in moves if move.nodes)
    assert [node.op for node in first.nodes] == ["transposed_filters"] and not first.stream
    (copies,) = counted
    assert copies > 3
    counted.clear()
    one_by_one(monkeypatch)
    assert torch.equal(gradient()[0], grad)
    assert counted == [1] * copies and grad.isfinite().all()


class Block(nn.Module):
    """Of 1x1 filters, of those of 3x3 in PyTorch's order, and of some that halve the image."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)
        self.point, self.down = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 32, 3, 2, 1)

    def forward(self, x):
        return self.down(self.point(self.conv(self.norm(x).relu())))


def test_a_call_of_accelerate_copies_what_the_parameters_are(counted, device, monkeypatch):
    """Anew in each backward pass, from what its forward pass has rounded."""
    module = Block().to(device)
    x = torch.randn(1, 32, 32, 32, device=device, requires_grad=True)

    def gradients():
        options = {"trains": True, "kernels": (fused_ops, describe(device)), "rounds": True}
        made = build.plan(module, (x,), **options)
        found = []
        for scale in (1, 2):
            with torch.no_grad():
                tensors = [scale * p for p in map(module.get_parameter, made.graph.parameters)]
            tensors = [p.requires_grad_() for p in tensors]
            (y,) = Planned.apply(made, launch_kernels, None, 1, x, *tensors)
            found += torch.autograd.grad(y.float().sum(), tensors)
        return made, found

    made, grads = gradients()
    ops = [node.op for move in made.schedule.backward for node in move.nodes]
    assert ops[0] == "transposed_filters" and ops.count("transposed_filters") == 1
    assert len(set(counted)) == 1 and len(counted) == 2, counted
    one_by_one(monkeypatch)
    others = gradients()[1]
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


@pytest.mark.parametrize(
    ("dtype", "tf32"), [("bfloat16", True), ("float16", True), ("float32", False)]
)
def test_other_precisions_copy_nothing(dtype, tf32):
    module, x = Block().to(getattr(torch, dtype)), torch.empty(4, 32, 32, 32)
    options = {"trains": True, "kernels": (fused_ops, chip("h200").gpu), "tf32": (tf32, tf32)}
    made = build.plan(module, (x.to(getattr(torch, dtype)),), **options)
    assert "transposed_filters" not in made.graph.count()


def test_which_are_copied(monkeypatch):
    """What the kernels that are taken read, and no large filters."""
    module, x = Block(), torch.empty(4, 32, 32, 32)
    options = {"trains": True, "of_inputs": (0,), "rounds": True}

    def copied(gpu):
        made = build.plan(module, (x,), kernels=(fused_ops, chip(gpu).gpu), **options)
        nodes = [node for node in made.graph.nodes if "transposed" in node.inputs]
        assert all(asked(node) is not None for node in nodes)
        return [node.inputs["weight"].shape for node in nodes]

    assert (32, 32, 3, 3) in copied("h200")
    assert copied("a100") == []  # which has no wgmma
    monkeypatch.setattr(transposed, "MOST", 32 * 32 * 9 * 4 - 1)
    assert (32, 32, 3, 3) not in copied("h200")
