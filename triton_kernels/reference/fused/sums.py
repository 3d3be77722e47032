"""Sums over rows, and the gradients of a linear layer."""

from .norms import put


class RowSums:
    """Sums over rows that go into the flat gradient at `flush`; here they are added at once."""

    def __init__(self, grad):
        self.grad, self.kept = grad, []

    def flush(self, last=True):
        """All that was asked for has been added."""


def bias_grad(rows, out, accumulate=False, sums=None):
    """The sum of rows [rows, C], into or added to `out` [C or fewer]."""
    put(out, rows.sum(0)[: len(out)], accumulate)


def linear_grads(x, dy, weight, grad_weight, grad_bias, need_dx=True):
    """The gradient of x in y = x weight^T + bias, or None; the other two are added to."""
    put(grad_weight, dy.T @ x, True)
    put(grad_bias, dy.sum(0), True)
    return dy @ weight if need_dx else None


def tensor_rows(x, sums):
    """Rows [N, C] whose sum is that of x [N, ..., C] over all but the channels."""
    return x.reshape(len(x), -1, x.shape[-1]).sum(1)
