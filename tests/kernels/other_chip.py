"""Run another chip's code on the GPU of this machine.

    python -m tests.kernels.other_chip 80 MODULE [ARGUMENT ...]    as python -m MODULE ...

Within `other_chip` Triton compiles for that older chip down to PTX, and ptxas makes machine code of
it for the GPU that there is; launchers take the GPU for one with that chip's units and shared
memory, and programs ask for so much of it that a multiprocessor here has room for as many as one
there. The speed says what those instructions do here, and nothing of the chip's own clocks, caches
and memory. PTX for a newer chip has instructions that ptxas refuses (sm_120 on sm_90: additions of
float32 and bfloat16).
"""

import gc
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction

from triton_kernels.runtime.device import Device, standing_for

from .compile_only import SHARED_LIMIT

_CROWDED = 8  # programs on a multiprocessor; of more there are too few registers anyway


@contextmanager
def other_chip(
    arch: int,  # compute capability, 80 or 89
    host: int | None = None,  # that of the GPU that is there; None: asked of it
    num_sms: int | None = None,  # likewise
) -> Iterator[None]:
    """Within the block kernels are those of another chip."""
    if host is None:
        host = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    if num_sms is None:
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    make_cubin, make_hash = CUDABackend.make_cubin, CUDABackend.hash

    def assembled(self, source, metadata, options, capability):
        metadata["shared"] = _as_crowded(metadata["shared"], arch, host)
        return make_cubin(self, source, metadata, options, host)

    chip = Device(False, num_sms, SHARED_LIMIT[arch], arch=arch)
    with ExitStack() as stack:
        target = GPUTarget("cuda", arch, 32)
        for place, name, value in (
            (CudaDriver, "get_current_target", lambda self: target),
            (CUDABackend, "make_cubin", assembled),
            (CUDABackend, "hash", lambda self: f"{make_hash(self)}-as-on-{host}"),
        ):
            stack.enter_context(patch.object(place, name, value))
        stack.enter_context(standing_for(chip, rehearses=False))
        _forget_kernels()
        try:
            yield
        finally:
            _forget_kernels()


def _as_crowded(shared: int, arch: int, host: int) -> int:
    """Bytes of a program of which a multiprocessor of `host` holds no more than one of `arch` does
    of programs of `shared` bytes. The driver takes 1 KiB of each."""
    there, here = SHARED_LIMIT[arch] + 1024, SHARED_LIMIT[host] + 1024
    programs = there // (shared + 1024)
    return max(shared, here // programs - 1024) if 0 < programs <= _CROWDED else shared


def _forget_kernels() -> None:
    """What is compiled is looked up by the device, which stays the same."""
    for kernel in gc.get_objects():
        if issubclass(type(kernel), JITFunction):  # some objects warn when asked for their class
            kernel.device_caches.clear()


def main() -> None:
    chip, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with other_chip(int(chip)):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
