"""Calls of an accelerated module by graphs: the numbers of launched ones, and nobody's memory is
written twice. On a CPU a graph is imitated (`imitated_graph`)."""

import copy
import logging

import pytest
import torch
from torch import nn

from diffusion import accelerate
from diffusion.plan.calls import planned, replay
from diffusion.plan.launch.table import launch_kernels, launch_reference
from tests.plan import imitated_graph
from tests.plan.runs import RUNS
from tests.plan.test_fuse_casts import Parts

LAUNCHED = 2  # calls of a plan before it has graphs


class Small(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.drop, self.time = nn.Dropout(p), nn.Linear(4, 16)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.first(x) + self.time(t)[:, :, None, None]
        return self.last(self.drop(torch.nn.functional.silu(self.norm(h))))


@pytest.fixture(params=RUNS)
def graphs(request, monkeypatch):
    """(the device, a list that gets an entry for each graph that is replayed). Without a GPU plans
    run on the reference, or by the kernels, whose launches are interpreted."""
    replayed, kind = [], request.param
    if kind != "cuda":
        launch = launch_reference if kind == "reference" else launch_kernels
        monkeypatch.setattr(planned, "launcher", lambda device: launch)
        monkeypatch.setattr(replay, "launch_kernels", launch)
        monkeypatch.setattr(replay, "_is_ready", lambda tensors: True)
        monkeypatch.setattr(replay, "captured", imitated_graph.captured)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", imitated_graph.Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", imitated_graph.Pool)
    made = replay.capture

    def capture(*given):
        run = made(*given)

        def noted():
            replayed.append(run)
            run()

        return noted

    monkeypatch.setattr(replay, "capture", capture)
    return torch.device("cuda" if kind == "cuda" else "cpu"), replayed


def small(device, **options):
    torch.manual_seed(0)
    return Small(**options).to(device)


def batch(device, seed=0, count=2):
    torch.manual_seed(seed)
    return torch.randn(count, 3, 8, 8).to(device), torch.randn(count, 4).to(device)


def loss(network, *given):
    return network(*given).float().square().mean()


