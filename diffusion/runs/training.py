"""A training run from a plain dict: check, build, train."""

import atexit
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from triton_kernels.registry.rows import table
from triton_kernels.runtime.device import describe

from ..data.batches import Samples
from ..data.held_out import Rows
from ..errors import ConfigError, counted, writing
from ..factory import POLICY_MODELS, Process
from ..formats.checkpoint import load_into, read_state, read_timesteps
from ..formats.checkpoint_folder import clean_up
from ..formats.trained import load_initial
from ..models.flat_parameters import FlatParameters
from ..plan.embedding import TOGETHER
from ..plan.step.network import TrainingUNet
from ..policies.task import LOADERS, PolicyTask
from ..process.timesteps import LossAwareTimesteps
from ..runtime.backend import Backend, determinism, tried, untried_backend
from ..runtime.distributed import Processes, choose_device, own_rank
from ..runtime.host import threads_are_ours, threads_chosen
from ..runtime.precompile import compiling_ahead, described, prepare
from ..runtime.startup import START_UP
from ..settings import construct, shown
from ..tracking.environment import environment, note_environment
from ..tracking.run_log import Preview, last_result, log_file
from ..training.build_step import build_step
from ..training.held_out_loss import HeldOutLoss
from ..training.image_task import ImageTask
from ..training.optimizer import Optimizer, OptimizerSettings
from ..training.train_step import TrainStep
from ..training.trainer import Trainer, TrainSettings
from .estimate import long_run
from .lock import RunLock
from .resume_point import resume_point, set_newer_aside
from .training_checks import (
    check_groups,
    check_init,
    check_run_dir,
    check_share,
    check_untouched,
    held_against,
    is_finished,
    write_config,
)

R = TypeVar("R")

log = logging.getLogger(__name__)

_EVALUATED_AT_ONCE = 64  # held-out samples, unless a micro-batch of training is smaller


