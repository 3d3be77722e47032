"""A process of `ahead`: rehearse a job, compile a share of its kernels.

    python -m diffusion.ahead_worker JOB GPU PART PARTS < SETTINGS

On its standard output: how many kernels are its share, and an empty line for each that is compiled.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from triton_kernels.device import describe
from triton_kernels.rehearsal import rehearsal

from .backend import choose_backend
from .build import Process, build_model
from .data.image_set import ImageSet
from .distributed import Processes
from .flat import FlatParameters
from .optimizer import Optimizer, OptimizerSettings
from .planned.embedding import TOGETHER
from .sampling_run import DrawSettings, rehearse_drawing
from .settings import construct
from .step_build import build_step
from .trainer import TrainSettings

_HOST = torch.device("cpu")


def train(settings: dict[str, Any]) -> None:
    """Two steps, of one process: the groups `model`, `diffusion`, `optim` and `train` of the
    configuration, with the shape [M, H, W, C] of the images, `flip`, and the process's share as
    batch_size."""
    train = construct(TrainSettings, settings["train"], "train")
    process = construct(Process, settings["diffusion"], "diffusion")
    optim = construct(OptimizerSettings, settings["optim"], "optim")
    count, *size, channels = settings["images"]
    backend = choose_backend("triton", train.precision, _HOST)
    meta = torch.device("meta")
    with meta:
        model = build_model(
            settings["model"], backend, tuple(size), channels, process.learns_variance, meta
        )
    model = model.to_empty(device=_HOST).train()
    flat = FlatParameters(model, together=TOGETHER)
    images = torch.zeros(count, *size, channels, dtype=torch.uint8)  # memory that nobody touches
    labels = None if model.num_classes is None else torch.zeros(count, dtype=torch.int64)
    step = build_step(
        model,
        flat,
        Optimizer(flat, optim, backend),
        ImageSet(images, labels),
        settings["flip"],
        process,
        train,
        Processes(None),
    )
    for k in range(2):  # the second finds memory that the first has made
        step(k)


def sample(settings: dict[str, Any]) -> None:
    """A chain, drawn as `DrawSettings` say."""
    rehearse_drawing(construct(DrawSettings, settings | {"device": str(_HOST)}, ""))


JOBS: dict[str, Callable[[dict[str, Any]], None]] = {"train": train, "sample": sample}


def main(job: str, gpu: str, part: str, parts: str) -> None:
    """See above."""
    torch.set_num_threads(1)
    if gpu != "0":  # which the process has anyway, and without memory on it
        torch.cuda.set_device(int(gpu))
    with rehearsal(describe(torch.device("cuda", int(gpu)))) as launches:
        JOBS[job](json.load(sys.stdin))
    mine = launches[int(part) :: int(parts)]
    print(len(mine), flush=True)
    for launch in mine:
        launch.compile()
        print(flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
