"""Calls of an accelerated module as CUDA graphs.

Python needs longer to launch some hundred kernels than a GPU to run them. So the passes of a plan
whose call comes again with parameters in the same places become CUDA graphs, and later calls replay
them:

- A graph reads parameters where they are. Other tensors of a call, such as images, are copied to
  memory of the graph.
- Results and gradients are copies, since the next call writes them anew.
- What backward reads stays in memory of the graphs, which all graphs of a module share. So while a
  forward pass waits for its backward pass, other calls of the module are launched one by one, as
  are the first calls of each plan, all on a CPU, and those within a capture of the caller's own.
- The graph of backward writes over what it has read. Once a plan's backward was asked to keep that
  (retain_graph), its calls are launched.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from triton_kernels.reductions.row_sums import Tables

from ...runtime.cuda_graph import captured
from ..build import Plan
from ..execute import Streams, run_moves
from ..graph import Value
from ..launch.pytorch import copy_all, is_reordered
from ..launch.table import launch_kernels
from ..schedule.moves import Move

log = logging.getLogger(__name__)

_FIRST = 2  # calls of a plan that are launched, in which kernels are compiled
_MOST = 8  # plans of a module with graphs
_LAUNCHED = "a network is launched kernel by kernel"
_ALIGNMENT = 256  # bytes, between the gradients of a call


class Replays:
    """The graphs of a module's plans."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Plan, _Calls] = weakref.WeakKeyDictionary()
        self._pool: Any = None
        self._using: weakref.ref[Replay] | None = None  # the call whose values are in the memory
        self._lock = threading.Lock()
        self._turn = _Turn()

    def __reduce__(self) -> tuple:
        return Replays, ()  # a copy has graphs of its own

    def of(self, made: Plan, tensors: Sequence[Tensor]) -> "Replay | None":
        """The graphs for a call with these inputs and parameters; None: it is launched. The call
        has them until its `Replay` is done, or nobody has that any more."""
        if not _is_ready(tensors) or made.retained or made.gives_back:
            return None
        with self._lock:
            using = None if self._using is None else self._using()
            if using is not None and not using.is_done:
                return None
            graphs = self._graphs(made, tensors)
            if graphs is None:
                return None
            replay = Replay(graphs, self._turn)
            self._using = weakref.ref(replay)
            return replay

    def _graphs(self, made: Plan, tensors: Sequence[Tensor]) -> "Graphs | None":
        places = tuple(tensors[i].data_ptr() for i in made.fixed)
        calls = self._calls.get(made)
        if calls is None or calls.places != places:
            calls = self._calls[made] = _Calls(places)
        calls.count += 1
        if calls.graphs is None and calls.count > _FIRST and not calls.failed:
            if sum(other.graphs is not None for other in self._calls.values()) >= _MOST:
                return None
            try:
                calls.graphs = self._captured(made, tensors)
            except RuntimeError as error:
                calls.failed = True
                reason = str(error).strip().splitlines()[0]
                log.warning(
                    "a network is launched kernel by kernel, without a CUDA graph: %s", reason
                )
        return calls.graphs

    def _captured(self, made: Plan, tensors: Sequence[Tensor]) -> "Graphs":
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode(False), torch.no_grad():
            return Graphs(made, tensors, self._pool)


class _Calls:
    """Of one plan, with parameters in the same places."""

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places, self.count, self.failed = places, 0, False
        self.graphs: Graphs | None = None


def _is_ready(tensors: Sequence[Tensor]) -> bool:
    """Whether what reads the tensors may be captured now."""
    if not tensors or not all(x.is_cuda for x in tensors):
        return False
    here = {x.device.index for x in tensors} == {torch.cuda.current_device()}
    return here and not torch.cuda.is_current_stream_capturing()


def capture(
    moves: Iterable[Move],
    values: dict[Value, Tensor],
    pool: Any,
    tables: Tables | None = None,  # of a backward pass
) -> Callable[[], None]:
    """What makes these moves again, over the same memory. The moves are not made yet."""
    graph, device = torch.cuda.CUDAGraph(), next(iter(values.values())).device
    streams = Streams(device, others=1)
    with captured(graph, pool=pool, capture_error_mode="thread_local"):
        # made here, so that what keeps its rows is memory of the graph, too
        launch = launch_kernels if tables is None else launch_kernels.of_backward(tables, device)
        run_moves(moves, values, streams, launch)
        streams.join()
    return graph.replay


