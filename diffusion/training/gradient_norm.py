"""The norm of the flat gradient, most of it summed while backward still goes on."""

import torch
from torch import Tensor

from triton_kernels.optimizer.adamw import norm_chunk, norm_chunks, square_sums

from ..models.flat_parameters import FlatParameters
from ..runtime.backend import Backend

_LEAST = 2**20  # elements that are worth a launch before the end


class GradientNorm:
    """Sums the squares of the filters' gradients as they are completed, from the last layer to the
    first, see `GradientSum`. What is left for the end is the first layers' filters and everything
    that is no filter.

    The squares are summed in chunks that depend on the size of the gradient alone, so the norm has
    the same bits whatever was summed when.
    """

    def __init__(self, flat: FlatParameters, backend: Backend) -> None:
        self._grad, self._ops = flat.grad, backend.ops
        self.norm = torch.zeros(1, device=flat.grad.device)
        self._sums: Tensor | None = None  # of every chunk; None: this backend takes all at once
        if backend.name == "triton":
            size = flat.grad.numel()
            self._chunk = norm_chunk(size)
            self._sums = flat.grad.new_zeros(norm_chunks(size))
            self._filters = flat.filters_end // self._chunk  # chunks of nothing but filters
            self._left = self._filters  # the first so many of them are still to be summed

    def begin(self) -> None:
        """Nothing of the gradient is complete yet."""
        if self._sums is not None:
            self._left = self._filters

    def ready(self, start: int) -> None:
        """As of the current stream, the gradients of filters from element `start` on are complete,
        and as they will be for the update."""
        if self._sums is None:
            return
        first = -(-start // self._chunk)
        if (self._left - first) * self._chunk >= _LEAST:
            square_sums(self._grad, self._sums, first, self._left - first)
            self._left = first

    def finish(self) -> Tensor:
        """The norm, float32 [1], overwritten by the next: the whole gradient is complete."""
        if self._sums is None:
            return self.norm.copy_(self._ops.grad_norm(self._grad))
        chunks = self._sums.numel()
        rest = max(1, chunks - self._filters + self._left)  # one, though it be summed already
        square_sums(self._grad, self._sums, self._filters % chunks, rest, norm=self.norm)
        self.begin()
        return self.norm
