r"""The denoising error on samples that were not trained on, by level of noise, with fixed noise.

For a sample y and noise n at the level sigma the network is given y + sigma n, in the scale of its
chain, and D is the y that its output stands for, whatever it predicts:

    loss(sigma) = (sigma^2 + 0.25) / (0.25 sigma^2) mean |D(y + sigma n) - y|^2

The factor is EDM's 1 / c_out^2 (Karras et al., 2022, table 1) for data of deviation 0.5: the best
guess that knows nothing of such data but the deviation, D = 0.25 / (0.25 + sigma^2) (y + sigma n),
has a loss of 1 at every level. It is a unit, the same for every run: a run that predicts epsilon
compares with one that predicts x_0, v or a velocity, a cosine schedule with EDM's. Two levels, the
same for every run, lie in each of the bands between `EDGES`; between two timesteps of a chain the
network is told the number between, interpolated in ln(sigma). Levels outside a chain are left out.

The noise of sample i at level k is that of the counter-based generator for (a fixed key, k, i), so
it does not depend on the device, the size of a batch or the number of processes, and nothing is
drawn from the random numbers of training.

References:
    Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        https://arxiv.org/abs/2206.00364
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..data.held_out import Rows
from ..data.values import Latents
from ..factory import Process
from ..models.conditions import Conditions, Given, learned_and_given, with_null_token, with_presence
from ..runtime.backend import Backend
from ..runtime.distributed import Processes
from ..sampling.beside import Beside

EDGES = (0.05, 0.15, 0.4, 1.2, 3.5, 10.0)  # of the bands, in units of the data, [-1, 1] for images
BANDS = tuple(f"sigma_{low:g}_{high:g}" for low, high in zip(EDGES, EDGES[1:], strict=False))
_IN_BAND = 2  # levels, in equal steps of ln(sigma)
_UNIT = 0.5  # the deviation of the data for which a loss of 1 is that of knowing nothing
_KEY = 0x4556414C  # of the noise; far from the seeds that people choose


@dataclass(frozen=True)
class Losses:
    """What one evaluation found."""

    total: float  # the mean over all levels
    bands: dict[str, float]  # by BANDS; those that the chain has no level in are left out
    images: int  # how many samples
    levels: int  # of noise, of each sample
    data: str  # their digest

    def row(self) -> dict[str, float | int | str]:
        """Of held_out.csv: held_out, the bands ("": no level), images, levels and data."""
        about = {"images": self.images, "levels": self.levels, "data": self.data}
        return {"held_out": self.total} | dict.fromkeys(BANDS, "") | self.bands | about


class HeldOutLoss:
    """Evaluates a network on the same samples with the same noise whenever it is called.

    Arguments:
        samples: Of which the first `most` are taken.
        process: What the network was trained for.
        backend: Whose op makes the noise.
        device: Where the network is.
        processes: Among whom batches are dealt out.
        most: How many samples, if there are as many.
        batch_size: How many at once.
    """

    def __init__(
        self,
        samples: Rows,
        process: Process,
        backend: Backend,
        device: torch.device,
        processes: Processes,
        *,
        most: int,
        batch_size: int = 64,
    ) -> None:
        self.samples = Rows(samples.data, samples.rows[:most])
        self.backend, self.device, self.processes = backend, device, processes
        self.batch_size, self.scale = batch_size, process.sigma_data
        sigmas, self._band = levels(process)  # [K], [K]
        chain = sigmas / process.sigma_data  # in the units of the chain
        known = process.schedule.sigmas
        # a flow's levels are noise / (signal + noise), all others have signal^2 + noise^2 = 1
        straight = process.prediction == "velocity"
        signal = 1 / (1 + chain) if straight else 1 / np.sqrt(1 + chain**2)
        noise = chain * signal
        self._weight = (sigmas**2 + _UNIT**2) / (_UNIT * sigmas) ** 2
        finite = np.isfinite(known)
        t = np.interp(np.log(chain), np.log(known[finite]), np.flatnonzero(finite))
        told = np.interp(t, np.arange(len(known)), process.schedule.timestep_map)
        self._told = torch.tensor(told, dtype=torch.float32, device=device)
        table = np.stack((signal / process.sigma_data, noise), axis=1)
        self._table = torch.tensor(table, dtype=torch.float32, device=device)  # [K, 2]
        nothing, one = np.zeros_like(signal), np.ones_like(signal)
        self._restore = {  # x_0 = a x_t + b output
            "epsilon": (1 / signal, -chain),
            "sample": (nothing, one),
            "v_prediction": (signal, -noise),
            "velocity": (one, -noise),
        }[process.prediction]

    @torch.no_grad()
    def __call__(
        self,
        model: nn.Module,
        network: Callable[[Tensor, Tensor, Given], Tensor] | None = None,
    ) -> Losses:
        """The losses of the model, in evaluation mode, by `model.forward_nhwc` unless another
        `network` is given. Every process has to call it, and has the same answer."""
        network = model.forward_nhwc if network is None else network
        count, levels = len(self.samples), len(self._weight)
        errors = torch.zeros(levels, count, dtype=torch.float64)
        training = model.training
        model.eval()
        try:
            starts = range(0, count, self.batch_size)
            # batches are of one size whatever the number of processes, so they have the same bits
            for start in starts[self.processes.rank :: self.processes.count]:
                found = self._errors(network, start)
                errors[:, start : start + found.shape[1]] = found.double().cpu()
        finally:
            model.train(training)
        with self.processes.alone():
            self.processes.start_sum(errors)()
        losses = errors.numpy().mean(axis=1) * self._weight  # [K]
        bands = {
            name: float(losses[self._band == i].mean())
            for i, name in enumerate(BANDS)
            if (self._band == i).any()
        }
        total = float(losses.mean()) if levels else float("nan")
        return Losses(total, bands, count, levels, self.samples.digest)

    def _errors(self, network: Callable[..., Tensor], start: int) -> Tensor:  # float32 [K, N]
        """The mean squared error of each sample from `start` on at each level."""
        ops, dtype = self.backend.ops, self.backend.dtype
        images, labels = self.samples.take(start, start + self.batch_size)
        if isinstance(self.samples.values, Latents):
            images = images.chunk(2, dim=-1)[0].contiguous()  # the mean of each code
        images = images.to(self.device)
        labels = None if labels is None else labels.to(self.device)
        true = ops.gather_images(images, None, None)
        condition = self.samples.condition
        image = None
        if condition is not None:
            images, image = learned_and_given(true, condition.channels)
            true, network = images, Beside(network)
        given = Conditions(labels, image, *self._beside(start, len(images))).shortest()
        channels = true.shape[-1]
        found = []
        for k in range(len(self._weight)):
            rng = torch.tensor([_KEY, k], device=self.device)
            t = torch.full((len(images),), k, device=self.device)
            x = ops.q_sample(images, t, self._table, rng, dtype=torch.float32, first=start)
            output = network(x.to(dtype), self._told[t], given)[..., :channels].float()
            a, b = (float(column[k]) for column in self._restore)
            error = self.scale * (a * x + b * output) - true
            found.append(error.square().mean(dim=(1, 2, 3)))
        return torch.stack(found)

    def _beside(self, start: int, count: int) -> tuple[Tensor | None, ...]:
        """Vectors, a context and what is present of it."""
        vectors, context = self.samples.vectors, self.samples.context
        rows = torch.from_numpy(self.samples.rows[start : start + count])
        chosen = None if vectors is None else with_presence(vectors[rows].to(self.device))
        if context is None:
            return (chosen,)
        return chosen, *with_null_token(*(part.to(self.device) for part in context[rows]))


def levels(process: Process) -> tuple[np.ndarray, np.ndarray]:  # float64 [K], int64 [K]
    """(sigma, the number of its band) of the levels that are within the chain."""
    inside = (np.arange(_IN_BAND) + 0.5) / _IN_BAND
    low, high = np.log(EDGES[:-1]), np.log(EDGES[1:])
    sigmas = np.exp(low[:, None] + (high - low)[:, None] * inside).ravel()
    bands = np.repeat(np.arange(len(BANDS)), _IN_BAND)
    known = process.schedule.sigmas * process.sigma_data
    within = (known[0] <= sigmas) & (sigmas <= known[-1])
    return sigmas[within], bands[within]
