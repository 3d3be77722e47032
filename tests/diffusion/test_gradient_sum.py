"""What a step sends to the other processes, and when."""

import pytest
import torch
from torch import nn

from diffusion.models.flat_parameters import FlatParameters
from diffusion.runtime.backend import choose_backend
from diffusion.training import gradient_sum
from diffusion.training.gradient_norm import GradientNorm
from diffusion.training.gradient_sum import GradientSum


class Recorder:
    """Stands in for Processes: doubles what it is given, as a twin process would."""

    count = 2

    def __init__(self):
        self.sizes, self.waited = [], 0

    def start_sum(self, x):
        x *= 2
        self.sizes.append(x.numel())
        return self._wait

    def _wait(self):
        self.waited += 1


@pytest.fixture
def flat():
    convs = [nn.Conv2d(8, 8, 1, bias=i > 0) for i in range(4)]  # 64 elements each
    return FlatParameters(nn.Sequential(nn.Linear(8, 16), *convs))


def test_filters_come_first(flat):
    assert flat.filters_end == 256
    offsets = {name: view.storage_offset() for name, view in flat.views(flat.grad).items()}
    assert [offsets[f"{i}.weight"] for i in range(1, 5)] == [0, 64, 128, 192]
    assert min(offsets[name] for name in ("0.weight", "0.bias", "2.bias")) >= 256


def test_every_element_is_summed_once(flat):
    recorder = Recorder()
    total = GradientSum(flat, recorder, bucket=128 * 4)
    for _ in range(2):
        flat.grad.fill_(1)
        recorder.sizes.clear()
        total.begin()
        for start in (192, 128, 64):  # a bucket is two filters
            total.ready(start)
        assert recorder.sizes == [128]
        total.finish()
        assert recorder.sizes == [128, 128, flat.grad.numel() - 256]
        assert (flat.grad == 2).all()
    assert recorder.waited == 6


def test_nothing_is_sent_before_the_last_micro_batch(flat):
    recorder = Recorder()
    total = GradientSum(flat, recorder, bucket=4)
    total.ready(64)
    assert not recorder.sizes
    total.begin()
    total.ready(64)
    assert recorder.sizes == [192]


def test_the_last_buckets_are_smaller(flat, monkeypatch):
    """Each as what is left, so that little is left for the end."""
    monkeypatch.setattr(gradient_sum, "_LEAST", 32 * 4)
    recorder = Recorder()
    total = GradientSum(flat, recorder, bucket=128 * 4)
    total.begin()
    for start in range(240, -1, -16):
        total.ready(start)
    assert recorder.sizes == [128, 64, 32, 32]


def test_what_is_complete_is_sent_at_once(flat):
    recorder, loss = Recorder(), torch.ones(1)
    total = GradientSum(flat, recorder)
    total.begin(loss)
    assert recorder.sizes == [1] and loss.item() == 2
    total.finish()
    assert loss.item() == 2 and recorder.waited == 3


def test_a_network_that_says_nothing(flat):
    """Layer by layer nothing is known to be complete before the end."""
    recorder = Recorder()
    total = GradientSum(flat, recorder)
    flat.grad.fill_(1)
    total.finish()
    assert (flat.grad == 2).all() and recorder.waited == 2


@pytest.mark.parametrize("count", [1, 2], ids=["alone", "two processes"])
def test_the_norm_is_told_of_sums_that_are_complete(flat, count):
    """Alone, every part is one; else it is when it has been waited for."""
    recorder, told = Recorder(), []

    class Norm:
        def begin(self):
            told.append("begin")

        def ready(self, start):
            told.append((start, recorder.waited))

    recorder.count = count
    total = GradientSum(flat, recorder, bucket=128 * 4, norm=Norm())
    total.ready(192)  # of an earlier micro-batch
    total.begin()
    for start in (192, 128, 64, 0):
        total.listener(start)
    expected = [(192, 0), (128, 0), (64, 0), (0, 0)]
    assert told == ["begin", *(expected if count == 1 else [])]
    total.finish()
    assert told == ["begin", *(expected if count == 1 else [(128, 1), (0, 2)])]


def test_nobody_listens(flat):
    alone = Recorder()
    alone.count = 1
    assert GradientSum(flat, alone).listener is None


class Twin(Recorder):
    """On a GPU, where what waits is the stream that is current then."""

    def start_sum(self, x):
        super().start_sum(x)
        done = torch.cuda.current_stream().record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


@pytest.mark.gpu
def test_the_norm_is_added_up_beside_backward():
    """On a stream that waits for the sums; captured as a step is."""
    device = torch.device("cuda")
    network = nn.Sequential(*(nn.Conv2d(256, 256, 3, bias=False) for _ in range(8))).to(device)
    flat = FlatParameters(network)
    norm = GradientNorm(flat, choose_backend("triton", "bf16", device))
    total = GradientSum(flat, Twin(), bucket=2**22, norm=norm)
    given = torch.randn_like(flat.grad)

    def step():
        flat.grad.copy_(given)
        total.begin()
        for start in range(flat.filters_end, -1, -(256 * 256 * 9)):
            total.ready(start)
        total.finish()
        return norm.finish()

    expected = 2 * given.double().norm()
    for _ in range(3):
        torch.testing.assert_close(step().double().squeeze(), expected, rtol=1e-6, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for factor in (3.0, 0.5):
        given.mul_(factor)
        graph.replay()
        expected *= factor
        torch.testing.assert_close(found.double().squeeze(), expected, rtol=1e-6, atol=0)
