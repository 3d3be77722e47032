"""The kernels of a planned network that multiplies float32 in float32.

A product is three TF32 products of two parts of each number (`conv.plain.tf32x3`), or a chain of
FMAs, and never a single TF32 product. Nothing is rounded, and parameters are read directly. What is
for 16-bit types and TF32 alone refuses float32.
"""

from functools import partial
from inspect import isfunction, signature
from types import ModuleType, SimpleNamespace


def in_float32(kernels: ModuleType) -> SimpleNamespace:
    """`fused_ops` with products of float32 that are not rounded to TF32."""
    named = {name: value for name, value in vars(kernels).items() if not name.startswith("_")}
    ops = {name: op for name, op in named.items() if isfunction(op)}
    products = {name: op for name, op in ops.items() if "allow_tf32" in signature(op).parameters}
    exact = {name: partial(op, allow_tf32=False) for name, op in products.items()}
    return SimpleNamespace(**named | exact)
