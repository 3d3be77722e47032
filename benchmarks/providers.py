"""Who computes each op: these kernels, and what PyTorch, its compiler, cuDNN and cuBLAS have.

A provider gets the inputs in the layout of `triton_kernels`, brings them into the layout it likes
best before the clock starts, and hands its result back in ours after the clock has stopped. So the
alternatives pay for no conversion that their own networks would not need.
"""

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import triton_kernels
from triton_kernels import reference
from triton_kernels.conv import conv2d as triton_conv
from triton_kernels.philox import REVERSE

from .cases import AdamWCase, AttentionCase, Case, ConvCase, DenoiseCase, NormCase

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


def experiments(case: Case, count: int, dtype: str) -> list[Experiment]:
    """What there is to time of a case whose activations are `dtype`."""
    make = {
        ConvCase: _conv,
        NormCase: _group_norm,
        AttentionCase: _attention,
        AdamWCase: _adamw,
        DenoiseCase: _denoise,
    }[type(case)]
    return make(case, count, dtype)


def widened(inputs: Inputs) -> Inputs:
    """The same values where the reference is exact: float64 for float32, else float32."""
    lowest = min((x.itemsize for x in inputs.values() if x.is_floating_point()), default=4)
    wide = torch.float64 if lowest == 4 else torch.float32
    narrow = {k: x for k, x in inputs.items() if x.is_floating_point() and x.itemsize < 8}
    return inputs | {k: x.to(wide) for k, x in narrow.items()}


def copied(inputs: Inputs) -> Inputs:
    """The same values elsewhere, in the same order in memory."""
    return {k: x.clone(memory_format=torch.preserve_format) for k, x in inputs.items()}


def _random(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device)
        return (x * scale).to(dtype)

    return draw


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def _nchw(x: Tensor) -> Tensor:  # channels_last in memory
    return x.permute(0, 3, 1, 2)


def _nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


# --- convolution ----------------------------------------------------------------------------------


