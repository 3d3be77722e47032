"""The convolution's kernels as compile_only.py compiles them: 16 bits, by TMA and gathered."""

from triton_kernels.conv.plain import tma_wgrad

TMA_CHIPS = (90, 100, 120)  # elsewhere the launcher takes the gathering kernels


def forward_by_tma(name: str, block_c: int, block_m: int, stages: int, dgrad: bool, arches) -> dict:
    """Filters of block_c channels over block_m pixels, or the input gradient of such."""
    filters = "1,64,{0}" if dgrad else "1,{0},64"
    return {
        "name": name,
        "kernel": "triton_kernels.conv.plain.tma:_conv2d_tma_kernel",
        "signature": {
            "x_desc": f"tensordesc<bf16[1,{block_m // 32},32,64]>",
            "w_desc": f"tensordesc<bf16[{filters.format(block_c)}]>",
            "y_desc": f"tensordesc<bf16[1,{block_m // 32},32,{block_c}]>",
            **({} if dgrad else {"bias_ptr": "*fp32"}),
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            **({"bias_ptr": None} if dgrad else {}),
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "DGRAD": dgrad,
            "HAS_BIAS": not dgrad,
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": block_m // 32,
            "TILE_W": 32,
            "BLOCK_C": block_c,
            "BLOCK_K": 64,
            "PARTS": 1,
        },
        "options": {"num_warps": 4, "num_stages": stages},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": arches},
    }


def _wgrad_tma(name: str, block_co: int, num_warps: int, flat: bool, arches) -> dict:
    tile_h = 2 if flat else 1
    return {
        "name": name,
        "kernel": "triton_kernels.conv.plain.tma_wgrad:_conv2d_wgrad_tma_kernel",
        "signature": {
            "x_desc": f"tensordesc<bf16[1,{tile_h},32,64]>",
            "dy_desc": f"tensordesc<bf16[{'64' if flat else '1,1,32'},{block_co}]>",
            "dw_ptr": "*fp32",
            **dict.fromkeys(("CI", "P", "Q", "CO", "num_tiles", "tiles_per_split"), "i32"),
            **dict.fromkeys(("stride_split", "stride_co"), "i32"),
        },
        "constexprs": {
            "S": 3,
            "GROUP": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            "ACCUMULATE": False,
            "FLAT": flat,
            "TILE_N": 1,
            "TILE_H": tile_h,
            "TILE_W": 32,
            "BLOCK_CO": block_co,
            "BLOCK_CI": 64,
        },
        "options": {"num_warps": num_warps, "num_stages": 3},
        "multiples": ("CI", "CO", "stride_split", "stride_co"),
        "expect": {"wgmma": True, "tma": True, "arches": arches},
    }


def _wgrad_long(config: tma_wgrad.WgradConfig) -> dict:
    """Tiles that are whole rows of an image, for whose pipeline only Hopper has the memory."""
    block_co, block_ci, block_m, taps, num_warps, stages = config
    case = _wgrad_tma("", block_co, num_warps, True, (90,))
    rows = block_m // 32
    return case | {
        "name": f"weight gradient, {'x'.join(map(str, config))}",
        "signature": case["signature"]
        | {
            "x_desc": f"tensordesc<bf16[1,{rows},32,{block_ci}]>",
            "dy_desc": f"tensordesc<bf16[{block_m},{block_co}]>",
        },
        "constexprs": case["constexprs"] | {"GROUP": taps, "TILE_H": rows, "BLOCK_CI": block_ci},
        "options": {"num_warps": num_warps, "num_stages": stages},
    }


def stride2(name: str, dgrad: bool, add: bool = False) -> dict:
    """64 channels x 128 pixels."""
    small, parities = "tensordesc<bf16[1,4,32,64]>", "tensordesc<bf16[1,4,1,32,64]>"
    names = ("dy_desc", "dx_desc") if dgrad else ("x_desc", "y_desc")
    kinds = (small, parities) if dgrad else (parities, small)
    kernel = "dgrad" if dgrad else "fwd"
    return {
        "name": name,
        "kernel": f"triton_kernels.conv.plain.tma_stride:_stride2_{kernel}_kernel",
        "signature": {
            **dict(zip(names, kinds, strict=True)),
            "w_desc": "tensordesc<bf16[1,64,64]>",
            **({} if dgrad else {"bias_ptr": "*fp32"}),
            **({"add_desc": parities} if add else {}),
            **dict.fromkeys(("CI", "P", "Q", "CO"), "i32"),
        },
        "constexprs": {
            "R": 3,
            "S": 3,
            "PAD_H": 1,
            "PAD_W": 1,
            **({"TURNED": False} if dgrad else {}),
            **({} if add or not dgrad else {"add_desc": None}),
            "PRECISION": "tf32",
            "TILE_N": 1,
            "TILE_H": 4,
            "TILE_W": 32,
            "BLOCK_C": 64,
            "BLOCK_K": 64,
        },
        "options": {"num_warps": 4, "num_stages": 3},
        "multiples": ("CI", "P", "Q", "CO"),
        "expect": {"wgmma": True, "tma": True, "arches": TMA_CHIPS},
    }


