"""diffusers' networks beside torch.compile: settings, the check, what is compiled beforehand."""

import json

import pytest
import torch
from torch import nn

from benchmarks import accelerated
from benchmarks.harness import WrongResult
from diffusion.errors import ConfigError
from tests.end_to_end.run import run

CPU = torch.device("cpu")
SMALL = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


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


CODE = """
import json
from benchmarks import accelerated
from tests.benchmarks.test_accelerated import SMALL
from tests.kernels import chips
from tests.end_to_end.run import run

accelerated.NETWORKS = {"small": SMALL}
found = []
def compile_launches(launches, arch, processes):
    found.append([arch, processes, sorted({launch.kernel.__name__ for launch in launches})])
    yield from launches
accelerated.compile_launches = compile_launches
for what in ("train", "evaluate"):
    settings = {"models": ("small",), "batch": (2,), "what": (what,), "processes": 3}
    accelerated.compile_kernels(settings, chips.HOPPER)
print(json.dumps(found))
"""


def test_kernels_are_compiled_beforehand(tmp_path):
    """Those of the check and of what is timed."""
    (tmp_path / "rehearsed.py").write_text(CODE)
    code, out, err = run(str(tmp_path / "rehearsed.py"))
    assert code == 0, err
    (*chip, step), (*_, evaluation) = json.loads(out.splitlines()[-1])
    assert chip == [90, 3]
    assert {"norm_dx_kernel", "attention_fwd_kernel"} <= set(step)
    assert set(evaluation) - set(step)  # what evaluations alone have
