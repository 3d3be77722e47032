"""Evaluations whose neighbours share launches compute what the module does, on the reference."""

from functools import partial

import pytest
import torch

from diffusion.plan.build import plan
from diffusion.plan.execute import launch_reference, run
from diffusion.plan.graph import JOINED
from tests.plan.compare import in_float64
from tests.plan.networks import NAMES, network
from triton_kernels.reference import fused
from triton_kernels.runtime.device import Device

GPU = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)


@pytest.mark.parametrize("name", NAMES)
def test_networks(name):
    module, args, kwargs = network(name)
    module = in_float64(module).eval()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    made = plan(module, args, kwargs, joins=(fused, GPU))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values = dict(zip(made.graph.inputs, made.traced.leaves(args, kwargs), strict=True))
    values |= made.graph.constants
    values |= {v: tensors[name].detach() for name, v in made.graph.parameters.items()}
    launch = partial(launch_reference, kernels=fused)
    with torch.no_grad():
        expected = module(*args, **kwargs)
        run(made.schedule.nodes, values, made.schedule.last, launch)
    y = made.traced.assemble([values[v] for v in made.graph.outputs])
    y, expected = (v if torch.is_tensor(v) else v[0] for v in (y, expected))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    if any(node.op == "norm_of_sums" for node in made.graph.nodes):
        assert set(made.graph.count()) & set(JOINED)


def test_casts_of_parameters_are_one_node():
    module = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    x = torch.randn(1, 8, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, (x,), trains=True)
    (casts,) = [node for node in made.graph.nodes if node.op == "casts"]
    assert len(casts.inputs) == 3 and made.schedule.nodes[0] is casts
    assert made.schedule.start == len(made.schedule.forward)
    assert all(node.op != "conv_dw" for node in made.schedule.forward)
