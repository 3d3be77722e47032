"""The worker of `diffusion.runtime.precompile`: rehearse a job, and compile its kernels.

    python -m diffusion.runs.precompile_worker < ORDER

The order is JSON: the name of a job, its settings, the GPU as `describe` has it, how many processes
may compile, and Triton's variables of the environment. On standard output: how many kernels there
are and how many of them are needed at once, and then a line with the number of each that is
compiled; those needed at once have the first numbers. CUDA is not used, see `compile_launches`. The
job `launches` has them in a file, of `triton_kernels.runtime.launch_file`.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from triton_kernels.registry.rows import unmeasured
from triton_kernels.registry.search import search
from triton_kernels.runtime.cache_keys import settle_cache_keys
from triton_kernels.runtime.compile_launches import compile_launches
from triton_kernels.runtime.device import Device, describe, is_rehearsal
from triton_kernels.runtime.launch_file import read_launches
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from ..data.context import Context
from ..data.given import given_from_state
from ..data.image_set import ImageSet
from ..data.values import values_from_state
from ..factory import POLICY_MODELS, Process, build_model, build_policy_model, in_unwritten_memory
from ..models.conditions import zeros_given
from ..models.flat_parameters import FlatParameters
from ..plan.embedding import TOGETHER
from ..runtime.backend import Backend, choose_backend
from ..runtime.distributed import Processes
from ..sampling.draw import BATCH, rehearse
from ..settings import construct
from ..training.build_step import build_step
from ..training.optimizer import Optimizer, OptimizerSettings
from ..training.train_step import TrainStep
from ..training.trainer import TrainSettings
from .draw_settings import DrawSettings
from .drawing import rehearse_drawing
from .rollout import RolloutSettings, rehearse_acting

_ENOUGH = 9 * 2**30  # bytes of samples; `Batches` keeps 8 on a device
_HOST = torch.device("cpu")


def train(settings: dict[str, Any]) -> None:
    """Two steps, of one process."""
    step = training_step(settings, _HOST)
    for k in range(2):  # the second finds memory that the first has made
        step(k)


def training_step(
    settings: dict[str, Any], device: torch.device, backend: str = "triton"
) -> TrainStep:
    """The step of these settings: the groups `model`, `diffusion`, `optim` and `train` of the
    configuration, with the process's share as batch_size; `flip`; of the samples' images and labels
    (or null) shape and dtype; what their values mean, and which of them are given. Images are
    zeros. On the host it is one to rehearse, and nobody draws its parameters."""
    train = construct(TrainSettings, settings["train"], "train")
    process = construct(Process, settings["diffusion"], "diffusion")
    optim = construct(OptimizerSettings, settings["optim"], "optim")
    chosen = choose_backend(backend, train.precision, device)
    samples = _samples(settings)
    model = _network(settings["model"], samples, chosen, process, device).train()
    flat = FlatParameters(model, together=TOGETHER)
    return build_step(
        model,
        flat,
        Optimizer(flat, optim, chosen),
        samples,
        settings["flip"],
        process,
        train,
        Processes(None),
    )


def _samples(settings: dict[str, Any]) -> ImageSet:
    samples = ImageSet(*(_unread(settings[key]) for key in ("images", "labels")))
    samples.values = values_from_state(settings.get("values"))
    samples.condition = given_from_state(settings.get("condition"))
    samples.vectors = _unread(settings.get("vectors"))
    tokens = _unread(settings.get("context"))
    if tokens is not None:
        samples.context = Context(tokens.numpy(), torch.full((len(tokens),), tokens.shape[1]))
    return samples


def _unread(what: dict[str, Any] | None) -> Tensor | None:
    """Zeros of that description, which take no memory before somebody touches them. Of a set that
    is larger than the machine's memory there are fewer, but more than a device keeps."""
    if what is None:
        return None
    (count, *shape), dtype = what["shape"], getattr(torch, what["dtype"])
    most = _ENOUGH // max(math.prod(shape) * dtype.itemsize, 1)
    return torch.zeros(min(count, most), *shape, dtype=dtype)


