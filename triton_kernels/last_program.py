"""A reduction in one launch: the last program to arrive adds up what all of them have left.

Every program stores its part and takes a ticket of a counter; whoever draws the last one knows that
all parts are there, adds them in a fixed order, and sets the counter back. Which program that is
changes from run to run, the sum does not: no number is added by an atomic, so equal bits at every
run.

A counter must be zero before the launch and is zero after it, so two launches may share one only if
one follows the other. Launches of a stream do. A captured one may be replayed beside anything, so
it has counters to itself. Those have to be zero before the graph is replayed for the first time and
no other time: they come from memory that was cleared before the capture, without a node that would
clear them in every replay.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPARE = 2**18  # counters to be given to graphs: 1 MiB
_ALIGNMENT = 4  # counters: 16 bytes, so that one compiled kernel serves all

_lock = Lock()
_of_streams: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, Tensor] = {}  # that no graph has yet
_kept: list[Tensor] = []  # for good: graphs know their memory, or a stream may still be using it


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this is the last of so many programs that ask with this counter, which is then zero
    again. What any of them has stored before may be read by it afterwards."""
    tl.debug_barrier()  # one thread takes the ticket, after the stores of all
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def sum_of_parts(part_ptr, count, COUNT: tl.constexpr):
    """What the last program does: the sum of `count` parts, with COUNT a power of two from there
    on. They are read from the cache that all multiprocessors share."""
    offs = tl.arange(0, COUNT)
    return tl.sum(tl.load(part_ptr + offs, offs < count, 0.0, cache_modifier=".cg"))


def zero_counters(count: int, device: torch.device) -> Tensor:  # int32 [count]
    """For one launch in the current stream that leaves them zero. Of a launch that is being
    captured they are its own: they stay its own for as long as the process lives, a few bytes."""
    count = triton.cdiv(count, _ALIGNMENT) * _ALIGNMENT
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _take_spare(count, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counters = _of_streams.get((device, stream))
    if counters is None or counters.numel() < count:
        counters = _zeros(max(1024, triton.next_power_of_2(count)), device)
        _of_streams[device, stream] = counters
    if device.type == "cuda":
        _keep_spare(count, device)
    return counters[:count]


def _take_spare(count: int, device: torch.device) -> Tensor:
    with _lock:
        spare = _spare.get(device)
        if spare is None or spare.numel() < count:  # never run before: the graph clears its own
            return torch.zeros(count, dtype=torch.int32, device=device)
        _spare[device] = spare[count:]
        return spare[:count]


def _keep_spare(count: int, device: torch.device) -> None:
    """Have cleared memory for captures to come."""
    with _lock:
        spare = _spare.get(device)
        if spare is not None and spare.numel() >= max(_SPARE // 2, count):
            return
        _spare[device] = _zeros(max(_SPARE, count), device)


def _zeros(count: int, device: torch.device) -> Tensor:
    """Cleared memory for any stream, which stays. What this thread allocates may be meant for the
    pool of a graph: torch.compile's "reduce-overhead" warms up like that, and takes amiss what is
    left there. So another thread allocates."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)

    def make() -> Tensor:
        with torch.cuda.device(device):
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            torch.cuda.current_stream().synchronize()  # once
        return zeros

    with ThreadPoolExecutor(1) as other:
        zeros = other.submit(make).result()
    _kept.append(zeros)
    return zeros
