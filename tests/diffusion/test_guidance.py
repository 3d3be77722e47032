"""Classifier-free guidance: dropped labels, the null class, guided chains, sample.py's options."""

import numpy as np
import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.factory import SAMPLERS, Process, make_sampler
from diffusion.formats.weights import load_weights, save_guided
from diffusion.models.conditions import drop_labels
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.sampling.draw import draw
from diffusion.sampling.guidance import Guidance, guide
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL

from .classes import CLASSES, tiny

CPU = torch.device("cpu")

RNG = torch.tensor([3, 5])


# --- training: labels are dropped -----------------------------------------------------------------


def test_the_share_of_labels_dropped():
    labels = torch.arange(4000) % CLASSES
    dropped = drop_labels(labels, RNG, 0.1, CLASSES) == CLASSES
    assert 320 < dropped.sum() < 480  # four deviations
    assert torch.equal(drop_labels(labels, RNG, 0.1, CLASSES)[~dropped], labels[~dropped])
    more = drop_labels(labels, RNG, 0.2, CLASSES) == CLASSES
    assert (more | ~dropped).all()  # of one draw
    assert torch.equal(drop_labels(labels, RNG, 0.0, CLASSES), labels)
    assert drop_labels(labels[:0], RNG, 0.1, CLASSES).shape == (0,)


def test_which_labels_are_dropped_depends_on_seed_step_and_index_alone():
    labels = torch.zeros(60, dtype=torch.int64)
    whole = drop_labels(labels, RNG, 0.5, CLASSES, first=100)
    parts = [
        drop_labels(labels[:20], RNG, 0.5, CLASSES, first=100 + start) for start in (0, 20, 40)
    ]
    assert torch.equal(torch.cat(parts), whole)
    for other in (torch.tensor([4, 5]), torch.tensor([3, 6])):
        assert not torch.equal(drop_labels(labels, other, 0.5, CLASSES, first=100), whole)
    flips = reference.draw_flips(RNG, 60, first=100)
    assert not torch.equal(flips, whole == CLASSES) and not torch.equal(~flips, whole == CLASSES)


def test_the_model_trains_its_null_class_with_the_dropped():
    model = tiny(label_dropout=0.5)
    x, t = torch.randn(6, 8, 8, 1), torch.arange(6) * 100
    labels = torch.arange(6) % CLASSES
    seen = drop_labels(labels, RNG, 0.5, CLASSES, first=12)
    assert 0 < (seen == CLASSES).sum() < 6
    y = model.train().forward_nhwc(x, t, labels, rng=RNG, first=12)
    y.square().sum().backward()
    rows = model.label_emb.weight.grad.abs().sum(dim=1) > 0
    assert rows.tolist() == [label in seen for label in range(CLASSES + 1)]
    model.eval()
    assert torch.equal(model.forward_nhwc(x, t, seen), y)
    assert not torch.equal(model.forward_nhwc(x, t, labels), y)


def test_the_loss_hands_the_model_what_it_needs():
    model = tiny(label_dropout=0.5).train()
    objective = Objective(make_schedule("linear", 1000), TORCH_FP32)
    images, labels = torch.rand(6, 8, 8, 1), torch.arange(6) % CLASSES

    def loss(model, labels, **options):
        def denoiser(x, t, labels):
            return model.forward_nhwc(x, t, labels, **options)

        return objective.loss(denoiser, images, RNG, labels=labels)[0]

    seen = drop_labels(labels, RNG, 0.5, CLASSES)
    assert torch.equal(loss(model, labels, rng=RNG), loss(model.eval(), seen))


