"""What a run on a CPU will take, said before the data are loaded."""

import time
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ConfigError
from ..factory import MODELS, build_model
from ..runtime.backend import TORCH_FP32
from ..runtime.progress import duration
from ..training.trainer import TrainSettings

_LONG = 3600.0  # seconds of a run of which somebody should think again
_MEASURED = 0.3  # seconds
_SLOWEST = 1e8  # floating-point operations a second: there is no slower CPU
_BACK = 3  # times as much work as a forward pass is a step
# of the rate of its convolutions, what a step of a UNet reached on two cores
_SHARE = 0.5


def long_run(config: dict[str, Any], settings: TrainSettings, learned_variance: bool) -> str | None:
    """A line on what the steps will take about, and what to try instead; None if that is less than
    an hour, or nobody knows without the data."""
    work = _flops(config, learned_variance)
    if work is None:
        return None
    work *= _BACK * settings.batch_size / _SHARE
    if work / _SLOWEST * settings.steps < _LONG:  # which need not be measured
        return None
    step = work / rate()
    if step * settings.steps < _LONG:
        return None
    return (
        f"on this CPU a step will take about {duration(step)}, and train.steps={settings.steps}"
        f" about {_days(step * settings.steps)}; experiment=demo takes minutes, and model=unet_tiny"
        " with dataset.size=32 train.batch_size=32 is for a CPU; other models want a GPU"
    )


def rate() -> float:
    """Floating-point operations a second of a convolution that is typical of a UNet."""
    x, w = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3)
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    F.conv2d(x, w, padding=1)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < _MEASURED:
        F.conv2d(x, w, padding=1)
        calls += 1
    return calls * 2 * x.numel() * w[0].numel() / (time.perf_counter() - began)


def _flops(config: dict[str, Any], learned_variance: bool) -> int | None:
    """Of a forward pass over an image, as far as the settings say how large it is."""
    dataset, model = config["dataset"], dict(config["model"])
    size = dataset.get("size")
    if model.get("name") not in MODELS or not isinstance(size, int | list):
        return None
    size = (size, size) if isinstance(size, int) else tuple(size)
    if model.get("num_classes") is not None:
        model |= {"num_classes": None, "label_dropout": 0.0}  # no work to speak of
    meta = torch.device("meta")
    try:
        with meta:
            network = build_model(model, TORCH_FP32, size, 3, learned_variance, meta)
    except ConfigError:  # said later, with what the data are
        return None
    return getattr(network, "flops_per_image", None)  # somebody's own network may not know


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds > 2 * 86400 else duration(seconds)
