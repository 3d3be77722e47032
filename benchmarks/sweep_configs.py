"""Times of every configuration of the fused convolutions, of attention and of a plan's norms, over
layers of models that people train.

    python -m benchmarks.sweep_configs [key=value ...]

    out=sweep.jsonl     a line for each: op, spec, GPU, kernel, config, microseconds
    processes=12        that compile first; 0: none
    compiling=100       seconds that they have
    timing=60           seconds after that
    shapes=0            so many of the layers and batches; 0: all
    passes=forward,input_grad,weight_grad,skip_dx,split,few,attention,attention_grad,
           norm_apply,norm_backward,norm_of_sums   (`benchmarks.sweep_norms`)
           channel_norm,channel_norm_bwd           (`benchmarks.sweep_channel_norms`)
           weight_grads         of 1x1 filters, in groups
           conv2d,conv2d_dgrad  with a bias at most
           tf32,fp32            weight gradients in these types
           forward_tf32,input_grad_tf32
           split_tf32,split_fp32
           cross_attention,cross_attention_grad
    layers=mixed,small,exact,wide,pointwise,odd,halves,few_tiles,chunks,narrow,narrow_odd   of
                        forward and both gradients, also in TF32 and float32: which of
                        `sweep_layers.LAYERS`

It is what the cost models are fitted to (`benchmarks.fit_costs`). Layers come in random order, each
with all of its configurations, and lines are written as they are found: a run that its time cuts
short leaves whole layers. A configuration whose result differs from the first one's has no time.
`split` and `few` are of evaluations of 1, 4 and 16 images, of 1x1 filters `few` also of 64
(`benchmarks.cold`). Kernels are timed where they can compute a layer, also where nobody has
measured that they pay.
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness, precompile, stopwatch, sweep_channel_norms, sweep_norms
from benchmarks.cold import Cold
from benchmarks.harness import drawn, drawn_filters
from benchmarks.sweep_layers import LAYERS, OF_32_BITS, OF_FEW, OF_TF32, specs
from triton_kernels.attention import attention_fwd, cross_attention_bwd, cross_attention_fwd
from triton_kernels.attention.launch import (
    ATTENTION,
    ATTENTION_GRAD,
    CROSS_ATTENTION,
    CROSS_ATTENTION_GRAD,
    attention_bwd,
)
from triton_kernels.attention.tiles import (
    BWD_CONFIGS,
    FWD_CONFIGS,
    BwdConfig,
    Tile,
    fits,
    fwd_config,
    sums,
)
from triton_kernels.conv import forward
from triton_kernels.conv.configs import ConvOperands
from triton_kernels.conv.conv2d import conv2d_input_grad
from triton_kernels.conv.few import CONV_FEW
from triton_kernels.conv.fused import FORWARD, INPUT_GRAD, conv_forward, conv_input_grad
from triton_kernels.conv.skip_dx import SKIP_DX, skip_dx
from triton_kernels.conv.split import CONV_SPLIT
from triton_kernels.conv.weight_grad import WEIGHT_GRAD, conv_weight_grad
from triton_kernels.conv.wgrad_group import WEIGHT_GRADS, conv_weight_grads
from triton_kernels.registry.choose import listed
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.search import agree, time_call
from triton_kernels.registry.spec import (
    AttentionSpec,
    ChannelNormSpec,
    ConvSpec,
    NormSpec,
    Spec,
    WeightGradsSpec,
)
from triton_kernels.runtime.dependent_launch import dependent_launches
from triton_kernels.runtime.device import Device, describe

DEFAULTS = {
    "out": "sweep.jsonl",
    **precompile.SETTINGS,
    "compiling": 100,
    "timing": 60,
    "shapes": 0,
    "passes": ("forward", "input_grad", "weight_grad", "skip_dx", "split", "few"),
    "layers": ("mixed", "small", "wide", "pointwise", "odd", "narrow"),
}
OPS = {"forward": FORWARD, "input_grad": INPUT_GRAD, "weight_grad": WEIGHT_GRAD}
OPS |= {name: OPS[of] for name, of in OF_TF32.items()}
OPS |= {"conv2d": forward.FORWARD, "conv2d_dgrad": forward.INPUT_GRAD}
OPS |= {name: CONV_FEW if name == "few" else CONV_SPLIT for name in OF_FEW}
OPS |= {"attention": ATTENTION, "attention_grad": ATTENTION_GRAD}
OPS |= {"cross_attention": CROSS_ATTENTION, "cross_attention_grad": CROSS_ATTENTION_GRAD}
OPS |= dict.fromkeys(OF_32_BITS, WEIGHT_GRAD)
OPS |= {"skip_dx": SKIP_DX, "weight_grads": WEIGHT_GRADS} | sweep_norms.OPS
OPS |= sweep_channel_norms.OPS

# Tiles of attention that no chip lists yet: those that are fastest somewhere are to be tested, and
# listed in `attention.tiles`. More sums a thread spill registers by the hundred bytes
UNLISTED = {
    "attention": (
        Tile(128, 64, 4, 2),
        Tile(128, 32, 4, 2),
        Tile(128, 32, 4, 3),
        Tile(64, 32, 4, 3),
        Tile(128, 64, 8, 2),
        Tile(64, 64, 2, 2),
        Tile(64, 32, 2, 3),
        Tile(32, 64, 2, 2),
    ),
    "attention_bwd": (
        BwdConfig(False, 64, 32, 4, 3),
        BwdConfig(False, 64, 64, 4, 3),
        BwdConfig(False, 128, 32, 4, 2),
        BwdConfig(False, 128, 32, 8, 2),
        BwdConfig(False, 64, 32, 2, 2),
        BwdConfig(False, 64, 64, 2, 2),
        BwdConfig(False, 64, 64, 8, 2),
        BwdConfig(True, 64, 32, 2, 2),
        BwdConfig(True, 64, 64, 2, 1),
        BwdConfig(True, 128, 32, 8, 2),
        BwdConfig(True, 128, 32, 4, 2),
    ),
}
MOST_SUMS = 192


def candidates(op: Op, spec: Spec, gpu: Device) -> list[tuple[str, tuple]]:
    """Every configuration; of weight gradients each tile in its best number of parts, and some in
    others."""
    found = [(kernel.name, config) for kernel, config in listed(op, spec, gpu, untimed=True)]
    if op in (ATTENTION, ATTENTION_GRAD):
        tiles = UNLISTED[op.name] + (BWD_CONFIGS if spec.grad else FWD_CONFIGS)
        room = [c for c in tiles if fits(c, spec, gpu) and sums(c, spec) <= MOST_SUMS]
        return list(dict.fromkeys(found + [("tiles", c) for c in room]))
    if op is not WEIGHT_GRAD:
        return found
    best = [(kernel, c) for kernel, c in found if c == op.kernel(kernel).planned(spec, gpu, c.tile)]
    others = [c for c in found if c not in best]
    return best + random.Random(spec.n * spec.k).sample(others, min(6, len(others)))


def runner(op: Op, spec: Spec, device: torch.device) -> Callable[[tuple], Tensor]:
    """What computes it with a configuration, on random numbers."""
    if isinstance(spec, AttentionSpec):
        return (_attention_runner if spec.keys is None else _cross_runner)(spec, device)
    if op in (CONV_FEW, CONV_SPLIT):
        return Cold(op, spec, device)
    if isinstance(spec, NormSpec):
        return sweep_norms.runner(op, spec, device)
    if isinstance(spec, ChannelNormSpec):
        return sweep_channel_norms.runner(spec, device)
    if op is SKIP_DX:
        return _skip_runner(spec, device)
    if op is WEIGHT_GRADS:
        return _group_runner(spec, device)
    dtype = torch.float32 if spec.itemsize == 4 else torch.bfloat16
    n, h, w, (co, ci) = spec.n, spec.h, spec.w, spec.of_filters
    x, dy = (drawn(device, n, h, w, channels, dtype=dtype) for channels in (ci, co))
    weight = drawn_filters(device, co, spec.r, spec.s, ci, dtype=dtype)
    if op is FORWARD:
        bias = torch.zeros(co, device=device)
        return lambda c: conv_forward(x, weight, bias, stats=spec.stats, config=c)[0]
    if op is INPUT_GRAD:
        table = torch.ones((n, 4, ci), device=device)
        given = {"inputs": x, "table": table, "activation": spec.activation}
        return lambda c: conv_input_grad(dy, weight, **given, config=c)[0]
    if op is forward.FORWARD:
        return lambda c: _plain(x, weight, c)
    if op is forward.INPUT_GRAD:
        return lambda c: conv2d_input_grad(dy, weight, (h, w), 1, spec.padding, config=c)
    out = torch.empty((co, spec.r, spec.s, ci), device=device).permute(0, 3, 1, 2)

    def weight_grad(c: tuple) -> Tensor:
        rounded = spec.dtype != "fp32"
        conv_weight_grad(x, dy, out, config=c.tile, splits=c.splits, allow_tf32=rounded)
        return out.permute(0, 2, 3, 1)

    return weight_grad


def _plain(x: Tensor, weight: Tensor, config: tuple) -> Tensor:
    (*shape, _), (co, _, r, s) = x.shape, weight.shape
    y, padding = x.new_empty((*shape, co)), (r // 2, s // 2)
    operands = ConvOperands(x, weight, None, y, 1, padding, "tf32", dgrad=False)
    forward.launch(operands, config)
    return y


def _group_runner(spec: WeightGradsSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    sizes = [conv.c * conv.k for conv in spec.convs]
    flat, gradients = torch.empty(sum(sizes), device=device), []
    for conv, place in zip(spec.convs, flat.split(sizes), strict=True):
        x, dy = (
            drawn(device, spec.n, conv.h, conv.w, channels, dtype=torch.bfloat16)
            for channels in (conv.k, conv.c)
        )
        gradients.append((x, dy, place.view(conv.c, 1, 1, conv.k).permute(0, 3, 1, 2)))

    def run(c: tuple) -> Tensor:
        conv_weight_grads(*gradients, config=c)
        return flat

    return run


def _skip_runner(spec: ConvSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    def of(height: int, width: int, channels: int) -> Tensor:
        return drawn(device, spec.n, height, width, channels, dtype=torch.bfloat16)

    n, h, w, c1 = spec.n, spec.h, spec.w, spec.first
    dy, dz = of(h, w, spec.k), of(h, w, spec.c)
    weight = drawn_filters(device, spec.k, 1, 1, spec.c, dtype=torch.bfloat16)
    factor = 2 if spec.upsampled else 1
    x1, x2 = of(h // factor, w // factor, c1), of(h, w, spec.c - c1)
    coeff = torch.ones((n, 3, spec.c), device=device)
    given = {"upsample1": bool(spec.upsampled)}
    return lambda c: skip_dx(dy, weight, dz, x1, x2, coeff, config=c, **given)[0]


def _attention_runner(spec: AttentionSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    """Each head is a sample's only one."""
    shape = spec.n, spec.t
    qkv, do = (drawn(device, *shape, k * spec.d, dtype=torch.bfloat16) for k in (3, 1))
    options = 1, "qkv_heads", False
    if not spec.grad:
        return lambda c: attention_fwd(qkv, *options, c)[0]
    o, lse = attention_fwd(qkv, *options, fwd_config(spec))
    return lambda c: attention_bwd(do, qkv, o, lse, *options, c)


