"""The reverse process as a CUDA graph, without Python between its steps.

What a step needs lies on the device: the table of constants and the timesteps (`Sampler`), the
number of the step, the seed, the number of the first sample, and what the denoiser has computed for
all timesteps at once. So a graph of some steps, captured one after the other, serves the whole
chain: one of up to `SHARED` steps is a single graph, a longer one the same graph replayed.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from triton_kernels.runtime.dependent_launch import dependent_launches

from ..models.conditions import Given, as_tables, from_tables
from ..process.objective import Denoiser
from ..runtime.cuda_graph import captured

SHARED = 50  # steps that a graph has at most
Progress = Callable[[int, int], None]  # (steps done, steps in all)


class GuidedOutput(NamedTuple):
    """What a denoiser says under guidance, which `denoise_step` puts together."""

    output: Tensor  # [N, H, W, C or 2C]
    negative: Tensor  # [N, H, W, C or 2C], of which the first C count
    scales: Tensor  # float32 [K], of each row
    rescale: float


@runtime_checkable
class TabulatedDenoiser(Protocol):
    """A denoiser that computes what depends on timesteps and labels alone once for a chain.

    A sampler given one (it is recognised by these two methods) calls `tabulate` once a chain, from
    Python, and `at_row` in every step: on a GPU inside a captured graph, so it must neither wait
    for the device nor depend on a host value that changes. It is compared by `==` with the one that
    a graph was captured with, so equal denoisers have to compute the same from the same memory;
    parameters may change in place between chains.
    """

    def tabulate(
        self,
        timesteps: Tensor,  # int64 or float32 [K], in the order of execution
        labels: Given,  # [N, ...], as the network takes them: classes, observations or more
        n: int,
    ) -> tuple[Tensor, ...]:
        """The tables that `at_row` reads, whose shapes depend on K, N and the labels' shape alone.

        The sampler copies them to where its graph expects them, so they may be new each time.
        """
        ...

    def at_row(
        self,
        x: Tensor,  # float32 [N, H, W, C]
        row: Tensor,  # int64 [1] on the device: k, of timesteps[k]
        tables: tuple[Tensor, ...],  # of `tabulate`
    ) -> Tensor | GuidedOutput:  # [N, H, W, C or 2C], of any floating-point dtype
        """What the network says of x at this timestep."""
        ...


class Plain:
    """Any denoiser (x, t, labels) as a TabulatedDenoiser that tabulates nothing."""

    def __init__(self, denoiser: Denoiser, dtype: torch.dtype | None) -> None:
        self.denoiser, self.dtype = denoiser, dtype

    def tabulate(self, timesteps: Tensor, labels: Given, n: int) -> tuple[Tensor, ...]:
        return timesteps, *as_tables(labels)

    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        timesteps, *given = tables
        t = timesteps[row.expand(x.shape[0])]
        x = x if self.dtype is None else x.to(self.dtype)
        return self.denoiser(x, t, from_tables(given))


def tabulated(
    denoiser: Denoiser | TabulatedDenoiser,
    dtype: torch.dtype | None,  # that one without tables is given x in; None: as it is
) -> TabulatedDenoiser:
    """The denoiser itself if it tabulates, else with the two methods put around it."""
    return denoiser if isinstance(denoiser, TabulatedDenoiser) else Plain(denoiser, dtype)


class Bound:
    """A denoiser with its tables: what `Sampler.step` asks in a chain."""

    def __init__(self, denoiser: TabulatedDenoiser, tables: tuple[Tensor, ...]) -> None:
        self.denoiser, self.tables = denoiser, tables

    def __call__(self, x: Tensor, row: Tensor) -> Tensor | GuidedOutput:
        return self.denoiser.at_row(x, row, self.tables)


class Steps(Protocol):
    """What a chain asks of a `Sampler`."""

    num_steps: int

    def new_memory(self, x: Tensor) -> Tensor | None: ...

    def step(
        self,
        denoiser: Bound,
        x: Tensor,
        row: Tensor,
        rng: Tensor,
        *,
        first: Tensor,
        memory: Tensor | None,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...


class Chain:
    """A chain over batches of one shape, captured in a CUDA graph, to be run any number of times.

    The graph's memory lives as long as this does.
    """

    def __init__(
        self,
        sampler: Steps,
        denoiser: TabulatedDenoiser,
        x: Tensor,  # float32 [N, H, W, C], of which the shape counts
        tables: tuple[Tensor, ...],  # of which the shapes count
        known: tuple[Tensor, Tensor] | None = None,  # of an `Edit`: as well
    ) -> None:
        # The sampler knows the chain, not the other way round, or only the garbage collector would
        # see that nobody wants them any more; until then the graph keeps its memory.
        self.num_steps = sampler.num_steps
        device = x.device
        self.x, self.memory = torch.zeros_like(x), sampler.new_memory(x)
        self.known = None if known is None else tuple(part.clone() for part in known)
        self.rng = torch.zeros(2, dtype=torch.int64, device=device)
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        self.bound = Bound(denoiser, tuple(table.clone() for table in tables))
        # the numbers of the graph's steps; in pairs, since kernels want 16 bytes' alignment
        shared = _largest_divisor(self.num_steps, SHARED)
        self.start = torch.arange(shared, device=device)[:, None].repeat(1, 2)
        self.rows = self.start.clone()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        pixels = x[..., 0].numel()
        with torch.cuda.stream(stream), dependent_launches(pixels):
            self._step(sampler, self.x, 0)  # outside of a graph, which compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with dependent_launches(pixels), captured(self.graph):
            x = self.x
            for k in range(shared):
                x = self._step(sampler, x, k)
            self.x.copy_(x)
            self.rows += shared

    def run(
        self,
        x: Tensor,
        seed: int,
        first: int,
        tables: tuple[Tensor, ...],
        progress: Progress | None,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Sampler.sample`."""
        self.x.copy_(x)
        self.rng.copy_(torch.tensor([seed, 0]))
        self.first.fill_(first)
        self.rows.copy_(self.start)
        if self.memory is not None:
            self.memory.zero_()
        for old, new in zip(self.bound.tables, tables, strict=True):
            old.copy_(new)
        for old, new in zip(self.known or (), known or (), strict=True):
            old.copy_(new)
        shared = len(self.rows)
        for done in range(shared, self.num_steps + 1, shared):
            self.graph.replay()
            if progress is not None:
                progress(done, self.num_steps)
        return self.x.clone()

    def _step(self, sampler: Steps, x: Tensor, k: int) -> Tensor:
        row = self.rows[k, :1]
        return sampler.step(
            self.bound, x, row, self.rng, first=self.first, memory=self.memory, known=self.known
        )


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, min(n, limit) + 1) if n % d == 0)
