"""One network trained by several ways from the same parameters: held-out loss over wall-clock.

    python -m benchmarks.learning dataset=FILE.packed [key=value ...]

    dataset=         a folder of images, a .zip, or a .packed file of tools/prepare.py
    model=unet32     configs/model
    size=32          pixels
    batch=128        images a step
    seconds=150      of training, for each way
    steps=0          after which a way ends before its time; 0: never
    every=10         seconds of training between two measurements
    held_out=2000    images that are not trained on
    providers=triton-bf16,compile-bf16,eager-bf16   any of {triton,torch,eager,compile,autotune}-
                     {bf16,tf32,fp32}; triton and torch are ours by that backend
    ema=0.9999       decay of the average of the parameters that is judged and draws, smaller at
                     first as in optim.ema_warmup; 0: the parameters themselves
    samples=64       images that each way draws at its end (DDIM, 50 steps); 0: none
    seed=0           of the parameters and of what is drawn in training
    device=auto
    out=             a folder for PROVIDER.csv, PROVIDER.png and learning.png; default
                     benchmarks/results/learning

All begin at the same parameters, with the same AdamW (constant learning rate, no weight decay, no
clipping), and mirror half of the images. The images lie on the device as bytes; on a GPU a step is
one CUDA graph. Ours takes shuffled epochs, PyTorch draws with replacement. The clock runs in
training alone. What is compiled and captured before has a column of its own, and its steps are
undone. The average of the parameters is part of every way's step. The held-out loss is that of
training, the mean squared error of the noise, at four timesteps of each image. Timesteps and noise
are always the same, and so is the network: the average is copied into one of PyTorch's ops in TF32.

A row is written as soon as it is measured. The table and the picture have every way of which there
is a file in `out`, so the ways may be trained by several commands with the same settings.
"""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness, steps, stopwatch
from benchmarks.baseline_unet import build_baseline
from benchmarks.cases import Images, model_settings
from benchmarks.learning_curves import OURS, Point, format_curves, plot, read_curve
from benchmarks.parity import read_images
from diffusion.data.held_out import Rows, split
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.factory import Process, build_model
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.process.objective import Objective
from diffusion.runtime.backend import TORCH_FP32, choose_backend
from diffusion.runtime.distributed import Processes, choose_device
from diffusion.runtime.precompile import compile_ahead, described
from diffusion.sampling.draw import draw
from diffusion.tracking.pictures import grid
from diffusion.training.build_step import build_step
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.trainer import TrainSettings

