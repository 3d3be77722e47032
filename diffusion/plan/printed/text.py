"""A page as text: a row a line, and sums under them."""

from ..ops import FREE
from .page import Page


def table(page: Page) -> str:
    """The page, without what is done for parameters alone, and sums under it."""
    head = ("#", "node", "kernel", "configuration", "stream", "waits for", "MB", "floor us")
    rows = [(*head, "predicted us", "from", "why")]
    for i, line in enumerate(page.lines):
        if line.op in FREE or line.pass_ == "parameters":
            continue
        made = line.launched
        rows.append(
            (
                str(i),
                line.name,
                ", ".join(made.kernels),
                made.config,
                str(line.stream),
                " ".join(map(str, line.waits)),
                f"{line.bytes / 1e6:.2f}",
                f"{line.floor_us:.1f}",
                "-" if made.predicted_us is None else f"{made.predicted_us:.1f}",
                line.source,
                line.why,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    widths[2], widths[3] = min(widths[2], 60), min(widths[3], 40)
    text = []
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        text.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join((*text, "", *summary(page)))


def summary(page: Page) -> list[str]:
    said = []
    for pass_ in ("parameters", "forward", "backward"):
        of = [line for line in page.lines if line.pass_ == pass_ and line.op not in FREE]
        if of:
            time = sum(line.floor_us for line in of)
            moved = sum(line.bytes for line in of) / 1e9
            often = " (once for each update of them)" if pass_ == "parameters" else ""
            launches = sum(len(x.launched.kernels) for x in of)
            said.append(
                f"{pass_}{often}: {len(of)} nodes, {launches} launches,"
                f" {moved:.2f} GB, at least {time:,.0f} us"
            )
    return [*said, page.memory]
