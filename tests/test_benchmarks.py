"""The benchmarks without a GPU: cases, providers' results, the baseline, rows, traces, errors."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import triton_kernels
from benchmarks import (
    curves,
    harness,
    parity,
    policy,
    profile,
    providers,
    run,
    sampling,
    scaling,
    steps,
    train_step,
    warm,
    work,
)
from benchmarks.baseline_unet import build_baseline
from benchmarks.baseline_unet1d import ConditionalUnet1D, DdpmStep
from benchmarks.cases import (
    AdamWCase,
    AttentionCase,
    ConvCase,
    DenoiseCase,
    NormCase,
    meta_model,
    model_cases,
    model_settings,
)
from benchmarks.harness import Row, WrongResult
from benchmarks.plots import draw_plots
from benchmarks.providers import experiments
from diffusion.backend import TORCH_FP32
from diffusion.data.elephants import elephants
from diffusion.distributed import Processes
from diffusion.errors import ConfigError
from diffusion.sampler import DDPM
from diffusion.schedule import make_schedule
from diffusion.unet1d import UNet1d
from triton_kernels.adamw import LateUpdate
from triton_kernels.fused import ops as fused_ops

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
RNG = torch.zeros(2, dtype=torch.int64)


def row(**changes) -> Row:
    values = {
        "op": "conv2d",
        "shape": "32x64x64 64->64 3x3",
        "dtype": "bf16",
        "pass_": "fwd",
        "provider": "triton",
        "median_us": 28.5,
        "p20_us": 28.25,
        "p80_us": 29.0,
        "bytes": 2**35,
        "flops": 9663676416,
        "gpu": "nvidia-h200",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "commit": "abc1234",
    }
    return Row(**(values | changes))


# --- cases ----------------------------------------------------------------------------------------


def test_unet64_has_its_known_convolutions():
    cases = dict(model_cases("unet64", 32, "conv2d"))
    counts = {case.shape: count for case, count in cases.items()}
    assert counts["32x64x64 64->64 3x3"] == 7
    assert counts["32x64x64 192->64 3x3"] == 1
    assert counts["32x8x8 512->256 3x3"] == 2
    assert counts["32x64x64 3->64 3x3"] == counts["32x64x64 64->3 3x3"] == 1
    assert not [c for c in cases if c.stride != 1]  # this model pools
    assert {c.shape for c in cases if not c.needs_dx} == {
        "32x64x64 3->64 3x3",
        "32x1x1 64->256 1x1",
    }
    assert {(c.h, c.w) for c in cases if c.float32} == {(1, 1)}  # the embedding
    assert sum(cases.values()) == sum(
        1 for name, p in meta_model("unet64").named_parameters() if p.ndim > 1
    )


@pytest.mark.parametrize("model", ["unet64", "adm64", "unet_tiny"])
@pytest.mark.parametrize("batch", [1, 32])
def test_cases_add_up_to_the_models_flops(model, batch):
    found = model_cases(model, batch)
    flops = sum(count * case.flops for case, count in found if hasattr(case, "flops"))
    assert flops == batch * meta_model(model).flops_per_image


def test_unet64_has_its_known_norms_and_attentions():
    norms, attentions = (dict(model_cases("unet64", 128, op)) for op in ("group_norm", "attention"))
    assert sum(norms.values()) == 56
    assert norms[NormCase(128, 64, 64, 64, 32, "silu", False)] == 8
    assert attentions == {
        AttentionCase(128, 256, 192, 6, "qkv_heads"): 5,
        AttentionCase(128, 64, 256, 8, "qkv_heads"): 6,
    }
    [(adamw, _)] = model_cases("unet64", 128, "adamw")
    assert sum(adamw.sizes) == 20_494_211


def test_strides_and_film_are_noted():
    cases = [case for case, _ in model_cases("adm64", 4)]
    assert any(case.modulated for case in cases if isinstance(case, NormCase))
    assert "2x9x7 3->5 3x3 /2" == ConvCase(2, 9, 7, 3, 5, 3, 3, 2, False, True).shape


def test_longer_rows_of_attention_are_asked_for():
    settings = run.DEFAULTS | {"batch": (32,), "passes": ("fwd",)}
    shapes = {e.shape for e in run.select(settings, ("attention",))}
    longer = {e.shape for e in run.select(settings | {"longer": 1}, ("attention", "adamw"))}
    assert longer - shapes == {"16x1024 12x64", "4x4096 8x64"}


def test_convolutions_of_other_models():
    plain, resampled = (
        dict(model_cases("unet64", 2, "conv2d", conv_resample=c)) for c in (False, True)
    )
    added = {case.shape for case in resampled} - {case.shape for case in plain}
    assert "2x64x64 64->64 3x3 /2" in added
    policy = {case.shape for case, _ in model_cases("unet1d", 3, "conv2d")}
    assert {"3x1x16 256->256 1x5", "3x1x16 256->256 1x3 /2", "3x1x1 256->1024 1x1"} <= policy
    assert model_cases("unet1d", 3, "attention") == []


# --- providers ------------------------------------------------------------------------------------


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(providers.group_norm, "_GNNHWC", False)
    [line] = providers.absent("group_norm")
    assert "gnnhwc" in line and "not installed" in line
    assert providers.absent("conv2d") == []


TINY = [
    ConvCase(2, 5, 4, 8, 16, 3, 3, 1, False, True),
    ConvCase(2, 4, 4, 16, 8, 1, 1, 1, False, True),
    ConvCase(2, 6, 6, 8, 8, 3, 3, 2, False, False),
    NormCase(2, 4, 3, 8, 4, "silu", False),
    NormCase(2, 2, 3, 8, 2, "identity", True),
    AttentionCase(2, 16, 32, 2, "qkv_heads"),
    AttentionCase(1, 16, 32, 2, "heads_qkv"),
    AdamWCase((70, 31, 1)),
    DenoiseCase(2, 4, 4, 3),
]


@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.op} {c.shape}")
def test_every_provider_agrees_with_the_reference(case):
    """All but the compiler, which would take minutes; on a GPU a run checks that as well."""
    for experiment in experiments(case, 1, "fp32"):
        inputs = experiment.inputs(CPU)
        before = {k: x.clone() for k, x in inputs.items()}
        exact, budget = run.expected(experiment, inputs)
        assert experiment.bytes > 0
        assert set(experiment.providers) > {"triton"}
        for name in experiment.providers:
            if name != "compile":
                run.verify(experiment, name, inputs, exact, budget)
        assert all(torch.equal(inputs[k], x) for k, x in before.items())


def test_half_precision_gets_a_budget_of_its_own():
    for experiment in experiments(TINY[0], 1, "fp16"):
        inputs = experiment.inputs(CPU)
        exact, budget = run.expected(experiment, inputs)
        assert exact[0].dtype == torch.float32
        assert 1e-4 < max(budget) < 2e-3
        for name in experiment.providers:
            run.verify(experiment, name, inputs, exact, budget)


def test_a_wrong_result_is_refused():
    exact = [torch.ones(8)]
    harness.check([torch.ones(8)], exact, [1e-5])
    for wrong in (torch.full((8,), 1.01), torch.full((8,), torch.nan), torch.ones(4)):
        with pytest.raises(WrongResult, match="output 0"):
            harness.check([wrong], exact, [1e-3])


# --- the whole step -------------------------------------------------------------------------------


def tiny_settings(monkeypatch):
    settings = model_settings("unet64") | {
        "model_channels": 8,
        "num_groups": 4,
        "num_head_channels": 4,
        "num_res_blocks": 1,
        "zero_init": False,
    }
    for module in (steps, parity):
        monkeypatch.setattr(module, "model_settings", lambda name: settings)


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
    table.add(128, 1, "-", alone, alone, True)
    table.add(128, 2, "16 MiB", together, alone, True)
    table.add(128, 2, "16 MiB", together, alone, False)  # another process
    cells = [cell.strip() for cell in str(table).splitlines()[3].split("|")]
    assert cells[1:-1] == ["128", "2", "16 MiB", "12.500", "12.000", "13.000", "20480", "80.0"]
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


# --- rows -----------------------------------------------------------------------------------------


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "results" / "gpu.csv"
    assert harness.read_rows(path) == []
    rows = [row(), row(provider="cudnn", median_us=27.8), row(shape='odd "name", comma')]
    harness.add_rows(path, rows)
    assert harness.read_rows(path) == rows
    assert path.read_text().splitlines()[0] == (
        "op,shape,dtype,pass,provider,median_us,p20_us,p80_us,bytes,flops,gpu,torch,triton,commit"
    )
    again = row(median_us=20.0, commit="def5678")
    harness.add_rows(path, [again])
    assert harness.read_rows(path) == [again, *rows[1:]]


def test_foreign_columns_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has columns a,b; expected op,shape"):
        harness.read_rows(path)


def test_ratios_are_to_the_fastest_other():
    rows = [row(), row(provider="cudnn", median_us=57.0), row(provider="cublas", median_us=60.0)]
    [(ours, best)] = harness.ratios([*rows, row(pass_="wgrad")])
    assert (ours.provider, best.provider) == ("triton", "cudnn")
    assert row().tflops == pytest.approx(339.07, rel=1e-4)


def test_plots_are_drawn(tmp_path):
    rows = [row(), row(provider="cudnn", median_us=57.0)]
    rows += [
        row(op="group_norm", shape="x", provider=p, flops=0, median_us=t)
        for p, t in (("triton", 50.0), ("torch", 40.0))
    ]
    rows += [row(op="copy", provider="torch", flops=0), row(op="matmul", provider="cublas")]
    step = {"op": "train_step", "shape": "8x64x64x3 unet64", "pass_": "step"}
    rows += [row(**step, provider=f"{p} graph") for p in ("compile-bf16", "triton-bf16")]
    names = {path.name for path in draw_plots(rows, tmp_path)}
    kinds = ("conv2d-batch32-ratio", "conv2d-roofline", "group_norm-ratio", "group_norm-roofline")
    assert names == {f"nvidia-h200-{kind}.png" for kind in (*kinds, "train_step-unet64")}
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_the_summary_counts_calls():
    [experiment, *_] = experiments(TINY[0], 7, "bf16")
    shape = experiment.shape
    rows = [row(shape=shape), row(shape=shape, provider="cudnn", median_us=57.0)]
    assert " 0.200 |" in run.summary([experiment], rows)  # 7 x 28.5 us
    line = run.describe(experiment, rows, ["cublas failed: out of memory"])
    assert "ratio 2.00 over cudnn" in line and "! cublas failed" in line


# --- profiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "op", "want"),
    [
        ("_conv2d_tma_kernel", "_Conv2d", "conv fwd"),
        ("_conv2d_gather_kernel", "_Conv2dBackward", "conv dgrad"),
        ("_conv2d_wgrad_tma_kernel", "_Conv2dBackward", "conv wgrad"),
        ("_column_sum_kernel", "_Conv2dBackward", "conv wgrad"),
        ("_group_norm_resident_bwd_kernel", "_GroupNormBackward", "norm"),
        ("_norm_kernel", "", "optimizer"),
        ("skip_dx_kernel", "_PlannedBackward", "norm"),
        ("_activation_grad_kernel", "_PlannedBackward", "norm"),
        ("_pad_channels_kernel", "_Planned", "elementwise"),
        ("_adamw_kernel", "", "optimizer"),
        ("_ema_kernel", "", "optimizer"),
        ("_square_sums_kernel", "", "optimizer"),
        ("attention_bwd_dq_kernel", "_AttentionBackward", "attention"),
        ("_q_sample_kernel", "", "denoise"),
        ("_row_sum_kernel", "_DenoiseLoss", "denoise"),
        ("_spread_kernel", "_UpsampleNearest2d", "resample"),
        ("_cast_kernel", "_Conv2d", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, add>", "aten::add", "elementwise"),
        ("void at::native::CatArrayBatchedCopy<at::native::Opaque>", "aten::cat", "elementwise"),
        ("Memcpy HtoD (Pageable -> Device)", "aten::copy_", "elementwise"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16", "aten::cudnn_convolution", "conv fwd"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16", "aten::convolution_backward", "conv dgrad"),
        ("cutlass__5x_cudnn::Kernel<wgrad2d>", "aten::convolution_backward", "conv wgrad"),
        ("cutlass_tensorop_s1688", "aten::cudnn_convolution", "conv fwd"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "aten::cudnn_convolution", "layout"),
        ("nvjet_hsh_128x128", "aten::addmm", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32>", "aten::addmm", "matmul"),
        ("triton_red_fused_native_group_norm_3", "", "norm"),
        ("triton_poi_fused_add_convolution_7", "", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", "", "optimizer"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "", "attention"),
        ("conv_tiles_kernel", "_Planned", "conv fwd"),
        ("conv_bare_points_kernel", "_PlannedBackward", "conv dgrad"),
        ("_stride2_fwd_kernel", "_Planned", "conv fwd"),
        ("unheard_of", "", "other"),
    ],
)
def test_kernels_find_their_family(kernel, op, want):
    assert profile.family(kernel, op) == want
    assert want in profile._FAMILIES


def test_a_trace_becomes_a_report():
    def event(cat, name, ts, dur, external):
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "args": {"External id": external},
        }

    trace = {
        "traceEvents": [
            event("cpu_op", "_Conv2d", 0, 5, 1),
            event("cpu_op", "_Conv2dBackward", 9, 5, 2),
            event("kernel", "_conv2d_tma_kernel", 10, 1000, 1),
            event("kernel", "_conv2d_tma_kernel", 2010, 3000, 2),
            {"ph": "M", "name": "process_name"},
        ]
    }
    kernels = profile.read_trace(trace)
    assert [k.op for k in kernels] == ["_Conv2d", "_Conv2dBackward"]
    calls = [work.Work("conv fwd", 400_000_000, 10**9), work.Work("conv fwd", 10**6, 79 * 10**9)]
    floors = profile.Floors(work.by_family(calls), bandwidth=4.0, peak=790.0)
    text = profile.report(kernels, 2, 30, wall=4.0, host=3.0, floors=floors)
    [forward] = [line for line in text.splitlines() if line.startswith("| conv fwd")]
    assert [cell.strip() for cell in forward.split("|")[2:6]] == ["0.500", "0", "1000.0", "25.0"]
    assert [cell.strip() for cell in forward.split("|")[6:-1]] == ["0.401", "0.080", "0.200", "40"]
    assert "GPU busy 2.00 ms (50%)" in text and "bound by the host" in text


def test_work_is_noted_where_the_plan_does_it():
    """A convolution with a shortcut, its gradients, an update, and a batch out of a data set."""
    x, y, weight = (torch.zeros(*shape) for shape in ((2, 4, 4, 8), (2, 4, 4, 16), (16, 8, 3, 3)))
    short, size = torch.zeros(16, 8), 4
    noted = work.work_of("conv_forward", (x, weight, None), {"extra": ((x, short),)}, (y, None))
    assert noted.flops == 2 * 32 * 16 * 8 * (9 + 1)
    moved = size * (x.numel() + weight.numel() + short.numel() + y.numel())
    assert noted == work.Work("conv fwd", moved, noted.flops)
    back = work.work_of("conv_weight_grad", (x, y, weight), {}, None)
    assert back.flops == 2 * 32 * 16 * 8 * 9
    two = work.work_of("conv_two_weight_grads", (x, y, weight, y, x, weight), {}, None)
    assert two.flops == 2 * back.flops
    dx = torch.zeros(2, 8)
    linear = work.work_of("linear_grads", (dx, x[:, 0, 0], short, short, dx[0]), {}, dx)
    assert linear.flops == 2 * 2 * 2 * 16 * 8
    assert back.bytes == size * (x.numel() + y.numel() + 2 * weight.numel())
    images, index = torch.zeros(10, 4, 4, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    drawn = work.work_of("q_sample", (images,), {"index": index}, x)
    assert drawn == work.Work("denoise", 2 * 48 + 16 + size * x.numel(), 0)
    o, qkv = torch.zeros(2, 6, 8), torch.zeros(2, 6, 24)
    assert work.work_of("attention_forward", (qkv, 2, ""), {}, (o,)).flops == 4 * 2 * 36 * 8
    assert work.work_of("attention_backward", (o, qkv), {}, qkv).flops == 10 * 2 * 36 * 8
    late, flat = LateUpdate((0, 1024, 2048)), torch.zeros(4096)
    vectors = [torch.zeros(4096) for _ in range(5)]
    part = work.work_of("late_part", (late, *vectors, None, None, None, 1), {}, None)
    assert part == work.Work("optimizer", 9 * size * 1024, 0)
    rest = work.work_of("early", (late, *vectors[:4]), {}, None)
    assert rest == work.Work("optimizer", 7 * size * 2048, 0)
    average = work.work_of("late_ema", (late, *vectors[:2]), {}, None)
    assert average == work.Work("optimizer", 3 * size * 2048, 0)
    squares = work.work_of("square_sums", (flat, torch.zeros(4), 1, 2), {}, None)
    assert squares.bytes == size * 2048 + 8
    known = {*triton_kernels.__all__, *fused_ops.__all__, *dir(LateUpdate), "square_sums"}
    assert known >= work._FAMILY_OF.keys() and known >= work._REWRITTEN.keys()
    with work.noted_work() as calls:
        triton_kernels.normal((1, 2, 2, 4), RNG, stream=0)
    assert [call.bytes for call in calls] == [16 + 64]


# --- settings and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opp=conv2d"], "opp is unknown; did you mean op?"),
        (["conv2d"], "conv2d is not of the form key=value"),
        (["op=conv"], "op=conv is unknown; choose from conv2d"),
        (["dtype=int8"], "dtype=int8 is unknown; choose from bf16"),
        (["batch=a"], "batch=a is not a whole number"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        run.main(arguments)


def test_unknown_models_and_empty_choices_are_named():
    with pytest.raises(ConfigError, match="model=unet65 is unknown; choose one of adm64, .*unet64"):
        model_cases("unet65", 1)
    settings = run.DEFAULTS | {"shape": "5x5", "batch": (1,)}
    with pytest.raises(ConfigError, match="nothing to time"):
        run.select(settings, ("conv2d",))


def test_what_sampling_times():
    settings = harness.parse_settings(["batch=1,16", "chains=ddim50,ddpm"], sampling.DEFAULTS)
    tasks = sampling.choose_tasks(settings)
    assert tasks[0] == (None, "triton-bf16", 1) and tasks[-1] == (
        "ddpm",
        "diffusers-compile-bf16",
        16,
    )
    assert len(tasks) == 3 * 2 + 5 * 2
    assert sampling.split_chain("ddpm") == ("ddpm", 1000)
    with pytest.raises(ConfigError, match="chains=heun is unknown; choose from ddim, ddpm"):
        sampling.choose_tasks(settings | {"chains": ("heun20",)})


def test_settings_take_the_types_of_their_defaults():
    settings = harness.parse_settings(["batch=8,32", "op=conv2d"], run.DEFAULTS)
    assert settings["batch"] == (8, 32) and settings["op"] == ("conv2d",)
    assert dataclasses.asdict(row())["bytes"] == 2**35


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "module", ["run", "train_step", "profile", "sampling", "tune_sampling", "policy"]
)
def test_without_a_gpu_there_is_one_line(module):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: benchmarks need a CUDA device, and PyTorch sees none\n"


# --- curves ---------------------------------------------------------------------------------------


def test_losses_are_smoothed_before_they_are_compared():
    a, b = np.array([1.0, 3.0, 2.0, 4.0]), np.array([2.0, 2.0, 2.0, 2.0, 9.0])
    assert curves.smooth(a, 2).tolist() == [2.0, 2.5, 3.0]
    assert curves.smooth(a, 99).tolist() == [2.5]
    assert curves.difference(a, b, 2) == pytest.approx((0.25, 0.5))
    assert curves.difference(a, b, 1) == pytest.approx((0.5, 1.0))
    with pytest.raises(ConfigError, match="has no steps"):
        curves.difference(a, np.array([]), 2)


def test_losses_are_read_as_written(tmp_path):
    losses = [0.1, 1 / 3, 2e-7]
    curves.write_losses(tmp_path / "a.csv", losses)
    assert curves.read_losses(tmp_path / "a.csv").tolist() == pytest.approx(losses, rel=1e-8)
    (tmp_path / "b.csv").write_text("step,loss\n50,1\n100,1\n")
    with pytest.raises(ConfigError, match="a row for every step"):
        curves.read_losses(tmp_path / "b.csv")
    for name, text in (("c.csv", "a,b\n1,2\n"), ("missing.csv", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="columns step and loss"):
            curves.read_losses(tmp_path / name)


def test_parity_writes_curves_and_a_picture(tmp_path, monkeypatch, capsys):
    """Two runs of the same backend are the same, and a third differs."""
    tiny_settings(monkeypatch)
    monkeypatch.setattr(parity, "_TURN", 2)
    monkeypatch.setattr(parity, "load_dataset", lambda **_: elephants(count=6, size=16))
    folder = tmp_path / "images"
    folder.mkdir()
    names = ("torch-bf16", "torch-tf32", "torch-fp32")
    options = {
        "dataset": folder,
        "steps": 3,
        "batch": 2,
        "model": "tiny",
        "runs": ",".join(names),
        "device": "cpu",
        "window": 2,
        "out": tmp_path,
        "plot": tmp_path / "parity.png",
    }
    assert parity.main([f"{key}={value}" for key, value in options.items()]) == 0
    assert "torch-bf16 / torch-fp32" in capsys.readouterr().out
    low, same, full = (curves.read_losses(tmp_path / f"{name}.csv") for name in names)
    assert len(full) == 3 and (same == full).all() and (low != full).any()
    assert (tmp_path / "parity.png").stat().st_size > 10_000
