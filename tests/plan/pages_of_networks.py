"""Plans random networks for GPUs that are not here, in every precision, and launches them over
tensors that nobody reads: launchers refuse what their kernels do not have. Prints what failed.

    python -m tests.plan.pages_of_networks

In a process of its own, for in Triton's interpreter there are no launches.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from diffusion.plan.build import plan
from diffusion.plan.printed.page import page
from diffusion.plan.record.without_gpu import cuda_autocast
from tests.plan.random_networks import EMB, LAYERS, RandomNetwork
from triton_kernels import fused_ops
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import standing_for

NETWORKS = 40
CHANNELS = (4, 8, 12, 20, 32, 40, 64, 128)
SIZES = (1, 4, 4), (2, 5, 3), (3, 8, 8), (2, 7, 7), (4, 16, 12)  # images, rows, columns


def drawn(seed: int) -> tuple[nn.Module, tuple]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    c, (n, h, w) = rng.choice(CHANNELS), rng.choice(SIZES)
    # a layer of each kind comes up, whatever else is drawn
    layers = [LAYERS[seed % len(LAYERS)], *rng.choices(LAYERS, k=rng.randint(2, 5))]
    rng.shuffle(layers)
    module = RandomNetwork(layers, rng.choice(["silu", "gelu", "relu", "mish"]), c)
    if seed % 2:  # with layers that somebody has frozen
        for part in module.inside:
            part.requires_grad_(rng.random() < 0.5)
    return module, (torch.randn(n, c, h, w), torch.randn(n, EMB))


def precisions() -> Iterator[tuple[str, torch.dtype, bool, Callable[[], AbstractContextManager]]]:
    """Of parameters and arguments, whether TF32 is allowed, and in which context."""
    yield "autocast", torch.float32, True, partial(cuda_autocast, torch.bfloat16)
    yield "16 bits", torch.bfloat16, False, nullcontext
    yield "TF32", torch.float32, True, nullcontext
    yield "float32", torch.float32, False, nullcontext


def main() -> None:
    for seed in range(NETWORKS):
        for i, (precision, dtype, tf32, context) in enumerate(precisions()):
            gpu = chip(("h100", "a100", "rtx5090")[(seed + i) % 3])
            for trains in (True, False):
                module, args = drawn(seed)
                module = module.to(dtype).train(trains)
                args = tuple(x.to(dtype) for x in args)
                how = {"trains": trains, "kernels": (fused_ops, gpu.gpu), "tf32": (tf32, tf32)}
                try:
                    with standing_for(gpu.gpu), context(), torch.set_grad_enabled(trains):
                        made = plan(module, args, **how)
                    page(made, gpu)
                except Exception as error:
                    case = seed, precision, "train" if trains else "evaluate", module.layers
                    print(*case, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
