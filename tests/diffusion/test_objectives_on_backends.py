"""Every objective, trained by the Triton kernels in bf16 and by PyTorch's layers in bf16 from the
same parameters with the same data and noise, reaches the same held-out losses, band by band. What
rounding in bf16 alone does to them is known from PyTorch's layers in fp32."""

from typing import NamedTuple

import pytest
import torch

from benchmarks.objectives import OBJECTIVES
from diffusion.data.elephants import elephants
from diffusion.data.held_out import split
from diffusion.data.image_set import ImageSet
from diffusion.factory import Process, build_model
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.network import TrainingUNet
from diffusion.runtime.backend import choose_backend
from diffusion.runtime.distributed import Processes
from diffusion.training.build_step import build_step
from diffusion.training.held_out_loss import HeldOutLoss
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.trainer import TrainSettings

# so few timesteps that each has had ten losses after some of the steps
SHORT = {"loss-aware": {"num_timesteps": 40}}
MODEL = {
    "name": "unet",
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [],
    "num_groups": 8,
}


class Way(NamedTuple):
    """One training: held-out losses by band before and after it, and the timesteps' losses that the
    loss-aware sampler has kept."""

    before: dict[str, float]
    after: dict[str, float]
    counts: torch.Tensor | None


def train(objective: str, backend: str, precision: str, device: torch.device, steps: int) -> Way:
    process = Process(**OBJECTIVES[objective] | SHORT.get(objective, {}))
    made = choose_backend(backend, precision, device)
    images = ImageSet(elephants(count=160, size=16).images)
    data, held_out = split(images, 32)
    torch.manual_seed(0)
    model = build_model(MODEL, made, (16, 16), 3, process.learns_variance, device).train()
    flat = FlatParameters(model, together=TOGETHER)
    settings = OptimizerSettings(lr=1e-3, warmup=10, decay="cosine")
    train = TrainSettings(steps=steps, batch_size=32, precision=precision, tensorboard=False)
    processes = Processes(None)
    optimizer = Optimizer(flat, settings, made)
    step = build_step(model, flat, optimizer, data, True, process, train, processes)
    assert isinstance(step.network, TrainingUNet) or backend == "torch"
    judge = HeldOutLoss(held_out, process, made, device, processes, most=32)
    before = judge(model).bands
    for k in range(steps):
        step(k)
    step.release()
    timesteps = step.objective.timesteps
    return Way(before, judge(model).bands, None if timesteps is None else timesteps.counts.cpu())


def check(objective: str, ways: list[tuple[str, str]], device: torch.device, steps: int) -> None:
    """The first two ways agree to 5 %, or to twice what the second differs from the third by."""
    ours, theirs, exact = (train(objective, *way, device, steps) for way in ways)
    for way, found in zip(ways, (ours, theirs, exact), strict=True):
        print(objective, way, found.after)
    assert ours.after.keys() == theirs.after.keys() == exact.after.keys()
    for band, loss in ours.after.items():
        assert ours.before[band] == pytest.approx(exact.before[band], rel=0.02), band
        other = theirs.after[band]
        rounding = abs(other - exact.after[band])
        assert abs(loss - other) <= max(0.05 * other, 2 * rounding), band
    assert sum(ours.after.values()) < 0.7 * sum(ours.before.values())
    if ours.counts is not None:  # what was drawn followed the losses, in the last steps at least
        assert all((way.counts >= 10).all() for way in (ours, theirs, exact))


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_backends_learn_the_same(objective, device):
    ways = [("triton", "bf16"), ("torch", "bf16"), ("torch", "fp32")]
    check(objective, ways, device, steps=200)
