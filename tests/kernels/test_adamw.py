"""triton_kernels.optimizer.adamw against the reference and against torch.optim.AdamW."""

import math

import pytest
import torch

from triton_kernels import reference
from triton_kernels.optimizer import adamw
from triton_kernels.runtime.device import Device
from triton_kernels.tf32 import rounded_to_tf32

SIZES = {
    "one": 1,
    "a block": 1024,
    "blocks and a rest": 2 * 1024 + 13,
    "multiple of 16": 1024 + 48,
}
BETAS, EPS, WEIGHT_DECAY, DECAY = (0.9, 0.999), 1e-8, 0.01, 0.99
OPS = pytest.mark.parametrize("ops", [adamw, reference], ids=["triton", "torch"])


def make_hyper(step, device, *, lr=1e-3, max_norm=1.0):
    corrections = (1 - beta**step for beta in BETAS)
    values = (lr, *BETAS, EPS, WEIGHT_DECAY, *corrections, DECAY, max_norm)
    return torch.tensor(values, dtype=torch.float64, device=device)


class State:
    def __init__(self, size, device, dtype=torch.float32, shadow_dtype=None):
        generator = torch.Generator().manual_seed(0)
        self.param = torch.randn(size, generator=generator).to(device, dtype)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), torch.zeros_like(self.param)
        self.ema = self.param.clone()
        self.skipped = torch.zeros(1, dtype=torch.int32, device=device)
        self.shadow = None if shadow_dtype is None else self.param.to(shadow_dtype)

    def step(self, ops, grad, norm, hyper):
        ops.adamw_step(
            self.param, grad, self.exp_avg, self.exp_avg_sq, self.ema, norm, hyper, self.skipped,
            shadow=self.shadow,
        )  # fmt: skip

    def tensors(self):
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.ema, self.shadow)
        return [x for x in tensors if x is not None]


