"""A captured step does what the same step does launch by launch, to the bit, whatever is asked of
it: on the GPU the plan for bf16; on a CPU the same steps on PyTorch's layers, whose graph is
imitated (`imitated_graph`)."""

import numpy as np
import pytest
import torch

import triton_kernels
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.unet import UNet
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.schedule import streams
from diffusion.plan.schedule.moves import THIRD
from diffusion.plan.step.network import TrainingUNet, training_network
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.process.timesteps import LossAwareTimesteps
from diffusion.runtime.backend import TORCH_FP32, Backend, determinism
from diffusion.runtime.distributed import Processes
from diffusion.training import train_step
from diffusion.training.gradient_sum import BUCKET, GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep
from tests.plan import imitated_graph

from .test_fused_unet_kernels import build

STEPS = 5  # two before the capture, the captured one, and two replays of it
SMALL = {"channel_mult": (1, 2), "num_res_blocks": 1, "attention_resolutions": (2,)}
NARROW = {"model_channels": 32, "num_groups": 8, "num_head_channels": 16}  # on a CPU

CASES = {  # of the model, the objective, and the step
    "plain": ({}, {}, {}),
    "micro-batches": ({}, {}, {"accumulate": 2}),
    "mirrored": ({}, {}, {"flip": True}),
    "further averages": ({}, {}, {"more_ema": (0.5, 0.9)}),
    "flow": ({}, {"schedule": "flow", "prediction": "velocity"}, {}),
    "timesteps by losses": ({}, {"schedule": "short"}, {}),
    "timesteps by losses, micro-batches": ({}, {"schedule": "short"}, {"accumulate": 2}),
    "weighted": ({}, {"prediction": "v_prediction", "weights": np.linspace(0.1, 2, 1000)}, {}),
    "learned variance": ({"out_channels": 6}, {"variance": "learned_range"}, {}),
    "learned variance, micro-batches": (
        {"out_channels": 6},
        {"variance": "learned_range"},
        {"accumulate": 2},
    ),
    "classes": ({"num_classes": 3, "label_dropout": 0.3}, {}, {}),
    "dropout": ({"dropout": 0.2}, {}, {}),
    "recomputed": ({}, {}, {"recompute": True}),
    "recomputed dropout, micro-batches": (
        {"dropout": 0.2},
        {},
        {"recompute": True, "accumulate": 2},
    ),
}


@pytest.fixture
def deterministic(request):
    """As train.deterministic."""
    with determinism(True):
        yield


def make_step(
    device: torch.device,
    model: dict,
    objective: dict,
    *,
    capture: bool,
    accumulate: int = 1,
    flip: bool = False,
    recompute: bool = False,
    more_ema: tuple[float, ...] = (),
    processes: Processes | None = None,  # None: alone
    bucket: int = BUCKET,
    lr: float = 1e-3,
) -> TrainStep:
    on_gpu = device.type == "cuda"
    backend = TORCH_FP32
    if on_gpu:
        backend = Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True)
    torch.manual_seed(0)
    size = (32, 32) if on_gpu else (8, 8)
    unet = build(backend, SMALL | ({} if on_gpu else NARROW) | model, size, device).train()
    flat = FlatParameters(unet, together=TOGETHER)
    settings = OptimizerSettings(lr=lr, warmup=2, more_ema=more_ema)
    optimizer = Optimizer(flat, settings, backend)
    total = GradientSum(flat, processes or Processes(None), bucket, optimizer.norm)
    network = training_network(unet, flat, recompute, ready=total.listener, urgent=total.urgent)
    assert isinstance(network, TrainingUNet) or not on_gpu
    images = torch.randint(256, (20, *size, 3), dtype=torch.uint8)
    labels = torch.arange(20) % 3 if unet.num_classes else None
    objective = dict(objective)
    kind, count = objective.pop("schedule", "cosine"), 1000
    if kind == "short":  # so that losses say what is drawn before the steps are over
        kind, count = "cosine", 2
        objective["timesteps"] = LossAwareTimesteps(count, 8, backend, device)
    step = TrainStep(
        network,
        Objective(make_schedule(kind, count), backend, device=device, **objective),
        Batches(ImageSet(images, labels), 8, 0, device),
        flat,
        optimizer,
        total,
        seed=0,
        steps=STEPS,
        accumulate=accumulate,
        flip=flip,
        capture=capture,
    )
    step._capture = capture  # on a CPU, too
    return step


