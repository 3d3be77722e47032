"""What host code would launch, so that it can be compiled before it is needed.

    with rehearsal(describe(torch.device("cuda"))) as launches:
        step(0)  # over tensors in the host's memory
    for launch in launches[part::parts]:
        launch.compile()

A kernel is compiled when it is first launched, one after the other: minutes, for a network whose
launches are a hundred kernels. In a rehearsal launchers take tensors in the host's memory for the
GPU's, and what they would launch is noted. Such tensors take no memory until somebody writes to
them, which no kernel does here; so a batch of any size can be rehearsed, by several processes at
once, each of which then compiles a share. Compiled kernels lie in Triton's cache on disk, where the
process finds them that launches them in earnest.

Numbers that PyTorch's own ops make of what nobody wrote mean nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .device import Device, standing_for


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
        what = _compiled_for(self, args, options)
        if what not in seen:
            seen.add(what)
            launches.append(Launch(self, args, options))

    run = JITFunction.run
    JITFunction.run = note
    try:
        with standing_for(gpu):
            yield launches
    finally:
        JITFunction.run = run


def _compiled_for(kernel: JITFunction, args: tuple, options: dict[str, Any]) -> tuple:
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
