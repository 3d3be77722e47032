"""Measured rows of an older version of this package, in the words of this one.

    python -m benchmarks.migrate_rows OLD.jsonl NEW.jsonl

Convolutions without an epilogue were four operations a pass, by the kernels that could do them, and
of weight gradients in float32 a number said which kernel a row was of.
"""

import sys
from pathlib import Path
from typing import Any

from triton_kernels.registry import rows

Row = dict[str, Any]
_KEY = ("h", "w", "k", "c", "r", "s", "stride", "dtype")  # of a weight gradient
_CONV2D_KEY = ("h", "w", "k", "p", "q", "c", "r", "s", "stride", "dtype")  # without an epilogue
_TILE = ("block_co", "block_ci", "block_m", "num_warps", "num_stages")


def _float32(config: Row) -> tuple[str, Row] | None:
    """What `tensor_cores` said; None: a kernel that is gone."""
    splits = {"splits": config["splits"]}
    numbers = [config[key] for key in ("block_c", "block_j", "block_m", "num_warps", "num_stages")]
    if config["tensor_cores"] == 0:
        return "gather_wgrad", dict(zip(_TILE, numbers, strict=True)) | splits
    if config["tensor_cores"] == 2:
        return "pointwise_wgrad", dict(zip(_TILE, numbers, strict=True)) | splits
    if config["tensor_cores"] == 3:
        return "mma_wgrad", {
            "block_x": config["block_j"],
            "block_m": config["block_m"],
            "programs": config["rows"],
            "num_stages": config["num_stages"],
            "read_ahead": config["num_warps"] == 6,
        } | splits
    return ("fp16_split_wgrad", splits) if config["tensor_cores"] == 5 else None


def migrate(row: Row) -> Row | None:
    """A row as this version has it; None if it is of no use any more."""
    row = dict(row)
    if row["op"] == "conv_two_weight_grads" and row["kernel"] == "one_by_one":
        return row | {"config": {}}
    if row["op"] == "conv2d_turning":
        row |= dict.fromkeys(("h", "w", "p", "q", "r", "s"), 1) | {"dtype": "tf32"}
        row["op"] = "conv2d_dgrad"
        if row["kernel"] == "transpose_first":
            row["config"] = {}
    grads = row["op"].startswith("conv_weight_grad") and row["op"] != "conv_weight_grads"
    if not grads and not row["op"].startswith("conv2d"):
        return row
    if row["op"] == "conv_weight_grad_turned":
        meant = _float32(row["config"])
        if meant is None:
            return None
        row["kernel"], row["config"] = meant
    if row["op"] == "conv_weight_grad_gather":
        row["c"] = row["co"]
    if (row["op"], row["r"]) == ("conv2d_gather", 3) and row["c"] <= 7 and row["k"] >= 16:
        return None  # `im2col_fwd` was not among the candidates
    row.setdefault("stride", 2 if "stride2" in row["op"] else 1)
    if row["op"].startswith("conv2d_fp32"):
        row["dtype"] = "fp32"
    op = "conv_weight_grad" if grads else "conv2d"
    op = "conv2d_dgrad" if row["op"].endswith("dgrad") else op
    kept = {key: row[key] for key in (_KEY if grads else _CONV2D_KEY)}
    return {
        "op": op,
        "n": row["n"],
        **kept,
        "kernel": row["kernel"],
        "config": row["config"],
    }


def main() -> None:
    old, new = map(Path, sys.argv[1:])
    found = (migrate(row) for row in rows.read(old))
    new.unlink(missing_ok=True)
    rows.save([row for row in found if row is not None], new)


if __name__ == "__main__":
    main()
