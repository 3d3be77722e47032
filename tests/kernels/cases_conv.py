"""The convolution's kernels as compile_only.py compiles them: the hot tiles of both paths."""

from triton_kernels.conv import points_wgrad, tf32x3, tma_wgrad, turned_wgrad
from triton_kernels.conv.configs import WgradTile

_TMA_CHIPS = (90, 100, 120)  # elsewhere the launcher takes the gathering kernels


def _fwd_tma(name: str, block_c: int, block_m: int, stages: int, dgrad: bool, arches) -> dict:
    filters = "1,64,{0}" if dgrad else "1,{0},64"
    return {
        "name": name,
        "kernel": "triton_kernels.conv.tma:_conv2d_tma_kernel",
        "signature": {
            "x_desc": f"tensordesc<bf16[1,{block_m // 32},32,64]>",
            "w_desc": f"tensordesc<bf16[{filters.format(block_c)}]>",
            "y_desc": f"tensordesc<bf16[1,{block_m // 32},32,{block_c}]>",
            **({} if dgrad else {"bias_ptr": "*fp32"}),
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            **({"bias_ptr": None} if dgrad else {}),
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": dgrad,
            "HAS_BIAS": not dgrad,
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": block_m // 32,
            "TILE_W": 32,
            "BLOCK_C": block_c,
            "BLOCK_K": 64,
            "PARTS": 1,
        },
        "options": {"num_warps": 4, "num_stages": stages},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": arches},
    }


def _wgrad_tma(name: str, block_co: int, num_warps: int, flat: bool, arches) -> dict:
    tile_h = 2 if flat else 1
    return {
        "name": name,
        "kernel": "triton_kernels.conv.tma_wgrad:_conv2d_wgrad_tma_kernel",
        "signature": {
            "x_desc": f"tensordesc<bf16[1,{tile_h},32,64]>",
            "dy_desc": f"tensordesc<bf16[{'64' if flat else '1,1,32'},{block_co}]>",
            "dw_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO", "num_tiles", "tiles_per_split"), "i32"),
            **dict.fromkeys(("stride_split", "stride_co"), "i32"),
        },
        "constexprs": {
            "S": 3,
            "GROUP": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "ACCUMULATE": False,
            "FLAT": flat,
            "TILE_N": 1,
            "TILE_H": tile_h,
            "TILE_W": 32,
            "BLOCK_CO": block_co,
            "BLOCK_CI": 64,
        },
        "options": {"num_warps": num_warps, "num_stages": 3},
        "multiples": ("CI", "CO", "stride_split", "stride_co"),
        "expect": {"wgmma": True, "tma": True, "arches": arches},
    }


def _wgrad_long(config: tma_wgrad.WgradConfig) -> dict:
    """Tiles that are whole rows of an image, for whose pipeline only Hopper has the memory."""
    block_co, block_ci, block_m, taps, num_warps, stages = config
    case = _wgrad_tma("", block_co, num_warps, True, (90,))
    rows = block_m // 32
    return case | {
        "name": f"weight gradient, {'x'.join(map(str, config))}",
        "signature": case["signature"]
        | {
            "x_desc": f"tensordesc<bf16[1,{rows},32,{block_ci}]>",
            "dy_desc": f"tensordesc<bf16[{block_m},{block_co}]>",
        },
        "constexprs": case["constexprs"] | {"GROUP": taps, "TILE_H": rows, "BLOCK_CI": block_ci},
        "options": {"num_warps": num_warps, "num_stages": stages},
    }


def _stride2(name: str, dgrad: bool, add: bool = False) -> dict:
    """64 channels x 128 pixels."""
    small, parities = "tensordesc<bf16[1,4,32,64]>", "tensordesc<bf16[1,4,1,32,64]>"
    names = ("dy_desc", "dx_desc") if dgrad else ("x_desc", "y_desc")
    kinds = (small, parities) if dgrad else (parities, small)
    return {
        "name": name,
        "kernel": f"triton_kernels.conv.tma_stride:_stride2_{'dgrad' if dgrad else 'fwd'}_kernel",
        "signature": {
            **dict(zip(names, kinds, strict=True)),
            "w_desc": "tensordesc<bf16[1,64,64]>",
            **({} if dgrad else {"bias_ptr": "*fp32"}),
            **({"add_desc": parities} if add else {}),
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            **({"TURNED": False} if dgrad else {}),
            **({} if add or not dgrad else {"add_desc": None}),
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": 4,
            "TILE_W": 32,
            "BLOCK_C": 64,
            "BLOCK_K": 64,
        },
        "options": {"num_warps": 4, "num_stages": 3},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": _TMA_CHIPS},
    }


