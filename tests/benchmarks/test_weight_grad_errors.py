"""What weight gradients are held against."""

import torch

from benchmarks import weight_grad_errors


def test_the_exact_gradient():
    shape = (weight_grad_errors._CHUNK + 3, 5, 6)  # more than one chunk
    x, dy = (torch.randn(*shape, c) for c in (4, 7))
    x64, dy64 = (t.double().permute(0, 3, 1, 2) for t in (x, dy))
    for side in (1, 3):
        found = weight_grad_errors.weight_grad(x, dy, side)
        expected = torch.nn.grad.conv2d_weight(x64, (7, 4, side, side), dy64, padding=side // 2)
        torch.testing.assert_close(found, expected.permute(0, 2, 3, 1))


def test_operands_depend_on_the_batch_alone():
    first, again = (
        weight_grad_errors.operands(3, 4, 8, torch.bfloat16, torch.device("cpu")) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
