"""Convolutions on GPUs without a TMA unit as compile_only.py compiles them: tiles of every kind,
also for chips with 99 KiB of shared memory."""

from .compile_only import ints, types

CHIPS = (80, 89, 120)
_KERNELS = "triton_kernels.conv.plain.pointer"


def _forward(name: str, box: tuple, c: int, k: int, warps: int, stages: int, **given) -> dict:
    """With every term, or without."""
    full = given.pop("full", True)
    terms = {
        **types("*bf16", "residual_ptr", "extra1_ptr", "extra1_w_ptr"),
        **types("*bf16", "extra2_ptr", "extra2_w_ptr"),
        **types("*fp32", "extra_bias_ptr", "emb_ptr", "partial_ptr"),
    }
    return {
        "name": name,
        "kernel": f"{_KERNELS}_kernels:conv_pointer_forward_kernel",
        "signature": {
            **types("*bf16", "x_ptr", "w_ptr", "y_ptr"),
            **types("*fp32", "bias_ptr"),
            **ints("N", "P", "Q", "K", "KX", "C", "CY", "C1", "C2"),
            **ints("stride_w", "stride_w1", "stride_w2", "stride_emb"),
            **(terms if full else {}),
        },
        "constexprs": {
            **({} if full else dict.fromkeys(terms)),
            **{"TRANSPOSED": False, "EXACT": True, "RAGGED": False},
            **_tile(box, c, k),
            **given,
        },
        "options": {"num_warps": warps, "num_stages": stages},
    }


def _input_grad(name: str, box: tuple, c: int, k: int, warps: int, stages: int, **given) -> dict:
    """Of one input or of two."""
    two = given.pop("two", False)
    return {
        "name": name,
        "kernel": f"{_KERNELS}_kernels:conv_pointer_input_grad_kernel",
        "signature": {
            **types("*bf16", "dy_ptr", "w_ptr", "dz_ptr", "x1_ptr"),
            **(types("*bf16", "x2_ptr") if two else {}),
            **types("*fp32", "table_ptr", "partial_ptr"),
            **ints("N", "P", "Q", "CO", "KX", "CI", "C1", "first", "stream"),
            "drop": "fp32",
        },
        "constexprs": {
            **({} if two else {"x2_ptr": None}),
            **{"rng_ptr": None, "ACT": "silu_tanh", "STRADDLING": False},
            **{"EXACT": True, "RAGGED": False},
            **_tile(box, c, k),
            **given,
        },
        "options": {"num_warps": warps, "num_stages": stages},
    }


def _tile(box: tuple, c: int, k: int) -> dict:
    return {
        **{"R": 3, "S": 3, "ROWS": 1, "UNIT": 8, "PRECISION": "tf32"},
        "PADDED": False,
        **dict(zip(("TILE_N", "TILE_H", "TILE_W"), box, strict=True)),
        **{"BLOCK_C": c, "BLOCK_K": k},
    }


def _weight_grad(
    co: int, ci: int, m: int, taps: int, warps: int, stages: int, rows: int = 1
) -> dict:
    return {
        "name": f"weight gradient {co}x{ci}, {taps} taps, {rows} rows",
        "kernel": f"{_KERNELS}_wgrad:_conv_pointer_wgrad_kernel",
        "signature": {
            **types("*bf16", "x_ptr", "dy_ptr"),
            **types("*fp32", "dw_ptr"),
            **ints("N", "H", "W", "P", "Q", "CI", "KX", "CO", "KY", "num_tiles", "tiles_per_split"),
        },
        "constexprs": {
            **{"R": 3, "S": 3, "GROUP": taps, "ROWS": rows, "STRIDE": 1, "PAD_H": 1, "PAD_W": 1},
            **{"EXACT": True, "PADDED": False, "UNIT": 8, "PRECISION": "tf32"},
            **{"TILE_N": 1, "TILE_H": 1, "TILE_W": m, "BLOCK_CO": co, "BLOCK_CI": ci},
        },
        "options": {"num_warps": warps, "num_stages": stages},
    }


_SKIP_DX = {
    "name": "dx of two inputs, one upsampled, with a 1x1 skip",
    "kernel": f"{_KERNELS}_skip_dx:_skip_dx_pointer_kernel",
    "signature": {
        **types("*bf16", "dy_ptr", "w_ptr", "dz_ptr", "x1_ptr", "x2_ptr", "add1_ptr"),
        **types("*bf16", "dx1_ptr", "dx2_ptr"),
        **types("*fp32", "coeff_ptr", "sums_ptr"),
        **ints("N", "P", "Q", "CO", "C", "C1", "CZ", "CK", "stride_w"),
    },
    "constexprs": {
        "dz2_ptr": None,
        **{"UPSAMPLE": True, "EXACT": True, "RAGGED": False, "UNIT": 8, "PRECISION": "tf32"},
        **{"TILE_N": 1, "TILE_H": 4, "TILE_W": 32, "BLOCK_C": 64, "BLOCK_K": 32},
    },
    "options": {"num_warps": 4, "num_stages": 4},
}

COMPILE_CASES = [
    _forward("forward 128x128, every term", (1, 2, 64), 128, 32, 4, 4),
    _forward("forward 64x64 of four rows, every term", (1, 1, 64), 64, 16, 4, 4, ROWS=4),
    _forward("forward, no term", (4, 4, 8), 64, 32, 4, 4, full=False),
    _forward(
        "forward over the edges, odd channels",
        (2, 2, 16),
        64,
        32,
        4,
        4,
        EXACT=False,
        RAGGED=True,
        UNIT=1,
    ),  # fmt: skip
    _forward(
        "plain input gradient",
        (1, 2, 64),
        128,
        32,
        8,
        4,
        full=False,
        TRANSPOSED=True,
        bias_ptr=None,
    ),
    _input_grad("input gradient 128x128", (1, 2, 64), 128, 32, 8, 4),
    _input_grad("input gradient of two inputs", (2, 8, 8), 64, 32, 4, 4, two=True),
    _input_grad("input gradient 64x64 of four rows", (1, 1, 64), 64, 16, 4, 4, ROWS=4),
    _weight_grad(128, 128, 32, 1, 4, 4),
    _weight_grad(64, 64, 32, 3, 4, 4),
    _weight_grad(128, 64, 32, 3, 8, 4),
    _weight_grad(128, 64, 16, 3, 8, 4, 4),
    _SKIP_DX,
]
for _case in COMPILE_CASES:  # an argument is in one of the two
    _case["signature"] = {
        k: v for k, v in _case["signature"].items() if k not in _case["constexprs"]
    }
