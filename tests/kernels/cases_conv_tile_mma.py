"""The kernels of `conv.hopper.tile_mma` as compile_only.py compiles them."""

from triton_kernels.conv.hopper import tile_mma as gluon_tiles
from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows
from .compile_only import SHARED_LIMIT

WHOLE, HALF, HALF_WITH_FILTERS, QUARTER, QUARTER_WITH_FILTERS = gluon_tiles.TILES


def _case(
    name: str,
    dgrad: bool,
    beside: int,
    extra: int,
    width: int,
    config: tuple = WHOLE,
    norm: str | None = None,  # y is not kept, or it is, or another tensor is beside it, too
    meets: int = 0,  # channels of a group, where tiles of an image meet
    means: bool = False,
) -> dict:
    pixels = config.block_m
    images = max(1, pixels // width**2)
    rows = pixels // (images * width)
    blocks, steps = gluon_tiles.rings(config, images * width, SHARED_LIMIT[90])
    registers = gluon_tiles.registers(pixels, images)
    pair, tile = _rows(2, images, width, 64), _rows(rows, images, width, 64)
    filters = _rows(1, 64, 64)
    absent = ["beside1_desc", "beside2_desc"][beside:]
    absent += ["extra1_desc", "extra1_w_desc", "extra2_desc", "extra2_w_desc"][2 * extra :]
    absent += ["extra_bias_ptr"] if extra == 0 else []
    absent += ["emb_ptr"] if dgrad or extra else []
    if norm is None:
        absent += ["a_desc", "norm_weight_ptr", "norm_bias_ptr", "eps"]
    absent += ["x2_desc"] if norm != "second" else []
    absent += ["partial_ptr"] if norm == "alone" or (norm == "beside" and not meets) else []
    absent += [] if meets else ["slots_ptr"]
    absent += [] if means else ["means_ptr", "mean_sums_ptr"]
    signature = {
        "x_desc": pair,
        "w_desc": filters,
        "beside1_desc": tile,
        "beside2_desc": tile,
        "y_desc": tile,
        "extra1_desc": pair,
        "extra1_w_desc": filters,
        "extra2_desc": pair,
        "extra2_w_desc": filters,
        **dict.fromkeys(("vectors_ptr", "extra_bias_ptr", "emb_ptr", "partial_ptr"), "*fp32"),
        "means_ptr": "*bf16",
        "mean_sums_ptr": "*fp32",
        **dict.fromkeys(("a_desc", "x2_desc"), tile),
        **dict.fromkeys(("norm_weight_ptr", "norm_bias_ptr"), "*fp32"),
        "slots_ptr": "*i64",
        "eps": "fp32",
        **dict.fromkeys(("C1", "C2", "border", "stride_emb", "N", "H", "K", "C", "CX2"), "i32"),
    }
    return {
        "name": name,
        "kernel": "triton_kernels.conv.hopper.tile_mma_kernels:conv_tiles_kernel",
        "signature": {k: v for k, v in signature.items() if k not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "ROWS": rows,
            "IMAGES": images,
            "W": width,
            "DGRAD": dgrad,
            "ACT": "silu_tanh" if dgrad or meets else "silu" if norm else None,
            "BLOCKS": blocks,
            "STEPS": steps,
            "REGISTERS": registers["REGISTERS"],
            "OVERLAP": not dgrad,
            "CG": meets or 8 if norm else 0,
            "KEEP": norm != "alone",
            "TILES": width // rows,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": registers["maxnreg"]},
        "multiples": ("C1", "C2", "border", "K", "C"),
        # a number or two that are needed once a tile; five where it is of several images
        "expect": {"wgmma": True, "tma": True, "arches": (90,), "spills": 20 if dgrad else 0},
    }


COMPILE_CASES = (
    [
        _case("forward_residual", False, 1, 0, 16),
        _case("forward_extra", False, 0, 2, 32),
        _case("forward_half", False, 0, 0, 16, HALF),
        _case("input_grad", True, 1, 0, 64),
        _case("input_grad_of_two", True, 2, 0, 32),
        _case("forward_images", False, 1, 0, 8),
        _case("input_grad_images", True, 1, 0, 8),
        _case("input_grad_images_half", True, 1, 0, 8, HALF),
        _case("input_grad_images_half_with_filters", True, 1, 0, 8, HALF_WITH_FILTERS),
        _case("forward_extra_quarter_with_filters", False, 0, 2, 16, QUARTER_WITH_FILTERS),
        _case("input_grad_images_quarter_with_filters", True, 1, 0, 8, QUARTER_WITH_FILTERS),
        _case("forward_extra_quarter", False, 0, 2, 16, QUARTER),
        _case("forward_images_quarter", False, 1, 0, 8, QUARTER),
        _case("input_grad_images_quarter", True, 1, 0, 8, QUARTER),
        _case("input_grad_of_two_quarter", True, 2, 0, 16, QUARTER),
        _case("forward_images_of_4x4", False, 1, 0, 4),
        _case("input_grad_images_of_4x4_half", True, 1, 0, 4, HALF),
        _case("input_grad_images_of_4x4_quarter", True, 2, 0, 4, QUARTER),
        _case("norm_alone", False, 0, 0, 8, QUARTER_WITH_FILTERS, "alone"),
        _case("norm_beside", False, 1, 0, 8, HALF_WITH_FILTERS, "beside"),
        _case("norm_of_a_concatenation", False, 1, 0, 8, QUARTER_WITH_FILTERS, "second"),
        _case("meeting_alone", False, 0, 0, 16, HALF_WITH_FILTERS, "alone", 6),
        _case("meeting_beside", False, 1, 0, 32, WHOLE, "beside", 4),
        _case("meeting_quarter", False, 1, 0, 16, QUARTER_WITH_FILTERS, "beside", 6),
        _case("means_residual", False, 1, 0, 32, means=True),
        _case("means_residual_half", False, 1, 0, 32, HALF_WITH_FILTERS, means=True),
        _case("means_extra_quarter", False, 0, 2, 16, QUARTER_WITH_FILTERS, means=True),
        _case("means_half_of_16", False, 1, 0, 16, HALF, means=True),
        _case("meeting_extra", False, 0, 2, 32, HALF_WITH_FILTERS, "beside", 4),
    ]
    if SUPPORTED
    else []
)
