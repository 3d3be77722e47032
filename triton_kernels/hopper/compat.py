"""Differences between the Triton versions 3.6 to 3.9 in what the Gluon kernels use.

Kernels use the newest version's names, and this module provides them in older versions. If Triton
has a function under no known name, importing this module fails, and Gluon kernels are disabled
(`descriptors.SUPPORTED`). Whether a compiler compiles them correctly does not follow from its
version: `canary` runs some of them.
"""

from math import prod

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

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


# Classes whose values a kernel hands from function to function, with methods; public from 3.8 on.
_aggregate = getattr(gluon, "aggregate", None) or core._aggregate


def aggregate(cls):
    """A class of named values, each a tensor, a pointer, a descriptor, a buffer, a constexpr, None
    or a tuple of these. Its constructor takes them in order or by name: that of Triton 3.8, which
    older versions want to be written. Fields that are a `gl.constexpr` are known to the compiler;
    what else annotations say is for the reader. (Before 3.9 a kernel's hash has its methods but
    not its fields: whoever changes the order of these alone clears Triton's cache.)"""
    names = list(cls.__annotations__)

    def __init__(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(names) or given.keys() != set(names):
            raise TypeError(f"{cls.__name__} takes {', '.join(names)}; not {', '.join(given)}")
        for name in names:
            setattr(self, name, _as_value(given[name]))

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    cls.__annotations__ = {
        name: kind if kind is gl.constexpr else core.base_value
        for name, kind in cls.__annotations__.items()
    }
    return _aggregate(cls)


def _as_value(x):
    return x if isinstance(x, core.base_value) else gl.constexpr(x)


# Views of shared memory that overlap, as what the taps of a filter see does. A view is as large as
# many items of its buffer and begins at any of them.
#
# Up to 3.7 it is an item, reinterpreted. From 3.8 on that may not be larger than the item. In 3.8 a
# layout can say that an item is large: with bases that are zero it is laid out over as much memory
# as the view, though the step from one item to the next stays its size. The sizes of whole buffers
# have to be equal as well, so the buffer too says more than it takes. In 3.9 the step would grow
# with the layout. There a view is a slice of items, which begins at a constant, of a larger slice:
# that of each place where views can begin, of which one is chosen. (An analysis of the compiler's
# takes a time that grows faster than the number of choices.)
_SLICES = hasattr(_Buffer, "reinterpret")  # from 3.9 on
_ZERO_BASES = hasattr(hopper.tma, "async_load") and not _SLICES  # 3.8
VIEWS_ARE_SLICES = gl.constexpr(_SLICES)
_REPEATS = 256  # items that a view has at most, if the whole buffer is declared so


# (What Triton calls a builtin is no part of a kernel's hash: whoever changes what one does renames
# it.)
@builtin
def allocate_for_views(dtype, shape, layout, _semantic=None):
    """Shared memory of shape[0] items of which `view_from` takes views; its shape may say more."""
    items, *item = _numbers(shape)
    if not _ZERO_BASES:
        return gl.allocate_shared_memory(dtype, [items, *item], layout, _semantic=_semantic)
    declared = _spread(prod(item), _REPEATS)
    buffer = gl.allocate_shared_memory(dtype, [items, prod(item)], declared, _semantic=_semantic)
    return reinterpret(buffer, dtype, [items * _REPEATS, *item], layout, _semantic=_semantic)


@gluon.jit
def view_from(
    buffer, first, shape: gl.constexpr, layout: gl.constexpr,
    more: gl.constexpr = 0, step: gl.constexpr = 1, count: gl.constexpr = None,
):  # fmt: skip
    """The memory from a buffer's item `first` + more on, seen with another shape and layout.
    `first` is one of so many multiples of step, 0 among them; None: of all that there are. With 3.9
    it is compared with each, once for all views of a `first`. Where these would be many, `first`,
    step and count are tuples: of a sum, whose terms are compared one after the other."""
    ITEMS: gl.constexpr = items_of_view(buffer.shape, shape)
    if not VIEWS_ARE_SLICES or ITEMS <= 1:
        return _view_of_item(buffer, _sum(_terms(first)) + more, shape, layout)
    else:
        # What is chosen holds all views of one beginning, so that the compiler chooses once.
        for i in gl.static_range(len(_terms(first))):
            buffer = _chosen(
                buffer, _terms(first)[i], _terms(step)[i], _terms(count)[i], more + ITEMS
            )
        return _view_of_slice(buffer, more, ITEMS, shape, layout)


@gluon.jit
def _chosen(buffer, first, step: gl.constexpr, count: gl.constexpr, items: gl.constexpr):
    """The slice from `first` on, which is as long as that from the last multiple on. None: there
    are as many as leave it so many items."""
    COUNT: gl.constexpr = count or (buffer.shape[0] - items) // step + 1
    SPAN: gl.constexpr = buffer.shape[0] - (COUNT - 1) * step
    chosen = buffer.slice(0, SPAN)
    for i in gl.static_range(1, COUNT):
        if first == i * step:
            chosen = buffer.slice(i * step, SPAN)
    return chosen


@builtin
def _terms(given, _semantic=None):
    """A tuple of what is one already, or a single term."""
    given = given.value if isinstance(given, gl.constexpr) else given
    terms = list(given) if isinstance(given, (tuple, core.tuple)) else [given]
    return core.tuple([_as_value(term) for term in terms])


@gluon.jit
def _sum(terms):
    if len(terms) == 1:
        return terms[0]
    else:
        return terms[0] + _sum(terms[1:])


@builtin
def _view_of_item(buffer, item, shape, layout, _semantic=None):
    count, *inner = _numbers(buffer.shape)
    size = prod(inner)
    shape = _numbers(shape)
    items = prod(shape) // size
    if _ZERO_BASES and items > 1:
        spread = _spread(size, items)
        buffer = reinterpret(
            buffer, buffer.dtype, [count // items, size], spread, _semantic=_semantic
        )
    start = buffer.index(item, _semantic=_semantic)
    return reinterpret(start, buffer.dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def _view_of_slice(
    buffer, first: gl.constexpr, items: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr
):
    return reinterpret(buffer.slice(first, items), buffer.dtype, shape, layout)


@gluon.constexpr_function
def items_of_view(buffer, view):
    """Of a buffer of this shape, in a view of that one; 0: the view is a part of one."""
    size = 1
    for length in view:
        size *= length
    for length in buffer[1:]:
        size //= length
    return size


def _numbers(shape):
    """As Python's own, of constants. (A tuple of 3.6 takes any attribute for a name of an item.)"""
    sizes = shape.value if isinstance(shape, gl.constexpr) else shape
    return [size.value if isinstance(size, gl.constexpr) else size for size in sizes]


def _spread(size, items):
    """The layout of so many numbers in a row, laid out over the memory of so many items."""
    bases = [[1 << i] for i in range(size.bit_length() - 1)]
    return gl.SharedLinearLayout(bases + [[0]] * (items.bit_length() - 1), [], 1024)


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
