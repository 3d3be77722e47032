"""Kernels of norm_passes and norm_tables to compile for every chip, in bf16: 64 and 64 channels in
32 groups at 64x64, in the tiles that such an image gets."""

from .compile_only import ARCHES, WITHOUT_PRODUCTS, ints, types

CHIPS = WITHOUT_PRODUCTS

_LAUNCH = {"num_warps": 4}
_GROUPS = {"CG": 4, "BLOCK_G": 4, "BLOCK_J": 4}


_FOLDED = {"CG": 6, "MASKED": False, "TILES": 2, "BLOCK_P": 64, "BLOCK_C": 64}
_FOLDED |= {"BLOCK_G": 16, "BLOCK_J": 8}

_APPLY = {
    "kernel": "triton_kernels.norm.pass_kernels:norm_apply_kernel",
    "signature": types("*bf16", "x1_ptr", "x2_ptr", "a_ptr")
    | {"table_ptr": "*fp32"}
    | ints("HW", "W", "C1", "C2", "K", "CB1", "CB", "first", "stream")
    | {"rng_ptr": "*i64", "drop": "fp32"},
    "multiples": ("HW", "W", "C1", "C2"),
    "options": _LAUNCH,
}
_APPLY_TILE = {
    "ACT": "silu",
    "MASKED": False,
    "CORNERS": False,
    "TILES": 2,
    "BLOCK_P": 64,
    "BLOCK_C": 64,
}

