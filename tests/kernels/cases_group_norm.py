"""Kernels of group_norm to compile for every chip, in bf16 and with every optional argument:
64 channels in 32 groups at 64x64 by passes, 192 channels in 32 groups at 16x16 in registers. Those
of "two" are over a concatenation."""

from triton_kernels.hopper.descriptors import SUPPORTED

from .compile_only import WITHOUT_PRODUCTS, ints

CHIPS = WITHOUT_PRODUCTS

_PASS = {"MASKED": False, "TILES": 4, "BLOCK_P": 64, "BLOCK_C": 64}
_SMALL_PASS = {"MASKED": True, "TILES": 2, "BLOCK_P": 32, "BLOCK_C": 64}
_RESIDENT = {"GROUPS": 8, "BLOCK_P": 256, "BLOCK_C": 64, "BLOCK_G": 8}
_LAUNCH = {"num_warps": 4, "num_stages": 2}
_PARAMS = {name: "*fp32" for name in ("weight_ptr", "bias_ptr")} | {
    name: "*bf16" for name in ("scale_ptr", "shift_ptr")
}
_ALONE = {"x2_ptr": None}
_STATS = {name: "*fp32" for name in ("mean_ptr", "rstd_ptr")}


COMPILE_CASES = [
    {
        "name": "group_norm_stats",
        "kernel": "triton_kernels.norm.multi_pass_kernels:group_norm_stats_kernel",
        "signature": {"x1_ptr": "*bf16", "partial_ptr": "*fp32"}
        | ints("HW", "C1", "C", "K", "CB1", "CB"),
        "constexprs": _PASS | _ALONE,
        "multiples": ("HW", "C1", "C"),
        "options": _LAUNCH,
        "expect": {},
    },
    {
        "name": "group_norm_bwd_sums",
        "kernel": "triton_kernels.norm.multi_pass_kernels:group_norm_bwd_sums_kernel",
        "signature": {"x1_ptr": "*bf16", "dy_ptr": "*bf16"}
        | _STATS
        | _PARAMS
        | {"partial_ptr": "*fp32"}
        | ints("stride_scale", "stride_shift", "HW", "C1", "C", "G", "K", "CB1", "CB"),
        "constexprs": {"CG": 2, "ACT": "silu"} | _SMALL_PASS | {"TILES": 8} | _ALONE,
        "multiples": ("HW", "C1", "C"),
        "options": _LAUNCH,
        "expect": {},
    },
    {
        "name": "group_norm_bwd_dx",
        "kernel": "triton_kernels.norm.multi_pass_kernels:group_norm_bwd_dx_kernel",
        "signature": {"x1_ptr": "*bf16", "dy_ptr": "*bf16"}
        | _STATS
        | {"m1_ptr": "*fp32", "m2_ptr": "*fp32"}
        | _PARAMS
        | {"dx1_ptr": "*bf16"}
        | ints("stride_scale", "stride_shift", "HW", "C1", "C", "G", "K", "CB1", "CB"),
        "constexprs": {"CG": 2, "ACT": "gelu_tanh", "dx2_ptr": None} | _SMALL_PASS | _ALONE,
        "multiples": ("HW", "C1", "C"),
        "options": _LAUNCH,
        "expect": {},
    },
    {
        "name": "group_norm_bwd_params",
        "kernel": "triton_kernels.norm.multi_pass_kernels:group_norm_bwd_params_kernel",
        "signature": {"partial_ptr": "*fp32"}
        | {name: "*fp32" for name in ("weight_ptr", "bias_ptr")}
        | {"scale_ptr": "*bf16"}
        | {name: "*fp32" for name in ("d_weight_ptr", "d_bias_ptr")}
        | {name: "*bf16" for name in ("d_scale_ptr", "d_shift_ptr")}
        | ints("stride_scale", "N", "C", "K"),
        "constexprs": {"BLOCK_N": 32, "BLOCK_K": 4, "BLOCK_C": 16},
        "multiples": ("C",),
        "options": _LAUNCH,
        "expect": {},
    },
    {
        "name": "group_norm_resident_fwd",
        "kernel": "triton_kernels.norm.single_program:_group_norm_resident_fwd_kernel",
        "signature": {"x1_ptr": "*bf16"}
        | _STATS
        | _PARAMS
        | {"y_ptr": "*bf16"}
        | ints("stride_scale", "stride_shift", "HW", "C1", "C", "G", "CB")
        | {"eps": "fp32"},
        "constexprs": {"CG": 6, "ACT": "silu"} | _RESIDENT | _ALONE,
        "multiples": ("HW", "C1", "C"),
        "options": {"num_warps": 8},
        "expect": {},
    },
    {
        "name": "group_norm_resident_bwd",
        "kernel": "triton_kernels.norm.single_program:_group_norm_resident_bwd_kernel",
        "signature": {"x1_ptr": "*bf16", "dy_ptr": "*bf16"}
        | _STATS
        | _PARAMS
        | {"dx1_ptr": "*bf16", "sums_ptr": "*fp32"}
        | ints("stride_scale", "stride_shift", "HW", "C1", "C", "G", "CB"),
        "constexprs": {"CG": 6, "ACT": "silu", "dx2_ptr": None} | _RESIDENT | _ALONE,
        "multiples": ("HW", "C1", "C"),
        "options": {"num_warps": 16},
        "expect": {},
    },
]


