"""A process of `ahead`: rehearse a job, compile a share of its kernels.

    python -m diffusion.runs.precompile_worker JOB GPU PART PARTS < SETTINGS

On its standard output: how many kernels are its share, and an empty line for each that is compiled.
"""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from triton_kernels.runtime.device import describe
from triton_kernels.runtime.launch_recorder import rehearsal

from ..data.image_set import ImageSet
from ..data.values import values_from_state
from ..factory import POLICY_MODELS, Process, build_model, build_policy_model
from ..models.flat_parameters import FlatParameters
from ..plan.embedding import TOGETHER
from ..runtime.backend import Backend, choose_backend
from ..runtime.distributed import Processes
from ..settings import construct
from ..training.build_step import build_step
from ..training.optimizer import Optimizer, OptimizerSettings
from ..training.trainer import TrainSettings
from .rollout import RolloutSettings, rehearse_acting
from .sampling import DrawSettings, rehearse_drawing

_ENOUGH = 9 * 2**30  # bytes of samples; `Batches` keeps 8 on a device
_HOST = torch.device("cpu")


def train(settings: dict[str, Any]) -> None:
    """Two steps, of one process: the groups `model`, `diffusion`, `optim` and `train` of the
    configuration, with the process's share as batch_size; `flip`; of the samples' images and labels
    (or null) shape and dtype; and what their values mean."""
    train = construct(TrainSettings, settings["train"], "train")
    process = construct(Process, settings["diffusion"], "diffusion")
    optim = construct(OptimizerSettings, settings["optim"], "optim")
    backend = choose_backend("triton", train.precision, _HOST)
    samples = ImageSet(*(_unread(settings[key]) for key in ("images", "labels")))
    samples.values = values_from_state(settings.get("values"))
    model = _network(settings["model"], samples, backend, process).to_empty(device=_HOST).train()
    flat = FlatParameters(model, together=TOGETHER)
    step = build_step(
        model,
        flat,
        Optimizer(flat, optim, backend),
        samples,
        settings["flip"],
        process,
        train,
        Processes(None),
    )
    for k in range(2):  # the second finds memory that the first has made
        step(k)


def _unread(what: dict[str, Any] | None) -> Tensor | None:
    """Zeros of that description, which take no memory before somebody touches them. Of a set that
    is larger than the machine's memory there are fewer, but more than a device keeps."""
    if what is None:
        return None
    (count, *shape), dtype = what["shape"], getattr(torch, what["dtype"])
    most = _ENOUGH // max(math.prod(shape) * dtype.itemsize, 1)
    return torch.zeros(min(count, most), *shape, dtype=dtype)


def _network(
    settings: dict[str, Any], samples: ImageSet, backend: Backend, process: Process
) -> nn.Module:
    """For these samples, on the device "meta"."""
    meta, (*size, channels) = torch.device("meta"), samples.image_shape
    with meta:
        if settings["name"] in POLICY_MODELS:
            conditions = samples.labels.shape[1]
            return build_policy_model(settings, backend, channels, conditions, meta)
        return build_model(settings, backend, tuple(size), channels, process.learns_variance, meta)


def sample(settings: dict[str, Any]) -> None:
    """A chain, drawn as `DrawSettings` say."""
    rehearse_drawing(construct(DrawSettings, settings | {"device": str(_HOST)}, ""))


def act(settings: dict[str, Any]) -> None:
    """A policy's calls, as `RolloutSettings` say."""
    rehearse_acting(construct(RolloutSettings, settings | {"device": str(_HOST)}, ""))


JOBS: dict[str, Callable[[dict[str, Any]], None]] = {"train": train, "sample": sample, "act": act}


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
