"""The memory of training steps: what the page of the plan says, and what a whole step takes, with
data, noise, loss and update, counted in a dry run; and that of calls of accelerated networks; as
JSON.

python -m tests.plan.memory_of_steps      without TRITON_INTERPRET, as the launches are a GPU's
"""

import json

import torch

from benchmarks.steps import our_model, our_step
from diffusion import accelerate
from diffusion.models.unet import UNet
from diffusion.plan.printed.call import CallMemory, call_memory
from diffusion.plan.printed.memory import Allocations, StepMemory
from diffusion.plan.printed.step import step_page
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
IMAGES = 2048  # of the data set of `our_step`
HOST = torch.device("cpu")


def nothing(*_, **__) -> None:
    """In the place of a launch."""


def unwritten(model: str, precision: str, size: int) -> UNet:
    return our_model(model, precision, torch.device("meta"), size).to_empty(device=HOST)


def paged(
    model: str, precision: str, batch: int, size: int, gpu: Chip, recompute: bool = False
) -> StepMemory:
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


def called(name: str, low: bool) -> tuple[CallMemory, int]:
    """What is said of a call of an accelerated network, and what both its passes have made."""
    module, (x, *args), kwargs = network(name)
    h200, parameters = chip("h200"), list(module.parameters())
    with noting_launches(h200.gpu, nothing):
        fast = accelerate(module)
        for _ in range(2):  # the first learns what rows there are
            with Allocations() as found:
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    y = fast(x, *args, **kwargs)
                y = getattr(y, "sample", y)
                grads = torch.autograd.grad(y, parameters, torch.empty_like(y), allow_unused=True)
                del y, grads
    (made,) = (made for plans in fast._plans.values() for made in plans)
    return call_memory(made, h200, fused_ops), found.peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    h200 = chip("h200")
    both = [(paged(*step, h200), counted(*step)) for step in STEPS]
    large = [paged("unet64", "bf16", 128, 64, h200, recompute).total for recompute in (0, 1)]
    calls = [called(*call) for call in CALLS]
    both, calls = ([(m._asdict(), m.total, counted) for m, counted in c] for c in (both, calls))
    print(json.dumps([both, large, calls]))
