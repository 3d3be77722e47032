"""Compiles recorded launches in copies of this process, which need no GPU.

    with rehearsal(gpu) as launches:
        step(0)
    for number in compile_launches(launches, gpu.arch, processes=16):
        ...  # launches[number] is compiled

A copy (`fork`) shares this process's imports and recorded launches without using memory for them.
It requests the next launch when it has compiled one, so no copy waits for another's slow kernels.
The code that passes arguments to a kernel is compiled too, where each kernel has its own. Triton
would ask a driver for the chip; here the chip is given, and neither this process nor its copies
create a context on the GPU, which takes memory and seconds.
"""

import hashlib
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from .hardware import WARP
from .launch_recorder import Launch, compiled_for

_NUMBER = struct.Struct("<i")  # of a launch, in a pipe; negative: one that did not compile


class ChipWithoutDriver:
    """What of a driver Triton's compiler asks for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(
    launches: Sequence[Launch],
    arch: int,  # compute capability, ten times
    processes: int,
) -> Iterator[int]:
    """Compile all into Triton's cache; yields the number of each when it is done, those in front
    first, more or less.

    Raises RuntimeError, after all others are done, if one could not be compiled. Call it where CUDA
    has not been used: a copy of a process that has cannot use it."""
    triton.runtime.driver.set_active(ChipWithoutDriver(arch))
    todo = _numbers(len(launches))
    done, report = os.pipe()
    copies = [_copy(launches, todo, done, report) for _ in range(min(processes, len(launches)))]
    os.close(todo), os.close(report)
    failed = 0
    try:
        while data := os.read(done, _NUMBER.size):
            number = _NUMBER.unpack(data)[0]
            failed += number < 0
            if number >= 0:
                yield number
    finally:
        os.close(done)  # a copy that has more to say then ends
        codes = [os.waitpid(copy, 0)[1] for copy in copies]
    if failed or any(codes):
        raise RuntimeError(f"{failed} kernels did not compile; {sum(map(bool, codes))} copies died")


def compile_unclaimed(launches: Sequence[Launch], arch: int, folder: Path) -> None:
    """Compile those that no other process has claimed, by a file in `folder`, in this process.
    What does not compile is said on standard error."""
    triton.runtime.driver.set_active(ChipWithoutDriver(arch))
    for number, launch in enumerate(launches):
        what = repr(compiled_for(*launch))
        try:
            (folder / hashlib.sha256(what.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            continue
        _compiled(launches, number)


def _numbers(count: int) -> int:
    """A file from which each of 0 .. count - 1 is read once, by whichever copy asks first: they
    share the place in it."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(map(_NUMBER.pack, range(count))))
        file.flush()
        todo = os.dup(file.fileno())
    os.lseek(todo, 0, os.SEEK_SET)
    return todo


def _copy(launches: Sequence[Launch], todo: int, done: int, report: int) -> int:
    """Fork; returns the copy's process id. It ends when nothing is to do, or nobody reads."""
    copy = os.fork()
    if copy:
        return copy
    code = 1
    try:
        os.close(done)
        torch.set_num_threads(1)
        while data := os.read(todo, _NUMBER.size):
            number = _NUMBER.unpack(data)[0]
            os.write(report, _NUMBER.pack(_compiled(launches, number)))
        code = 0
    except BrokenPipeError:  # nobody waits any more
        code = 0
    finally:
        os._exit(code)  # without what this process would do at its end


def _compiled(launches: Sequence[Launch], number: int) -> int:
    """The number, or -1 if Triton could not compile it; what it said is on standard error."""
    try:
        compiled = launches[number].compile()
    except Exception as error:  # whatever the compiler raises
        said: Any = f"{launches[number].kernel.fn.__name__}: {type(error).__name__}: {error}"
        print(said[-1000:], file=sys.stderr, flush=True)
        return -1
    _build_launcher(compiled)
    return number


def _build_launcher(compiled: Any) -> None:
    """Triton 3.6 passes the arguments of a kernel by C code of its own, compiled when the kernel is
    first launched: 0.2 s each, one after the other. From 3.7 on one function passes all."""
    if not hasattr(nvidia, "make_launcher"):
        return
    try:
        nvidia.CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # no C compiler, no driver to link: it is left to the launch
        said = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"a launcher is not built ahead: {said}"[:500], file=sys.stderr, flush=True)
