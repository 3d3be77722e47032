r"""The training loss.

The backend's kernels draw t and epsilon, make x_t and give the mean squared error. The variational
bound that trains a learned variance (Nichol and Dhariwal, 2021) is plain PyTorch here, as pure
functions of x_0, x_t and the network's output.

References:
    Denoising Diffusion Probabilistic Models (Ho et al., 2020), https://arxiv.org/abs/2006.11239
    Improved Denoising Diffusion Probabilistic Models (Nichol and Dhariwal, 2021),
        https://arxiv.org/abs/2102.09672
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.conditions import Given
from ..runtime.backend import Backend
from .flow import FlowSchedule
from .schedule import LEARNED_VARIANCES, NoiseSchedule
from .timesteps import LossAwareTimesteps

# (x_t [N, H, W, C], timesteps int64 [N], labels or more) -> [N, H, W, C], or 2C if the variance is
# learned
Denoiser = Callable[[Tensor, Tensor, Given], Tensor]


class Objective:
    r"""E_{t, epsilon} [ w_t || target - output(x_t, t) ||^2 ] + the bound on the learned variance.

    Arguments:
        schedule: The chain to train on.
        backend: Whose ops draw, noise and compare.
        prediction: What the output is compared with: epsilon, sample (x_0) or v_prediction; of a
            flow velocity.
        variance: fixed_small, fixed_large (both train the mean alone), learned_range or learned.
        device: Where the images are.
        vb_weight: The factor of the variational bound, in bits per dimension. None: T / 1000, which
            is guided-diffusion's RESCALED_MSE; 1 is its plain MSE.
        weights: w_t, float64 [T], see `weights`; None: 1.
        sigma_data: What x_0 is divided by, see `edm`; other than 1 for epsilon and v alone.
        draws: The timestep that each of equally likely draws stands for, int64 [Q]; None: all
            timesteps are equally likely.
        timesteps: Who draws them by how large their losses have been; None: they do not count. The
            loss is then divided by how much likelier than 1 / T the timestep is.
    """

    def __init__(
        self,
        schedule: NoiseSchedule | FlowSchedule,
        backend: Backend,
        prediction: str = "epsilon",
        variance: str = "fixed_small",
        device: torch.device | str = "cpu",
        *,
        vb_weight: float | None = None,
        weights: np.ndarray | None = None,
        sigma_data: float = 1.0,
        draws: np.ndarray | None = None,
        timesteps: LossAwareTimesteps | None = None,
    ) -> None:
        self.schedule = schedule
        self.backend = backend
        self.prediction = prediction
        self.variance = variance
        self.learned = variance in LEARNED_VARIANCES
        self.vb_weight = schedule.num_timesteps / 1000 if vb_weight is None else vb_weight
        self.table = schedule.training_table(device)  # [T, 2]: of x_t
        self.target_table = schedule.target_table(device)  # [T, 2]: of v
        # the velocity of a flow is v by another table
        self._compared_with = "v_prediction" if prediction == "velocity" else prediction
        if sigma_data != 1:
            if self.learned or prediction == "sample":
                raise ValueError("sigma_data is for epsilon or v and a fixed variance")
            scale = torch.tensor([1 / sigma_data, 1], device=device)
            self.table, self.target_table = self.table * scale, self.table * scale.flip(0)
        self.draws = None if draws is None else torch.tensor(draws, device=device)  # int64 [Q]
        schedule.x0_from_output(prediction), schedule.log_variance_range(variance)  # are known
        self.reverse_table = None  # [T, 7]
        if self.learned:
            self.reverse_table = reverse_table(schedule, prediction, variance, device)
        # [T], int64 but for levels that are no numbers; None: every one is its own
        self.timestep_map: Tensor | None = None
        if list(schedule.timestep_map) != list(range(schedule.num_timesteps)):
            told = torch.tensor(schedule.timestep_map, device=device)
            self.timestep_map = told.float() if told.is_floating_point() else told
        self.weights = None  # [T]
        if weights is not None:
            self.weights = torch.tensor(weights, dtype=torch.float32, device=device)
        self.timesteps = timesteps

    def loss(
        self,
        denoiser: Denoiser,
        images: Tensor,  # uint8 or float32 [M, H, W, C]
        rng: Tensor,  # int64 [2]: seed, step
        *,
        index: Tensor | None = None,  # int64 [N]; None: all images, in order
        flip: Tensor | None = None,  # bool [N]
        labels: Given = None,  # [N], or more than labels, handed to the denoiser
        t: Tensor | None = None,  # int64 [N], indices into the chain; None: drawn
        first: int = 0,  # the global index of sample 0, which keys the draws
        timesteps_known: Callable[[], None] | None = None,  # called before x_t is made
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each sample, float32 [N], and its detached parts: "mse" (unweighted) and,
        with a learned variance, "vb" (weighted, in bits per dimension). No host synchronisation."""
        ops, dtype = self.backend.ops, self.backend.dtype
        importance = None
        if t is None and self.timesteps is not None:
            n = images.shape[0] if index is None else index.shape[0]
            t, importance = self.timesteps.draw(rng, n, first)
        elif t is None:
            n = images.shape[0] if index is None else index.shape[0]
            count = self.schedule.num_timesteps if self.draws is None else len(self.draws)
            t = ops.draw_timesteps(rng, n, count, first=first)
            t = t if self.draws is None else self.draws[t]
        steps = t if self.timestep_map is None else self.timestep_map[t]
        if timesteps_known is not None:
            timesteps_known()
        batch = {"first": first, "index": index, "flip": flip}

        # the bound divides differences of x_t by small variances: it needs x_t before the rounding
        x_dtype = torch.float32 if self.learned else dtype
        x_t = ops.q_sample(images, t, self.table, rng, dtype=x_dtype, **batch)
        output = denoiser(x_t.to(dtype), steps, labels)
        check_output(output, x_t, self.variance)

        mse = ops.denoise_loss(
            output, images, t, self.target_table, rng, prediction=self._compared_with, **batch
        )
        loss = mse if self.weights is None else mse * self.weights[t]
        parts = {"mse": mse.detach()}
        if self.learned:
            # the bound trains the variance alone: the mean is left to the squared error
            mean, v = output.chunk(2, dim=-1)
            frozen = torch.cat((mean.detach(), v), dim=-1)
            x_0 = ops.gather_images(images, index, flip)
            vb = self.vb_weight * vb_bits(frozen, x_0, x_t, t, self.reverse_table)
            loss = loss + vb
            parts["vb"] = vb.detach()
        if importance is not None:
            self.timesteps.note(loss.detach(), first)
            loss = loss * importance
        return loss, parts


