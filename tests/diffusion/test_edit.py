"""SDEdit and RePaint: chains beside loops written out, what stays to the bit, the options."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import diffusion
from diffusion.errors import ConfigError
from diffusion.factory import SAMPLERS, Process
from diffusion.formats.checkpoint import save_checkpoint
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runs.sampling import sample
from diffusion.runtime.backend import TORCH_FP32
from diffusion.sampling.edit import Edit
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, KNOWN

from .test_runs_sampling import MODEL, network
from .toy_chains import toy

CPU = torch.device("cpu")
SHAPE = (3, 4, 6, 2)
SEED = 5
PROCESSES = {
    "cosine": {"schedule": "cosine"},
    "edm": {"schedule": "edm", "prediction": "v_prediction", "sigma_data": 0.5},
    "flow": {"schedule": "flow", "prediction": "velocity"},
}


def sampler_of(name, process="cosine", backend=TORCH_FP32, **options):
    settings = PROCESSES[process] | {"num_timesteps": 100}
    return Process(**settings).sampler(backend, CPU, sampler=name, **{"steps": 8, **options})


def images(n=2):
    """x_0 [n, H, W, C], and a mask [n, H, W] of ones, zeros and what is between."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((n, *SHAPE[1:]), generator=generator) * 2 - 1
    mask = (torch.rand((n, *SHAPE[1:3]), generator=generator) < 0.5).float()
    mask[:, 0, 0] = 0.3
    return x, mask


def denoiser_of(process):
    return toy("epsilon" if process == "cosine" else "v_prediction", False)


def both(process):
    return [
        (name, kind) for kind in process for name in SAMPLERS if (name, kind) != ("ddpm", "flow")
    ]


@pytest.mark.parametrize(("name", "process"), both(PROCESSES))
@pytest.mark.parametrize("strength", [0.5, 0.1])
def test_a_chain_goes_on_from_an_image_with_noise(name, process, strength):
    """The last rows of the whole chain, from signal x_0 + noise epsilon at their first level."""
    whole = sampler_of(name, process)
    part = sampler_of(name, process, strength=strength)
    steps = max(1, int(8 * strength))
    rows = 2 * steps - 1 if name == "heun" else steps
    assert part.num_steps == rows
    assert torch.equal(part.timesteps, whole.timesteps[-rows:])
    if name in ("ddim", "ddpm", "euler"):  # others begin a chain with a step of first order
        torch.testing.assert_close(part.rows, whole.rows[-rows:])
    x, _ = images()
    signal, noise = (v[-1] for v in part.schedule.signal_and_noise)
    index = torch.tensor([1, 0, 1])  # samples 7, 8, 9 of two images
    epsilon = reference.normal(SHAPE, torch.tensor([SEED, 0]), first=7)
    begin = (signal / part.sigma_data * x[index] + noise * epsilon).float()
    ours, by_hand = (
        part.sample(denoiser_of(process), SHAPE, seed=SEED, first=7, **options)
        for options in ({"edit": Edit(x)}, {"x": begin})
    )
    torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "process"), both(PROCESSES))
