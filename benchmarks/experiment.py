"""What is timed: one pass of one op at one shape, and the ways to compute it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Provider:
    """One way to compute. `prepare` is outside of the time and what it returns is timed; `finish`
    puts the outputs in the order and layout of the reference. A provider with noise of its own is
    checked through `prepare_checked`, which takes the reference's noise instead."""

    prepare: Callable[[Inputs], Run]
    finish: Callable[[Outputs], Outputs] = tuple
    prepare_checked: Callable[[Inputs], Run] | None = None


@dataclass(frozen=True)
class Copy:
    """Launches of PyTorch that read and write what no way to compute this can do without, in
    tensors of this size. It may be less than `bytes` of an experiment, which a provider moves."""

    prepare: Callable[[Inputs], Run]
    bytes: int


@dataclass(frozen=True)
class Experiment:
    """One pass of one op at one shape. `bytes` counts what has to pass through memory, each tensor
    once a pass over it; `flops` the products and sums of matrix units alone."""

    op: str
    shape: str
    dtype: str
    pass_: str
    count: int  # a training step
    inputs: Callable[[torch.device], Inputs]
    reference: Callable[[Inputs], Outputs]
    providers: dict[str, Provider]
    bytes: int
    flops: int
    in_place: bool = False  # the run overwrites its inputs
    least: Copy | None = None


def widened(inputs: Inputs) -> Inputs:
    """The same values where the reference is exact: float64 for float32, else float32."""
    lowest = min((x.itemsize for x in inputs.values() if x.is_floating_point()), default=4)
    wide = torch.float64 if lowest == 4 else torch.float32
    narrow = {k: x for k, x in inputs.items() if x.is_floating_point() and x.itemsize < 8}
    return inputs | {k: x.to(wide) for k, x in narrow.items()}


def copied(inputs: Inputs) -> Inputs:
    """The same values elsewhere, in the same order in memory."""
    return {k: x.clone(memory_format=torch.preserve_format) for k, x in inputs.items()}


def drawing(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        return (x * scale).to(dtype)

    return draw


def with_compiler(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def as_nchw(x: Tensor) -> Tensor:  # channels_last in memory
    return x.permute(0, 3, 1, 2)


def as_nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def differentiated(function: Callable[..., Tensor], *args: Tensor, dy: Tensor) -> Run:
    """y and the gradient of every argument."""
    leaves = [x.detach().requires_grad_() for x in args]

    def run() -> Outputs:
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return run


def forward(function: Callable[..., Tensor], *args: Tensor) -> Run:
    def run() -> Outputs:
        with torch.no_grad():
            return (function(*args),)

    return run
