"""Times of one launch and of the several that do the same: what `Op.why_apart` should say.

    python -m benchmarks.sweep_joins [key=value ...]

    out=joins.jsonl     a line for each: what, spec, GPU, way, microseconds
    processes=12        that compile first; 0: none
    timing=60           seconds after that
    what=norm,upsample
                        norm: a convolution and the norm behind it, as in an evaluation, in parts
                        that the norm adds (`split`), with the norm in the epilogue (`conv_norm`),
                        or apart, with each kernel of the norm
                        upsample: nearest upsampling and a convolution, on the small image, with
                        filters made anew as in a step (`anew`), with each tile and filters that
                        are there (`kept`), or apart; and their gradients

Nothing is in the L2 cache.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness, precompile, stopwatch
from benchmarks.harness import drawn, drawn_filters
from triton_kernels.conv.conv_norm import CONV_NORM, NextNorm, conv_norm
from triton_kernels.conv.few import conv_few
from triton_kernels.conv.fused import conv_forward, conv_plain_input_grad
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.split import CONV_SPLIT, conv_split
from triton_kernels.conv.upsampled import (
    UPSAMPLED,
    conv_of_upsampled,
    conv_of_upsampled_input_grad,
    upsampled_spec,
)
from triton_kernels.conv.upsampled_filters import upsampled_filters
from triton_kernels.norm.from_partials import NORM_OF_SUMS, norm_of_sums
from triton_kernels.norm.single_cta import NORM_SINGLE_CTA, norm_single_cta
from triton_kernels.norm.tables import Statistics
from triton_kernels.reductions.conv_parts import SplitConv
from triton_kernels.registry.choose import listed
from triton_kernels.registry.search import time_call
from triton_kernels.registry.spec import ConvSpec, NormSpec
from triton_kernels.resample.op import gather, spread
from triton_kernels.runtime.dependent_launch import dependent_launches
from triton_kernels.runtime.device import Device, describe

DEFAULTS = {
    "out": "joins.jsonl",
    **precompile.SETTINGS,
    "timing": 60,
    "what": ("norm", "upsample"),
}
Ways = dict[str, Callable[[], Tensor]]
_GROUPS, _EPS = 32, 1e-5
# (rows and columns, channels of x and of y, side of the filter)
_BEFORE_A_NORM = (
    (4, 512, 512, 3),
    (8, 256, 256, 3),
    (8, 256, 256, 1),
    (8, 512, 256, 3),
    (8, 768, 768, 3),
    (16, 192, 192, 3),
    (16, 192, 192, 1),
    (16, 384, 192, 3),
    (16, 576, 576, 3),
    (16, 512, 512, 1),
    (32, 128, 128, 3),
    (32, 320, 320, 3),
)
_UPSAMPLED = (  # of the small image
    (8, 256, 256),
    (8, 512, 512),
    (16, 192, 192),
    (16, 384, 384),
    (32, 128, 128),
    (32, 320, 320),
)


def jobs(what: Sequence[str]) -> list[tuple[str, ConvSpec]]:
    """What is timed, in an order that is random and always the same."""
    found = []
    for side, k, c, r in _BEFORE_A_NORM if "norm" in what else ():
        size = {"h": side, "w": side, "k": k, "c": c, "r": r, "s": r, "filters": (c, k)}
        found += [("norm", ConvSpec(n, "bf16", **size)) for n in (1, 4, 8, 16)]
    for side, k, c in _UPSAMPLED if "upsample" in what else ():
        size = {"h": side, "w": side, "k": k, "c": c, "filters": (c, k)}
        found += [("upsample", ConvSpec(n, "bf16", **size)) for n in (4, 16, 32)]
    random.Random(0).shuffle(found)
    return found


def ways(what: str, spec: ConvSpec, device: torch.device) -> Ways:
    """What computes it, by name."""
    gpu = describe(device)
    x = drawn(device, spec.n, spec.h, spec.w, spec.k, dtype=torch.bfloat16)
    exact = drawn_filters(device, spec.c, spec.r, spec.s, spec.k)
    weight = exact.to(torch.bfloat16, memory_format=torch.channels_last)
    bias = torch.zeros(spec.c, device=device)
    if what == "upsample":
        return _upsampling(spec, x, exact, weight, bias, gpu)
    return _before_a_norm(x, weight, bias, gpu)


def _before_a_norm(x: Tensor, weight: Tensor, bias: Tensor, gpu: Device) -> Ways:
    n, h, w, _ = x.shape
    c = len(bias)
    gain = torch.ones(c, device=x.device)
    norm = _GROUPS, gain, bias, _EPS, "silu"
    following = NextNorm(gain, bias, _GROUPS, _EPS, "silu", keep=False)

    def apart(config: tuple) -> Tensor:
        y, partials = conv_few(x, weight, bias, stats=True)
        statistics = Statistics((partials,), (h * w,), *norm[:-1])
        return norm_of_sums(y, None, statistics, norm[-1], config=config)[0]

    def split() -> Tensor:
        parts = SplitConv(conv_split(x, weight), (n, h, w, c), x.dtype, bias)
        return norm_single_cta(parts, None, *norm, keep=False)[0]

    found: Ways = {}
    of_norm = NormSpec(n, "bf16", h, w, c, groups=_GROUPS, activation="silu", tiles=(1,))
    for kernel in NORM_OF_SUMS.kernels:
        config = kernel.configs(of_norm, gpu)[0]
        found[f"apart {kernel.name}"] = lambda config=config: apart(config)
    spec = forward_spec(x, weight)
    single = NORM_SINGLE_CTA.refuse(of_norm, gpu)
    if CONV_SPLIT.refuse(spec, gpu) is None and single is None:
        found["split"] = split
    normed = forward_spec(x, weight, groups=_GROUPS)
    for kernel, config in dict.fromkeys(listed(CONV_NORM, normed, gpu, untimed=True)):
        name = " ".join(map(str, ("conv_norm", kernel.name, *config)))
        found[name] = lambda config=config: conv_norm(x, weight, bias, following, config=config)[2]
    return found


def _upsampling(
    spec: ConvSpec, x: Tensor, exact: Tensor, weight: Tensor, bias: Tensor, gpu: Device
) -> Ways:
    n, h, w, k = x.shape
    c = spec.c
    large, dy = (n, 2 * h, 2 * w, k), drawn(x.device, n, 2 * h, 2 * w, c, dtype=torch.bfloat16)
    filters = upsampled_filters(exact, k, x.dtype)

    def anew() -> Tensor:
        return conv_of_upsampled(x, upsampled_filters(exact, k, x.dtype), bias)[0]

    found: Ways = {
        "apart": lambda: conv_forward(spread(x, large, 1.0), weight, bias, stats=True)[0],
        "apart_grad": lambda: gather(conv_plain_input_grad(dy, weight), 1.0),
    }
    if UPSAMPLED.refuse(upsampled_spec(x, k, 0, c), gpu) is not None:
        return found
    found["anew"] = anew
    for _, tile in dict.fromkeys(listed(UPSAMPLED, upsampled_spec(x, k, 0, c), gpu)):
        found[f"kept {tile.pixels}"] = lambda t=tile: conv_of_upsampled(x, filters, bias, config=t)[
            0
        ]
        found[f"kept_grad {tile.pixels}"] = lambda t=tile: conv_of_upsampled_input_grad(
            dy, filters, config=t
        )
    return found


def rehearse(found: Sequence[tuple[str, ConvSpec]]) -> None:
    """Ask for every way of every job."""
    for what, spec in found:
        for run in ways(what, spec, torch.device("cpu")).values():
            with dependent_launches():
                run()


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for what in settings["what"]:
        harness.check_choice("what", what, DEFAULTS["what"])
    found = jobs(settings["what"])
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, found), settings)
    device = harness.require_cuda()
    if settings["processes"]:
        precompile.start("benchmarks.sweep_joins", arguments, device).wait()
    start, gpu = time.monotonic(), describe(device)
    with Path(settings["out"]).open("w") as out:
        for done, (what, spec) in enumerate(found):
            if time.monotonic() - start > settings["timing"]:
                print(f"{done} of {len(found)} were timed")
                break
            for way, run in ways(what, spec, device).items():
                with dependent_launches():
                    run()
                    us = round(time_call(run), 2)
                row = {"what": what, "spec": asdict(spec), "gpu": gpu._asdict(), "way": way}
                print(json.dumps(row | {"us": us}), file=out, flush=True)
            stopwatch.release_memory()
    return 0


if __name__ == "__main__":
    harness.run_entry(main)
