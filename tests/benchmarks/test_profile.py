"""Profiles: the families of kernels, the report, and the work that is noted."""

import pytest
import torch

import triton_kernels
from benchmarks import harness, profile, work
from triton_kernels import fused_ops
from triton_kernels.norm.tables import Statistics
from triton_kernels.reductions.conv_parts import SplitConv

RNG = torch.zeros(2, dtype=torch.int64)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("kernel", "op", "want"),
    [
        ("conv_forward_kernel", "_Conv2d", "conv fwd"),
        ("conv_forward_kernel", "_Conv2dBackward", "conv dgrad"),
        ("_conv2d_gather_kernel", "_Conv2dBackward", "conv dgrad"),
        ("_conv2d_wgrad_tma_kernel", "_Conv2dBackward", "conv wgrad"),
        ("_column_sum_kernel", "_Conv2dBackward", "conv wgrad"),
        ("_group_norm_single_program_bwd_kernel", "_GroupNormBackward", "norm"),
        ("_skip_dx_kernel", "_PlannedBackward", "norm"),
        ("norm_apply_kernel", "_Planned", "norm"),
        ("_norm_grad_partials_kernel", "_PlannedBackward", "norm"),
        ("_pad_channels_kernel", "_Planned", "elementwise"),
        ("_adamw_kernel", "", "optimizer"),
        ("_square_sums_kernel", "", "optimizer"),
        ("attention_bwd_dq_kernel", "_AttentionBackward", "attention"),
        ("_q_sample_kernel", "", "denoise"),
        ("denoise_loss_fwd_kernel", "_DenoiseLoss", "denoise"),
        ("_spread_kernel", "_UpsampleNearest2d", "resample"),
        ("_fir_kernel", "_Planned", "resample"),
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
        ("conv_tile_mma_kernel", "_Planned", "conv fwd"),
        ("conv_unfused_pointwise_kernel", "_PlannedBackward", "conv dgrad"),
        ("conv_narrow_output_kernel", "_Planned", "conv fwd"),
        ("_sum_group_kernel", "_PlannedBackward", "conv wgrad"),
        ("conv_early_kernel", "", "conv fwd"),
        ("conv_one_row_kernel", "", "conv fwd"),
        ("conv_pointer_forward_kernel", "", "conv fwd"),
        ("conv_single_tile_kernel", "", "conv fwd"),
        ("_sum_parts_kernel", "", "norm"),
        ("norm_single_cta_kernel", "", "norm"),
        ("channel_norm_fwd_kernel", "", "norm"),
        ("linear_bwd_kv_kernel", "", "attention"),
        ("linear_merge_kernel", "", "attention"),
        ("_begin_step_kernel", "", "elementwise"),
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
            event("kernel", "conv_forward_kernel", 10, 1000, 1),
            event("kernel", "conv_forward_kernel", 2010, 3000, 2),
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


def test_a_timeline():
    launches = [("second", 12.0, 5.0), ("first", 10.0, 3.0)]
    kernels = [profile.Kernel(name, "", start, length) for name, start, length in launches]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in profile.timeline(kernels).splitlines()[2:]
    ]
    assert rows == [["0.0", "2.0", "3.0", "first"], ["2.0", "5.0", "5.0", "second"]]
    assert profile.timeline([]) == ""


@interpreted
def test_work_of_sampling():
    """A convolution in parts counts as their sum; of ops made of others the outer one is noted."""
    x, weight = torch.zeros(2, 4, 4, 8).half(), torch.zeros(16, 8, 3, 3).half()
    parts = torch.zeros(3, 2, 16, 16)
    noted = work.work_of("conv_split", (x, weight), {}, parts)
    assert noted == work.Work("conv fwd", 2 * (256 + 1152 + 512), 2 * 32 * 1152)
    halved = work.work_of("conv_split", (x, weight), {"stride": 2}, torch.zeros(3, 2, 16, 4))
    assert halved == work.Work("conv fwd", 2 * (256 + 1152 + 128), 2 * 8 * 1152)
    bias = torch.zeros(16)
    split = SplitConv(parts, (2, 4, 4, 16), torch.float16, bias)
    a = torch.zeros(2, 4, 4, 16).half()
    rest = (None, 4, None, None, 1e-5, "silu")
    assert work.work_of("norm_single_cta", (split, *rest), {}, (a, a)).bytes == 3 * 1024 + 64
    assert work.work_of("norm_single_cta", (a, *rest), {}, (a, a)).bytes == 2 * 1024
    sums = torch.zeros(2, 1, 2, 16)
    of_norm = a, Statistics((sums,), (16,), 4, bias, bias, 1e-5), "silu", weight[:, :4], bias
    assert work.work_of("norm_conv", of_norm, {}, (a, sums)).flops == 2 * 32 * 16 * 4 * 9
    of_conv = x, weight, bias, None
    for y, partials in ((a, sums), (None, sums), (None, None)):
        assert work.work_of("conv_norm", of_conv, {}, (y, partials, a)).flops == noted.flops
    with work.noted_work() as calls:
        fused_ops.avg_pool(torch.ones(1, 2, 2, 8))
        fused_ops.fir(torch.ones(1, 2, 2, 8), ((0.5, 0.5),), 1, 1, (0, 0), (2, 1))
    resampled = [("resample", 4 * 8 * 5), ("resample", 4 * 8 * 6)]
    assert [(call.family, call.bytes) for call in calls] == resampled


@interpreted
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
    dx = work.work_of("conv2d_input_grad", (y, weight, (4, 4), 1, None), {}, x)
    assert (dx.flops, dx.family) == (back.flops, "conv dgrad")
    two = work.work_of("conv_weight_grads", ((x, y, weight), (y, x, weight)), {}, None)
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
    q, kv = torch.zeros(2, 6, 8), torch.zeros(2, 5, 16)
    crossed = work.work_of("cross_attention_forward", (q, kv, None, 2), {}, (q,))
    assert (crossed.flops, crossed.family) == (4 * 2 * 30 * 8, "attention")
    crossed = work.work_of("cross_attention_backward", (q, q, kv, None, q, q, 2), {}, (q, kv))
    assert crossed.flops == 10 * 2 * 30 * 8
    squares = work.work_of("square_sums", (torch.zeros(4096), torch.zeros(4), 1, 2), {}, None)
    assert squares.bytes == size * 2048 + 8
    known = {*triton_kernels.__all__, *vars(fused_ops), "square_sums"}
    assert known >= work._FAMILY_OF.keys() and known >= work._REWRITTEN.keys()
    with work.noted_work() as calls:
        triton_kernels.normal((1, 2, 2, 4), RNG, stream=0)
    assert [call.bytes for call in calls] == [16 + 64]


def test_rates_are_those_of_the_chips():
    h100 = harness.rates_of("nvidia-h100-80gb-hbm3")
    assert (h100.copies, h100.products) == (3.0, 798.0)
    assert harness.rates_of("nvidia-a100-sxm4-80gb") == (None, None)  # by its data sheet alone
