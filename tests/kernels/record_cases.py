"""Write `recorded_cases.jsonl`: what launchers launch, so that it can be compiled without them.

    python -m tests.kernels.record_cases
    python -m tests.kernels.record_cases job="small ops"     prints all that this job launches

Jobs are rehearsed for a GPU of each kind (`triton_kernels.runtime.launch_recorder`): training
steps, evaluations and calls of a policy as `benchmarks.goldens` has them, the public ops over the
shapes of a model, and a few calls of what none of these uses. Of the launches of each kernel so
many are kept as show what launchers vary, on a Hopper GPU all of it (`recorded_choice`). The same
tree gives the same file. It takes five minutes or more, and no GPU. Run it when a launcher, a
kernel's arguments or measured rows have changed what is launched, and do not patch the file by
hand: what a patch keeps of a kernel, the next recording may not. `test_compile.py` says so if a
kernel is missing or has other arguments.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import yaml
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import triton_kernels
from benchmarks import goldens
from diffusion.runs.precompile_worker import train
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.attention import attention_backward
from triton_kernels.conv.fused import conv_forward
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.split import CONV_SPLIT, conv_split, split_spec
from triton_kernels.elementwise.steps import ACT, ACT_GRAD, AFFINE, ALL, CLAMP_GRAD, MUL, OF_IMAGES
from triton_kernels.noise.loss_aware import draw_weighted_timesteps, record_losses
from triton_kernels.norm.tables import Statistics
from triton_kernels.reductions.conv_parts import SplitConv
from triton_kernels.registry.chips import CHIPS
from triton_kernels.runtime.device import Device, describe
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from .compile_only import RECORDED, box_layout
from .recorded_choice import covering, multiplies

# By chip: what is recorded there, and the most cases of a kernel that multiplies and of another.
# Products are other instructions on each; all else is the same code on 80 and 89, 90 and 100.
_CHIPS = {90: "h100", 80: "a100", 120: "rtx5090", 89: "rtx4090", 100: "b200"}
_MOST = {90: (math.inf, math.inf), 80: (2, 1), 120: (2, 1), 89: (1, 0), 100: (1, 0)}
_FEW = (
    "train unet64 8",
    "draw unet64 1",
    "draw unet64 16",
    "act unet1d bf16 1",
    "act unet1d bf16 8",
)


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("compiled kernels are recorded: unset TRITON_INTERPRET")
    only = dict(word.split("=", 1) for word in sys.argv[1:]).get("job")
    if only is not None and only not in _jobs(90):
        sys.exit(f"no job is {only!r}; there are {', '.join(_jobs(90))}")
    lines: list[str] = []
    for arch in _CHIPS:
        jobs = _jobs(arch)
        if only is not None:
            jobs = {only: jobs[only]} if only in jobs else {}
        found = recorded(arch, jobs)
        kept = [
            case
            for _, (kernel, cases) in sorted(found.items())
            for case in (cases if only else covering(cases, _MOST[arch][not multiplies(kernel)]))
        ]
        lines += (json.dumps(case, separators=(",", ":")) for case in kept)
        print(arch, len(found), "kernels", len(kept), "cases", file=sys.stderr, flush=True)
    if only is not None:
        print(*lines, sep="\n")
    else:
        RECORDED.write_text("".join(f"{line}\n" for line in lines))


def recorded(
    arch: int, jobs: dict[str, Callable[[], Any]]
) -> dict[str, tuple[JITFunction, list[dict[str, Any]]]]:
    """By name: the kernels that these jobs launch on a chip, and the cases of each, which say the
    first job that has them."""
    found: dict[str, tuple[JITFunction, list[dict[str, Any]]]] = {}
    known = set()
    for name, job in jobs.items():
        for launch in _rehearsed(CHIPS[_CHIPS[arch]].gpu, job):
            case = as_case(launch, arch)
            if (text := json.dumps(case)) not in known:
                known.add(text)
                _, cases = found.setdefault(case["kernel"], (launch.kernel, []))
                cases.append({"arch": arch, "job": name} | case)
    return found


def _jobs(arch: int) -> dict[str, Callable[[], Any]]:
    """By name, what is recorded on a chip."""
    jobs = {k: job for k, job in goldens.jobs().items() if arch == 90 or k in _FEW}
    return jobs | {"public ops": _ops} | _others()


def _rehearsed(gpu: Device, job: Callable[[], Any]) -> list[Launch]:
    with rehearsal(gpu) as launches:
        job()
    return launches


def _ops() -> None:
    for _, run in goldens.ops(("bf16", "tf32", "fp32", "fp16")):
        run()


def _others() -> dict[str, Callable[[], None]]:
    """What no configuration of a model here has."""
    network = {"model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": 1}
    network |= {"attention_resolutions": [2], "num_head_channels": 16}
    film = {"dropout": 0.1, "use_scale_shift_norm": True, "conv_resample": True}
    by_8 = {"model_channels": 36, "num_head_channels": 36, "num_groups": 4}
    odd = {"model_channels": 18, "num_head_channels": 18, "num_groups": 6}
    trained = {
        "dropout": ({"dropout": 0.1}, "bf16"),
        "FiLM and dropout": (film, "bf16"),
        "channels no multiple of 8": (by_8, "bf16"),
        "heads of 128": ({"num_head_channels": 128, "model_channels": 128}, "bf16"),
        "channels no multiple of 64": ({"num_head_channels": 48, "model_channels": 96}, "bf16"),
        "dropout in fp32": ({"dropout": 0.1}, "fp32"),
        "odd channels in fp32": (odd, "fp32"),
    }
    return {
        "small ops": _small_ops,
        "cross-attention": _cross_attention,
        "long attention": _long_attention,
        "channel norms": _channel_norms,
        "linear attention": _linear_attention,
        "gated products": _gated,
        "several in one pass": _elementwise,
        "FIR filters": _fir,
        "filters in another order": _reorder,
        "sums that a number multiplies": _scaled_sums,
        "parts of a sum through pointers": _parts_through_pointers,
    } | {
        f"train {name}": lambda o=options, p=precision: _train(network | o, p)
        for name, (options, precision) in trained.items()
    }


def _cross_attention() -> None:
    """Of 77 tokens and a null token, as in training, and of more than a tile has; of heads in one
    block and in two."""
    for keys, heads, d, masked in (
        (78, 6, 32, True),
        (64, 4, 64, False),
        (77, 8, 40, False),
        (77, 8, 80, False),
        (257, 4, 32, True),
    ):
        q, o, do = (torch.empty(16, 1024, heads * d, dtype=torch.bfloat16) for _ in range(3))
        kv = torch.empty(16, keys, 2 * heads * d, dtype=torch.bfloat16)
        mask = torch.empty(16, keys, dtype=torch.bool) if masked else None
        lse = triton_kernels.fused_ops.cross_attention_forward(q, kv, mask, heads)[1]
        triton_kernels.fused_ops.cross_attention_backward(do, q, kv, mask, o, lse, heads)


def _long_attention() -> None:
    """Of many positions: each kernel that keys or queries stream by, whole and ragged, in both
    packings, with and without rows for the gradient of a bias; heads that do not fill a tile."""
    for n, t, heads, d, dtype, order in (
        (16, 1024, 12, 64, torch.bfloat16, "qkv_heads"),
        (16, 1000, 12, 32, torch.float16, "heads_qkv"),
        (64, 300, 12, 16, torch.bfloat16, "heads_qkv"),
        (4, 4096, 8, 64, torch.bfloat16, "heads_qkv"),
        (16, 1024, 6, 128, torch.bfloat16, "qkv_heads"),
        (16, 1000, 6, 128, torch.float16, "heads_qkv"),
        (16, 4096, 8, 40, torch.bfloat16, "qkv_heads"),
        (16, 1000, 8, 80, torch.bfloat16, "qkv_heads"),
        (128, 256, 1, 256, torch.bfloat16, "qkv_heads"),
        (16, 300, 8, 160, torch.float16, "heads_qkv"),
    ):
        qkv = torch.empty(n, t, 3 * heads * d, dtype=dtype)
        o, lse = triton_kernels.fused_ops.attention_forward(qkv, heads, order)
        attention_backward(
            torch.empty_like(o), qkv, o, lse, heads, order, t % 256 > 0, allow_tf32=False
        )


def _parts_through_pointers() -> None:
    """By their kernel, which `untimed` may keep from being chosen, and of channels that no TMA unit
    fetches."""
    kernel = CONV_SPLIT.kernel("pointer_parts")
    for k, extra in ((192, ()), (192, (192, 128)), (196, (196, 128))):
        x, weight = torch.empty(1, 16, 16, k).bfloat16(), torch.empty(128, k, 3, 3).bfloat16()
        weight = weight.to(memory_format=torch.channels_last)
        others = [
            (torch.empty(1, 16, 16, c, dtype=x.dtype), torch.empty(128, c, dtype=x.dtype))
            for c in extra
        ]
        spec, gpu = split_spec(x, weight, others), describe(x.device)
        if CONV_SPLIT.cannot(kernel, spec, gpu) is None:
            conv_split(x, weight, extra=others, config=kernel.configs(spec, gpu)[0])


def _linear_attention() -> None:
    """As denoising-diffusion-pytorch has it, with its memory, and of wide heads."""
    ops = triton_kernels.fused_ops
    for n, t, heads, d, memory, dtype in (
        (32, 4096, 4, 32, 4, torch.bfloat16),
        (16, 1024, 4, 64, 0, torch.float16),
        (16, 1000, 8, 64, 0, torch.float32),
    ):
        q, k, v = torch.empty(n, t, 3, heads, d, dtype=dtype).unbind(2)
        kept = tuple(torch.empty(2, memory, heads, d)) if memory else None
        o, context, lse = ops.linear_attention_forward(q, k, v, kept, 1.0)
        made = context, lse, tuple(torch.empty(n, t, 3, heads, d, dtype=dtype).unbind(2))
        ops.linear_attention_backward(torch.empty_like(o), q, k, v, kept, 1.0, *made)


def _gated() -> None:
    """As transformers have them."""
    ops = triton_kernels.fused_ops
    for c, activation, dtype in (
        (1280, "gelu", torch.bfloat16),
        (1280, "gelu", torch.float32),
        (640, "silu", torch.float16),
    ):
        x, dy = torch.empty(4, 4096, 2 * c, dtype=dtype), torch.empty(4, 4096, c, dtype=dtype)
        ops.gated_forward(x, activation)
        ops.gated_backward(dy, x, activation)


def _elementwise() -> None:
    """As EDM2 has them: swish of a sum, a product with a row of each image, and limits."""
    ops, shape = triton_kernels.fused_ops, (16, 32, 32, 256)
    which = ACTIVATIONS.index("silu")
    forward = [(MUL, 0, 1, 0.0, 0.0), (ACT, 2, 0, which, 0.0), (AFFINE, 3, 0, 1.7, 0.0)]
    backward = [(ACT_GRAD, 1, 0, which, 0.0), (CLAMP_GRAD, 2, 0, -256.0, 256.0)]
    for dtype in (torch.bfloat16, torch.float32):
        x, row = torch.empty(shape, dtype=dtype), torch.empty(16, 256, dtype=dtype)
        ops.elementwise([x, row], (ALL, OF_IMAGES), forward, [(4, dtype), (2, dtype)], shape)
        ops.elementwise([x, x], (ALL, ALL), backward, [(3, dtype)], shape)


def _fir() -> None:
    """As NCSN++ has them, which halve and double images, of images of one channel, and mirrored as
    k-diffusion has them, with their gradients."""
    row, fir = (1.0, 3.0, 3.0, 1.0), triton_kernels.fused_ops.fir
    taps = tuple(tuple(a * b / 64 for b in row) for a in row)
    for dtype in (torch.bfloat16, torch.float32):
        x, alone = (
            torch.empty(64, 32, 32, 128, dtype=dtype),
            torch.empty(8192, 35, 35, 1, dtype=dtype),
        )
        fir(x, taps, 1, 2, (1, 1), (16, 16))
        fir(x, taps, 2, 1, (2, 2), (64, 64))
        fir(alone, taps, 1, 1, (0, 0), (32, 32))
        for border in ("reflect", "folded"):
            fir(x, taps, 1, 2, (1, 1), (16, 16), border)
            fir(x, taps, 2, 1, (2, 2), (64, 64), border)
        fir(x, ((1.0,),), 1, 1, (1, 1), (34, 34), "reflect")


def _reorder() -> None:
    """Of 3x3 filters and those of one row, cast to 16 bits, and their gradients back."""
    for shape in ((256, 128, 3, 3), (256, 128, 1, 5)):
        theirs = torch.empty(shape)
        for dtype in (torch.bfloat16, torch.float32):
            ours = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
            triton_kernels.fused_ops.reorder(theirs, ours)
        triton_kernels.fused_ops.reorder(ours, theirs)


def _scaled_sums() -> None:
    """As EDM's DDPM++ has them, and their gradients."""
    for c, size, beside in ((256, 3, 0), (256, 3, 128), (256, 1, 0), (640, 1, 0)):
        x = torch.empty(16, 32, 32, c, dtype=torch.bfloat16)
        weight = torch.empty(c, c, size, size, dtype=x.dtype).to(memory_format=torch.channels_last)
        extra = [(x[..., :beside].contiguous(), torch.empty(c, beside, dtype=x.dtype))]
        terms = {"extra": extra} if beside else {"residual": x}
        conv_forward(x, weight, torch.empty(c), **terms, factor=0.5**0.5, stats=True)
    ops, coeff = triton_kernels.fused_ops, torch.empty(16, 3, 640)
    low, weight = x[..., :256].contiguous(), torch.empty(256, 640, 1, 1, dtype=x.dtype)
    ops.norm_dx(x, x, None, coeff, add1=x, add1_second=x, sums=True, factor=0.5**0.5)
    halves = x[..., :384].contiguous(), low
    ops.skip_dx(low, weight, x, *halves, coeff, sums=True, factor=0.5**0.5)
    _scaled_evaluations()


