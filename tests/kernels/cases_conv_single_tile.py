"""The kernel of `conv.hopper.single_tile` as compile_only.py compiles it."""

from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows

_MEANS = ("means_ptr", "mean_sums_ptr")
_NORM = ("a_desc", "x2_desc", "norm_weight_ptr", "norm_bias_ptr", "eps")


def _case(name: str, k_blocks: int, absent: tuple[str, ...], keep: bool = True) -> dict:
    signature = {
        **dict.fromkeys(
            ("x_desc", "w_desc", "residual_desc", "y_desc", "a_desc", "x2_desc"), _rows(64, 64)
        ),
        **dict.fromkeys(("bias_ptr", "partial_ptr", "norm_weight_ptr", "norm_bias_ptr"), "*fp32"),
        "means_ptr": "*bf16",
        "mean_sums_ptr": "*fp32",
        "eps": "fp32",
        **dict.fromkeys(("M", "C", "CX2"), "i32"),
    }
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.single_tile_kernels:conv_once_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "PIXELS": 64,
            "K_BLOCKS": k_blocks,
            "W": None if "means_ptr" in absent else 16,
            "ACT": "silu",
            "CG": 8,
            "KEEP": keep,
            "num_warps": 4,
        },
        "options": {"num_warps": 4},
        "multiples": ("M", "C", "CX2"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        _case("product alone", 3, (*_NORM, *_MEANS, "partial_ptr", "residual_desc")),
        _case("sums", 3, (*_NORM, *_MEANS)),
        _case("norm", 4, ("partial_ptr", "x2_desc", *_MEANS)),
        _case("norm of a concatenation", 4, _MEANS),
        _case("means", 3, _NORM),
    ]
    if SUPPORTED
    else []
)
