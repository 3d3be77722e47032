"""The kernels of `conv.upsampled` as compile_only.py compiles them."""

from triton_kernels.conv.hopper import tile_mma as tiles
from triton_kernels.conv.hopper import upsampled
from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows
from .compile_only import SHARED_LIMIT


def _case(
    name: str,
    dgrad: bool,
    width: int,
    pixels: int = 256,
    others: tuple[str, ...] = (),
    piecewise: bool = False,
) -> dict:
    images = max(1, pixels // width**2)
    rows = pixels // (images * width)
    registers = tiles.registers(pixels, images)
    many, one = _rows(rows, 1, images, width, 64), _rows(1, 1, images, width, 64)
    written = _rows(64 // (images * width), 1, images, width, 64) if piecewise else many
    tile, filters = _rows(rows, images, width, 64), _rows(1, 64, 64)
    absent = ["x_desc", "x_row_desc", "x_w_desc", "emb_ptr"] if dgrad else ["beside_desc"]
    absent += others
    signature = {
        "up_desc": many,
        "up_row_desc": one,
        "up_w_desc": filters,
        "x_desc": many,
        "x_row_desc": one,
        "x_w_desc": filters,
        "beside_desc": tile,
        "y_desc": tile if dgrad else written,
        **dict.fromkeys(("vectors_ptr", "emb_ptr", "partial_ptr"), "*fp32"),
        **dict.fromkeys(("K1", "K2", "base", "width", "stride_emb"), "i32"),
        **dict.fromkeys(("stride_table", "N", "H", "C"), "i32"),
    }
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.upsampled_kernels:conv_parity_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "ROWS": rows,
            "IMAGES": images,
            "W": width,
            "DGRAD": dgrad,
            "ACT": None if not dgrad else "identity" if others else "silu_tanh",
            "BLOCKS": upsampled.blocks_of(pixels, images * width, SHARED_LIMIT[90], piecewise),
            "PIECEWISE": piecewise,
            "REGISTERS": registers["REGISTERS"],
            "OVERLAP": not dgrad,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": registers["maxnreg"]},
        "multiples": ("K1", "K2", "base", "width", "stride_table", "C"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,), "spills": 20 if dgrad else 0},
    }


_WHOLE = ("x_desc", "x_row_desc", "x_w_desc", "emb_ptr")  # absent where all channels are upsampled
_PLAIN = ("beside_desc", "vectors_ptr", "partial_ptr")  # absent without a norm

_SMALL = [
    {
        "name": "filters",
        "kernel": "triton_kernels.conv.upsampled:_sum_taps_kernel",
        "signature": {
            "w_ptr": "*fp32",
            **dict.fromkeys(("summed_ptr", "others_ptr"), "*bf16"),
            **dict.fromkeys(("CO", "CI", "C1"), "i32"),
        },
        "constexprs": {"BLOCK": 64},
        "multiples": ("CO", "CI", "C1"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
    {
        "name": "sums_of_both_halves",
        "kernel": "triton_kernels.conv.upsampled:_join_kernel",
        "signature": {
            **dict.fromkeys(("first_ptr", "second_ptr", "out_ptr"), "*fp32"),
            **dict.fromkeys(("C", "C1"), "i32"),
        },
        "constexprs": {"K1": 4, "K2": 32, "BLOCK_K1": 4, "BLOCK_K2": 32, "BLOCK": 64},
        "multiples": ("C", "C1"),
        "options": {"num_warps": 4},
        "expect": {"arches": (90,)},
    },
]

COMPILE_CASES = (
    [
        _case("forward", False, 32),
        _case("forward_piecewise", False, 32, piecewise=True),
        _case("input_grad_images", True, 8),
        _case("forward_whole_half", False, 16, 128, _WHOLE),
        _case("input_grad_plain_half", True, 4, 128, _PLAIN),
        *_SMALL,
    ]
    if SUPPORTED
    else []
)
