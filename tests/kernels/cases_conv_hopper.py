"""The kernels of `conv.hopper.row_mma` as compile_only.py compiles them."""

from triton_kernels.hopper.descriptors import SUPPORTED


def _rows(*shape: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(2 * shape[-1], 16, rank=len(shape))
    return f"tensordesc<bf16{list(shape)},{layout!r}>"


def _resident(
    name: str,
    dgrad: bool,
    beside: int,
    extra: tuple[int, int] = (0, 0),
    k: int = 64,
    rows: int = 2,
    rings: tuple[int, int] = (5, 3),
    norm: str | None = None,  # sums or table
    makers: int = 0,
    upsampled: bool = False,  # the first of the extra tensors
    width: int = 64,
    means: bool = False,
) -> dict:
    two, filters = _rows(1, 2, width, 64), _rows(1, 64, 64)
    groups = 2 if any(extra) or rows * width == 256 or makers else 3
    spills = 160 if norm and rows == 4 else 48 if means else 32
    absent = ["beside1_desc", "beside2_desc"][beside:] + (["emb_ptr"] if dgrad else [])
    absent += [] if extra[0] else ["extra1_desc", "extra1_w_desc", "extra_bias_ptr"]
    absent += [] if extra[1] else ["extra2_desc", "extra2_w_desc"]
    film = ("scale_ptr", "shift_ptr", "stride_scale", "stride_shift")
    of_sums = ("sums_ptr", "norm_weight_ptr", "norm_bias_ptr", *film, "eps")
    absent += [] if norm == "sums" else of_sums
    absent += [] if norm == "table" else ["table_ptr"]
    absent += [] if makers else ["x_ptr"]
    absent += [] if means else ["means_ptr", "mean_sums_ptr"]
    vectors = ("vectors_ptr", "extra_bias_ptr", "emb_ptr", "partial_ptr")
    vectors += (
        "sums_ptr",
        "norm_weight_ptr",
        "norm_bias_ptr",
        "scale_ptr",
        "shift_ptr",
        "table_ptr",
        "mean_sums_ptr",
    )
    signature = {
        "x_ptr": "*bf16",
        "means_ptr": "*bf16",
        "x_desc": _rows(1, 1, width, k),
        "w_desc": _rows(1, k, 64) if dgrad else _rows(1, 64, k),
        "beside1_desc": two,
        "beside2_desc": two,
        "y_desc": two,
        "extra1_desc": _rows(1, 1, 32, 2, 64) if upsampled else _rows(1, 1, 64, 64),
        "extra1_w_desc": filters,
        "extra2_desc": _rows(1, 1, 64, 64),
        "extra2_w_desc": filters,
        **dict.fromkeys(vectors, "*fp32"),
        **dict.fromkeys(("stride_scale", "stride_shift"), "i32"),
        "eps": "fp32",
        **dict.fromkeys(("border", "stride_emb", "tiles", "tiles_h", "C"), "i32"),
    }
    return {
        "name": f"resident_{name}",
        "kernel": "triton_kernels.conv.hopper.stationary_weights:conv_resident_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "W": width,
            "DGRAD": dgrad,
            "ACT": "silu_tanh" if dgrad or norm else None,
            "ROWS": rows,
            "GROUPS": groups,
            "PAIRS": rings[0],
            "SLOTS": rings[1],
            "MAKERS": makers,
            "EXTRA1": extra[0],
            "EXTRA2": extra[1],
            "OVERLAP": not dgrad,
            "TILES_OF_X": 32 if norm == "sums" else None,
            "CG": 2 if norm == "sums" else None,
            "num_warps": 4,
        },
        "options": {
            "num_warps": 4,
            "maxnreg": (168 if groups == 2 else 128, 128, 96)[makers],
        },
        "multiples": ("border", "C"),
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,), "spills": spills},
    }


