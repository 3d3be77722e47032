"""Every public op has its twin in reference.py, with the same parameters."""

import inspect

import pytest

import triton_kernels
from triton_kernels import reference

OPS = [name for name in triton_kernels.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", OPS)
def test_twin_has_the_same_signature(name):
    ours = inspect.signature(getattr(triton_kernels, name))
    twin = inspect.signature(getattr(reference, name))
    described = [
        [(p.name, p.kind, p.default) for p in signature.parameters.values()]
        for signature in (ours, twin)
    ]
    assert described[0] == described[1]
