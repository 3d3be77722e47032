"""The convolution's kernels in TF32 and float32 as compile_only.py compiles them."""

from triton_kernels.conv.configs import WgradTile
from triton_kernels.conv.plain import pointwise_wgrad as points_wgrad
from triton_kernels.conv.plain import tf32x3

from .cases_conv import TMA_CHIPS, forward_by_tma, stride2


def _turned_fwd(block_c: int, block_m: int, stages: int) -> dict:
    """TF32, and so an input gradient of turned filters: 32 channels a step."""
    case = forward_by_tma(f"tf32 {block_c}x{block_m}", block_c, block_m, stages, False, (90,))
    return {
        **case,
        "signature": case["signature"]
        | {
            "x_desc": f"tensordesc<fp32[1,{block_m // 32},32,32]>",
            "w_desc": f"tensordesc<fp32[1,{block_c},32]>",
            "y_desc": f"tensordesc<fp32[1,{block_m // 32},32,{block_c}]>",
        },
        "constexprs": case["constexprs"] | {"BLOCK_K": 32},
    }


def _in_parts(block_c: int, block_m: int, num_warps: int, stages: int, parts: int) -> dict:
    case = _turned_fwd(block_c, block_m, stages)
    return {
        **case,
        "name": f"{case['name']} in {parts} parts, {num_warps} warps",
        "signature": case["signature"]
        | {"y_desc": f"tensordesc<fp32[1,1,{block_m // 32},32,{block_c}]>"},
        "constexprs": case["constexprs"] | {"PARTS": parts},
        "options": {"num_warps": num_warps, "num_stages": stages},
    }


