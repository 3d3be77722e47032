"""Train every objective on a mixture of Gaussians in the plane: do they find its exact score?

    python -m benchmarks.objectives [key=value ...]

    steps=1500       of training
    batch=256        points a step
    points=2000      drawn from each network at the end
    every=125        steps between comparisons with the exact score
    only=            some of the objectives' names; default all
    plot=docs/objectives.png

A point is an image of one pixel with two channels, and the network the UNet at that size: what is
trained, and what draws, is what `train.py` and `sample.py` run. On an idle core all take 6 minutes.

What a network says of x_t is a guess at x_0; the best guess is E[x_0 | x_t], which for x_0 of a
mixture of Gaussians with weights w_k, means mu_k and deviation s is, with x_t = a x_0 + n epsilon,

    E[x_0 | x_t] = sum_k r_k m_k,    r_k ~ w_k N(x_t; a mu_k, a^2 s^2 + n^2),
    m_k = mu_k + a s^2 / (a^2 s^2 + n^2) (x_t - a mu_k)

The error is the root of the mean square of (guess - best guess) (1 + SNR)^(1/2), over levels even
in ln(SNR) from -5 to 5: the error of v, whichever prediction was trained. The score's is that
by a factor of the level. The best guess that is linear in x_t has an error of 0.36.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.factory import Process, build_model
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.unet import UNet
from diffusion.plan.embedding import TOGETHER
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.distributed import Processes
from diffusion.training.build_step import build_step
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.trainer import TrainSettings

DEFAULTS = {
    "steps": 1500,
    "batch": 256,
    "points": 2000,
    "every": 125,
    "only": (),
    "plot": "docs/objectives.png",
}
COSINE = {"schedule": "cosine", "prediction": "v_prediction"}
FLOW = {"schedule": "flow", "prediction": "velocity"}
OBJECTIVES: dict[str, dict[str, Any]] = {  # the group `diffusion`
    "epsilon": {"schedule": "linear"},
    "x0": {"schedule": "cosine", "prediction": "sample"},
    "v": COSINE,
    "learned variance": {"schedule": "cosine", "variance": "learned_range"},
    "EDM": {
        **{"schedule": "edm", "prediction": "v_prediction", "sigma_data": 0.5},
        **{"p_mean": -1.2, "p_std": 1.2},
    },
    "min-SNR": COSINE | {"min_snr_gamma": 5.0},
    "soft min-SNR": COSINE | {"soft_min_snr_gamma": 5.0},
    "P2": {"schedule": "cosine", "p2_gamma": 1.0},
    "loss-aware": {"schedule": "linear", "timestep_sampler": "loss_second_moment"},
    "flow, uniform": FLOW,
    "flow, logit-normal": FLOW | {"p_mean": 0.0, "p_std": 1.0},
    "flow, shift 3": FLOW | {"p_mean": 0.0, "p_std": 1.0, "shift": 3.0},
}
NETWORK = {"model_channels": 32, "num_res_blocks": 1, "num_groups": 8}
_NETWORK = {"name": "unet", "channel_mult": [1], "attention_resolutions": []}
_CPU = torch.device("cpu")

WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])
MEANS = np.array([[-0.6, -0.5], [0.6, -0.3], [0.1, 0.6], [-0.7, 0.5]])
DEVIATION = 0.12  # of each Gaussian, in both directions


def draw_data(n: int, seed: int = 0) -> Tensor:  # float32 [n, 1, 1, 2]
    rng = np.random.default_rng(seed)
    points = MEANS[rng.choice(len(WEIGHTS), n, p=WEIGHTS)] + DEVIATION * rng.normal(size=(n, 2))
    return torch.tensor(points, dtype=torch.float32).view(n, 1, 1, 2)


def best_guess(x: Tensor, signal: Tensor, noise: Tensor) -> Tensor:  # [N, 2], [N], [N] -> [N, 2]
    """E[x_0 | x_t], see above; in float64."""
    x, a, n = x.double()[:, None], signal.double()[:, None, None], noise.double()[:, None, None]
    weights, means = torch.tensor(WEIGHTS), torch.tensor(MEANS)
    variance = a**2 * DEVIATION**2 + n**2  # [N, 1, 1]
    distance = (x - a * means).square().sum(dim=2, keepdim=True)  # [N, K, 1]
    share = torch.softmax(weights.log()[:, None] - distance / (2 * variance), dim=1)
    guess = means + a * DEVIATION**2 / variance * (x - a * means)
    return (share * guess).sum(dim=1)


@torch.no_grad()
def score_error(network: Callable[..., Tensor], process: Process, n: int = 4096) -> float:
    """See above, over n points that training has not seen."""
    schedule = process.schedule
    snr, unit = schedule.snr / process.sigma_data**2, process.sigma_data
    wanted = np.linspace(-5, 5, 41)
    with np.errstate(divide="ignore"):
        levels = np.abs(np.log(snr)[:, None] - wanted).argmin(axis=0)
    t = torch.tensor(levels)[torch.arange(n) % len(levels)]
    signal, noise = (torch.tensor(x, dtype=torch.float32)[t] for x in schedule.signal_and_noise)
    signal = signal / unit  # of x_0 itself
    a, b = (torch.tensor(x * unit)[t] for x in schedule.x0_from_output(process.prediction))
    x_0, generator = draw_data(n, seed=1), torch.Generator().manual_seed(1)
    epsilon = torch.randn(x_0.shape, generator=generator)
    x = signal.view(-1, 1, 1, 1) * x_0 + noise.view(-1, 1, 1, 1) * epsilon
    told = torch.tensor(schedule.timestep_map)
    told = told.float() if told.is_floating_point() else told
    output = network(x, told[t], None).view(n, -1)[:, :2]
    x, output = x.view(n, 2).double(), output.double()
    guess = a[:, None] * x + b[:, None] * output
    error = guess - best_guess(x, signal, noise)
    return (
        (error.square().mean(dim=1) * (1 + (signal / noise).double() ** 2)).mean() ** 0.5
    ).item()


class Run:
    """One objective in training."""

    def __init__(
        self,
        process: Process,
        steps: int,
        batch: int,
        network: dict[str, Any] = NETWORK,
        data: int = 2**17,
        lr: float = 2e-3,
    ) -> None:
        torch.manual_seed(0)
        self.process, learned = process, process.learns_variance
        model = build_model(_NETWORK | network, TORCH_FP32, (1, 1), 2, learned, _CPU)
        self.model: UNet = model.train()
        self.flat = FlatParameters(model, together=TOGETHER)
        settings = OptimizerSettings(lr=lr, warmup=100, decay="cosine", ema_decay=0.995)
        optimizer = Optimizer(self.flat, settings, TORCH_FP32)
        train = TrainSettings(steps=steps, batch_size=batch, precision="fp32", tensorboard=False)
        samples = ImageSet(draw_data(data))
        self.step = build_step(
            model, self.flat, optimizer, samples, False, process, train, Processes(None)
        )

    def error(self) -> float:
        """Of the averaged network."""
        with self.flat.averaged():
            return score_error(self.model.eval().forward_nhwc, self.process)

    def draw(self, n: int) -> np.ndarray:  # [n, 2]
        # of epsilon x_0 has to be limited: at the end of the cosine schedule it is divided by 4e-5
        sampler = self.process.sampler(TORCH_FP32, _CPU, sampler="ddim", steps=50, clip=1.2)
        with self.flat.averaged():
            x = sampler.sample(self.model.eval().forward_nhwc, (n, 1, 1, 2), seed=0)
        return x.view(n, 2).numpy()

    def train(self, first: int, steps: int) -> None:
        self.model.train()
        for k in range(first, first + steps):
            self.step(k)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    names = settings["only"] or tuple(OBJECTIVES)
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown:
        raise ConfigError(f"only={unknown[0]} is unknown; choose some of {', '.join(OBJECTIVES)}")
    steps, every = settings["steps"], settings["every"]
    errors, drawn = {}, {}
    for name in names:
        began = time.monotonic()
        run = Run(Process(**OBJECTIVES[name]), steps, settings["batch"])
        curve = [(0, run.error())]
        for first in range(0, steps, every):
            run.train(first, min(every, steps - first))
            curve.append((min(first + every, steps), run.error()))
        errors[name], drawn[name] = np.array(curve), run.draw(settings["points"])
        seconds = time.monotonic() - began
        print(
            f"{name:20} error {curve[0][1]:.3f} -> {curve[-1][1]:.4f}  {seconds:.0f} s", flush=True
        )
    picture(errors, drawn, Path(settings["plot"]))
    return 0


def picture(errors: dict[str, np.ndarray], drawn: dict[str, np.ndarray], path: Path) -> None:
    """The points that each has drawn over the density, and the errors as training went on."""
    columns = 4
    rows = -(-len(drawn) // columns)
    figure = plt.figure(figsize=(12.5, 2.15 * rows + 0.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1))
    side = np.linspace(-1.15, 1.15, 120)
    plane = np.stack(np.meshgrid(side, side), axis=-1)  # [Y, X, 2]
    distance = ((plane[:, :, None] - MEANS) ** 2).sum(axis=-1)
    density = (WEIGHTS * np.exp(-distance / (2 * DEVIATION**2))).sum(axis=-1)
    panels = left.subplots(rows, columns, squeeze=False).flat
    colours = plt.get_cmap("tab20")(np.arange(len(drawn)) % 20)
    for axes, (name, points), colour in zip(panels, drawn.items(), colours, strict=False):
        axes.scatter(*points.T, s=1.2, color=colour, linewidths=0)
        axes.contour(side, side, density, levels=4, colors="black", linewidths=0.5)
        axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=(), yticks=(), aspect="equal")
        axes.set_title(name, fontsize=9)
    for axes in panels:  # those that are left
        axes.set_axis_off()
    axes = right.subplots()
    for (name, curve), colour in zip(errors.items(), colours, strict=True):
        axes.plot(*curve.T, color=colour, label=name, linewidth=1.4)
    axes.set(xlabel="step", yscale="log", title="error of v against the exact one")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=7.5, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    harness.run_entry(main)
