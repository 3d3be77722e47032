"""Whole steps: the baselines are the same networks, and their tables."""

import pytest
import torch

from benchmarks import harness, policy, scaling, steps, stopwatch, train_step
from benchmarks.baseline_unet import build_baseline
from benchmarks.baseline_unet1d import ConditionalUnet1D, DdpmStep
from benchmarks.cases import images_of, model_settings
from diffusion.errors import ConfigError
from diffusion.models.blocks import ResBlock
from diffusion.models.unet1d import UNet1d
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.distributed import Processes
from diffusion.sampling.sampler import DDPM
from triton_kernels import reference

from .small import CPU, row, tiny_settings

RNG = torch.zeros(2, dtype=torch.int64)


SMALL = {"model_channels": 8, "num_groups": 4, "num_res_blocks": 1, "zero_init": False}
PAPERS = {  # the models that papers train, with their options and few channels
    "ddpm_cifar10": {},
    "edm_ddpmpp_cifar10": {"stem_channels": 4, "num_res_blocks": 2},
    "adm_imagenet64": {"num_head_channels": 4, "num_classes": 5},
    "adm_imagenet128": {"num_heads": 2, "num_classes": 5},
    "ldm_churches": {"num_heads": 2},
    "ldm_320": {"num_head_channels": 4},
}


def small_settings(monkeypatch, name):
    """The model of that name, with few channels, in every module that looks it up."""
    small = model_settings(name) | SMALL | PAPERS[name]
    monkeypatch.setattr(steps, "model_settings", lambda _: small)


def assert_same(ours, baseline, x, t, labels, layout=torch.channels_last):
    """Output, and every gradient, of two networks with the same parameters."""
    assert [n for n, _ in baseline.named_parameters()] == [n for n, _ in ours.named_parameters()]
    want, got = ours(x, t, labels), baseline(x.to(memory_format=layout), t, labels)
    assert want.norm() > 1
    assert harness.relative_error(got, want) < 5e-6
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(baseline.parameters(), ours.parameters(), strict=True):
        assert harness.relative_error(a.grad, b.grad) < 1e-4


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_baseline_is_the_same_network(layout, monkeypatch):
    tiny_settings(monkeypatch)
    ours = steps.our_model("tiny", "fp32", CPU, 16, "torch")
    baseline = steps.baseline_model("tiny", CPU, 16).to(memory_format=layout)
    assert_same(ours, baseline, torch.randn(2, 3, 16, 16), torch.tensor([3, 700]), None, layout)


@pytest.mark.parametrize("name", PAPERS)
def test_the_baseline_is_the_same_network_as_papers_train(name, monkeypatch):
    small_settings(monkeypatch, name)
    ours = steps.our_model(name, "fp32", CPU, 16, "torch").eval()
    baseline = steps.baseline_model(name, CPU, 16).eval()
    images = images_of(name)
    x = torch.randn(2, images.channels, 16, 16)
    labels = None if ours.num_classes is None else torch.tensor([4, 0])
    assert ours.out_channels == images.channels * (1 + images.learned_variance)
    assert_same(ours, baseline, x, torch.tensor([3, 700]), labels)


def test_the_baseline_drops_out_as_often(monkeypatch):
    """Another mask than ours, of the same probability, in training alone."""
    small_settings(monkeypatch, "adm_imagenet64")
    baseline = steps.baseline_model("adm_imagenet64", CPU, 16)
    ours = steps.our_model("adm_imagenet64", "fp32", CPU, 16, "torch")
    rates = [m.p for m in baseline.modules() if isinstance(m, torch.nn.Dropout)]
    blocks = [m.dropout for m in ours.modules() if isinstance(m, ResBlock)]
    assert rates == blocks and set(rates) == {0.1}
    x, t, labels = torch.randn(1, 3, 16, 16), torch.tensor([5]), torch.tensor([1])
    assert not torch.equal(baseline(x, t, labels), baseline(x, t, labels))


