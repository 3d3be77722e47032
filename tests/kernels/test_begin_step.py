"""The begin of a step, against `reference.fused`."""

import pytest
import torch

from triton_kernels.embedding import begin_step
from triton_kernels.reference import fused as fused_reference
from triton_kernels.tf32 import rounded_to_tf32

from .small_batch import pytestmark, randn  # noqa: F401  a mark for every test here


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (1, 20, 20, 1), (3, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("indexed", [False, True])
def test_begin_step(shape, indexed, device):
    x = randn(*shape, device=device)
    table, row = randn(4, 5, 300, device=device), torch.tensor([2], device=device)
    index = torch.arange(shape[0], device=device).flip(0) if indexed else None
    arguments = (x, 16, torch.float16, table, row, index)
    made = begin_step.begin_step(*arguments), fused_reference.begin_step(*arguments)
    for got, expected in zip(*made, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    image, emb = begin_step.begin_step(x, 16, torch.float16)
    assert emb is None and torch.equal(image, fused_reference.begin_step(*arguments[:3])[0])


def test_images_of_a_step_are_rounded_to_tf32(device):
    x = randn(2, 3, 5, 3, device=device)
    image, _ = begin_step.begin_step(x, 16, torch.float32, tf32=True)
    assert torch.equal(image[..., :3], rounded_to_tf32(x)) and not image[..., 3:].any()