class Task(Protocol):
    """What differs between learning images and learning to act. The constructor takes the groups
    `dataset` and `model` and loads the data; `str` of a task describes them in a line."""

    noun: str  # what the data set consists of
    samples: Samples
    held_out: Rows | None  # samples that are not trained on
    flip: bool  # mirror half of the samples
    notes: list[str]  # for the terminal and the log file
    remarks: list[str]  # for the log file alone

    @staticmethod
    def check(
        dataset: dict[str, Any], model: dict[str, Any], process: Process, backend: Backend
    ) -> None:
        """Raise ConfigError for what is wrong with the settings, as far as that shows before the
        data are there: loading them can take minutes."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to say about the data."""

    def check_resumed(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if a checkpoint with this state cannot go on with this data."""

    def build_model(self, process: Process, backend: Backend, device: torch.device) -> nn.Module:
        """The network for this data. Raises ConfigError if they do not fit."""

    def preview(
        self, model: nn.Module, process: Process, settings: TrainSettings, device: torch.device
    ) -> Callable[[], Preview] | None:
        """What to call for a look at the model; None if there is nothing to see."""

    def score(
        self,
        model: nn.Module,
        process: Process,
        settings: TrainSettings,
        device: torch.device,
        processes: Processes,
    ) -> Callable[[], dict[str, float]] | None:
        """What all processes call for scores beside the look; None if there are none."""

    def score_names(self, settings: TrainSettings) -> list[str]:
        """The scores of looks with these settings."""


_TASKS: dict[str, type[Task]] = dict.fromkeys(LOADERS, PolicyTask)  # all others are images


def train(config: dict[str, Any], run_dir: Path, *, sweep: bool = False) -> float:
    """Run the configuration in `run_dir` and return what `train.metric` names at its end (for
    sweepers, which minimise it): by default the loss on what is held out, where something is, and
    otherwise that of training. A run that is finished is left as it is: a sweep that was
    interrupted can be begun again. In a `sweep` the processes stay together for the next job."""
    check_groups(config)
    settings = construct(TrainSettings, config["train"], "train")
    lock = RunLock(run_dir)
    try:
        with determinism(settings.deterministic):
            return _train(config, settings, run_dir, sweep, lock)
    finally:
        lock.release()


def _train(
    config: dict[str, Any], settings: TrainSettings, run_dir: Path, sweep: bool, lock: RunLock
) -> float:
    optim = construct(OptimizerSettings, config["optim"], "optim")
    process = construct(Process, config["diffusion"], "diffusion")
    START_UP.reached("imports")
    device = choose_device(config["device"])
    if config["backend"] != "torch":
        prepare(device)
    START_UP.reached("device")
    backend = untried_backend(config["backend"], settings.precision, device)
    make_task = _TASKS.get(config["dataset"]["name"], ImageTask)
    asked = config["model"].get("num_classes")
    if make_task is ImageTask:
        config = config | {"model": ImageTask.settled(config["dataset"], config["model"])}
    make_task.check(config["dataset"], config["model"], process, backend)
    if device.type == "cpu" and own_rank() == 0:
        for line in (threads_chosen(), long_run(config, settings, process.learns_variance)):
            if line is not None:
                tqdm.write(f"note: {line}")
    check_run_dir(run_dir)
    if own_rank() == 0 and run_dir.is_dir():
        _take(lock, run_dir)
    resume_from = resume_point(settings.resume, run_dir)
    start, changes = held_against(resume_from, config)
    if is_finished(resume_from, run_dir, start, settings, changes):
        return _result_of_finished(run_dir, settings)
    processes = Processes(device)
    check_share(settings, processes)
    check_init(settings, resume_from)
    task: Task = make_task(config["dataset"], config["model"])
    if asked == "auto" and config["model"]["num_classes"] is None:
        task.notes.append(
            "model.num_classes=auto finds no labels, so there are no classes to learn; docs/data.md"
            " says where labels come from"
        )
    START_UP.reached("data")
    build = partial(_built, settings, optim, process, task, device, processes, resume_from)
    built = build(backend)
    START_UP.reached("network")
    with _compiling_ahead(config, settings, built.step, task):
        right = tried(backend, device, required=config["backend"] == "triton")
        START_UP.reached("trying the kernels" if backend.name == "triton" else "backend")
    START_UP.reached("compiling kernels")
    processes.wait()  # for the first of each machine, which compiles
    if right != backend:
        backend, built = right, None  # the memory of one at a time
        built = build(backend)
    model, flat, step, stored = built
    show = _averaged(flat, task.preview(model, process, settings, device))
    score = _averaged(flat, task.score(model, process, settings, device, processes))
    held_out = None
    if task.held_out is not None and settings.eval_every:
        batch_size = min(_EVALUATED_AT_ONCE, step.batches.count // settings.accumulate)
        numbers = {"most": settings.eval_images, "batch_size": batch_size}
        held_out = HeldOutLoss(task.held_out, process, backend, device, processes, **numbers)
    metric = _metric(settings, held_out is not None, task)

    size = len(task.samples)
    if stored.get("dataset_size", size) != size:
        task.notes.append(
            f"the data set has {counted(size, task.noun)}, and had {stored['dataset_size']} when"
            " the"
            " checkpoint was written"
        )
    with ExitStack() as stack:
        if sweep:  # the next job goes on in this group: to meet again takes a store of its own
            atexit.register(processes.close)
        else:
            stack.callback(processes.close)
        stack.callback(step.release)
        if processes.is_first:
            with writing(run_dir):
                if not lock.held:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    _take(lock, run_dir)
                    check_untouched(settings.resume, run_dir, resume_from)
                write_config(run_dir / "config.yaml", config, start)
                stack.enter_context(log_file(run_dir / "train.log"))
            began = (
                f"resuming from {resume_from} after step {start}{_other_batches(step, start)}"
                if start
                else settings.init and f"beginning with the weights of {settings.init}"
            )
            _describe(run_dir, step, task, settings, processes, began, changes)
            _note_start(run_dir, start, resume_from, environment(device, processes.count))
        trainer = Trainer(
            step,
            show,
            score,
            None if held_out is None else _averaged(flat, partial(held_out, model)),
            settings,
            config,
            {"seed": settings.seed, "dataset_size": size, **task.state(), **_threads(device)},
            run_dir,
            processes,
            dataset_size=size,
            noun=task.noun,
        )
        with writing(run_dir):
            results = trainer.run(start, stored)
        return results.get(metric, float("nan"))


def _result_of_finished(run_dir: Path, settings: TrainSettings) -> float:
    """What a run that is done already has come to; the first process says so."""
    metric = settings.metric or _default_metric(run_dir)
    value = last_result(run_dir, metric)
    if own_rank() == 0:
        named = "a loss" if metric == "loss" else f"{metric}"
        _say(
            f"{run_dir}: done already, after {counted(settings.steps, 'steps')}, with {named} of"
            f" {value}"
        )
    return value


def _note_start(run_dir: Path, start: int, resume_from: Path | None, found: dict[str, Any]) -> None:
    """Log what of the environment has changed, and set checkpoints aside that this run is to write
    again."""
    with writing(run_dir):
        for key, (then, now) in note_environment(run_dir, start, found).items():
            log.info("%s: %s -> %s", key, then, now)
        aside = set_newer_aside(resume_from, run_dir)
    for path in aside:
        _say(f"note: a later checkpoint of the run is now {path}")


class _Built(NamedTuple):
    """What is trained."""

    model: nn.Module
    flat: FlatParameters
    step: TrainStep
    stored: dict[str, Any]  # the state of the checkpoint that it goes on from


def _built(
    settings: TrainSettings,
    optim: OptimizerSettings,
    process: Process,
    task: Task,
    device: torch.device,
    processes: Processes,
    resume_from: Path | None,
    backend: Backend,
) -> _Built:
    """The network and its step, as the run begins or goes on. No kernel is launched."""
    torch.manual_seed(settings.seed)  # the initial parameters; all other noise is counted
    model = task.build_model(process, backend, device)
    if settings.init is not None and resume_from is None:
        load_initial(settings.init, model)
    model.train()
    flat = FlatParameters(model, together=TOGETHER)
    optimizer = Optimizer(flat, optim, backend)
    stored: dict[str, Any] = {}
    if resume_from is not None:
        stored, _ = read_state(resume_from)
        task.check_resumed(stored)
        load_into(resume_from, flat)
        if device.type == "cpu" and "threads" in stored and threads_are_ours():
            torch.set_num_threads(stored["threads"])  # of which sums on a CPU depend
        optimizer.skipped.fill_(stored.get("skipped_steps", 0))
    counted = stored.get("step", 0) * settings.batch_size
    begins = stored.get("images", counted) - counted  # 0 unless the batch size has changed
    given = (model, flat, optimizer, task.samples, task.flip, process, settings, processes)
    step = build_step(*given, begins)
    if resume_from is not None and step.objective.timesteps is not None:
        _load_timesteps(resume_from, step.objective.timesteps)
    return _Built(model, flat, step, stored)


def _averaged(flat: FlatParameters, look: Callable[[], R] | None) -> Callable[[], R] | None:
    """The same look at the model, at its averaged weights."""
    if look is None:
        return None

    def at_average() -> R:
        with flat.averaged():
            return look()

    return at_average


def _metric(settings: TrainSettings, evaluated: bool, task: Task) -> str:
    """The name of the result that training returns. ConfigError: there will be none of it."""
    results = ["loss"] + ["held_out"] * evaluated
    if settings.sample_every:
        results += task.score_names(settings)
    if settings.metric is None:
        return "held_out" if evaluated else "loss"
    if settings.metric not in results:
        hint = "" if evaluated else "; held_out needs dataset.held_out and train.eval_every"
        hint += "" if settings.fid_images else "; fid and kid need train.fid_images"
        raise ConfigError(
            f"train.metric={settings.metric} is no result of this run; choose one of"
            f" {', '.join(results)}{hint}"
        )
    return settings.metric


def _default_metric(run_dir: Path) -> str:
    """As `_metric` has it, of a run that is finished."""
    return "held_out" if (run_dir / "held_out.csv").is_file() else "loss"


def _load_timesteps(checkpoint: Path, timesteps: LossAwareTimesteps) -> None:
    stored = read_timesteps(checkpoint)
    try:
        timesteps.load(stored)
    except ValueError as error:
        raise ConfigError(f"{checkpoint / 'timesteps.safetensors'}: {error}") from error


def _compiling_ahead(
    config: dict[str, Any], settings: TrainSettings, step: TrainStep, task: Task
) -> AbstractContextManager[None]:
    """So that the first step does not take minutes. Not for images layer by layer, where PyTorch's
    ops take part, which are slow in a rehearsal of many pixels."""
    quick = isinstance(step.network, TrainingUNet) or config["model"]["name"] in POLICY_MODELS
    if step.objective.backend.name != "triton" or not quick:
        return nullcontext()
    keys = ("accumulate", "precision", "recompute")
    values = getattr(task.samples, "values", None)  # actions have none
    given = getattr(task.samples, "condition", None)
    context = getattr(task.samples, "context", None)
    job = {
        "model": getattr(task, "model_settings", config["model"]),
        "diffusion": config["diffusion"],
        "optim": config["optim"],
        "train": {key: config["train"][key] for key in keys if key in config["train"]}
        | {"batch_size": step.batches.count},
        "images": described(task.samples.images),
        "labels": described(task.samples.labels),
        "vectors": described(getattr(task.samples, "vectors", None)),
        "context": None if context is None else context.described(),
        "values": None if values is None else values.state(),
        "condition": None if given is None else given.state(),
        "flip": task.flip,
        "preview": None,
    }
    if isinstance(task, ImageTask) and settings.sample_count:
        job["preview"] = {"count": settings.sample_count, "steps": settings.sample_steps}
    return compiling_ahead("train", job, job, step.flat.param.device)


def _describe(
    run_dir: Path,
    step: TrainStep,
    task: Task,
    settings: TrainSettings,
    processes: Processes,
    began: str | None,  # with what, if with anything
    changes: dict[str, tuple[Any, Any]],  # of the settings, where it goes on
) -> None:
    """Say what is about to be trained, and how."""
    flat, backend, size = step.flat, step.objective.backend, len(task.samples)
    parameters = sum(view.numel() for view in flat.views(flat.param).values())
    _say(
        f"{run_dir}: {task}; {parameters:,} parameters;"
        f" backend {backend.name}, {settings.precision}, {flat.param.device}"
        + (", fused plan" if isinstance(step.network, TrainingUNet) else "")
        + (f", {processes.count} processes" if processes.count > 1 else "")
    )
    if began:
        _say(began)
    for key, (then, now) in changes.items():
        _say(f"note: {key}: {shown(then)} -> {shown(now)}")
    if settings.batch_size > size:
        _say(
            f"note: train.batch_size={settings.batch_size} is larger than the data set of"
            f" {counted(size, task.noun)}, so a batch holds some {task.noun} more than once"
        )
    for note in (*task.notes, *_untuned(flat.param.device, backend)):
        _say(f"note: {note}")
    for remark in task.remarks:
        log.info("%s", remark)


def _other_batches(step: TrainStep, start: int) -> str:
    """That the batch size has changed, where it has: which images come next."""
    batches = step.batches
    if not batches.begins:
        return ""
    seen = batches.begins + start * batches.batch_size
    return f"; the order of the data goes on behind the {seen} samples seen, in other batches"


def _threads(device: torch.device) -> dict[str, int]:
    """How many there are on a CPU, so that a run that goes on adds in the same order."""
    return {"threads": torch.get_num_threads()} if device.type == "cpu" else {}


def _untuned(device: torch.device, backend: Backend) -> Iterator[str]:
    """What the user can do where nobody has timed a kernel on such a GPU."""
    if device.type == "cuda" and backend.name == "triton":
        gpu = describe(device)
        if not table(gpu):
            yield (
                f"no kernel has been timed on an sm_{gpu.arch} with {gpu.num_sms} multiprocessors,"
                " and tiles are predicted; tools/tune.py with this model and train.batch_size as"
                " batch measures them, once, in about 5 minutes"
            )


def _say(line: str) -> None:
    """On the terminal and in the log."""
    tqdm.write(line)
    log.info("%s", line)


def _take(lock: RunLock, run_dir: Path) -> None:
    """Be the one process that writes to the folder, and delete what killed ones have left there."""
    with writing(run_dir):
        lock.take()
        clean_up(run_dir / "checkpoints")
