"""The optimizer's step: ours, PyTorch's fused AdamW, torch.compile."""

from collections.abc import Callable
from typing import Any

import torch

import triton_kernels
from benchmarks.cases import AdamWCase
from benchmarks.experiment import (
    DTYPES,
    Experiment,
    Inputs,
    Outputs,
    Provider,
    Run,
    drawing,
    with_compiler,
)
from triton_kernels import reference

_LR, _BETAS, _EPS, _DECAY, _EMA, _CLIP, _STEPS_DONE = 2e-4, (0.9, 0.999), 1e-8, 0.01, 0.999, 1.0, 10


def experiments(case: AdamWCase, count: int, dtype: str) -> list[Experiment]:
    """Clipping, AdamW, EMA and the low-precision copy that the layers compute with."""
    size = sum(case.sizes)
    low = DTYPES[dtype] if DTYPES[dtype].itemsize == 2 else torch.bfloat16
    state = ("param", "exp_avg", "exp_avg_sq", "ema", "shadow")

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
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

    compiled = with_compiler(reference.adamw_step)
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
