"""Attention: ours, and PyTorch's scaled_dot_product_attention with each of its backends."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import triton_kernels
from benchmarks.cases import AttentionCase
from benchmarks.experiment import (
    DTYPES,
    Experiment,
    Inputs,
    Outputs,
    Provider,
    Run,
    differentiated,
    drawing,
    forward,
)
from triton_kernels import reference


def experiments(case: AttentionCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    size, d = case.n * case.t * case.c, case.c // case.heads

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
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
                return forward(packed(ops), i["qkv"])
            return differentiated(packed(ops), i["qkv"], dy=i["do"])

        def apart(pass_: str, i: Inputs, backend: SDPBackend | None) -> Run:
            if pass_ == "fwd":
                return forward(sdpa(backend), *split(i["qkv"]))
            return differentiated(sdpa(backend), *split(i["qkv"]), dy=heads(i["do"]))

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
