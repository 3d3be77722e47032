"""Views: a module's tensor as strides in the memory of a value.

A module permutes, reshapes, slices, expands and selects without moving data, and so does its trace:
a view has, for each dimension, its strides in the value. Only an op that cannot read a view, such
as a convolution of an image that is not NHWC, makes a copy (`Views.gather`). Most permutes of a
module cancel.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .graph import Graph, Value

Piece = tuple[int, int]  # so many steps, of so many elements each
Dim = tuple[Piece, ...]  # a dimension: its pieces, the outermost first; none if it has length 1


@dataclass(frozen=True)
class View:
    """A tensor whose element i, j, ... is in `value` at offset + steps."""

    value: Value
    dims: tuple[Dim, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(dim) for dim in self.dims)

    @property
    def pieces(self) -> Dim:
        return tuple(piece for dim in self.dims for piece in dim)

    @property
    def is_all(self) -> bool:
        """Whether it has every element of its value, once."""
        return self.offset == 0 and (
            math.prod(n for n, step in self.pieces if step) == self.value.numel
        )

    def permute(self, order: Sequence[int]) -> "View":
        return View(self.value, tuple(self.dims[i] for i in order), self.offset)

    def insert(self, at: int) -> "View":
        """A dimension of length 1 in that place."""
        return View(self.value, (*self.dims[:at], (), *self.dims[at:]), self.offset)

    def drop(self, at: int) -> "View":
        assert length(self.dims[at]) == 1
        return View(self.value, self.dims[:at] + self.dims[at + 1 :], self.offset)

    def expand(self, shape: Sequence[int]) -> "View":
        dims = ((),) * (len(shape) - len(self.dims)) + self.dims
        dims = tuple(
            ((n, 0),) if length(dim) == 1 and n != 1 else dim
            for dim, n in zip(dims, shape, strict=True)
        )
        return View(self.value, dims, self.offset)

    def reshape(self, shape: Sequence[int]) -> "View | None":
        """The same elements, row by row, under another shape; None if steps do not say it."""
        rest, dims = list(self.pieces), []
        for n in reversed(shape):
            dim: list[Piece] = []
            while n > 1:
                size, step = rest.pop()
                take = math.gcd(size, n)
                if take == 1 or (take != size and take != n):
                    return None
                if take < size:
                    rest.append((size // take, step * take))
                dim.append((take, step))
                n //= take
            dims.append(merged(tuple(reversed(dim))))
        return View(self.value, tuple(reversed(dims)), self.offset)

    def narrow(self, at: int, start: int, stop: int, step: int = 1) -> "View | None":
        """Part of a dimension; None if steps do not say it."""
        part = _part(self.dims[at], start, stop, step)
        if part is None:
            return None
        offset, new = part
        dims = (*self.dims[:at], new, *self.dims[at + 1 :])
        return View(self.value, dims, self.offset + offset)


def _part(dim: Dim, start: int, stop: int, step: int) -> tuple[int, Dim] | None:
    """Where part of a dimension begins, and its pieces."""
    if len(dim) < 2:
        stride = dim[0][1] if dim else 0
        count = max(0, -(-(stop - start) // step))
        return start * stride, ((count, stride * step),) if count != 1 else ()
    (_, stride), *inner = dim
    n = length(inner)
    (first, begin), (last, end) = divmod(start, n), divmod(stop - 1, n)
    if first == last:  # within one of the outermost steps
        within = _part(tuple(inner), begin, end + 1, step)
        return within and (first * stride + within[0], within[1])
    if step == 1 and begin == 0 and end == n - 1 and first < last:
        return first * stride, merged(((last - first + 1, stride), *inner))
    return None


def turned(x: View) -> View:
    """With its last two dimensions the other way round."""
    return View(x.value, (*x.dims[:-2], x.dims[-1], x.dims[-2]), x.offset)


def length(dim: Dim) -> int:
    return math.prod(n for n, _ in dim)


def merged(dim: Dim) -> Dim:
    """Neighbours that step evenly through memory as one piece."""
    pieces: list[Piece] = []
    for size, step in dim:
        if size == 1:
            continue
        if pieces and pieces[-1][1] == size * step:
            pieces[-1] = pieces[-1][0] * size, step
        else:
            pieces.append((size, step))
    return tuple(pieces)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of contiguous memory."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def whole(value: Value, shape: Sequence[int] | None = None) -> View:
    """All of a value, perhaps under another shape."""
    shape = value.shape if shape is None else shape
    pairs = zip(shape, strides(shape), strict=True)
    return View(value, tuple(((n, step),) if n != 1 else () for n, step in pairs))


def parts_of_an_axis(value: Value, pieces: Dim) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Of which axes of a value these pieces can be a part, beside all of the others; and the shape
    of that part."""
    shape, count = value.shape, math.prod(n for n, _ in pieces)
    for axis in range(len(shape)):
        rest = math.prod(shape[:axis] + shape[axis + 1 :])
        if rest and count % rest == 0:
            part = (*shape[:axis], count // rest, *shape[axis + 1 :])
            if merged(tuple(zip(part, strides(shape), strict=True))) == pieces:
                yield axis, part


def refined(a: Dim, b: Dim) -> list[tuple[int, int, int]] | None:
    """(size, step in a, step in b) of two dimensions of one length, cut alike; b may have length 1.
    None if no cut suits both."""
    if not b:
        return [(n, step, 0) for n, step in a]
    left, right, cuts = list(a), list(b), []
    while left and right:
        (m, step_a), (n, step_b) = left.pop(), right.pop()
        take = math.gcd(m, n)
        if take not in (m, n):
            return None
        cuts.append((take, step_a, step_b))
        if take < m:
            left.append((m // take, step_a * take))
        if take < n:
            right.append((n // take, step_b * take))
    return cuts[::-1]


def _cuts(a: View, b: View) -> list[tuple[int, int, int]] | None:
    """`refined`, of each of their dimensions."""
    cuts = [refined(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
    return None if None in cuts else [cut for dim in cuts for cut in dim]


class Views:
    """What turns views into values of a graph, each copy once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[tuple, Value] = {}

    def gather(self, view: View, shape: Sequence[int] | None = None) -> Value:
        """The view's elements row by row, as a value of that shape: the view's value itself if it
        has them so, or else a slice or a copy of it."""
        shape = view.shape if shape is None else tuple(shape)
        pieces, value = merged(view.pieces), view.value
        key = value, pieces, view.offset, shape
        if key not in self._made:
            self._made[key] = self._gather(value, pieces, view.offset, shape)
        return self._made[key]

    def _gather(self, value, pieces, offset, shape) -> Value:
        if merged(whole(value).pieces) == pieces and offset == 0:
            return self._reshaped(value, shape)
        for axis, part in parts_of_an_axis(value, pieces):
            start, rest = divmod(offset, strides(value.shape)[axis])
            if not rest:
                ends = {"axis": axis, "start": start, "stop": start + part[axis]}
                y = self.graph.make("slice", {"x": value}, part, value.dtype, **ends)
                return self._reshaped(y, shape)
        attrs = {"pieces": pieces, "offset": offset}
        return self.graph.make("layout", {"x": value}, shape, value.dtype, **attrs)

    def _reshaped(self, value, shape) -> Value:
        if tuple(shape) == value.shape:
            return value
        return self.graph.make("reshape", {"x": value}, shape, value.dtype)

    def rows(self, view: View) -> Value:
        """As `gather`, under whatever shape the value has, if its last axis is the view's and its
        first one, too."""
        value, shape = view.value, view.shape
        fits = value.shape and value.shape[-1] == shape[-1] and value.shape[0] == shape[0]
        if fits and view.is_all and merged(view.pieces) == merged(whole(value).pieces):
            return value
        return self.gather(view)

    def owned(self, view: View) -> View:
        """The view of a value that has no other elements."""
        if view.is_all:
            return view
        order = sorted({p for p in view.pieces if p[1]}, key=lambda p: -p[1])
        flat = View(view.value, tuple((piece,) for piece in order), view.offset)
        # in the shape that it has, if it is part of one axis
        parts = (part for _, part in parts_of_an_axis(view.value, merged(tuple(order))))
        value = self.gather(flat, next(parts, [n for n, _ in order]))
        new = dict(zip(order, strides([n for n, _ in order]), strict=True))
        dims = tuple(tuple((p[0], new[p] if p[1] else 0) for p in dim) for dim in view.dims)
        return View(value, dims)

    def together(self, a: View, b: View) -> tuple[View, Value]:
        """Two views of one shape, where b may have length 1: a, owned, and b as a value that can be
        added to a's value."""
        a = self.owned(a)
        other = None if any(step == 0 for _, step in a.pieces) else self.beside(a, b)
        if other is None:
            a = whole(self.gather(a))
            other = self.beside(a, b)
        return a, self.beside(a, whole(self.gather(b))) if other is None else other

    def beside(self, a: View, b: View) -> Value | None:
        """b of a's shape, or of length 1, as a value that goes with a's, which a has all of; None:
        their dimensions are made of other pieces."""
        if (cuts := _cuts(a, b)) is None:
            return None
        flat = sorted(cuts, key=lambda cut: -cut[1])
        shape, pieces = [], []
        for n in a.value.shape:
            axis: list[tuple[int, int, int]] = []
            while (rest := n // math.prod(size for size, _, _ in axis)) > 1:
                size, step_a, step_b = flat.pop(0)
                if max(size, rest) % min(size, rest):  # which ends within an axis
                    return None
                if size > rest:  # a piece that goes on in the next axis
                    inner = size // rest
                    flat.insert(0, (inner, step_a, step_b))
                    size, step_a, step_b = rest, step_a * inner, step_b * inner
                axis.append((size, step_a, step_b))
            alone = all(step == 0 for _, _, step in axis)
            shape.append(1 if alone else n)
            pieces += [] if alone else [(size, step) for size, _, step in axis]
        other = View(b.value, tuple((piece,) for piece in pieces), b.offset)
        return self.gather(other, shape)


def in_order(value: Value, sizes: Sequence[int], order: Sequence[int]) -> View:
    """The view whose dimensions order[0], order[1], ... have these sizes, and follow one another in
    memory."""
    view = whole(value, sizes)
    back = [0] * len(order)
    for i, at in enumerate(order):
        back[at] = i
    return view.permute(back)
