"""The kernels of `conv.hopper.unfused` as compile_only.py compiles them."""

from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows


def _bare_points(
    name: str, pixels: int, k: int, c: int, dgrad: bool, blocks: int, out: int = 2
) -> dict:
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.unfused_pointwise:conv_bare_points_kernel",
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


def _bare_ring(name: str, pixels: int, k: int, c: int, dgrad: bool, blocks: int) -> dict:
    case = _bare_points(name, pixels, k, c, dgrad, blocks)
    del case["constexprs"]["OUT"]
    return {
        **case,
        "kernel": "triton_kernels.conv.hopper.unfused_ring:conv_bare_ring_kernel",
        "options": {"num_warps": 4, "maxnreg": 168 if c == 2 else 128},
    }


def _bare_once(
    name: str,
    pixels: int,
    k: int,
    c: int,
    dgrad: bool,
    blocks: int,
    num_warps: int,
    spills: int = 0,
) -> dict:
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.unfused_single_tile:conv_bare_once_kernel",
        "signature": {
            "x_desc": _rows(pixels, 64),
            "w_desc": _rows(64, 64),
            "y_desc": _rows(pixels, 64),
            **({} if dgrad else {"bias_ptr": "*bf16"}),
            "C": "i32",
        },
        "constexprs": {
            **({"bias_ptr": None} if dgrad else {}),
            "PIXELS": pixels,
            "K_BLOCKS": k,
            "C_BLOCKS": c,
            "DGRAD": dgrad,
            "BLOCKS": blocks,
            "num_warps": num_warps,
        },
        "options": {"num_warps": num_warps},
        "multiples": ("C",),
        "expect": {"wgmma": True, "tma": True, "spills": spills, "arches": (90,)},
    }


def _once_tf32(name: str, pixels: int, k: int, blocks: int) -> dict:
    from triton.experimental.gluon import language as gl

    def rows(*shape: int) -> str:
        layout = gl.NVMMASharedLayout(128, 32, rank=len(shape))
        return f"tensordesc<fp32{list(shape)},{layout!r}>"

    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.unfused_single_tile_tf32:conv_bare_once_tf32_kernel",
        "signature": {
            "dy_desc": rows(pixels, 32),
            "w_desc": rows(32, 64),
            "dx_desc": rows(pixels, 64),
            "C": "i32",
        },
        "constexprs": {"PIXELS": pixels, "K_BLOCKS": k, "BLOCKS": blocks, "num_warps": 4},
        "options": {"num_warps": 4},
        "multiples": ("C",),
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,)},
    }


def _bare_tiles(
    name: str, rows: int, images: int, w: int, dgrad: bool, blocks: int, steps: int
) -> dict:
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.unfused_tiles:conv_bare_tiles_kernel",
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


