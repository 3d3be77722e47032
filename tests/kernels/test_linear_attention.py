"""Linear attention against float64: outputs and every gradient, of odd numbers of positions and
channels, of several programs a head, with a memory and without, on poisoned outputs."""

import pytest
import torch

from triton_kernels import fused_ops
from triton_kernels.attention.linear import LINEAR_ATTENTION, linear_attention_forward
from triton_kernels.reference import fused
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import AttentionSpec
from triton_kernels.runtime.device import Device, describe

from .taken import take

NAMES = ("o", "dq", "dk", "dv", "d_memory_k", "d_memory_v")
ROUNDINGS = 4e-6  # of 24 bits, of sums over positions


@pytest.fixture(params=["one program a head", "several"])
def programs(request, monkeypatch):
    if request.param != "several":
        monkeypatch.setattr(Device, "busy", 1)


def make_case(n, t, heads, d, memory=0, *, mean=0.0, dtype=torch.float32, device="cpu"):
    """qkv [N, T, 3, H, D], the memory and do."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(n, t, 3, heads, d, generator=draw) + mean
    kept = torch.randn(2, memory, heads, d, generator=draw).to(device)
    do = torch.randn(n, t, heads, d, generator=draw)
    return qkv.to(device, dtype), tuple(kept) if memory else None, do.to(device, dtype)


def results(kernels, qkv, memory, do, scale=0.3, **options):
    q, k, v = qkv.unbind(2)
    o, context, lse = kernels.linear_attention_forward(q, k, v, memory, scale, **options)
    grads = torch.full_like(qkv, torch.nan)
    kept = context, lse, tuple(grads.unbind(2))
    made = kernels.linear_attention_backward(do, q, k, v, memory, scale, *kept, **options)
    return o, *grads.unbind(2), *(made or ())


def in_float64(qkv, memory, do):
    return qkv.double(), memory and tuple(x.double() for x in memory), do.double()


def rounded_once(qkv, memory, do):
    """By PyTorch in the type of qkv, as a module under autocast has it."""
    leaves = [qkv.detach().requires_grad_(), *(x.detach().requires_grad_() for x in memory or ())]
    dtype = qkv.dtype
    q, k, v = leaves[0].float().unbind(2)
    if memory:
        k, v = (
            torch.cat((kept.expand(q.shape[0], -1, -1, -1), x), 1)
            for kept, x in zip(leaves[1:], (k, v), strict=True)
        )
    k, v, q = k.softmax(1).to(dtype), v.to(dtype), (q.softmax(-1) * 0.3).to(dtype)
    context = torch.einsum("nshd,nshe->nhde", k.float(), v.float()).to(dtype)
    o = torch.einsum("nthd,nhde->nthe", q.float(), context.float()).to(dtype)
    dqkv, *made = torch.autograd.grad(o, leaves, do)
    return o.detach(), *dqkv.unbind(2), *made


def relative_error(got, exact):
    """Of one position nothing depends on q and k: their gradients are zero."""
    return ((got.double() - exact).norm() / exact.norm().clamp_min(0.05)).item()


SHAPES = [
    (2, 37, 2, 16, 3),
    (1, 1, 1, 16, 0),
    (3, 130, 1, 8, 0),
    (1, 70, 3, 20, 5),
    (2, 65, 2, 32, 0),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_outputs_and_gradients(case, programs, device):
    given = make_case(*case, device=device)
    exact = results(fused, *in_float64(*given))
    got = results(fused_ops, *given, allow_tf32=False)
    for name, a, b in zip(NAMES, got, exact, strict=False):
        assert relative_error(a, b) < ROUNDINGS, name


def test_of_16_bits(programs, device):
    """At most twice as far from float64 as by PyTorch in that precision."""
    given = make_case(2, 70, 2, 32, 4, dtype=torch.float16, device=device)
    exact, low = results(fused, *in_float64(*given)), rounded_once(*given)
    for name, a, b, c in zip(NAMES, results(fused_ops, *given), low, exact, strict=True):
        assert relative_error(a, c) < 2 * relative_error(b, c) + ROUNDINGS, name
        assert a.dtype == b.dtype, name


@pytest.mark.parametrize("mean", [30.0, -300.0])
def test_large_numbers(mean, device):
    """Exponentials of them do not overflow: a softmax sees differences alone."""
    given = make_case(1, 40, 1, 16, 2, mean=mean, device=device)
    exact = results(fused, *in_float64(*given))
    for name, a, b in zip(NAMES, results(fused_ops, *given, allow_tf32=False), exact, strict=True):
        assert relative_error(a, b) < ROUNDINGS * abs(mean), name


def test_it_is_what_modules_write(device):
    """As of [N, heads, D, T], by softmaxes and einsums."""
    qkv, memory, _ = make_case(2, 12, 2, 16, 3, device=device)
    q, k, v = (x.permute(0, 2, 3, 1) for x in qkv.unbind(2))
    k, v = (
        torch.cat((m.permute(1, 2, 0).expand(2, -1, -1, -1), x), -1)
        for m, x in zip(memory, (k, v), strict=True)
    )
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    o = torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2) * 0.25)
    for kernels in (fused, fused_ops):
        made = kernels.linear_attention_forward(*qkv.unbind(2), memory, 0.25, allow_tf32=False)
        assert relative_error(made[0], o.permute(0, 3, 1, 2).double()) < ROUNDINGS


def test_what_the_registry_says_of_it():
    gpu = CHIPS["h100"].gpu
    for given, why in (
        (AttentionSpec(4, "bf16", 64, 256), "heads of 256 channels; at most 64"),
        (AttentionSpec(4, "bf16", 64, 32, keys=200), "a memory of 136 positions; at most 64"),
    ):
        assert why in LINEAR_ATTENTION.refuse(given, gpu)
    assert LINEAR_ATTENTION.refuse(AttentionSpec(4, "bf16", 64, 32), gpu) is None


def test_keys_of_other_strides_are_refused(device):
    qkv, *_ = make_case(1, 8, 2, 16, device=device)
    q, k, v = qkv.unbind(2)
    with pytest.raises(AssertionError):
        linear_attention_forward(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, None, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [16, 24, 32, 64])
def test_on_a_gpu(d, dtype, monkeypatch):
    """Every configuration, three times each."""
    given = make_case(3, 300, 2, d, 4, dtype=dtype, device="cuda")
    exact, low = results(fused, *in_float64(*given)), rounded_once(*given)
    gpu, (kernel,) = describe(torch.device("cuda")), LINEAR_ATTENTION.kernels
    for config in kernel.configs(AttentionSpec(6, "bf16", 300, d), gpu):
        take(monkeypatch, linear_attention=config, linear_attention_bwd=config)
        for tf32 in (False, True)[: 1 + (dtype == torch.float32)]:
            floor = 2e-3 if tf32 else ROUNDINGS
            for _ in range(3):
                got = results(fused_ops, *given, allow_tf32=tf32)
                for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
                    assert relative_error(a, c) < 2 * relative_error(b, c) + floor, name
