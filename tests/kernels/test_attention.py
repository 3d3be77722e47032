"""Attention against its reference in float64: output and gradient, under a random do."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.attention import attention, attention_fwd, cross_attention, hopper as head
from triton_kernels.attention.hopper import FWD_HEAD_CONFIGS, HEAD_GRAD
from triton_kernels.attention.launch import ATTENTION, ATTENTION_GRAD, attention_bwd
from triton_kernels.attention.tiles import (
    BWD_CONFIGS,
    BWD_WIDE,
    FWD_CONFIGS,
    MAX_HEAD_DIM,
    bwd_config,
    fwd_config,
)
from triton_kernels.registry.chips import chip
from triton_kernels.registry.spec import AttentionSpec, dtype_name
from triton_kernels.runtime.dependent_launch import dependent_launches
from triton_kernels.runtime.device import describe, standing_for

from .attention_cases import (
    KINDS,
    PRECISIONS,
    RUNS_ON_GPU,
    assert_close,
    check,
    check_gradient,
    check_output,
    check_rows,
    expected_and_budgets,
    make,
    run,
)
from .distinct import distinct

SHAPES = {  # n, t, heads, d
    "one_position": (2, 1, 2, 16),
    "smaller_than_a_tile": (2, 9, 2, 16),
    "exactly_a_tile": (1, 64, 2, 32),
    "two_ragged_tiles": (2, 77, 3, 24),
    "tile_multiple": (1, 128, 1, 16),
    "ragged_head": (1, 35, 2, 48),
    "narrow_head": (1, 33, 3, 5),
    "wide_head": (1, 34, 1, 128),
    "ragged_wide_head": (1, 19, 1, 192),
    "wider_head": (1, 34, 1, 256),
    "ragged_wider_head": (1, 19, 1, 400),
    "widest_head": (1, 34, 1, 512),
}


@pytest.mark.parametrize("order", ["qkv_heads", "heads_qkv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_reference(shape, dtype, order, device):
    heads = shape[2]
    check(*make(*shape, dtype, device), heads, order=order)


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16)], ids=["no_sample", "no_position"])
def test_empty(shape, device):
    qkv, do = make(*shape, torch.float32, device)
    o, dqkv = run(attention, qkv, do, shape[2])
    assert o.shape == do.shape and dqkv.shape == qkv.shape


CONFIG_SHAPES = {"ragged": (1, 70, 1, 24), "whole": (1, 64, 1, 32)}


@pytest.mark.parametrize("config", distinct(FWD_CONFIGS), ids=str)
@pytest.mark.parametrize("shape", CONFIG_SHAPES.values(), ids=CONFIG_SHAPES)
def test_fwd_config(config, shape, device):
    check_output(config, *make(*shape, torch.float16, device), shape[2], rest=1e-5)


@pytest.mark.parametrize("config", distinct((*BWD_CONFIGS, BWD_WIDE)), ids=str)
@pytest.mark.parametrize("shape", CONFIG_SHAPES.values(), ids=CONFIG_SHAPES)
def test_bwd_config(config, shape, device):
    if config.one_pass and config.keep < shape[1]:
        pytest.skip("one pass needs all queries in a tile")
    check_gradient(config, *make(*shape, torch.float16, device), shape[2])


@pytest.mark.parametrize("config", [BWD_CONFIGS[0], BWD_CONFIGS[6]], ids=str)
@pytest.mark.parametrize("shape", [(2, 40, 3, 24), (1, 64, 2, 32)], ids=str)
def test_rows_of_the_legacy_order(config, shape, device):
    qkv, do = make(*shape, torch.float16, device)
    check_rows(do, qkv, (shape[2], "heads_qkv", False), config)


def test_every_choice_is_in_a_tested_list():
    for t in (1, 64, 65, 256, 4096):
        for d in (16, 32, 64, 128):
            for dtype in PRECISIONS:
                spec = AttentionSpec(8, dtype, t, d)
                assert fwd_config(spec) in FWD_CONFIGS
                config = bwd_config(spec)
                assert config in BWD_CONFIGS and (config.keep >= t or not config.one_pass)


def test_heads_that_have_no_place_are_refused():
    """By the public op's limit on every chip; the backward pass of 32 bits by shared memory too."""
    l4, h100 = chip("l4").gpu, chip("h100").gpu
    for op, grad in ((ATTENTION, False), (ATTENTION_GRAD, True)):
        for gpu in (l4, h100):
            for dtype in PRECISIONS:
                widest = AttentionSpec(8, dtype, 256, MAX_HEAD_DIM, grad)
                reason = op.refuse(widest, gpu)
                if grad and gpu is l4 and widest.itemsize == 4:
                    assert "takes 128 KiB of shared memory, the GPU has 99" in reason
                else:
                    assert reason is None
                wider = AttentionSpec(8, dtype, 256, MAX_HEAD_DIM + 8, grad)
                assert "a head has 520 channels; at most 512" in op.refuse(wider, gpu)


