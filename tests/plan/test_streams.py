"""What runs on other streams sees what it waits for, and the chain what it has waited for."""

import pytest
import torch

from diffusion.plan.execute import Streams
from diffusion.plan.schedule.moves import MAIN, SECOND, THIRD, Move
from diffusion.training.beside import Beside


def test_without_a_gpu_moves_run_in_their_order():
    streams, seen = Streams(torch.device("cpu"), others=2), []
    for number, stream in enumerate((MAIN, SECOND, THIRD, MAIN)):
        with streams.on(Move("launch", stream=stream)):
            seen.append(number)
    streams.join()
    assert seen == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_move_sees_what_was_there_where_it_waits_for_it(device):
    streams, n = Streams(device, others=2), 2**20
    x, seen = torch.zeros(n, device=device), []
    before = Move("launch", is_awaited=True)
    with streams.on(before):
        x += 1
    later = x + 1  # of the chain, which no other move waits for
    pieces = [Move("weight", stream=s, waits=(before,), is_awaited=True) for s in (SECOND, THIRD)]
    for piece in pieces:
        with streams.on(piece):
            torch.cuda._sleep(10**7)
            seen.append(x.clone())
    with streams.on(Move("wait", waits=tuple(pieces))):
        x.fill_(7)
    streams.join()
    assert all((y == 1).all() for y in seen) and (later == 2).all() and (x == 7).all()


@pytest.mark.gpu
def test_the_chain_waits_for_all_at_the_end(device):
    streams, x = Streams(device, others=2), torch.zeros(2**20, device=device)
    begin = Move("begin", is_awaited=True)
    with streams.on(begin):
        pass
    with streams.on(Move("weight", stream=THIRD, waits=(begin,))):
        torch.cuda._sleep(10**7)
        x.fill_(1)
    streams.join()
    assert (x.clone() == 1).all()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_work_beside_the_chain_is_done_when_it_is_joined(where):
    """And what it reads is there until then."""
    device = torch.device(where)
    beside, out = Beside(device), torch.zeros(2**22, device=device)

    def work(x):
        if x.is_cuda:
            torch.cuda._sleep(10**7)
        out.copy_(x)

    beside.run(work, torch.ones(2**22, device=device))
    y = torch.full((2**22,), 2.0, device=device)  # would have the memory that is read
    beside.join()
    assert (out == 1).all() and (y == 2).all()
