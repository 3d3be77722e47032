"""Copies of filters for input gradients in TF32: many by one launch, and what is computed with
them."""

import pytest
import torch

from tests.kernels.poison import poison_outputs
from triton_kernels.conv import fused, stride2
from triton_kernels.conv.plain import transpose_weights
from triton_kernels.reference import fused as reference
from triton_kernels.tf32 import rounded_to_tf32

SHAPES = [(64, 64, 3, 3), (16, 132, 1, 1), (196, 4, 3, 3), (8, 72, 1, 5)]


def filters(*shape: int, device: torch.device) -> torch.Tensor:
    co, ci, r, s = shape
    return torch.randn(co, r, s, ci, device=device).permute(0, 3, 1, 2)


@pytest.fixture
def launched(monkeypatch):
    """The grids of the launches over several filters."""
    kernel, grids = transpose_weights._transpose_filters_kernel, []

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(transpose_weights, "_transpose_filters_kernel", Noting())
    return grids


def test_those_of_one_piece_of_memory_are_one_launch(device, monkeypatch, launched):
    """Wherever they lie in it, in any order, and with one that has its own."""
    poison_outputs(monkeypatch, transpose_weights)
    weights = [filters(*shape, device=device) for shape in SHAPES]
    whole = torch.full((sum(w.numel() for w in weights) + 64,), float("nan"), device=device)
    start, parts = 16, []
    for weight in weights:
        like = weight.permute(0, 2, 3, 1).shape
        part = whole[start : start + weight.numel()].view(like).permute(0, 3, 1, 2)
        parts.append(part.copy_(weight))
        start += weight.numel() + 12
    weights[1][0, 0] = parts[1][0, 0] = float("inf")
    weights[2][1, 2, 0] = parts[2][1, 2, 0] = float("nan")
    own = filters(32, 8, 3, 3, device=device)
    given, alike = [*parts[::-1], own], [*weights[::-1], own]
    for _ in range(2):
        made = transpose_weights.transposed_filters(given)
        for x, weight in zip(made, alike, strict=True):
            alone = transpose_weights.transpose_weights(weight, 1)[0]
            expected = reference.transposed_filters([rounded_to_tf32(weight)])[0]
            torch.testing.assert_close(x, alone, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
            assert x.stride() == alone.stride() and x.data_ptr() % 16 == 0
    assert launched == [(1 + 3 + 4 + 2, 9)] * 2
    assert transpose_weights.transposed_filters([]) == []


@pytest.mark.parametrize("kind", ["3x3", "1x1", "plain 3x3", "plain 1x1", "halved"])
def test_an_input_gradient_reads_the_copy(kind, device, monkeypatch):
    """With the bits that it has if it makes the copy itself, which it then does not."""
    torch.manual_seed(0)
    r = 1 if "1x1" in kind else 3
    weight = rounded_to_tf32(filters(32, 64, r, r, device=device).contiguous())
    weight = weight.contiguous(memory_format=torch.channels_last)
    dy, x = (torch.randn(1, 32, 32, c, device=device) for c in (32, 64))
    table = torch.randn(1, 4, 64, device=device)

    def computed(**copy):
        if kind == "halved":
            return (
                stride2.conv_down_input_grad(dy[:, ::2, ::2].contiguous(), weight, 1, x, **copy),
            )
        if kind.startswith("plain"):
            return (fused.conv_plain_input_grad(dy, weight, **copy),)
        norm = {"inputs": x, "table": table, "activation": "silu"}
        return fused.conv_input_grad(dy, weight, **norm, **copy)

    copies = transpose_weights.transposed_filters([weight])
    made, one = [], transpose_weights.transpose_weights
    monkeypatch.setattr(
        transpose_weights, "transpose_weights", lambda *a: made.append(a) or one(*a)
    )
    alone = computed()
    assert len(made) == 1
    given = computed(transposed=copies[0])
    assert len(made) == 1
    assert all(torch.equal(a, b) for a, b in zip(given, alone, strict=True))
    wrong = computed(transposed=torch.zeros_like(copies[0]))
    assert not torch.equal(wrong[0], alone[0])
