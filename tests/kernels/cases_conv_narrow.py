"""The kernels of `conv.hopper.narrow` as compile_only.py compiles them."""

from triton_kernels.conv.hopper import narrow
from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows
from .compile_only import SHARED_LIMIT, ints, types


def _out(width: int, channels: int = 64, images: int = 1) -> dict:
    pairs = narrow.pairs(width, channels, SHARED_LIMIT[90])
    numbers = ("tiles", "tiles_h", "H", "CO", "N")[: 4 if images == 1 else 5]
    row = width // images
    return {
        "name": f"out_{row}_of_{channels}",
        "kernel": "triton_kernels.conv.hopper.narrow_output:conv_narrow_out_kernel",
        "signature": {
            "x_desc": _rows(1, 1, row, 64) if images == 1 else _rows(1, row, images, 64),
            "w_desc": _rows(1, 16, 64),
            "y_ptr": "*bf16",
            "bias_ptr": "*fp32",
            **dict.fromkeys(numbers, "i32"),
        },
        "constexprs": {
            **({"N": None} if images == 1 else {}),
            "W": width,
            "IMAGES": images,
            "K_BLOCKS": channels // 64,
            "PAIRS": pairs,
            "OVERLAP": width == 64,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 80 if width * channels == 4096 else 168},
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _head(channels: int, rows: int) -> dict:
    vectors = ("bias_ptr", "sums_ptr", "norm_weight_ptr", "norm_bias_ptr")
    absent = ("scale_ptr", "shift_ptr", "stride_scale", "stride_shift")
    return {
        "name": f"head_of_{channels}",
        "kernel": "triton_kernels.conv.hopper.norm_head:conv_head_kernel",
        "signature": {
            **types("*bf16", "x_ptr", "w_ptr", "y_ptr"),
            **types("*fp32", *vectors),
            "eps": "fp32",
            **ints("H", "CO"),
        },
        "constexprs": {
            **dict.fromkeys(absent),
            "C": channels,
            "ROWS": rows,
            "ACT": "silu_tanh",
            "TILES_OF_X": 32,
            "CG": 2,
            "OVERLAP": True,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": narrow._HEAD_REGISTERS[channels]},
        "expect": {"wgmma": "registers", "narrow": False, "tma": False, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        *(_out(64), _out(128), _out(64, 128, images=2)),
        *(_head(4, 8), _head(8, 4), _head(16, 4)),
    ]
    if SUPPORTED
    else []
)