_STRIDE2_WGRAD = {
    "name": "weight gradient, stride 2",
    "kernel": "triton_kernels.conv.tma_stride:_stride2_wgrad_kernel",
    "signature": {
        "x_desc": "tensordesc<bf16[1,2,1,32,64]>",
        "dy_desc": "tensordesc<bf16[64,64]>",
        "dw_ptr": "*fp32",
        **dict.fromkeys(("CI", "P", "Q", "CO", "num_tiles", "tiles_per_split"), "i32"),
    },
    "constexprs": {
        "TAPS": 9,
        "S": 3,
        "PAD_H": 1,
        "PAD_W": 1,
        "FLAT": True,
        "TILE_N": 1,
        "TILE_H": 2,
        "TILE_W": 32,
        "BLOCK_CO": 64,
        "BLOCK_CI": 64,
    },
    "options": {"num_warps": 4, "num_stages": 4},
    "multiples": ("CI", "CO"),
    "expect": {"wgmma": True, "tma": True, "arches": _TMA_CHIPS},
}

_FWD_GATHER = {
    "name": "input gradient, stride 2, gathered",
    "kernel": "triton_kernels.conv.gather:_conv2d_gather_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "w_ptr", "add_ptr", "y_ptr"), "*bf16"),
        **dict.fromkeys(("N", "H", "W", "CI", "P", "Q", "CO", "stride_wt", "stride_wi"), "i32"),
    },
    "constexprs": {
        "bias_ptr": None,
        "stride_wo": 1,
        "R": 3,
        "S": 3,
        "STRIDE": 2,
        "PAD_H": 1,
        "PAD_W": 1,
        "DGRAD": True,
        "FLAT": False,
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "SPLIT": False,
        "BLOCK_C": 64,
        "BLOCK_M": 64,
        "BLOCK_K": 32,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CI", "CO", "stride_wt", "stride_wi"),
    "expect": {"wgmma": True, "tma": False},
}


def _stem_float32(block_m: int, num_warps: int) -> dict:
    """Forward; products of operands that are split in registers."""
    return {
        "name": f"float32 stem 64x{block_m}, {num_warps} warps, gathered",
        "kernel": "triton_kernels.conv.gather:_conv2d_gather_kernel",
        "signature": {
            **dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*fp32"),
            **dict.fromkeys(("N", "H", "W", "CI", "P", "Q", "CO"), "i32"),
            **dict.fromkeys(("stride_wo", "stride_wt"), "i32"),
        },
        "constexprs": {
            **dict.fromkeys(("bias_ptr", "add_ptr")),
            "stride_wi": 1,
            "R": 3,
            "S": 3,
            "STRIDE": 1,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": False,
            "FLAT": True,
            "HAS_BIAS": False,
            "PRECISION": "ieee",
            "SPLIT": True,
            "BLOCK_C": 64,
            "BLOCK_M": block_m,
            "BLOCK_K": 32,
        },
        "options": {"num_warps": num_warps, "num_stages": 1},
        "multiples": ("CO",),
        # none with Triton 3.6
        "expect": {"wgmma": "registers", "tma": False, "spills": 8, "arches": (90,)},
    }


_STEM_WGRAD = {
    "name": "weight gradient of the stem, gathered",
    "kernel": "triton_kernels.conv.gather:_conv2d_wgrad_gather_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "dy_ptr"), "*bf16"),
        "dw_ptr": "*fp32",
        **dict.fromkeys(("H", "W", "P", "Q", "CI", "CO"), "i32"),
        **dict.fromkeys(("num_pixels", "pixels_per_split"), "i32"),
    },
    "constexprs": {
        "S": 3,
        "TAPS": 9,
        "SWAPPED": False,
        "STRIDE": 1,
        "PAD_H": 1,
        "PAD_W": 1,
        "FLAT": True,
        "PRECISION": "tf32",
        "SPLIT": False,
        "BLOCK_CO": 64,
        "BLOCK_CI": 32,
        "BLOCK_M": 64,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CO",),
    "expect": {"wgmma": True, "tma": False},
}

