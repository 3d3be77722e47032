"""The memory of training steps: what the page of the plan says, and what a whole step takes, with
data, noise, loss and update, counted in a dry run; as JSON.

python -m tests.plan.memory_of_steps      without TRITON_INTERPRET, as the launches are a GPU's
"""

import json

import torch

from benchmarks.steps import our_model, our_step
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.printed.memory import Allocations, StepMemory
from diffusion.plan.printed.step import step_memory
from diffusion.plan.step.network import TrainingUNet, step_kernels
from diffusion.runtime.distributed import Processes
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import noting_launches

STEPS = [("unet64", "bf16", 4, 64), ("unet_tiny", "tf32", 8, 16)]  # precision, images, pixels
IMAGES = 2048  # of the data set of `our_step`
HOST = torch.device("cpu")


def nothing(*_, **__) -> None:
    """In the place of a launch."""


def computed(model: str, precision: str, batch: int, size: int, gpu: Device) -> StepMemory:
    """As the page has it."""
    with noting_launches(gpu, nothing):
        network = our_model(model, precision, torch.device("meta"), size).to_empty(device=HOST)
        flat = FlatParameters(network, together=TOGETHER)
        kernels = step_kernels(network.backend)
        step = TrainingUNet(network, flat, kernels, ready=lambda start: None)
        x = torch.empty(batch, size, size, network.in_channels, dtype=network.backend.dtype)
        y = step(x, torch.zeros(batch, dtype=torch.int64), None, rng=torch.zeros(2).long())
        y.backward(torch.empty_like(y))
        return step_memory(step, x, None)


def counted(model: str, precision: str, batch: int, size: int) -> int:
    """All that a whole step has made, without the data set."""
    with noting_launches(chip("h200").gpu, nothing), Allocations() as found:
        network = our_model(model, precision, torch.device("meta"), size).to_empty(device=HOST)
        data = IMAGES * size * size * network.in_channels
        step = our_step(network, batch, size, HOST, Processes(None)).plain
        step(0)  # which traces, over tensors that a GPU would not get
        found.peak = 0
        step(1)
    return found.peak - data


if __name__ == "__main__":
    torch.set_num_threads(1)
    both = [(computed(*step, chip("h200").gpu), counted(*step)) for step in STEPS]
    print(json.dumps([(memory._asdict(), memory.total, all_) for memory, all_ in both]))
