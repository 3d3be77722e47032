"""The training loss: recorded losses of guided-diffusion, closed forms, gradients, determinism."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diffusion.errors import ConfigError
from diffusion.process.objective import (
    Objective,
    discretized_gaussian_log_likelihood,
    normal_kl,
    p_mean_variance,
    q_posterior,
    reverse_table,
    vb_bits,
)
from diffusion.process.schedule import make_schedule
from diffusion.process.weights import Weighting
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference

PROCESSES = [
    pytest.param("linear_1000", 1000, "fixed_small", id="linear_1000"),
    pytest.param("linear_learned_250", 250, "learned_range", id="linear_learned_250"),
]
RNG = torch.tensor([3, 7])


def _nhwc(x):
    return x.permute(0, 2, 3, 1).contiguous()


def _read(golden, name):
    recorded = load_file(golden / f"process_{name}.safetensors")
    return {key: _nhwc(x) if x.dim() == 4 else x for key, x in recorded.items()}


def _close(actual, expected):
    torch.testing.assert_close(actual, expected.expand_as(actual), rtol=1e-5, atol=1e-5)


# --- guided-diffusion ----------------------------------------------------------------------------


@pytest.mark.parametrize("name, steps, variance", PROCESSES)
def test_recorded_reverse_process(golden, name, steps, variance):
    g = _read(golden, name)
    schedule = make_schedule("linear", 1000).respace(steps)
    table = reverse_table(schedule, "epsilon", variance)
    mean, log_variance, x_0 = p_mean_variance(g["model_output"], g["xt"], g["t"], table, clip=1.0)
    _close(mean, g["mean"])
    _close(log_variance, g["log_variance"])
    _close(x_0, g["pred_x0"])
    posterior_mean, _ = q_posterior(g["pred_x0"], g["xt"], g["t"], table)
    _close(posterior_mean, g["mean"])


@pytest.mark.parametrize("name, steps, variance", PROCESSES)
def test_recorded_forward_process_and_loss(golden, monkeypatch, name, steps, variance):
    g = _read(golden, name)
    schedule = make_schedule("linear", 1000).respace(steps)
    objective = Objective(schedule, TORCH_FP32, variance=variance)
    monkeypatch.setattr(reference, "normal", lambda shape, rng, **_: g["noise"])
    seen = []

    def denoiser(x_t, timesteps, labels):
        seen.append((x_t, timesteps))
        return g["model_output"]

    loss, parts = objective.loss(denoiser, g["x0"], RNG, t=g["t"])
    _close(seen[0][0], g["q_sample"])
    assert seen[0][1].tolist() == g["timestep_map"][g["t"]].tolist()
    _close(loss, g["loss.loss"])
    assert {f"loss.{part}" for part in parts} == {k for k in g if k.startswith("loss.")} - {
        "loss.loss"
    }
    for part, value in parts.items():
        _close(value, g[f"loss.{part}"])


def test_plain_mse_keeps_the_bound_unscaled(golden, monkeypatch):
    g = _read(golden, "linear_learned_250")
    schedule = make_schedule("linear", 1000).respace(250)
    objective = Objective(schedule, TORCH_FP32, variance="learned_range", vb_weight=1.0)
    monkeypatch.setattr(reference, "normal", lambda shape, rng, **_: g["noise"])
    _, parts = objective.loss(lambda *_: g["model_output"], g["x0"], RNG, t=g["t"])
    _close(parts["vb"], g["loss.vb"] * 4)


# --- the variational bound -----------------------------------------------------------------------


def test_kl_of_equal_normals_is_zero_and_matches_torch():
    torch.manual_seed(0)
    m1, v1, m2, v2 = torch.randn(4, 100, dtype=torch.float64)
    assert normal_kl(m1, v1, m1, v1).abs().max() < 1e-12
    normals = [torch.distributions.Normal(m, (v / 2).exp()) for m, v in ((m1, v1), (m2, v2))]
    expected = torch.distributions.kl_divergence(*normals)
    torch.testing.assert_close(normal_kl(m1, v1, m2, v2), expected)


@pytest.mark.parametrize("mean", [-1.3, 0.0, 0.4])
@pytest.mark.parametrize("log_scale", [-3.0, 0.0])
def test_decoder_bins_sum_to_one(mean, log_scale):
    x = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    total = discretized_gaussian_log_likelihood(
        x, torch.full_like(x, mean), torch.full_like(x, log_scale)
    )
    # the bins tile the line; the clamp at 1e-12 adds at most 256e-12
    assert total.exp().sum().item() == pytest.approx(1, abs=1e-9)


def test_decoder_is_the_normal_probability():
    x = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    ours = discretized_gaussian_log_likelihood(x, torch.tensor(0.1), torch.tensor(-1.0)).exp()
    cdf = torch.distributions.Normal(0.1, math.exp(-1.0)).cdf
    upper, lower = cdf(x + 1 / 255), cdf(x - 1 / 255)
    upper[-1], lower[0] = 1, 0
    assert (ours - (upper - lower)).abs().max() < 3e-4  # of the tanh approximation


def test_bound_is_zero_for_the_true_posterior():
    """v = -1 with the true epsilon is q(x_{t-1} | x_t, x_0) itself: no bits, except at t = 0."""
    torch.manual_seed(0)
    schedule = make_schedule("linear", 200)
    x_0, epsilon = torch.rand(3, 4, 5, 2) * 2 - 1, torch.randn(3, 4, 5, 2)
    t = torch.tensor([1, 57, 199])
    a, s = schedule.training_table()[t].view(3, 2, 1, 1, 1).unbind(1)
    x_t = a * x_0 + s * epsilon
    table = reverse_table(schedule, "epsilon", "learned_range")
    output = torch.cat((epsilon, -torch.ones_like(epsilon)), dim=-1)
    bits = vb_bits(output, x_0, x_t, t, table)
    assert bits.abs().max() < 1e-4
    output[..., 2:] = (
        1  # the larger variance costs bits, where float32 can tell it from the smaller
    )
    assert (vb_bits(output, x_0, x_t, t, table)[:2] > 1e-4).all()


@pytest.mark.parametrize("variance", ["learned_range", "learned"])
def test_learned_variance_is_read_as_said(variance):
    schedule = make_schedule("cosine", 50)
    table = reverse_table(schedule, "epsilon", variance)
    x_t, t = torch.randn(2, 3, 3, 1), torch.tensor([4, 30])
    v = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 3, 1)
    _, log_variance, _ = p_mean_variance(torch.cat((x_t, v), -1), x_t, t, table)
    expected = [-1.0, 1.0]
    if variance == "learned_range":
        expected = [np.log(schedule.posterior_variance[4]), np.log(schedule.betas[30])]
    torch.testing.assert_close(log_variance[:, 0, 0, 0], torch.tensor(expected).float())


# --- the objective -------------------------------------------------------------------------------


def _images(n=6, channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 5, 4, channels), generator=generator, dtype=torch.uint8)


class _Toy(torch.nn.Module):
    """A pixelwise network with the channels the variance needs."""

    def __init__(self, channels, outputs):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(channels, outputs)

    def forward(self, x, t, labels):
        h = torch.tanh(self.layer(x.float()) + torch.sin(t * 0.01)[:, None, None, None])
        return h if labels is None else h + labels[:, None, None, None]


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned_range", "learned"])
def test_batch_split_changes_nothing(prediction, variance):
    objective = Objective(make_schedule("cosine", 40), TORCH_FP32, prediction, variance)
    learned = objective.learned
    toy, images = _Toy(3, 6 if learned else 3), _images()
    index, flip = torch.tensor([5, 0, 2, 2, 1]), torch.tensor([True, False, True, False, False])
    labels = torch.linspace(0, 1, 5)

    def run(cut):
        loss, parts = objective.loss(
            toy, images, RNG, index=index[cut], flip=flip[cut], labels=labels[cut],
            first=10 + cut.start,
        )  # fmt: skip
        assert loss.shape == flip[cut].shape and loss.dtype == torch.float32
        assert set(parts) == ({"mse", "vb"} if learned else {"mse"})
        assert not any(part.requires_grad for part in parts.values())
        torch.testing.assert_close(sum(parts.values()), loss.detach())
        return loss

    whole, halves = run(slice(0, 5)), torch.cat((run(slice(0, 2)), run(slice(2, 5))))
    torch.testing.assert_close(whole, halves, rtol=1e-6, atol=1e-6)


def test_perfect_denoiser_has_no_loss():
    schedule = make_schedule("linear", 100)
    images, n = _images(), 6
    x_0 = reference.gather_images(images)
    noise = reference.normal(x_0.shape, RNG)
    t = reference.draw_timesteps(RNG, n, 100)
    a, s = schedule.training_table()[t].view(n, 2, 1, 1, 1).unbind(1)
    for prediction, target in (
        ("epsilon", noise),
        ("sample", x_0),
        ("v_prediction", a * noise - s * x_0),
    ):
        loss, _ = Objective(schedule, TORCH_FP32, prediction).loss(
            lambda *_, target=target: target, images, RNG
        )
        assert loss.max() < 1e-10


def test_the_bound_trains_the_variance_alone():
    """The mean's gradient is that of the squared error, bit for bit."""
    schedule, images = make_schedule("linear", 100), _images()
    torch.manual_seed(0)
    output = torch.randn(6, 5, 4, 6, requires_grad=True)
    objective = Objective(schedule, TORCH_FP32, variance="learned_range")
    loss, _ = objective.loss(lambda *_: output, images, RNG)
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    mean = output[..., :3].detach().requires_grad_()
    loss, _ = Objective(schedule, TORCH_FP32).loss(lambda *_: mean, images, RNG)
    (expected,) = torch.autograd.grad(loss.sum(), mean)
    assert torch.equal(gradient[..., :3], expected)
    assert (gradient[..., 3:].abs().amax(dim=(1, 2, 3)) > 0).all()


