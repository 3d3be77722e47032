"""Records the launches of host code, so that kernels can be compiled before they are needed.

    with rehearsal(describe(torch.device("cuda"))) as launches:
        step(0)  # over tensors in host memory
    for launch in launches[part::parts]:
        launch.compile()

Triton compiles a kernel at its first launch, one after the other, which takes minutes for a network
with a hundred kernels. In a dry run (`rehearsal`) launchers accept tensors in host memory as if
they were on the GPU, and their launches are recorded. Such tensors take no memory until they are
written, and no kernel writes them. A dry run of any batch size is therefore possible, in several
processes at once, each of which compiles a share. Triton's cache on disk has the compiled kernels,
where the process that launches them finds them.

Results of PyTorch's own ops on such unwritten tensors are meaningless.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .device import Device, standing_for

_one_at_a_time = threading.RLock()  # or a thread would put back what another has put there


class Launch(NamedTuple):
    """A launch that was not made."""

    kernel: JITFunction
    arguments: tuple
    options: dict[str, Any]  # arguments by name, and Triton's own such as num_warps

    def compile(self) -> Any:
        """Into Triton's cache. Needs a GPU of the kind that it was rehearsed for. Returns Triton's
        CompiledKernel."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


@contextmanager
def rehearsal(gpu: Device) -> Iterator[list[Launch]]:
    """Within the block nothing is launched. Gives the launches that would be compiled apart, in the
    order in which they come; they are all there behind the block."""
    launches: list[Launch] = []
    seen = set()

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        what = compiled_for(self, args, options)
        if what not in seen:
            seen.add(what)
            launches.append(Launch(self, args, options))

    with noting_launches(gpu, note):
        yield launches


@contextmanager
def noting_launches(
    gpu: Device, note: Callable[..., None], kinds: tuple[type, ...] = (JITFunction,)
) -> Iterator[None]:
    """Within the block `note` is called in the place of this thread's launches, as the `run` of
    these kinds of kernels is; those of other threads are made."""
    mine = threading.get_ident()

    def noting(run: Callable) -> Callable:
        def noted(self: Any, *args: Any, **options: Any) -> Any:
            called = note if threading.get_ident() == mine else run
            return called(self, *args, **options)

        return noted

    with _one_at_a_time, standing_for(gpu):
        before = {kind: kind.run for kind in kinds}
        for kind, run in before.items():
            kind.run = noting(run)
        try:
            yield
        finally:
            for kind, run in before.items():
                kind.run = run


def compiled_for(kernel: JITFunction, args: tuple, options: dict[str, Any]) -> tuple:
    """What a compiled kernel depends on. To tell apart what Triton does not costs a look into its
    cache, no more."""
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {p.name for p in kernel.params if p.is_constexpr}
    return kernel, *(
        (name, repr(value) if name in constants else _kind(value))
        for name, value in sorted(named.items())
    )


def _kind(value: Any) -> Any:
    """What Triton sees of an argument that is no constant."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):  # the description of a tensor for TMA, whoever made it
        layout = repr(getattr(value, "layout", None))
        return type(value), value.base.dtype, tuple(value.block_shape), layout
    if isinstance(value, bool | str | torch.dtype) or value is None:
        return value
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value) if isinstance(value, float) else repr(value)
