"""PyTorch's products in TF32, on any device."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from triton_kernels.tf32 import rounded_to_tf32

PRODUCTS = ("convolution", "mm", "attention")  # in the names of aten's ops, or their gradients'


def _rounded(x: object) -> object:
    """A float32 matrix or image; biases and what is no tensor as they are."""
    multiplied = isinstance(x, Tensor) and x.dtype == torch.float32 and x.ndim > 1
    return rounded_to_tf32(x) if multiplied else x


class ProductsInTF32(TorchDispatchMode):
    """Rounds what is multiplied, also in backward passes, and adds up in float32, as a GPU's tensor
    cores do. Attention's exponentials count as exact."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if any(product in name for product in PRODUCTS):
            args, kwargs = tree_map(_rounded, (args, kwargs or {}))
        return op(*args, **(kwargs or {}))
