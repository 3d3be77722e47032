"""Whole steps: the baselines are the same networks, and their tables."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import harness, policy, scaling, steps, train_step, warm
from benchmarks.baseline_unet import build_baseline
from benchmarks.baseline_unet1d import ConditionalUnet1D, DdpmStep
from benchmarks.cases import model_settings
from diffusion.errors import ConfigError
from diffusion.models.unet1d import UNet1d
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.distributed import Processes
from diffusion.sampling.sampler import DDPM

from .small import CPU, row, tiny_settings

RNG = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_baseline_is_the_same_network(layout, monkeypatch):
    tiny_settings(monkeypatch)
    ours = steps.our_model("tiny", "fp32", CPU, 16, "torch")
    baseline = steps.baseline_model("tiny", CPU, 16).to(memory_format=layout)
    assert [n for n, _ in baseline.named_parameters()] == [n for n, _ in ours.named_parameters()]
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([3, 700])
    want, got = ours(x, t), baseline(x.to(memory_format=layout), t)
    assert want.norm() > 1
    assert harness.relative_error(got, want) < 5e-6
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(baseline.parameters(), ours.parameters(), strict=True):
        assert harness.relative_error(a.grad, b.grad) < 1e-4


def test_the_baseline_refuses_other_networks():
    with pytest.raises(ConfigError, match="model.use_scale_shift_norm|model.dropout"):
        build_baseline(model_settings("adm64"), 3)


def test_steps_train(monkeypatch):
    tiny_settings(monkeypatch)
    model = steps.our_model("tiny", "fp32", CPU, 16, "torch")
    ours = steps.our_step(model, 2, 16, CPU, Processes(None))
    loss, norm = ours.plain(0)
    assert torch.isfinite(loss).all() and norm > 0
    theirs = steps.build_step("eager-fp32", "tiny", 2, CPU, 16)
    assert torch.isfinite(theirs.plain(0))


def test_the_table_of_steps():
    results = [
        train_step.Result(32, "compile-bf16", "graph", harness.Timing(12e3, 11e3, 13e3), 2**31, 60),
        train_step.Result(32, "triton-bf16", "graph", harness.Timing(4e3, 4e3, 4e3), 2**30, 9),
    ]
    table = train_step.format_results(results, 38_000_000_000, 790.0).splitlines()
    assert len(table) == 4
    cells = [cell.strip() for cell in table[3].split("|")]
    assert cells[1:5] == ["32", "triton-bf16", "graph", "4.00"]
    assert cells[7:11] == ["8000", "1.00", "38.5", "3.00"]


def test_the_table_of_scaling(tmp_path):
    origin = harness.Provenance("gpu", "2.11", "3.6", "abc")
    table = scaling.Table({**scaling.DEFAULTS, "out": str(tmp_path)}, origin)
    alone, together = harness.Timing(10e3, 10e3, 10e3), harness.Timing(12.5e3, 12e3, 13e3)
    table.add("triton", 128, 1, "-", alone, alone, True)
    table.add("triton", 128, 2, "16 MiB", together, alone, True)
    table.add("triton", 128, 2, "16 MiB", together, alone, False)  # another process
    cells = [cell.strip() for cell in str(table).splitlines()[3].split("|")]
    assert cells[1:-1] == [
        "triton",
        "128",
        "2",
        "16 MiB",
        "12.500",
        "12.000",
        "13.000",
        "20480",
        "80.0",
    ]
    one, two = harness.read_rows(tmp_path / "gpu.csv")
    assert (one.provider, two.provider) == ("triton-bf16 x1", "triton-bf16 x2 (16 MiB)")


def test_a_cut_run_leaves_its_table(tmp_path):
    origin = harness.Provenance("nvidia-h200", "2.11", "3.6", "abc")
    table = train_step.Table({**train_step.DEFAULTS, "out": str(tmp_path)}, origin)
    timing = harness.Timing(12e3, 11e3, 13e3)
    few = train_step.Result(128, "triton-bf16", "graph", timing, 4 * 2**30, 9)
    table.add([few], [])
    table.add([], ["B=8 eager-fp32 graph: failed: RuntimeError: no"])
    text = (tmp_path / "nvidia-h200-train-step-unet64.md").read_text()
    assert "| triton-bf16 | graph | 12.00 |" in text and "- B=8 eager-fp32 graph: failed" in text
    [row] = harness.read_rows(tmp_path / "nvidia-h200.csv")
    assert row.shape == "128x64x64x3 unet64" and row.provider == "triton-bf16 graph"
    many = few._replace(batch=512, memory=13 * 2**30)
    header, _, line = train_step.format_memory([few, many], 141 * 2**30).splitlines()
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[1:-1] == ["triton-bf16", "graph", "128, 512", "1.00", "24.0", "5973"]
    assert train_step.format_memory([few], 141 * 2**30) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", [scaling, train_step, warm], ids=lambda m: m.__name__)
def test_timing_needs_a_gpu(module, tmp_path):
    given = [f"out={tmp_path}"] if "out" in module.DEFAULTS else []
    with pytest.raises(ConfigError, match="need a CUDA device"):
        module.main(given)


def test_what_compiles_too_long_is_given_up(tmp_path, monkeypatch, capsys):
    def start(settings, provider, batch, folder):
        command = [sys.executable, "-c", f"import time; time.sleep({30 * (batch > 8)})"]
        process = subprocess.Popen(command, start_new_session=True)
        return warm._Compiling(process, f"{provider}, batch {batch}", time.monotonic())

    monkeypatch.setattr(warm, "_start", start)
    monkeypatch.setattr(harness, "require_cuda", lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    given = ["providers=compile-bf16", "batch=8,32,128", "minutes=0.02", "together=2"]
    assert warm.main([*given]) == 1
    signal.signal(signal.SIGTERM, handler)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in lines[:1]] == ["compile-bf16, batch 8: d"]
    assert {line.split(" after")[0].split(" within")[0] for line in lines[1:]} == {
        "compile-bf16, batch 32: did not finish",
        "compile-bf16, batch 128: did not finish",
    }


@pytest.mark.parametrize("scale", [True, False])
def test_the_baseline_of_a_policy_is_the_same_network(scale):
    torch.manual_seed(0)
    options = {"down_dims": (16, 16, 32), "kernel_size": 3, "cond_predict_scale": scale}
    ours = UNet1d(3, 5, diffusion_step_embed_dim=8, n_groups=4, **options)
    baseline = ConditionalUnet1D(3, 5, diffusion_step_embed_dim=8, n_groups=4, **options)
    baseline.load_state_dict(ours.state_dict())
    x, t, cond = torch.randn(2, 3, 8), torch.tensor([3, 70]), torch.randn(2, 5)
    with torch.no_grad():
        want = ours(x.mT, t, cond).mT
        assert harness.relative_error(baseline(x, t, cond), want) < 5e-6
        sampler = DDPM(make_schedule("cosine", 100), TORCH_FP32, steps=4)
        step = DdpmStep(baseline, sampler.rows, sampler.timesteps)
        last = step(x, torch.tensor([3]), cond)  # which adds no noise
        row = torch.tensor([3])
        expected = sampler.step(
            ours.forward_nhwc, x.mT[:, None].contiguous(), row, RNG, labels=cond
        )
    assert harness.relative_error(last.mT[:, None], expected) < 5e-6


def test_the_table_of_policies():
    times = {"fwd": 1200.0, "step": 1180.0, "chain": 118e3, "act-p50": 119e3, "act-p99": 120e3}
    rows = [
        row(op="policy", shape="1x16x2 unet1d", pass_=name, provider=provider, median_us=us / by)
        for provider, by in (("compile", 1), ("triton", 10))
        for name, us in times.items()
    ]
    lines = policy.format_rows(rows).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "bf16", "1", "triton", "120", "118", "11.80", "11.90", "12.00", "10.0",
    ]  # fmt: skip


def test_the_work_of_a_policy():
    size, flops = policy.network_work(2, 2)
    assert size == 2 * 79_947_266
    assert flops == 2 * policy.network_work(1, 2)[1]
