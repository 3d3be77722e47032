"""A policy's training step, ours and PyTorch's, of a small network."""

import pytest
import torch

from benchmarks import policy, policy_step
from benchmarks.baseline_unet1d import ConditionalUnet1D
from benchmarks.harness import WrongResult
from diffusion.models.unet1d import UNet1d
from diffusion.plan.launch.table import launch_reference
from diffusion.plan.step import others
from diffusion.runtime.backend import choose_backend

CPU = torch.device("cpu")
SMALL = {"diffusion_step_embed_dim": 16, "down_dims": (16, 32)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.manual_seed(0)
    network = UNet1d(input_dim=2, global_cond_dim=1028, **SMALL)
    monkeypatch.setattr(policy, "_network", lambda: network)
    monkeypatch.setattr(
        policy, "ConditionalUnet1D", lambda *sizes: ConditionalUnet1D(*sizes, **SMALL)
    )
    monkeypatch.setattr(others, "launch_kernels", launch_reference)


def ours(provider):
    return policy_step.our_step(provider, choose_backend("torch", "fp32", CPU), 8, CPU)


def test_by_plan_as_layer_by_layer():
    found = [[float(ours(p).plain(k)[0]) for k in range(3)] for p in ("plan", "layers")]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_pytorch_steps():
    step = policy_step.pytorch_step(8, "fp32", CPU, channels_last=True, compiled=False)
    found = [float(step.plain(k)) for k in range(20)]
    assert 0.5 < found[0] < 3 and min(found[10:]) < found[0]


@pytest.mark.parametrize("provider", ("plan", "layers"))
def test_a_wrong_gradient_is_not_timed(provider, monkeypatch):
    backend = choose_backend("torch", "fp32", CPU)
    policy_step.check(provider, backend, "fp32", CPU)

    def doubled(model, flat):
        run = policy_step._OURS[provider](model, flat)
        return lambda *given: 2 * run(*given)

    monkeypatch.setitem(policy_step._OURS, "twice", doubled)
    with pytest.raises(WrongResult):
        policy_step.check("twice", backend, "fp32", CPU)