def _scaled_evaluations() -> None:
    """Sums that a number multiplies where nothing runs beside them: of one image, of parts, with
    the norm before and behind."""
    ops = triton_kernels.fused_ops
    for n, h, c, size, beside in (
        (1, 32, 128, 3, 0),
        (1, 32, 128, 3, 64),
        (1, 16, 192, 1, 0),
        (16, 64, 64, 3, 0),
        (16, 64, 64, 3, 64),
        (64, 64, 64, 3, 0),
        (16, 8, 256, 3, 0),
    ):
        x = torch.empty(n, h, h, c, dtype=torch.bfloat16)
        weight = torch.empty(c, c, size, size, dtype=x.dtype).to(memory_format=torch.channels_last)
        extra = [(x[..., :beside].contiguous(), torch.empty(c, beside, dtype=x.dtype))]
        terms = ({"extra": extra} if beside else {"residual": x}) | {"factor": 0.5**0.5}
        conv = weight, torch.empty(c)
        ops.conv_few(x, *conv, **terms, stats=True)
        norm = 32, torch.empty(c), torch.empty(c), 1e-5
        tiles, gpu = h * h // 256, describe(x.device)
        spec = replace(forward_spec(x, weight, groups=32), extra=(beside,) if beside else ())
        if ops.OPS["norm_conv"].why_apart(replace(spec, tiles=(tiles,)), gpu) is None:
            statistics = Statistics((torch.empty(n, tiles, 2, c),), (h * h,), *norm)
            ops.norm_conv(x, statistics, "silu", *conv, **terms)
        if ops.OPS["conv_norm"].why_apart(spec, gpu) is None:
            ops.conv_norm(x, *conv, ops.NextNorm(*norm[1:3], 32, 1e-5, "silu", True, True), **terms)
    for h, c, dtype in ((8, 256, torch.bfloat16), (16, 128, torch.float32)):
        parts, beside = torch.empty(8, 1, c, h * h), torch.empty(1, h, h, c, dtype=dtype)
        terms = {"bias": torch.empty(c), "residual": beside, "factor": 0.5**0.5}
        split = SplitConv(parts, beside.shape, dtype, **terms)
        ops.sum_parts(split)
        for up in (False, True):
            ops.resample_parts(split, up)
        for x2 in (None, beside):
            affine = torch.empty(2, c if x2 is None else 2 * c)
            ops.norm_single_cta(split, x2, 32, *affine, 1e-5, "silu")


