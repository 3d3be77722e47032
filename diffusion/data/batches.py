"""Which images a training step sees, and where they are taken from."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from .image_set import ImageSet
from .order import sample_index


class Batches:
    """The samples of every step, keyed by the global sample counter alone: position i of step k is
    sample k * batch_size + i of an endless sequence of shuffled epochs, whatever the number of
    processes and wherever the run was resumed.

    A set of at most `resident_bytes` lives on the device as uint8, and a batch is only an index.
    A larger one stays on disk or in host memory; the next batch is gathered by a thread meanwhile.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,  # global
        seed: int,
        device: torch.device,
        resident_bytes: int = 8 * 2**30,
    ) -> None:
        self.data, self.batch_size, self.seed, self.device = data, batch_size, seed, device
        self.resident = data.images.numel() <= resident_bytes
        self._images = data.images.to(device) if self.resident else data.images
        self._labels = None if data.labels is None else data.labels.to(device)
        self._thread = ThreadPoolExecutor(1) if not self.resident else None
        self._ahead: tuple[tuple[int, int, int], Future] | None = None

    def take(
        self, step: int, first: int, count: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Positions first .. first + count of the batch of `step`.

        Returns (images uint8 [M, H, W, C], index int64 [N] | None, labels int64 [N] | None), all on
        the device; without an index the images are the batch itself, M = N.
        """
        index = self._index(step, first, count)
        on_device = torch.from_numpy(index).to(self.device, non_blocking=True)
        labels = None if self._labels is None else self._labels[on_device]
        if self.resident:
            return self._images, on_device, labels
        key = (step, first, count)
        if self._ahead is not None and self._ahead[0] == key:
            images = self._ahead[1].result()
        else:
            images = self._gather(index)
        following = (step + 1, first, count)
        self._ahead = (following, self._thread.submit(self._gather, self._index(*following)))
        return images.to(self.device, non_blocking=True), None, labels

    def _index(self, step: int, first: int, count: int) -> np.ndarray:
        counter = step * self.batch_size + np.arange(first, first + count, dtype=np.int64)
        return sample_index(self.seed, counter, len(self.data.images))

    def _gather(self, index: np.ndarray) -> Tensor:
        return self._images[torch.from_numpy(index)].contiguous()