def _network(
    settings: dict[str, Any],
    samples: ImageSet,
    backend: Backend,
    process: Process,
    device: torch.device,
) -> nn.Module:
    """For these samples."""
    *size, channels = samples.image_shape

    def build(device: torch.device) -> nn.Module:
        if settings["name"] in POLICY_MODELS:
            conditions = samples.labels.shape[1]
            return build_policy_model(settings, backend, channels, conditions, device)
        images = tuple(size), channels, process.learns_variance
        return build_model(settings, backend, *images, device)

    if device == _HOST and is_rehearsal():
        return in_unwritten_memory(build)
    with device:
        return build(device)


def sample(settings: dict[str, Any]) -> None:
    """A chain, drawn as `DrawSettings` say, with so many `tokens` of a context."""
    settings = settings | {"device": str(_HOST)}
    tokens = settings.pop("tokens", 0)
    rehearse_drawing(construct(DrawSettings, settings, ""), tokens)


def act(settings: dict[str, Any]) -> None:
    """A policy's calls, as `RolloutSettings` say."""
    rehearse_acting(construct(RolloutSettings, settings | {"device": str(_HOST)}, ""))


def preview(settings: dict[str, Any]) -> None:
    """The samples that training shows: `preview` of the settings of `train` has `count` of them and
    the `steps` of DDIM; null: there are none, or they are not of images."""
    shown = settings.get("preview")
    if shown is None:
        return
    process = construct(Process, settings["diffusion"], "diffusion")
    backend = choose_backend("triton", settings["train"]["precision"], _HOST)
    samples = _samples(settings)
    model = _network(settings["model"], samples, backend, process, _HOST).eval()
    sampler = process.sampler(backend, _HOST, sampler="ddim", steps=shown["steps"], capture=False)
    labels = None if model.num_classes is None else torch.zeros(shown["count"], dtype=torch.int64)
    shape = tuple(samples.image_shape)
    tokens = samples.context.most if samples.context else 0
    labels = zeros_given(shown["count"], labels, samples.size, model, tokens)
    options = {"labels": labels, "guidance": 1.0, "batch_size": BATCH}
    rehearse(model, sampler, shown["count"], shape, **options, network=model.forward_nhwc)


def tune(settings: dict[str, Any]) -> None:
    """Every configuration that could be measured for the step of `train`, for shapes that have no
    rows; with `again` for all shapes."""
    gpu = describe(_HOST)
    with search(timed=False, wanted=None if settings["again"] else partial(unmeasured, gpu)):
        train(settings)


RECORDED = "launches"  # a job: those that a file has, of `launch_file`
Job = Callable[[dict[str, Any]], None]
# what is needed at once, and what later
JOBS: dict[str, tuple[Job, ...]] = {
    "train": (train, preview),
    "sample": (sample,),
    "act": (act,),
    "tune": (tune,),
}


def rehearsed(jobs: Sequence[Job], settings: dict[str, Any], gpu: Device) -> tuple[list, int]:
    """The launches of the jobs, and how many of them are the first one's. Within each those come
    first that take long to compile, which are Gluon's."""
    with rehearsal(gpu) as launches:
        jobs[0](settings)
        needed = len(launches)
        for job in jobs[1:]:
            job(settings)
    parts = launches[:needed], launches[needed:]
    return [launch for part in parts for launch in sorted(part, key=_is_quick)], needed


def _is_quick(launch: Launch) -> bool:
    return type(launch.kernel) is JITFunction  # Gluon's are of a class of their own


def main() -> None:
    """See above."""
    text = sys.stdin.read()
    if not text:  # nobody wants anything
        return
    torch.set_num_threads(1)
    order = json.loads(text)
    os.environ.update(order["environment"])
    gpu = Device(*order["gpu"])
    if order["job"] == RECORDED:
        launches = sorted(read_launches(Path(order["settings"]["file"])), key=_is_quick)
        settle_cache_keys()  # as those who launch them have done
        needed = len(launches)
    else:
        launches, needed = rehearsed(JOBS[order["job"]], order["settings"], gpu)
    print(len(launches), needed, flush=True)
    for number in compile_launches(launches, gpu.arch, order["processes"]):
        print(number, flush=True)


if __name__ == "__main__":
    main()
