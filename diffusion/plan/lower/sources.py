"""Where a view's elements were before nodes that only move them: such as in the product of q, k and
v, parts of which a module has copied to multiply them with a number."""

from ..graph import Makers, Node
from ..views import Piece, View, merged, strides, whole


def source(x: View, makers: Makers, *also: str) -> View:
    """The same elements in the first value that has them, through slices, copies in another order
    and nodes that are `also` to be left out."""
    while (node := makers.get(x.value)) is not None:
        if node.op in ("reshape", *also):
            x = View(makers.behind(x.value, node.op), x.dims, x.offset)
            if makers.get(x.value) is node:  # a cast that changes numbers
                return x
            continue
        before = _moved(node)
        found = None if before is None else _through(x, before)
        if found is None:
            return x
        x = found
    return x


def _moved(node: Node) -> View | None:
    """The elements of a node's value, row by row, in what it moves them from."""
    attrs = node.attrs
    if node.op == "layout":
        dims = tuple((piece,) for piece in attrs["pieces"])
        return View(node.inputs["x"], dims, attrs["offset"])
    if node.op == "slice":
        at = attrs["axis"]
        return whole(node.inputs["x"]).narrow(at, attrs["start"], attrs["stop"])
    return None


def _through(x: View, before: View) -> View | None:
    """A view of a value whose elements, row by row, are `before`; None: no steps say it."""
    pieces = before.pieces
    steps = strides([n for n, _ in pieces])
    offset, rest, used = before.offset, x.offset, [0] * len(pieces)
    for i, ((_, far), step) in enumerate(zip(pieces, steps, strict=True)):
        used[i], rest = divmod(rest, step)
        offset += used[i] * far
    dims = []
    for dim in x.dims:
        found: list[Piece] = []
        for n, step in reversed(dim):
            for i in range(len(pieces) - 1, -1, -1):
                (size, far), near = pieces[i], steps[i]
                if n == 1 or step == 0 or not near <= step < near * size:
                    continue
                if step % near or (step // near * n > size and size % (step // near)):
                    return None
                take = min(n, size // (step // near))
                if n % take:
                    return None
                used[i] += (take - 1) * (step // near)
                found.append((take, far * (step // near)))
                n, step = n // take, near * size
            if n > 1:
                if step:
                    return None
                found.append((n, 0))
        dims.append(merged(tuple(found[::-1])))
    fits = all(last < size for last, (size, _) in zip(used, pieces, strict=True))
    return View(before.value, tuple(dims), offset) if fits else None
