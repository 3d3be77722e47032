"""Reads a view of shared memory that begins at an item of a buffer.

    python -m tests.kernels.views_kernel    for sm_90: a JSON line {"items of a view, item": bytes}

which has the distance from the buffer's beginning to where a thread without an offset reads.
"""

import json
import re
from itertools import product

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_kernels.hopper.compat import allocate_for_views, sync_threads, view_from

COUNT, ROWS, CHANNELS = 21, 16, 64  # items, and the numbers of one
ITEMS = (1, 2, 4)  # of a view
PLACES = (0, 1, 7, 16, 17)  # of 21 - 4 that there are at most


@gluon.jit
def copy_view(
    x_ptr, y_ptr, item, PLACE: gl.constexpr, TERMS: gl.constexpr,
    ITEMS: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """x [COUNT, ROWS, CHANNELS] -> y, ITEMS of them from `item`, or from PLACE, on. TERMS: that is
    given as a multiple of 8 and what is more. x of None: of memory that nobody has written."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, LINES))[None, :]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))[:, None]
    buffer = allocate_for_views(gl.bfloat16, [COUNT, ROWS, CHANNELS], MATRIX)
    if x_ptr is not None:
        for i in range(COUNT):
            buffer.index(i).store(gl.load(x_ptr + (i * ROWS + row) * CHANNELS + column))
        sync_threads()
    if TERMS:
        place = item if PLACE is None else PLACE
        eights = 8 if place >= 8 else 0
        first = (eights, place - eights)
        view = view_from(buffer, first, [ITEMS * ROWS, CHANNELS], MATRIX, 0, (8, 1), (2, 10))
    elif PLACE is None:
        view = view_from(buffer, item, [ITEMS * ROWS, CHANNELS], MATRIX)
    else:  # also as so many items behind one that is a multiple of 4
        FIRST: gl.constexpr = PLACE // 4 * 4
        view = view_from(buffer, FIRST, [ITEMS * ROWS, CHANNELS], MATRIX, PLACE - FIRST, 4)
    row = gl.arange(0, ITEMS * ROWS, layout=gl.SliceLayout(1, LINES))[:, None]
    gl.store(y_ptr + row * CHANNELS + column, view.load(LINES))


def beginnings() -> dict[str, bool]:
    """Compiled for sm_90: whether the machine code has the distance of each view's first byte from
    the first of the buffer. A view's place is known there, so nothing is left to compute."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = dict.fromkeys(copy_view.arg_names, "constexpr")
    signature |= {"y_ptr": "*bf16", "item": "i32"}
    found = {}
    for items, place, terms in product(ITEMS, PLACES[1:], (False, True)):
        given = {"x_ptr": None, "PLACE": place, "TERMS": terms, "ITEMS": items, "COUNT": COUNT}
        given |= {"ROWS": ROWS, "CHANNELS": CHANNELS}
        constants = {(copy_view.arg_names.index(name),): n for name, n in given.items()}
        source = GluonASTSource(copy_view, signature, constants)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        bytes_before = place * ROWS * CHANNELS * 2
        said = f"{items} from {place} on{' as a sum' if terms else ''}"
        found[said] = bool(re.search(rf"\b{bytes_before}\b", code))
    return found


if __name__ == "__main__":
    print(json.dumps(beginnings()))