def test_without_label_dropout_nothing_changes(tmp_path):
    plain, guided = tiny(), tiny(label_dropout=0.1)
    assert plain.null_label is None and guided.null_label == CLASSES
    assert plain.label_emb.weight.shape[0] == CLASSES
    assert guided.label_emb.weight.shape[0] == CLASSES + 1
    assert list(plain.state_dict()) == list(guided.state_dict())
    assert tiny(num_classes=None).null_label is None
    save_guided(tmp_path / "plain.pt", plain)
    load_weights(tmp_path / "plain.pt", tiny())
    with pytest.raises(ConfigError, match=r"label_emb.weight is \[3, 32\] in the file, \[4, 32\]"):
        load_weights(tmp_path / "plain.pt", guided)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_dropout": 1.0}, "label_dropout=1.0; expected a number from 0 to below 1"),
        ({"label_dropout": -0.1}, "label_dropout=-0.1"),
        ({"label_dropout": 0.1, "num_classes": None}, "label_dropout=0.1 needs classes"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**options)


def test_wrong_inputs():
    model, x, t = tiny(label_dropout=0.1), torch.randn(1, 8, 8, 1), torch.tensor([0])
    with pytest.raises(ValueError, match="label_dropout=0.1 in training needs rng"):
        model.train().forward_nhwc(x, t, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"labels lie in \[4, 4\]; expected \[0, 3\]"):
        model.eval().forward_nhwc(x, t, torch.tensor([4]))
    with pytest.raises(ValueError, match=r"labels lie in \[3, 3\]; expected \[0, 2\]"):
        tiny().forward_nhwc(x, t, torch.tensor([3]))


# --- sampling -------------------------------------------------------------------------------------


def _by_label(learned=False):
    """A denoiser whose output is a function of x, t and the label, and the batches it was given."""
    batches = []

    def denoiser(x, t, labels):
        batches.append(len(x))
        out = torch.sin(x + labels.view(-1, 1, 1, 1) + 0.01 * t.view(-1, 1, 1, 1))
        return torch.cat((out, torch.cos(out)), dim=-1) if learned else out

    return denoiser, batches


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("scale", [0, 0.5, 1.0, 3.0])
def test_the_guided_output(scale, learned):
    denoiser, batches = _by_label(learned)
    x, t, labels = torch.randn(4, 3, 5, 2), torch.arange(4), torch.tensor([0, 1, 2, 0])
    conditional = denoiser(x, t, labels)
    null = denoiser(x, t, torch.full_like(labels, CLASSES))
    batches.clear()
    output = guide(denoiser, scale, CLASSES)(x, t, labels)
    assert batches == ([4] if scale == 1 else [8])
    expected = null[..., :2] + scale * (conditional - null)[..., :2]
    torch.testing.assert_close(output[..., :2], expected)
    assert torch.equal(output[..., 2:], conditional[..., 2:])


SHAPE = (4, 3, 5, 2)


def formula(positive, negative, scale, rescale):
    """Ho and Salimans, 2022; Lin et al., 2023, algorithm 2; in PyTorch."""
    cfg = negative + scale * (positive - negative)
    if scale == 1:
        cfg = positive
    std = [y.std(dim=(1, 2, 3), keepdim=True) for y in (positive, cfg)]
    return rescale * cfg * std[0] / std[1] + (1 - rescale) * cfg


def by_hand(sampler, positive, negative, guidance, labels):
    """The chain, each row of which is guided as the formula says. The sampler's own step then has
    nothing to do with guidance."""
    sigmas, x, step = sampler.row_sigmas(), None, torch.arange(sampler.num_steps)
    rng = torch.tensor([SEED, 0])
    x = reference.normal(SHAPE, rng, stream=INITIAL)
    memory = sampler.new_memory(x)
    low, high = guidance.interval or (-1, np.inf)
    for k in range(sampler.num_steps):
        t = sampler.timesteps[k].expand(len(x))
        scale = guidance.scale if low < sigmas[k] <= high else 1

        def guided(x, _t, _labels, t=t, scale=scale):
            outputs = positive(x, t, labels), negative(x, t, labels)
            return formula(*outputs, scale, guidance.rescale)

        x = sampler.step(guided, x, step[k : k + 1], rng, labels=labels, first=0, memory=memory)
    return x


