"""A training step with the planned network, whose update reaches into the next step."""

import pytest
import torch

import triton_kernels
from benchmarks import steps
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.unet import FusedUNet
from diffusion.process.objective import Objective
from diffusion.process.schedule import NoiseSchedule
from diffusion.runtime.backend import Backend
from diffusion.runtime.distributed import Processes
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep
from triton_kernels import reference
from triton_kernels.reference import fused as fused_reference

from .test_fused_unet import make


@pytest.fixture(autouse=True)
def small_batches_have_late_filters(monkeypatch):
    monkeypatch.setattr("diffusion.plan.unet._LITTLE_MEMORY", 0)


def planned_step(defers: bool) -> TrainStep:
    """With kernels where there are any without 16 bits: in the optimizer."""
    backend = Backend("torch", reference)
    small = {"model_channels": 16, "channel_mult": (1, 1, 1), "backend": backend}
    model = make(small).float()
    flat = FlatParameters(model, together=TOGETHER)
    optimizer = Optimizer(
        flat, OptimizerSettings(lr=1e-2, warmup=0), Backend("triton", triton_kernels)
    )
    total = GradientSum(flat, Processes(None), norm=optimizer.norm)
    network = FusedUNet(model, flat, fused_reference, ready=total.listener)
    if not defers:
        network.stages = None
    images = steps.random_images((16, 8, 12, 3), torch.device("cpu"))
    return TrainStep(
        network,
        Objective(NoiseSchedule.linear(1000), backend),
        Batches(ImageSet(images, name="random"), 4, 0, torch.device("cpu")),
        flat,
        optimizer,
        total,
        seed=0,
        steps=3,
        accumulate=2,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, in Triton's interpreter")
def test_nothing_is_read_before_it_is_up_to_date():
    seen = []
    for defers in (True, False):
        step = planned_step(defers)
        results = [x.clone() for k in range(3) for x in step(k)]
        late = step.flat.param.clone()
        step.settle()
        assert torch.equal(late, step.flat.param) != defers
        seen.append([*results, step.flat.param, step.flat.ema, step.flat.exp_avg_sq])
    for x, expected in zip(*seen, strict=True):
        assert torch.equal(x, expected)


@pytest.mark.gpu
def test_captured_steps_with_and_without_late_updates(device, monkeypatch):
    """The same bits: what runs beside what does not matter, nor that somebody looks meanwhile."""
    seen = []
    for defers in (True, False):
        if not defers:
            monkeypatch.setattr(FusedUNet, "_stages", lambda _: None)
        model = steps.our_model("unet64", "bf16", device, 64)
        step = steps.our_step(model, 8, 64, device, Processes(None))
        run = step.captured()
        results = []
        for k in range(4, 9):
            results += [x.clone() for x in run(k)]
            if k in (5, 8):
                run.settle()
                flat = run.flat
                results += [x.clone() for x in (flat.param, flat.ema, flat.exp_avg, flat.shadow)]
        seen.append(results)
        step.release()
    for x, expected in zip(*seen, strict=True):
        assert torch.equal(x, expected)
