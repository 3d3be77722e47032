"""A reduction in one launch: the last program to arrive adds up what all of them have left.

Every program stores its part and takes a ticket of a counter; whoever draws the last one knows that
all parts are there, adds them in a fixed order, and sets the counter back. Which program that is
changes from run to run, the sum does not: no number is added by an atomic, so equal bits at every
run. Where every part is one number its presence is the sign that it is there, and neither has to
wait for the other (`hand_in`).

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
_ALIGNMENT = 16  # counters: 64 bytes, which memory sends at once; one compiled kernel serves all

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


@triton.jit
def fetch_slots(slots_ptr, SLOTS: tl.constexpr):
    """Ask for what `hand_in` needs, long before it does: nobody has touched it since the last
    launch."""
    tl.load(slots_ptr + tl.arange(0, SLOTS), volatile=True)
    tl.debug_barrier()  # or the compiler puts it off


@triton.jit
def hand_in(part, slots_ptr, index, programs, SLOTS: tl.constexpr):
    """Whether this is the last of so many programs that hand in a float32, number `index` of them,
    and, if it is, the sum of all in their order. The slots, int32, are zero before the launch and
    after it; SLOTS is a power of two and more than the programs, for the last slot is the counter.

    The ticket is taken while the part is still on its way. The last program looks until all have
    come, and they were sent before their tickets were taken: it waits for memory, never for a
    program."""
    # a number's bits and one are not zero, but of a NaN whose bits are all set
    word = tl.where(part == part, part, float("nan")).to(tl.int32, bitcast=True) + 1
    tl.atomic_xchg(slots_ptr + index, word, sem="relaxed")
    last = tl.atomic_add(slots_ptr + SLOTS - 1, 1, sem="relaxed") == programs - 1
    total = part
    if last:
        offs = tl.arange(0, SLOTS)
        mask = offs < programs
        words = tl.load(slots_ptr + offs, mask, 1, volatile=True)
        while tl.min((words != 0).to(tl.int32)) == 0:
            words = tl.load(slots_ptr + offs, mask, 1, volatile=True)
        tl.debug_barrier()  # every warp has seen them all: they may be cleared
        if SLOTS > 32:  # a warp has seen some in the place of another
            words = tl.load(slots_ptr + offs, mask, 1, volatile=True)
            tl.debug_barrier()
        total = tl.sum(tl.where(mask, (words - 1).to(tl.float32, bitcast=True), 0.0))
        tl.store(slots_ptr + offs, 0)
    return last, total


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