SEED = 2


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("schedule", ["cosine", "edm", "flow"])
@pytest.mark.parametrize(
    ("interval", "rescale"), [(None, 0.0), ((0.3, 3.0), 0.0), (None, 0.7), ((0.3, 3.0), 0.7)]
)
@pytest.mark.parametrize("kind", ["null class", "negative class", "weaker"])
def test_guided_chains(kind, interval, rescale, schedule, name):
    """Of every sampler, in an interval of sigma, rescaled, and away from each kind of worse output,
    step by step as the formula in PyTorch says."""
    settings = {"schedule": schedule, "num_timesteps": 200}
    settings |= {"cosine": {}, "edm": {"prediction": "v_prediction", "sigma_data": 0.5}}.get(
        schedule, {"prediction": "velocity"}
    )
    if schedule == "flow" and name == "ddpm":
        pytest.skip("there is no ddpm of a flow")
    sampler = Process(**settings).sampler(TORCH_FP32, CPU, sampler=name, steps=5)
    positive, _ = _by_label()
    guidance = Guidance(2.5, interval, rescale, 1 if kind == "negative class" else None)
    labels = torch.tensor([0, 1, 2, 0])

    def weaker(x, t, labels):
        return 0.5 * positive(x, t, labels)

    def negative(x, t, labels):
        if kind == "weaker":
            return weaker(x, t, labels)
        return positive(x, t, torch.full_like(labels, CLASSES if kind == "null class" else 1))

    denoiser = guide(
        positive, guidance, CLASSES, sigmas=sampler.row_sigmas(),
        weaker=weaker if kind == "weaker" else None,
    )  # fmt: skip
    chain = sampler.sample(denoiser, SHAPE, seed=SEED, labels=labels)
    expected = by_hand(sampler, positive, negative, guidance, labels)
    torch.testing.assert_close(chain, expected, rtol=1e-4, atol=1e-4)
    if interval is not None:  # which leaves out some rows, and not all
        scales = guidance.scales(sampler.row_sigmas())
        assert set(scales) == {1.0, 2.5}
        plain = sampler.sample(positive, SHAPE, seed=SEED, labels=labels)
        assert not torch.equal(chain, plain)


def test_an_interval_is_of_the_noise_in_units_of_the_data():
    """Above its lower end and up to its upper one."""
    process = Process(schedule="edm", prediction="v_prediction", sigma_data=0.5)
    sigmas = process.sampler(TORCH_FP32, CPU, sampler="ddim", steps=4).row_sigmas()
    np.testing.assert_allclose(sigmas[[0, -1]], (80, 0.002))
    scales = Guidance(3.0, (sigmas[2], sigmas[1])).scales(sigmas)
    assert scales == (1.0, 3.0, 1.0, 1.0)
    heun = process.sampler(TORCH_FP32, CPU, sampler="heun", steps=4)
    assert len(heun.row_sigmas()) == heun.num_steps == 7
    flow = Process(schedule="flow", prediction="velocity").sampler(TORCH_FP32, CPU, steps=4)
    assert np.isinf(flow.row_sigmas()[0])


@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_a_guided_denoiser_called_by_itself(rescale):
    """By a timestep, as other programs call it."""
    denoiser, _ = _by_label()
    x, t, labels = torch.randn(SHAPE), torch.arange(4), torch.tensor([0, 1, 2, 0])
    weaker = guide(denoiser, Guidance(2.0, rescale=rescale), None, weaker=lambda x, *_: 0.3 * x)
    expected = formula(denoiser(x, t, labels), 0.3 * x, 2.0, rescale)
    torch.testing.assert_close(weaker(x, t, labels), expected)
    guided = guide(denoiser, Guidance(2.0, (0, 1)), CLASSES, sigmas=[0.5])
    with pytest.raises(ValueError, match="for chains: hand it to a sampler"):
        guided(x, t, labels)
    with pytest.raises(ValueError, match="an interval .0, 1. needs the sigmas"):
        guide(denoiser, Guidance(2.0, (0, 1)), CLASSES)
    with pytest.raises(ValueError, match="1 scales of guidance; the chain has 3 rows"):
        guided.tabulate(torch.arange(3), labels, 4)


