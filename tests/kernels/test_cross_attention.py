"""Cross-attention against its reference in float64: output and gradients, under a random do."""

import dataclasses
import math

import pytest
import torch

from triton_kernels import reference
from triton_kernels.attention import (
    cross_attention,
    cross_attention_bwd,
    cross_attention_fwd,
    hopper as head,
)
from triton_kernels.attention.few_keys import (
    BY_QUERY_CHANNELS,
    FEW_KEYS,
    FewKeys,
    FewKeysGrad,
    blocks_of,
)
from triton_kernels.attention.launch import CROSS_ATTENTION, CROSS_ATTENTION_GRAD
from triton_kernels.attention.tiles import (
    BWD_CONFIGS,
    FWD_CONFIGS,
    BwdConfig,
    bwd_config,
    fwd_config,
)
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.choose import explain, select
from triton_kernels.registry.spec import AttentionSpec
from triton_kernels.runtime.device import describe

from .attention_cases import (
    FLOOR,
    ORDERS,
    PRECISIONS,
    RUNS_ON_GPU,
    Tf32Matmul,
    assert_close,
    errors,
    in_two_passes,
)
from .distinct import distinct

MASKS = {
    "all": lambda n, keys: None,
    "lengths": lambda n, keys: torch.arange(keys) < 2 + torch.arange(n)[:, None] * keys // 2,
    "holes": lambda n, keys: torch.arange(n * keys).view(n, keys) % 3 != 0,
    "late": lambda n, keys: (torch.arange(keys) >= keys - 2).expand(n, keys).contiguous(),
    "none of a sample": lambda n, keys: (torch.arange(n) == 0)[:, None].repeat(1, keys),
}


def make(n, t, keys, heads, d, dtype, device, mask="lengths"):
    """q, kv, do and the mask; scores have a standard deviation of about 2."""
    generator = torch.Generator().manual_seed(n + t + keys + heads + d)
    q = math.sqrt(2) * torch.randn(n, t, heads * d, generator=generator)
    kv = math.sqrt(2) * torch.randn(n, keys, 2 * heads * d, generator=generator)
    do = torch.randn(n, t, heads * d, generator=generator)
    seen = MASKS[mask](n, keys)
    return *(x.to(device, dtype) for x in (q, kv, do)), None if seen is None else seen.to(device)


def run(op, q, kv, do, heads, mask, **options):
    """(o, dq, dkv) of `op`."""
    q, kv = (x.detach().clone().requires_grad_() for x in (q, kv))
    o = op(q, kv, heads, mask=mask, **options)
    return o.detach(), *torch.autograd.grad(o, (q, kv), do)


