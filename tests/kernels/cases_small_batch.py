"""Kernels of inference at a small batch to compile for every chip, in bf16: 256 channels in 32
groups at 8x8, in the tiles that one such image gets."""

from .compile_only import WITHOUT_PRODUCTS, types

CHIPS = WITHOUT_PRODUCTS

_CONV_SPLIT = {
    "name": "conv_split, two extras",
    "kernel": "triton_kernels.conv.plain.split_k:_conv_split_kernel",
    "signature": types("tensordesc<bf16[1,8,8,64]>", "x_desc", "extra1_desc", "extra2_desc")
    | {"w_desc": "tensordesc<bf16[1,64,64]>"}
    | types("tensordesc<bf16[64,64]>", "extra1_w_desc", "extra2_w_desc")
    | {"parts_ptr": "*fp32"}
    | types("i32", "N", "P", "Q", "CI", "C1", "C2", "CO", "steps"),
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

_FILM = ("weight_ptr", "bias_ptr", "scale_ptr", "shift_ptr")
_CONV_TERMS = ("parts_ptr", "conv_bias_ptr", "extra_bias_ptr", "emb_ptr")

_NORM_WHOLE = {
    "kernel": "triton_kernels.norm.single_cta_kernels:norm_whole_kernel",
    "options": {"num_warps": 4},
    "multiples": ("HW", "C1", "C", "stride_emb", "stride_scale", "stride_shift"),
}
_WHOLE_INTS = types("i32", "stride_emb", "stride_scale", "stride_shift") | types(
    "i32", "N", "HW", "C1", "C", "GB"
)

_EARLY_POINTERS = types("*bf16", "x_ptr", "extra1_ptr", "extra2_ptr")
_EARLY_INTS = ("stride_emb", "M", "CI", "C1", "C2", "CO", "WIDTH")
_EARLY = {
    "kernel": "triton_kernels.conv.plain.small_batch_kernels:conv_early_kernel",
    "multiples": _EARLY_INTS,
    "expect": {"wgmma": True, "tma": True, "arches": (90, 100)},
}

COMPILE_CASES = [
    _CONV_SPLIT,
    _EARLY
    | {
        "name": "conv_early in parts, two extras",
        "signature": _EARLY_POINTERS
        | {"weight_desc": "tensordesc<bf16[64,512]>", "out_ptr": "*fp32"}
        | types("tensordesc<bf16[64,256]>", "extra1_desc", "extra2_desc")
        | types("i32", *_EARLY_INTS, "splits"),
        "constexprs": dict.fromkeys(
            ("tail_desc", "bias_ptr", "extra_bias_ptr", "emb_ptr", "residual_ptr", "partial_ptr")
        )
        | {"H": 16, "W": 16, "R": 3, "S": 3, "PARTS": True, "PRECISION": "tf32", "BLOCK_C": 64}
        | {"BLOCK_M": 32, "BLOCK_K": 512, "BLOCK_E1": 256, "BLOCK_E2": 256, "ROUNDS": 1}
        | {"REST1": False, "REST2": True}
        | {"EARLY": 1, "TAIL": 0},
        "options": {"num_warps": 8, "num_stages": 1},
    },
    _EARLY
    | {
        "name": "conv_early, all terms",
        "signature": _EARLY_POINTERS
        | {"weight_desc": "tensordesc<bf16[64,256]>", "tail_desc": "tensordesc<bf16[64,128]>"}
        | types("tensordesc<bf16[64,64]>", "extra1_desc", "extra2_desc")
        | types("*bf16", "residual_ptr", "out_ptr")
        | types("*fp32", "bias_ptr", "extra_bias_ptr", "emb_ptr", "partial_ptr")
        | types("i32", *_EARLY_INTS, "splits"),
        "constexprs": {"H": 64, "W": 64, "R": 3, "S": 3, "PARTS": False, "PRECISION": "tf32"}
        | {"BLOCK_C": 64, "BLOCK_M": 32, "BLOCK_K": 256, "BLOCK_E1": 64, "BLOCK_E2": 64}
        | {"REST1": False, "REST2": False}
        | {"ROUNDS": 2, "EARLY": 2, "TAIL": 128},
        "options": {"num_warps": 8, "num_stages": 1},
    },
    {
        "name": "resample_parts",
        "kernel": "triton_kernels.conv.plain.split_k_sum:resample_parts_kernel",
        "signature": types("*fp32", "parts_ptr", "bias_ptr", "extra_bias_ptr", "emb_ptr")
        | types("*fp32", "partial_ptr")
        | types("*bf16", "residual_ptr", "y_ptr", "resampled_ptr")
        | types("i32", "stride_emb", "N", "HW", "W", "C", "CB", "PB"),
        "constexprs": {"SPLITS": 9, "UP": False, "BLOCK_C": 16, "BLOCK_P": 16},
        "multiples": ("HW", "W", "C", "stride_emb"),
        "options": {"num_warps": 2},
        "expect": {"arches": (90,)},
    },
    _NORM_WHOLE
    | {
        "name": "norm_whole of a convolution in parts, beside another tensor",
        "signature": types("*bf16", "x1_ptr", "x2_ptr", "residual_ptr", "a_ptr")
        | types("*fp32", *_CONV_TERMS, *_FILM)
        | _WHOLE_INTS
        | {"eps": "fp32"},
        "constexprs": {"ACT": "silu", "SPLITS": 9, "CG": 16, "BLOCK_G": 1, "BLOCK_J": 16}
        | {"BLOCK_P": 64, "LATE": False, "pooled_ptr": None, "W": None},
    },
    _NORM_WHOLE
    | {
        "name": "norm_whole, the largest group",
        "signature": types("*bf16", "x1_ptr", "a_ptr")
        | types("*fp32", "weight_ptr", "bias_ptr")
        | _WHOLE_INTS
        | {"eps": "fp32"},
        "constexprs": dict.fromkeys(
            (*_CONV_TERMS, "pooled_ptr", "W", "residual_ptr", "x2_ptr", "scale_ptr", "shift_ptr")
        )
        | {"ACT": "silu", "SPLITS": 0, "CG": 4, "BLOCK_G": 1, "BLOCK_J": 4, "BLOCK_P": 4096}
        | {"LATE": False},
        "options": {"num_warps": 16},
    },
    {
        "name": "sum_parts",
        "kernel": "triton_kernels.conv.plain.split_k_sum:sum_parts_kernel",
        "signature": types("*fp32", "parts_ptr", "bias_ptr", "extra_bias_ptr", "emb_ptr")
        | types("*fp32", "partial_ptr")
        | types("*bf16", "residual_ptr", "y_ptr")
        | types("i32", "stride_emb", "N", "HW", "C", "CB", "PB"),
        "constexprs": {"SPLITS": 9, "BLOCK_C": 16, "BLOCK_P": 64},
        "multiples": ("HW", "C", "stride_emb"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
    {
        "name": "norm_of_sums of two tensors",
        "kernel": "triton_kernels.norm.from_partials_kernels:norm_sums_kernel",
        "signature": types("*bf16", "x1_ptr", "x2_ptr", "a_ptr")
        | types("*fp32", "partial1_ptr", "partial2_ptr", *_FILM)
        | types("i32", "stride_scale", "stride_shift", "pixels1", "pixels2")
        | types("i32", "HW", "C1", "C2", "PB1", "PB2", "CB1", "CB2")
        | {"eps": "fp32"},
        "constexprs": {
            "ACT": "silu_tanh", "SMALL_W": 32, "CORNERS": True, "large_ptr": None,
            "K1": 8, "K2": 32, "CG": 6, "MASKED": False, "TILES": 4,
            "BLOCK_P": 128, "BLOCK_C": 32, "BLOCK_G": 8, "BLOCK_J": 8, "BLOCK_K": 32,
        },
        "multiples": ("HW", "C1", "C2", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 8},
    },
    {
        "name": "norm_of_sums of one tensor",
        "kernel": "triton_kernels.norm.from_partials_kernels:norm_sums_kernel",
        "signature": types("*bf16", "x1_ptr", "a_ptr")
        | types("*fp32", "partial1_ptr", *_FILM)
        | types("i32", "stride_scale", "stride_shift", "pixels1", "pixels2")
        | types("i32", "HW", "C1", "C2", "PB1", "PB2", "CB1", "CB2")
        | {"eps": "fp32"},
        "constexprs": {
            "x2_ptr": None, "partial2_ptr": None, "large_ptr": None,
            "ACT": "silu_tanh", "SMALL_W": None, "CORNERS": False,
            "K1": 8, "K2": 1, "CG": 4, "MASKED": False, "TILES": 2,
            "BLOCK_P": 128, "BLOCK_C": 32, "BLOCK_G": 8, "BLOCK_J": 4, "BLOCK_K": 8,
        },
        "multiples": ("HW", "C1", "C2", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 8},
        "expect": {"narrow": False, "arches": (90,)},
    },
    {
        "name": "norm_image_table of two tensors",
        "kernel": "triton_kernels.norm.image_table:_norm_image_table_kernel",
        "signature": types("*fp32", "partial1_ptr", "partial2_ptr", "table_ptr", *_FILM)
        | types("i32", "stride_scale", "stride_shift", "pixels1", "pixels2", "C1", "C2", "GB")
        | {"eps": "fp32"},
        "constexprs": {
            "K1": 32, "K2": 32, "CG": 4, "BLOCK_G": 8, "BLOCK_J": 4, "BLOCK_K": 32,
        },
        "multiples": ("C1", "C2", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 8},
        "expect": {"arches": (90,)},
    },
    {
        "name": "norm_few of two tensors",
        "kernel": "triton_kernels.norm.small_batch:_norm_few_kernel",
        "signature": types("*bf16", "x1_ptr", "x2_ptr", "large_ptr", "a_ptr")
        | types("*fp32", "partial1_ptr", "partial2_ptr", *_FILM)
        | types("i32", "stride_scale", "stride_shift", "pixels1", "pixels2")
        | types("i32", "HW", "C1", "C2", "PB", "GB")
        | {"eps": "fp32"},
        "constexprs": {
            "ACT": "silu", "W": 32, "K1": 16, "K2": 128, "CG": 6, "BLOCK_P": 256, "BLOCK_G": 2,
            "BLOCK_J": 8, "BLOCK_K1": 16, "BLOCK_K2": 128,
        },
        "multiples": ("HW", "C1", "C2", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 8},
    },
    {
        "name": "norm_linear_few",
        "kernel": "triton_kernels.conv.plain.norm_linear:_norm_linear_kernel",
        "signature": types("*bf16", "x_ptr", "y_ptr")
        | types("*fp32", "partial_ptr", "weight_ptr", "bias_ptr", "filter_bias_ptr")
        | types("tensordesc<bf16[64,256]>", "filter_desc")
        | types("i32", "pixels", "C", "CO")
        | {"eps": "fp32"},
        "constexprs": {
            "HW": 64, "K": 4, "CG": 8, "BLOCK_C": 64, "BLOCK_M": 32, "BLOCK_K": 256,
            "BLOCK_G": 32, "BLOCK_J": 8, "BLOCK_T": 4,
        },
        "multiples": ("C", "CO"),
        "options": {"num_warps": 4, "num_stages": 1},
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    },
    {
        "name": "qkv_attention",
        "kernel": "triton_kernels.attention.small_batch:_qkv_attention_kernel",
        "signature": types("*bf16", "x_ptr", "o_ptr")
        | {"weight_desc": "tensordesc<bf16[4,32,256]>", "bias_ptr": "*fp32"}
        | {"num_heads": "i32", "scale_log2": "fp32"},
        "constexprs": {"T": 64, "C": 256, "D": 32, "HEADS_QKV": False, "BLOCK_C": 256}
        | {"BLOCK_T": 64},
        "options": {"num_warps": 4, "num_stages": 1},
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,)},
    },
    {
        "name": "begin_step",
        "kernel": "triton_kernels.embedding.begin_step:_begin_step_kernel",
        "signature": types("*fp32", "x_ptr", "table_ptr", "emb_ptr")
        | {"image_ptr": "*bf16"}
        | types("*i64", "row_ptr", "index_ptr", "cleared_ptr")
        | types("i32", "elements", "emb_elements", "cleared", "image_programs", "emb_programs")
        | types("i32", "U", "E"),
        "constexprs": {"C": 3, "CP": 16, "BLOCK": 4096},
        "multiples": ("elements", "cleared", "E"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
]  # fmt: skip
