"""Convolutions: ours, cuDNN through PyTorch, and cuBLAS where one is a matrix product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import ConvCase
from benchmarks.experiment import (
    DTYPES,
    Experiment,
    Inputs,
    Provider,
    Run,
    as_nchw,
    as_nhwc,
    drawing,
)
from triton_kernels.conv import conv2d as triton_conv


def _triton_conv2d(pass_: str, i: Inputs, case: ConvCase, allow_tf32: bool) -> Run:
    """The passes of our convolution by themselves: the one place that knows the launchers."""
    options = (case.stride, (case.r // 2, case.s // 2), allow_tf32)
    return {
        "fwd": lambda: (triton_conv._conv2d_fwd(i["x"], i["weight"], None, *options),),
        "fwd+bias": lambda: (triton_conv._conv2d_fwd(i["x"], i["weight"], i["bias"], *options),),
        "dgrad": lambda: (
            triton_conv.conv2d_input_grad(i["dy"], i["weight"], (case.h, case.w), *options),
        ),
        "wgrad": lambda: (triton_conv._conv2d_wgrad(i["x"], i["dy"], i["weight"], *options),),
    }[pass_]


def _aten_conv2d(pass_: str, i: Inputs, case: ConvCase) -> Run:
    """PyTorch's own, which is cuDNN on a GPU, over channels_last."""
    x, dy, weight, bias = as_nchw(i["x"]), as_nchw(i["dy"]), i["weight"], i["bias"]
    stride, padding = (case.stride,) * 2, (case.r // 2, case.s // 2)

    def backward(mask: list[bool]) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask
        )

    return {
        "fwd": lambda: (as_nhwc(F.conv2d(x, weight, None, stride, padding)),),
        "fwd+bias": lambda: (as_nhwc(F.conv2d(x, weight, bias, stride, padding)),),
        "dgrad": lambda: (as_nhwc(backward([True, False, False])[0]),),
        "wgrad": lambda: (backward([False, True, False])[1],),
    }[pass_]


def _matmul_conv2d(pass_: str, i: Inputs, case: ConvCase) -> Run:
    """A 1x1 convolution as the matrix product it is, by cuBLAS."""
    x, dy = i["x"].view(-1, case.ci), i["dy"].view(-1, case.co)
    weight, bias = i["weight"].view(case.co, case.ci), i["bias"]
    y_shape, x_shape = i["dy"].shape, i["x"].shape
    return {
        "fwd": lambda: (F.linear(x, weight).view(y_shape),),
        "fwd+bias": lambda: (F.linear(x, weight, bias).view(y_shape),),
        "dgrad": lambda: ((dy @ weight).view(x_shape),),
        "wgrad": lambda: ((dy.T @ x).view(case.co, case.ci, 1, 1),),
    }[pass_]


CONV_PASSES = ("fwd", "fwd+bias", "dgrad", "wgrad")


def experiments(case: ConvCase, count: int, dtype: str) -> list[Experiment]:
    if case.float32 and dtype != "fp32":
        dtype = "tf32"
    kind = DTYPES[dtype]
    x_size, y_size = case.n * case.h * case.w * case.ci, case.n * case.p * case.q * case.co
    w_size = case.co * case.ci * case.r * case.s

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
        fan_in = case.ci * case.r * case.s
        weight = draw(case.co, case.r, case.s, case.ci, dtype=kind, scale=fan_in**-0.5)
        return {
            "x": draw(case.n, case.h, case.w, case.ci, dtype=kind),
            "weight": weight.permute(0, 3, 1, 2),
            "bias": draw(case.co, dtype=kind),
            "dy": draw(case.n, case.p, case.q, case.co, dtype=kind),
        }

    found = []
    for pass_ in CONV_PASSES:
        if pass_ == "dgrad" and not case.needs_dx:
            continue

        def ours(i: Inputs, pass_: str = pass_) -> Run:
            return _triton_conv2d(pass_, i, case, dtype != "fp32")

        def aten(i: Inputs, pass_: str = pass_) -> Run:
            return _aten_conv2d(pass_, i, case)

        def matmul(i: Inputs, pass_: str = pass_) -> Run:
            return _matmul_conv2d(pass_, i, case)

        providers = {"triton": Provider(ours), "cudnn": Provider(aten)}
        if (case.r, case.s, case.stride) == (1, 1, 1):
            providers["cublas"] = Provider(matmul)
        found.append(
            Experiment(
                "conv2d",
                case.shape,
                dtype,
                pass_,
                count,
                inputs,
                lambda i, aten=aten: aten(i)(),
                providers,
                bytes=(x_size + y_size + w_size) * kind.itemsize,
                flops=case.flops,
            )
        )
    return found
