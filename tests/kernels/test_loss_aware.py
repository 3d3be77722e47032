"""triton_kernels.noise.loss_aware against the reference, against guided-diffusion's way of
counting, and against what is asked for.

Of equal losses both backends make the same whole numbers up to the rounding of a sum in float32:
q_t = floor(2^30 p_t) + 1 is within 1e-6 of itself, and then what is drawn is the same."""

import math

import numpy as np
import pytest
import torch

import triton_kernels as ops
from triton_kernels import reference
from triton_kernels.noise import loss_aware

BACKENDS = [pytest.param(ops, id="triton"), pytest.param(reference, id="torch")]
RNG = torch.tensor([2**40 + 5, 11])


def state(rows, total, device="cpu"):
    history = torch.zeros(rows, total, device=device)
    return history, torch.zeros(total, dtype=torch.int32, device=device)


def recorded(module, batches, rows, total, device="cpu", **options):
    history, counts = state(rows, total, device)
    for losses, t in batches:
        ends = module.record_losses(losses.to(device), t.to(device), history, counts, **options)
    return history, counts, ends


def some_batches(total, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for n in sizes:
        losses = torch.rand(n, generator=generator) * 10
        losses[torch.rand(n, generator=generator) < 0.1] = math.nan
        yield losses, torch.randint(total, (n,), generator=generator)


def resampler_of_guided_diffusion(batches, rows, total, uniform):
    """LossSecondMomentResampler of guided-diffusion, with its two array copies."""
    history, counts = np.zeros((total, rows)), np.zeros(total, dtype=int)
    for losses, t in batches:
        for step, loss in zip(t.tolist(), losses.tolist(), strict=True):
            if not math.isfinite(loss):
                continue
            if counts[step] == rows:
                history[step, :-1] = history[step, 1:]
                history[step, -1] = loss
            else:
                history[step, counts[step]] = loss
                counts[step] += 1
    if not (counts == rows).all():
        return np.ones(total) / total
    weights = np.sqrt(np.mean(history**2, axis=-1))
    weights /= np.sum(weights)
    return weights * (1 - uniform) + uniform / len(weights)


@pytest.mark.parametrize("module", BACKENDS)
@pytest.mark.parametrize("total", [1, 3, 17, 64])
@pytest.mark.parametrize("sizes", [(0,), (7,), (300, 0, 33, 1), (500, 900)], ids=str)
def test_probabilities_are_those_of_guided_diffusion(module, total, sizes, device):
    if module is reference and device.type == "cuda":
        pytest.skip("once is enough")
    batches, rows, uniform = list(some_batches(total, sizes)), 4, 0.01
    *_, ends = recorded(module, batches, rows, total, device, uniform=uniform)
    q = torch.diff(ends, prepend=ends.new_zeros(1)).double().cpu()
    expected = resampler_of_guided_diffusion(batches, rows, total, uniform)
    np.testing.assert_allclose(q / q.sum(), expected, rtol=2e-6, atol=2e-9)


@pytest.mark.parametrize("total", [1, 5, 33, 1000])
def test_backends_agree(total, device):
    batches = list(some_batches(total, (1, 130, 7, 64 * min(total, 20))))
    rows = 3
    ours = recorded(ops, batches, rows, total, device)
    theirs = recorded(reference, batches, rows, total, device)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2].double(), theirs[2].double(), rtol=1e-6, atol=2)
    # of the same ends the draws are the same
    for n, first in ((1, 0), (300, 2**33)):
        drawn = [m.draw_weighted_timesteps(RNG.to(device), n, theirs[2], first=first)
                 for m in (ops, reference)]  # fmt: skip
        assert torch.equal(*drawn) and drawn[0].min() >= 0 and drawn[0].max() < total


@pytest.mark.parametrize("module", BACKENDS)
def test_the_last_losses_count_in_their_order(module, device):
    """Of one timestep more losses in a batch than are kept."""
    history, counts, _ = recorded(
        module, [(torch.arange(1.0, 8.0), torch.tensor([1, 1, 0, 1, 1, 1, 1]))], 4, 2, device
    )
    assert counts.tolist() == [1, 6]
    assert history[:, 0].tolist() == [3, 0, 0, 0]
    assert sorted(history[:, 1].tolist()) == [4, 5, 6, 7]


@pytest.mark.parametrize("module", BACKENDS)
def test_draws_are_as_likely_as_they_should_be(module, device):
    losses = torch.tensor([1.0, 3.0, 0.0, 4.0])
    *_, ends = recorded(module, [(losses, torch.arange(4))], 1, 4, device, uniform=0.2)
    rng = RNG.to(device)
    expected = torch.tensor([0.15, 0.35, 0.05, 0.45])
    drawn = module.draw_weighted_timesteps(rng, 4000, ends)
    share = torch.bincount(drawn, minlength=4).cpu() / 4000
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()
    parts = [module.draw_weighted_timesteps(rng, 2000, ends, first=first) for first in (0, 2000)]
    assert torch.equal(torch.cat(parts), drawn)


@pytest.mark.parametrize("module", BACKENDS)
def test_losses_of_zero_are_drawn_evenly(module, device):
    *_, ends = recorded(module, [(torch.zeros(6), torch.arange(6) % 3)], 2, 3, device)
    assert len(set(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())) == 1


def test_most_timesteps(device):
    total = loss_aware.MOST_TIMESTEPS
    t = torch.arange(total)
    ours, theirs = (
        recorded(m, [(1 + torch.sin(t.float()), t)], 1, total, device) for m in (ops, reference)
    )
    torch.testing.assert_close(ours[2].double(), theirs[2].double(), rtol=1e-6, atol=total)
    assert ops.draw_weighted_timesteps(RNG.to(device), 50, ours[2]).max() < total
    with pytest.raises(ValueError, match=r"history has shape \(1, 4097\)"):
        ops.record_losses(*empty(device), *state(1, total + 1, device))


def empty(device):
    return torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": torch.zeros(3).half()}, "losses is torch.float16"),
        ({"losses": torch.zeros(6)[::2]}, r"losses is .* with stride \(2,\)"),
        ({"t": torch.zeros(3)}, "t is torch.float32"),
        ({"t": torch.zeros(4, dtype=torch.int64)}, r"t has shape \(4,\); expected \(3,\)"),
        ({"counts": torch.zeros(4, dtype=torch.int32)}, r"counts has shape \(4,\)"),
        ({"history": torch.zeros(5)}, r"history has shape \(5,\)"),
        ({"uniform": 1.5}, "uniform is 1.5; expected a number from 0 to 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change, message):
    history, counts = state(2, 5)
    arguments = {"losses": torch.zeros(3), "t": torch.zeros(3, dtype=torch.int64)}
    arguments |= {"history": history, "counts": counts}
    with pytest.raises(ValueError, match=message):
        ops.record_losses(**{**arguments, **change})


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("ends", [torch.zeros(3), torch.zeros(0).long(), torch.zeros(2, 2).long()])
def test_wrong_ends_are_refused(ends):
    with pytest.raises(ValueError, match=r"ends is .*; expected contiguous int64 \[T\]"):
        ops.draw_weighted_timesteps(RNG, 3, ends)
