"""A step at a large batch is the sum of its parts: no offset of a kernel overflows. What the last
images add to it is seen alone, too, where hardly anything hides it."""

import pytest
import torch

from benchmarks import steps
from benchmarks.harness import relative_error
from benchmarks.stopwatch import release_memory
from diffusion.runtime.distributed import Processes

GIB = 2**30


def gradient(batch, part):
    """(loss, gradient) of the first step of unet64, so many images at a time."""
    release_memory()
    device = torch.device("cuda")
    step = steps.our_step(
        steps.our_model("unet64", "bf16", device, 64),
        batch,
        64,
        device,
        Processes(None),
        accumulate=batch // part,
    )
    loss, _ = step.plain(0)
    return loss.clone(), step.plain.flat.grad.clone()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "memory"),
    [(512, 20), (2816, 100)],  # [2816, 64, 64, 192] has more than 2^31 elements
)
def test_a_large_batch_is_its_parts(batch, memory):
    """Parts of 128 and of 32 images are summed in orders, and by tiles, of their own, which says
    how far sums may be apart. An offset that overflows would be another size of error."""
    free, _ = torch.cuda.mem_get_info()
    if free < memory * GIB:
        pytest.skip(f"needs about {memory} GiB of GPU memory, {free / GIB:.0f} are free")
    whole, some, more = (gradient(batch, part) for part in (batch, 128, 32))
    for name, a, b, c in zip(("loss", "gradient"), whole, some, more, strict=True):
        assert relative_error(a, b) <= 2 * relative_error(b, c) + 1e-5, name


class Part:
    """One process of several, as a step sees them: positions first .. first + count of a batch."""

    count = 1
    start_sum = Processes.start_sum

    def __init__(self, first, count):
        self.share_of = lambda batch: (first, count)


def gradient_of_last(batch, last, part, *, whole, **network):
    """Of the first step, summed over the last images of a batch alone: in a pass over all of them
    with a weight of 0 for the others, or over these, so many at a time."""
    release_memory()
    device = torch.device(network.get("device", "cuda"))
    model = steps.our_model(**{**NETWORK, **network, "device": device})
    images = Part(0, batch) if whole else Part(batch - last, last)
    size, accumulate = model.image_size[0], 1 if whole else last // part
    step = steps.our_step(model, batch, size, device, images, accumulate=accumulate).plain
    weights = step._share
    weights.fill_(1 / last)
    if whole:
        weights[: batch - last] = 0
    step(0)
    return step.flat.grad.clone()


NETWORK = {"model": "unet64", "precision": "bf16", "size": 64}


def test_the_last_images_alone():
    small = {"model": "unet_tiny", "precision": "fp32", "size": 16, "backend": "torch"}
    small |= {"device": "cpu"}
    seen = gradient_of_last(10, 4, 4, whole=True, **small)
    alone, other = (gradient_of_last(n, 4, 2, whole=False, **small) for n in (10, 9))
    assert relative_error(seen, alone) < 1e-5 < 1e-2 < relative_error(other, alone)


@pytest.mark.gpu
def test_the_last_images_of_a_large_batch():
    free, _ = torch.cuda.mem_get_info()
    if free < 100 * GIB:
        pytest.skip(f"needs about 100 GiB of GPU memory, {free / GIB:.0f} are free")
    seen = gradient_of_last(2816, 128, 128, whole=True)
    some, more = (gradient_of_last(2816, 128, part, whole=False) for part in (128, 32))
    assert relative_error(seen, some) <= 2 * relative_error(some, more) + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "size"), [("unet64_wide", 64), ("unet32", 32)])
def test_the_models_of_the_benchmarks_are_right(model, size):
    """Output and gradient against float32; raises if they are off."""
    steps.check_ours(model, "bf16", torch.device("cuda"), batch=4, size=size)
