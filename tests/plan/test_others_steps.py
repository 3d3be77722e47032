"""Training steps of networks that are no `UNet`, captured: by plan and layer by layer."""

import pytest
import torch
from torch import Tensor, nn

import triton_kernels
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.layers import (
    Conv2d,
    GroupNorm,
    Linear,
    Network,
    TimestepEmbedding,
    set_backend,
)
from diffusion.plan.step.network import training_network
from diffusion.plan.step.others import TrainingNetwork
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.runtime.distributed import Processes
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

from .test_others import images

pytestmark = pytest.mark.gpu
STEPS, BATCH = 8, 8


class Stack(Network):
    """Residual convolutions with a modulated norm; rows of 16 pixels and 40 channels, which fit no
    kernel exactly."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(TORCH_FP32)
        self.in_channels, self.num_classes = 3, None
        self.time = TimestepEmbedding(width)
        self.first = Conv2d(3, width, 3)
        self.norms = nn.ModuleList(GroupNorm(8, width, activation="silu") for _ in range(3))
        self.convs = nn.ModuleList(Conv2d(width, width, 3) for _ in range(2))
        self.modulations = nn.ModuleList(Linear(width, 2 * width) for _ in range(2))
        self.last = Conv2d(width, 3, 3)

    def forward_nhwc(self, x, t, labels=None, *, rng=None, first=0):
        embedding, h = self.time(t), self.first(x.to(self.backend.dtype))
        for norm, conv, modulation in zip(self.norms, self.convs, self.modulations, strict=False):
            scale, shift = modulation(embedding).chunk(2, dim=1)
            h = h + conv(norm(h, scale.contiguous(), shift.contiguous()))
        return self.last(self.norms[2](h))


NETWORKS = {
    "stack": (Stack, (12, 16)),
    "dropout of 18 channels": (lambda: images(out_channels=3), (8, 8)),
}


def losses(name: str, device: torch.device, planned: bool, capture: bool) -> Tensor:
    """Of each step, and the parameters behind the last."""
    build, size = NETWORKS[name]
    backend = Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True)
    torch.manual_seed(0)
    model = build().float().to(device)
    set_backend(model, backend)
    flat = FlatParameters(model)
    optimizer = Optimizer(flat, OptimizerSettings(lr=1e-3, warmup=2), backend)
    total = GradientSum(flat, Processes(None), norm=optimizer.norm)
    network = training_network(model, flat) if planned else model.forward_nhwc
    assert isinstance(network, TrainingNetwork) == planned
    step = TrainStep(
        network,
        Objective(make_schedule("cosine", 1000), backend, device=device),
        Batches(ImageSet(torch.randint(256, (20, *size, 3), dtype=torch.uint8)), BATCH, 0, device),
        flat,
        optimizer,
        total,
        seed=0,
        steps=STEPS,
        capture=capture,
    )
    found = [step(k)[0].clone() for k in range(STEPS)]
    step.release()
    return torch.cat((torch.stack(found).flatten().float(), flat.param.float()))


@pytest.mark.parametrize("name", NETWORKS)
def test_as_layer_by_layer(name, device, caplog):
    """Losses differ by what 16 bits are rounded to."""
    ours, theirs = (losses(name, device, planned, capture=True) for planned in (True, False))
    assert ours.isfinite().all() and not caplog.records
    torch.testing.assert_close(ours[:STEPS], theirs[:STEPS], rtol=2e-2, atol=0)
    moved = (ours[STEPS:] - theirs[STEPS:]).norm() / theirs[STEPS:].norm()
    assert moved < 0.02


@pytest.mark.parametrize("name", NETWORKS)
def test_captured(name, device):
    """As launch by launch, to the bit."""
    ours, theirs = (losses(name, device, True, capture) for capture in (True, False))
    assert torch.equal(ours, theirs)