@pytest.mark.parametrize("cross", [False, True])
def test_a_gradient_without_a_kernel_is_refused_before_forward(cross, device):
    """On an L4, with what to do; not without a need of it, of an empty batch, or in 16 bits."""

    def call(n=1, dtype=torch.float32):
        given = {"dtype": dtype, "device": device}
        q = torch.zeros((n, 4, 512 if cross else 1536), **given, requires_grad=True)
        if cross:
            return cross_attention(q, torch.zeros((n, 5, 1024), **given), 1)
        return attention(q, 1)

    said = r"^the gradient of fp32 heads of 512 channels has no kernel \(tiles: .* the GPU has 99; "
    with standing_for(chip("l4").gpu, rehearses=False):
        with pytest.raises(ValueError, match=said + ".*; use bfloat16, float16, narrower"):
            call()
        call(n=0), call(dtype=torch.float16)
        with torch.no_grad():
            call()
    with standing_for(chip("a100").gpu, rehearses=False):
        call()


def test_gradient_of_any_strides(device):
    """Of a sum it is expanded (strides 0), of a transposed use it is transposed."""
    qkv, do = make(2, 9, 2, 16, torch.float32, device)
    for strided in (do[:1, :1, :1].expand_as(do), do.mT.contiguous().mT):
        expected = run(attention, qkv, strided.contiguous(), 2)
        for a, b in zip(run(attention, qkv, strided, 2), expected, strict=True):
            assert torch.equal(a, b)


def test_no_gradient_is_kept_without_grad(device):
    qkv, do = make(2, 9, 2, 16, torch.float32, device)
    with torch.no_grad():
        o = attention(qkv, 2)
    assert not o.requires_grad
    assert torch.equal(o, run(attention, qkv, do, 2)[0])


# --- properties -----------------------------------------------------------------------------------


def test_weights_sum_to_one(device):
    qkv, _ = make(2, 70, 2, 24, torch.float32, device)
    qkv[..., 2 * 48 :] = 1
    torch.testing.assert_close(attention(qkv, 2), torch.ones_like(qkv[..., :48]))