def _channel_norms() -> None:
    """As denoising-diffusion-pytorch's blocks have them under autocast, and transformers."""
    ops = triton_kernels.fused_ops
    for shape, dtype, how in (
        ((32, 64, 64, 64), torch.bfloat16, {"eps_in": "max", "eps": 1e-12, "activation": "silu"}),
        ((16, 256, 1280), torch.bfloat16, {"centred": True, "eps": 1e-5}),
        ((16, 256, 1000), torch.float32, {"eps_in": "sum", "eps": 1e-4, "activation": "gelu"}),
    ):
        x, dy = torch.empty(shape, dtype=dtype), torch.empty(shape)
        film = torch.empty(shape[0], 2 * shape[-1], dtype=dtype).chunk(2, 1)
        params = torch.empty(shape[-1]), torch.empty(shape[-1]), *film
        params = params if dtype == torch.bfloat16 else (None,) * 4
        more = {"residual": x} if "activation" in how else {}
        ops.channel_norm_forward(x, params, dtype=torch.float32, **more, **how)
        beside = torch.empty_like(x) if how.get("centred") else None
        ops.channel_norm_backward(dy, x, params, add=beside, rows=beside is not None, **how)


def _train(options: dict[str, Any], precision: str = "bf16") -> None:
    model = yaml.safe_load((goldens.ROOT / "configs/model/unet64.yaml").read_text()) | options
    images = {"shape": [10**5, 32, 32, 3], "dtype": "uint8"}
    settings = {
        "model": model,
        "diffusion": {"schedule": "linear"},
        "optim": {"lr": 1e-4},
        "train": {"batch_size": 8, "precision": precision},
        "images": images,
        "labels": None,
        "flip": True,
    }
    train(settings)


