"""A page as text: a line for each node, where it comes from under it, and sums under all."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from triton_kernels.explain import folded, kernels_of

from .page import Line, Page

_HEAD = ("#", "node", "kernels", "MB", "floor us", "predicted us")
_WIDTHS = (4, 33, 30, 8, 8, 12)  # of its columns, with a blank between two
_UNDER = _WIDTHS[0] + 1  # what is under a node begins where its name does


def table(page: Page, node: str = "") -> str:
    """The page, without what is done for parameters alone, and sums under it. With `node`, a module
    of the network or a node, what that launches, and why these kernels. KeyError: there is none."""
    rewrites: dict[str, int] = {}
    text = [
        *_rows(_HEAD),
        " " * _UNDER + "module (its line); configuration of the first kernel; ...",
    ]
    found = [
        (i, line)
        for i, line in enumerate(page.lines)
        if not line.is_view and line.pass_ != "parameters" and (not node or _is(line, node))
    ]
    if not found:
        raise KeyError(node)
    for i, line in found:
        text += _lines(i, line, rewrites)
        if node:
            text += _answers(line, page)
    listed = [folded(f"  {number:2d}  {why}", 6) for why, number in rewrites.items()]
    said = ["rewrites:", *listed, ""] if listed else []
    sums = (folded(line, 2) for line in summary(page))
    return "\n".join((*text, "", *said, *sums))


def modules(page: Page) -> list[str]:
    """The modules that lines are of, and those that hold them."""
    parts = [path.split(".") for line in page.lines for path in _paths(line) if path]
    return sorted({".".join(of[:n]) for of in parts for n in range(1, len(of) + 1)})


def _paths(line: Line) -> list[str]:
    return [source.partition(" of ")[2] for source in line.sources]


def _is(line: Line, node: str) -> bool:
    """Whether a line is that node, or of that module."""
    of = (f"{path}.".startswith(f"{node}.") for path in _paths(line))
    return line.name.split(" ")[0] == node or any(of)


def _lines(number: int, line: Line, rewrites: dict[str, int]) -> Iterator[str]:
    """Of a node. A rewrite has the number under which it is listed below."""
    made = line.launched
    us = "-" if made.predicted_us is None else f"{made.predicted_us:.1f}"
    words = str(number), line.name, ", ".join(made.kernels)
    yield from _rows((*words, f"{line.bytes / 1e6:.2f}", f"{line.floor_us:.1f}", us))
    where, _, module = line.source.partition(" of ")
    said = [f"{module} ({where})" if module else where, made.config]
    if line.stream:
        said.append(f"stream {line.stream}")
    if line.waits:
        said.append(f"waits for {' '.join(map(str, line.waits))}")
    if line.why:
        of = (rewrites.setdefault(why, len(rewrites) + 1) for why in line.why)
        said.append(f"rewrites {' '.join(map(str, of))}")
    if any(said):
        yield folded(" " * _UNDER + "; ".join(filter(None, said)), _UNDER + 2)


def _answers(line: Line, page: Page) -> Iterator[str]:
    """What the registry was asked for a node, and has answered."""
    for op, spec in dict.fromkeys((d.op, d.spec) for d in line.launched.decisions):
        yield folded(f"{' ' * _UNDER}{op.name}: {spec}", _UNDER + 2)
        yield from kernels_of(op, spec, page.gpu, _UNDER + 2)


def _rows(cells: Sequence[str]) -> Iterator[str]:
    """Of the table: words on the left of their columns, folded, and numbers on the right."""
    folds = [textwrap.wrap(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    for row in zip_longest(*folds, fillvalue=""):
        pairs = enumerate(zip(row, _WIDTHS, strict=True))
        yield " ".join(c.rjust(w) if i > 2 else c.ljust(w) for i, (c, w) in pairs).rstrip()


def summary(page: Page) -> list[str]:
    said = []
    for pass_ in ("parameters", "forward", "backward"):
        of = [line for line in page.lines if line.pass_ == pass_ and not line.is_view]
        if of:
            time = sum(line.floor_us for line in of)
            moved = sum(line.bytes for line in of) / 1e9
            often = " (once for each update of them)" if pass_ == "parameters" else ""
            launches = sum(len(x.launched.kernels) for x in of)
            said.append(
                f"{pass_}{often}: {len(of)} nodes, {launches} launches,"
                f" {moved:.2f} GB, at least {time:,.0f} us"
            )
    return [*said, str(page.memory)]