DEFAULTS = {
    "dataset": "",
    "model": "unet32",
    "size": 32,
    "batch": 128,
    "seconds": 150.0,
    "steps": 0,
    "every": 10.0,
    "held_out": 2000,
    "ema": 0.9999,
    "providers": ("triton-bf16", "compile-bf16", "eager-bf16"),
    "samples": 64,
    "seed": 0,
    "device": "auto",
    "out": "",
}
PROVIDERS = (*steps.PROVIDERS, *(f"torch-{precision}" for precision in ("bf16", "tf32", "fp32")))
_WARM_UP = 4  # steps before the clock: ours captures itself in the third
_FIRST = 10  # steps from which the duration of one is known
_JUDGED_AT_ONCE = 500  # images
_DRAWS = 4  # of timestep and noise, for each image that is held out
_KEY = 0x4C4541524E  # of these; far from the seeds that people choose


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for provider in settings["providers"]:
        harness.check_choice("providers", provider, PROVIDERS)
    for key in ("batch", "held_out"):
        if settings[key] < 1:
            raise ConfigError(f"{key}={settings[key]}; expected at least 1")
    if not 0 <= settings["ema"] < 1:
        raise ConfigError(f"ema={settings['ema']} is outside [0, 1)")
    device = choose_device(settings["device"])
    data = read_images(settings["dataset"], settings["size"])
    data.check()
    kept, held_out = split(data, settings["held_out"])
    data = ImageSet(data.images[torch.from_numpy(kept.rows)], name=data.name)
    out = Path(settings["out"] or harness.RESULTS / "learning")
    out.mkdir(parents=True, exist_ok=True)
    judge = Judge(settings, held_out, device)
    for i, provider in enumerate(settings["providers"]):
        learn(provider, settings, data, judge, out, waiting=len(settings["providers"]) - i - 1)
        torch._dynamo.reset()
        stopwatch.release_memory()
    curves = {p: read_curve(out / f"{p}.csv") for p in PROVIDERS if (out / f"{p}.csv").is_file()}
    print(f"\n{format_curves(curves)}")
    title = f"{settings['model']}, {data.name}, batch {settings['batch']}, {device_name(device)}"
    plot(curves, out / "learning.png", title)
    return 0


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Judge:
    """The network that the parameters of every way are copied into: it has those that all begin
    with, measures the held-out loss and draws."""

    def __init__(self, settings: dict, held_out: Rows, device: torch.device) -> None:
        self.device, self.image_shape = device, tuple(held_out.images.shape[1:])
        self.model_settings = model_settings(settings["model"]) | {"num_classes": None}
        self.process, backend = Process(), choose_backend("torch", "tf32", device)
        *size, channels = self.image_shape
        torch.manual_seed(settings["seed"])
        of_images = tuple(size), channels, False
        made = build_model(self.model_settings, TORCH_FP32, *of_images, torch.device("cpu"))
        self.start = {name: value.clone() for name, value in made.named_parameters()}
        self.model = build_model(self.model_settings, backend, *of_images, device).eval()
        self._images = held_out.take(0, len(held_out))[0].to(device)
        self._objective = Objective(self.process.schedule, backend, device=device)

    @torch.no_grad()
    def loss(self, parameters: dict[str, Tensor]) -> float:
        harness.set_precision("tf32")  # whatever the way's own is
        copy_parameters(parameters, dict(self.model.named_parameters()))
        found = []
        for k in range(_DRAWS):
            rng = torch.tensor([_KEY, k], device=self.device)
            for start in range(0, len(self._images), _JUDGED_AT_ONCE):
                images = self._images[start : start + _JUDGED_AT_ONCE]
                losses, _ = self._objective.loss(self.model.forward_nhwc, images, rng, first=start)
                found.append(losses.double())
        return torch.cat(found).mean().item()

    def draw(self, n: int) -> np.ndarray:  # uint8 [n, H, W, C]
        """By the parameters that were judged last."""
        options = {"sampler": "ddim", "steps": 50, "clip": 1.0, "capture": False}
        sampler = self.process.sampler(self.model.backend, self.device, **options)
        return draw(self.model, sampler, n, self.image_shape, seed=0)


