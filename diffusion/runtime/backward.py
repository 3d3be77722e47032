"""The backward pass from a gradient that is given.

`torch.autograd.backward` does the same, but imports sympy to compare two shapes: seconds of the
start of a run. A PyTorch that has renamed its engine is asked in that way.
"""

import torch
from torch import Tensor
from torch.autograd import Variable


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Add to `grad` of all leaves that `output` depends on. ValueError: the shapes differ."""
    if output.shape != gradient.shape:
        shapes = f"{list(gradient.shape)} of a tensor {list(output.shape)}"
        raise ValueError(f"a gradient {shapes}; expected the tensor's shape")
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(output, gradient)
        return
    # False: the graph is freed; False: gradients have none; (): for all leaves
    engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
