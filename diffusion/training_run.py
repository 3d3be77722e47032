"""A training run from a plain dict: check, build, train."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from .backend import choose_backend
from .build import Process, build_model, check_keys, construct
from .checkpoint import find_checkpoint, latest_checkpoint, load_into, read_state
from .data import load_dataset
from .data.batches import Batches
from .data.image_set import ImageSet
from .distributed import Processes, choose_device
from .draw import draw
from .errors import ConfigError
from .flat import FlatParameters
from .objective import Objective
from .optimizer import Optimizer, OptimizerSettings
from .run_log import attach_log_file
from .train_step import TrainStep
from .trainer import Trainer, TrainSettings

log = logging.getLogger(__name__)

_GROUPS = ("dataset", "model", "diffusion", "optim", "train", "backend", "device", "run_dir")


def train(config: dict[str, Any], run_dir: Path) -> float:
    """Run the configuration in `run_dir` and return the final loss (for sweepers)."""
    check_keys(config, list(_GROUPS), "config")
    settings = construct(TrainSettings, config["train"], "train")
    optim = construct(OptimizerSettings, config["optim"], "optim")
    process = construct(Process, config["diffusion"], "diffusion")
    device = choose_device(config["device"])
    backend = choose_backend(config["backend"], settings.precision, device)
    processes = Processes(device)
    first, share = processes.share_of(settings.batch_size)
    if share % settings.accumulate:
        raise ConfigError(
            f"train.batch_size={settings.batch_size} over {processes.count} processes is {share}"
            f" each, which does not divide into train.accumulate={settings.accumulate}"
        )
    resume_from = _resume_point(settings.resume, run_dir)
    start = _check_resumed(resume_from, config, settings.steps)

    dataset = dict(config["dataset"])
    flip = bool(dataset.pop("flip", False))
    data = load_dataset(**dataset)
    m, h, w, c = data.images.shape
    torch.manual_seed(settings.seed)  # the initial parameters; all other noise is counted
    model = build_model(config["model"], backend, (h, w), c, process.learns_variance, device)
    num_classes = config["model"].get("num_classes")
    data = _check_labels(data, num_classes)
    model.train()
    flat = FlatParameters(model)
    optimizer = Optimizer(flat, optim, backend)
    if resume_from is not None:
        load_into(resume_from, flat)
        optimizer.skipped.fill_(read_state(resume_from)[0].get("skipped_steps", 0))

    objective = Objective(
        process.schedule,
        backend,
        prediction=process.prediction,
        variance=process.variance,
        device=device,
    )
    step = TrainStep(
        model,
        objective,
        Batches(data, settings.batch_size, settings.seed, device, first, share),
        flat,
        optimizer,
        processes,
        seed=settings.seed,
        steps=settings.steps,
        accumulate=settings.accumulate,
        flip=flip,
        capture=settings.cuda_graph,
    )
    sampler = process.sampler(
        backend, device, sampler="ddim", steps=_sample_steps(settings, process)
    )
    labels = _sample_labels(num_classes, settings.sample_count, device)

    def draw_samples() -> np.ndarray:
        with flat.averaged():
            return draw(
                model,
                sampler,
                settings.sample_count,
                (h, w, c),
                seed=settings.seed,
                labels=labels,
            )

    handler = None
    if processes.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        handler = attach_log_file(run_dir / "train.log")
        tqdm.write(
            f"{run_dir}: {data.name}, {m} images {h}x{w}x{c};"
            f" {sum(p.numel() for p in model.parameters()):,} parameters;"
            f" backend {backend.name}, {settings.precision}, {device}"
            + (f", {processes.count} processes" if processes.count > 1 else "")
        )
        if start:
            tqdm.write(f"resuming from {resume_from} after step {start}")
        if settings.batch_size > m:
            tqdm.write(
                f"note: train.batch_size={settings.batch_size} is larger than the data set of {m}"
                " images, so a batch holds some images more than once"
            )
        for name in data.skipped:
            log.warning("not decodable and left out: %s", name)
    try:
        state = {
            "seed": settings.seed,
            "dataset": data.name,
            "dataset_size": m,
            "image_shape": [h, w, c],
            "class_names": data.class_names and list(data.class_names),
        }
        return Trainer(
            step, draw_samples, settings, config, state, run_dir, processes, dataset_size=m
        ).run(start)
    finally:
        processes.close()
        if handler is not None:
            logging.getLogger("diffusion").removeHandler(handler)
            handler.close()


def _resume_point(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, if any. Nothing that exists is ever overwritten."""
    existing = latest_checkpoint(run_dir / "checkpoints")
    if resume == "auto":
        return existing
    if existing is not None:
        raise ConfigError(
            f"{run_dir} already holds {existing.name}; use train.resume=auto to go on with it,"
            " or another run_dir"
        )
    return None if resume in (None, "none") else find_checkpoint(resume)


def _check_resumed(checkpoint: Path | None, config: dict[str, Any], steps: int) -> int:
    """The step to go on from, after holding the stored configuration against the present one."""
    if checkpoint is None:
        return 0
    state, stored = read_state(checkpoint)
    for group in ("model", "diffusion"):
        for key in {**stored.get(group, {}), **config[group]}:
            then, now = stored.get(group, {}).get(key), config[group].get(key)
            if then != now:
                raise ConfigError(
                    f"{checkpoint} is of another model: {group}.{key} is {then} there, {now} here"
                )
    if state["step"] >= steps:
        raise ConfigError(
            f"{checkpoint} has already done {state['step']} steps and train.steps={steps};"
            " give a larger train.steps to go on, or another run_dir"
        )
    for group, key in (("train", "batch_size"), ("train", "seed"), ("dataset", "name")):
        then, now = stored.get(group, {}).get(key), config[group].get(key)
        if then != now:
            tqdm.write(f"note: {group}.{key} was {then} in {checkpoint} and is {now} now")
    return state["step"]


def _check_labels(data: ImageSet, num_classes: int | None) -> ImageSet:
    """The data set as the model wants it: with labels in range, or without."""
    if num_classes is None:
        data.labels = None
        return data
    if data.labels is None:
        raise ConfigError(
            f"model.num_classes={num_classes}, but data set {data.name} has no labels;"
            " use model.num_classes=null or a folder with one sub-folder a class"
        )
    found = int(data.labels.max()) + 1
    if found > num_classes:
        raise ConfigError(
            f"model.num_classes={num_classes}, but data set {data.name} has {found} classes"
        )
    return data


def _sample_steps(settings: TrainSettings, process: Process) -> int:
    return min(settings.sample_steps, len(process.schedule.betas))


def _sample_labels(num_classes: int | None, n: int, device: torch.device) -> Tensor | None:
    return None if num_classes is None else torch.arange(n, device=device) % num_classes
