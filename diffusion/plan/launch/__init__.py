"""The launch table: what launches a node of each op. `table` has the rules, the other files the
rows; importing this package fills the table."""

from . import images, joined, norms, products, pytorch, staged  # noqa: F401