class _Turn:
    """Within it the current stream has the memory of the graphs, after whichever had it before."""

    def __init__(self) -> None:
        self.last: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        if self.last is not None:
            torch.cuda.current_stream().wait_event(self.last)

    def __exit__(self, *error: object) -> None:
        if torch.cuda.is_initialized():
            self.last = torch.cuda.current_stream().record_event()


class Replay:
    """One call by its graphs."""

    def __init__(self, graphs: "Graphs", turn: _Turn) -> None:
        self.graphs, self.turn, self.is_done = graphs, turn, False

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results."""
        with self.turn:
            results = self.graphs.run_forward(tensors)
        self.is_done = self.graphs.backward is None
        return results

    def backward(self, dys: Sequence[Tensor | None]) -> dict[Value, Tensor]:
        """The gradients that the plan makes, of those of the results; once."""
        with self.turn:
            grads = self.graphs.run_backward(dys)
        self.is_done = True
        return grads


class Graphs:
    """The passes of a plan as CUDA graphs."""

    def __init__(
        self,
        made: Plan,
        tensors: Sequence[Tensor],  # of a call: inputs and parameters
        pool: Any,
    ) -> None:
        graph, back = made.graph, made.backward
        device = tensors[0].device
        fixed = set(made.fixed)
        self.own = {i: torch.empty_like(x) for i, x in enumerate(tensors) if i not in fixed}
        starts = [*graph.inputs, *graph.parameters.values()]
        read = [self.own.get(i, x.detach()) for i, x in enumerate(tensors)]
        values = dict(zip(starts, read, strict=True)) | graph.constants
        self.backward: Callable[[], None] | None = None  # None: it only evaluates
        with torch.autocast(device.type, enabled=False):
            self.forward = capture(made.schedule.forward, values, pool)
            self.results = [values[v] for v in graph.outputs]
            if back is None:
                return
            seeds = [back.seeds.get(v) for v in graph.outputs]
            self.seeds = [  # gradients of the results
                v if v is None else torch.empty(v.shape, dtype=v.dtype, device=device)
                for v in seeds
            ]
            values.update((v, x) for v, x in zip(seeds, self.seeds, strict=True) if x is not None)
            self.backward = capture(made.schedule.backward, values, pool, made.tables)
        wanted = {back.grads[v]: x for v, x in zip(starts, tensors, strict=True) if v in back.grads}
        self.grads = {v: values[v] for v in wanted}
        grads = list(self.grads.values())
        pairs = zip(grads, wanted.values(), strict=True)
        self.copies = Copies(grads, [x if is_reordered(g, x) else g for g, x in pairs])

    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for i, own in self.own.items():
            own.copy_(tensors[i].detach())
        self.forward()
        return tuple(y.clone() for y in self.results)

    def run_backward(self, dys: Sequence[Tensor | None]) -> dict[Value, Tensor]:
        for seed, dy in zip(self.seeds, dys, strict=True):
            if seed is not None:
                seed.zero_() if dy is None else seed.copy_(dy)
        self.backward()
        return dict(zip(self.grads, self.copies.made(), strict=True))


class Copies:
    """Copies of the same tensors, again and again: those of a dtype in one piece of memory, which
    few launches fill, each in the order of another tensor."""

    def __init__(self, tensors: list[Tensor], orders: list[Tensor]) -> None:
        self.tensors, self.slots = tensors, {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            step = _ALIGNMENT // dtype.itemsize
            those = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            sizes = [-(-tensors[i].numel() // step) * step for i in those]
            starts = accumulate(sizes, initial=0)
            # of a tensor with gaps, or that overlaps itself, the strides of one without
            strides = [torch.empty_like(orders[i], device="meta").stride() for i in those]
            self.slots[dtype] = sum(sizes), list(zip(those, strides, starts, strict=False))

    def made(self) -> list[Tensor]:
        """New copies."""
        found = list(self.tensors)
        for dtype, (size, slots) in self.slots.items():
            memory = torch.empty(size, dtype=dtype, device=self.tensors[slots[0][0]].device)
            for i, strides, start in slots:
                found[i] = memory.as_strided(self.tensors[i].shape, strides, start)
        if found:
            copy_all(self.tensors, found, launch_kernels.kernels)
        return found
