"""The norm of a gradient that is completed bit by bit."""

import pytest
import torch
from torch import nn

import triton_kernels
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.training import gradient_norm
from diffusion.training.gradient_norm import GradientNorm
from triton_kernels.optimizer import adamw

TRITON = Backend("triton", triton_kernels)


@pytest.fixture
def flat(device):
    convs = [nn.Conv2d(16, 32, 3, bias=i > 0) for i in range(4)]  # 4608 elements each
    return FlatParameters(nn.Sequential(nn.Linear(8, 16), *convs).to(device))


def fill(flat: FlatParameters, step: int) -> None:
    flat.grad.copy_(torch.randn(flat.grad.shape, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("least", [1, 5000])
@pytest.mark.parametrize("starts", [(), (9216,), (13824, 9216, 4700, 4608), (4096, 0), (0,)])
def test_the_same_bits_whatever_was_summed_when(starts, least, flat, monkeypatch):
    monkeypatch.setattr(gradient_norm, "_LEAST", least)
    norm, complete = GradientNorm(flat, TRITON), flat.grad.clone()
    for step in range(2):
        fill(flat, step)
        complete.copy_(flat.grad)
        expected = adamw.grad_norm(complete)
        norm.begin()
        flat.grad[:] = torch.nan
        for start in starts:
            part = slice(start, flat.filters_end)
            flat.grad[part] = complete[part]
            norm.ready(start)
        flat.grad.copy_(complete)
        assert torch.equal(norm.finish(), expected)


def test_what_an_interrupted_step_had_summed_is_forgotten(flat, monkeypatch):
    monkeypatch.setattr(gradient_norm, "_LEAST", 1)
    norm = GradientNorm(flat, TRITON)
    fill(flat, 0)
    norm.ready(0)
    fill(flat, 1)
    norm.begin()
    assert torch.equal(norm.finish(), adamw.grad_norm(flat.grad))


def test_pytorch_takes_all_at_once(flat):
    norm = GradientNorm(flat, TORCH_FP32)
    fill(flat, 0)
    norm.begin()
    norm.ready(0)
    fill(flat, 1)
    torch.testing.assert_close(norm.finish()[0], flat.grad.norm())
