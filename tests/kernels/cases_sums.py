"""The small kernels around the others: sums in a fixed order, resampling, dropout, and the norms'
passes that have no case elsewhere. In bf16, at the shapes of 64x64 images of 64 channels."""

from .compile_only import WITHOUT_PRODUCTS, ints, types

CHIPS = WITHOUT_PRODUCTS

_LAUNCH = {"num_warps": 4}
_PARAMS = types("*fp32", "weight_ptr", "bias_ptr") | types("*bf16", "scale_ptr", "shift_ptr")


def _case(
    kernel: str,
    signature: dict[str, str],
    constexprs: dict[str, object],
    multiples: tuple[str, ...] = ("C",),
) -> dict:
    return {
        "name": kernel.split(":")[1].strip("_").removesuffix("_kernel"),
        "kernel": f"triton_kernels.{kernel}",
        "signature": signature,
        "constexprs": constexprs,
        "multiples": multiples,
        "options": _LAUNCH,
    }


COMPILE_CASES = [
    _case(
        "reductions.column_sum:_column_sum_kernel",
        {"x_ptr": "*bf16", "out_ptr": "*fp32"} | ints("M", "C", "rows_per_split"),
        {"BLOCK_M": 128, "BLOCK_C": 64},
    ),
    _case(
        "reductions.column_sum:_sum_partials_kernel",
        types("*fp32", "partial_ptr", "out_ptr") | ints("splits", "numel", "cols", "stride_out"),
        {"ACCUMULATE": True, "BLOCK_S": 16, "BLOCK": 128},
        ("numel", "cols", "stride_out"),
    ),
    _case(
        "reductions.row_sums:_segment_sums_kernel",
        types("*fp32", "workspace_ptr", "grad_ptr") | {"table_ptr": "*i64"},
        {"BLOCK_M": 256, "BLOCK_C": 8},
        (),
    ),
    _case(
        "conv.wgrad_pair:_sum_two_kernel",
        types("*fp32", "partial_ptr", "out1_ptr", "out2_ptr") | ints("splits", "numel1", "numel2"),
        {"ACCUMULATE": True, "BLOCK_S": 16, "BLOCK": 128},
        ("numel1", "numel2"),
    ),
    _case(
        "conv.wgrad_group:_sum_group_kernel",
        types("*fp32", "part_ptr", *(f"out{i}_ptr" for i in range(1, 5)))
        | ints(*(f"{name}{i}" for name in ("CI", "CO", "stride") for i in range(1, 5)))
        | ints("programs", "tiles"),
        {"TILE_CO": 64, "TILE_CI": 64, "TAPS": 9, "ACCUMULATE": True, "BLOCK_S": 16, "BLOCK": 128},
        tuple(f"{name}{i}" for name in ("CI", "CO", "stride") for i in range(1, 5)),
    ),
    _case(
        "norm.table_kernels:norm_partials_kernel",
        {"x_ptr": "*bf16", "partial_ptr": "*fp32"} | ints("pixels", "C", "CB"),
        {"TILES": 4, "BLOCK_P": 64, "BLOCK_C": 64},
        ("pixels", "C"),
    ),
    _case(
        "norm.table_kernels:norm_grad_sums_kernel",
        types("*fp32", "rows_ptr", "out0_ptr", "out1_ptr", "out2_ptr") | ints("N", "C"),
        {"ROWS": 3, "ACCUMULATE": True, "BLOCK_N": 128, "BLOCK_C": 16},
    ),
    _case(
        "norm.multi_pass_kernels:group_norm_finalize_kernel",
        types("*fp32", "partial_ptr", "mean_ptr", "rstd_ptr")
        | ints("HW", "C", "G", "GB")
        | {"eps": "fp32"},
        {"CHUNK": 256, "K": 16, "CG": 2, "BLOCK_G": 32, "BLOCK_E": 32},
        ("HW", "C", "G"),
    ),
    _case(
        "norm.multi_pass_kernels:group_norm_apply_kernel",
        types("*bf16", "x1_ptr", "x2_ptr", "y_ptr")
        | types("*fp32", "mean_ptr", "rstd_ptr")
        | _PARAMS
        | ints("stride_scale", "stride_shift", "HW", "C1", "C", "G", "K", "CB1", "CB"),
        {"CG": 4, "ACT": "silu", "MASKED": False, "TILES": 2, "BLOCK_P": 64, "BLOCK_C": 64},
        ("HW", "C1", "C"),
    ),
    _case(
        "norm.multi_pass_kernels:group_norm_bwd_finalize_kernel",
        types("*fp32", "partial_ptr", "weight_ptr", "m1_ptr", "m2_ptr")
        | {"scale_ptr": "*bf16"}
        | ints("stride_scale", "HW", "C", "G", "GB"),
        {"K": 16, "CG": 2, "BLOCK_G": 32, "BLOCK_E": 32},
        ("HW", "C", "G"),
    ),
    _case(
        "resample.op:_gather_kernel",
        types("*bf16", "fine_ptr", "coarse_ptr")
        | {"factor": "fp32"}
        | ints("H", "W", "C", "P", "Q", "QB", "CB"),
        {"BLOCK_Q": 32, "BLOCK_C": 64},
    ),
    _case(
        "resample.op:_spread_kernel",
        types("*bf16", "coarse_ptr", "fine_ptr", "add_ptr")
        | {"sums_ptr": "*fp32", "factor": "fp32"}
        | ints("H", "W", "C", "P", "Q", "QB", "CB"),
        {"BLOCK_Q": 16, "BLOCK_C": 64},
    ),
    _case(
        "noise.dropout:_dropout_kernel",
        types("*bf16", "x_ptr", "y_ptr")
        | {"rng_ptr": "*i64"}
        | ints("first", "stream", "elements", "chunks")
        | types("fp32", "p", "factor"),
        {"BLOCK": 256},
        ("elements",),
    ),
]
