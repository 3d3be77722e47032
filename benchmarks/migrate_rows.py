"""Measured tiles of an older version, as rows that name their kernel.

    python -m benchmarks.migrate_rows OLD.json NEW.jsonl

An old table has numbers alone: {"conv_forward 64 64 64 64 3 3 torch.bfloat16 True 0 True n=32":
[64, 128, 64, 16, 3, 1]}, in which 16 warps are a kernel of their own. What the numbers meant is
written down here, once.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton_kernels.registry import rows

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_TILE = ("block_c", "block_m", "block_k", "num_warps", "num_stages")
_TMA = (*_TILE, "rows", "parts")
_WGRAD = ("block_co", "block_ci", "block_m", "num_warps", "num_stages", "splits")
_PASS = ("tile", "tiles", "num_warps")
_POINTWISE = ("block_c", "block_m")
_SINGLE_TILE = ("block_c", "block_m", "num_warps", "programs")
_OF_NORM = ("pixels", "c1", "c", "groups", "dtype")
_OF_CONV = ("h", "w", "k", "p", "q", "c", "r", "s")

Row = dict[str, Any]
KEYS = {  # of an old name, in order
    "attention": ("t", "d", "dtype", "allow_tf32"),
    "attention_bwd": ("t", "d", "dtype", "allow_tf32"),
    "conv2d": (*_OF_CONV, "dtype"),
    "conv2d_dgrad": (*_OF_CONV, "dtype"),
    "conv2d_fp32": _OF_CONV,
    "conv2d_fp32_dgrad": _OF_CONV,
    "conv2d_gather": (*_OF_CONV, "stride", "dtype", "precision"),
    "conv2d_gather_dgrad": (*_OF_CONV, "stride", "dtype", "precision"),
    "conv2d_stride2": (*_OF_CONV, "dtype"),
    "conv2d_stride2_dgrad": (*_OF_CONV, "dtype"),
    "conv2d_turning": ("k", "c"),
    "conv_forward": ("h", "w", "k", "c", "r", "s", "dtype", "residual", "extras", "stats"),
    "conv_input_grad": ("h", "w", "k", "c", "first", "r", "s", "dtype", "activation"),
    "conv_split": ("h", "w", "k", "c", "r", "s", "dtype", "extra"),
    "conv_two_weight_grads": (
        "h", "w", "ci1", "co1", "h2", "w2", "ci2", "co2", "r", "s", "r2", "s2", "dtype",
    ),
    "conv_upsampled": ("h", "w", "c1", "c2", "co", "dtype"),
    "conv_upsampled_input_grad": ("h", "w", "c1", "c2", "co", "dtype"),
    "conv_weight_grad": ("h", "w", "k", "c", "r", "s", "dtype"),
    "conv_weight_grad_gather": (
        "h", "w", "k", "co", "ci", "r", "s", "p", "q", "stride", "dtype", "precision",
    ),
    "conv_weight_grad_stride2": (*_OF_CONV, "dtype"),
    "conv_weight_grad_turned": ("h", "w", "k", "c", "r", "s", "dtype", "precision"),
    "denoise_loss": ("h", "w", "c", "co", "dtype", "prediction", "keep"),
    "norm_apply": ("h", "w", "c1", "c2", "upsampled", "dtype", "activation"),
    "skip_dx": ("h", "w", "k", "c", "first", "dtype", "upsampled", "add"),
}  # fmt: skip
ALLOW_TF32 = (
    "conv2d", "conv2d_dgrad", "conv2d_stride2", "conv2d_stride2_dgrad", "conv_forward",
    "conv_input_grad", "conv_weight_grad_stride2", "skip_dx",
)  # fmt: skip


def _shape(op: str, words: list[str]) -> Row:
    if op == "conv_weight_grads":
        channels = words[4:-1]
        kinds = ("ci", "co") * (len(channels) // 2)
        names = [f"{kind}{i // 2 + 1}" for i, kind in enumerate(kinds)]
        keys = ["h", "w", "r", "s", *names, "dtype"]
    elif op.startswith("group_norm"):
        keys = list(_OF_NORM)
    else:
        keys = list(KEYS[op])
    if op == "conv_split":
        words = [*words[:7], tuple(map(int, words[7:]))]
    shape = {key: _value(word) for key, word in zip(keys, words, strict=True)}
    precision, tf32 = shape.pop("precision", None), shape.pop("allow_tf32", False)
    if shape.get("dtype") == "fp32" and (tf32 or precision == "tf32" or op in ALLOW_TF32):
        shape["dtype"] = "tf32"
    if op == "norm_apply":
        del shape["upsampled"]
    return shape


def _value(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    if word in ("True", "False"):
        return word == "True"
    return int(word) if word.isdigit() else _DTYPES.get(word, word)


def _named(kernel: str, fields: tuple[str, ...]) -> Callable[[list[int]], Row]:
    return lambda v: {"kernel": kernel, "config": dict(zip(fields, v, strict=False))}


def _tma(v: list[int]) -> Row:
    """Tiles that `conv.plain.tma` fetches, with the fields that older rows lack."""
    return _named("tma", _TMA)([*v, 1, 1][:7] if len(v) < 7 else v)


def _fused(v: list[int]) -> Row:
    """Of a fused convolution: 9 warps were tiles, 12 rows, 16 filters that stay."""
    channels, pixels, block_k, warps, stages, *_ = v
    if channels == 16:
        return {"kernel": "narrow_output", "config": {"block_m": pixels}}
    if warps == 9:
        return {
            "kernel": "tile_mma",
            "config": {"block_m": pixels, "filters_with_pixels": stages == 6},
        }
    if warps == 12:
        return {"kernel": "row_mma", "config": {"block_m": pixels}}
    if warps == 16:
        kernel = "narrow_input" if block_k == 16 else "stationary_weights"
        return {"kernel": kernel, "config": {"block_m": pixels}}
    return _tma(v)


def _unfused(v: list[int], shape: Row) -> Row:
    """Of public convolutions: 12 warps were Hopper's tiles, 16 its ring, a block of 1024 channels
    those that fetch all at once."""
    channels, pixels, block_k, warps, stages, *_ = v
    if block_k == 1024:
        return _named("unfused_single_tile", _SINGLE_TILE)([channels, pixels, warps, stages])
    if warps == 16:
        return _named("unfused_ring", _POINTWISE)([channels, pixels])
    if warps == 12 and shape["r"] == 3:
        kernel = "unfused_tiles_tf32" if block_k == 32 else "unfused_tiles"
        return {"kernel": kernel, "config": {"block_m": pixels}}
    if warps == 12:
        return _named("unfused_pointwise", _POINTWISE)([channels, pixels])
    return _tma(v)


def _turning(v: list[int]) -> Row:
    channels, pixels, _, warps, programs, *_ = v
    if channels == 0:
        return {"kernel": "transpose_first", "config": {"launches": 2}}
    fields = [channels, pixels, warps, programs]
    return _named("unfused_single_tile_tf32", _SINGLE_TILE)(fields)


def _float32(v: list[int]) -> Row:
    *tile, cores = v if len(v) == 6 else [*v, 1]
    if cores == 0:
        return _named("gather", _TILE)(tile)
    if cores == 3:
        names = ("block_c", "block_m", "num_warps")
        return _named("linear_tf32x3", names)([tile[0], tile[1], tile[3]])
    return _named("tf32x3", (*_TILE, "in_registers"))([*tile, cores == 2])


def _weight_grad(v: list[int]) -> Row:
    if v[4] == 12:
        return {"kernel": "row_wgrad", "config": {"block_ci": v[1], "splits": v[6]}}
    fields = ("block_co", "block_ci", "block_m", "taps", "num_warps", "num_stages", "splits")
    return _named("tma_wgrad", fields)(v)


def _group(v: list[int]) -> Row:
    if not any(v):
        return {"kernel": "in_turn", "config": {}}
    fields = ("co_blocks", "ci_blocks", "steps", "stages", "programs", "even")
    return _named("group_wgrad", fields)(v)


def _pair(v: list[int]) -> Row:
    return {"kernel": "row_wgrad_pair" if v[0] else "one_by_one", "config": {"splits": v[0]}}


def _attention(v: list[int]) -> Row:
    if v[-1] == 0:
        return {"kernel": "head", "config": {"keep": v[-4], "step": v[-3]}}
    names = ("keep", "step", "num_warps", "num_stages")
    if len(v) == 5:
        return _named("tiles", ("one_pass", *names))([bool(v[0]), *v[1:]])
    return _named("tiles", names)(v)


def _way(v: list[int]) -> Row:
    return {"kernel": ("multi_pass", "single_program", "cluster")[int(v[0])], "config": {}}


def _cluster(v: list[int]) -> Row:
    fields = ("ctas", "num_warps", "parts", "block_c", "rounds", "lag")
    return _named("cluster", fields)([*v, 0][:6])


def _config(op: str, v: list[int], shape: Row) -> Row:
    if op in ("conv2d", "conv2d_dgrad"):
        return _unfused(v, shape)
    single = _named("single_program", ("groups", "num_warps"))
    turned = ("block_c", "block_j", "block_m", "rows", "num_warps", "num_stages", "tensor_cores")
    loss = _named("denoise_loss", ("block", "blocks", "num_warps"))
    meanings = {
        "attention": _attention,
        "attention_bwd": _attention,
        "conv2d_turning": _turning,
        "conv2d_fp32": _float32,
        "conv2d_fp32_dgrad": _float32,
        "conv2d_gather": _named("gather", _TILE),
        "conv2d_gather_dgrad": _named("gather", _TILE),
        "conv2d_stride2": _named("tma_stride2", _TILE),
        "conv2d_stride2_dgrad": _named("tma_stride2", _TILE),
        "conv_forward": _fused,
        "conv_input_grad": _fused,
        "conv_split": _named("split_k", (*_TILE, "splits")),
        "conv_two_weight_grads": _pair,
        "conv_upsampled": _named("upsampled", ("pixels", "piecewise")),
        "conv_upsampled_input_grad": _named("upsampled", ("pixels", "piecewise")),
        "conv_weight_grad": _weight_grad,
        "conv_weight_grad_gather": _named("gather_wgrad", _WGRAD),
        "conv_weight_grad_stride2": _named("tma_stride2_wgrad", _WGRAD),
        "conv_weight_grad_turned": _named("float32_wgrad", (*turned, "splits")),
        "conv_weight_grads": _group,
        "denoise_loss": loss,
        "group_norm": _way,
        "group_norm_bwd": _way,
        "group_norm_cluster": _cluster,
        "group_norm_cluster_bwd": _cluster,
        "group_norm_resident": single,
        "group_norm_resident_bwd": single,
        "skip_dx": _tma,
    }
    return meanings.get(op, _named("pass", _PASS))(v)


def migrate(old: dict[str, list[int]]) -> list[Row]:
    """Rows of an old table."""
    found = []
    for full, numbers in old.items():
        name, n = full.rsplit(" n=", 1)
        op, *words = name.split()
        shape = _shape(op, words)
        found.append({"op": op, "n": int(n), **shape, **_config(op, numbers, shape)})
    return found


def main() -> None:
    old, new = map(Path, sys.argv[1:])
    rows.save(migrate(json.loads(old.read_text())), new)


if __name__ == "__main__":
    main()
