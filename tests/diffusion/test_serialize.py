"""Evaluations in several streams of a process take turns."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diffusion.factory import make_sampler
from diffusion.plan.inference import sampling_network
from diffusion.process.schedule import make_schedule
from diffusion.sampling.serialize import turn

from .test_inference import triton_backend, unet64

_CYCLES = 10**8  # about 60 ms of a GPU


def test_without_a_gpu_nothing_waits():
    with turn(torch.device("cpu")), turn(torch.device("cpu")):
        pass


@pytest.mark.gpu
def test_the_later_stream_runs_behind_the_earlier_one():
    x, seen = torch.zeros(2, 1, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]

    def second_sees(device: torch.device) -> float:
        """What a second stream reads while the first is about to write a one."""
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]), turn(device):
            torch.cuda._sleep(_CYCLES)
            x.fill_(1)
        with torch.cuda.stream(streams[1]), turn(device):
            seen.copy_(x)
        torch.cuda.synchronize()
        return seen.item()

    second_sees(torch.device("cpu"))  # loads the kernels, for which the GPU is waited for
    assert second_sees(torch.device("cpu")) == 0  # streams by themselves do not wait
    assert second_sees(torch.device("cuda")) == 1
    assert second_sees(torch.device("cuda", torch.cuda.current_device())) == 1


@pytest.mark.gpu
def test_an_exception_ends_a_turn():
    stream, device = torch.cuda.Stream(), torch.device("cuda")
    x = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    with pytest.raises(KeyError), torch.cuda.stream(stream), turn(device):
        torch.cuda._sleep(_CYCLES)
        x.fill_(1)
        raise KeyError
    with turn(device):
        assert x.item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 64])
def test_chains_of_two_threads_have_the_bits_of_one(batch):
    shape, rounds = (batch, 64, 64, 3), 5
    plans = [sampling_network(unet64(triton_backend())) for _ in range(2)]
    samplers = [
        make_sampler(
            make_schedule("linear", 1000), triton_backend(), "ddim", steps=10, device="cuda"
        )
        for _ in plans
    ]
    alone = [s.sample(p, shape, seed=3) for s, p in zip(samplers, plans, strict=True)]
    assert torch.equal(*alone)
    torch.cuda.synchronize()

    def draw(sampler, plan):
        with torch.cuda.stream(torch.cuda.Stream()):
            chains = [sampler.sample(plan, shape, seed=3) for _ in range(rounds)]
            return all(torch.equal(chain, alone[0]) for chain in chains)

    with ThreadPoolExecutor(len(plans)) as threads:
        assert list(threads.map(draw, samplers, plans)) == [True, True]