def _turned_stride2(block_m: int) -> dict:
    case = stride2("input gradient, stride 2, tf32", dgrad=True)
    box = f"fp32[1,{block_m // 32}"
    return {
        **case,
        "signature": case["signature"]
        | {
            "dy_desc": f"tensordesc<{box},32,32]>",
            "w_desc": "tensordesc<fp32[1,64,32]>",
            "dx_desc": f"tensordesc<{box},1,32,64]>",
        },
        "constexprs": case["constexprs"] | {"TURNED": True, "TILE_H": block_m // 32, "BLOCK_K": 32},
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _tf32x3(
    block_c: int, block_m: int, block_k: int, num_warps: int, stages: int, in_registers: bool
) -> dict:
    box = f"fp32[1,{block_m // 32},32"
    assert block_k == 32 and not in_registers
    return {
        "name": f"float32 {block_c}x{block_m}, {num_warps} warps, {stages} stages",
        "kernel": "triton_kernels.conv.plain.tf32x3:_conv2d_tf32x3_kernel",
        "signature": {
            **dict.fromkeys(("x_desc", "x_small_desc"), f"tensordesc<{box},32]>"),
            **dict.fromkeys(("w_desc", "w_small_desc"), f"tensordesc<fp32[1,{block_c},32]>"),
            "y_desc": f"tensordesc<{box},{block_c}]>",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": False,
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": block_m // 32,
            "TILE_W": 32,
            "BLOCK_C": block_c,
            "BLOCK_K": 32,
        },
        "options": {"num_warps": num_warps, "num_stages": stages},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": (90,)},
    }


def _tf32x3_in_registers(
    block_c: int, block_m: int, block_k: int, num_warps: int, stages: int, in_registers: bool
) -> dict:
    """A 1x1 convolution, or its input gradient, whose operands nobody has split."""
    assert block_k == 32 and in_registers
    dgrad = block_c == 64 and stages == 4
    box = "32,64" if dgrad else f"{block_c},32"
    case = _tf32x3(block_c, block_m, block_k, num_warps, stages, False)
    return {
        **case,
        "name": f"float32 {block_c}x{block_m}, split in registers, {stages} stages",
        "signature": {
            "x_desc": f"tensordesc<fp32[1,1,{block_m},32]>",
            "w_desc": f"tensordesc<fp32[1,{box}]>",
            "y_desc": f"tensordesc<fp32[1,1,{block_m},{block_c}]>",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": case["constexprs"]
        | {
            **dict.fromkeys(("x_small_desc", "w_small_desc")),
            **dict.fromkeys(("R", "S"), 1),
            **dict.fromkeys(("PAD_H", "PAD_W"), 0),
            "DGRAD": dgrad,
            "TILE_H": 1,
            "TILE_W": block_m,
        },
        "expect": {"tma": True, "arches": (90,)},
    }


def _stem_float32(block_m: int, num_warps: int) -> dict:
    """Forward; products of operands that are split in registers."""
    return {
        "name": f"float32 stem 64x{block_m}, {num_warps} warps, gathered",
        "kernel": "triton_kernels.conv.plain.gather:_conv2d_gather_kernel",
        "signature": {
            **dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*fp32"),
            **dict.fromkeys(("N", "H", "W", "CI", "P", "Q", "CO"), "i32"),
            **dict.fromkeys(("stride_wo", "stride_wt"), "i32"),
        },
        "constexprs": {
            **dict.fromkeys(("bias_ptr", "add_ptr")),
            "stride_wi": 1,
            "R": 3,
            "S": 3,
            "STRIDE": 1,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": False,
            "FLAT": True,
            "HAS_BIAS": False,
            "PRECISION": "ieee",
            "SPLIT": True,
            "BLOCK_C": 64,
            "BLOCK_M": block_m,
            "BLOCK_K": 32,
        },
        "options": {"num_warps": num_warps, "num_stages": 1},
        "multiples": ("CO",),
        # none with Triton 3.6
        "expect": {"wgmma": "registers", "tma": False, "spills": 8, "arches": (90,)},
    }


def _points_wgrad(tile: WgradTile, products: int) -> dict:
    block_co, block_ci, block_m, num_warps, stages = tile
    a, b = (f"tensordesc<fp32[{block_m},{block}]>" for block in (block_co, block_ci))
    kind = "tf32" if products == 1 else "float32"
    return {
        "name": f"weight gradient of points, {kind}, {'x'.join(map(str, tile))}",
        "kernel": "triton_kernels.conv.plain.pointwise_wgrad:_points_wgrad_kernel",
        "signature": {
            "a_desc": a,
            "b_desc": b,
            "out_ptr": "*fp32",
            **dict.fromkeys(("M", "A", "B", "stride_a", "pixels_per_split"), "i32"),
        },
        "constexprs": {
            "PRODUCTS": products,
            "stride_b": 1,
            "BLOCK_A": block_co,
            "BLOCK_B": block_ci,
            "BLOCK_M": block_m,
        },
        "options": {"num_warps": num_warps, "num_stages": stages},
        "multiples": ("A", "B", "stride_a"),
        "expect": {"wgmma": False, "tma": True, "arches": (90,)},
    }


def _turn(name: str, kernel: str, signature: dict, constexprs: dict) -> dict:
    return {
        "name": name,
        "kernel": f"triton_kernels.conv.plain.transpose_weights:{kernel}",
        "signature": signature,
        "constexprs": constexprs,
        "options": {"num_warps": 4, "num_stages": 3},
        "multiples": ("C", "CI", "CO", "columns", "num", "part_stride"),
        "expect": {"wgmma": False, "tma": False, "arches": TMA_CHIPS},
    }


_TURNS = [
    _turn(
        "filters turned",
        "_turn_filters_kernel",
        dict.fromkeys(("w_ptr", "out_ptr"), "*fp32")
        | dict.fromkeys(("CO", "CI", "TAPS", "part_stride"), "i32"),
        {"PARTS": 1, "BLOCK": 32},
    ),
    _turn(
        "a tensor in its two parts",
        "_split_kernel",
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "num": "i32"},
        {"BLOCK": 2048},
    ),
]

_COLUMNS = {
    "name": "what a stem's filter sees, in columns",
    "kernel": "triton_kernels.conv.plain.im2col_wgrad:_columns_kernel",
    "signature": dict.fromkeys(("x_ptr", "out_ptr"), "*fp32")
    | dict.fromkeys(("H", "W", "P", "Q", "num_pixels"), "i32"),
    "constexprs": {"CI": 3, "S": 3, "TAPS": 9, "STRIDE": 1, "PAD_H": 1, "PAD_W": 1, "WIDTH": 28}
    | {"BLOCK_W": 32, "BLOCK_M": 128},
    "options": {"num_warps": 4},
    "expect": {"arches": (90,)},
}

_LINEAR = {
    "name": "float32 linear layer, chunks of the sum side by side",
    "kernel": "triton_kernels.conv.plain.linear_tf32x3:_linear_tf32x3_kernel",
    "signature": dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), "*fp32")
    | dict.fromkeys(("M", "K", "C", "stride_wc"), "i32"),
    "constexprs": {"stride_wk": 1, "CHUNKS": 8, "CHUNK": 32, "BLOCK_C": 16, "BLOCK_M": 16},
    "options": {"num_warps": 8, "num_stages": 1},
    "multiples": ("K", "C", "stride_wc"),
    "expect": {"arches": (90,)},
}