def results(step: TrainStep) -> list[torch.Tensor]:
    """Loss and norm of every step, and what is left at the end."""
    found = [x.clone() for k in range(STEPS) for x in step(k)]
    flat = step.flat
    buffers = (flat.param, flat.ema, flat.exp_avg, flat.exp_avg_sq, *flat.averages.values())
    found += [x.clone() for x in buffers]
    if step.objective.timesteps is not None:
        found += [x.clone() for x in step.objective.timesteps.state().values()]
    step.release()
    return found


def check(case: str, device: torch.device) -> None:
    model, objective, options = CASES[case]
    if device.type == "cpu":
        options = {k: v for k, v in options.items() if k != "recompute"}  # a plan's option
    seen = [
        results(make_step(device, model, objective, capture=capture, **options))
        for capture in (True, False)
    ]
    for a, b in zip(*seen, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)
    assert seen[0][0] != seen[0][2]  # each step has a loss of its own


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_captured(case, device):
    check(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["plain", "learned variance, micro-batches", "classes", "timesteps by losses"]
)
def test_captured_deterministic(case, device, deterministic):
    """PyTorch raises for a kernel of its own that would not give the same bits."""
    check(case, device)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has captured steps")
@pytest.mark.parametrize(
    "case",
    [
        *("learned variance, micro-batches", "classes", "further averages", "flow"),
        "timesteps by losses, micro-batches",
    ],
)
def test_captured_by_an_imitated_graph(case, device, monkeypatch):
    monkeypatch.setattr(train_step, "captured", imitated_graph.captured)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", imitated_graph.Graph)
    monkeypatch.setattr(UNet, "check_given", lambda *_: None)  # which reads labels of a CPU
    check(case, device)


@pytest.mark.gpu
def test_a_captured_step_never_waits_for_the_gpu(device):
    """PyTorch raises where the host would."""
    step = make_step(device, {}, {}, capture=True)
    for k in range(3):
        step(k)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(3, STEPS):
            step(k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.release()


class Twins:
    """Stands in for two processes with the same samples: doubles what it is given, late and on a
    stream of its own, as NCCL would."""

    count = 2

    def __init__(self) -> None:
        self.stream, self.sums = torch.cuda.Stream(), 0

    def start_sum(self, x: torch.Tensor):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10**5)  # clocks
            x *= 2
            done = self.stream.record_event()
        self.sums += 1
        return lambda: torch.cuda.current_stream().wait_event(done)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("large", [0, streams.LARGE], ids=["held", "not held"])
def test_a_sum_has_the_whole_gradient_of_every_step(device, monkeypatch, large, accumulate):
    """What is sent off while backward goes on is complete, and is waited for: with a twin the
    gradient is twice the own one, to the bit, for the plan is the same."""
    monkeypatch.setattr(streams, "LARGE", large)
    model, twins = {"channel_mult": (1, 2, 2, 2)}, Twins()
    options = {"capture": True, "accumulate": accumulate, "lr": 0.0}
    alone = make_step(device, model, {}, **options)
    both = make_step(device, model, {}, processes=twins, bucket=2**18, **options)
    for k in range(STEPS):
        alone(k), both(k)
        own, total = alone.flat.grad, both.flat.grad
        assert own.isfinite().all() and own.any() and torch.equal(2 * own, total)
        torch.testing.assert_close(2 * alone.norm, both.norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(2 * alone.loss, both.loss, rtol=1e-6, atol=0)
    assert twins.sums > 3 * 6  # in several buckets, in each step that was not replayed
    for step in (alone, both):
        (made,) = step.network.plans.values()
        moves = made.schedule.backward
        assert (large == 0) == any(move.stream == THIRD and move.nodes for move in moves)
        step.release()
