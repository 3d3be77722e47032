"""The memory of training steps: what the page of the plan says, and what a whole step takes, with
data, noise, loss and update, counted in a dry run; and that of calls of accelerated networks, and
of evaluations in sampling; as JSON.

python -m tests.plan.memory_of_steps      without TRITON_INTERPRET, as the launches are a GPU's
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.steps import our_model, our_step
from diffusion import accelerate
from diffusion.models.unet import UNet
from diffusion.plan.__main__ import _plan as plan_of, example
from diffusion.plan.inference import InferenceUNet
from diffusion.plan.inference1d import InferenceUNet1d
from diffusion.plan.printed.call import call_memory
from diffusion.plan.printed.memory import Allocations, Memory
from diffusion.plan.printed.step import step_page
from diffusion.plan.record.without_gpu import cuda_autocast
from diffusion.runtime.distributed import Processes
from tests.plan.networks import network
from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip, chip
from triton_kernels.runtime.device import standing_for
from triton_kernels.runtime.launch_recorder import noting_launches

STEPS = [("unet64", "bf16", 4, 64), ("unet_tiny", "tf32", 8, 16)]  # precision, images, pixels
CALLS = [  # and whether under autocast
    ("ours: classes", True),
    ("ours: film, residual blocks resample", False),
    ("diffusers: attention at every size, two layers", True),
    ("policy: film", False),
]
EVALUATIONS = [  # as `example` has them: model, samples, size, precision
    ("unet64", 2, "", "bf16"),
    ("unet_tiny", 2, "16", "tf32"),
    ("adm64", 1, "32", "fp32"),
    ("unet1d_small", 3, "", "bf16"),
]
IMAGES = 2048  # of the data set of `our_step`
HOST = torch.device("cpu")


def nothing(*_, **__) -> None:
    """In the place of a launch."""


def unwritten(model: str, precision: str, size: int) -> UNet:
    return our_model(model, precision, torch.device("meta"), size).to_empty(device=HOST)


def paged(
    model: str, precision: str, batch: int, size: int, gpu: Chip, recompute: bool = False
) -> Memory:
    x = torch.empty(batch, size, size, 3)
    with standing_for(gpu.gpu):
        network = unwritten(model, precision, size)
    return step_page(network, x, None, gpu, recompute).memory


def counted(model: str, precision: str, batch: int, size: int) -> int:
    """All that a whole step has made, without the data set."""
    with noting_launches(chip("h200").gpu, nothing), Allocations() as found:
        network = unwritten(model, precision, size)
        step = our_step(network, batch, size, HOST, Processes(None)).plain
        step(0)  # which traces, over tensors that a GPU would not get
        found.peak = 0
        step(1)
    return found.peak - IMAGES * size * size * 3


def called(name: str, low: bool) -> tuple[Memory, int]:
    """What is said of a call of an accelerated network, and what both its passes have made."""
    module, (x, *args), kwargs = network(name)
    h200, parameters = chip("h200"), list(module.parameters())
    with noting_launches(h200.gpu, nothing):
        fast = accelerate(module)
        for _ in range(2):  # the first learns what rows there are
            with Allocations() as found:
                with cuda_autocast(torch.bfloat16, enabled=low):
                    y = fast(x, *args, **kwargs)
                y = getattr(y, "sample", y)
                grads = torch.autograd.grad(y, parameters, torch.empty_like(y), allow_unused=True)
                del y, grads
    (made,) = (made for plans in fast._planned_calls.plans.values() for made in plans)
    return call_memory(made, h200, fused_ops), found.peak


def evaluated(
    gpu: Chip, device: torch.device, model: str, batch: int, size: str, precision: str
) -> tuple[Memory, Callable[[], Callable[[], Tensor]]]:
    """What is said of an evaluation, and what makes a sampler, which gives what evaluates."""
    network, (x, t, *given), _ = example(model, batch, size, precision)
    made, _, ops, memory_of = plan_of(network.eval(), (x, t, *given), {}, False, gpu)
    x = x.permute(0, 2, 3, 1).contiguous() if x.ndim == 4 else x[:, None]

    def sampler() -> Callable[[], Tensor]:
        there, tensors = network.to(device), [y.to(device) for y in (x, t, *given)]
        is_image = isinstance(there, UNet)
        sample = InferenceUNet(there, ops) if is_image else InferenceUNet1d(there, ops)
        return lambda: sample(*tensors)

    return memory_of(made, gpu, ops), sampler


def sampled(*evaluation: Any) -> tuple[Memory, int]:
    """What is said of an evaluation, and what there is at the peak of a sampler's second one beside
    the network."""
    h200 = chip("h200")
    said, sampler = evaluated(h200, HOST, *evaluation)
    with noting_launches(h200.gpu, nothing), Allocations() as found:
        evaluate = sampler()
        evaluate()
        found.peak = 0
        evaluate()
    return said, found.peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    h200 = chip("h200")
    both = [(paged(*step, h200), counted(*step)) for step in STEPS]
    large = [paged("unet64", "bf16", 128, 64, h200, recompute).total for recompute in (0, 1)]
    calls = [called(*call) for call in CALLS]
    samples = [sampled(*evaluation) for evaluation in EVALUATIONS]
    found = ([(m._asdict(), m.total, counted) for m, counted in c] for c in (both, calls, samples))
    print(json.dumps([*found, large]))
