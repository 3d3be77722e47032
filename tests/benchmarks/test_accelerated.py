"""diffusers' networks beside torch.compile: settings, the check."""

import pytest
import torch
from torch import nn

from benchmarks import accelerated
from benchmarks.harness import WrongResult
from diffusion.errors import ConfigError
from diffusion.plan.trace import trace
from tests.benchmarks.compiled_kernels import SMALL

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(accelerated, "NETWORKS", {"small": SMALL})
    return "small"


def test_what_denoising_diffusion_pytorch_has(monkeypatch, capsys):
    """Its network is planned, with each of its norms and linear attentions as one op."""
    small = {"sample_size": 8, "dim": 8, "dim_mults": (1, 2, 2)}
    monkeypatch.setattr(accelerated, "NETWORKS", {"small": small})
    accelerated.check("small", CPU)
    assert "small: gradient off by" in capsys.readouterr().out
    _, *given = accelerated.inputs("small", 2, CPU)
    graph = trace(accelerated.build("small", CPU), tuple(given)).graph
    assert graph.count()["linear_attention"] == 4 and graph.count()["channel_norm"] == 41
    assert not {"arith", "mul"} & {node.op for node in graph.nodes if len(node.out.shape) == 4}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("models=unet64", "models=unet64 is unknown; choose from ddpm_cifar10, butterflies"),
        ("what=draw", "what=draw is unknown; choose from train, evaluate"),
        ("batch=128", "expected as many numbers as models"),
    ],
)
def test_wrong_settings_are_named(argument, words):
    with pytest.raises(ConfigError, match=words):
        accelerated.main([argument])


def test_what_is_wrong_is_not_timed(small, monkeypatch, capsys):
    accelerated.check(small, CPU)
    assert "small: gradient off by" in capsys.readouterr().out

    class Wrong(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x, t):
            found = self.network(x, t)
            found.sample = found.sample * 1.05
            return found

    monkeypatch.setattr(accelerated, "Accelerated", Wrong)
    with pytest.raises(WrongResult, match="the output is off by"):
        accelerated.check(small, CPU)