_FUSED_FWD = {
    "name": "forward 128x128, every epilogue",
    "kernel": "triton_kernels.fused.conv_kernels:conv_forward_kernel",
    "signature": {
        "x_desc": "tensordesc<bf16[1,4,32,64]>",
        "w_desc": "tensordesc<bf16[1,128,64]>",
        "residual_desc": "tensordesc<bf16[1,4,32,128]>",
        "y_desc": "tensordesc<bf16[1,4,32,128]>",
        **dict.fromkeys(("extra1_desc", "extra2_desc"), "tensordesc<bf16[1,4,32,64]>"),
        **dict.fromkeys(("extra1_w_desc", "extra2_w_desc"), "tensordesc<bf16[128,64]>"),
        **dict.fromkeys(("bias_ptr", "emb_ptr", "partial_ptr", "extra_bias_ptr"), "*fp32"),
        **dict.fromkeys(("stride_emb", "N", "CI", "P", "Q", "CO", "C1", "C2"), "i32"),
    },
    "constexprs": {
        "R": 3,
        "S": 3,
        "ROWS": 1,
        "PRECISION": "tf32",
        "TILE_N": 1,
        "TILE_H": 4,
        "TILE_W": 32,
        "BLOCK_C": 128,
        "BLOCK_K": 64,
        "RAGGED": False,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CI", "CO", "C1", "C2", "stride_emb"),
    "expect": {"wgmma": True, "tma": True, "arches": (90, 100)},
}

_FUSED_DGRAD = {
    "name": "input gradient 64x128 of two inputs, two images a tile",
    "kernel": "triton_kernels.fused.conv_kernels:conv_input_grad_kernel",
    "signature": {
        "dy_desc": "tensordesc<bf16[2,8,8,64]>",
        "w_desc": "tensordesc<bf16[1,64,64]>",
        **dict.fromkeys(("x1_desc", "x2_desc", "dz_desc"), "tensordesc<bf16[2,8,8,64]>"),
        **dict.fromkeys(("table_ptr", "partial_ptr"), "*fp32"),
        **dict.fromkeys(("N", "CO", "P", "Q", "CI", "C1", "first", "stream"), "i32"),
        "drop": "fp32",
    },
    "constexprs": {
        "rng_ptr": None,
        "R": 3,
        "S": 3,
        "ACT": "silu",
        "TURNED": False,
        "ROWS": 1,
        "PRECISION": "tf32",
        "TILE_N": 2,
        "TILE_H": 8,
        "TILE_W": 8,
        "PIECE_N": 2,
        "PIECE_H": 8,
        "PIECE_W": 8,
        "BLOCK_C": 64,
        "BLOCK_K": 64,
        "RAGGED": False,
        "STRADDLING": False,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CI", "CO", "C1"),
    "expect": {"wgmma": True, "tma": True, "arches": _TMA_CHIPS},
}

_SKIP_DX = {
    "name": "dx of two inputs, one upsampled, with a 1x1 skip",
    "kernel": "triton_kernels.fused.skip_dx:_skip_dx_kernel",
    "signature": {
        "dy_desc": "tensordesc<bf16[1,2,64,64]>",
        "w_desc": "tensordesc<bf16[64,64]>",
        **dict.fromkeys(("dz_desc", "x2_desc", "dx2_desc"), "tensordesc<bf16[1,2,64,64]>"),
        **dict.fromkeys(("x1_desc", "dx1_desc"), "tensordesc<bf16[1,1,32,64]>"),
        **dict.fromkeys(("coeff_ptr", "sums_ptr"), "*fp32"),
        **dict.fromkeys(("N", "CO", "P", "Q", "C", "C1", "CK"), "i32"),
    },
    "constexprs": {
        **dict.fromkeys(("add1_desc", "partial_ptr", "table_ptr", "rows_ptr")),
        **dict.fromkeys(("KZ", "CG", "BLOCK_G", "BLOCK_J", "BLOCK_KZ"), 1),
        "PRECISION": "tf32",
        "UPSAMPLE": True,
        "TILE_N": 1,
        "TILE_H": 2,
        "TILE_W": 64,
        "BLOCK_C": 64,
        "BLOCK_K": 64,
        "RAGGED": False,
    },
    "options": {"num_warps": 4, "num_stages": 2},
    "multiples": ("C", "CO", "C1", "CK"),
    "expect": {"wgmma": True, "tma": True, "arches": _TMA_CHIPS},
}

_SKIP_DX_FOLDED = {
    **_SKIP_DX,
    "name": "dx with a 1x1 skip and the norm's coefficients",
    "signature": {k: v for k, v in _SKIP_DX["signature"].items() if k != "coeff_ptr"}
    | dict.fromkeys(("partial_ptr", "table_ptr", "rows_ptr"), "*fp32"),
    "constexprs": _SKIP_DX["constexprs"]
    | {"coeff_ptr": None, "KZ": 8, "BLOCK_KZ": 8, "CG": 6, "BLOCK_G": 16, "BLOCK_J": 8},
}
for _name in ("partial_ptr", "table_ptr", "rows_ptr"):
    del _SKIP_DX_FOLDED["constexprs"][_name]

_FUSED_DROPOUT = {
    **_FUSED_DGRAD,
    "name": "input gradient with dropout",
    "signature": {**_FUSED_DGRAD["signature"], "rng_ptr": "*i64"},
    "constexprs": {k: v for k, v in _FUSED_DGRAD["constexprs"].items() if k != "rng_ptr"},
}

# 14x14 pixels, and halves of a concatenation that no tile of channels divides
_RAGGED_FWD = {
    **_FUSED_FWD,
    "name": "forward 64x128, tiles over the edges of images",
    "signature": {
        **_FUSED_FWD["signature"],
        "w_desc": "tensordesc<bf16[1,64,64]>",
        **dict.fromkeys(("x_desc", "residual_desc", "y_desc"), "tensordesc<bf16[4,2,16,64]>"),
        **dict.fromkeys(("extra1_desc", "extra2_desc"), "tensordesc<bf16[4,2,16,64]>"),
        **dict.fromkeys(("extra1_w_desc", "extra2_w_desc"), "tensordesc<bf16[64,64]>"),
    },
    "constexprs": _FUSED_FWD["constexprs"]
    | {"TILE_N": 4, "TILE_H": 2, "TILE_W": 16, "BLOCK_C": 64, "RAGGED": True},
    "expect": {"wgmma": True, "tma": True, "arches": (90,)},
}
_RAGGED_DGRAD = {
    **_FUSED_DGRAD,
    "name": "input gradient 64x128 of two inputs in a tile, over the edges of images",
    "signature": {
        **_FUSED_DGRAD["signature"],
        **dict.fromkeys(("dy_desc", "x1_desc", "x2_desc"), "tensordesc<bf16[4,2,16,64]>"),
        "dz_desc": "tensordesc<bf16[4,2,16,64]>",
    },
    "constexprs": _FUSED_DGRAD["constexprs"]
    | {"TILE_N": 4, "TILE_H": 2, "TILE_W": 16, "PIECE_N": 4, "PIECE_H": 2, "PIECE_W": 16}
    | {"RAGGED": True, "STRADDLING": True},
    "expect": {"wgmma": True, "tma": True, "arches": (90,)},
}
_RAGGED_SKIP_DX = {
    **_SKIP_DX,
    "name": "dx of two inputs, one upsampled, over the edges of images",
    "signature": {
        **_SKIP_DX["signature"],
        **dict.fromkeys(("dy_desc", "dz_desc", "x2_desc"), "tensordesc<bf16[1,4,16,64]>"),
        "dx2_desc": "tensordesc<bf16[1,4,16,64]>",
        **dict.fromkeys(("x1_desc", "dx1_desc"), "tensordesc<bf16[1,2,8,64]>"),
    },
    "constexprs": _SKIP_DX["constexprs"] | {"TILE_H": 4, "TILE_W": 16, "RAGGED": True},
    "expect": {"wgmma": True, "tma": True, "arches": (90,)},
}

_FUSED_ROWS = {
    **_FUSED_DGRAD,
    "name": "input gradient of two inputs, four rows",
    "signature": {
        **_FUSED_DGRAD["signature"],
        "dy_desc": "tensordesc<bf16[1,1,64,32]>",
        "w_desc": "tensordesc<bf16[1,32,64]>",
        **dict.fromkeys(("x1_desc", "x2_desc", "dz_desc"), "tensordesc<bf16[1,1,64,64]>"),
    },
    "constexprs": {
        **_FUSED_DGRAD["constexprs"],
        "ROWS": 4,
        "TILE_N": 1,
        "TILE_H": 1,
        "TILE_W": 64,
        "PIECE_N": 1,
        "PIECE_H": 1,
        "PIECE_W": 64,
        "BLOCK_K": 32,
    },
    "expect": {"wgmma": True, "tma": True, "arches": (90, 100)},
}


def _turned_fwd(block_c: int, block_m: int, stages: int) -> dict:
    """TF32, and so an input gradient of turned filters: 32 channels a step."""
    case = _fwd_tma(f"tf32 {block_c}x{block_m}", block_c, block_m, stages, False, (90,))
    return {
        **case,
        "signature": case["signature"]
        | {
            "x_desc": f"tensordesc<fp32[1,{block_m // 32},32,32]>",
            "w_desc": f"tensordesc<fp32[1,{block_c},32]>",
            "y_desc": f"tensordesc<fp32[1,{block_m // 32},32,{block_c}]>",
        },
        "constexprs": case["constexprs"] | {"BLOCK_K": 32},
    }


def _in_parts(block_c: int, block_m: int, num_warps: int, stages: int, parts: int) -> dict:
    case = _turned_fwd(block_c, block_m, stages)
    return {
        **case,
        "name": f"{case['name']} in {parts} parts, {num_warps} warps",
        "signature": case["signature"]
        | {"y_desc": f"tensordesc<fp32[1,1,{block_m // 32},32,{block_c}]>"},
        "constexprs": case["constexprs"] | {"PARTS": parts},
        "options": {"num_warps": num_warps, "num_stages": stages},
    }


def _turned_stride2(block_m: int) -> dict:
    case = _stride2("input gradient, stride 2, tf32", dgrad=True)
    box = f"fp32[1,{block_m // 32}"
    return {
        **case,
        "signature": case["signature"]
        | {
            "dy_desc": f"tensordesc<{box},32,32]>",
            "w_desc": "tensordesc<fp32[1,64,32]>",
            "dx_desc": f"tensordesc<{box},1,32,64]>",
        },
        "constexprs": case["constexprs"] | {"TURNED": True, "TILE_H": block_m // 32, "BLOCK_K": 32},
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _tf32x3(
    block_c: int, block_m: int, block_k: int, num_warps: int, stages: int, tensor_cores: int
) -> dict:
    box = f"fp32[1,{block_m // 32},32"
    assert block_k == 32 and tensor_cores == 1
    return {
        "name": f"float32 {block_c}x{block_m}, {num_warps} warps, {stages} stages",
        "kernel": "triton_kernels.conv.tf32x3:_conv2d_tf32x3_kernel",
        "signature": {
            **dict.fromkeys(("x_desc", "x_small_desc"), f"tensordesc<{box},32]>"),
            **dict.fromkeys(("w_desc", "w_small_desc"), f"tensordesc<fp32[1,{block_c},32]>"),
            "y_desc": f"tensordesc<{box},{block_c}]>",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": False,
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": block_m // 32,
            "TILE_W": 32,
            "BLOCK_C": block_c,
            "BLOCK_K": 32,
        },
        "options": {"num_warps": num_warps, "num_stages": stages},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _tf32x3_in_registers(
    block_c: int, block_m: int, block_k: int, num_warps: int, stages: int, tensor_cores: int
) -> dict:
    """A 1x1 convolution, or its input gradient, whose operands nobody has split."""
    assert block_k == 32 and tensor_cores == 2
    dgrad = block_c == 64 and stages == 4
    box = "32,64" if dgrad else f"{block_c},32"
    case = _tf32x3(block_c, block_m, block_k, num_warps, stages, 1)
    return {
        **case,
        "name": f"float32 {block_c}x{block_m}, split in registers, {stages} stages",
        "signature": {
            "x_desc": f"tensordesc<fp32[1,1,{block_m},32]>",
            "w_desc": f"tensordesc<fp32[1,{box}]>",
            "y_desc": f"tensordesc<fp32[1,1,{block_m},{block_c}]>",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": case["constexprs"]
        | {
            **dict.fromkeys(("x_small_desc", "w_small_desc")),
            **dict.fromkeys(("R", "S"), 1),
            **dict.fromkeys(("PAD_H", "PAD_W"), 0),
            "DGRAD": dgrad,
            "TILE_H": 1,
            "TILE_W": block_m,
        },
        "expect": {"tma": True, "arches": (90,)},
    }


def _turned_wgrad(
    block_c: int, block_j: int, block_m: int, rows: int, num_warps: int, stages: int, parts: int
) -> dict:
    a, b = (f"tensordesc<fp32[{block},{block_m}]>" for block in (block_c, block_j))
    small = {"a_small_desc": a, "b_small_desc": b}
    tile = f"{block_c}x{block_j}, {rows} rows, {num_warps} warps, {stages} stages"
    return {
        "name": f"weight gradient, {'float32' if parts == 2 else 'tf32'} {tile}",
        "kernel": "triton_kernels.conv.turned_wgrad:_turned_wgrad_kernel",
        "signature": {
            "a_desc": a,
            "b_desc": b,
            **(small if parts == 2 else {}),
            "dw_ptr": "*fp32",
            **dict.fromkeys(("C", "D", "step", "num_tiles", "tiles_per_split"), "i32"),
        },
        "constexprs": {
            **({} if parts == 2 else dict.fromkeys(small)),
            "R": 3,
            "S": 3,
            "GROUP": rows,
            "PAD_H": 1,
            "A_IS_DY": False,
            "BLOCK_C": block_c,
            "BLOCK_J": block_j,
            "BLOCK_M": block_m,
        },
        "options": {"num_warps": num_warps, "num_stages": stages},
        "multiples": ("C", "D", "step"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _points_wgrad(tile: WgradTile, products: int) -> dict:
    block_co, block_ci, block_m, num_warps, stages = tile
    a, b = (f"tensordesc<fp32[{block_m},{block}]>" for block in (block_co, block_ci))
    kind = "tf32" if products == 1 else "float32"
    return {
        "name": f"weight gradient of points, {kind}, {'x'.join(map(str, tile))}",
        "kernel": "triton_kernels.conv.points_wgrad:_points_wgrad_kernel",
        "signature": {
            "a_desc": a,
            "b_desc": b,
            "out_ptr": "*fp32",
            **dict.fromkeys(("M", "A", "B", "stride_a", "pixels_per_split"), "i32"),
        },
        "constexprs": {
            "PRODUCTS": products,
            "stride_b": 1,
            "BLOCK_A": block_co,
            "BLOCK_B": block_ci,
            "BLOCK_M": block_m,
        },
        "options": {"num_warps": num_warps, "num_stages": stages},
        "multiples": ("A", "B", "stride_a"),
        "expect": {"wgmma": False, "tma": True, "arches": (90,)},
    }


def _turn(name: str, kernel: str, signature: dict, constexprs: dict) -> dict:
    return {
        "name": name,
        "kernel": f"triton_kernels.conv.turn:{kernel}",
        "signature": signature,
        "constexprs": constexprs,
        "options": {"num_warps": 4, "num_stages": 3},
        "multiples": ("C", "CI", "CO", "columns", "num", "part_stride"),
        "expect": {"wgmma": False, "tma": False, "arches": _TMA_CHIPS},
    }


_TURNS = [
    _turn(
        "pixels turned, in two parts",
        "_turn_pixels_kernel",
        dict.fromkeys(("x_ptr", "out_ptr"), "*fp32")
        | dict.fromkeys(("H", "W", "C", "rows", "columns", "num", "part_stride", "first"), "i32"),
        {"STEP": -1, "COPIES": 3, "PARTS": 2, "BLOCK_M": 64, "BLOCK_C": 32},
    ),
    _turn(
        "filters turned",
        "_turn_filters_kernel",
        dict.fromkeys(("w_ptr", "out_ptr"), "*fp32")
        | dict.fromkeys(("CO", "CI", "TAPS", "part_stride"), "i32"),
        {"PARTS": 1, "BLOCK": 32},
    ),
    _turn(
        "a tensor in its two parts",
        "_split_kernel",
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "num": "i32"},
        {"BLOCK": 2048},
    ),
]

_COLUMNS = {
    "name": "what a stem's filter sees, in columns",
    "kernel": "triton_kernels.conv.columns_wgrad:_columns_kernel",
    "signature": dict.fromkeys(("x_ptr", "out_ptr"), "*fp32")
    | dict.fromkeys(("H", "W", "P", "Q", "num_pixels"), "i32"),
    "constexprs": {"CI": 3, "S": 3, "TAPS": 9, "STRIDE": 1, "PAD_H": 1, "PAD_W": 1, "WIDTH": 28}
    | {"BLOCK_W": 32, "BLOCK_M": 128},
    "options": {"num_warps": 4},
    "expect": {"arches": (90,)},
}

_LINEAR = {
    "name": "float32 linear layer, chunks of the sum side by side",
    "kernel": "triton_kernels.conv.linear_tf32x3:_linear_tf32x3_kernel",
    "signature": dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "*fp32")
    | dict.fromkeys(("M", "K", "C", "stride_wc"), "i32"),
    "constexprs": {"stride_wk": 1, "CHUNKS": 8, "CHUNK": 32, "BLOCK_C": 16, "BLOCK_M": 16},
    "options": {"num_warps": 8, "num_stages": 1},
    "multiples": ("K", "C", "stride_wc"),
    "expect": {"arches": (90,)},
}

COMPILE_CASES = [
    _COLUMNS,
    _LINEAR,
    *(_turned_fwd(*tile) for tile in [(64, 64, 4), (128, 128, 4), (64, 256, 4)]),
    *(_in_parts(*tile) for tile in [(128, 128, 4, 4, 4)]),
    _turned_stride2(128),
    *(_tf32x3(*c) for c in tf32x3.FWD_CONFIGS[:4]),
    *(_tf32x3_in_registers(*c) for c in tf32x3.FWD_CONFIGS if c.tensor_cores == 2),
    _stem_float32(64, 4),
    *(_turned_wgrad(*c[:6], 1) for c in turned_wgrad.WGRAD_CONFIGS[:5]),
    *(_turned_wgrad(*c[:6], 2) for c in turned_wgrad.WGRAD_CONFIGS[:2]),
    *(_points_wgrad(t, 1) for t in points_wgrad.TILES),
    _points_wgrad(points_wgrad.TILES[0], 3),
    *_TURNS,
    _fwd_tma("forward 128x128", 128, 128, 3, False, _TMA_CHIPS),
    _fwd_tma("input gradient 64x256", 64, 256, 4, True, (90, 100)),
    _wgrad_tma("weight gradient 64x64", 64, 4, True, _TMA_CHIPS),
    _wgrad_tma("weight gradient 64x64, single rows", 64, 4, False, _TMA_CHIPS),
    *(_wgrad_long(c) for c in tma_wgrad.WGRAD_CONFIGS[-5:]),
    _stride2("forward, stride 2", dgrad=False),
    _stride2("input gradient, stride 2", dgrad=True),
    _stride2("input gradient, stride 2, plus another", dgrad=True, add=True),
    _STRIDE2_WGRAD,
    _FWD_GATHER,
    _STEM_WGRAD,
    _FUSED_FWD,
    _FUSED_DGRAD,
    _FUSED_DROPOUT,
    _FUSED_ROWS,
    _RAGGED_FWD,
    _RAGGED_DGRAD,
    _RAGGED_SKIP_DX,
    _SKIP_DX,
    _SKIP_DX_FOLDED,
]
