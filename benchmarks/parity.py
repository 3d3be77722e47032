"""Train the same model from the same seed on the same noise by several backends: do losses agree?

    python -m benchmarks.parity dataset=PATH [key=value ...]

    dataset=         a folder of images, a .zip, or a .packed file of tools/prepare.py
    steps=2000       of training
    batch=16         images a step
    model=unet64     configs/model
    size=64          pixels
    runs=triton-bf16,torch-bf16,torch-fp32   backend and precision; the last is the measure
    seed=0           of parameters, data order, timesteps, noise and flips
    window=50        steps that a loss is averaged over before it is compared
    out=             a folder for the CSV files; default benchmarks/results/parity
    plot=docs/parity.png

The runs go on in turns, a hundred steps each, and their files are written after every turn: what
there is of runs that were cut short, or that were processes of their own, can be compared with
`benchmarks.curves`. Without classes.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from benchmarks.cases import model_settings
from benchmarks.curves import compare, draw, write_losses
from diffusion.data import load_dataset
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.factory import build_model
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step.network import training_network
from diffusion.process.objective import Objective
from diffusion.process.schedule import NoiseSchedule
from diffusion.runtime.backend import choose_backend
from diffusion.runtime.distributed import Processes, choose_device
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

DEFAULTS = {
    "dataset": "",
    "steps": 2000,
    "batch": 16,
    "model": "unet64",
    "size": 64,
    "runs": ("triton-bf16", "torch-bf16", "torch-fp32"),
    "seed": 0,
    "window": 50,
    "device": "auto",
    "out": "",
    "plot": "docs/parity.png",
}
_RUNS = tuple(
    f"{name}-{dtype}" for name in ("triton", "torch") for dtype in ("bf16", "tf32", "fp32")
)
_TURN = 100  # steps
_TIMESTEPS = 1000


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for name in settings["runs"]:
        harness.check_choice("runs", name, _RUNS)
    device = choose_device(settings["device"])
    data = read_images(settings["dataset"], settings["size"])
    out = Path(settings["out"] or harness.RESULTS / "parity")
    runs = {name: Run(name, settings, data, device) for name in settings["runs"]}
    for first in range(0, settings["steps"], _TURN):
        steps = range(first, min(first + _TURN, settings["steps"]))
        spent = []
        for name, run in runs.items():
            spent.append(f"{name} {run.go_on(steps):.1f} ms")
            write_losses(out / f"{name}.csv", run.losses)
        print(f"step {steps.stop}: {', '.join(spent)}", flush=True)
    if len(runs) == 1:
        return 0
    curves = {name: np.array(run.losses) for name, run in runs.items()}
    print(f"\n{compare(curves, settings['window'])}")
    title = f"{settings['model']}, {data.name}, batch {settings['batch']}, same seed and noise"
    draw(curves, settings["window"], Path(settings["plot"]), title)
    return 0


def read_images(path: str, size: int) -> ImageSet:
    """The data set. ConfigError if there is none."""
    if not path:
        raise ConfigError("dataset= is missing; give a folder of images, a .zip or a .packed file")
    name = "folder" if Path(path).is_dir() or path.endswith(".zip") else "packed"
    data = load_dataset(name=name, path=path, size=size)
    data.labels = None
    return data


class Run:
    """One backend's training; `losses` has those of the steps so far."""

    def __init__(self, name: str, settings: dict, data: ImageSet, device: torch.device) -> None:
        backend_name, self.precision = name.split("-")
        batch, seed = settings["batch"], settings["seed"]
        backend = choose_backend(backend_name, self.precision, device, "runs")
        torch.manual_seed(seed)
        _, *size, channels = data.images.shape
        model = build_model(
            model_settings(settings["model"]), backend, tuple(size), channels, False, device
        ).train()
        flat = FlatParameters(model, together=TOGETHER)
        gradient_sum = GradientSum(flat, Processes(None))
        self.step = TrainStep(
            training_network(model, flat, ready=gradient_sum.listener),
            Objective(NoiseSchedule.linear(_TIMESTEPS), backend, device=device),
            Batches(data, batch, seed, device),
            flat,
            Optimizer(flat, OptimizerSettings(), backend),
            gradient_sum,
            seed=seed,
            steps=settings["steps"],
            flip=True,
        )
        self.losses: list[float] = []

    def go_on(self, steps: range) -> float:
        """Train these steps; returns milliseconds a step, with those that compile."""
        harness.set_precision(self.precision)  # which a capture keeps
        found = torch.empty(len(steps), device=self.step.loss.device)
        start = time.perf_counter()
        for i, step in enumerate(steps):
            loss, _ = self.step(step)
            found[i : i + 1].copy_(loss)
        self.losses += found.tolist()
        return 1000 * (time.perf_counter() - start) / len(steps)


if __name__ == "__main__":
    harness.run_entry(main)