_HEAD = {
    "name": "float32 forward of the head, all taps at once",
    "kernel": "triton_kernels.conv.plain.im2col_fwd:_columns_fwd_kernel",
    "signature": {
        "x_desc": "tensordesc<fp32[64,32]>",
        "w_desc": "tensordesc<fp32[32,32]>",
        "z_desc": "tensordesc<fp32[32,64]>",
        "CI": "i32",
    },
    "constexprs": {"PRODUCTS": 3, "BLOCK_C": 32, "BLOCK_M": 64, "BLOCK_K": 32},
    "options": {"num_warps": 2, "num_stages": 3},
    "multiples": ("CI",),
    "expect": {"wgmma": False, "tma": True, "arches": (90, 120)},
}

_SUM_TAPS = {
    "name": "float32 forward of the head, the sums of its taps",
    "kernel": "triton_kernels.conv.plain.im2col_fwd:_sum_taps_kernel",
    "signature": {
        **dict.fromkeys(("z_ptr", "bias_ptr", "y_ptr"), "*fp32"),
        **dict.fromkeys(("H", "W", "P", "Q", "num_pixels", "plane"), "i32"),
    },
    "constexprs": {"CO": 3, "R": 3, "S": 3, "PAD_H": 1, "PAD_W": 1, "BLOCK_M": 256},
    "options": {"num_warps": 4},
    "multiples": ("plane",),
    "expect": {"tma": False, "arches": (90, 120)},
}

_LARGEST = {
    "name": "the largest numbers of each channel",
    "kernel": "triton_kernels.conv.plain.fp16_split:_largest_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "dy_ptr"), "*fp32"),
        "out_ptr": "*u8",
        **dict.fromkeys(("M", "CI", "CO"), "i32"),
    },
    "constexprs": {"BLOCK_M": 128, "BLOCK_C": 64},
    "options": {"num_warps": 8},
    "multiples": ("M", "CI", "CO"),
    "expect": {"tma": False, "arches": (90,)},
}

_HALVES = {
    "name": "float32 numbers as two of float16",
    "kernel": "triton_kernels.conv.plain.fp16_split:_halves_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "dy_ptr", "factors_ptr"), "*fp32"),
        **dict.fromkeys(("x_out_ptr", "dy_out_ptr"), "*fp16"),
        "largest_ptr": "*u8",
        **dict.fromkeys(("M", "CI", "CO", "splits"), "i32"),
    },
    "constexprs": {"PARTS": 2, "BLOCK_P": 256, "BLOCK_M": 64, "BLOCK_C": 64},
    "options": {"num_warps": 4},
    "multiples": ("M", "CI", "CO"),
    "expect": {"tma": False, "arches": (90,)},
}

COMPILE_CASES = [
    _COLUMNS,
    _HEAD,
    _SUM_TAPS,
    _LARGEST,
    _HALVES,
    _LINEAR,
    *(_turned_fwd(*tile) for tile in [(64, 64, 4), (128, 128, 4), (64, 256, 4)]),
    *(_in_parts(*tile) for tile in [(128, 128, 4, 4, 4)]),
    _turned_stride2(128),
    *(_tf32x3(*c) for c in tf32x3.FWD_CONFIGS[:4]),
    *(_tf32x3_in_registers(*c) for c in tf32x3.FWD_CONFIGS if c.in_registers),
    _stem_float32(64, 4),
    *(_points_wgrad(t, 1) for t in points_wgrad.TILES),
    _points_wgrad(points_wgrad.TILES[0], 3),
    *_TURNS,
]