def _triton_conv2d(pass_: str, i: Inputs, case: ConvCase, allow_tf32: bool) -> Run:
    """The passes of our convolution by themselves: the one place that knows the launchers."""
    options = (case.stride, (case.r // 2, case.s // 2), allow_tf32)
    return {
        "fwd": lambda: (triton_conv._conv2d_fwd(i["x"], i["weight"], None, *options),),
        "fwd+bias": lambda: (triton_conv._conv2d_fwd(i["x"], i["weight"], i["bias"], *options),),
        "dgrad": lambda: (
            triton_conv._conv2d_dgrad(i["dy"], i["weight"], (case.h, case.w), *options),
        ),
        "wgrad": lambda: (triton_conv._conv2d_wgrad(i["x"], i["dy"], i["weight"], *options),),
    }[pass_]


def _aten_conv2d(pass_: str, i: Inputs, case: ConvCase) -> Run:
    """PyTorch's own, which is cuDNN on a GPU, over channels_last."""
    x, dy, weight, bias = _nchw(i["x"]), _nchw(i["dy"]), i["weight"], i["bias"]
    stride, padding = (case.stride,) * 2, (case.r // 2, case.s // 2)

    def backward(mask: list[bool]) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask
        )

    return {
        "fwd": lambda: (_nhwc(F.conv2d(x, weight, None, stride, padding)),),
        "fwd+bias": lambda: (_nhwc(F.conv2d(x, weight, bias, stride, padding)),),
        "dgrad": lambda: (_nhwc(backward([True, False, False])[0]),),
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


def _conv(case: ConvCase, count: int, dtype: str) -> list[Experiment]:
    if case.float32 and dtype != "fp32":
        dtype = "tf32"
    kind = DTYPES[dtype]
    x_size, y_size = case.n * case.h * case.w * case.ci, case.n * case.p * case.q * case.co
    w_size = case.co * case.ci * case.r * case.s

    def inputs(device: torch.device) -> Inputs:
        draw = _random(device)
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


# --- group norm -----------------------------------------------------------------------------------


def _differentiated(function: Callable[..., Tensor], *args: Tensor, dy: Tensor) -> Run:
    """y and the gradient of every argument."""
    leaves = [x.detach().requires_grad_() for x in args]

    def run() -> Outputs:
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return run


def _forward(function: Callable[..., Tensor], *args: Tensor) -> Run:
    def run() -> Outputs:
        with torch.no_grad():
            return (function(*args),)

    return run


_GNNHWC = importlib.util.find_spec("gnnhwc") is not None  # latentCall145/channels-last-groupnorm


def absent(op: str) -> list[str]:
    """What an op would be compared with as well, were it installed; a line each."""
    if op == "group_norm" and not _GNNHWC:
        return ["gnnhwc (latentCall145/channels-last-groupnorm) is not installed: left out"]
    return []


def _gnnhwc(groups: int, activation: str) -> Callable[..., Tensor]:
    """The CUDA GroupNorm for channels_last tensors of that package."""
    from gnnhwc.custom_gn import GN_NHWC_Func  # compiles itself, so only where it is wanted

    code = {"identity": 0, "silu": 2}[activation]
    return lambda x, weight, bias: GN_NHWC_Func.apply(x, weight, bias, groups, 1e-5, code)


def _group_norm(case: NormCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    size = case.n * case.h * case.w * case.c
    names = ["x", "weight", "bias"] + ["scale", "shift"] * case.modulated
    act = {"identity": lambda z: z, "silu": F.silu}[case.activation]

    def inputs(device: torch.device) -> Inputs:
        draw = _random(device)
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
        return _forward(norm, *args) if pass_ == "fwd" else _differentiated(norm, *args, dy=dy)

    def arguments(i: Inputs) -> list[Tensor]:
        return [i[k] for k in names]

    def back(outputs: Outputs) -> Outputs:
        return tuple(_nhwc(x) if x.ndim == 4 else x for x in outputs)

    compiled = _compiled(nchw)
    found = []
    for pass_, passes_over_x in (("fwd", 3), ("fwd+bwd", 8)):

        def ours(i: Inputs, pass_: str = pass_) -> Run:
            return passes(i, pass_, nhwc(triton_kernels), i["dy"], *arguments(i))

        def exact(i: Inputs, pass_: str = pass_) -> Outputs:
            return passes(i, pass_, nhwc(reference), i["dy"], *arguments(i))()

        def last(i: Inputs, norm: Callable[..., Tensor] = nchw, pass_: str = pass_) -> Run:
            x, *rest = arguments(i)
            return passes(i, pass_, norm, _nchw(i["dy"]), _nchw(x), *rest)

        def first(i: Inputs, pass_: str = pass_) -> Run:
            x, *rest = arguments(i)
            return passes(i, pass_, nchw, _nchw(i["dy"]).contiguous(), _nchw(x).contiguous(), *rest)

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
            )
        )
    return found


# --- attention ------------------------------------------------------------------------------------


def _attention(case: AttentionCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    size, d = case.n * case.t * case.c, case.c // case.heads

    def inputs(device: torch.device) -> Inputs:
        draw = _random(device)
        return {
            "qkv": draw(case.n, case.t, 3 * case.c, dtype=kind),
            "do": draw(case.n, case.t, case.c, dtype=kind),
        }

    def packed(ops: Any) -> Callable[[Tensor], Tensor]:
        return lambda qkv: ops.attention(
            qkv, case.heads, order=case.order, allow_tf32=dtype != "fp32"
        )

    def heads(x: Tensor) -> Tensor:  # [N, T, C] -> [N, heads, T, d]
        return x.view(case.n, case.t, case.heads, d).transpose(1, 2)

    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v where they lie, as the projection of a network leaves them."""
        if case.order == "qkv_heads":
            return tuple(heads(x) for x in qkv.chunk(3, dim=2))
        return tuple(qkv.view(case.n, case.t, case.heads, 3, d).permute(3, 0, 2, 1, 4))

    def joined(outputs: Outputs) -> Outputs:
        """The reference's packed gradient from three."""
        o, *grads = (x.transpose(1, 2) for x in outputs)  # [N, T, heads, d]
        o = o.reshape(case.n, case.t, case.c)
        if not grads:
            return (o,)
        together = torch.stack(grads, dim=2 if case.order == "qkv_heads" else 3)
        return o, together.reshape(case.n, case.t, 3 * case.c)

    def sdpa(backend: SDPBackend | None) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
            with chosen:
                return F.scaled_dot_product_attention(q, k, v)

        return attend

    found = []
    # q k v o forward; and q k v o do dq dk dv backward, of which o do twice
    for pass_, tensors, products in (("fwd", 4, 2), ("fwd+bwd", 4 + 10, 7)):

        def run(pass_: str, i: Inputs, ops: Any) -> Run:
            if pass_ == "fwd":
                return _forward(packed(ops), i["qkv"])
            return _differentiated(packed(ops), i["qkv"], dy=i["do"])

        def apart(pass_: str, i: Inputs, backend: SDPBackend | None) -> Run:
            if pass_ == "fwd":
                return _forward(sdpa(backend), *split(i["qkv"]))
            return _differentiated(sdpa(backend), *split(i["qkv"]), dy=heads(i["do"]))

        providers = {
            "triton": Provider(lambda i, p=pass_, run=run: run(p, i, triton_kernels)),
            "torch": Provider(lambda i, p=pass_, apart=apart: apart(p, i, None), joined),
        }
        if kind.itemsize == 2:
            for name, backend in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ):
                providers[name] = Provider(
                    lambda i, p=pass_, b=backend, apart=apart: apart(p, i, b), joined
                )
        found.append(
            Experiment(
                "attention",
                case.shape,
                dtype,
                pass_,
                count,
                inputs,
                lambda i, p=pass_, run=run: run(p, i, reference)(),
                providers,
                bytes=tensors * size * kind.itemsize,
                flops=case.flops * products // 2,
            )
        )
    return found


# --- optimizer ------------------------------------------------------------------------------------

_LR, _BETAS, _EPS, _DECAY, _EMA, _CLIP, _STEPS_DONE = 2e-4, (0.9, 0.999), 1e-8, 0.01, 0.999, 1.0, 10


def _adamw(case: AdamWCase, count: int, dtype: str) -> list[Experiment]:
    """Clipping, AdamW, EMA and the low-precision copy that the layers compute with."""
    size = sum(case.sizes)
    low = DTYPES[dtype] if DTYPES[dtype].itemsize == 2 else torch.bfloat16
    state = ("param", "exp_avg", "exp_avg_sq", "ema", "shadow")

    def inputs(device: torch.device) -> Inputs:
        draw = _random(device)
        corrections = [1 - beta ** (_STEPS_DONE + 1) for beta in _BETAS]
        hyper = [_LR, *_BETAS, _EPS, _DECAY, *corrections, _EMA, _CLIP]
        return {
            "param": draw(size, scale=0.02),
            "grad": draw(size, scale=1e-3),
            "exp_avg": draw(size, scale=1e-3),
            "exp_avg_sq": draw(size, scale=1e-3).square(),
            "ema": draw(size, scale=0.02),
            "shadow": draw(size, dtype=low),
            "hyper": torch.tensor(hyper, dtype=torch.float64, device=device),
            "skipped": torch.zeros(1, dtype=torch.int32, device=device),
        }

    def flat(ops: Any, step: Callable | None = None) -> Callable[[Inputs], Run]:
        def prepare(i: Inputs) -> Run:
            def run() -> Outputs:
                norm = ops.grad_norm(i["grad"])
                (step or ops.adamw_step)(
                    *(i[k] for k in ("param", "grad", "exp_avg", "exp_avg_sq", "ema")),
                    norm,
                    i["hyper"],
                    i["skipped"],
                    i["shadow"],
                )
                return tuple(i[k] for k in state)

            return run

        return prepare

    def fused(i: Inputs) -> Run:
        """PyTorch's fused AdamW and foreach functions over the parameters of the model."""
        parts = {k: list(i[k].split(case.sizes)) for k in (*state, "grad")}
        params = [p.requires_grad_() for p in (x.detach() for x in parts["param"])]
        adamw = torch.optim.AdamW(
            params,
            lr=_LR,
            betas=_BETAS,
            eps=_EPS,
            weight_decay=_DECAY,
            fused=True,
            capturable=params[0].is_cuda,
        )
        for k, p in enumerate(params):
            p.grad = parts["grad"][k]
            adamw.state[p] = {
                "step": torch.tensor(float(_STEPS_DONE), device=p.device),
                "exp_avg": parts["exp_avg"][k],
                "exp_avg_sq": parts["exp_avg_sq"][k],
            }

        def run() -> Outputs:
            torch.nn.utils.clip_grad_norm_(params, _CLIP, foreach=True)
            adamw.step()
            with torch.no_grad():
                torch._foreach_lerp_(parts["ema"], params, 1 - _EMA)
                torch._foreach_copy_(parts["shadow"], params)
            return tuple(i[k] for k in state)

        return run

    compiled = _compiled(reference.adamw_step)
    return [
        Experiment(
            "adamw",
            case.shape,
            f"{'bf16' if low == torch.bfloat16 else 'fp16'} copy",
            "step",
            count,
            inputs,
            lambda i: flat(reference)(i)(),
            {
                "triton": Provider(flat(triton_kernels)),
                "torch-fused": Provider(fused),
                "compile": Provider(flat(reference, compiled)),
            },
            # the norm reads grad; the step reads five and writes four, and the copy
            bytes=size * (4 + 5 * 4 + 4 * 4 + 2),
            flops=0,
            in_place=True,
        )
    ]


# --- diffusion ------------------------------------------------------------------------------------

_IMAGES, _TIMESTEPS = 1024, 1000


def _denoise(case: DenoiseCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    shape = (case.n, case.h, case.w, case.c)
    size = case.n * case.h * case.w * case.c

    def inputs(device: torch.device) -> Inputs:
        draw = _random(device)
        angle = torch.linspace(0.01, 1.5, _TIMESTEPS, device=device)
        whole = {"dtype": torch.int64, "device": device}
        generator = torch.Generator(device).manual_seed(1)
        images = max(_IMAGES, case.n) if device.type == "cuda" else case.n
        return {
            "images": torch.randint(
                256, (images, *shape[1:]), dtype=torch.uint8, device=device, generator=generator
            ),
            "index": torch.randint(images, (case.n,), generator=generator, **whole),
            "t": torch.randint(_TIMESTEPS, (case.n,), generator=generator, **whole),
            "table": torch.stack((angle.cos(), angle.sin()), dim=1),
            "rng": torch.tensor([7, 11], **whole),
            "x": draw(*shape),
            "output": draw(*shape, dtype=kind),
            "reverse_table": torch.tensor(
                [[1.1, -0.4, 0.3, 0.7, 0.0, 0.2, 0.0, 0.0]] * 4, device=device
            ),
            "row": torch.tensor([2], **whole),
            "noise": draw(*shape),
            "dloss": draw(case.n, scale=1.0),
        }

    def batch(i: Inputs) -> dict[str, Tensor]:
        return {"index": i["index"]}

    def experiment(
        name: str,
        run: Callable[[Any, Inputs], Run],
        torch_run: Callable[[Inputs, Callable, bool], Run],
        passes: str,
        moved: int,
    ) -> Experiment:
        """`torch_run` gets (inputs, the compiler or the identity, whether to draw noise itself)."""
        providers = {"triton": Provider(lambda i: run(triton_kernels, i))}
        for provider, compiler in (("torch", lambda f: f), ("compile", _compiled)):
            providers[provider] = Provider(
                lambda i, c=compiler: torch_run(i, c, True),
                prepare_checked=lambda i, c=compiler: torch_run(i, c, False),
            )
        return Experiment(
            name, case.shape, dtype, passes, count, inputs, lambda i: run(reference, i)(),
            providers, moved, flops=0,
        )  # fmt: skip

    def q_sample(ops: Any, i: Inputs) -> Run:
        out = i["output"].dtype  # the reference's is wider
        return _forward(
            lambda: ops.q_sample(i["images"], i["t"], i["table"], i["rng"], dtype=out, **batch(i))
        )

    def torch_q_sample(i: Inputs, compiler: Callable, draw: bool) -> Run:
        def run(images, index, t, table, noise) -> Tensor:
            x0 = images[index].float() / 127.5 - 1
            a, s = table[t].view(-1, 2, 1, 1, 1).unbind(1)
            noise = torch.randn_like(x0) if draw else noise
            return (a * x0 + s * noise).to(kind)

        noise = None if draw else reference.normal(shape, i["rng"])
        args = [i[k] for k in ("images", "index", "t", "table")]
        return _forward(compiler(run), *args, noise)

    def loss(ops: Any, i: Inputs) -> Run:
        def run(output: Tensor) -> Tensor:
            return ops.denoise_loss(output, i["images"], i["t"], i["table"], i["rng"], **batch(i))

        return _differentiated(run, i["output"], dy=i["dloss"].float())

    def torch_loss(i: Inputs, compiler: Callable, draw: bool) -> Run:
        def run(output: Tensor, noise: Tensor) -> Tensor:  # which q_sample has left in memory
            return (output.float() - noise).square().mean(dim=(1, 2, 3))

        noise = i["noise"] if draw else reference.normal(shape, i["rng"])
        loss = compiler(run)
        return _differentiated(lambda output: loss(output, noise), i["output"], dy=i["dloss"])

    def step(ops: Any, i: Inputs) -> Run:
        args = [i[k] for k in ("x", "output", "reverse_table", "row", "rng")]
        return _forward(ops.denoise_step, *args)

    def torch_step(i: Inputs, compiler: Callable, draw: bool) -> Run:
        def run(x, output, table, row, noise) -> Tensor:
            a, b, c0, d, e, sigma, _, _ = table.index_select(0, row)[0].unbind()
            output = output.float()
            x0 = (a * x + b * output).clamp(-1, 1)
            noise = torch.randn_like(x) if draw else noise
            return c0 * x0 + d * x + e * output + sigma * noise

        rng = torch.stack((i["rng"][0], i["rng"][1] + i["row"][0]))
        noise = None if draw else reference.normal(shape, rng, stream=REVERSE)
        args = [i[k] for k in ("x", "output", "reverse_table", "row")]
        return _forward(compiler(run), *args, noise)

    low = kind.itemsize
    return [
        experiment("q_sample", q_sample, torch_q_sample, "fwd", size * (1 + low)),
        # the network's output twice and its gradient; neither the noise nor the images
        experiment("denoise_loss", loss, torch_loss, "fwd+bwd", size * 3 * low),
        experiment("denoise_step", step, torch_step, "fwd", size * (4 + low + 4)),
    ]
