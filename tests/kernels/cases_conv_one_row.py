"""The kernel of `conv.hopper.one_row` as compile_only.py compiles it."""

from triton_kernels.conv.hopper import one_row

from .cases_conv_hopper import _rows
from .compile_only import SHARED_LIMIT, ints, types


def _case(width: int, blocks: tuple[int, int, int], residual: bool, parts: int = 1) -> dict:
    """`blocks`: of 64 channels of x, and of two 1x1 convolutions."""
    pixels = one_row.tile_pixels(width)
    wide, tile, filters = (
        _rows(*box) for box in ((1, 1, 2 * pixels, 64), (1, 1, pixels, 64), (1, 64, 64))
    )
    extra = sum(count > 0 for count in blocks[1:])
    absent = ["extra1_desc", "extra1_w_desc", "extra2_desc", "extra2_w_desc"][2 * extra :]
    absent += [] if residual else ["residual_desc"]
    absent += [] if extra else ["extra_bias_ptr"]
    absent += ["emb_ptr"] if extra or parts > 1 else []
    absent += ["y_desc", "bias_ptr", "partial_ptr"] if parts > 1 else ["parts_ptr"]
    signature = {
        "x_desc": wide,
        "w_desc": filters,
        "residual_desc": tile,
        "y_desc": tile,
        "extra1_desc": wide,
        "extra1_w_desc": filters,
        "extra2_desc": wide,
        "extra2_w_desc": filters,
        **types("*fp32", "bias_ptr", "extra_bias_ptr", "emb_ptr", "partial_ptr", "parts_ptr"),
        **ints("stride_emb", "N", "CO"),
    }
    return {
        "name": f"{width} {blocks} {parts}",
        "kernel": "triton_kernels.conv.hopper.one_row_kernels:conv_one_row_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "H": width,
            "W": width,
            "PIXELS": pixels,
            "BLOCKS": blocks[0],
            "BLOCKS1": blocks[1],
            "BLOCKS2": blocks[2],
            "PARTS": parts,
            "SLOTS": one_row.slots(blocks, pixels, parts, SHARED_LIMIT[90]),
            "num_warps": 4,
        },
        "options": {"num_warps": 4},
        "multiples": ("CO",),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


COMPILE_CASES = [
    _case(32, (2, 0, 0), True),
    _case(64, (1, 2, 1), False),
    _case(16, (5, 0, 0), False, 2),
]