def test_bound_does_not_see_the_rounding_of_x_t():
    """In bf16 the network sees the rounded x_t; the bound compares at the exact one."""
    schedule, images = make_schedule("linear", 1000), _images()
    t = torch.ones(6, dtype=torch.int64)
    noise = reference.normal(images.shape, RNG)
    output = torch.cat((noise, -torch.ones_like(noise)), dim=-1)
    backend = replace(TORCH_FP32, dtype=torch.bfloat16)
    objective = Objective(schedule, backend, variance="learned_range", vb_weight=1.0)

    def denoiser(x_t, timesteps, labels):
        assert x_t.dtype == torch.bfloat16
        return output

    _, parts = objective.loss(denoiser, images, RNG, t=t)
    assert parts["vb"].abs().max() < 1e-4


def test_timesteps_reach_the_network_in_the_original_count():
    schedule = make_schedule("linear", 1000).respace("ddim50")
    seen = []

    def denoiser(x, t, labels):
        seen.append(t)
        return x

    Objective(schedule, TORCH_FP32).loss(denoiser, _images(), RNG)
    drawn = reference.draw_timesteps(RNG, 6, 50)
    assert seen[0].dtype == torch.int64 and seen[0].tolist() == (drawn * 20).tolist()


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_min_snr_is_one_weight_on_the_error_of_x0(prediction):
    schedule = make_schedule("cosine", 100)
    weights = Weighting(min_snr_gamma=5.0).of(schedule, prediction)
    # an error of 1 in the output is an error of b in x_0
    _, b = schedule.x0_from_output(prediction)
    np.testing.assert_allclose(weights / b**2, np.minimum(schedule.snr, 5.0), rtol=1e-9)

    objective = Objective(schedule, TORCH_FP32, prediction, weights=weights)
    t = torch.tensor([0, 1, 50, 60, 98, 99])
    loss, parts = objective.loss(lambda x, t, y: x, _images(), RNG, t=t)
    torch.testing.assert_close(loss, parts["mse"] * torch.tensor(weights[t.numpy()]).float())