def gradients(size, steps):
    """Of all sizes, so that some are clipped and some are not."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        yield torch.randn(size, generator=generator) * (3.0 if step % 3 else 0.1) / size**0.5


def torch_optim(size, steps, dtype, max_norm=1.0):
    """Parameters after `steps` of torch.optim.AdamW, and their moving average."""
    param = State(size, "cpu", dtype).param.requires_grad_()
    ema = param.detach().clone()
    optimizer = torch.optim.AdamW(
        [param], lr=1e-3, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
    )
    for grad in gradients(size, steps):
        param.grad = grad.to(dtype)
        if max_norm > 0:
            torch.nn.utils.clip_grad_norm_([param], max_norm)
        optimizer.step()
        ema.lerp_(param.detach(), 1 - DECAY)
    return param.detach(), ema


@OPS
@pytest.mark.parametrize("max_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_hundred_steps_equal_torch_optim(ops, max_norm, device):
    """Budget: twice what float32 costs torch.optim.AdamW itself."""
    size = SIZES["blocks and a rest"]
    state = State(size, device)
    for step, grad in enumerate(gradients(size, 100), 1):
        grad = grad.to(device)
        hyper = make_hyper(step, device, max_norm=max_norm)
        state.step(ops, grad, ops.grad_norm(grad), hyper)
    exact = torch_optim(size, 100, torch.float64, max_norm)
    single = torch_optim(size, 100, torch.float32, max_norm)
    assert (exact[0] - State(size, "cpu").param).abs().mean() > 1e-3  # it did move
    for result, right, rounded in zip((state.param, state.ema), exact, single, strict=True):
        budget = 2 * (rounded - right).abs().max()
        assert (result.cpu() - right).abs().max() <= budget


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("max_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_step_equals_the_reference(size, max_norm, device):
    """The reference in float64; one step costs a few roundings."""
    shadow_dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    state = State(size, device, shadow_dtype=shadow_dtype)
    exact = State(size, device, torch.float64, shadow_dtype)
    for step, grad in enumerate(gradients(size, 3), 1):
        grad = grad.to(device)
        norm = adamw.grad_norm(grad)
        hyper = make_hyper(step, device, max_norm=max_norm)
        state.step(adamw, grad, norm, hyper)
        exact.step(reference, grad.double(), norm.double(), hyper)
    assert torch.equal(state.shadow, state.param.to(shadow_dtype))
    for result, expected in zip(state.tensors()[:4], exact.tensors()[:4], strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=1e-7)
    assert state.skipped.item() == 0


@OPS
def test_a_shadow_in_float32_is_rounded_to_tf32(ops, device):
    size = SIZES["blocks and a rest"]
    state = State(size, device)
    state.shadow = torch.empty_like(state.param)
    grad = torch.randn(size, device=device)
    state.step(ops, grad, ops.grad_norm(grad), make_hyper(1, device))
    assert torch.equal(state.shadow, rounded_to_tf32(state.param))
    assert not torch.equal(state.shadow, state.param)


@OPS
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter's NumPy
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_a_step_without_a_finite_norm_is_left_out(ops, bad, device):
    size = SIZES["blocks and a rest"]
    state = State(size, device, shadow_dtype=torch.float16)
    grad = torch.ones(size, device=device)
    state.step(ops, grad, ops.grad_norm(grad), make_hyper(1, device))
    before = [x.clone() for x in state.tensors()]
    grad[7] = bad
    for count in (1, 2):
        norm = ops.grad_norm(grad)
        assert not norm.isfinite().item()
        state.step(ops, grad, norm, make_hyper(2, device))
        assert state.skipped.item() == count
    for x, old in zip(state.tensors(), before, strict=True):
        assert torch.equal(x, old)
    grad[7] = 1.0
    state.step(ops, grad, ops.grad_norm(grad), make_hyper(2, device))
    assert state.skipped.item() == 2
    assert not torch.equal(state.param, before[0])


def test_a_zero_gradient_only_decays(device):
    state = State(SIZES["blocks and a rest"], device)
    before = state.param.clone()
    grad = torch.zeros_like(before)
    state.step(adamw, grad, adamw.grad_norm(grad), make_hyper(1, device))
    torch.testing.assert_close(state.param, before * (1 - 1e-3 * WEIGHT_DECAY), rtol=2e-7, atol=0)
    assert state.exp_avg.abs().max() == 0


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5 * 4096 + 17])
@pytest.mark.parametrize("chunks", [1, 2, 512], ids="chunks={}".format)
def test_grad_norm(size, chunks, device, monkeypatch):
    """With few chunks each takes several turns; with many, one. Of few programs each takes several
    chunks, which changes no bit."""
    monkeypatch.setattr(adamw, "_NORM_CHUNKS", chunks)
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    norm = adamw.grad_norm(grad)
    monkeypatch.setattr(Device, "loops", 2)
    assert torch.equal(adamw.grad_norm(grad), norm)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0].double(), grad.double().norm(), rtol=1e-6, atol=0)
    assert torch.equal(adamw.grad_norm(grad), norm)


@pytest.mark.parametrize("size", [4095, 3 * 8192, 5 * 4096 + 17])
def test_sums_of_squares_by_parts(size, device, monkeypatch):
    """Whatever the parts, the norm has the same bits, and no other sum is touched."""
    monkeypatch.setattr(adamw, "_NORM_CHUNKS", 3)
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    chunks, norm = adamw.norm_chunks(size), torch.empty(1, device=device)
    for first in range(chunks):
        sums = torch.full((chunks,), math.nan, device=device)
        count = chunks // 2
        adamw.square_sums(grad, sums, first, count)
        assert sums.isnan().sum() == chunks - count
        rest = (first + count) % chunks, chunks - count
        adamw.square_sums(grad, sums, *rest, norm=norm)
        assert torch.equal(norm, adamw.grad_norm(grad))


def test_no_parameters(device):
    state = State(0, device)
    grad = torch.empty(0, device=device)
    state.step(adamw, grad, adamw.grad_norm(grad), make_hyper(1, device))
    state.step(adamw, grad, torch.tensor([math.nan], device=device), make_hyper(1, device))
    assert state.skipped.item() == 1


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(5)}, r"grad has shape \(5,\); expected \(4,\)"),
        ({"param": torch.zeros(4).double()}, "param is torch.float64"),
        ({"ema": torch.zeros(8)[::2]}, "ema is torch.float32 with stride"),
        ({"hyper": torch.zeros(8).double()}, r"hyper has shape \(8,\); expected \(9,\)"),
        ({"norm": torch.zeros(())}, r"norm has shape \(\); expected \(1,\)"),
        ({"skipped": torch.zeros(1)}, "skipped is torch.float32"),
        (
            {"shadow": torch.zeros(4).double()},
            "expected contiguous torch.bfloat16 or torch.float16 or torch.float32",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change, message):
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "ema")
    arguments = {name: torch.zeros(4) for name in names}
    arguments |= {"norm": torch.zeros(1), "hyper": torch.zeros(9, dtype=torch.float64)}
    arguments["skipped"] = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        adamw.adamw_step(**{**arguments, **change})


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("first", "count"), [(1, 1), (-1, 1), (0, 2)])
def test_chunks_that_are_not_there_are_refused(first, count):
    with pytest.raises(ValueError, match=f"chunks {first} .. {first} \\+ {count} are asked for"):
        adamw.square_sums(torch.zeros(8), torch.zeros(1), first, count)


@pytest.mark.usefixtures("no_launch")
def test_a_norm_without_a_chunk_is_refused():
    with pytest.raises(ValueError, match="chunks 0 .. 0 \\+ 0 are asked for"):
        adamw.square_sums(torch.zeros(8), torch.zeros(1), 0, 0, norm=torch.zeros(1))


@pytest.mark.usefixtures("no_launch")
def test_grad_norm_refuses_a_strided_gradient():
    with pytest.raises(ValueError, match="grad is torch.float32 with stride"):
        adamw.grad_norm(torch.zeros(8)[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [20_494_211, 4 * 2**20], ids=["the model", "multiple of 16"])
def test_the_model_s_size(size, device):
    state = State(size, device, shadow_dtype=torch.bfloat16)
    exact = State(size, device, shadow_dtype=torch.bfloat16)
    for step in range(1, 4):
        grad = torch.randn(size, device=device) / size**0.5 * 2
        norm = adamw.grad_norm(grad)
        torch.testing.assert_close(norm[0].double(), grad.double().norm(), rtol=1e-6, atol=0)
        assert torch.equal(adamw.grad_norm(grad), norm)
        state.step(adamw, grad, norm, make_hyper(step, device))
        exact.step(reference, grad, norm, make_hyper(step, device))
    assert torch.equal(state.shadow, state.param.to(torch.bfloat16))
    for result, expected in zip(state.tensors()[:4], exact.tensors()[:4], strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.gpu
@OPS
def test_a_replayed_graph_follows_its_device_scalars(ops, device):
    """Capture fails if anything waits for the device."""
    size = 10_007
    state, eager = State(size, device), State(size, device)
    grad, hyper = torch.ones(size, device=device), make_hyper(1, device, lr=0.0)

    def step(target):
        target.step(ops, grad, ops.grad_norm(grad), hyper)

    step(State(size, device))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(state)
    for i in range(1, 4):
        grad.copy_(torch.randn(size, device=device))
        grad[0] = math.nan if i == 2 else 1.0
        hyper.copy_(make_hyper(i, device, lr=1e-3 * i))
        graph.replay()
        step(eager)
    assert state.skipped.item() == 1
    for result, expected in zip(state.tensors(), eager.tensors(), strict=True):
        assert torch.equal(result, expected)
