"""Triton's interpreter sees of float32 numbers what tensor cores do.

It multiplies in float32 whatever is to be in TF32, so that a product that is in TF32 by mistake
would be as exact as any. Here 13 bits of what such a product reads are cut off.
"""

import numpy as np
import pytest
import torch


@pytest.fixture
def tensor_cores_cut_off(monkeypatch):
    """In the interpreter too, a product in TF32 reads no more than the bits of TF32."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def cut_off(handle):
        if handle.data.dtype != np.float32:
            return handle
        bits = handle.data.view(np.int32) & np.int32(-0x2000)
        return type(handle)(bits.view(np.float32), handle.dtype)

    def create_dot(self, a, b, d, input_precision, *rest):
        if "TF32" in str(input_precision):
            a, b = cut_off(a), cut_off(b)
        return multiply(self, a, b, d, input_precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
