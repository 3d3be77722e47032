"""Small work that only the end of backward waits for, on a stream of its own."""

from collections.abc import Callable

import torch
from torch import Tensor


class Beside:
    """Runs pieces of work on a second CUDA stream, in order, each behind what the current one has
    been given so far. Without CUDA it just runs them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reads: list[tuple[Tensor, ...]] = []  # kept: the allocator knows of one stream only

    def run(self, work: Callable[..., None], *reads: Tensor) -> None:
        """Start `work(*reads)`, whose tensors are kept until `join`."""
        if self._stream is None:
            work(*reads)
            return
        self._reads.append(reads)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work(*reads)

    def join(self) -> None:
        """Let the current stream wait for all of it."""
        if self._reads:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._reads = []