def test_permutation_of_positions(device):
    qkv, do = make(2, 70, 2, 24, torch.float32, device)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(device)
    o, dqkv = run(attention, qkv, do, 2)
    permuted_o, permuted_dqkv = run(attention, qkv[:, order], do[:, order], 2)
    torch.testing.assert_close(permuted_o, o[:, order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(permuted_dqkv, dqkv[:, order], rtol=1e-4, atol=1e-5)


def test_shift_of_keys_changes_nothing(device):
    """The same vector added to every key adds one number to all scores of a query."""
    qkv, _ = make(1, 70, 1, 16, torch.float32, device)
    shifted = qkv.clone()
    shifted[..., 16:32] += 3
    torch.testing.assert_close(attention(shifted, 1), attention(qkv, 1), rtol=1e-4, atol=1e-5)


# masked keys overflow before the mask, which the interpreter's numpy mentions
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sign", [1, -1], ids=["large", "very_negative"])
@pytest.mark.parametrize("t", [9, 70, 130])
def test_extreme_scores_stay_finite(t, sign, device):
    """Scores around +-2e5, past the range of float16: q = c, k = sign c and a small difference."""
    qkv, do = make(1, t, 1, 16, torch.float16, device)
    qkv[..., :16] = 200
    qkv[..., 16:32] = sign * 250 + qkv[..., 16:32]
    o, dqkv = run(attention, qkv, do, 1)
    assert torch.isfinite(o).all() and torch.isfinite(dqkv).all()
    exact, _ = run(reference.attention, qkv.double(), do.double(), 1)
    torch.testing.assert_close(o.double(), exact, rtol=2e-3, atol=2e-3)


def test_same_bits_twice(device):
    qkv, do = make(2, 130, 2, 32, torch.float16, device)
    for a, b in zip(run(attention, qkv, do, 2), run(attention, qkv, do, 2), strict=True):
        assert torch.equal(a, b)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "shape, heads, order, message",
    [
        ((2, 4, 4, 96), 2, "qkv_heads", "expected 3 dimensions"),
        ((2, 4, 64), 2, "qkv_heads", "qkv has 64 channels; expected a positive multiple of 3"),
        ((2, 4, 96), 5, "qkv_heads", "num_heads=5 does not divide C=32"),
        ((2, 4, 96), 0, "qkv_heads", "num_heads=0 does not divide C=32"),
        ((2, 4, 1584), 1, "qkv_heads", "a head has 528 channels; at most 512"),
        ((2, 4, 96), 2, "legacy", "'legacy' is unknown; choose one of qkv_heads, heads_qkv"),
    ],
)
def test_errors(shape, heads, order, message):
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(shape), heads, order=order)


@pytest.mark.usefixtures("no_launch")
def test_refuses_what_it_would_have_to_copy():
    with pytest.raises(ValueError, match="expected contiguous"):
        attention(torch.zeros(2, 96, 4).mT, 2)
    with pytest.raises(ValueError, match="float64; expected float32"):
        attention(torch.zeros(2, 4, 96, dtype=torch.float64), 2)


# --- on the GPU -----------------------------------------------------------------------------------


