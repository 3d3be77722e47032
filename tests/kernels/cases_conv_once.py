"""The kernels of `conv.gluon.once` and `once_wide` as compile_only.py compiles them."""

from triton_kernels.gluon.descriptors import SUPPORTED

from .cases_conv_gluon import _rows

_NORM = ("a_desc", "x2_desc", "norm_weight_ptr", "norm_bias_ptr", "eps")


def _case(name: str, k_blocks: int, absent: tuple[str, ...], keep: bool = True) -> dict:
    signature = {
        **dict.fromkeys(
            ("x_desc", "w_desc", "residual_desc", "y_desc", "a_desc", "x2_desc"), _rows(64, 64)
        ),
        **dict.fromkeys(("bias_ptr", "partial_ptr", "norm_weight_ptr", "norm_bias_ptr"), "*fp32"),
        "eps": "fp32",
        **dict.fromkeys(("M", "C", "CX2"), "i32"),
    }
    return {
        "name": name,
        "kernel": "triton_kernels.conv.gluon.once_kernels:conv_once_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "PIXELS": 64,
            "K_BLOCKS": k_blocks,
            "ACT": "silu",
            "CG": 8,
            "KEEP": keep,
            "num_warps": 4,
        },
        "options": {"num_warps": 4},
        "multiples": ("M", "C", "CX2"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _wide(name: str, absent: tuple[str, ...]) -> dict:
    signature = {
        **dict.fromkeys(("x_desc", "residual_desc", "y_desc"), _rows(128, 64)),
        **{"w_desc": _rows(64, 64), "bias_ptr": "*fp32", "partial_ptr": "*fp32"},
    }
    return {
        "name": name,
        "kernel": "triton_kernels.conv.gluon.once_wide_kernels:conv_once_wide_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {**dict.fromkeys(absent), "PIXELS": 128, "K_BLOCKS": 3, "num_warps": 4},
        "options": {"num_warps": 4, "maxnreg": 168},
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        _case("product alone", 3, (*_NORM, "partial_ptr", "residual_desc")),
        _case("sums", 3, _NORM),
        _case("norm", 4, ("partial_ptr", "x2_desc")),
        _case("norm of a concatenation", 4, ()),
        _wide("all channels", ()),
        _wide("all channels of a product alone", ("residual_desc", "partial_ptr")),
    ]
    if SUPPORTED
    else []
)
