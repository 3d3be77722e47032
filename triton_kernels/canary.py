"""Compares a small convolution and its gradients with the reference before kernels are used.

A new compiler version may miscompile or reject kernels that earlier versions compile, and no list
of versions can predict that. The kernels that the GPU would use therefore first multiply known
numbers, which takes milliseconds once they are compiled. A family of kernels with wrong results is
switched off, and the next family that the GPU can run is tried.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from . import reference
from .conv.fused import conv_forward, conv_input_grad
from .conv.hopper.tiles.tile_mma import TileMma
from .conv.hopper.weight_grads.row_wgrad import TILE as WGRAD_TILE
from .conv.plain.by_tma import tma, tma_wgrad
from .conv.weight_grad import conv_weight_grad
from .hopper.descriptors import MISSING
from .runtime.device import describe, switch_off, switched_off
from .runtime.ptxas import prefer_older_ptxas

# (forward and input gradient, weight gradient) of a family; None: what the rest would take
CONFIGS = {
    "hopper": (TileMma(64, False), WGRAD_TILE),
    "tma": (tma.FWD_CONFIGS[1], tma_wgrad.WGRAD_CONFIGS[0]),
    "plain": (None, None),
}
KERNELS = {"hopper": "kernels for Hopper GPUs", "tma": "kernels that copy by the TMA unit"}
# The step of unet64 with a family off, in times of that with it, where it was measured.
SLOWER = {"hopper": "a training step of unet64 took 1.4 times as long without them on an H100"}

_SHAPE = (4, 16, 16, 64, 64)  # N, H, W, CI, CO: tiles that the parts of a weight gradient share
_MOST_WRONG = 2**-6  # of a norm: results are rounded to 16 bits, miscompiled ones are far off


class Crashed(RuntimeError):
    """A kernel read or wrote memory that is not there: this process cannot use the GPU any more."""


def kernels_off(device: torch.device) -> list[str]:
    """Try the kernels that this GPU would use, once a process, and switch off those that are wrong.
    Returns a line for each family or kernel that is off: which it is, why, and what that costs.

    Raises RuntimeError if no kernel computes the convolution, Crashed if one crashed."""
    _try(device)
    return [
        f"{KERNELS.get(family, f'kernels named {family}')} are off: {why}"
        + (f"; {SLOWER[family]}" if family in SLOWER else "; it is slower without them")
        for family, why in switched_off().items()
    ]


def settle_compiler(device: torch.device) -> None:
    """Choose the assembler for this GPU, and switch off kernels that this Triton cannot compile:
    what is known without a launch, and what kernels that are compiled ahead depend on.

    Raises ValueError if TRITON_KERNELS_OFF names a kernel that there is not."""
    if describe(device).arch == 90:
        prefer_older_ptxas()
    if describe(device).hopper and MISSING is not None:
        switch_off("hopper", f"Triton lacks what they use ({MISSING})")


@lru_cache
def _try(device: torch.device) -> None:
    if (lacks := describe(device).lacks) is not None:
        raise RuntimeError(lacks)
    settle_compiler(device)
    why = None
    for family in CONFIGS:
        if not getattr(describe(device), family, family == "plain"):
            continue
        why = wrong(device, *CONFIGS[family])
        if why is None:
            return
        if _lost(device):
            raise Crashed(_after_crash(family, why))
        if family in KERNELS:
            switch_off(family, why)
    raise RuntimeError(f"no kernel computes a small convolution: {why}")


def _lost(device: torch.device) -> bool:
    """Whether this process can use the GPU no more: CUDA then answers every call with an error."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def _after_crash(family: str, why: str) -> str:
    name = KERNELS.get(family, "the plain kernels")
    advice = f"; TRITON_KERNELS_OFF={family} runs without them" if family in KERNELS else ""
    return f"{name} crash with Triton {triton.__version__} ({why}){advice}"


@torch.inference_mode(False)
def wrong(device: torch.device, conv: tuple | None, wgrad: tuple | None) -> str | None:
    """What is wrong with a convolution or its gradients by kernels of these configurations, if
    anything is."""
    # in 16 bits; Triton's interpreter, which a CPU stands for, computes bfloat16 wrongly
    x, dy, weight, bias = given(torch.bfloat16 if device.type == "cuda" else torch.float16)
    exact = expected(x, dy, weight, bias)
    there = [t.to(device) for t in (x, dy, weight, bias)]
    try:
        found = {name: t.float().cpu() for name, t in _results(*there, conv, wgrad).items()}
    except Exception as error:  # whatever a compiler or a launch may raise
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    for name, result in found.items():
        off = ((result - exact[name]).norm() / exact[name].norm()).item()
        if not off <= _MOST_WRONG:
            return f"the {name} of a small convolution is wrong by {off:.1%} of its size"
    return None


def _results(x, dy, weight, bias, conv, wgrad) -> dict[str, Tensor]:
    table = torch.zeros((x.shape[0], 4, x.shape[3]), device=x.device)  # of a norm that does nothing
    table[:, 1:3] = 1
    dweight = torch.empty_like(weight, dtype=torch.float32)
    y, _ = conv_forward(x, weight, bias, config=conv)
    dx, _ = conv_input_grad(dy, weight, inputs=x, table=table, activation="identity", config=conv)
    conv_weight_grad(x, dy, dweight, config=wgrad)
    return {"result": y, "input gradient": dx, "weight gradient": dweight}


def given(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and dy [N, H, W, C], the weight, and the bias in float32: the same numbers every time."""
    n, h, w, ci, co = _SHAPE
    made = torch.Generator().manual_seed(0)
    x, dy = (torch.randn((n, h, w, c), generator=made) for c in (ci, co))
    weight = torch.randn((co, 3, 3, ci), generator=made).permute(0, 3, 1, 2) / 24
    bias = torch.randn((co,), generator=made)
    return x.to(dtype), dy.to(dtype), weight.to(dtype), bias


def expected(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """What the convolution and its gradients are, in float32."""
    x, dy, weight = x.float(), dy.float(), weight.float()
    with torch.enable_grad():  # whoever asks first may be within torch.no_grad
        x.requires_grad_()
        weight.requires_grad_()
        y = reference.conv2d(x, weight, bias)
        # of a scalar: PyTorch imports sympy, for seconds, to check a gradient that it is given
        dx, dweight = torch.autograd.grad((y * dy).sum(), (x, weight))
    return {"result": y.detach(), "input gradient": dx, "weight gradient": dweight}