@pytest.mark.parametrize("variance, outputs", [("fixed_small", 6), ("learned_range", 3)])
def test_wrong_number_of_output_channels(variance, outputs):
    objective = Objective(make_schedule("linear", 100), TORCH_FP32, variance=variance)
    with pytest.raises(ConfigError, match=f"variance={variance} needs a model output of shape"):
        objective.loss(_Toy(3, outputs), _images(), RNG)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prediction": "eps"}, "prediction=eps is unknown; choose one of epsilon, sample"),
        ({"variance": "small"}, "variance=small is unknown; choose one of fixed_small"),
    ],
)
def test_errors_name_the_value(options, message):
    with pytest.raises(ConfigError, match=message):
        Objective(make_schedule("linear", 100), TORCH_FP32, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("variance", ["fixed_small", "learned_range"])
def test_backends_agree(variance):
    import triton_kernels

    objectives = [
        Objective(make_schedule("linear", 1000), backend, variance=variance, device="cuda")
        for backend in (TORCH_FP32, replace(TORCH_FP32, name="triton", ops=triton_kernels))
    ]
    toy = _Toy(3, 6 if variance == "learned_range" else 3).cuda()
    images, rng = _images().cuda(), RNG.cuda()
    losses = [objective.loss(toy, images, rng)[0] for objective in objectives]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