def test_inpainting_is_equation_8_behind_every_step(name, process):
    sampler, denoiser = sampler_of(name, process), denoiser_of(process)
    x_0, mask = images(3)
    found = sampler.sample(denoiser, SHAPE, seed=SEED, edit=Edit(x_0, mask))

    rng, steps = torch.tensor([SEED, 0]), torch.arange(sampler.num_steps)
    x = reference.normal(SHAPE, rng, stream=INITIAL)
    memory = sampler.new_memory(x)
    schedule, unit = sampler.schedule, sampler.sigma_data
    levels = np.stack(schedule.signal_and_noise, axis=1)[::-1] / (unit, 1)
    for k in range(sampler.num_steps):
        x = sampler.step(denoiser, x, steps[k : k + 1], rng, memory=memory)
        reached = (k // 2 if name == "heun" else k) + 1  # its two rows lead to one level
        signal, noise = levels[reached] if reached < len(levels) else (1, 0)
        epsilon = reference.normal(SHAPE, rng + torch.tensor([0, k]), stream=KNOWN)
        m = mask[..., None]
        x = m * signal * x_0 + (1 - m) * x + (1 - (1 - m) ** 2).sqrt() * noise * epsilon
    torch.testing.assert_close(found, x.float(), rtol=1e-4, atol=1e-4)
    stays = mask == 1
    torch.testing.assert_close(found[stays], x_0[stays], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "process"), [("ddpm", "cosine"), ("ddim", "edm"), ("euler", "flow")]
)
def test_levels_are_gone_to_more_than_once(name, process):
    """Algorithm 1 of RePaint with jumps of one level, in distribution: a row that goes back as well
    has the mean and the variance of both steps."""
    visits = 3
    options = {"eta": 0.5} if name == "ddim" else {}
    once = sampler_of(name, process, **options)
    more = sampler_of(name, process, resample=visits, **options)
    steps = once.num_steps
    assert more.num_steps == visits * (steps - 1) + 1
    levels = np.stack(once.schedule.signal_and_noise, axis=1)[::-1] / (once.sigma_data, 1)
    rows = more.rows.double().numpy()
    for k, row in enumerate(once.rows.double().numpy()):
        last = rows[visits * k + (visits - 1 if k + 1 < steps else 0)]
        np.testing.assert_allclose(last, row, rtol=1e-6)
        if k + 1 == steps:
            continue
        ratio = levels[k, 0] / levels[k + 1, 0]
        added = levels[k, 1] ** 2 - (ratio * levels[k + 1, 1]) ** 2
        for back in rows[visits * k : visits * k + visits - 1]:
            np.testing.assert_allclose(back[:2], row[:2], rtol=1e-6)
            np.testing.assert_allclose(back[2:5], ratio * row[2:5], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(back[5] ** 2, (ratio * row[5]) ** 2 + added, rtol=1e-4)
        here = more.levels[visits * k : visits * k + visits - 1].double()
        np.testing.assert_allclose(here, np.tile(levels[k], (visits - 1, 1)), rtol=1e-6)
    assert np.allclose(more.row_sigmas(), np.repeat(once.row_sigmas(), visits)[: -visits + 1])
    # what was drawn of a level that is gone to again has that level's deviation
    x_0, mask = images(3)
    found = more.sample(denoiser_of(process), SHAPE, seed=SEED, edit=Edit(x_0, mask))
    torch.testing.assert_close(found[mask == 1], x_0[mask == 1], rtol=0, atol=1e-6)
    assert found.isfinite().all()


def test_going_back_keeps_the_distribution():
    """Of x_0 ~ N(0, s^2), whose exact score is known: visits change nothing in it."""
    process, s = Process(schedule="cosine", num_timesteps=400), 0.5
    alpha_bar = torch.tensor(process.schedule.alphas_cumprod).float()

    def exact(x, t, labels):
        a = alpha_bar[t].view(-1, 1, 1, 1)
        return x * (1 - a).sqrt() / (a * s**2 + 1 - a)

    for visits in (1, 4):
        sampler = process.sampler(TORCH_FP32, CPU, sampler="ddpm", clip=None, resample=visits)
        x = sampler.sample(exact, (1, 64, 64, 1), seed=SEED)
        assert x.std().item() == pytest.approx(s, rel=0.04), visits


def test_both_backends_and_batches_draw_the_same():
    import triton_kernels

    x_0, mask = images(2)
    chains = []
    for ops in (reference, triton_kernels):
        backend = replace(TORCH_FP32, ops=ops)
        sampler = sampler_of("ddpm", backend=backend, resample=2)
        chains.append(
            sampler.sample(denoiser_of("cosine"), SHAPE, seed=SEED, first=1, edit=Edit(x_0, mask))
        )
    torch.testing.assert_close(*chains, rtol=1e-4, atol=1e-4)
    shape = (1, *SHAPE[1:])
    alone = sampler.sample(denoiser_of("cosine"), shape, seed=SEED, first=2, edit=Edit(x_0, mask))
    torch.testing.assert_close(alone[0], chains[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 0}, "strength=0 is not possible; give a number above 0"),
        ({"strength": 1.5}, "strength=1.5 is not possible"),
        ({"resample": 0}, "resample=0 is not possible; give a whole number from 1 to 100"),
        ({"resample": 2, "sampler": "heun"}, "resample=2 is for samplers that remember no step"),
        ({"resample": 2, "sampler": "ddpm", "learned": True}, "resample=2 is for a fixed variance"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    options = dict(options)
    variance = "learned_range" if options.pop("learned", False) else "fixed_small"
    process = Process(schedule="cosine", num_timesteps=50, variance=variance)
    with pytest.raises(ConfigError, match=message):
        process.sampler(TORCH_FP32, CPU, **({"sampler": "ddim"} | options))


# --- as sample.py does it -------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """Of images [8, 12, 3]."""
    state = {"step": 1, "image_shape": [8, 12, 3]}
    config = {"model": MODEL, "diffusion": {}, "train": {"precision": "fp32"}}
    flat = FlatParameters(network())
    return save_checkpoint(tmp_path / "run" / "checkpoints", flat, state, config, keep=1)


def drawn(ckpt, **options):
    out = ckpt.with_suffix(".npz")
    settings = {"ckpt": str(ckpt), "n": 3, "steps": 4, "out": str(out), "device": "cpu"}
    sample(settings | options)
    return np.load(out)["arr_0"]


@pytest.fixture
def files(tmp_path):
    """An image as large as the network's, one that is larger, a folder of two, and masks."""
    rng = np.random.default_rng(0)
    exact = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(exact).save(tmp_path / "exact.png")
    Image.fromarray(rng.integers(0, 256, (50, 40, 4), dtype=np.uint8)).save(tmp_path / "large.png")
    (tmp_path / "folder").mkdir()
    for name in "ab":
        pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "folder" / f"{name}.png")
    mask = np.zeros((8, 12), np.uint8)
    mask[2:6, 3:9] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    Image.fromarray(0 * mask).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("no image")
    return tmp_path, exact, mask


def test_sample_inpaints(checkpoint, files):
    folder, exact, mask = files
    found = drawn(checkpoint, init=str(folder / "exact.png"), mask=str(folder / "mask.png"))
    assert (found[:, mask == 0] == exact[mask == 0]).all()
    assert (found[0][mask > 0] != found[1][mask > 0]).any()
    resampled = drawn(
        checkpoint, init=str(folder / "exact.png"), mask=str(folder / "mask.png"),
        sampler="ddpm", resample=2,
    )  # fmt: skip
    assert (resampled[:, mask == 0] == exact[mask == 0]).all()


def test_sample_from_images(checkpoint, files):
    """A little noise leaves most of an image, more leaves less; a folder's images take turns."""
    folder, exact, _ = files
    errors = []
    for strength in (0.25, None, 0.9):
        found = drawn(checkpoint, init=str(folder / "exact.png"), strength=strength, steps=20)
        errors.append(np.abs(found.astype(int) - exact).mean())
    assert errors[0] < errors[1] < errors[2]
    assert drawn(checkpoint, init=str(folder / "large.png")).shape == (3, 8, 12, 3)
    turns = drawn(checkpoint, init=str(folder / "folder"), strength=0.05, steps=100, n=4)
    a, b = (np.asarray(Image.open(folder / "folder" / f"{name}.png")) for name in "ab")
    for i, (own, other) in enumerate(((a, b), (b, a), (a, b), (b, a))):
        near, far = (np.abs(turns[i].astype(int) - image).mean() for image in (own, other))
        assert near < far


def test_a_mask_may_be_an_array(checkpoint, files):
    """Of any kind of number: 1, 255 and True are drawn."""
    folder, exact, mask = files
    np.save(folder / "exact.npy", exact[None])
    init = str(folder / "exact.npy")
    wanted = drawn(checkpoint, init=init, mask=str(folder / "mask.png"))
    for given in (mask, mask[None, ..., None], mask > 0, (mask > 0).astype(np.float32)):
        np.save(folder / "mask.npy", given)
        assert np.array_equal(drawn(checkpoint, init=init, mask=str(folder / "mask.npy")), wanted)
        assert np.array_equal(
            diffusion.sample(checkpoint, 3, steps=4, init=exact[None], mask=given, device="cpu"),
            wanted,
        )
    np.save(folder / "mask.npy", mask.astype(np.float32))
    with pytest.raises(ConfigError, match=r"numbers from 0 to 255; expected 0 \(stays\) to 1"):
        drawn(checkpoint, init=init, mask=str(folder / "mask.npy"))
    np.save(folder / "mask.npy", mask[:, 1:])
    with pytest.raises(ConfigError, match=r"of shape \[8, 11\]; expected .* \[M, 8, 12, 1\]"):
        drawn(checkpoint, init=init, mask=str(folder / "mask.npy"))


def test_arrays_are_begun_from_in_their_units(tmp_path):
    """Axes are those of the file that was trained on, or others."""
    rows = np.random.default_rng(0).normal(280, 10, (6, 5, 8, 12)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    diffusion.train(
        tmp_path / "run", dataset={"name": "array", "path": str(tmp_path / "rows.npy")},
        model=MODEL, steps=1, batch_size=2, precision="fp32", sample_every=0, tensorboard=False,
        device="cpu",
    )  # fmt: skip
    mask = np.zeros((8, 12), bool)
    mask[2:6] = True
    options = {"n": 3, "sampler": "euler", "steps": 4, "device": "cpu"}
    run = tmp_path / "run"
    found = diffusion.sample(run, init=rows[:2], mask=mask, **options)
    for i in range(3):
        np.testing.assert_allclose(found[i][:, ~mask], rows[i % 2][:, ~mask], rtol=1e-6)
        assert np.abs(found[i][:, mask] - rows[i % 2][:, mask]).max() > 1
    again = diffusion.sample(run, init=rows[:2].transpose(0, 2, 3, 1), mask=mask, **options)
    assert np.array_equal(found, again)
    near = diffusion.sample(run, init=tmp_path / "rows.npy", strength=0.25, **options)
    assert np.corrcoef(near.ravel(), rows[:3].ravel())[0, 1] > 0.7
    Image.fromarray(np.zeros((8, 12), np.uint8)).save(tmp_path / "picture.png")
    with pytest.raises(ConfigError, match="is no array, and .* learned numbers in units"):
        diffusion.sample(run, init=tmp_path / "picture.png", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "mask.png"}, "mask=.*mask.png goes with init=IMAGE, which is not given"),
        ({"strength": 0.5}, "strength=0.5 goes with init=IMAGE"),
        ({"resample": 3}, "resample=3 goes with init=IMAGE mask=IMAGE"),
        ({"init": "exact.png", "resample": 3}, "resample=3 goes with init=IMAGE mask=IMAGE"),
        ({"init": "exact.png", "strength": 1}, "strength=1 leaves nothing of init"),
        ({"init": "exact.png", "strength": 2}, "strength=2 is not possible"),
        ({"init": "none.png"}, "init=.*none.png does not exist; give an image, a folder or a .zip"),
        ({"init": "text.png"}, "init=.*text.png is no image that can be decoded"),
        ({"init": "exact.png", "mask": "black.png"}, "mask=.*black.png is black"),
        ({"init": "exact.png", "mask": "folder"}, "has 2 images; expected 1 or, as init, 1"),
    ],
    ids=str,
)
def test_wrong_settings(checkpoint, files, options, message):
    for key in ("init", "mask"):
        if key in options:
            options = options | {key: str(files[0] / options[key])}
    with pytest.raises(ConfigError, match=message):
        drawn(checkpoint, **options)