def _two(norm: str) -> dict:
    sums = ("sums1_ptr", "sums2_ptr", "norm_weight_ptr", "norm_bias_ptr")
    vectors = ("bias_ptr", "emb_ptr", "partial_ptr")
    vectors += sums if norm == "sums" else ("table_ptr",)
    absent = ["table_ptr"] if norm == "sums" else [*sums, "eps", "CG", "TILES_OF_X1", "TILES_OF_X2"]
    given = {"TILES_OF_X1": 32, "TILES_OF_X2": 16, "CG": 4}
    return {
        "name": f"resident_two_{norm}",
        "kernel": "triton_kernels.conv.hopper.stationary_weights_concat:conv_resident_two_kernel",
        "signature": {
            "x1_ptr": "*bf16",
            "x2_ptr": "*bf16",
            "w_desc": _rows(1, 64, 64),
            "y_desc": _rows(1, 1, 64, 64),
            **dict.fromkeys(vectors, "*fp32"),
            **({"eps": "fp32"} if norm == "sums" else {}),
            **dict.fromkeys(("stride_emb", "tiles", "tiles_h"), "i32"),
        },
        "constexprs": {
            **given,
            **dict.fromkeys(absent),
            "W": 64,
            "ACT": "silu_tanh",
            "PAIRS": 3,
            "OVERLAP": True,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 96},
        # of the sums once an image
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,), "spills": 192},
    }


def _wgrad(width: int, images: int = 1, count: int = 1, k: int = 64, swap: bool = False) -> dict:
    row, rows = width // images, 256 // width
    x = _rows(1, row, images, 64) if images > 1 else _rows(1, 1, row, k)
    dy = _rows(rows, row, images, 64) if images > 1 else _rows(1, rows, row, 64)
    second = {"x2_desc": x, "dy2_desc": dy}
    return {
        "name": f"wgrad_{row}"
        + ("_of_two" if count == 2 else "")
        + ("_of_16" if k == 16 else "")
        + ("_swapped" if swap else ""),
        "kernel": "triton_kernels.conv.hopper.row_wgrad:conv_rows_wgrad_kernel",
        "signature": {
            "x_desc": x,
            "dy_desc": dy,
            **(second if count == 2 else {}),
            "part_ptr": "*fp32",
            **dict.fromkeys(("stride_split", "CI", "CO", "CI2", "CO2", "tiles", "tiles_h"), "i32"),
        },
        "constexprs": {
            **({} if count == 2 else dict.fromkeys(second)),
            "W": width,
            "IMAGES": images,
            "STAGES": 2 if k == 64 else 4,
            "SWAP": swap,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 128},
        "multiples": ("stride_split", *(("CI",) if k == 64 else ()), "CO", "CI2", "CO2"),
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        _resident("forward", dgrad=False, beside=0),
        _resident("forward_residual", dgrad=False, beside=1),
        _resident("forward_extra", dgrad=False, beside=0, extra=(2, 1), rings=(3, 2)),
        _resident("input_grad", dgrad=True, beside=1),
        _resident("input_grad_of_two", dgrad=True, beside=2),
        _resident("forward_of_16", dgrad=False, beside=0, k=16, rings=(12, 3)),
        _resident("input_grad_of_16", dgrad=True, beside=1, k=16, rings=(12, 3)),
        _resident("input_grad_of_16_and_32", True, 1, k=16, rows=4, rings=(12, 6), width=32),
        _resident("forward_of_four_rows", dgrad=False, beside=0, rows=4, rings=(6, 2)),
        _resident("forward_residual_of_four_rows", dgrad=False, beside=1, rows=4, rings=(5, 3)),
        _resident("input_grad_of_four_rows", dgrad=True, beside=1, rows=4, rings=(5, 3)),
        _resident("input_grad_of_two_of_four_rows", dgrad=True, beside=2, rows=4, rings=(5, 3)),
        _resident("forward_norm", False, 0, norm="table"),
        _resident("forward_norm_residual", False, 1, norm="table", makers=2),
        _resident(
            "forward_norm_extra",
            False,
            0,
            (2, 1),
            rings=(3, 2),
            norm="sums",
            makers=1,
            upsampled=True,
        ),
        _resident("forward_norm_extra_between", False, 0, (1, 1), rings=(4, 2), norm="table"),
        _resident("means_residual", False, 1, norm="table", makers=2, means=True),
        _resident("means_residual_one", False, 1, norm="sums", makers=1, means=True),
        _resident("means_extra", False, 0, (2, 1), rings=(3, 2), norm="sums", makers=1, means=True),
        _resident("means_extra_between", False, 0, (1, 1), rings=(4, 2), norm="table", means=True),
        _resident("forward_norm_of_four_rows", False, 0, rows=4, rings=(6, 2), norm="sums"),
        _two("sums"),
        _two("table"),
        *(_wgrad(width) for width in (64, 16)),
        _wgrad(64, images=8),
        _wgrad(64, count=2),
        _wgrad(64, k=16),
        _wgrad(32, k=16, swap=True),
    ]
    if SUPPORTED
    else []
)
