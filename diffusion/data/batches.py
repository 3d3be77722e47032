"""Which images a training step sees, and where they are taken from."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .context import Context
from .order import sample_index
from .stored_images import StoredImages
from .values import Latents


class Samples(Protocol):
    """What can be trained on: an `ImageSet`, or chunks of actions."""

    images: Tensor | StoredImages  # uint8 or float32 [M, H, W, C]
    labels: Tensor | None  # [M, ...], what the network is conditioned on

    def __len__(self) -> int: ...


class Batches:
    """This process's share of every batch, in tensors that stay where they are.

    Position i of step k is sample begins + k * batch_size + i of an endless sequence of shuffled
    epochs, whatever the number of processes and wherever the run was resumed. `begins` is 0 unless
    earlier steps had another batch size: the sequence then goes on where they ended. Of a part of a
    set (`held_out.Rows`) its `rows` say which images these are.

    `load` fills the tensors for a step, `part` hands them out; a captured step replays `part` and
    finds there what `load` has written. A set of at most `resident_bytes` lives on the device as it
    is, and a batch is only an index. A larger one stays on disk or in host memory, and a thread
    gathers the next batch meanwhile.
    """

    def __init__(
        self,
        data: Samples,
        batch_size: int,  # global
        seed: int,
        device: torch.device,
        first: int = 0,  # the share: positions first .. first + count of the global batch
        count: int | None = None,  # None: all of it
        resident_bytes: int = 8 * 2**30,
        begins: int = 0,  # sample of position 0 of step 0, were all steps of this batch size
    ) -> None:
        self.data, self.batch_size, self.seed, self.device = data, batch_size, seed, device
        self.begins = begins
        self.first, self.count = first, batch_size if count is None else count
        self._index = torch.zeros(self.count, dtype=torch.int64, device=device)
        self._labels = None if data.labels is None else data.labels.to(device)
        vectors = getattr(data, "vectors", None)
        self._vectors = None if vectors is None else vectors.to(device)
        self._sequences: Context | None = getattr(data, "context", None)
        beside = 0
        if self._sequences is not None:
            self._lengths, beside = self._sequences.lengths.to(device), self._sequences.nbytes
        self._rows: np.ndarray | None = getattr(data, "rows", None)  # int64 [len(data)]
        # of latents mean and log variance are stored, from which a step draws
        self.are_moments = isinstance(getattr(data, "values", None), Latents)
        condition = getattr(data, "condition", None)
        self.given_channels = 0 if condition is None else condition.channels  # the images' last
        self.resident = data.images.nbytes + beside <= resident_bytes
        self._check = getattr(data, "check", lambda index=None: None)  # before images are read
        if self.resident:
            self._check()
            self._images = data.images.to(device)
            if self._sequences is not None:
                self._tokens = self._sequences.tokens_on(device)
            return
        self._images = torch.empty(
            self.count, *data.images.shape[1:], dtype=data.images.dtype, device=device
        )
        if self._sequences is not None:
            shape = self.count, self._sequences.most, self._sequences.dim
            self._tokens = torch.empty(shape, dtype=self._sequences.dtype, device=device)
        self._thread = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future] | None = None  # the step that the thread gathers

    def load(self, step: int) -> None:
        """Fill the tensors for `step`, without waiting for the device."""
        index = self._indices(step)
        self._index.copy_(_staged(torch.from_numpy(index), self.device), non_blocking=True)
        if self.resident:
            return
        if self._ahead is not None and self._ahead[0] == step:
            images, tokens = self._ahead[1].result()
        else:
            images, tokens = self._gather(index)
        self._ahead = (step + 1, self._thread.submit(self._gather, self._indices(step + 1)))
        self._images.copy_(images, non_blocking=True)
        if tokens is not None:
            self._tokens.copy_(tokens, non_blocking=True)

    def part(self, start: int, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Positions start .. start + count of the share.

        Returns (images [M, H, W, C], index int64 [N] | None, labels [N, ...] | None), all on the
        device; without an index the images are the part itself, M = N.
        """
        index = self._index[start : start + count]
        labels = None if self._labels is None else self._labels.index_select(0, index)
        if self.resident:
            return self._images, index, labels
        return self._images[start : start + count], None, labels

    def vectors(self, start: int, count: int) -> Tensor | None:  # float32 [N, D]
        """Those of the same positions, if there are any."""
        index = self._index[start : start + count]
        return None if self._vectors is None else self._vectors.index_select(0, index)

    def sequences(self, start: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Tokens [N, L, D] and lengths int64 [N] of the same positions, if there are any."""
        if self._sequences is None:
            return None
        index = self._index[start : start + count]
        lengths = self._lengths.index_select(0, index)
        if self.resident:
            return self._tokens.index_select(0, index), lengths
        return self._tokens[start : start + count], lengths

    def _indices(self, step: int) -> np.ndarray:
        positions = np.arange(self.first, self.first + self.count, dtype=np.int64)
        samples = self.begins + step * self.batch_size + positions
        index = sample_index(self.seed, samples, len(self.data))
        return index if self._rows is None else self._rows[index]

    def _gather(self, index: np.ndarray) -> tuple[Tensor, Tensor | None]:
        self._check(index)
        chosen = torch.from_numpy(index)
        images = _staged(self.data.images[chosen], self.device)
        if self._sequences is None:
            return images, None
        return images, _staged(self._sequences[chosen][0], self.device)


def _staged(x: Tensor, device: torch.device) -> Tensor:
    """In pinned memory, from which a GPU copies while the host goes on."""
    return x.pin_memory() if device.type == "cuda" else x
