"""GroupNorm with its activation: ours, PyTorch, torch.compile, and a CUDA kernel for NHWC."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import triton_kernels
from benchmarks.cases import NormCase
from benchmarks.experiment import (
    DTYPES,
    Copy,
    Experiment,
    Inputs,
    Outputs,
    Provider,
    Run,
    as_nchw,
    as_nhwc,
    differentiated,
    drawing,
    forward,
    with_compiler,
)
from triton_kernels import reference

_GNNHWC = importlib.util.find_spec("gnnhwc") is not None  # latentCall145/channels-last-groupnorm


def absent() -> list[str]:
    """What would be compared as well, were it installed; a line each."""
    if _GNNHWC:
        return []
    return ["gnnhwc (latentCall145/channels-last-groupnorm) is not installed: left out"]


def _gnnhwc(groups: int, activation: str) -> Callable[..., Tensor]:
    """The CUDA GroupNorm for channels_last tensors of that package."""
    from gnnhwc.custom_gn import GN_NHWC_Func  # compiles itself, so only where it is wanted

    code = {"identity": 0, "silu": 2}[activation]
    return lambda x, weight, bias: GN_NHWC_Func.apply(x, weight, bias, groups, 1e-5, code)


def experiments(case: NormCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    size = case.n * case.h * case.w * case.c
    names = ["x", "weight", "bias"] + ["scale", "shift"] * case.modulated
    act = {"identity": lambda z: z, "silu": F.silu}[case.activation]

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
        shape = (case.n, case.h, case.w, case.c)
        i = {"x": draw(*shape, dtype=kind), "dy": draw(*shape, dtype=kind)}
        i |= {k: draw(case.c, dtype=kind) for k in ("weight", "bias")}
        return i | {k: draw(case.n, case.c, dtype=kind, scale=0.1) for k in ("scale", "shift")}

    def nhwc(ops: Any) -> Callable[..., Tensor]:
        def norm(x, weight, bias, scale=None, shift=None) -> Tensor:
            return ops.group_norm(
                x, case.groups, weight, bias, activation=case.activation, scale=scale, shift=shift
            )

        return norm

    def nchw(x, weight, bias, scale=None, shift=None) -> Tensor:
        z = F.group_norm(x, case.groups, weight, bias)
        if scale is not None:
            z = z * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return act(z)

    def passes(i: Inputs, pass_: str, norm: Callable[..., Tensor], dy: Tensor, *args) -> Run:
        return forward(norm, *args) if pass_ == "fwd" else differentiated(norm, *args, dy=dy)

    def arguments(i: Inputs) -> list[Tensor]:
        return [i[k] for k in names]

    def back(outputs: Outputs) -> Outputs:
        return tuple(as_nhwc(x) if x.ndim == 4 else x for x in outputs)

    compiled = with_compiler(nchw)
    found = []
    # were all of x kept: forward read x, write y; backward read x and dy, write dx
    for pass_, passes_over_x, least in (("fwd", 3, 2), ("fwd+bwd", 8, 5)):

        def copies(i: Inputs, pass_: str = pass_) -> Run:
            if pass_ == "fwd":
                return lambda: (i["x"].neg(),)
            return lambda: (i["x"].neg(), i["x"] + i["dy"])

        def ours(i: Inputs, pass_: str = pass_) -> Run:
            return passes(i, pass_, nhwc(triton_kernels), i["dy"], *arguments(i))

        def exact(i: Inputs, pass_: str = pass_) -> Outputs:
            return passes(i, pass_, nhwc(reference), i["dy"], *arguments(i))()

        def last(i: Inputs, norm: Callable[..., Tensor] = nchw, pass_: str = pass_) -> Run:
            x, *rest = arguments(i)
            return passes(i, pass_, norm, as_nchw(i["dy"]), as_nchw(x), *rest)

        def first(i: Inputs, pass_: str = pass_) -> Run:
            x, *rest = arguments(i)
            return passes(
                i, pass_, nchw, as_nchw(i["dy"]).contiguous(), as_nchw(x).contiguous(), *rest
            )

        providers = {
            "triton": Provider(ours),
            "torch": Provider(last, back),
            "torch-nchw": Provider(first, back),
            "compile": Provider(lambda i, last=last: last(i, compiled), back),
        }
        if _GNNHWC and not case.modulated:
            theirs = _gnnhwc(case.groups, case.activation)
            providers["gnnhwc"] = Provider(lambda i, last=last, f=theirs: last(i, f), back)
        found.append(
            Experiment(
                "group_norm",
                case.shape,
                dtype,
                pass_,
                count,
                inputs,
                exact,
                providers,
                bytes=passes_over_x * size * kind.itemsize,
                flops=0,
                least=Copy(copies, least * size * kind.itemsize),
            )
        )
    return found