def _of_two(case: dict, *pointers: str) -> dict:
    """The same kernel over a concatenation."""
    return case | {
        "name": f"{case['name']}_of_two",
        "signature": case["signature"] | dict.fromkeys(pointers, "*bf16"),
        "constexprs": {k: v for k, v in case["constexprs"].items() if k not in pointers},
    }


def _of_one_warp(case: dict, pixels: int) -> dict:
    tile = {"BLOCK_P": pixels, "TILES": 16, "MASKED": False}
    return case | {
        "name": f"{case['name']}_of_one_warp",
        "constexprs": case["constexprs"] | tile,
        "options": {"num_warps": 1},
    }


COMPILE_CASES += [
    {
        "name": "group_norm_cluster_fwd",
        "kernel": "triton_kernels.norm.cluster_kernels:group_norm_cluster_fwd_kernel",
        "signature": {"x_ptr": "*bf16", "partial_ptr": "*fp32"}
        | _STATS
        | _PARAMS
        | {"y_ptr": "*bf16"}
        | ints("stride_scale", "stride_shift", "tasks")
        | {"eps": "fp32"},
        "constexprs": {"C": 192, "CG": 6, "ACT": "silu", "num_warps": 8}
        | {"CTAS": 8, "TILES": 8, "PARTS": 3, "BLOCK_C": 32},
        "options": {"num_warps": 8, "num_ctas": 8},
        "expect": {"arches": (90,)},
    },
    {
        "name": "group_norm_cluster_bwd",
        "kernel": "triton_kernels.norm.cluster_grad_kernels:group_norm_cluster_bwd_kernel",
        "signature": {"x_ptr": "*bf16", "dy_ptr": "*bf16"}
        | {"partial_ptr": "*fp32", "sums_ptr": "*fp32"}
        | _STATS
        | _PARAMS
        | {"dx_ptr": "*bf16"}
        | ints("stride_scale", "stride_shift", "tasks"),
        "constexprs": {"C": 64, "CG": 2, "ACT": "silu", "ROUNDED_ACT": "silu_tanh", "num_warps": 4}
        | {"CTAS": 8, "TILES": 16, "PARTS": 1, "BLOCK_C": 32, "LAG": 2},
        "options": {"num_warps": 4, "num_ctas": 8, "maxnreg": 168},
        "expect": {"arches": (90,)},
    },
] * SUPPORTED


_BY_NAME = {case["name"]: case for case in COMPILE_CASES}
COMPILE_CASES += [
    _of_one_warp(_BY_NAME["group_norm_stats"], 16),
    _of_one_warp(_BY_NAME["group_norm_bwd_sums"], 8),
    _of_two(_BY_NAME["group_norm_stats"], "x2_ptr"),
    _of_two(_BY_NAME["group_norm_bwd_dx"], "x2_ptr", "dx2_ptr"),
    _of_two(_BY_NAME["group_norm_resident_fwd"], "x2_ptr"),
    # 16 warps have 128 registers a thread: four too few on sm_120 with Triton 3.7
    _of_two(_BY_NAME["group_norm_resident_bwd"], "x2_ptr", "dx2_ptr") | {"expect": {"spills": 16}},
]
