"""The imitated graph does as a CUDA graph, and fails where that would read other numbers."""

import pytest
import torch

from diffusion.runtime import cuda_graph
from tests.plan.imitated_graph import Graph, Pool, captured
from tests.plan.runs import interpreted
from triton_kernels.reductions.row_sums import bias_grad


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=interpreted),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def graphs(request):
    """(the device, what captures a function's work: the graph and the function's result)."""
    is_gpu = request.param == "cuda"
    start = cuda_graph.captured if is_gpu else captured

    def capture(work, **options):
        graph = torch.cuda.CUDAGraph() if is_gpu else Graph()
        with start(graph, **options):
            made = work()
        return graph, made

    return torch.device(request.param), capture


def test_ops_are_repeated_and_python_is_not(graphs):
    device, capture = graphs
    x, calls = torch.ones(5, device=device), []

    def work():
        calls.append(len(calls) + 1)
        return x.add_(1) * calls[-1]

    work()
    graph, y = capture(work)
    assert x.tolist() == [2] * 5, "a capture computes nothing"
    graph.replay()
    first = y.clone()
    graph.replay()
    assert first.tolist() == [6] * 5 and y.tolist() == [8] * 5 and calls == [1, 2]


def test_launches_are_repeated(graphs):
    device, capture = graphs
    rows = torch.ones(3, 4, device=device)

    def work():
        total = rows.new_empty(4)
        bias_grad(rows, total)
        return total

    work()
    graph, total = capture(work)
    for k in (1, 2):
        rows.fill_(k)
        graph.replay()
        assert total.tolist() == [3 * k] * 4


def test_each_replay_draws_anew(graphs):
    device, capture = graphs
    graph, y = capture(lambda: torch.randn(8, device=device))
    found = []
    torch.manual_seed(0)
    for _ in range(2):
        graph.replay()
        found.append(y.clone())
    torch.manual_seed(0)
    assert all(torch.equal(torch.randn(8, device=device), x) for x in found)


def test_a_graph_reads_what_another_has_made(graphs):
    device, capture = graphs
    pool = Pool() if device.type == "cpu" else torch.cuda.graph_pool_handle()
    x = torch.ones(5, device=device)
    first, y = capture(lambda: x * 2, pool=pool)
    second, z = capture(lambda: y + 1, pool=pool)
    for k in (1, 2):
        x.fill_(k)
        first.replay()
        second.replay()
        assert z.tolist() == [2 * k + 1] * 5


def capture(work, pool=None):
    graph = Graph()
    with captured(graph, pool=pool):
        made = work()
    return graph, made


@interpreted
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("launched", [False, True])
def test_memory_that_nobody_has_kept(launched, writes):
    kept = torch.ones(1, 4)
    tensors = [kept, torch.ones(1, 4)] if writes else [torch.ones(1, 4), kept]

    def work():
        rows, total = tensors
        if launched:
            bias_grad(rows, total[0])
        else:
            total.copy_(rows)

    graph, _ = capture(work)
    graph.replay()
    tensors.clear()
    with pytest.raises(AssertionError, match="nobody has kept"):
        graph.replay()


def test_what_is_left_by_the_last_replay_is_no_number():
    """As are results after another graph of the pool was replayed."""
    pool, x = Pool(), torch.ones(3)
    total = []

    def work():
        total[:] = total or [torch.empty(3)]
        return total[0].add_(x)  # as if it began with what it ended with

    graph, y = capture(work, pool)
    graph.replay()
    assert y.isnan().all()
    first, y = capture(lambda: x * 2, pool)
    second, _ = capture(lambda: x * 3, pool)
    first.replay()
    assert y.tolist() == [2] * 3
    second.replay()
    assert y.isnan().all()


def test_numbers_are_not_read_in_a_capture():
    x = torch.ones(())
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(lambda: x.item())
