"""Limits that all GPUs share for which kernels are compiled: facts, which no measurement changes.
What differs between chips is in `device`.

References:
    CUDA C++ Programming Guide, "Compute Capabilities", https://docs.nvidia.com/cuda
    PTX ISA, "Tensors" (boxes of TMA), https://docs.nvidia.com/cuda/parallel-thread-execution
"""

WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor, of 32 bits
THREAD_REGISTERS = 255  # at most
# Bytes of shared memory that a program takes beside its buffers: barriers, what the compiler wants
# for itself, and what the driver keeps
BESIDE_BUFFERS = 1024
SECTOR = 32  # bytes that memory and the L2 cache deliver at a time
# Bytes that a thread loads at once, at most, and from a multiple of them. TMA, too, reads tensors
# that begin at such multiples, with rows that are multiples.
VECTOR = 16
BOX_SIDE = 256  # elements of a side of a box of TMA, at most


def thread_registers(threads: int) -> int:
    """Of a thread, at most, where so many share a multiprocessor: they come in eights."""
    return REGISTERS // threads // 8 * 8