def _small_ops() -> None:
    x, rng = torch.empty(4, 32, 32, 3), torch.zeros(2, dtype=torch.int64)
    triton_kernels.normal(tuple(x.shape), rng, stream=0)
    triton_kernels.dropout(torch.empty(4, 8, 8, 64), 0.1, rng, layer=1)
    table, row = torch.empty(10, 8), torch.zeros(1, dtype=torch.int64)
    for channels, options in ((3, {}), (6, {"memory": torch.empty_like(x), "clip": None})):
        output = torch.empty(4, 32, 32, channels)
        triton_kernels.denoise_step(x, output, table, row, rng, **options)
    low, scales = torch.empty(4, 32, 32, 16, dtype=torch.bfloat16)[..., :3], torch.empty(10)
    guided = {"negative": low, "scales": scales, "rescale": 0.7}
    known = {"known": x, "mask": torch.empty(4, 32, 32), "levels": torch.empty(10, 2)}
    triton_kernels.denoise_step(x, low, table, row, rng, **guided, **known)
    losses, t, counts = torch.empty(4), torch.zeros(4, dtype=torch.int64), torch.empty(1000)
    ends = record_losses(losses, t, torch.empty(10, 1000), counts.to(torch.int32))
    draw_weighted_timesteps(rng, 4, ends)


