"""Reductions in one launch: how many launches an op is, and that no two disturb each other."""

import contextlib
import math

import pytest
import torch
import triton
from torch.autograd import DeviceType

import triton_kernels as ops
from triton_kernels.denoise import loss as loss_module
from triton_kernels.optimizer.adamw import norm_chunk
from triton_kernels.reductions import last_program

N, SHAPE = 5, (40, 37, 3)  # of each sample two programs of the loss
REPEATS = 20


@contextlib.contextmanager
def counted_launches(device):
    """A list with an entry for each kernel, or memset, that ran within the block."""
    launches = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            yield launches
            torch.cuda.synchronize()
        on_gpu = (e.name for e in profile.events() if e.device_type == DeviceType.CUDA)
        launches += on_gpu
        return
    executor = triton.runtime.interpreter.GridExecutor
    call = executor.__call__
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, *args, **kwargs):
            launches.append(self.fn.__name__)
            return call(self, *args, **kwargs)

        patch.setattr(executor, "__call__", counted)
        yield launches


class Loss:
    def __init__(self, device, n=N, shape=SHAPE):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
        angle = torch.linspace(0.1, 1.5, 10)
        table = torch.stack((torch.cos(angle), torch.sin(angle)), dim=1)
        rng = torch.tensor([7, 11])
        batch = images, torch.arange(n) % 10, table, rng
        self.batch = [x.to(device) for x in batch]
        self.output = torch.randn((n, *shape), generator=generator).to(device).requires_grad_()

    def __call__(self):
        return ops.denoise_loss(self.output, *self.batch)


def gradient(device, chunks=3):
    return torch.randn(chunks * norm_chunk(1) - 5, generator=torch.Generator().manual_seed(0)).to(
        device
    )


def all_counters_are_zero():
    kept = [*last_program._of_streams.values(), *last_program._kept]
    return not any(counters.any() for counters in kept)


def test_the_loss_and_its_gradient_are_a_launch_each(device):
    loss = Loss(device)
    loss().backward(torch.ones(N, device=device))  # compiles
    with counted_launches(device) as launches:
        value = loss()
    assert launches == ["denoise_loss_fwd_kernel"]
    dloss = torch.ones(N, device=device)
    loss.output.grad = None
    with counted_launches(device) as launches:
        value.backward(dloss)
    assert launches == ["denoise_loss_bwd_kernel"]


def test_clipping_and_the_update_are_a_launch_each(device):
    grad = gradient(device)
    state = [torch.zeros_like(grad) for _ in range(4)]
    hyper = torch.ones(9, dtype=torch.float64, device=device)
    skipped = torch.zeros(1, dtype=torch.int32, device=device)

    def step():
        param, exp_avg, exp_avg_sq, ema = state
        norm = ops.grad_norm(grad)
        ops.adamw_step(param, grad, exp_avg, exp_avg_sq, ema, norm, hyper, skipped)

    step()
    with counted_launches(device) as launches:
        step()
    assert sorted(launches) == ["_adamw_kernel", "_square_sums_kernel"]


def test_counters_are_zero_again(device):
    """Also after launches of fewer and of more programs than the one before."""
    expected = {n: Loss(device, n)() for n in (2, N)}
    for n in (N, 2, N):
        assert torch.equal(Loss(device, n)(), expected[n])
        ops.grad_norm(gradient(device))
        assert all_counters_are_zero()


def test_a_sum_that_is_not_finite_leaves_the_counter_as_any_other(device):
    grad = gradient(device)
    grad[7] = math.nan
    assert ops.grad_norm(grad).isnan()
    loss, right = Loss(device), Loss(device)()
    bits = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # a NaN, all set
    loss.output.data[1, 0, 0, 0], loss.output.data[3, 0, 0, 0] = bits.item(), math.inf
    found = loss()
    assert found[1].isnan() and found[3].isinf() and torch.equal(found[::2], right[::2])
    assert all_counters_are_zero()


def test_more_parts_than_a_warp_has_threads(device):
    loss = Loss(device, 1, (11, 4, 3))
    images, t, table, rng = loss.batch
    process = loss.output.detach(), images, None, None, t, table, rng, 0, "epsilon"
    config = loss_module._LossConfig(1, 1, 4)  # 33 programs
    for _ in range(3 if device.type == "cuda" else 1):
        found, _ = loss_module._loss(*process, keep=False, config=config)
        torch.testing.assert_close(found, loss(), rtol=1e-6, atol=0)
    assert all_counters_are_zero()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 32, 128])
