"""The order of the data: a function of the sample counter, a permutation in every epoch."""

import numpy as np
import pytest
import torch

from diffusion.data import ImageSet, sample_index
from diffusion.data.batches import Batches
from diffusion.data.order import epoch_permutation


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_every_epoch_is_a_permutation(n):
    index = sample_index(3, np.arange(4 * n), n).reshape(4, n)
    assert np.array_equal(np.sort(index, axis=1), np.tile(np.arange(n), (4, 1)))


def test_epochs_and_seeds_differ():
    a, b = epoch_permutation(0, 0, 100), epoch_permutation(0, 1, 100)
    assert not np.array_equal(a, b) and not np.array_equal(a, epoch_permutation(1, 0, 100))
    assert not np.array_equal(epoch_permutation(2**32, 0, 100), epoch_permutation(0, 0, 100))


@pytest.mark.parametrize("batch", [1, 3, 10, 64], ids=lambda b: f"batch {b}")
def test_any_batch_size_and_any_split_sees_the_same_sequence(batch):
    """Also a batch of several epochs (64 of 10 images), and shares of it as ranks would take."""
    whole = sample_index(5, np.arange(640), 10)
    steps = [sample_index(5, np.arange(i, i + batch), 10) for i in range(0, 640 - batch, batch)]
    assert np.array_equal(np.concatenate(steps), whole[: len(steps) * batch])
    ranks = [sample_index(5, np.arange(r, 640, 4), 10) for r in range(4)]
    assert np.array_equal(np.stack(ranks, axis=1).ravel(), whole)


@pytest.mark.parametrize("resident_bytes", [2**30, 0], ids=["on the device", "gathered"])
def test_a_batch_size_that_changes_skips_and_repeats_nothing(resident_bytes):
    """Two batches of 4, then batches of 3: images of which each is a number."""
    data = ImageSet(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1))

    def seen(batches, step):
        batches.load(step)
        images, index, _ = batches.part(0, batches.batch_size)
        return (images if index is None else images[index]).flatten().tolist()

    before, after = (
        Batches(data, size, 5, torch.device("cpu"), resident_bytes=resident_bytes, begins=begins)
        for size, begins in ((4, 0), (3, 8 - 2 * 3))
    )
    images = [i for step in range(2) for i in seen(before, step)]
    images += [i for step in range(2, 6) for i in seen(after, step)]
    assert images == sample_index(5, np.arange(20), 10).tolist()
    assert sorted(images[:10]) == sorted(images[10:]) == list(range(10))


def test_far_ahead_needs_nothing_before_it():
    start = 7 * 10**12 + 3
    index = sample_index(0, np.arange(start, start + 20, dtype=np.int64), 10)
    assert index.min() >= 0 and index.max() < 10


def test_the_order_is_the_same_everywhere():
    """Recorded once; Philox and a stable sort of integers know no platform."""
    assert epoch_permutation(0, 0, 10).tolist() == [9, 4, 3, 5, 6, 8, 2, 0, 1, 7]
    assert epoch_permutation(2**40 + 1, 3, 10).tolist() == [0, 5, 7, 2, 3, 8, 9, 1, 4, 6]


def test_each_position_is_about_uniform():
    counts = np.zeros((5, 5), int)
    for epoch in range(500):
        counts[np.arange(5), epoch_permutation(1, epoch, 5)] += 1
    assert np.abs(counts - 100).max() < 45  # 5 standard deviations of a binomial (500, 1/5)


def test_the_cached_order_cannot_be_written():
    with pytest.raises(ValueError):
        epoch_permutation(0, 0, 4)[0] = 1
