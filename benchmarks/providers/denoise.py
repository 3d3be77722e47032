"""Noise, loss and the reverse step: ours, PyTorch, torch.compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triton_kernels
from benchmarks.cases import DenoiseCase
from benchmarks.experiment import (
    DTYPES,
    Experiment,
    Inputs,
    Provider,
    Run,
    differentiated,
    drawing,
    forward,
    with_compiler,
)
from triton_kernels import reference
from triton_kernels.noise.philox import REVERSE

_IMAGES, _TIMESTEPS = 1024, 1000


def experiments(case: DenoiseCase, count: int, dtype: str) -> list[Experiment]:
    kind = DTYPES[dtype]
    shape = (case.n, case.h, case.w, case.c)
    size = case.n * case.h * case.w * case.c

    def inputs(device: torch.device) -> Inputs:
        draw = drawing(device)
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
        for provider, compiler in (("torch", lambda f: f), ("compile", with_compiler)):
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
        return forward(
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
        return forward(compiler(run), *args, noise)

    def loss(ops: Any, i: Inputs) -> Run:
        def run(output: Tensor) -> Tensor:
            return ops.denoise_loss(output, i["images"], i["t"], i["table"], i["rng"], **batch(i))

        return differentiated(run, i["output"], dy=i["dloss"].float())

    def torch_loss(i: Inputs, compiler: Callable, draw: bool) -> Run:
        def run(output: Tensor, noise: Tensor) -> Tensor:  # which q_sample has left in memory
            return (output.float() - noise).square().mean(dim=(1, 2, 3))

        noise = i["noise"] if draw else reference.normal(shape, i["rng"])
        loss = compiler(run)
        return differentiated(lambda output: loss(output, noise), i["output"], dy=i["dloss"])

    def step(ops: Any, i: Inputs) -> Run:
        args = [i[k] for k in ("x", "output", "reverse_table", "row", "rng")]
        return forward(ops.denoise_step, *args)

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
        return forward(compiler(run), *args, noise)

    low = kind.itemsize
    return [
        experiment("q_sample", q_sample, torch_q_sample, "fwd", size * (1 + low)),
        # the network's output twice and its gradient; neither the noise nor the images
        experiment("denoise_loss", loss, torch_loss, "fwd+bwd", size * 3 * low),
        experiment("denoise_step", step, torch_step, "fwd", size * (4 + low + 4)),
    ]
