"""What a test of plans can run them on: the reference, the kernels in the interpreter, a GPU."""

import pytest
import torch

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
RUNS = (
    "reference",
    pytest.param("interpreter", marks=interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