GPU_SHAPES = {
    "unet64_at_16": (32, 256, 6, 32),
    "unet64_at_8": (32, 64, 8, 32),
    "wide_heads": (4, 256, 4, 64),
    "ragged": (3, 100, 5, 24),
    "long_ragged": (2, 1000, 2, 40),
    "widest_head": (2, 300, 2, 128),
    "longest": (1, 4096, 1, 64),
    "long, wide and ragged": (1, 4093, 1, 128),
    "more_rows_than_a_grid_axis": (8200, 2, 8, 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, allow_tf32", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_gpu_matches_reference(shape, dtype, allow_tf32, device):
    check(*make(*shape, dtype, device), shape[2], allow_tf32=allow_tf32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, allow_tf32", PRECISIONS.values(), ids=PRECISIONS)
def test_gpu_legacy_order(dtype, allow_tf32, device):
    check(*make(4, 256, 6, 32, dtype, device), 6, order="heads_qkv", allow_tf32=allow_tf32)


GPU_CONFIG_SHAPES = {
    "unet64_at_16": (16, 256, 6, 32),
    "unet64_at_8": (16, 64, 8, 32),
    "ragged": (8, 200, 3, 24),
    "wide_heads": (4, 512, 4, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("config", FWD_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", GPU_CONFIG_SHAPES.values(), ids=GPU_CONFIG_SHAPES)
def test_gpu_fwd_config(config, shape, device):
    check_output(config, *make(*shape, torch.bfloat16, device), shape[2])


@pytest.mark.gpu
@pytest.mark.parametrize("config", BWD_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", GPU_CONFIG_SHAPES.values(), ids=GPU_CONFIG_SHAPES)
def test_gpu_bwd_config(config, shape, device):
    if config.one_pass and config.keep < shape[1]:
        pytest.skip("one pass needs all queries in a tile")
    check_gradient(config, *make(*shape, torch.bfloat16, device), shape[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(16, 256, 1, 256), (3, 200, 2, 192), (2, 16, 2, 160)], ids=str)
def test_gpu_wide_heads(shape, dtype, device):
    """As they are selected, several times."""
    heads, arguments = shape[2], (shape[2], "qkv_heads", False)
    qkv, do = make(*shape, dtype, device)
    exact, budgets = expected_and_budgets(qkv, do, heads)
    for _ in range(RUNS_ON_GPU):
        o, lse = attention_fwd(qkv, *arguments)
        dqkv = attention_bwd(do, qkv, o, lse, *arguments)
        for name, y, wanted, budget in zip(("o", "dqkv"), (o, dqkv), exact, budgets, strict=True):
            assert_close(name, y, wanted, budget)
    check_rows(do, qkv, arguments, None)


HEAD_SHAPES = {
    "unet64_at_16": (16, 256, 6, 32),
    "unet64_at_8": (16, 64, 8, 32),
    "many_heads": (130, 256, 6, 32),
    "one_position": (3, 1, 2, 32),
    "ragged": (8, 200, 3, 32),
    "ragged_tile": (5, 50, 1, 16),
    "half": (4, 128, 4, 64),
    "most_of_a_tile": (3, 65, 2, 64),
    "unet32": (33, 256, 4, 64),
    "ragged_and_wide": (5, 200, 3, 64),
}


def skip_unless_head_fits(qkv, d, backward):
    spec = AttentionSpec(1, dtype_name(qkv.dtype), qkv.shape[1], d, backward)
    if reason := head.refuse(spec, describe(qkv.device)):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("config", FWD_HEAD_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=HEAD_SHAPES)
def test_gpu_fwd_head_config(config, shape, order, dtype, device):
    qkv, do = make(*shape, dtype, device)
    skip_unless_head_fits(qkv, shape[3], backward=False)
    check_output(config, qkv, do, shape[2], order)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", HEAD_SHAPES.values(), ids=HEAD_SHAPES)
def test_gpu_bwd_head_config(shape, order, dtype, device):
    qkv, do = make(*shape, dtype, device)
    skip_unless_head_fits(qkv, shape[3], backward=True)
    check_gradient(HEAD_GRAD.config(), qkv, do, shape[2], order, FWD_CONFIGS[0])


@pytest.mark.gpu
def test_gpu_head_of_extreme_scores(device):
    """As in `test_extreme_scores_stay_finite`."""
    qkv, do = make(2, 256, 2, 32, torch.float16, device)
    skip_unless_head_fits(qkv, 32, backward=True)
    qkv[..., :64] = 200
    qkv[..., 64:128] -= 250
    o, lse = attention_fwd(qkv, 2, "qkv_heads", False, FWD_HEAD_CONFIGS[0])
    dqkv = attention_bwd(do, qkv, o, lse, 2, "qkv_heads", False, HEAD_GRAD.config())
    exact, _ = run(reference.attention, qkv.double(), do.double(), 2)
    torch.testing.assert_close(o.double(), exact, rtol=2e-3, atol=2e-3)
    assert torch.isfinite(dqkv).all()


@pytest.mark.gpu
def test_gpu_heads_wait_for_what_they_read(device):
    """With `dependent_launches` a kernel may begin before the ones before it are done."""
    qkv, do = make(64, 256, 6, 32, torch.bfloat16, device)
    skip_unless_head_fits(qkv, 32, backward=True)
    arguments = 6, "qkv_heads", False

    def step():
        twice = attention_fwd(torch.cat([qkv, qkv]), *arguments, FWD_HEAD_CONFIGS[2])
        return attention_bwd(
            torch.cat([do, do]), torch.cat([qkv, qkv]), *twice, *arguments, HEAD_GRAD.config()
        )

    expected = step()
    with dependent_launches():
        for _ in range(RUNS_ON_GPU):
            assert torch.equal(step(), expected)


@pytest.mark.gpu
def test_gpu_graph_replay(device):
    """Nothing is read on the host: a captured call sees new data."""
    qkv, do = make(4, 256, 6, 32, torch.bfloat16, device)
    static = qkv.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(attention(static, 6), static, do)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(static, 6)
        (dqkv,) = torch.autograd.grad(o, static, do)
    fresh = qkv.flip(1).contiguous()
    with torch.no_grad():
        static.copy_(fresh)
    graph.replay()
    for a, b in zip((o, dqkv), run(attention, fresh, do, 6), strict=True):
        assert torch.equal(a, b)