def _tiles_tf32(name: str, rows: int, images: int, w: int, blocks: int) -> dict:
    from triton.experimental.gluon import language as gl

    def boxes(*shape: int) -> str:
        layout = gl.NVMMASharedLayout(128, 32, rank=len(shape))
        return f"tensordesc<fp32{list(shape)},{layout!r}>"

    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.unfused_tiles_tf32:conv_bare_tiles_tf32_kernel",
        "signature": {
            "x_desc": boxes(2, images, w, 32),
            "w_desc": boxes(1, 64, 32),
            **dict.fromkeys(("y_ptr", "bias_ptr"), "*fp32"),
            **dict.fromkeys(("N", "H", "K", "C"), "i32"),
        },
        "constexprs": {"ROWS": rows, "IMAGES": images, "W": w, "BLOCKS": blocks, "num_warps": 4},
        "options": {"num_warps": 4, "maxnreg": 168},
        "multiples": ("K", "C"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _half_wgrad(name: str, w: int, images: int, parts: int, spills: int = 0) -> dict:
    from triton.experimental.gluon import language as gl

    def boxes(*shape: int) -> str:
        layout = gl.NVMMASharedLayout(128, 16, rank=len(shape))
        return f"tensordesc<fp16{list(shape)},{layout!r}>"

    rows, row = 128 // w, (w // images, images, 64)
    x = boxes(1, 1, w, 64) if images == 1 else boxes(1, *row)
    dy = boxes(1, rows, w, 64) if images == 1 else boxes(rows, *row)
    second = {"x_small_desc": x, "dy_small_desc": dy}
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.fp16_split_wgrad_kernel:conv_half_wgrad_kernel",
        "signature": {
            "x_desc": x,
            "dy_desc": dy,
            **(second if parts == 2 else {}),
            **dict.fromkeys(("part_ptr", "factors_ptr"), "*fp32"),
            **dict.fromkeys(("CI", "CO", "tiles", "tiles_h"), "i32"),
        },
        "constexprs": {
            **({} if parts == 2 else dict.fromkeys(second)),
            "W": w,
            "IMAGES": images,
            "STAGES": 4 // parts,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 128},
        "multiples": ("CI", "CO"),
        "expect": {"wgmma": "registers", "tma": True, "spills": spills, "arches": (90,)},
    }


def _mma_wgrad(
    name: str,
    products: int,
    taps: int,
    x: int,
    ahead: bool,
    registers: int,
    spills: int = 0,
) -> dict:
    from triton.experimental.gluon import language as gl

    box = [1, 2, 16, 64]
    boxes = f"tensordesc<fp32{box},{gl.NVMMASharedLayout(128, 32, rank=4)!r}>"
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.mma_wgrad_kernel:conv_mma_wgrad_kernel",
        "signature": {
            **dict.fromkeys(("x_desc", "dy_desc"), boxes),
            "dw_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO", "num_tiles"), "i32"),
        },
        "constexprs": {
            "PRODUCTS": products,
            "TAPS": taps,
            "S": 3 if taps == 9 else 1,
            "PAD_H": taps // 9,
            "PAD_W": taps // 9,
            "X_BLOCKS": x,
            "STAGES": 3,
            "AHEAD": ahead,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": registers},
        "multiples": ("CI", "CO"),
        "expect": {"wgmma": False, "tma": True, "spills": spills, "arches": (90,)},
    }


COMPILE_CASES = (
    [
        _bare_tiles("tiles_32", 8, 1, 32, False, 3, 5),
        _bare_tiles("tiles_16", 8, 1, 16, True, 4, 8),
        _bare_tiles("tiles_8", 8, 1, 8, False, 5, 9),
        _bare_tiles("tiles_8_of_images", 8, 4, 8, True, 3, 5),
        _tiles_tf32("tiles_tf32_64", 4, 1, 64, 3),
        _tiles_tf32("tiles_tf32_8_of_images", 8, 4, 8, 3),
        _half_wgrad("half_wgrad_tf32_16", 16, 1, 1),
        _half_wgrad("half_wgrad_float32_8_of_images", 64, 8, 2, spills=32),
        _bare_once("once_64", 64, 8, 1, False, 8, 4),
        _bare_once("once_128", 128, 12, 2, True, 7, 8),
        _bare_once("once_192", 128, 7, 3, False, 5, 8),
        _bare_once("once_192_channels_64_pixels", 64, 6, 3, False, 6, 4),
        # 192 sums a thread; 48 bytes with Triton 3.6
        _bare_once("once_192_channels_256_pixels", 256, 7, 3, False, 3, 8, spills=192),
        _once_tf32("once_tf32_64", 64, 8, 8),
        _once_tf32("once_tf32_128", 128, 12, 9),
        _bare_ring("ring_192", 128, 9, 3, True, 4),
        _mma_wgrad("mma_wgrad_tf32", 1, 1, 1, False, 64),
        _mma_wgrad("mma_wgrad_tf32_192", 1, 9, 3, False, 128),
        _mma_wgrad("mma_wgrad_float32_low", 2, 9, 2, True, 128, spills=96),
        _mma_wgrad("mma_wgrad_float32", 3, 9, 1, True, 128),
        _bare_points("pointwise_192", 128, 2, 3, True, 7),
        _bare_points("pointwise_256_pixels", 256, 3, 1, True, 4, 1),
        _bare_points("pointwise_128", 128, 4, 2, True, 5),
    ]
    if SUPPORTED
    else []
)
