"""Cross-attention: ours, and PyTorch's scaled_dot_product_attention, which with a mask is neither
its flash nor cuDNN backend."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import triton_kernels
from benchmarks.cases import CrossAttentionCase
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


def experiments(case: CrossAttentionCase, count: int, dtype: str) -> list[Experiment]:
    kind, d = DTYPES[dtype], case.c // case.heads

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
        lengths = case.keys - torch.arange(case.n, device=device) % case.keys
        return {
            "q": draw(case.n, case.t, case.c, dtype=kind),
            "kv": draw(case.n, case.keys, 2 * case.c, dtype=kind),
            "do": draw(case.n, case.t, case.c, dtype=kind),
            "mask": torch.arange(case.keys, device=device) < lengths[:, None],
        }

    def run(pass_: str, i: Inputs, ops) -> Run:
        def attend(q: Tensor, kv: Tensor) -> Tensor:
            tf32 = dtype != "fp32"
            return ops.cross_attention(q, kv, case.heads, mask=i["mask"], allow_tf32=tf32)

        if pass_ == "fwd":
            return forward(attend, i["q"], i["kv"])
        return differentiated(attend, i["q"], i["kv"], dy=i["do"])

    def heads(x: Tensor) -> Tensor:  # [N, L, C] -> [N, heads, L, d]
        return x.view(*x.shape[:2], case.heads, d).transpose(1, 2)

    def apart(pass_: str, i: Inputs, backend: SDPBackend | None) -> Run:
        """q, k and v where they lie."""
        seen = i["mask"][:, None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, seen)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, seen)

        k, v = (heads(x.contiguous()) for x in i["kv"].chunk(2, dim=2))
        if pass_ == "fwd":
            return forward(attend, heads(i["q"]), k, v)
        return differentiated(attend, heads(i["q"]), k, v, dy=heads(i["do"]))

    def joined(outputs: Outputs) -> Outputs:
        """As the reference's, from o and the gradients of q, k and v."""
        o, *grads = (x.transpose(1, 2).flatten(2) for x in outputs)
        return (o,) if not grads else (o, grads[0], torch.cat(grads[1:], dim=2))

    found, queries, keys = [], case.n * case.t * case.c, case.n * case.keys * 2 * case.c
    # q kv o forward; and q kv o do dq dkv backward, of which o do twice
    for pass_, of_queries, of_keys, products in (("fwd", 2, 1, 2), ("fwd+bwd", 2 + 6, 1 + 2, 7)):
        providers = {
            "triton": Provider(lambda i, p=pass_, run=run: run(p, i, triton_kernels)),
            "torch": Provider(lambda i, p=pass_, apart=apart: apart(p, i, None), joined),
        }
        if kind.itemsize == 2:
            providers["efficient"] = Provider(
                lambda i, p=pass_, apart=apart: apart(p, i, SDPBackend.EFFICIENT_ATTENTION), joined
            )
        found.append(
            Experiment(
                "cross_attention",
                case.shape,
                dtype,
                pass_,
                count,
                inputs,
                lambda i, p=pass_, run=run: run(p, i, reference)(),
                providers,
                bytes=(of_queries * queries + of_keys * keys) * kind.itemsize,
                flops=case.flops * products // 2,
            )
        )
    return found
