"""A step at a large batch is the sum of its parts: no offset of a kernel overflows."""

import pytest
import torch

from benchmarks import steps
from benchmarks.harness import relative_error, release_memory
from diffusion.distributed import Processes

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


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "size"), [("unet64_wide", 64), ("unet32", 32)])
def test_the_models_of_the_benchmarks_are_right(model, size):
    """Output and gradient against float32; raises if they are off."""
    steps.check_ours(model, "bf16", torch.device("cuda"), batch=4, size=size)
