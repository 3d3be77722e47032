"""Kernels of inference at a small batch to compile for every chip, in bf16: 256 channels in 32
groups at 8x8, in the tiles that one such image gets."""


def _types(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


_CONV_SPLIT = {
    "name": "conv_split, two extras",
    "kernel": "triton_kernels.fused.conv_split:_conv_split_kernel",
    "signature": _types("tensordesc<bf16[1,8,8,64]>", "x_desc", "extra1_desc", "extra2_desc")
    | {"w_desc": "tensordesc<bf16[1,64,64]>"}
    | _types("tensordesc<bf16[64,64]>", "extra1_w_desc", "extra2_w_desc")
    | {"parts_ptr": "*fp32"}
    | _types("i32", "N", "P", "Q", "CI", "C1", "C2", "CO", "steps"),
    "constexprs": {
        "R": 3,
        "S": 3,
        "PRECISION": "tf32",
        "TILE_N": 1,
        "TILE_H": 8,
        "TILE_W": 8,
        "BLOCK_C": 64,
        "BLOCK_K": 64,
    },  # fmt: skip
    "multiples": ("CI", "C1", "C2", "CO"),
    "options": {"num_warps": 4, "num_stages": 4},
    "expect": {"wgmma": True, "tma": True, "arches": (90, 100)},
}

_JOINED_TERMS = ("emb_ptr", "extra_bias_ptr")
_JOINED_NORM = ("norm_weight_ptr", "norm_bias_ptr", "scale_ptr", "shift_ptr")
_EXTRA = ("extra1_ptr", "extra1_weight_ptr", "extra2_ptr", "extra2_weight_ptr")

_NORM_CONV = {
    "kernel": "triton_kernels.fused.norm_conv_kernels:_norm_conv_kernel",
    "signature": _types("*bf16", "x1_ptr", "x2_ptr", "weight_ptr", "residual_ptr", "y_ptr", *_EXTRA)
    | _types("*fp32", "partial1_ptr", "partial2_ptr", "bias_ptr", "sums_ptr")
    | _types("*fp32", *_JOINED_NORM, *_JOINED_TERMS)
    | _types("i32", "stride_scale", "stride_shift", "stride_emb", "stride_w1", "stride_w2")
    | _types("i32", "pixels1", "pixels2", "H", "C1", "C2", "CO", "E1", "E2")
    | {"eps": "fp32"},
    "multiples": ("stride_scale", "stride_shift", "stride_emb", "stride_w1", "stride_w2")
    + ("pixels1", "pixels2", "H", "C1", "C2", "CO", "E1", "E2"),
    "options": {"num_warps": 8, "num_stages": 2},
    "expect": {"wgmma": True, "arches": (90,)},
}
_NORM_CONV_SHAPE = {
    "ACT": "silu", "PRECISION": "tf32", "UP1": False, "UP_E1": False, "UP_E2": False,
    "BLOCK_M": 64, "BLOCK_C": 64, "BLOCK_K": 64, "BLOCK_G": 32,
}  # fmt: skip

_NORM_CONV_SPLIT = {
    "kernel": "triton_kernels.fused.norm_conv_split:_norm_conv_split_kernel",
    "signature": _types("*bf16", "x1_ptr", "x2_ptr", "residual_ptr", "weight_ptr", *_EXTRA)
    | _types("*fp32", "parts_ptr", "conv_bias_ptr", *_JOINED_TERMS, *_JOINED_NORM, "out_ptr")
    | _types("i32", "stride_emb", "stride_scale", "stride_shift", "stride_w1", "stride_w2")
    | _types("i32", "N", "C1", "C", "CO", "E1", "E2", "slices", "slices1")
    | {"eps": "fp32"},
    "multiples": ("stride_emb", "stride_w1", "stride_w2", "C1", "C", "CO", "E1", "E2"),
    "options": {"num_warps": 4},
    "expect": {"arches": (90,)},
}
_NORM_CONV_SPLIT_SHAPE = {
    "ACT": "silu", "H": 8, "W": 8, "PRECISION": "tf32", "BLOCK_G": 2, "BLOCK_P": 64,
    "BLOCK_C": 64, "BLOCK_E": 64,
}  # fmt: skip

_FILM = ("weight_ptr", "bias_ptr", "scale_ptr", "shift_ptr")
_CONV_TERMS = ("parts_ptr", "conv_bias_ptr", "extra_bias_ptr", "emb_ptr")

_NORM_WHOLE = {
    "kernel": "triton_kernels.fused.norm_whole_kernels:_norm_whole_kernel",
    "options": {"num_warps": 4},
    "multiples": ("HW", "C1", "C", "stride_emb", "stride_scale", "stride_shift"),
}
_WHOLE_INTS = _types("i32", "stride_emb", "stride_scale", "stride_shift") | _types(
    "i32", "N", "HW", "C1", "C", "GB"
)

COMPILE_CASES = [
    _CONV_SPLIT,
    _NORM_WHOLE
    | {
        "name": "norm_whole of a convolution in parts, beside another tensor",
        "signature": _types("*bf16", "x1_ptr", "x2_ptr", "residual_ptr", "a_ptr")
        | _types("*fp32", *_CONV_TERMS, *_FILM)
        | _WHOLE_INTS
        | {"eps": "fp32"},
        "constexprs": {"ACT": "silu", "SPLITS": 9, "CG": 16, "BLOCK_G": 1}
        | {"BLOCK_J": 16, "BLOCK_P": 64},
    },
    _NORM_WHOLE
    | {
        "name": "norm_whole, the largest group",
        "signature": _types("*bf16", "x1_ptr", "a_ptr")
        | _types("*fp32", "weight_ptr", "bias_ptr")
        | _WHOLE_INTS
        | {"eps": "fp32"},
        "constexprs": dict.fromkeys(
            (*_CONV_TERMS, "residual_ptr", "x2_ptr", "scale_ptr", "shift_ptr")
        )
        | {"ACT": "silu", "SPLITS": 0, "CG": 4, "BLOCK_G": 1, "BLOCK_J": 4, "BLOCK_P": 4096},
        "options": {"num_warps": 16},
    },
    {
        "name": "sum_parts",
        "kernel": "triton_kernels.fused.norm_whole_kernels:_sum_parts_kernel",
        "signature": _types("*fp32", "parts_ptr", "bias_ptr", "extra_bias_ptr", "emb_ptr")
        | _types("*bf16", "residual_ptr", "y_ptr")
        | _types("i32", "stride_emb", "N", "HW", "C", "CB", "PB"),
        "constexprs": {"SPLITS": 9, "BLOCK_C": 16, "BLOCK_P": 64},
        "multiples": ("HW", "C", "stride_emb"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
    {
        "name": "norm_of_sums of two tensors",
        "kernel": "triton_kernels.fused.norm_whole_kernels:_norm_sums_kernel",
        "signature": _types("*bf16", "x1_ptr", "x2_ptr", "a_ptr")
        | _types("*fp32", "partial1_ptr", "partial2_ptr", *_FILM)
        | _types("i32", "stride_scale", "stride_shift", "pixels1", "pixels2")
        | _types("i32", "HW", "C1", "C2", "K", "CB1", "CB")
        | {"eps": "fp32"},
        "constexprs": {
            "ACT": "silu", "K1": 64, "K2": 32, "CG": 6, "MASKED": False, "TILES": 1,
            "BLOCK_P": 16, "BLOCK_C": 64, "BLOCK_G": 16, "BLOCK_J": 8,
            "BLOCK_K1": 64, "BLOCK_K2": 32,
        },
        "multiples": ("HW", "C1", "C2", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 8},
    },
    _NORM_CONV
    | {
        "name": "norm_conv of 64 channels",
        "constexprs": dict.fromkeys(
            ("x2_ptr", "partial2_ptr", "scale_ptr", "shift_ptr", "extra_bias_ptr", *_EXTRA)
        )
        | _NORM_CONV_SHAPE
        | {"K1": 64, "K2": 1, "CG": 2, "W": 64, "BLOCK_J": 2, "BLOCK_K1": 64, "BLOCK_K2": 1}
        | {"BLOCK_C1": 64, "BLOCK_C2": 1},
    },
    _NORM_CONV
    | {
        "name": "norm_conv of 320 channels of two tensors, every term",
        "constexprs": _NORM_CONV_SHAPE
        | {"K1": 4, "K2": 32, "CG": 10, "W": 32, "BLOCK_J": 16, "BLOCK_K1": 4, "BLOCK_K2": 32}
        | {"BLOCK_C1": 256, "BLOCK_C2": 128, "UP1": True, "UP_E1": True, "BLOCK_M": 32},
        "options": {"num_warps": 4, "num_stages": 2},
    },
    _NORM_CONV_SPLIT
    | {
        "name": "norm_conv_split of 16 parts",
        "constexprs": dict.fromkeys(("x2_ptr", *_EXTRA))
        | _NORM_CONV_SPLIT_SHAPE
        | {"SPLITS": 16, "CG": 8, "BLOCK_J": 8},
    },
    _NORM_CONV_SPLIT
    | {
        "name": "norm_conv_split of 24 parts beside a tensor, every term",
        "constexprs": _NORM_CONV_SPLIT_SHAPE | {"SPLITS": 24, "CG": 16, "BLOCK_J": 16},
        "options": {"num_warps": 8},
    },
    *(
        {
            "name": f"attention_split, {t} positions",
            "kernel": "triton_kernels.fused.attention_split:_attention_split_kernel",
            "signature": _types("*bf16", "a_ptr", "qkv_weight_ptr", "proj_weight_ptr")
            | _types("*fp32", "qkv_bias_ptr", "parts_ptr")
            | _types("i32", "N", "num_heads")
            | {"scale": "fp32"},
            "constexprs": {
                "T": t, "C": c, "D": 32, "HEADS_QKV": False, "PRECISION": "tf32", "BLOCK_T": t,
                "BLOCK_M": 64, "BLOCK_D": 32, "BLOCK_K": 64, "BLOCK_C": 64,
            },
            "options": {"num_warps": warps, "num_stages": 3},
            "expect": {"arches": (90,)},
        }
        for t, c, warps in ((64, 256, 4), (256, 192, 8))
    ),
    {
        "name": "begin_step",
        "kernel": "triton_kernels.fused.begin_step:_begin_step_kernel",
        "signature": _types("*fp32", "x_ptr", "table_ptr", "emb_ptr")
        | {"image_ptr": "*bf16"}
        | _types("*i64", "row_ptr", "index_ptr")
        | _types("i32", "elements", "emb_elements", "image_programs", "U", "E"),
        "constexprs": {"C": 3, "CP": 16, "BLOCK": 1024},
        "multiples": ("elements", "E"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
]  # fmt: skip
