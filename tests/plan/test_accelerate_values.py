"""Modules by accelerate that are given and return more than tensors: dataclasses and objects."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from diffusion import accelerate
from diffusion.plan.graph import PlanError


@dataclass
class Pair:
    image: object
    scale: object = 1.0


class OfPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, other):
        y = self.conv(x.image) * x.scale
        if isinstance(other, list):
            return Pair([y, Pair(other)], "words")
        return torch.distributions.Normal(y, 1.0, validate_args=False) if other is None else y


def test_dataclasses_are_read_and_made():
    module, x = OfPairs(), torch.randn(2, 3, 5, 5)
    fast = accelerate(module)
    for scale in (2.0, torch.full((1, 4, 1, 1), 3.0)):
        made, expected = (net(Pair(x, scale), [x]) for net in (fast, module))
        assert torch.allclose(made.image[0], expected.image[0], atol=1e-5)
        assert torch.equal(made.image[1].image[0], x) and made.scale == "words"


def test_objects_that_have_tensors_are_refused():
    fast, x = accelerate(OfPairs()), Pair(torch.randn(2, 3, 5, 5))
    with pytest.raises(PlanError, match="the result has tensors in a Normal"):
        fast(x, None)
    with pytest.raises(PlanError, match="an argument is a Normal with tensors in it"):
        fast(x, torch.distributions.Normal(0.0, 1.0))


class Named(dict):
    """Whose keys are attributes, too."""

    __getattr__ = dict.get


def test_dicts_of_a_class_of_their_own_are_refused():
    class Called(nn.Module):
        def forward(self, x):
            return Named(image=x.image * 2) if isinstance(x, Named) else Named(image=x * 2)

    x = torch.ones(2, 3)
    with pytest.raises(PlanError, match="the result has tensors in a Named.*; return"):
        accelerate(Called())(x)
    with pytest.raises(PlanError, match="an argument is a Named with tensors in it"):
        accelerate(Called())(Named(image=x))


def test_an_argument_that_has_changed_has_another_plan():
    class Twice(nn.Module):
        def forward(self, x, options):
            return x * options.scale

    options = type("Options", (), {})()
    fast, x = accelerate(Twice()), torch.ones(2)
    for options.scale in (2.0, 3.0):
        assert torch.equal(fast(x, options), x * options.scale)


def test_results_say_where_and_how_large_they_are():
    class Said(nn.Module):
        def forward(self, x, size):
            return x.shape, x.device, size.numel() * x

    x = torch.ones(2, 3)
    shape, device, y = accelerate(Said())(x, x.shape)
    assert type(shape) is torch.Size and shape == x.shape and device == x.device
    assert torch.equal(y, 6 * x)