def test_the_loss_of_a_learned_variance_is_ours(monkeypatch):
    """With the timesteps and the noise that ours draws."""
    small_settings(monkeypatch, "adm_imagenet64")
    model = steps.our_model("adm_imagenet64", "fp32", CPU, 16, "torch").eval()
    baseline = steps.baseline_model("adm_imagenet64", CPU, 16).eval()
    images = images_of("adm_imagenet64", 16)
    objective = steps.objective_of(images, TORCH_FP32, CPU)
    pixels, labels = steps.random_images((3, 16, 16, 3), CPU), torch.tensor([1, 2, 0])
    t, rng = torch.tensor([0, 400, 999]), torch.tensor([0, 3])
    want, _ = objective.loss(
        model.forward_nhwc,
        pixels,
        rng,
        labels=labels,
        t=t,
    )
    zero = torch.tensor([[0.0, 1.0]]).repeat(1000, 1)  # x_t is the noise
    noise = reference.q_sample(pixels, t, zero, rng, dtype=torch.float32).permute(0, 3, 1, 2)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: t)
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    got = steps.DenoisingLoss(baseline, objective)(pixels.permute(0, 3, 1, 2), labels)
    torch.testing.assert_close(got, want.mean(), rtol=1e-5, atol=0)


def test_ours_is_checked_as_it_is_trained(monkeypatch):
    """By what a training step calls; a result that is wrong is refused."""
    small_settings(monkeypatch, "adm_imagenet64")
    made = steps.our_model  # by PyTorch, for the interpreter would take a minute
    monkeypatch.setattr(steps, "our_model", lambda *given: made(*given[:4], "torch"))
    error, theirs = steps.check_ours("adm_imagenet64", "fp32", CPU, batch=2, size=16)
    assert error < 1e-4 and theirs < 1e-4
    network = steps.training_network

    def wrong(model, flat):
        return lambda *given: 1.1 * network(model, flat)(*given)

    twice = iter([network, wrong])  # the reference is right, ours is not
    monkeypatch.setattr(steps, "training_network", lambda m, f: next(twice)(m, f))
    with pytest.raises(harness.WrongResult, match="output is off by 1.0e-01"):
        steps.check_ours("adm_imagenet64", "fp32", CPU, batch=2, size=16)


def test_the_baseline_refuses_other_networks():
    with pytest.raises(ConfigError, match="model.label_dropout: the baseline has 0.0 alone"):
        build_baseline(model_settings("adm64") | {"num_classes": 3, "label_dropout": 0.1}, 3)


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
        train_step.Result(
            32, "compile-bf16", "graph", stopwatch.Timing(12e3, 11e3, 13e3), 2**31, 60
        ),
        train_step.Result(32, "triton-bf16", "graph", stopwatch.Timing(4e3, 4e3, 4e3), 2**30, 9),
    ]
    table = train_step.format_results(results, 38_000_000_000, 790.0).splitlines()
    assert len(table) == 4
    cells = [cell.strip() for cell in table[3].split("|")]
    assert cells[1:5] == ["32", "triton-bf16", "graph", "4.00"]
    assert cells[7:11] == ["8000", "1.00", "38.5", "3.00"]


def test_the_table_of_scaling(tmp_path):
    origin = harness.Provenance("gpu", "2.11", "3.6", "abc")
    table = scaling.Table({**scaling.DEFAULTS, "out": str(tmp_path)}, origin)
    alone, together = stopwatch.Timing(10e3, 10e3, 10e3), stopwatch.Timing(12.5e3, 12e3, 13e3)
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
    timing = stopwatch.Timing(12e3, 11e3, 13e3)
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
@pytest.mark.parametrize("module", [scaling, train_step], ids=lambda m: m.__name__)
def test_timing_needs_a_gpu(module, tmp_path):
    given = [f"out={tmp_path}"] if "out" in module.DEFAULTS else []
    with pytest.raises(ConfigError, match="need a CUDA device"):
        module.main(given)


def test_steps_of_pytorch_are_compiled_beforehand():
    settings = {"providers": ("compile-bf16", "triton-bf16", "eager-fp32"), "batch": (8, 32)}
    expected = [("compile-bf16", 8), ("compile-bf16", 32)]
    assert train_step.compiled_steps(settings) == expected


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
