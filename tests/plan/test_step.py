"""A training step by plan: outputs and gradients against autograd in float64, and what it launches
and keeps."""

import copy

import pytest
import torch

from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.run import TrainingUNet
from tests.diffusion.test_fused_unet import MODELS, ODD, make
from triton_kernels.reference import fused as fused_reference

CASES = {name: (options, (8, 12)) for name, options in MODELS.items()} | ODD


def network(model, **options):
    flat = FlatParameters(model, together=TOGETHER)
    return flat, TrainingUNet(model, flat, fused_reference, **options)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(("options", "size"), CASES.values(), ids=CASES)
def test_output_and_every_gradient(options, size, recompute):
    model = make(options, size)
    twin = copy.deepcopy(model)
    flat, planned = network(model, recompute=recompute)
    x, t = torch.randn(2, *size, 3).double(), torch.tensor([3, 700])
    labels = torch.tensor([2, 0]) if model.num_classes else None
    draws = {"rng": torch.tensor([5, 11]), "first": 7}
    y = planned(x, t, labels, **draws)
    expected = twin.forward_nhwc(x, t, labels, **draws)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    grads = flat.views(flat.grad)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-8, atol=1e-9, msg=name)


def test_another_first_sample_needs_no_other_plan():
    model = make(MODELS["dropout"])
    twin = copy.deepcopy(model)
    _, planned = network(model)
    x, t, rng = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700]), torch.tensor([5, 11])
    for first in (0, 4):
        y = planned(x, t, rng=rng, first=first)
        torch.testing.assert_close(y, twin.forward_nhwc(x, t, rng=rng, first=first))
    assert len(planned._plans) == 1