def as_case(launch: Launch, arch: int) -> dict[str, Any]:
    """As `compile_only` wants it, but for the chip and the job."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", arch, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    # the number of warps is an option also where a kernel has it as an argument
    arguments = set(kernel.arg_names) - {"num_warps"}
    options = {k: v for k, v in launch.options.items() if k not in arguments}
    bound, special, rest = binder(*launch.arguments, **launch.options)
    _, signature, constants, attrs = kernel._pack_args(
        backend, dict(launch.options), bound, special, dict(rest)
    )
    names = kernel.arg_names
    return {
        "kernel": f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        "signature": {n: _short(kind) for n, kind in signature.items() if kind != "constexpr"},
        "constexprs": {names[place[0]]: _plain(value) for place, value in constants.items()},
        "multiples": [
            names[place[0]]
            for place, attributes in attrs.items()
            if attributes and not signature[names[place[0]]].startswith("*")
        ],
        "options": options,
    }


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def _short(kind: str) -> str:
    """A type without the layout of a box, which is the one that `compile_only` gives it."""
    if not (box := re.fullmatch(r"tensordesc<(\w+)\[([\d, ]+)\],(NVMMASharedLayout\(.*\))>", kind)):
        return kind.replace(" ", "")
    shape = [int(size) for size in box[2].split(",")]
    assert box[3] == repr(box_layout(box[1], shape)), box[3]
    return f"tensordesc<{box[1]}{shape}>".replace(" ", "")


if __name__ == "__main__":
    main()