def _cross_runner(spec: AttentionSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    """Of samples of eight heads."""
    heads = math.gcd(spec.n, 8)
    sizes = (spec.t, 1), (spec.t, 1), (spec.keys, 2)
    q, do, kv = (
        drawn(device, spec.n // heads, t, k * heads * spec.d, dtype=torch.bfloat16)
        for t, k in sizes
    )
    if not spec.grad:
        return lambda c: cross_attention_fwd(q, kv, None, heads, config=c)[0]
    o, lse = cross_attention_fwd(q, kv, None, heads, config=fwd_config(spec))
    return lambda c: cross_attention_bwd(do, q, kv, None, o, lse, heads, config=c)[1]


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for name in settings["passes"]:
        harness.check_choice("passes", name, tuple(OPS))
    for name in settings["layers"]:
        harness.check_choice("layers", name, tuple(LAYERS))
    jobs = specs(settings["passes"], settings["layers"])
    jobs = jobs[: settings["shapes"] or len(jobs)]
    if settings["compile_for"]:
        rehearsed = partial(rehearse, jobs, precompile.chip_of(settings))
        return precompile.compile_kernels(rehearsed, settings)
    device = harness.require_cuda()
    if settings["processes"]:
        process = precompile.start("benchmarks.sweep_configs", arguments, device)
        precompile.await_compiled(process, settings["compiling"])
    _time_all(jobs, device, settings)
    return 0


def rehearse(jobs: Sequence[tuple[str, Spec]], gpu: Device) -> None:
    """Ask for every configuration of every job."""
    for name, spec in jobs:
        run = runner(OPS[name], spec, torch.device("cpu"))
        for _, config in candidates(OPS[name], spec, gpu):
            with suppress(Exception):  # whatever a launcher raises; it is said when it is timed
                run(config)
                if isinstance(run, Cold):  # it is timed so
                    with dependent_launches():
                        run(config)


def _time_all(jobs: list[tuple[str, Spec]], device: torch.device, settings: dict) -> None:
    start, gpu, lines = time.monotonic(), describe(device), 0
    with Path(settings["out"]).open("w") as out:
        for done, (name, spec) in enumerate(jobs):
            op, run = OPS[name], runner(OPS[name], spec, device)
            expected = None
            for kernel, config in candidates(op, spec, gpu):
                if time.monotonic() - start > settings["timing"]:
                    print(f"{lines} times of {done} of {len(jobs)} layers and passes")
                    return
                row = {"op": op.name, "spec": asdict(spec), "kernel": kernel}
                row["gpu"] = gpu._asdict()
                row["config"] = dict(zip(config._fields, config, strict=True))
                try:
                    result = run(config)
                    expected = result.clone() if expected is None else expected
                    right = agree(result, expected)
                    if isinstance(run, Cold):
                        row["us"] = round(run.time(config), 2)
                    else:
                        row["us"] = round(time_call(lambda c=config, run=run: run(c)), 2)
                except Exception as error:  # one configuration less
                    print(f"! {kernel} {config} of {spec}: {type(error).__name__}: {error}")
                    continue
                if not right:
                    print(f"! {kernel} {config} of {spec} is wrong")
                    continue
                print(json.dumps(row), file=out, flush=True)
                lines += 1
            del run
            stopwatch.release_memory()
    print(f"{lines} times of all {len(jobs)} layers and passes")


if __name__ == "__main__":
    harness.run_entry(main)
