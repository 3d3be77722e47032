"""diffusers' networks beside torch.compile: settings, the check, what is compiled beforehand."""

import json

import pytest
import torch
from torch import nn

from benchmarks import accelerated
from benchmarks.harness import WrongResult
from diffusion.errors import ConfigError
from tests.benchmarks.accelerated_kernels import SMALL
from tests.end_to_end.run import run

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(accelerated, "NETWORKS", {"small": SMALL})
    return "small"


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


def test_kernels_are_compiled_beforehand():
    """Those of the check and of what is timed."""
    code, out, err = run("-m", "tests.benchmarks.accelerated_kernels")
    assert code == 0, err
    (*chip, step), (*_, evaluation) = json.loads(out.splitlines()[-1])
    assert chip == [90, 3]
    assert {"norm_dx_kernel", "attention_fwd_kernel"} <= set(step)
    assert set(evaluation) - set(step)  # what evaluations alone have
