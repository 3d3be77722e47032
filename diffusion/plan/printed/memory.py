"""The memory of what a plan runs, and how it is counted: in a dry run.

A plan knows the sizes and lives of its values (`streams.alive`), but not what a launcher makes for
itself, such as parts of sums, nor the rows that `RowSums` keeps. A dry run makes all of these, with
the shapes and for as long as on a GPU, over memory of the host that nobody writes.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..trees import tensors_in

# bytes: PyTorch's allocator gives multiples on a GPU, which torch.cuda.memory_allocated counts
_BLOCK = 512


STEP = "a step"
# what is counted of several, in words
ACTIVATIONS = "activations and their gradients"
ROWS = "rows that are summed to gradients of norms and biases"
LAUNCHES = "what launches need for themselves, such as parts of sums"


class Memory(NamedTuple):
    """Bytes at the peak of what a plan runs."""

    of: str
    beside: str  # what is there as well and not counted
    parts: dict[str, int]  # by what they are for
    at: str  # what is made then

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        said = (f"{size / 1e6:,.0f} MB of {what}" for what, size in self.parts.items() if size)
        total = f"{self.total / 1e6:,.0f} MB at the peak of {self.of} ({self.at})"
        return f"memory: {total}, beside {self.beside}: {'; '.join(said)}"


class Allocations(TorchDispatchMode):
    """Within the block, counts what is made and still there, in bytes as a GPU's allocator would
    give them, and remembers the most. What was made before, and on the device "meta", is not
    counted."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}  # of the storages that are there
        self._sizes: dict[int, int] = {}  # by those numbers
        self._made, self._now = 0, 0
        self.peak = 0
        self._at_peak: dict[int, int] = {}
        self._behind: list[tuple[int, str]] = []  # the peak so far, behind what has been made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = set(map(id, tensors_in((args, kwargs))))
        for x in tensors_in(made):
            if x.device.type != "meta" and id(x) not in given:
                self._add(x, args)
        return made

    def _add(self, x: Tensor, args: tuple) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self._numbers or not storage.nbytes():
            return
        if any(_same(a, storage) for a in tensors_in(args)):
            return  # a view of what was made before the block
        number, self._made = self._made, self._made + 1
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._numbers[storage._cdata], self._sizes[number] = number, size
        self._now += size
        if self._now > self.peak:
            self.peak, self._at_peak = self._now, dict(self._sizes)
        weakref.finalize(storage, self._freed, storage._cdata, number).atexit = False

    def _freed(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._now -= self._sizes.pop(number)

    def forget(self) -> None:
        """Begin again, with what is there."""
        self.peak = self._now
        self._behind.clear()

    def has_made(self, name: str) -> None:
        """For `at`."""
        self._behind.append((self.peak, name))

    @property
    def at(self) -> str:
        """What was made at the peak."""
        return next((name for peak, name in self._behind if peak == self.peak), "its end")

    @property
    def now(self) -> int:
        """Bytes of what is there."""
        return self._now

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Which of the memory counted so far these are in."""
        keys = (x.untyped_storage()._cdata for x in tensors)
        return {self._numbers[key] for key in keys if key in self._numbers}

    def at_peak(self, numbers: set[int]) -> int:
        """Bytes of these at the peak."""
        return sum(size for number, size in self._at_peak.items() if number in numbers)


def _same(x: Tensor, storage: torch.UntypedStorage) -> bool:
    return x.device.type != "meta" and x.untyped_storage()._cdata == storage._cdata
