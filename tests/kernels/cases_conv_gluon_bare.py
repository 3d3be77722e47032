"""The kernels of `conv.gluon.bare` as compile_only.py compiles them."""

from triton_kernels.gluon.descriptors import SUPPORTED

from .cases_conv_gluon import _rows


def _bare_points(
    name: str, pixels: int, k: int, c: int, dgrad: bool, blocks: int, out: int = 2
) -> dict:
    return {
        "name": name,
        "kernel": "triton_kernels.conv.gluon.bare_points:conv_bare_points_kernel",
        "signature": {
            "x_desc": _rows(pixels, 64),
            "w_desc": _rows(64, 64),
            "y_desc": _rows(pixels, 64),
            **({} if dgrad else {"bias_ptr": "*bf16"}),
            **dict.fromkeys(("M", "C"), "i32"),
        },
        "constexprs": {
            **({"bias_ptr": None} if dgrad else {}),
            "PIXELS": pixels,
            "K_BLOCKS": k,
            "C_BLOCKS": c,
            "DGRAD": dgrad,
            "BLOCKS": blocks,
            "OUT": out,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 168},
        "multiples": ("M", "C"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _bare_tiles(
    name: str, rows: int, images: int, w: int, dgrad: bool, blocks: int, steps: int
) -> dict:
    return {
        "name": name,
        "kernel": "triton_kernels.conv.gluon.bare_tiles:conv_bare_tiles_kernel",
        "signature": {
            "x_desc": _rows(2, images, w, 64),
            "w_desc": _rows(1, 64, 64),
            "y_desc": _rows(rows, images, w, 64),
            **({} if dgrad else {"bias_ptr": "*bf16"}),
            **dict.fromkeys(("N", "H", "K", "C"), "i32"),
        },
        "constexprs": {
            **({"bias_ptr": None} if dgrad else {}),
            "ROWS": rows,
            "IMAGES": images,
            "W": w,
            "DGRAD": dgrad,
            "BLOCKS": blocks,
            "STEPS": steps,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 168},
        "multiples": ("K", "C"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        _bare_tiles("tiles_32", 8, 1, 32, False, 3, 5),
        _bare_tiles("tiles_16", 8, 1, 16, True, 4, 8),
        _bare_tiles("tiles_8", 8, 1, 8, False, 5, 9),
        _bare_tiles("tiles_8_of_images", 8, 4, 8, True, 3, 5),
        _bare_points("pointwise_192", 128, 2, 3, True, 7),
        _bare_points("pointwise_256_pixels", 256, 3, 1, True, 4, 1),
        _bare_points("pointwise_128", 128, 4, 2, True, 5),
    ]
    if SUPPORTED
    else []
)
