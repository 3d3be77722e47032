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
           weight_grads         of 1x1 filters, in groups
           tf32,fp32            weight gradients in these types
           split_tf32,split_fp32
    layers=mixed,small,exact,wide,pointwise,odd,narrow   of forward, both gradients, tf32 and fp32:
                        which of `LAYERS`

It is what the cost models are fitted to (`benchmarks.fit_costs`). Layers come in random order, each
with all of its configurations, and lines are written as they are found: a run that its time cuts
short leaves whole layers. A configuration whose result differs from the first one's has no time.
`split` and `few` are of evaluations of 1, 4 and 16 images (`benchmarks.cold`). Kernels are timed
where they can compute a layer, also where nobody has measured that they pay.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness, precompile, sweep_norms
from benchmarks.cold import Cold
from benchmarks.harness import drawn, drawn_filters
from triton_kernels.attention import attention_fwd
from triton_kernels.attention.configs import ATTENTION, ATTENTION_GRAD
from triton_kernels.attention.launch import attention_bwd
from triton_kernels.attention.tiles import (
    BWD_CONFIGS,
    FWD_CONFIGS,
    BwdConfig,
    Tile,
    fits,
    fwd_config,
    sums,
)
from triton_kernels.conv.few import CONV_FEW
from triton_kernels.conv.fused import FORWARD, INPUT_GRAD, conv_forward, conv_input_grad
from triton_kernels.conv.plain.split_k import CONV_SPLIT
from triton_kernels.conv.skip_dx import SKIP_DX, skip_dx
from triton_kernels.conv.weight_grad import WEIGHT_GRAD, conv_weight_grad
from triton_kernels.conv.wgrad_group import WEIGHT_GRADS, conv_weight_grads
from triton_kernels.registry.choose import listed
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.search import agree, time_call
from triton_kernels.registry.spec import (
    AttentionSpec,
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
OF_FEW = {"split": CONV_SPLIT, "few": CONV_FEW}
OF_FEW |= {f"split_{dtype}": CONV_SPLIT for dtype in ("tf32", "fp32")}
OF_ATTENTION = {"attention": ATTENTION, "attention_grad": ATTENTION_GRAD}
OF_32_BITS = {"tf32": WEIGHT_GRAD, "fp32": WEIGHT_GRAD}
OPS |= (
    {"skip_dx": SKIP_DX, "weight_grads": WEIGHT_GRADS}
    | OF_FEW
    | OF_ATTENTION
    | OF_32_BITS
    | sweep_norms.OPS
)

# (rows and columns, channels of x and of y, side of the filter, batches)
LAYERS = {
    "mixed": (
        (64, 64, 64, 3, (8, 32, 128)),  # unet64
        (32, 128, 128, 3, (8, 32, 128)),
        (32, 256, 128, 3, (32,)),
        (16, 192, 192, 3, (8, 64)),
        (8, 256, 256, 3, (16, 128)),
        (8, 512, 256, 3, (64,)),
        (16, 192, 576, 1, (32,)),
        (64, 192, 192, 3, (4, 16)),  # ADM of ImageNet 64
        (32, 384, 384, 3, (16, 64)),
        (16, 576, 576, 3, (8, 32)),
        (8, 768, 768, 3, (32,)),
        (32, 384, 1152, 1, (16,)),
        (16, 1152, 576, 1, (32,)),
        (32, 256, 256, 3, (32, 128)),  # DDPM++ of CIFAR-10
        (16, 256, 256, 3, (16, 128)),
        (8, 512, 512, 3, (8, 256)),
        (16, 256, 768, 1, (64,)),
        (64, 320, 320, 3, (4, 16)),  # latents
        (32, 640, 640, 3, (8,)),
        (16, 1280, 1280, 3, (8,)),
        (64, 640, 320, 1, (4,)),
        (48, 96, 96, 3, (16,)),  # channels and images that are no powers of two
        (24, 448, 224, 3, (16,)),
        (12, 320, 640, 3, (32,)),
    ),
    "small": (  # networks of few channels
        (64, 16, 16, 3, (32,)),
        (64, 32, 32, 3, (32,)),
        (32, 40, 40, 3, (8, 64)),
        (32, 24, 24, 3, (32,)),
        (32, 80, 80, 3, (16,)),
        (16, 80, 40, 3, (64,)),
        (16, 160, 160, 3, (32,)),
        (64, 48, 48, 3, (16,)),
    ),
    "exact": (  # also products of few rows, and a stem
        (1, 256, 1024, 1, (8, 64, 128)),
        (1, 1024, 256, 1, (512,)),
        (8, 256, 256, 1, (1, 4, 32)),
        (16, 192, 576, 1, (4, 32)),
        (8, 256, 256, 3, (8, 64)),
        (16, 192, 192, 3, (8, 32)),
        (32, 128, 128, 3, (4, 32)),
        (64, 64, 64, 3, (8,)),
        (64, 3, 64, 3, (1, 8)),
    ),
    "wide": (
        (64, 192, 192, 3, (32,)),  # ADM of ImageNet 64
        (64, 384, 192, 3, (32,)),
        (32, 384, 384, 3, (32,)),
        (32, 768, 384, 3, (32,)),
        (16, 1152, 576, 3, (32,)),
        (16, 768, 768, 3, (32,)),
        (8, 1536, 768, 3, (32,)),
        (32, 320, 320, 3, (32,)),  # latents
        (16, 640, 640, 3, (32,)),
        (8, 1280, 1280, 3, (32,)),
    ),
    "pointwise": (
        (64, 384, 192, 1, (32,)),  # ADM of ImageNet 64
        (32, 384, 384, 1, (32,)),
        (32, 384, 1152, 1, (32,)),
        (16, 576, 576, 1, (32,)),
        (16, 576, 1728, 1, (32,)),
        (8, 768, 768, 1, (32,)),
        (8, 768, 2304, 1, (32,)),
        (32, 320, 960, 1, (32,)),  # latents
        (16, 640, 640, 1, (32,)),
        (8, 1280, 3840, 1, (32,)),
    ),
    "odd": (
        (24, 192, 192, 3, (64,)),
        (12, 288, 288, 3, (64,)),
        (12, 288, 864, 1, (64,)),
        (40, 160, 160, 3, (32,)),
        (20, 320, 320, 3, (32,)),
        (10, 640, 640, 3, (32,)),
    ),
    "narrow": (  # images, and what is made of them, in padded channels
        (64, 16, 64, 3, (32, 128)),
        (64, 64, 16, 3, (32, 128)),
    ),
}
# (rows and columns, channels of both halves of x, of y, whether the first is upsampled, batches)
LAYERS_OF_SKIPS = (
    (64, 64, 64, 64, False, (16, 128)),
    (64, 128, 64, 64, True, (16, 128)),
    (32, 128, 64, 128, False, (32, 128)),
    (32, 192, 128, 128, True, (32, 128)),
    (16, 192, 192, 192, False, (32, 128)),
    (16, 256, 192, 192, True, (32, 128)),
    (8, 256, 192, 256, False, (32, 128)),
    (32, 384, 384, 384, False, (16,)),
    (64, 192, 192, 192, False, (32,)),  # ADM of ImageNet 64
    (32, 384, 384, 384, False, (32,)),
    (32, 576, 384, 384, False, (32,)),
    (16, 576, 576, 576, False, (32,)),
    (8, 768, 768, 768, False, (32,)),
    (32, 320, 320, 320, False, (32,)),  # latents
    (32, 640, 320, 320, True, (32,)),
    (16, 640, 640, 640, False, (32,)),
    (8, 1280, 1280, 1280, False, (32,)),
    (4, 1280, 1280, 1280, False, (32,)),
    (32, 256, 256, 256, False, (64,)),  # DDPM++ of CIFAR-10
    (16, 256, 256, 256, False, (64,)),
    (48, 96, 96, 96, False, (32,)),  # channels and images that are no powers of two
    (20, 320, 320, 320, False, (64,)),
)
# the same, of one image; every third, and 1x1 filters, also of four; those of 16 too
LAYERS_OF_FEW = (
    (32, 320, 320, 3),  # latents
    (32, 640, 320, 3),
    (32, 960, 320, 3),
    (32, 320, 320, 1),
    (16, 320, 640, 3),
    (16, 640, 640, 3),
    (16, 1280, 640, 3),
    (16, 1920, 640, 3),
    (16, 640, 640, 1),
    (16, 640, 1920, 1),
    (8, 640, 1280, 3),
    (8, 1280, 1280, 3),
    (8, 2560, 1280, 3),
    (8, 1280, 1280, 1),
    (8, 1280, 3840, 1),
    (4, 1280, 1280, 3),
    (4, 2560, 1280, 3),
    (4, 1280, 1280, 1),
    (64, 64, 64, 3),  # unet64
    (64, 128, 64, 3),
    (32, 128, 128, 3),
    (32, 256, 128, 3),
    (16, 192, 192, 3),
    (16, 384, 192, 3),
    (16, 192, 576, 1),
    (16, 192, 192, 1),
    (8, 256, 256, 3),
    (8, 512, 256, 3),
    (8, 256, 768, 1),
    (8, 256, 256, 1),
    (64, 192, 192, 3),  # ADM of ImageNet 64
    (32, 384, 384, 3),
    (32, 768, 384, 3),
    (32, 384, 384, 1),
    (16, 576, 576, 3),
    (16, 1152, 576, 3),
    (8, 768, 768, 3),
    (8, 1536, 768, 3),
    (32, 256, 256, 3),  # DDPM++ of CIFAR-10
    (16, 256, 256, 3),
    (16, 512, 256, 3),
    (16, 256, 768, 1),
    (4, 256, 256, 3),
    (32, 64, 64, 3),
    (64, 64, 128, 1),
    (32, 128, 384, 1),
    (16, 448, 448, 3),  # channels and images that are no powers of two
    (12, 320, 640, 3),
    (24, 448, 224, 3),
    (8, 896, 448, 3),
)


# (heads of all samples, positions, channels of a head)
LAYERS_OF_ATTENTION = (
    (768, 256, 32),  # unet64
    (192, 256, 32),
    (1024, 64, 32),
    (256, 64, 32),
    (6, 256, 32),
    (256, 256, 64),  # ADM of ImageNet 64, latents
    (256, 64, 64),
    (192, 1024, 64),
    (24, 1024, 64),
    (64, 256, 128),
    (96, 1024, 128),
    (64, 1024, 32),
    (16, 4096, 32),
    (16, 4096, 64),
    (8, 4096, 128),
)


# (rows and columns, channels, batches) of layers with attention, and whose weight gradients of 1x1
# filters are computed together: those of attention, of skips, and of both
LAYERS_OF_GROUPS = (
    (16, 192, (8, 32, 128)),  # unet64
    (8, 256, (32, 128)),
    (64, 64, (8, 32)),
    (32, 128, (8, 64)),
    (32, 384, (8, 32)),  # ADM of ImageNet 64
    (16, 576, (8, 32)),
    (8, 768, (32, 64)),
    (16, 256, (32, 128)),  # DDPM++ of CIFAR-10
    (32, 320, (8, 32)),  # latents
    (16, 640, (32,)),
    (8, 1280, (32,)),
    (20, 448, (16, 64)),  # channels and images that are no powers of two
)
# output channels and input channels, in the layer's
_GROUPS_OF = (
    ((3, 1), (1, 1)),
    ((3, 1), (1, 1), (3, 1), (1, 1)),
    ((1, 2), (1, 1), (3, 1)),
    ((1, 2), (1, 1.5)),
)


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


def specs(passes: Sequence[str], layers: Sequence[str]) -> list[tuple[str, Spec]]:
    """What is timed, in an order that is random and always the same."""
    found = []
    for side, ci, co, r, batches in (layer for name in layers for layer in LAYERS[name]):
        for n in batches:
            given = {"n": n, "dtype": "bf16", "h": side, "w": side, "r": r, "s": r}
            of_filters = {"filters": (co, ci)}
            forward = ConvSpec(k=ci, c=co, stats=True, **given, **of_filters)
            grad = ConvSpec(k=co, c=ci, first=ci, activation="silu", **given, **of_filters)
            sizes = {"p": side, "q": side, "padding": (r // 2, r // 2)}
            weight = ConvSpec(k=ci, c=co, **given, **of_filters, **sizes)
            named = {"forward": forward, "input_grad": grad, "weight_grad": weight}
            named |= {dtype: replace(weight, dtype=dtype) for dtype in OF_32_BITS}
            found += [(name, named[name]) for name in passes if name in named]
    for side, c1, c2, co, upsampled, batches in LAYERS_OF_SKIPS if "skip_dx" in passes else ():
        given = {"dtype": "bf16", "h": side, "w": side, "r": 1, "s": 1, "upsampled": upsampled}
        found += [("skip_dx", ConvSpec(n=n, k=co, c=c1 + c2, first=c1, **given)) for n in batches]
    for side, c, batches in LAYERS_OF_GROUPS if "weight_grads" in passes else ():
        for n in batches:
            found += [("weight_grads", _group(n, side, c, each)) for each in _GROUPS_OF]
    for i, (side, ci, co, r) in enumerate(LAYERS_OF_FEW):
        for n in (1, 4, 16)[: 3 if r == 1 else 1 + (i % 3 == 0)]:
            given = {"n": n, "h": side, "w": side, "r": r, "s": r}
            for name in OF_FEW:
                given |= {"dtype": name.partition("_")[2] or "bf16", "stats": name == "few"}
                spec = ConvSpec(k=ci, c=co, filters=(co, ci), **given)
                found += [(name, spec)] if name in passes else []
    found += [
        (name, spec)
        for name in sweep_norms.OPS
        for spec in sweep_norms.specs(name)
        if name in passes
    ]
    for name in OF_ATTENTION:
        grad = name == "attention_grad"
        for n, t, d in LAYERS_OF_ATTENTION if name in passes else ():
            found.append((name, AttentionSpec(n, "bf16", t, d, grad=grad)))
    random.Random(0).shuffle(found)
    return found


def _group(n: int, side: int, c: int, each: Sequence[tuple[float, float]]) -> WeightGradsSpec:
    """Of blocks of 64 channels."""
    sizes = [[64 * max(1, round(times * c / 64)) for times in layer] for layer in each]
    given = {"n": n, "dtype": "bf16", "h": side, "w": side, "r": 1, "s": 1}
    given |= {"p": side, "q": side, "padding": (0, 0)}
    convs = (ConvSpec(k=ci, c=co, filters=(co, ci), **given) for co, ci in sizes)
    return WeightGradsSpec(n, "bf16", tuple(convs))


def candidates(op: Op, spec: Spec, gpu: Device) -> list[tuple[str, tuple]]:
    """Every configuration; of weight gradients each tile in its best number of parts, and some in
    others."""
    found = [(kernel.name, config) for kernel, config in listed(op, spec, gpu, untimed=True)]
    if op in OF_ATTENTION.values():
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
    if op in OF_ATTENTION.values():
        return _attention_runner(spec, device)
    if op in OF_FEW.values():
        return Cold(op, spec, device)
    if isinstance(spec, NormSpec):
        return sweep_norms.runner(op, spec, device)
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
        return lambda c: conv_forward(x, weight, bias, stats=True, config=c)[0]
    if op is INPUT_GRAD:
        table = torch.ones((n, 4, ci), device=device)
        given = {"inputs": x, "table": table, "activation": spec.activation}
        return lambda c: conv_input_grad(dy, weight, **given, config=c)[0]
    out = torch.empty((co, spec.r, spec.s, ci), device=device).permute(0, 3, 1, 2)

    def weight_grad(c: tuple) -> Tensor:
        rounded = spec.dtype != "fp32"
        conv_weight_grad(x, dy, out, config=c.tile, splits=c.splits, allow_tf32=rounded)
        return out.permute(0, 2, 3, 1)

    return weight_grad


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
            harness.release_memory()
    print(f"{lines} times of all {len(jobs)} layers and passes")


if __name__ == "__main__":
    harness.run_entry(main)