_STRIDE2_WGRAD = {
    "name": "weight gradient, stride 2",
    "kernel": "triton_kernels.conv.plain.tma_stride:_stride2_wgrad_kernel",
    "signature": {
        "x_desc": "tensordesc<bf16[1,2,1,32,64]>",
        "dy_desc": "tensordesc<bf16[64,64]>",
        "dw_ptr": "*fp32",
        **dict.fromkeys(("CI", "P", "Q", "CO", "num_tiles", "tiles_per_split"), "i32"),
    },
    "constexprs": {
        "TAPS": 9,
        "S": 3,
        "PAD_H": 1,
        "PAD_W": 1,
        "FLAT": True,
        "TILE_N": 1,
        "TILE_H": 2,
        "TILE_W": 32,
        "BLOCK_CO": 64,
        "BLOCK_CI": 64,
    },
    "options": {"num_warps": 4, "num_stages": 4},
    "multiples": ("CI", "CO"),
    "expect": {"wgmma": True, "tma": True, "arches": TMA_CHIPS},
}

_FWD_GATHER = {
    "name": "input gradient, stride 2, gathered",
    "kernel": "triton_kernels.conv.plain.gather:_conv2d_gather_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "w_ptr", "add_ptr", "y_ptr"), "*bf16"),
        **dict.fromkeys(("N", "H", "W", "CI", "P", "Q", "CO", "stride_wt", "stride_wi"), "i32"),
    },
    "constexprs": {
        "bias_ptr": None,
        "stride_wo": 1,
        "R": 3,
        "S": 3,
        "STRIDE": 2,
        "PAD_H": 1,
        "PAD_W": 1,
        "DGRAD": True,
        "FLAT": False,
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "SPLIT": False,
        "BLOCK_C": 64,
        "BLOCK_M": 64,
        "BLOCK_K": 32,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CI", "CO", "stride_wt", "stride_wi"),
    "expect": {"wgmma": True, "tma": False},
}

_STEM_WGRAD = {
    "name": "weight gradient of the stem, gathered",
    "kernel": "triton_kernels.conv.plain.gather:_conv2d_wgrad_gather_kernel",
    "signature": {
        **dict.fromkeys(("x_ptr", "dy_ptr"), "*bf16"),
        "dw_ptr": "*fp32",
        **dict.fromkeys(("H", "W", "P", "Q", "CI", "CO"), "i32"),
        **dict.fromkeys(("num_pixels", "pixels_per_split"), "i32"),
    },
    "constexprs": {
        "S": 3,
        "TAPS": 9,
        "SWAPPED": False,
        "STRIDE": 1,
        "PAD_H": 1,
        "PAD_W": 1,
        "FLAT": True,
        "PRECISION": "tf32",
        "SPLIT": False,
        "BLOCK_CO": 64,
        "BLOCK_CI": 32,
        "BLOCK_M": 64,
    },
    "options": {"num_warps": 4, "num_stages": 3},
    "multiples": ("CO",),
    "expect": {"wgmma": True, "tma": False},
}

COMPILE_CASES = [
    forward_by_tma("forward 128x128", 128, 128, 3, False, TMA_CHIPS),
    forward_by_tma("input gradient 64x256", 64, 256, 4, True, (90, 100)),
    _wgrad_tma("weight gradient 64x64", 64, 4, True, TMA_CHIPS),
    _wgrad_tma("weight gradient 64x64, single rows", 64, 4, False, TMA_CHIPS),
    *(_wgrad_long(c) for c in tma_wgrad.WGRAD_CONFIGS[-5:]),
    stride2("forward, stride 2", dgrad=False),
    stride2("input gradient, stride 2", dgrad=True),
    stride2("input gradient, stride 2, plus another", dgrad=True, add=True),
    _STRIDE2_WGRAD,
    _FWD_GATHER,
    _STEM_WGRAD,
]