def heads_of(q, kv, do, heads):
    """q, k, v and do, [N, heads, T, D]."""
    n, _, c = q.shape
    k, v = kv.view(n, -1, 2, heads, c // heads).permute(2, 0, 3, 1, 4).contiguous()
    q, do = (x.view(n, -1, heads, c // heads).transpose(1, 2).contiguous() for x in (q, do))
    return q, k, v, do


def tf32_attention(q, kv, heads, *, mask):
    """The reference with TF32 products, on any machine."""
    n, t, c = q.shape
    q, k, v, _ = heads_of(q, kv, q, heads)
    s = Tf32Matmul.apply(q, k.mT.contiguous()) / math.sqrt(c // heads)
    s = s if mask is None else s.masked_fill(~mask[:, None, None], -1e30)
    p = torch.softmax(s, dim=-1)
    p = p if mask is None else p * mask[:, None, None]
    return Tf32Matmul.apply(p, v).transpose(1, 2).reshape(n, t, c)


def cross_in_two_passes(q, kv, do, heads, mask, turn):
    """(o, dq, dkv)"""
    seen = None if mask is None else mask[:, None, None]
    o, dq, *dkv = in_two_passes(*heads_of(q, kv, do, heads), turn, seen)
    o, dq = (x.transpose(1, 2).reshape(q.shape) for x in (o, dq))
    return o, dq, torch.stack(dkv).permute(1, 3, 0, 2, 4).reshape(kv.shape)


def expected_and_budgets(q, kv, do, heads, mask, allow_tf32=False):
    """As of `test_attention`: twice the errors of PyTorch in the precision under test. In 16 bits
    that is the larger of its errors on the GPU and on the CPU: where a query sees two keys alone,
    the worst element is a matter of single roundings."""
    exact = run(reference.cross_attention, q.double(), kv.double(), do.double(), heads, mask)
    independent = tf32_attention if allow_tf32 else reference.cross_attention
    low, budgets = [run(independent, q, kv, do, heads, mask)], []
    if q.is_cuda and q.dtype != torch.float32:
        here = (x.cpu() for x in (q, kv, do))
        seen = None if mask is None else mask.cpu()
        low.append([y.to(q.device) for y in run(independent, *here, heads, seen)])
    if q.dtype == torch.float32 and not allow_tf32:
        low += [cross_in_two_passes(q, kv, do, heads, mask, turn) for turn in range(ORDERS)]
    for expected, *found in zip(exact, *low, strict=True):
        each = zip(*(errors(x, expected) for x in found), strict=True)
        budgets.append(tuple(max(2 * max(e), FLOOR) for e in each))
    return exact, budgets


def check(q, kv, do, mask, heads, **options):
    exact, budgets = expected_and_budgets(q, kv, do, heads, mask, **options)
    for _ in range(RUNS_ON_GPU if q.is_cuda else 1):
        actual = run(cross_attention, q, kv, do, heads, mask, **options)
        for name, *case in zip(("o", "dq", "dkv"), actual, exact, budgets, strict=True):
            assert_close(name, *case)


SHAPES = {  # n, t, keys, heads, d
    "two_keys": (2, 9, 2, 2, 16),
    "smaller_than_a_tile": (2, 9, 5, 2, 16),
    "more_keys_than_queries": (2, 5, 70, 2, 16),
    "clip": (2, 64, 78, 2, 16),
    "exact_tiles": (1, 64, 64, 1, 32),
    "two_ragged_tiles": (2, 77, 131, 1, 24),
    "narrow_head": (1, 33, 7, 3, 5),
    "wide_head": (1, 34, 35, 1, 128),
    "wider_head": (1, 19, 21, 1, 256),
    "widest_head": (1, 19, 21, 1, 512),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("mask", ["all", "lengths"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_reference(shape, mask, dtype, device):
    check(*make(*shape, dtype, device, mask), shape[3])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 21, 150, 2, 16), (2, 70, 9, 1, 24)], ids=str)
def test_masks(shape, mask, device):
    """Tiles of keys of which none is seen, before others and behind them, and none at all."""
    check(*make(*shape, torch.float32, device, mask), shape[3])


def test_a_sample_without_keys_gives_zeros_and_has_no_gradient(device):
    q, kv, do, mask = make(3, 9, 70, 2, 16, torch.float16, device, "none of a sample")
    for x in run(cross_attention, q, kv, do, 2, mask):
        assert x[0].abs().max() > 0 and not x[1:].any()
    mask[:] = False
    _, lse = cross_attention_fwd(q, kv, mask, 2, False)
    assert (lse == math.inf).all()


# as below
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_keys_that_are_not_seen_have_no_gradient_and_change_nothing(device):
    q, kv, do, mask = make(2, 9, 70, 2, 16, torch.float16, device, "holes")
    o, dq, dkv = run(cross_attention, q, kv, do, 2, mask)
    assert not dkv[~mask].any()
    kv[~mask] = 60000.0
    for a, b in zip(run(cross_attention, q, kv, do, 2, mask), (o, dq, dkv), strict=True):
        assert torch.equal(a, b)


EMPTY = {"no_sample": (0, 5, 3, 2, 16), "no_query": (2, 0, 3, 2, 16), "no_key": (2, 5, 0, 2, 16)}


@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_empty(shape, device):
    q, kv, do, _ = make(*shape, torch.float32, device, "all")
    o, dq, dkv = run(cross_attention, q, kv, do, 2, None)
    assert (o.shape, dq.shape, dkv.shape) == (q.shape, q.shape, kv.shape)
    assert not (o.any() or dq.any() or dkv.any())


CONFIG_SHAPES = {"ragged": (2, 70, 37, 1, 24), "whole": (1, 64, 64, 1, 32)}


def check_fwd_config(config, shape, dtype, device):
    q, kv, do, mask = make(*shape, dtype, device)
    (exact, *_), (budget, *_) = expected_and_budgets(q, kv, do, shape[3], mask)
    for _ in range(RUNS_ON_GPU if q.is_cuda else 1):
        o, _ = cross_attention_fwd(q, kv, mask, shape[3], False, config)
        assert_close("o", o, exact, budget)


@pytest.mark.parametrize("config", distinct(FWD_CONFIGS), ids=str)
@pytest.mark.parametrize("shape", CONFIG_SHAPES.values(), ids=CONFIG_SHAPES)
def test_fwd_config(config, shape, device):
    check_fwd_config(config, shape, torch.float16, device)


def check_bwd_config(config, shape, dtype, device, mask="lengths"):
    if isinstance(config, BwdConfig) and config.one_pass and config.keep < shape[2]:
        pytest.skip("one pass needs all keys in a tile")
    q, kv, do, mask = make(*shape, dtype, device, mask)
    (_, *exact), (_, *budgets) = expected_and_budgets(q, kv, do, shape[3], mask)
    made = cross_attention_fwd(q, kv, mask, shape[3], False)
    for _ in range(RUNS_ON_GPU if q.is_cuda else 1):
        grads = cross_attention_bwd(do, q, kv, mask, *made, shape[3], False, config)
        for name, *case in zip(("dq", "dkv"), grads, exact, budgets, strict=True):
            assert_close(name, *case)


@pytest.mark.parametrize("config", distinct(BWD_CONFIGS), ids=str)
@pytest.mark.parametrize("shape", CONFIG_SHAPES.values(), ids=CONFIG_SHAPES)
def test_bwd_config(config, shape, device):
    check_bwd_config(config, shape, torch.float16, device)


# Programs of a head that are not equally long, and more than there are blocks
FEW_KEYS_CONFIGS = (
    FewKeys(64, 64, 4, 2, 1),
    FewKeys(128, 64, 4, 3, 3),
    FewKeys(128, 128, 8, 2, 2),
)
FEW_KEYS_GRAD_CONFIGS = (
    FewKeysGrad(False, 64, 64, 4, 2, 1),
    FewKeysGrad(False, 128, 32, 8, 2, 3),
    FewKeysGrad(True, 64, 64, 4, 2, 3),
    FewKeysGrad(True, 128, 128, 8, 2, 2),
)
FEW_KEYS_SHAPES = {  # heads in one block and in two
    "ragged": (2, 150, 37, 2, 24),
    "whole": (1, 128, 64, 1, 32),
    "one_query": (2, 1, 3, 2, 16),
    "text": (2, 200, 77, 2, 40),
    "two_ragged_blocks": (1, 70, 128, 1, 72),
    "wide_head": (1, 66, 9, 1, 160),
}


def skip_if_refused(config, shape, device):
    _, _, keys, _, d = shape
    if config.keep < keys:
        pytest.skip("all keys are in a tile")
    if isinstance(config, FewKeysGrad) and config.by_query:
        if d > BY_QUERY_CHANNELS or describe(torch.device(device)).mma_sync:
            pytest.skip("by query, channels are in one block, and operands in shared memory")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("config", distinct(FEW_KEYS_CONFIGS), ids=str)
@pytest.mark.parametrize("shape", FEW_KEYS_SHAPES.values(), ids=FEW_KEYS_SHAPES)
def test_few_keys(shape, config, mask, device):
    skip_if_refused(config, shape, device)
    q, kv, do, seen = make(*shape, torch.float16, device, mask)
    (exact, *_), (budget, *_) = expected_and_budgets(q, kv, do, shape[3], seen)
    o, lse = cross_attention_fwd(q, kv, seen, shape[3], False, config)
    assert_close("o", o, exact, budget)
    tiles = cross_attention_fwd(q, kv, seen, shape[3], False, FWD_CONFIGS[0])
    torch.testing.assert_close(lse, tiles[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("config", distinct(FEW_KEYS_GRAD_CONFIGS), ids=str)
@pytest.mark.parametrize("shape", FEW_KEYS_SHAPES.values(), ids=FEW_KEYS_SHAPES)
def test_few_keys_grad(shape, config, mask, device):
    skip_if_refused(config, shape, device)
    check_bwd_config(config, shape, torch.float16, device, mask)


def test_a_head_is_two_blocks_where_that_is_less():
    found = {d: blocks_of(d) for d in (5, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 160, 256)}
    assert found == {
        5: (16, 0), 16: (16, 0), 24: (32, 0), 32: (32, 0), 40: (32, 16), 48: (32, 16), 56: (64, 0),
        64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128, 0), 160: (128, 32),
        256: (256, 0),
    }  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("chip", ["h100", "a100", "rtx4090"])
def test_programs_of_few_keys_fill_the_gpu(chip, grad):
    """And where no tile has room, or keys are many, or of 32 bits, there are others."""
    gpu, op = CHIPS[chip].gpu, CROSS_ATTENTION_GRAD if grad else CROSS_ATTENTION
    kernel = op.kernel(FEW_KEYS.name)
    for n, t in ((128, 4096), (80, 4096), (512, 1024), (4096, 64)):
        spec = AttentionSpec(n, "bf16", t, 40, grad=grad, keys=77)
        configs = kernel.configs(spec, gpu)
        for config in configs:
            blocks = -(-t // config.step)
            each = -(-blocks // config.splits)
            assert config.keep >= 77 and (config.splits - 1) * each < blocks
        assert any(n * c.splits >= gpu.num_sms or c.splits >= t // c.step for c in configs)
        if n < t:  # many queries
            choice = select(op, spec, gpu)
            assert choice.kernel is kernel and choice.why == "predicted"
    for other in ({"keys": 129}, {"dtype": "tf32"}, {"d": 256}):
        spec = AttentionSpec(**{"n": 128, "dtype": "bf16", "t": 4096, "d": 40, "keys": 77} | other)
        assert select(op, dataclasses.replace(spec, grad=grad), gpu).kernel is not kernel


def test_every_choice_is_in_a_tested_list():
    for t, keys in ((64, 78), (4096, 1), (1, 65), (256, 513)):
        for d in (16, 32, 64, 128):
            for dtype in PRECISIONS:
                spec = AttentionSpec(8, dtype, t, d, keys=keys, masked=True)
                assert fwd_config(spec) in FWD_CONFIGS
                config = bwd_config(spec)
                assert config in BWD_CONFIGS and (config.keep >= keys or not config.one_pass)


def test_no_kernel_keeps_a_head_in_shared_memory():
    spec = AttentionSpec(32, "bf16", 64, 32, keys=64, masked=True)
    found = [c.kernel for c in explain(CROSS_ATTENTION, spec, CHIPS["h100"].gpu)]
    assert found == ["tiles", "few_keys"]
    reason = head.refuse(spec, CHIPS["h100"].gpu)
    assert reason == "keys and values in another tensor than queries"


def test_gradient_of_any_strides(device):
    q, kv, do, mask = make(2, 9, 5, 2, 16, torch.float32, device)
    for strided in (do[:1, :1, :1].expand_as(do), do.mT.contiguous().mT):
        expected = run(cross_attention, q, kv, strided.contiguous(), 2, mask)
        for a, b in zip(run(cross_attention, q, kv, strided, 2, mask), expected, strict=True):
            assert torch.equal(a, b)


def test_is_attention_where_keys_are_beside_queries(device):
    qkv = torch.randn(2, 70, 96, generator=torch.Generator().manual_seed(0)).to(device)
    q, kv = qkv[..., :32].contiguous(), qkv[..., 32:].contiguous()
    torch.testing.assert_close(cross_attention(q, kv, 2), reference.attention(qkv, 2))


# masked keys overflow before the mask, which the interpreter's numpy mentions
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sign", [1, -1], ids=["large", "very_negative"])
@pytest.mark.parametrize("mask", ["all", "late"])
def test_extreme_scores_stay_finite(mask, sign, device):
    """As in `test_attention`: past the range of float16."""
    q, kv, do, seen = make(1, 9, 130, 1, 16, torch.float16, device, mask)
    q[:] = 200
    kv[..., :16] = sign * 250 + kv[..., :16]
    o, dq, dkv = run(cross_attention, q, kv, do, 1, seen)
    assert all(torch.isfinite(x).all() for x in (o, dq, dkv))
    exact, *_ = run(reference.cross_attention, q.double(), kv.double(), do.double(), 1, seen)
    torch.testing.assert_close(o.double(), exact, rtol=2e-3, atol=2e-3)


def test_same_bits_twice(device):
    q, kv, do, mask = make(2, 130, 78, 2, 32, torch.float16, device)
    both = (run(cross_attention, q, kv, do, 2, mask) for _ in range(2))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "q, kv, heads, message",
    [
        ((2, 4, 4, 32), (2, 3, 64), 2, "expected 3 dimensions"),
        ((2, 4, 32), (2, 3, 32), 2, r"kv has shape \[2, 3, 32\]; expected \[2, L, 64\]"),
        ((2, 4, 32), (1, 3, 64), 2, r"kv has shape \[1, 3, 64\]; expected \[2, L, 64\]"),
        ((2, 4, 32), (2, 3, 64), 5, "num_heads=5 does not divide C=32"),
        ((2, 4, 528), (2, 3, 1056), 1, "a head has 528 channels; at most 512"),
    ],
)
def test_errors(q, kv, heads, message):
    with pytest.raises(ValueError, match=message):
        cross_attention(torch.zeros(q), torch.zeros(kv), heads)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(2, 3), r"mask is torch.float32 of shape \[2, 3\]; expected bool \[2, 3\]"),
        (torch.ones(2, 4).bool(), r"of shape \[2, 4\]; expected bool \[2, 3\]"),
        (torch.ones(1, 3).bool().expand(2, 3), r"mask has strides \(0, 1\); expected contiguous"),
    ],
)
def test_errors_of_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        cross_attention(torch.zeros(2, 4, 32), torch.zeros(2, 3, 64), 2, mask=mask)


@pytest.mark.usefixtures("no_launch")
def test_q_and_kv_have_one_dtype():
    with pytest.raises(ValueError, match=r"kv is torch.float16; expected torch.float32"):
        cross_attention(torch.zeros(2, 4, 32), torch.zeros(2, 3, 64).half(), 2)


# --- on the GPU -----------------------------------------------------------------------------------

GPU_SHAPES = {
    "unet64_at_16": (32, 256, 78, 6, 32),
    "unet64_at_8": (32, 64, 78, 8, 32),
    "latents": (4, 1024, 78, 10, 64),
    "t5": (4, 256, 257, 4, 64),
    "ragged": (3, 100, 35, 5, 24),
    "widest_head": (2, 300, 78, 2, 256),
    "many_keys": (1, 100, 4093, 1, 128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, allow_tf32", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("mask", ["all", "lengths", "holes"])
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_gpu_matches_reference(shape, mask, dtype, allow_tf32, device):
    check(*make(*shape, dtype, device, mask), shape[3], allow_tf32=allow_tf32)


GPU_CONFIG_SHAPES = {"unet64_at_16": (16, 256, 78, 6, 32), "ragged": (8, 200, 35, 3, 24)}


@pytest.mark.gpu
@pytest.mark.parametrize("config", FWD_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", GPU_CONFIG_SHAPES.values(), ids=GPU_CONFIG_SHAPES)
def test_gpu_fwd_config(config, shape, device):
    check_fwd_config(config, shape, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("config", BWD_CONFIGS, ids=str)
@pytest.mark.parametrize("shape", GPU_CONFIG_SHAPES.values(), ids=GPU_CONFIG_SHAPES)
def test_gpu_bwd_config(config, shape, device):
    check_bwd_config(config, shape, torch.bfloat16, device)


FEW_KEYS_GPU = describe(torch.device("cuda")) if torch.cuda.is_available() else CHIPS["h200"].gpu
FEW_KEYS_GPU_SHAPES = GPU_CONFIG_SHAPES | {
    "text": (4, 1024, 77, 8, 40),
    "text_80": (3, 300, 77, 8, 80),
    "text_160": (2, 200, 77, 4, 160),
    "actions": (16, 256, 8, 4, 32),
}


def gpu_configs(op, grad):
    """Each tile of each shape, of a head in one program and in the most."""
    found = []
    for name, shape in FEW_KEYS_GPU_SHAPES.items():
        n, t, keys, heads, d = shape
        spec = AttentionSpec(n * heads, "bf16", t, d, grad=grad, keys=keys, masked=True)
        by_tile = {}
        for config in op.kernel(FEW_KEYS.name).configs(spec, FEW_KEYS_GPU):
            by_tile.setdefault(config[:-1], []).append(config)
        for configs in by_tile.values():
            for config in dict.fromkeys((configs[0]._replace(splits=1), configs[-1])):
                found.append(pytest.param(shape, config, id=f"{name} {config}"))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shape, config", gpu_configs(CROSS_ATTENTION, False))
def test_gpu_few_keys(shape, config, device):
    check_fwd_config(config, shape, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, config", gpu_configs(CROSS_ATTENTION_GRAD, True))
def test_gpu_few_keys_grad(shape, config, device):
    check_bwd_config(config, shape, torch.bfloat16, device)
