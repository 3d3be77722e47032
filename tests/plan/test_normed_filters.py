"""Filters that a norm makes (EDM2) are read, normed and written in the order in which they lie."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.calls.dry_passes import dry_passes, starts
from diffusion.plan.dry_run import nothing_launched
from diffusion.plan.launch.table import launcher_of
from tests.plan.strangers import Magnitudes
from triton_kernels import fused_ops
from triton_kernels.registry.chips import chip

IMAGES = 2, 3, 8, 12


class Copies(TorchDispatchMode):
    """The shapes of filters that PyTorch copies, or a kernel."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        ops = torch.ops.aten
        if function._overloadpacket in (ops.copy_, ops.clone, ops._to_copy):
            if 3 in made.shape[1:3] and len(made.shape) == 4:
                self.found.append(tuple(made.shape))
        return made

    def reorder(self, x, out):
        self.found.append(tuple(x.shape))


@pytest.mark.parametrize(("lie_as_read", "copies"), [(True, 0), (False, 2)])
def test_no_filters_are_copied_that_lie_as_products_read_them(lie_as_read, copies, monkeypatch):
    """Of others each is copied once for all products, and once its gradient."""
    module, gpu = Magnitudes(64), chip("h100")
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, (torch.randn(IMAGES),), trains=True, kernels=(fused_ops, gpu.gpu))
    values = starts(made)
    order = torch.channels_last if lie_as_read else torch.contiguous_format
    for value in made.graph.parameters.values():
        if len(value.shape) == 4:
            values[value] = values[value].contiguous(memory_format=order)
    counted = Copies()
    monkeypatch.setattr(fused_ops, "reorder", counted.reorder)
    with nothing_launched(gpu.gpu), counted:
        dry_passes(made, values, launcher_of(fused_ops))
    inner = [shape for shape in counted.found if sorted(shape) == [3, 3, 64, 64]]
    assert len(inner) == 2 * copies  # there are two layers with 3x3 filters and 64 channels


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_results_and_gradients(order):
    """The gradient in float32 of filters that products read in 16 bits is not rounded."""
    torch.manual_seed(0)
    module, x = Magnitudes(16).to(memory_format=order), torch.randn(IMAGES)
    exact = copy.deepcopy(module).double()
    found = []
    for net, low in ((exact, False), (accelerate(exact), False), (module, True)):
        found.append(_output_and_gradients(net, x, low))
    found.append(_output_and_gradients(accelerate(module), x, True))
    for right, same, theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(same, right, rtol=1e-9, atol=1e-9)
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


def _output_and_gradients(net, x, low):
    parameters = list(net.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        y = net(x.to(parameters[0].dtype))
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = torch.autograd.grad(y, parameters, seed.to(y.dtype))
    for p, grad in zip(parameters, grads, strict=True):
        assert grad.dtype == p.dtype and grad.shape == p.shape
    return [t.double() for t in (y, *grads)]
