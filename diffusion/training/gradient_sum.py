"""The sum of the gradient over processes, begun while backward still goes on."""

from collections.abc import Callable

from torch import Tensor

from ..models.flat_parameters import FlatParameters
from ..runtime.distributed import Processes
from .gradient_norm import GradientNorm

BUCKET = 16 * 2**20  # bytes; fewer would be latency, more would wait for the last layer


class GradientSum:
    """Sums the flat gradient of all processes in a few buckets.

    Backward completes filters from the last layer to the first, and the flat buffer has them in the
    order of the model, so what is complete is always the end of their region: `ready` says how much
    of it, and sends it off once a bucket is full. `finish` sends the rest and waits. Of what is the
    sum of all processes, `norm` is told; alone, that is so at once.
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
        elif (self._sent - start) * self._grad.itemsize >= self._bucket:
            self._send(self._grad[start : self._sent], start)
            self._sent = start

    def finish(self) -> None:
        """Let the current stream wait for the sum of the whole gradient, which is complete."""
        end = self._filters_end if self._sent is None else self._sent
        self._send(self._grad[:end])
        self._send(self._grad[self._filters_end :])
        for wait, start in self._waits:
            wait()
            if start is not None and self._norm is not None:
                self._norm.ready(start)
        self._waits, self._sent = [], None

    def _send(self, part: Tensor, start: int | None = None) -> None:
        if part.numel():
            self._waits.append((self._processes.start_sum(part), start))
