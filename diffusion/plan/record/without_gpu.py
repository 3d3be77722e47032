"""Records in host memory what a module calls on a GPU, which need not be there.

In a rehearsal tensors of the host stand for a GPU's. Those of the recording say that they are on
`cuda:0`: a module may ask, and CUDA's autocast, which casts other ops than the CPU's, casts these
alone. It is in every build of PyTorch. What is missing without a GPU is set up here.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.cuda.amp import common

GPU = torch.device("cuda", 0)
_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


class _Nowhere(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = None  # it has no memory that an op could read


def tensor_there() -> Tensor:
    """A tensor that says so, for those that are asked where they are and do not."""
    return Tensor._make_wrapper_subclass(_Nowhere, (0,), device=GPU)


@contextmanager
def cuda_autocast(dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """torch.autocast("cuda"), also without a GPU."""
    with as_with_gpu(), torch.autocast("cuda", dtype, enabled=enabled):
        yield


@contextmanager
def as_with_gpu() -> Iterator[None]:
    """Within the block torch.autocast("cuda") casts, where it would warn that there is no GPU, and
    tensors without memory may be on one."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(patch.object(common, "amp_definitely_not_available", lambda: False))
            has_bf16 = patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
            stack.enter_context(has_bf16)
        if not torch.backends.cuda.is_built():
            stack.enter_context(_guarded())
        yield


@contextmanager
def _guarded() -> Iterator[None]:
    """PyTorch makes a tensor's device the current one before it indexes it, for example. Where CUDA
    is built in and no GPU is there, it makes that do nothing; elsewhere it looks for what does it
    in a table, and here finds that of `meta`, which does nothing either."""
    guards = (ctypes.c_void_p * (DeviceType.Meta.value + 1)).in_dll(ctypes.CDLL(_LIBRARY), _GUARDS)
    before = guards[DeviceType.CUDA.value]
    guards[DeviceType.CUDA.value] = guards[DeviceType.Meta.value]
    try:
        yield
    finally:
        guards[DeviceType.CUDA.value] = before
