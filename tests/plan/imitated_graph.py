"""A CUDA graph on a CPU, for tests. As on a GPU

- what is captured are ops of PyTorch and launches of Triton, not the Python that asked for them;
- a capture computes nothing, and reads no number;
- a replay reads and writes the same addresses each time, and keeps nothing alive but the memory
  that captures have taken. It fails where a GPU would read or write what others have there by then;
- graphs of one pool reuse its memory. The least that may be left there by a replay is assumed:
  what the graph reads, and what it makes. All else is filled with NaN (bytes of 255).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from triton_kernels.reductions import row_sums
from triton_kernels.runtime import library

_NAN = 255  # as each byte: of a number of any width


class Pool:
    """Memory that captures have taken, in place of `torch.cuda.graph_pool_handle`'s."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.UntypedStorage] = {}


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.pool, self.read = Pool(), set()  # what is there before a replay, by address

    @torch.no_grad()
    def replay(self) -> None:
        gc.collect()  # objects that know each other keep no memory any more
        for key, memory in self.pool.memory.items():
            if key not in self.read:
                memory.fill_(_NAN)
        with torch.autocast("cpu", enabled=False):
            for again in self.work:
                again()

    def reset(self) -> None:
        self.work = []


@contextmanager
def captured(graph: Graph, pool: Pool | None = None, **_: Any) -> Iterator[None]:
    """In the place of `diffusion.runtime.cuda_graph.captured`."""
    graph.pool = pool or graph.pool
    recorder, run = _Recorder(graph), InterpretedFunction.run

    def launch(kernel, *args, grid, warmup, **options):
        with _disable_current_modes():
            recorder.do(partial(run, kernel, grid=grid, warmup=warmup), args, options)

    with (
        patch.object(InterpretedFunction, "run", launch),
        patch.object(library, "is_traced", lambda args: False),  # what ops launch is recorded
        patch.object(row_sums, "_capturing", lambda x: True),
        torch.random.fork_rng(devices=[]),
        np.errstate(all="ignore"),  # inputs may be anything
        recorder,
    ):
        yield
    recorder.undo()


class _Address:
    """Where a tensor is, whose memory others may give back."""

    def __init__(self, x: Tensor) -> None:
        self.memory, self.dtype = StorageWeakRef(x.untyped_storage()), x.dtype
        self.place = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, "a graph reads or writes memory that nobody has kept for it"
        return torch.empty(0, dtype=self.dtype).set_(memory, *self.place)


class _Recorder(TorchDispatchMode):
    """What is done within it becomes the work of a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.made = graph, set()
        self.outside: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}  # as it was

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.do(func, args, kwargs or {})

    def do(self, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """It, now and at each replay."""
        places = tree_map(self._place, (args, kwargs))
        given = {_memory(x) for x in map(_base, tree_leaves((args, kwargs))) if _is_here(x)}
        out = call(*args, **kwargs)
        results = tree_leaves(out)
        new = [(i, x) for i, x in enumerate(results) if _is_here(x) and _memory(x) not in given]
        for _, x in new:
            self.made.add(_memory(x))
            self.graph.pool.memory[_memory(x)] = x.untyped_storage()

        def again() -> None:
            args, kwargs = tree_map(_found, places)
            found = tree_leaves(call(*args, **kwargs))
            for i, x in new:
                x.copy_(found[i])

        if not getattr(call, "is_view", False) and "empty" not in str(call):
            self.graph.work.append(again)
        return out

    def undo(self) -> None:
        """Nothing has been computed."""
        for memory, before in self.outside.values():
            if not memory.expired():
                torch.UntypedStorage._new_with_weak_ptr(memory.cdata).copy_(before)
        for key in self.made:
            self.graph.pool.memory[key].fill_(_NAN)

    def _place(self, x: Any) -> Any:
        """What a replay knows of an argument."""
        if _base(x) is not x:
            x = copy(x)
            x.base = self._place(x.base)
        if not _is_here(x) or _memory(x) in self.made:
            return x
        key = _memory(x)
        if key in self.graph.pool.memory:  # of another graph
            self.graph.read.add(key)
            return x
        if key not in self.outside:
            memory = x.untyped_storage()
            self.outside[key] = StorageWeakRef(memory), memory.clone()
        return _Address(x)


def _base(x: Any) -> Any:
    """The tensor that a descriptor for TMA is of."""
    return x.base if hasattr(x, "block_shape") else x


def _found(x: Any) -> Any:
    if isinstance(x, _Address):
        return x.tensor()
    if isinstance(_base(x), _Address):
        x = copy(x)
        x.base = x.base.tensor()
    return x


def _is_here(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_meta


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
