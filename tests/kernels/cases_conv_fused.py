"""The training step's convolutions in Triton as compile_only.py compiles them, with the gradient of
1x1 skips."""

from .cases_conv import TMA_CHIPS

_FUSED_FWD = {
    "name": "forward 128x128, every epilogue",
    "kernel": "triton_kernels.conv.plain.fused_kernels:conv_forward_kernel",
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
    "kernel": "triton_kernels.conv.plain.fused_kernels:conv_input_grad_kernel",
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
    "expect": {"wgmma": True, "tma": True, "arches": TMA_CHIPS},
}

_SKIP_DX = {
    "name": "dx of two inputs, one upsampled, with a 1x1 skip",
    "kernel": "triton_kernels.conv.skip_dx:_skip_dx_kernel",
    "signature": {
        "dy_desc": "tensordesc<bf16[1,2,64,64]>",
        "w_desc": "tensordesc<bf16[64,64]>",
        **dict.fromkeys(("dz_desc", "x2_desc", "dx2_desc"), "tensordesc<bf16[1,2,64,64]>"),
        **dict.fromkeys(("x1_desc", "dx1_desc"), "tensordesc<bf16[1,1,32,64]>"),
        **dict.fromkeys(("coeff_ptr", "sums_ptr"), "*fp32"),
        **dict.fromkeys(("N", "CO", "P", "Q", "C", "C1", "CK"), "i32"),
    },
    "constexprs": {
        **dict.fromkeys(("add1_desc", "dz2_desc", "partial_ptr", "table_ptr", "rows_ptr")),
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
    "expect": {"wgmma": True, "tma": True, "arches": TMA_CHIPS},
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

_SKIP_DX_OF_HALVES = {
    **_SKIP_DX_FOLDED,
    "name": "dx with a 1x1 skip, of two gradients, the norm's coefficients",
    "signature": _SKIP_DX_FOLDED["signature"]
    | {"dz_desc": "tensordesc<bf16[1,1,32,64]>", "dz2_desc": "tensordesc<bf16[1,2,64,64]>"},
    "constexprs": {k: v for k, v in _SKIP_DX_FOLDED["constexprs"].items() if k != "dz2_desc"},
    "expect": {"wgmma": True, "tma": True, "arches": (90,)},
}

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

COMPILE_CASES = [
    _FUSED_FWD,
    _FUSED_DGRAD,
    _FUSED_DROPOUT,
    _FUSED_ROWS,
    _RAGGED_FWD,
    _RAGGED_DGRAD,
    _RAGGED_SKIP_DX,
    _SKIP_DX,
    _SKIP_DX_FOLDED,
    _SKIP_DX_OF_HALVES,
]