def test_the_same_bits_beside_other_work(n, device):
    """Programs arrive in another order each time."""
    loss, grad = Loss(device, n, (64, 64, 3)), torch.randn(20_494_211, device=device)
    expected = loss().detach(), ops.grad_norm(grad)
    noise, other = torch.randn(2**24, device=device), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for repeat in range(REPEATS):
        with torch.cuda.stream(other):
            for _ in range(repeat % 4):
                noise.sin_()
        assert torch.equal(loss(), expected[0])
        assert torch.equal(ops.grad_norm(grad), expected[1])
    torch.cuda.synchronize()
    assert all_counters_are_zero()


def captured(run, repeats=1):
    """A graph of calls, and what they return."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for _ in range(repeats)]
    return graph, results


@pytest.mark.gpu
def test_graphs_and_streams_do_not_share_counters(device):
    """Two graphs and two streams launch the same kernels at the same time."""
    losses = [Loss(device, 32, (64, 64, 3)) for _ in range(4)]
    grads = [torch.randn(2**22, device=device) for _ in range(4)]
    for k, loss in enumerate(losses):
        loss.batch[3][1] += k  # of the noise
    runs = [lambda k=k: (losses[k]().detach(), ops.grad_norm(grads[k])) for k in range(4)]
    expected = [run() for run in runs]
    graphs = [captured(run, 10) for run in runs[:2]]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        for _, results in graphs:
            for pair in results:
                for x in pair:
                    x.fill_(math.nan)
        torch.cuda.synchronize()
        eager = [[], []]
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for _ in range(5):
            for k in (2, 3):
                with torch.cuda.stream(streams[k]):
                    eager[k - 2].append(runs[k]())
        torch.cuda.synchronize()
        found = [results for _, results in graphs] + eager
        for pairs, right in zip(found, expected, strict=True):
            for pair in pairs:
                assert all(torch.equal(x, y) for x, y in zip(pair, right, strict=True))
    assert all_counters_are_zero()


@pytest.mark.gpu
def test_a_replay_is_as_many_launches(device, monkeypatch):
    """No node clears the counters; and one that has to, where nothing ran before the capture."""
    monkeypatch.undo()  # what poisons outputs would be captured, too
    loss = Loss(device)
    graph, results = captured(lambda: loss().detach())
    with counted_launches(device) as launches:
        graph.replay()
    assert launches == ["denoise_loss_fwd_kernel"]
    expected = loss().detach()
    device = expected.device  # with its number
    spare = last_program._spare.pop(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = loss().detach()
    last_program._spare[device] = spare
    for _ in range(3):
        result.fill_(math.nan)
        graph.replay()
        assert torch.equal(result, expected)
    with counted_launches(device) as launches:
        graph.replay()
    assert len(launches) == 2


@pytest.mark.gpu
def test_graphs_take_from_memory_that_is_cleared_outside(device, monkeypatch):
    monkeypatch.setattr(last_program, "_SPARE", 64)
    monkeypatch.setattr(last_program, "_spare", {})
    loss = Loss(device)
    expected = loss().detach()
    graphs = [captured(lambda: loss().detach(), 2) for _ in range(10)]  # 32 counters a call
    for graph, results in graphs:
        graph.replay()
        assert all(torch.equal(x, expected) for x in results)
    assert all_counters_are_zero()


@pytest.mark.gpu
def test_counters_are_not_in_the_pool_that_torch_compile_warms_up_in(device, monkeypatch):
    loss, grad = Loss(device), gradient(device)
    arguments = loss.output.detach(), *loss.batch, grad
    expected = loss().detach(), ops.grad_norm(grad)
    monkeypatch.setattr(last_program, "_of_streams", {})
    monkeypatch.setattr(last_program, "_spare", {})

    def both(output, images, t, table, rng, grad):
        return ops.denoise_loss(output, images, t, table, rng), ops.grad_norm(grad)

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(torch.equal(x, y) for x, y in zip(compiled(*arguments), expected, strict=True))
    assert all_counters_are_zero()