def steps(network, device, count=6):
    """Losses of a usual loop."""
    optimizer, found = torch.optim.SGD(network.parameters(), lr=0.1), []
    for k in range(count):
        optimizer.zero_grad()
        value = loss(network, *batch(device, k))
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.long
def test_training_takes_the_same_steps(graphs):
    device, replayed = graphs
    launched, fast = accelerate(small(device), capture=False), accelerate(small(device))
    assert steps(launched, device) == steps(fast, device)
    assert len(replayed) == 2 * (6 - LAUNCHED)
    for p, q in zip(launched.parameters(), fast.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.long
def test_under_autocast_and_with_dropout(graphs):
    """Each call draws anew, and what a call draws is that of the launched one."""
    device, replayed = graphs
    found = []
    for capture in (False, True):
        network, given = accelerate(small(device, p=0.5), capture=capture), batch(device)
        torch.manual_seed(5)
        ys = []
        for _ in range(5):
            with torch.autocast(device.type, torch.bfloat16):
                ys.append(network(*given))
            ys[-1].float().sum().backward()
        found.append([*ys, *gradients(network)])
    assert replayed and same(*found)
    assert not torch.equal(found[1][4], found[1][3])


def test_parts_of_weights_under_autocast(graphs):
    """Gradients of q, k and v, which are one product, and of a skip, which is two."""
    device, replayed = graphs
    torch.manual_seed(0)
    module, found = Parts().to(device), []
    for capture in (False, True):
        network, gradients = accelerate(copy.deepcopy(module), capture=capture), []
        for seed in range(LAUNCHED + 2):
            torch.manual_seed(seed)
            x = torch.randn(2, 8, 4, 4).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                y = network(x).float().square().sum()
            gradients += torch.autograd.grad(y, list(network.parameters()))
        found.append(gradients)
    assert len(replayed) == 4 and same(*found)


def warm(network, device):
    """Calls until there are graphs."""
    for _ in range(LAUNCHED + 1):
        loss(network, *batch(device)).backward()
    network.zero_grad()


def gradients(network):
    return [p.grad.clone() for p in network.parameters()]


def expected(device, *seeds):
    """The sum of the gradients of these batches."""
    network = accelerate(small(device), capture=False)
    for seed in seeds:
        loss(network, *batch(device, seed)).backward()
    return gradients(network)


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.long
def test_gradients_are_accumulated(graphs):
    device, replayed = graphs
    fast = accelerate(small(device))
    warm(fast, device)
    kept = []
    for seed in (1, 2):
        loss(fast, *batch(device, seed)).backward()
        kept.append([p.grad for p in fast.parameters()])
    assert len(replayed) == 6 and same(gradients(fast), expected(device, 1, 2))
    first = torch.autograd.grad(loss(fast, *batch(device, 1)), list(fast.parameters()))
    loss(fast, *batch(device, 2)).backward()
    assert same(first, expected(device, 1))  # which the next call has not written


def test_two_calls_before_their_backward_passes(graphs):
    device, replayed = graphs
    fast = accelerate(small(device))
    warm(fast, device)
    del replayed[:]
    first, second = (loss(fast, *batch(device, seed)) for seed in (1, 2))
    with torch.no_grad():
        fast(*batch(device, 3))
    first.backward()
    second.backward()
    assert len(replayed) == 2 and same(gradients(fast), expected(device, 1, 2))


def test_a_call_without_backward_frees_the_graphs(graphs):
    device, replayed = graphs
    fast = accelerate(small(device))
    warm(fast, device)
    del replayed[:]
    value = loss(fast, *batch(device, 1))
    del value
    loss(fast, *batch(device, 2)).backward()
    assert len(replayed) == 3 and same(gradients(fast), expected(device, 2))


@torch.no_grad()
def test_evaluations(graphs):
    device, replayed = graphs
    fast, module = accelerate(small(device).eval()), accelerate(small(device).eval(), capture=False)
    ys = [fast(*batch(device, seed)) for seed in range(5)]
    assert len(replayed) == 5 - LAUNCHED
    assert same(ys, [module(*batch(device, seed)) for seed in range(5)])
    fast(*batch(device, 0, count=1))  # of another plan
    assert len(replayed) == 5 - LAUNCHED


def test_parameters_in_other_places(graphs):
    device, replayed = graphs
    fast = accelerate(small(device))
    warm(fast, device)
    del replayed[:]
    with torch.no_grad():
        for p in fast.parameters():
            p.data = p.data * 2
    double = accelerate(copy.deepcopy(fast.module), capture=False)
    for k in range(LAUNCHED + 1):
        assert torch.equal(loss(fast, *batch(device)), loss(double, *batch(device)))
        assert bool(replayed) == (k == LAUNCHED)


def test_buffers_that_a_call_writes(graphs):
    device, replayed = graphs
    nets = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    fast, launched = accelerate(nets[0]), accelerate(nets[1], capture=False)
    for seed in range(5):
        for net in (fast, launched):
            net(batch(device, seed)[0]).square().mean().backward()
    assert replayed
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_inputs(graphs):
    device, replayed = graphs
    fast, found = accelerate(small(device)), []
    for _ in range(LAUNCHED + 2):
        x, t = batch(device)
        x.requires_grad_()
        loss(fast, x, t).backward()
        found.append(x.grad)
    assert replayed and same(found, found[:1] * len(found))


def test_results_in_memory_of_the_caller_are_launched(graphs):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = nn.Linear(4, 4)

        def forward(self, x):
            return self.of(x), x.view(-1)

    device, replayed = graphs
    fast, x = accelerate(Beside().to(device)), torch.randn(2, 4, device=device)
    for _ in range(4):
        assert fast(x)[1].data_ptr() == x.data_ptr()
    assert not replayed


@pytest.mark.parametrize("p", [0, 0.5])
def test_backward_again(graphs, p):
    """What backward reads is launched anew, but for dropout, whose draws are gone; the next calls
    of the plan are launched."""
    device, replayed = graphs
    fast = accelerate(small(device, p=p))
    warm(fast, device)
    for call in range(2):
        replayed.clear()
        value = loss(fast, *batch(device))
        first = torch.autograd.grad(value, list(fast.parameters()), retain_graph=True)
        if call == 0 and p > 0:
            with pytest.raises(RuntimeError, match="second time: .*the next call"):
                value.backward()
        else:
            assert same(first, torch.autograd.grad(value, list(fast.parameters())))
            with pytest.raises(RuntimeError, match="second time"):
                value.backward()
        assert bool(replayed) == (call == 0)


def test_what_cannot_be_captured_is_launched(graphs, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("operation not permitted\nmore")

    device, _ = graphs
    monkeypatch.setattr(replay, "capture", fails)
    fast = accelerate(small(device))
    with caplog.at_level(logging.WARNING):
        found = steps(fast, device)
    assert found == steps(accelerate(small(device), capture=False), device)
    assert [r.getMessage() for r in caplog.records] == [
        "a network is launched kernel by kernel, without a CUDA graph: operation not permitted"
    ]


def test_copies_have_graphs_of_their_own(graphs):
    device, replayed = graphs
    fast = accelerate(small(device))
    warm(fast, device)
    other = copy.deepcopy(fast)
    del replayed[:]
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert loss(other, *batch(device)) == 0 and not replayed


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_copies_of_tensors_in_any_order_of_memory(is_contiguous, monkeypatch):
    monkeypatch.setattr(replay, "launch_kernels", launch_reference)
    some = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(7)]
    some += [torch.randn(3, 1).expand(3, 4), torch.arange(5), torch.randn(()), torch.randn(0, 3)]
    orders = [torch.empty(2, 3, 4, 5, device="meta"), *some[1:]] if is_contiguous else some
    copies = replay.Copies(some, orders)
    first = copies.made()
    assert same(first, some) and first[0].stride() == orders[0].stride()
    kept = [x.clone() for x in first]
    some[0].zero_()
    assert not same(copies.made(), kept) and same(first, kept)