def check_output(output: Tensor, x: Tensor, variance: str) -> None:
    """ConfigError unless the output has the channels that the kind of variance needs."""
    wanted = x.shape[-1] * (2 if variance in LEARNED_VARIANCES else 1)
    if output.shape != (*x.shape[:-1], wanted):
        raise ConfigError(
            f"variance={variance} needs a model output of shape {[*x.shape[:-1], wanted]}, and this"
            f" one is {list(output.shape)}; a learned variance takes twice the image's channels"
        )


# --- the variational bound ------------------------------------------------------------------------


def reverse_table(
    schedule: NoiseSchedule, prediction: str, variance: str, device: torch.device | str = "cpu"
) -> Tensor:  # float32 [T, 7]
    """The constants of q(x_{t-1} | x_t, x_0) and p(x_{t-1} | x_t). Columns: a, b of
    x_0 = a x_t + b output; c, d of the posterior mean c x_0 + d x_t; log beta~; and the smallest
    and the largest log variance of p."""
    columns = (
        *schedule.x0_from_output(prediction),
        *schedule.posterior_mean(),
        schedule.posterior_log_variance,
        *schedule.log_variance_range(variance),
    )
    return torch.tensor(np.stack(columns, axis=1), dtype=torch.float32, device=device)


def _rows(table: Tensor, t: Tensor) -> tuple[Tensor, ...]:  # each [N, 1, 1, 1]
    return table[t].view(len(t), -1, 1, 1, 1).unbind(1)


def q_posterior(
    x_0: Tensor,  # [N, H, W, C]
    x_t: Tensor,  # [N, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # [T, 7], of reverse_table
) -> tuple[Tensor, Tensor]:  # mean [N, H, W, C], log variance [N, 1, 1, 1]
    """q(x_{t-1} | x_t, x_0) (Ho et al., 2020, eqs. 6 and 7)."""
    _, _, c, d, log_variance, _, _ = _rows(table, t)
    return c * x_0 + d * x_t, log_variance


def p_mean_variance(
    output: Tensor,  # [N, H, W, C or 2C]
    x_t: Tensor,  # [N, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # [T, 7], of reverse_table
    *,
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # mean, log variance, the x_0 it implies: [N, H, W, C]
    """p(x_{t-1} | x_t), in float32; x_0 is clamped to [-clip, clip] first."""
    channels = x_t.shape[-1]
    a, b, c, d, _, log_min, log_max = _rows(table, t)
    x_t, output = x_t.float(), output.float()
    x_0 = a * x_t + b * output[..., :channels]
    if clip is not None:
        x_0 = x_0.clamp(-clip, clip)
    log_variance = log_min.expand_as(x_t)
    if output.shape[-1] == 2 * channels:
        f = (output[..., channels:] + 1) / 2
        log_variance = f * log_max + (1 - f) * log_min
    return c * x_0 + d * x_t, log_variance, x_0


def normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL(N(mean1, exp log_variance1) || N(mean2, exp log_variance2)) in nats, elementwise."""
    difference = log_variance2 - log_variance1
    spread = torch.exp(-difference) + (mean1 - mean2).square() * torch.exp(-log_variance2)
    return 0.5 * (difference - 1 + spread)


def discretized_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log of the probability that N(mean, exp(log_scale)^2) falls into the bin of width 2/255
    around x, in nats, elementwise; the bins of -1 and 1 reach to infinity (Ho et al., 2020,
    eq. 13)."""
    inverse_scale = torch.exp(-log_scale)
    upper = _normal_cdf(inverse_scale * (x - mean + 1 / 255))
    lower = _normal_cdf(inverse_scale * (x - mean - 1 / 255))
    probability = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return probability.clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    # the approximation of guided-diffusion, within 3e-4 of the true one: losses stay comparable
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def vb_bits(
    output: Tensor,  # [N, H, W, C or 2C]
    x_0: Tensor,  # float32 [N, H, W, C]
    x_t: Tensor,  # float32 [N, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # [T, 7], of reverse_table
    *,
    clip: float | None = None,
) -> Tensor:  # float32 [N]
    """The term L_t of the variational bound in bits per dimension: KL(q(x_{t-1} | x_t, x_0) || p),
    and at t = 0 the negative log likelihood of the 8-bit image (Ho et al., 2020, eq. 5)."""
    true_mean, true_log_variance = q_posterior(x_0, x_t, t, table)
    mean, log_variance, _ = p_mean_variance(output, x_t, t, table, clip=clip)
    kl = normal_kl(true_mean, true_log_variance, mean, log_variance)
    nll = -discretized_gaussian_log_likelihood(x_0, mean, 0.5 * log_variance)
    first = (t == 0).view(-1, 1, 1, 1)
    return torch.where(first, nll, kl).mean(dim=(1, 2, 3)) / math.log(2)