COMPILE_CASES = [
    {
        "name": "norm_table",
        "kernel": "triton_kernels.norm.table_kernels:norm_table_kernel",
        "signature": types("*fp32", "partial1_ptr", "partial2_ptr", "weight_ptr", "bias_ptr")
        | types("*bf16", "scale_ptr", "shift_ptr")
        | types("*fp32", "table_ptr")
        | ints("stride_scale", "stride_shift", "pixels1", "pixels2", "C1", "C", "GB")
        | {"eps": "fp32"},
        "constexprs": {"K1": 32, "K2": 16, "BLOCK_K1": 32, "BLOCK_K2": 16, "second_ptr": None}
        | _GROUPS,
        "multiples": ("C1", "C", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": {"num_warps": 1},
    },
    {
        "name": "norm_grad_table",
        "kernel": "triton_kernels.norm.table_kernels:norm_grad_table_kernel",
        "signature": types("*fp32", "partial_ptr", "input_partial_ptr", "table_ptr")
        | types("*fp32", "weight_ptr", "bias_ptr", "coeff_ptr", "rows_ptr")
        | types("*bf16", "scale_ptr", "d_scale_ptr", "d_shift_ptr", "d_emb_ptr")
        | ints("stride_scale", "stride_dscale", "stride_dshift", "stride_demb")
        | ints("pixels", "C", "GB"),
        "constexprs": {"ROWS": 3, "K": 32, "KX": 16, "BLOCK_K": 32, "BLOCK_KX": 16} | _GROUPS,
        "multiples": ("C", "pixels"),
        "options": {"num_warps": 1},
    },
    _APPLY
    | {
        "name": "apply",
        "constexprs": _APPLY_TILE | {"EARLY": False, "UPSAMPLED": False, "large_ptr": None},
    },
    _APPLY
    | {
        "name": "apply, upsampled, pixels before the table",
        "signature": _APPLY["signature"] | {"large_ptr": "*bf16"},
        "constexprs": _APPLY_TILE | {"EARLY": True, "UPSAMPLED": True},
    },
    {
        "name": "avg_pool_partials",
        "kernel": "triton_kernels.resample.avg_pool_partials:_pool_partials_kernel",
        "signature": types("*bf16", "x_ptr", "y_ptr")
        | {"partial_ptr": "*fp32"}
        | ints("pixels", "H", "W", "C", "K", "CB"),
        "constexprs": {"BLOCK_P": 64, "BLOCK_C": 64},
        "multiples": ("pixels", "H", "W", "C", "K"),
        "options": {"num_warps": 8},
    },
    {
        "name": "norm_dx",
        "kernel": "triton_kernels.norm.pass_kernels:norm_dx_kernel",
        "signature": types("*bf16", "dz_ptr", "x1_ptr", "x2_ptr")
        | types("*bf16", "add1_ptr", "add1_second_ptr", "add2_ptr", "dx1_ptr", "dx2_ptr")
        | types("*fp32", "coeff_ptr", "sums_ptr")
        | ints("HW", "W", "C1", "C2", "K", "CB1", "CB"),
        "constexprs": {"UPSAMPLE": True, "MASKED": False}
        | {"TILES": 1, "BLOCK_P": 64, "BLOCK_C": 64},
        "multiples": ("HW", "W", "C1", "C2"),
        "options": _LAUNCH,
    },
    {
        "name": "activation_grad",
        "kernel": "triton_kernels.norm.activation_grad:_activation_grad_kernel",
        "signature": types("*bf16", "da_ptr", "x_ptr", "dz_ptr")
        | types("*fp32", "table_ptr", "partial_ptr")
        | ints("PIXELS", "C", "K", "CB"),
        "constexprs": {"ACT": "silu", "TILES": 2, "BLOCK_P": 64, "BLOCK_C": 64},
        "multiples": ("PIXELS", "C"),
        "options": {"num_warps": 8},
    },
    {
        "name": "sinusoids",
        "kernel": "triton_kernels.embedding.sinusoids:_sinusoids_kernel",
        "signature": {
            "t_ptr": "*i64",
            "frequencies_ptr": "*fp32",
            "out_ptr": "*fp32",
            "stride_t": "i32",
            "size": "i32",
        },
        "constexprs": {"HALF": 32, "WIDTH": 64, "BLOCK": 256},
        "options": {"num_warps": 4},
    },
    {
        "name": "pad_channels",
        "kernel": "triton_kernels.conv.plain.pad_channels:_pad_channels_kernel",
        "signature": {"x_ptr": "*fp32", "out_ptr": "*bf16", "size": "i32", "C": "i32"},
        "constexprs": {"WIDTH": 16, "BLOCK": 1024},
        "multiples": ("size",),
        "options": _LAUNCH,
    },
    {
        "name": "linear_grads",
        "kernel": "triton_kernels.embedding.linear_grads:_linear_grads_kernel",
        "signature": types("*fp32", "x_ptr", "dy_ptr", "weight_ptr", "grad_weight_ptr")
        | types("*fp32", "grad_bias_ptr", "part_ptr")
        | ints("N", "CI", "CO"),
        "constexprs": {"BLOCK_N": 32, "BLOCK_CO": 64, "BLOCK_CI": 64},
        "multiples": ("CI", "CO"),
        "options": _LAUNCH,
        "expect": {"arches": ARCHES},
    },
    {
        "name": "norm_apply_folded",
        "kernel": "triton_kernels.norm.inline_statistics_kernels:norm_apply_folded_kernel",
        "signature": types("*bf16", "x1_ptr", "x2_ptr", "a_ptr")
        | types("*fp32", "partial1_ptr", "partial2_ptr", "weight_ptr", "bias_ptr", "table_ptr")
        | types("*fp32", "scale_ptr", "shift_ptr")
        | ints("stride_scale", "stride_shift", "pixels1", "pixels2", "HW", "C1", "C2")
        | ints("K", "CB1", "CB")
        | {"eps": "fp32"},
        "constexprs": {"ACT": "silu", "K1": 8, "K2": 4, "BLOCK_K1": 8, "BLOCK_K2": 4} | _FOLDED,
        "multiples": ("C1", "C2", "HW", "pixels1", "pixels2", "stride_scale", "stride_shift"),
        "options": _LAUNCH,
    },
    {
        "name": "norm_dx_folded",
        "kernel": "triton_kernels.norm.inline_statistics_kernels:norm_dx_folded_kernel",
        "signature": types("*bf16", "dz_ptr", "x_ptr", "add_ptr", "add_second_ptr", "dx_ptr")
        | types("*fp32", "sums_ptr", "partial_ptr", "input_partial_ptr", "table_ptr")
        | types("*fp32", "weight_ptr", "bias_ptr", "rows_ptr", "scale_ptr", "d_scale_ptr")
        | types("*fp32", "d_shift_ptr", "d_emb_ptr")
        | ints("stride_scale", "stride_dscale", "stride_dshift", "stride_demb")
        | ints("HW", "C", "K", "CB"),
        "constexprs": {"ROWS": 3, "KZ": 8, "KX": 4, "BLOCK_KZ": 8, "BLOCK_KX": 4} | _FOLDED,
        "multiples": ("C", "HW"),
        "options": _LAUNCH,
    },
]
