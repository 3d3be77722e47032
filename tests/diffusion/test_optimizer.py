"""Optimizer settings as functions of the step; the update against PyTorch's."""

import copy
import math

import pytest
import torch
from torch import nn

import triton_kernels
from diffusion.errors import ConfigError
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.training.optimizer import Optimizer, OptimizerSettings


def test_lr_warms_up_linearly_then_stays():
    s = OptimizerSettings(lr=1.0, warmup=4)
    assert [s.lr_at(k, 100) for k in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_lr_decays_to_zero():
    for decay in ("cosine", "linear"):
        s = OptimizerSettings(lr=1.0, warmup=0, decay=decay)
        assert s.lr_at(0, 10) == 1.0
        assert s.lr_at(5, 10) == pytest.approx(0.5)
        assert s.lr_at(10, 10) == pytest.approx(0.0, abs=1e-12)


def test_ema_is_short_at_first():
    s = OptimizerSettings(ema_decay=0.99)
    assert s.ema_decay_at(0) == pytest.approx(0.1)
    assert s.ema_decay_at(10**6) == 0.99
    assert OptimizerSettings(ema_decay=0.99, ema_warmup=False).ema_decay_at(0) == 0.99


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1),
        ("lr", "fast"),
        ("lr", math.inf),
        ("eps", 0),
        ("ema_decay", 1.5),
        ("betas", [0.9]),
        ("decay", "cosin"),
        ("more_ema", [1.0]),
    ],
)
def test_wrong_settings_are_named(key, value):
    with pytest.raises(ConfigError, match=f"optim.{key}"):
        OptimizerSettings(**{key: value})


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_fifty_steps_equal_torch_adamw(clip_norm):
    """Given the same gradients, at most twice as far from float64 as PyTorch's own float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    theirs, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.1, warmup=0, clip_norm=clip_norm)
    flat = FlatParameters(model)
    ours = Optimizer(flat, settings, TORCH_FP32)
    twins = [
        (m, torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, betas=settings.betas))
        for m in (theirs, exact)
    ]
    for step in range(50):
        gradients = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        for name, view in flat.views(flat.grad).items():
            view.copy_(gradients[name])
        ours.load(step, 50)
        ours.update()
        for m, optimizer in twins:
            for name, p in m.named_parameters():
                p.grad = gradients[name].to(p.dtype)
            if clip_norm:
                nn.utils.clip_grad_norm_(m.parameters(), clip_norm)
            optimizer.step()

    def distance(m: nn.Module) -> float:
        pairs = zip(m.parameters(), exact.parameters(), strict=True)
        return max((p.double() - q).abs().max().item() for p, q in pairs)

    assert distance(model) <= 2 * distance(theirs)


def test_a_non_finite_gradient_leaves_everything_and_is_counted():
    flat = FlatParameters(nn.Linear(3, 3))
    before = [x.clone() for x in (flat.param, flat.exp_avg, flat.exp_avg_sq, flat.ema)]
    optimizer = Optimizer(flat, OptimizerSettings(), TORCH_FP32)
    flat.grad.fill_(1.0)
    flat.grad[0] = float("nan")
    optimizer.load(0, 10)
    optimizer.update()
    for x, was in zip((flat.param, flat.exp_avg, flat.exp_avg_sq, flat.ema), before, strict=True):
        assert torch.equal(x, was)
    assert optimizer.skipped.item() == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_further_averages(device):
    """Of any length, with the same warm-up; a step that is left out does not count for them."""
    settings = OptimizerSettings(lr=1e-2, warmup=0, more_ema=[0.5, 0.9])
    flat = FlatParameters(nn.Linear(5, 3).to(device))
    optimizer = Optimizer(flat, settings, Backend("triton", triton_kernels))
    expected = {decay: flat.param.double() for decay in settings.more_ema}
    for step in range(6):
        flat.grad.copy_(torch.randn(flat.grad.shape))
        flat.grad[0] = math.inf if step == 3 else 1.0
        optimizer.load(step, 6)
        optimizer.update()
        for decay, average in expected.items() if step != 3 else ():
            average.lerp_(flat.param.double(), 1 - min(decay, (1 + step) / (10 + step)))
    assert list(flat.averages) == [0.5, 0.9] and optimizer.skipped.item() == 1
    for decay, average in flat.averages.items():
        torch.testing.assert_close(average.double(), expected[decay], rtol=1e-5, atol=1e-6)
        assert not torch.equal(average, flat.ema)
