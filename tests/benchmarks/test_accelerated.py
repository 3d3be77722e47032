"""diffusers' networks beside torch.compile: settings, the check."""

import sys

import pytest
import torch
from torch import nn

from benchmarks import accelerated, other_networks
from benchmarks.harness import WrongResult
from diffusion.errors import ConfigError
from diffusion.plan.trace import trace
from tests.benchmarks.compiled_kernels import SMALL

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(other_networks, "NETWORKS", {"small": SMALL})
    return "small"


def test_what_denoising_diffusion_pytorch_has(monkeypatch, capsys):
    """Its network is planned, with each of its norms and linear attentions as one op."""
    small = other_networks.of_lucidrains(sample_size=8, dim=8, dim_mults=(1, 2, 2))
    monkeypatch.setattr(other_networks, "NETWORKS", {"small": small})
    accelerated.check(accelerated.Model("small"), CPU)
    assert "small: gradient off by" in capsys.readouterr().out
    _, given = small.inputs(2, CPU)
    graph = trace(accelerated.Model("small").build(CPU), given).graph
    assert graph.count()["linear_attention"] == 4 and graph.count()["channel_norm"] == 41
    assert not {"arith", "mul"} & {node.op for node in graph.nodes if len(node.out.shape) == 4}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("models=unet64", "models=unet64 is unknown; choose from ddpm_cifar10, butterflies"),
        ("what=draw", "what=draw is unknown; choose from train, evaluate"),
        ("memory_format=nchw", "memory_format=nchw is unknown; choose from channels_last, contig"),
        ("batch=128", "expected as many numbers as models"),
    ],
)
def test_wrong_settings_are_named(argument, words):
    with pytest.raises(ConfigError, match=words):
        accelerated.main([argument])


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.scale = nn.Linear(1, 8)

    def forward(self, x, t, factor):
        return self.conv(x) * factor + self.scale(t[:, None])[:, :, None, None], t

def make(batch):
    return Net(), (torch.randn(batch, 4, 6, 10), torch.rand(batch), 2.0)

class TimeFirst(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 1)
        self.table.weight.requires_grad_(False)

    def forward(self, t, x):
        return super().forward(x, self.table(t)[:, 0].float().sin(), 2.0)[0]

def time_first(batch):
    return TimeFirst(), (torch.arange(batch), torch.randn(batch, 4, 6, 10))

def no_module(batch):
    return Net()

number = 3
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_networks_of_the_test.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop(path.stem, None)


def test_a_network_of_ones_own(own, capsys):
    model = accelerated.Model(f"{own}:make")
    accelerated.check(model, CPU)
    assert "gradient off by" in capsys.readouterr().out
    assert model.shape(3) == f"3x6x10x4 {own.stem}:make"
    step = accelerated.runner("train", model, 2, CPU, lambda network: network)
    losses = [step().item() for _ in range(40)]
    assert losses[-1] < losses[0]
    evaluation = accelerated.runner("evaluate", model, 2, CPU, lambda network: network)
    assert evaluation().shape == (2, 8, 6, 10) and evaluation().dtype == torch.bfloat16


def test_a_network_that_stays_in_float32(own):
    """Its time comes first, its table is not trained, and a layer gets float32: it is evaluated
    under autocast."""
    model = accelerated.Model(f"{own}:time_first")
    accelerated.check(model, CPU)
    assert model.shape(3) == f"3x6x10x4 {own.stem}:time_first"
    with pytest.raises(RuntimeError, match="dtype"):
        accelerated.runner("evaluate", model, 2, CPU, lambda network: network)()
    for around in (lambda network: network, accelerated.Accelerated):
        evaluation = accelerated.runner("evaluate_autocast", model, 2, CPU, around)
        assert evaluation().shape == (2, 8, 6, 10) and evaluation().dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("memory_format", "layout"),
    [("channels_last", torch.channels_last), ("contiguous", torch.contiguous_format)],
)
def test_the_memory_format(small, memory_format, layout):
    model = accelerated.Model(small, memory_format)
    noise, (x, _) = model.inputs(2, CPU)
    filters = [p for p in model.build(CPU).parameters() if p.dim() == 4 and p.shape[1] > 1]
    wide = [p for p in filters if p.shape[2] > 1]  # others are both
    assert wide and all(p.is_contiguous(memory_format=layout) for p in (*wide, x, noise))
    accelerated.check(model, CPU)
    assert model.shape(2).endswith(":contiguous") is (memory_format == "contiguous")


def test_what_torch_compile_refuses_is_timed_as_it_is(small, monkeypatch, capsys):
    def refuses(module, **options):
        raise RuntimeError("no such stride\nand more")

    monkeypatch.setattr(torch, "compile", refuses)
    runs = accelerated.compiled("evaluate", accelerated.Model(small), 2, CPU, loop=True)
    assert list(runs) == ["eager-bf16"] and runs["eager-bf16"](0).shape[0] == 2
    assert "evaluate small: torch.compile fails: no such stride\n" in capsys.readouterr().out


def test_a_file_without_such_a_network_is_named(own):
    for wrong, words in (
        (f"{own.parent}/none.py:make", "none.py does not exist"),
        (f"{own}:other", "has no function other"),
        (f"{own}:number", "has no function number"),
        (f"{own}:", "has no function of no name"),
    ):
        with pytest.raises(ConfigError, match=words):
            accelerated.main([f"models={wrong}", "batch=1"])
    with pytest.raises(ConfigError, match="expected a module and a tuple of its arguments"):
        accelerated.Model(f"{own}:no_module").build(CPU)


def test_what_is_wrong_is_not_timed(small, monkeypatch, capsys):
    model = accelerated.Model(small)
    accelerated.check(model, CPU)
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
        accelerated.check(model, CPU)
