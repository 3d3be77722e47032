"""`run_backward` beside PyTorch's own."""

import pytest
import torch
from torch.autograd import Variable

from diffusion.runtime.backward import run_backward


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(2)]


def gradients(leaves, backward):
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)  # which gradients are added to
    a, b = leaves
    backward((a * b.sin()).sum(1), torch.arange(3.0))
    return [leaf.grad for leaf in leaves]


def test_gradients_are_those_of_pytorch(leaves):
    expected = gradients(leaves, torch.autograd.backward)
    assert all(map(torch.equal, gradients(leaves, run_backward), expected))


def test_pytorch_without_the_engines_name_is_asked_itself(leaves, monkeypatch):
    asked = []
    monkeypatch.delattr(Variable, "_execution_engine")
    monkeypatch.setattr(torch.autograd, "backward", lambda y, dy: asked.append((y.shape, dy.shape)))
    gradients(leaves, run_backward)
    assert asked == [((3,), (3,))]


def test_another_shape_is_refused(leaves):
    with pytest.raises(ValueError, match=r"\[4\] of a tensor \[3\]"):
        run_backward(leaves[0].sum(1), torch.ones(4))
