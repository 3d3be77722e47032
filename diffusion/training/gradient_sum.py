"""The sum of the gradient over processes, begun while backward still goes on."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..models.flat_parameters import FlatParameters
from ..runtime.distributed import Processes
from .gradient_norm import GradientNorm

BUCKET = 16 * 2**20  # bytes; fewer would be latency
_LEAST = 2**20  # bytes; a sum of less takes no shorter


class GradientSum:
    """Sums the flat gradient of all processes in a few buckets.

    Backward completes filters from the last layer to the first, and the flat buffer has them in the
    order of the model, so what is complete is always the end of their region: `ready` says how much
    of it, and sends it off once a bucket is full. The last buckets are smaller, each as large as
    what is left: nothing but the last one's sum comes after backward. `finish` sends the rest and
    waits. Of what is the sum of all processes, `norm` is told; alone, that is so at once. On a GPU
    a stream of its own waits for the sums and adds up the norm, so that this, too, goes on beside
    backward.
    """

    def __init__(
        self,
        flat: FlatParameters,
        processes: Processes,
        bucket: int = BUCKET,
        norm: GradientNorm | None = None,
    ) -> None:
        self._grad, self._filters_end = flat.grad, flat.filters_end
        self._processes, self._bucket = processes, bucket  # bytes
        self._norm = norm
        self._waits: list[tuple[Callable[[], object], int | None]] = []  # filters from where
        self._sent: int | None = None  # filters from here on are on their way
        beside = norm is not None and processes.count > 1 and flat.grad.is_cuda
        self._beside = torch.cuda.Stream(flat.grad.device) if beside else None

    @property
    def listener(self) -> Callable[[int], None] | None:
        """`ready`, or None where nobody wants to know."""
        return None if self._processes.count == 1 and self._norm is None else self.ready

    @property
    def urgent(self) -> bool:
        """Whether other processes wait for what is complete."""
        return self._processes.count > 1

    def begin(self, *complete: Tensor) -> None:
        """The next backward pass is the last before the update. What is `complete` by now is
        summed as well."""
        self._sent = self._filters_end
        if self._norm is not None:
            self._norm.begin()
        for part in complete:
            self._send(part)

    def ready(self, start: int) -> None:
        """As of the current stream, the gradients of filters from element `start` on are complete,
        or will be with further micro-batches."""
        if self._sent is None:
            return
        if self._norm is not None and not self.urgent:
            self._norm.ready(start)
        elif (self._sent - start) * self._grad.itemsize >= self._full(start):
            self._send(self._grad[start : self._sent], start)
            self._sent = start

    def _full(self, left: int) -> int:
        """How many bytes are sent off where `left` filter elements are still to come."""
        return min(self._bucket, max(left * self._grad.itemsize, _LEAST))

    def finish(self) -> None:
        """Let the current stream wait for the sum of the whole gradient, which is complete."""
        end = self._filters_end if self._sent is None else self._sent
        self._send(self._grad[:end])
        self._send(self._grad[self._filters_end :])
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        for wait, start in self._waits:
            self._meet(wait, start)
        self._waits, self._sent = [], None

    def _send(self, part: Tensor, start: int | None = None) -> None:
        if not part.numel():
            return
        wait = self._processes.start_sum(part)
        if self._beside is None or start is None:
            self._waits.append((wait, start))
        else:
            with torch.cuda.stream(self._beside):  # whose wait keeps nobody else waiting
                self._meet(wait, start)

    def _meet(self, wait: Callable[[], object], start: int | None) -> None:
        wait()
        if start is not None and self._norm is not None:
            self._norm.ready(start)