@torch.no_grad()
def copy_parameters(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """By name. ValueError: they have other names."""
    if source.keys() != target.keys():
        raise ValueError(f"parameters differ: {sorted(source.keys() ^ target.keys())[:3]}")
    for name, value in source.items():
        target[name].copy_(value)


class Way(NamedTuple):
    """A way to train: `run(k)` is step number k, `judged` are the parameters of now, or their
    average, by name."""

    run: Callable[[int], object]
    judged: dict[str, Tensor]


def optimizer_settings(settings: dict) -> dict:
    """The group `optim` of every way."""
    average = {"ema_decay": settings["ema"], "ema_warmup": settings["ema"] > 0}
    return {"lr": steps.LR, "warmup": 0, "clip_norm": 0.0, "weight_decay": 0.0, **average}


def ours(provider: str, settings: dict, data: ImageSet, judge: Judge) -> Way:
    """The framework's step, by the backend triton or torch."""
    name, _, precision = provider.partition("-")
    backend = choose_backend(name, precision, judge.device, "providers")
    harness.set_precision(precision)  # which a capture keeps
    *size, channels = judge.image_shape
    network = judge.model_settings, backend, tuple(size), channels, False, judge.device
    model = build_model(*network).train()
    copy_parameters(judge.start, dict(model.named_parameters()))
    flat = FlatParameters(model, together=TOGETHER)
    train = {"batch_size": settings["batch"], "precision": precision, "seed": settings["seed"]}
    optim = optimizer_settings(settings)
    optimizer = Optimizer(flat, OptimizerSettings(**optim), backend)
    given = judge.process, TrainSettings(**train), Processes(None)
    step = build_step(model, flat, optimizer, data, True, *given)
    if name == harness.OURS:
        job = {"model": judge.model_settings, "diffusion": {}, "optim": optim, "train": train}
        job |= {"images": described(data.images), "labels": None, "vectors": None}
        job |= {"context": None, "flip": True, "preview": None}
        compile_ahead("train", job, job, judge.device)
    shadow = [] if flat.shadow is None else [flat.shadow]
    buffers = [flat.param, flat.exp_avg, flat.exp_avg_sq, flat.ema, *shadow]
    before = [buffer.clone() for buffer in buffers]
    for k in range(_WARM_UP):
        step(k)
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
    return Way(step, flat.views(flat.ema if settings["ema"] else flat.param))


def theirs(provider: str, settings: dict, data: ImageSet, judge: Judge) -> Way:
    """The same model in PyTorch, as `benchmarks.train_step` times it, with batches of the data."""
    size, _, channels = judge.image_shape
    model = build_baseline(judge.model_settings, channels).to(judge.device).train()
    model = model.to(memory_format=torch.channels_last)
    parameters = dict(model.named_parameters())
    copy_parameters(judge.start, parameters)
    torch.manual_seed(settings["seed"])
    objective = steps.objective_of(Images(size, channels, False), TORCH_FP32, judge.device)
    optim = OptimizerSettings(**optimizer_settings(settings))
    adamw = steps.fused_adamw(model, weight_decay=optim.weight_decay)
    batches = random_batches(data.images.to(judge.device), settings["batch"])
    step = steps.torch_step(provider, model, adamw, objective, batches)
    run = step.captured() if judge.device.type == "cuda" else step.plain
    if judge.device.type != "cuda":
        run(0)  # compiles
    copy_parameters(judge.start, parameters)
    for state in adamw.state.values():
        for value in state.values():  # the moments and the number of steps
            value.zero_()
    if not settings["ema"]:
        return Way(run, parameters)
    average = {name: value.detach().clone() for name, value in parameters.items()}
    source, target = list(parameters.values()), list(average.values())

    def run_and_average(k: int) -> None:
        run(k)
        with torch.no_grad():
            torch._foreach_lerp_(target, source, 1 - optim.ema_decay_at(k))

    return Way(run_and_average, average)


def random_batches(images: Tensor, batch: int) -> steps.Draw:
    """Draws `batch` of the images uint8 [M, H, W, C], on their device, and mirrors half of them."""

    def draw() -> tuple[Tensor, None]:
        index = torch.randint(len(images), (batch,), device=images.device)
        flip = torch.rand(batch, 1, 1, 1, device=images.device) < 0.5
        chosen = images[index]
        return torch.where(flip, chosen.flip(2), chosen).permute(0, 3, 1, 2), None

    return draw


def learn(
    provider: str, settings: dict, data: ImageSet, judge: Judge, out: Path, waiting: int
) -> None:
    """Train one way, and write what it reaches. `waiting`: how many come after it."""
    seconds, every, batch = settings["seconds"], settings["every"], settings["batch"]
    began = time.perf_counter()
    build = ours if provider.split("-")[0] in OURS else theirs
    way = build(provider, settings, data, judge)
    synchronize(judge.device)
    setup = time.perf_counter() - began
    print(f"{provider}: {setup:.1f} s to build, compile and capture", flush=True)
    spent, step, limit = 0.0, 0, settings["steps"] or 10**9
    with (out / f"{provider}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Point))
        while True:
            began = time.perf_counter()
            loss = judge.loss(way.judged)
            harness.set_precision(provider.split("-")[1])  # or what is not captured compiles anew
            judging = time.perf_counter() - began
            point = Point(round(spent, 3), step, step * batch, loss, round(setup, 1))
            writer.writerow(astuple(point))
            file.flush()
            left = max(seconds - spent, 0) + waiting * seconds
            left *= 1 + judging / every if every else 1
            print(
                f"{provider}: {spent:.1f} of {seconds:g} s, step {step:,}, {step * batch:,} images,"
                f" held-out loss {loss:.5f}; about {left:.0f} s left",
                flush=True,
            )
            if spent >= seconds or step >= limit:
                break
            took, step = train_for(way, step, limit, min(every, seconds - spent), judge.device)
            spent += took
    if settings["samples"]:
        grid(judge.draw(settings["samples"])).save(out / f"{provider}.png")


def train_for(
    way: Way, step: int, limit: int, seconds: float, device: torch.device
) -> tuple[float, int]:
    """Train for so many seconds, or up to step `limit`. Returns the seconds that it took, and the
    number of the next step. The host waits for the device twice or so, not in every step."""
    first, until = step, step + (_FIRST if device.type == "cuda" else 1)
    synchronize(device)
    began = time.perf_counter()
    while True:
        for k in range(step, min(until, limit)):
            way.run(k)
        step = min(until, limit)
        synchronize(device)
        spent = time.perf_counter() - began
        if spent >= seconds or step == limit:
            return spent, step
        until = step + max(1, int((seconds - spent) * (step - first) / spent))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    harness.run_entry(main)