def test_no_guidance_costs_nothing():
    denoiser, _ = _by_label()
    assert guide(denoiser, 1, None) is denoiser


def test_the_sum_is_formed_in_float32():
    x, t, labels = torch.randn(1, 2, 2, 1), torch.tensor([0]), torch.tensor([0])
    exact = guide(_by_label()[0], 7.5, CLASSES)(x, t, labels)

    def half(x, t, labels):
        return _by_label()[0](x, t, labels).bfloat16()

    output = guide(half, 7.5, CLASSES)(x, t, labels)
    assert output.dtype == torch.float32
    # each half is rounded to 2^-9; bfloat16 sums would be off by 7.5 times that and more
    torch.testing.assert_close(output, exact, rtol=0, atol=14 * 2**-9)


@pytest.mark.parametrize("scale", [-1, "much", None, True, float("inf"), float("nan")])
def test_wrong_scales(scale):
    with pytest.raises(ConfigError, match=f"guidance={scale}"):
        guide(_by_label()[0], scale, CLASSES)


@pytest.mark.parametrize("labels", [None, [0], [0, 1, 2], [[0, 1]]], ids=str)
def test_guidance_needs_a_label_for_each_sample(labels):
    labels = None if labels is None else torch.tensor(labels)
    guided, x, t = guide(_by_label()[0], 2.0, CLASSES), torch.randn(2, 3, 5, 2), torch.arange(2)
    sampler = make_sampler(make_schedule("cosine", 100), TORCH_FP32, steps=2)
    for ask in (
        lambda: guided(x, t, labels),
        lambda: sampler.sample(guided, x.shape, seed=0, labels=labels),
    ):
        with pytest.raises(ValueError, match=r"labels are (missing|of shape) ?.*expected \[2\]"):
            ask()


def test_guidance_needs_a_null_class():
    with pytest.raises(ConfigError, match="model.label_dropout above 0"):
        guide(_by_label()[0], 2.0, None)


@pytest.mark.parametrize("variance", ["fixed_small", "learned_range"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_image_depends_on_the_seed_and_its_number_alone(name, variance):
    channels = 2 if variance == "learned_range" else 1
    model = tiny(label_dropout=0.1, out_channels=channels)
    sampler = make_sampler(
        make_schedule("cosine", 100), TORCH_FP32, name, steps=3, variance=variance
    )
    labels = torch.arange(5) % CLASSES

    def images(**options):
        return draw(model, sampler, 5, (8, 8, 1), seed=1, labels=labels, **options).astype(int)

    whole = images(guidance=2.5)
    for batch_size in (1, 3):
        # batches of other sizes may be summed in another order
        assert np.abs(images(guidance=2.5, batch_size=batch_size) - whole).max() <= 1
    assert (images() == images(guidance=1.0)).all()
    assert (whole != images()).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0 and batch_size 64; expected at least 1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"labels": torch.tensor([0, 1])}, r"labels have shape \[2\]; expected \[3\]"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn(options, message):
    sampler = make_sampler(make_schedule("cosine", 100), TORCH_FP32, steps=1)
    given = {"n": 3, "image_shape": (8, 8, 1), "seed": 0} | options
    with pytest.raises(ValueError, match=message):
        draw(tiny(), sampler, **given)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_host_synchronisation():
    rng, labels = RNG.cuda(), torch.arange(6, device="cuda") % CLASSES
    x, t = torch.randn(6, 4, 4, 1, device="cuda"), torch.arange(6, device="cuda")
    guided = guide(_by_label()[0], 3.0, CLASSES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dropped = drop_labels(labels, rng, 0.5, CLASSES, first=2)
        output = guided(x, t, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(dropped.cpu(), drop_labels(labels.cpu(), RNG, 0.5, CLASSES, first=2))
    expected = guided(x.cpu(), t.cpu(), labels.cpu())
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-5)
