"""Where the versions of Triton differ in what the Gluon kernels use: 3.6 to 3.9 were tried.

The kernels are written for the newest of them; what an older one has under another name is found
here. Importing this module fails if Triton has something under no name that is known, and then
there are no Gluon kernels (`descriptors.SUPPORTED`). Whether a compiler gets them right is not a
question of its version: `runtime.canary` runs some of them.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Wait for all threads of a partition: `barrier` from 3.7 on.
sync_threads = getattr(gl, "barrier", None) or gl.thread_barrier

# Shared memory seen with another type, shape and layout, (buffer, dtype, shape, layout): a public
# method from 3.9 on.
_Buffer = gl.shared_memory_descriptor
reinterpret = getattr(_Buffer, "reinterpret", None) or _Buffer._reinterpret

# Copies by the TMA unit to shared memory, (descriptor, place, barrier, buffer), and from it,
# (descriptor, place, buffer); by cp.async to it, (buffer, pointers). Shorter names from 3.8 on.
tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
tma_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
_copy = ampere.async_copy
cp_async = getattr(_copy, "async_load", None) or _copy.async_copy_global_to_shared


@builtin
def view_from(buffer, item, shape, layout, _semantic=None):
    """The memory from a buffer's `item`-th item on, seen with another shape and layout. It may be
    larger than an item."""
    start = buffer.index(item, _semantic=_semantic)
    return reinterpret(start, buffer.dtype, shape, layout, _semantic=_semantic)


# What the kernels take from Triton themselves, besides the language.
USED = (
    TensorDescriptor,
    ampere.async_copy.commit_group,
    ampere.async_copy.wait_group,
    ampere.mma_v2,
    hopper.fence_async_shared,
    hopper.mbarrier,
    hopper.tma.store_wait,
    hopper.warpgroup_mma,
    hopper.warpgroup_mma_wait,
)
