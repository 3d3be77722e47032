"""Learning to act: chunks of recorded actions, the 1-D UNet, errors on held-out episodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..data.action_chunks import ActionChunks
from ..data.held_out import spread
from ..data.push_disc import push_disc
from ..data.trajectories import load_trajectories
from ..errors import ConfigError, counted
from ..factory import Process, build_policy_model
from ..runtime.backend import Backend
from ..settings import construct
from ..tracking.pictures import plot_chunks
from ..tracking.run_log import Preview
from ..training.trainer import TrainSettings
from .policy import Policy

LOADERS: dict[str, Callable[..., ActionChunks]] = {
    "trajectories": load_trajectories,
    "push_disc": push_disc,
}

_PLOTTED = 4  # chunks in a picture


class PolicyTask:
    """See `runs.training.Task`."""

    noun = "chunks"
    flip = False

    def __init__(self, dataset: dict[str, Any], model: dict[str, Any]) -> None:
        options = {key: value for key, value in dataset.items() if key != "name"}
        self.data = construct(LOADERS[dataset["name"]], options, "dataset")
        self.samples, self.spec = self.data.train, self.data.spec
        self.held_out = spread(self.data.held_out) if len(self.data.held_out) else None
        self.model_settings = model
        self.remarks: list[str] = []
        self.notes = list(self.data.notes)
        if len(self.data.held_out) == 0:
            self.notes.append("dataset.held_out=0: there is nothing to measure the policy on")

    @staticmethod
    def check(
        dataset: dict[str, Any], model: dict[str, Any], process: Process, backend: Backend
    ) -> None:
        """The rest waits for the dimensions of the rollouts, which are read in a moment."""
        if process.learns_variance:
            raise ConfigError(
                f"diffusion.variance={process.variance} is for images; use fixed_small or"
                f" fixed_large with dataset={dataset['name']}"
            )

    def __str__(self) -> str:
        spec, data = self.spec, self.data
        return (
            f"{data.name}, {counted(data.episodes, 'episodes')}:"
            f" {counted(len(data.train), 'chunks')} of {spec.horizon}"
            f" actions ({spec.action_dim}-D) on {counted(spec.observation_steps, 'observations')}"
            f" ({spec.observation_dim}-D), {len(data.held_out)} held out"
        )

    def state(self) -> dict[str, Any]:
        return {"dataset": self.data.name, "policy": self.spec.state()}

    def check_resumed(self, state: dict[str, Any]) -> None:
        """The network knows actions and observations in one normalisation only."""
        now = self.spec.state()
        for key, then in state["policy"].items():
            if now[key] != then:
                shown = f"{key} is {then} there, {now[key]} here"
                if isinstance(then, dict):
                    shown = f"the ranges of its {key} were others; use the same dataset.* options"
                raise ConfigError(f"the checkpoint is of another policy: {shown}")

    def build_model(self, process: Process, backend: Backend, device: torch.device) -> nn.Module:
        spec = self.spec
        model = build_policy_model(
            self.model_settings, backend, spec.action_dim, spec.condition_dim, device
        )
        if spec.horizon % model.factor:
            raise ConfigError(
                f"dataset.horizon={spec.horizon} has to be a multiple of {model.factor} for the"
                " levels of model.down_dims"
            )
        return model

    def preview(
        self, model: nn.Module, process: Process, settings: TrainSettings, device: torch.device
    ) -> Callable[[], Preview] | None:
        """The mean squared error of sampled chunks on held-out conditions, normalised
        (action_mse) and in the units of the data (action_mse_original), and a plot of some."""
        if settings.fid_images:
            raise ConfigError(f"train.fid_images={settings.fid_images} is for images; use 0")
        held_out = self.data.held_out
        count = min(settings.sample_count, len(held_out))
        if count == 0:
            return None
        index = torch.linspace(0, len(held_out) - 1, count).round().long()
        conditions = held_out.conditions[index].to(device)
        truth = held_out.actions[index, 0].to(device)  # [N, horizon, A]
        steps = min(settings.sample_steps, process.schedule.num_timesteps)
        kind = process.default_sampler
        sampler = process.sampler(model.backend, device, sampler=kind, steps=steps, capture=False)
        policy = Policy(model, sampler, self.spec)
        restore = self.spec.actions.to(device).restore
        plotted = torch.linspace(0, count - 1, min(_PLOTTED, count)).round().long()

        def show() -> Preview:
            drawn = policy.draw(conditions, seed=settings.seed)
            scores = {
                "action_mse": (drawn - truth).square().mean().item(),
                "action_mse_original": (restore(drawn) - restore(truth)).square().mean().item(),
            }
            chunks = (restore(x[plotted.to(device)]).cpu().numpy() for x in (drawn, truth))
            first = self.spec.observation_steps - 1
            picture = plot_chunks(*chunks, acted=(first, first + self.spec.action_steps - 1))
            return Preview(picture, scores)

        return show

    def score(self, *_: Any) -> None:
        """The scores come with the look."""

    def score_names(self, settings: TrainSettings) -> list[str]:
        return ["action_mse", "action_mse_original"] if settings.sample_count else []
