"""Learning images: the data set with its labels, the 2-D UNet, grids of samples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data import expected_classes, expected_condition, expected_size, load_dataset
from ..data.autoencoder import missing_autoencoder
from ..data.given import given_from_state
from ..data.held_out import held_out_setting, split, spread
from ..data.image_set import rescale
from ..data.values import Latents, Pixels, strips, values_from_state
from ..errors import ConfigError, counted, first_of
from ..factory import Process, build_model, with_conditions
from ..models.conditions import Given
from ..runtime.backend import Backend
from ..runtime.distributed import Processes
from ..sampling.conditioning import beside_condition, conditions_of
from ..sampling.draw import draw
from ..sampling.quality import COLUMNS, Quality
from ..sampling.sampler import Sampler
from ..settings import naming_group, shown
from ..tracking.pictures import grid, grid_rows, to_uint8
from ..tracking.run_log import Preview
from .trainer import TrainSettings


class ImageTask:
    """See `runs.training.Task`."""

    noun = "images"

    def __init__(self, dataset: dict[str, Any], model: dict[str, Any]) -> None:
        options, self.flip = image_options(dataset)
        with naming_group(options, "dataset"):
            self.data = load_dataset(**options)
        self.samples, self.held_out = split(self.data, held_out_setting(dataset))
        given = self.data.condition
        self.model_settings = with_conditions(
            model,
            condition_channels=given.channels if given else 0,
            vector_dim=self.data.vector_dim,
            context_dim=self.data.context_dim,
        )
        if not self._is_given and model.get("condition_dropout"):
            raise ConfigError(
                f"model.condition_dropout={model['condition_dropout']}, but data set"
                f" {self.data.name} gives no condition; set it to null, or see docs/data.md"
            )
        self.image_shape = self.data.image_shape
        self.num_classes = model.get("num_classes")
        self.notes: list[str] = list(self.data.notes)
        if self.flip and not self.data.values.mirrors:
            raise ConfigError(
                "dataset.flip=true, but latents cannot be mirrored; set dataset.flip=false"
            )
        names = self.data.class_names
        if self.num_classes is None and self.data.labels is not None and names is not None:
            if options["name"] != "elephants":
                self.notes.append(
                    f"model.num_classes=auto learns {counted(len(names), 'classes')}, which are not"
                    f" learned now: {first_of(names, 3)}"
                )
        self.remarks = [f"not decodable and left out: {name}" for name in self.data.skipped]

    @staticmethod
    def settled(dataset: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
        """The group `model` with the number of classes that `auto` stands for, null if there are
        none."""
        if model.get("num_classes") != "auto":
            return model
        options, _ = image_options(dataset)
        found = expected_classes(**options)
        if found is None:  # a file or set that has to be opened to know
            labels = load_dataset(**options).labels
            found = 0 if labels is None else int(labels.max()) + 1
        return model | {"num_classes": found or None}

    @staticmethod
    def check(
        dataset: dict[str, Any], model: dict[str, Any], process: Process, backend: Backend
    ) -> None:
        """The network without its memory, and the number of classes, before a picture is drawn or
        decoded."""
        options, _ = image_options(dataset)
        held_out_setting(dataset)
        with naming_group(options, "dataset"):
            size, given = expected_size(**options), expected_condition(**options)
        if size is not None:
            channels, meta = options.get("channels") or 3, torch.device("meta")
            with meta:
                model_of = with_conditions(model, condition_channels=given) if given else model
                build_model(model_of, backend, size, channels, process.learns_variance, meta)
        if model.get("num_classes") is not None:
            found = expected_classes(**options)
            if found is not None:
                _check_classes(model["num_classes"], found, options["name"])

    def __str__(self) -> str:
        size = "x".join(map(str, self.image_shape))
        held_out = f", {len(self.held_out)} held out" if self.held_out else ""
        given = f", {self.data.condition}" if self.data.condition else ""
        given += (
            f", vectors of {counted(self.data.vector_dim, 'numbers')}"
            if self.data.vector_dim
            else ""
        )
        given += f", {self.data.context}" if self.data.context else ""
        return f"{self.data.name}, {counted(len(self.samples), 'images')} {size}{given}{held_out}"

    def state(self) -> dict[str, Any]:
        names, values = self.data.class_names, self.data.values
        return {
            "dataset": self.data.name,
            "image_shape": list(self.image_shape),
            "class_names": names and list(names),
            **({} if values == Pixels() else {"values": values.state()}),
            **({"condition": self.data.condition.state()} if self.data.condition else {}),
            **({"vector_dim": self.data.vector_dim} if self.data.vector_dim else {}),
            **({"context_dim": self.data.context_dim} if self.data.context_dim else {}),
        }

    def check_resumed(self, state: dict[str, Any]) -> None:
        """The network goes on with the numbers that it knows: a set that has grown has another mean
        and deviation. ConfigError: the checkpoint's are of another kind."""
        for what, option in (("vectors", "vector_dim"), ("tokens", "context_dim")):
            dim, has = state.get(option, 0), getattr(self.data, option)
            if dim != has:
                raise ConfigError(
                    f"the network was trained with {what} of {counted(dim, 'numbers')}, and data"
                    " set"
                    f" {self.data.name} has {has}"
                )
        known, has = values_from_state(state.get("values")), self.data.values
        if rescale(self.data, known, given_from_state(state.get("condition"))):
            self.notes.append(f"{known} of the run, and not {has}, go on")

    def build_model(self, process: Process, backend: Backend, device: torch.device) -> nn.Module:
        *size, channels = self.image_shape
        model = build_model(
            self.model_settings, backend, tuple(size), channels, process.learns_variance, device
        )
        self._check_labels()
        return model

    def preview(
        self, model: nn.Module, process: Process, settings: TrainSettings, device: torch.device
    ) -> Callable[[], Preview] | None:
        """A grid of samples of DDIM, if there are classes of all in turn."""
        if settings.sample_count == 0:
            return None
        values, picture = self.data.values, self.data.values.picture
        if isinstance(values, Latents):
            missing = missing_autoencoder(values.autoencoder)
            if missing:
                self.notes.append(f"the grids show latents, for {missing}")
                picture = strips
        sampler = self._sampler(model, process, settings, device)

        def show() -> Preview:
            count = settings.sample_count
            images, given = self._drawn(model, sampler, settings.seed, 0, count, picture)
            images = beside_condition(images, given, self.data.condition)
            return Preview(grid(images), rows=grid_rows(count))

        return show

    def score(
        self,
        model: nn.Module,
        process: Process,
        settings: TrainSettings,
        device: torch.device,
        processes: Processes,
    ) -> Callable[[], dict[str, float]] | None:
        """FID and its relatives of train.fid_images images, of which each process draws a share,
        against the whole data set, if that is wanted."""
        n = settings.fid_images
        if not (n and settings.sample_every):
            return None
        values = self.data.values
        if self.image_shape[2] not in (1, 3) or values != Pixels():
            raise ConfigError(
                f"train.fid_images={n}, but {values} of"
                f" {counted(self.image_shape[2], 'channels')} have"
                " no FID; give 0"
            )
        self.data.check()
        weights = settings.fid_weights
        quality = Quality(
            self.data.learned, settings.fid_metrics, n, device, processes, weights=weights
        )
        sampler = self._sampler(model, process, settings, device)
        share = -(-n // processes.count)

        def measured() -> dict[str, float]:
            first = processes.rank * share
            return quality(self._drawn(model, sampler, settings.seed, first, share)[0])

        return measured

    def score_names(self, settings: TrainSettings) -> list[str]:
        wanted = settings.fid_metrics if settings.fid_images else []
        return [name for metric in wanted for name in COLUMNS.get(metric, ())]

    def _sampler(
        self, model: nn.Module, process: Process, settings: TrainSettings, device: torch.device
    ) -> Sampler:
        """Training's own graph wants the memory that one of the sampler would keep."""
        clip = self.data.values.clip
        steps = min(settings.sample_steps, process.schedule.num_timesteps)
        return process.sampler(
            model.backend, device, sampler="ddim", steps=steps, clip=clip, capture=False
        )

    def _drawn(
        self,
        model: nn.Module,
        sampler: Sampler,
        seed: int,
        first: int,
        count: int,
        finish: Callable[[Tensor], np.ndarray] = to_uint8,
    ) -> tuple[np.ndarray, Given]:  # uint8 [count, H, W, C], and what they were drawn for
        """Images first .. first + count - 1 of the seed, if there are classes of all in turn; those
        of a condition and its class, of what is held out where something is."""
        labels, classes = None, self.num_classes
        given: Given = None
        if classes is not None:
            device = next(model.parameters()).device
            given = labels = torch.arange(first, first + count, device=device) % classes
        if self._is_given:
            samples = self.held_out or spread(self.data)
            given = conditions_of(samples, first, count, labels, self.data.condition)
        options = {"seed": seed, "first": first, "labels": given, "finish": finish}
        return draw(model, sampler, count, self.image_shape, **options), given

    @property
    def _is_given(self) -> bool:
        """Whether the set gives more than classes."""
        data = self.data
        return any(part is not None for part in (data.condition, data.vectors, data.context))

    def _check_labels(self) -> None:
        """Leave the data set as the model wants it: with labels in range, or without."""
        if self.num_classes is None:
            self.data.labels = None
            return
        labels = self.data.labels
        found = 0 if labels is None else int(labels.max()) + 1
        _check_classes(self.num_classes, found, self.data.name)


def image_options(dataset: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(options of `load_dataset`, whether half of the images are to be mirrored)."""
    options = {key: value for key, value in dataset.items() if key != "held_out"}
    flip = options.pop("flip", None)
    if not isinstance(flip, bool | None):
        raise ConfigError(f"dataset.flip={shown(flip)} is wrong; expected true or false")
    return options, bool(flip)


def _check_classes(num_classes: int, found: int, name: str) -> None:
    if found == 0:
        raise ConfigError(
            f"model.num_classes={num_classes}, but data set {name} has no labels; use"
            " model.num_classes=null or a folder with one sub-folder a class, at least two of them"
            " and no image beside them"
        )
    if found > num_classes:
        raise ConfigError(
            f"model.num_classes={num_classes}, but data set {name} has {counted(found, 'classes')}"
        )
