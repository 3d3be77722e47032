"""Evaluations of a network take turns on a GPU, in whatever streams a process draws.

Kernels of sampling have programs that wait for one another, and need all of them to be on the GPU
(`triton_kernels.conv.hopper.epilogue_grid_sync`). Of two such kernels at once, in two streams, each
might have some multiprocessors and wait for those that the other one has. So the later evaluation
begins when the earlier one has ended. Nothing waits on the host; in one stream nothing waits at
all.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()  # the same thread may draw something while it draws, in `progress`
_last: dict[int, torch.cuda.Event] = {}  # by the device's index: the end of the evaluation before


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """What is launched within the block, on the current stream, runs behind everything that was
    launched in such a block before. Within a capture it does nothing: whoever replays the graph
    does it then."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        stream = torch.cuda.current_stream(index)
        if index in _last:
            stream.wait_event(_last[index])
        else:
            _last[index] = torch.cuda.Event()
        try:
            yield
        finally:
            _last[index].record(stream)
