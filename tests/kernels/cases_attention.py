"""Attention kernels for `test_compile`: one of each at the model's shapes."""

_SHAPES = {"num_heads": "i32", "scale": "fp32"}
_STRIDES = {"stride_don": "i32", "stride_dot": "i32"}
_MODEL = {"D": 32, "HEADS_QKV": False, "PRECISION": "ieee", "BLOCK_D": 32}


_WIDE = {"D": 256, "BLOCK_D": 256, "T": 256, "BLOCK_M": 32, "BLOCK_N": 32}


def _case(
    name, kernel, pointers, constexprs, num_warps, num_stages, element="*bf16", wgmma="registers"
):
    floats = ("lse_ptr", "delta_ptr", "rows_ptr")
    backward = kernel != "attention_fwd_kernel"
    return {
        "name": f"attention_{name}",
        "kernel": f"triton_kernels.attention.kernels:{kernel}",
        "signature": {p: "*fp32" if p in floats else element for p in pointers}
        | _SHAPES
        | (_STRIDES if backward else {}),
        "constexprs": _MODEL | constexprs | ({"stride_doc": 1} if backward else {}),
        "multiples": tuple(_STRIDES),
        "options": {"num_warps": num_warps, "num_stages": num_stages},
        "expect": {"wgmma": wgmma},
    }


def _boxes(rows: int, d: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(2 * d, 16, rank=3)
    return f"tensordesc<bf16{[1, rows, d]},{layout!r}>"


def _head(name: str, t: int, d: int, rows: int, step: int | None = None, spills: int = 0) -> dict:
    """Of `attention.hopper`: forward if it has a step."""
    backward = step is None
    boxes = ("qkv_desc", "do_desc", "dqkv_desc") if backward else ("q_desc", "kv_desc", "o_desc")
    floats = ("lse_ptr", "rows_ptr") if backward else ("lse_ptr",)
    constexprs = {"BUFFERS": 2, "HELD": True} if d < 64 else {"BUFFERS": 1, "HELD": False}
    num_warps = 8 if backward and rows * d > 256 * 32 else 4
    return {
        "name": f"attention_{name}",
        "kernel": "triton_kernels.attention.hopper_kernels:attention_"
        f"{'bwd' if backward else 'fwd'}_head_kernel",
        "signature": {
            **dict.fromkeys(boxes, _boxes(rows, d)),
            **({"o_ptr": "*bf16"} if backward else {}),
            **dict.fromkeys(floats, "*fp32"),
            **_SHAPES,
        },
        "constexprs": {
            **{"T": t, "D": d, "HEADS_QKV": False, "ROWS": rows, "num_warps": num_warps},
            **(constexprs if backward else {"KEEP": rows, "STEP": step}),
        },
        "options": {"num_warps": num_warps, **({} if backward or d == 64 else {"maxnreg": 168})},
        "expect": {"wgmma": "registers", "tma": True, "spills": spills, "arches": (90,)},
    }


def _norm_attention(name: str, t: int, c: int, programs: tuple, normed: bool) -> dict:
    """Of `attention.norm_attention`: `programs` are heads of one, keys at a time, and warps."""
    from triton.experimental.gluon import language as gl

    def boxes(rows: int) -> str:
        return f"tensordesc<bf16{[rows, 64]},{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"

    heads, step, num_warps = programs
    sums = ("partial_ptr", "g_ptr", "b_ptr")
    group = {"CG": c // 32, "BLOCK_C": 256, "BLOCK_G": 32, "BLOCK_J": 8}
    return {
        "name": f"norm_attention_{name}",
        "kernel": "triton_kernels.attention.norm_attention_kernels:norm_attention_kernel",
        "signature": {
            **{"x_desc": boxes(t), "w_desc": boxes(32), "bias_ptr": "*fp32", "o_ptr": "*bf16"},
            **{"scale": "fp32", "eps": "fp32", "pixels": "i32"},
            **(dict.fromkeys(sums, "*fp32") if normed else {}),
        },
        "constexprs": {
            **{"T": t, "C": c, "D": 32, "HEADS_QKV": False, "HEADS": heads},
            **{"STEP": step, "K": 2, **group, "num_warps": num_warps},
            **({} if normed else dict.fromkeys(sums)),
        },
        "options": {"num_warps": num_warps},
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,)},
    }


_FWD = ("qkv_ptr", "o_ptr", "lse_ptr")
_ONE_PASS = ("do_ptr", "qkv_ptr", "o_ptr", "lse_ptr", "dqkv_ptr", "rows_ptr")
_TWO_PASS = (*_ONE_PASS, "delta_ptr")

COMPILE_CASES = [
    _case("fwd", "attention_fwd_kernel", _FWD, dict(T=256, BLOCK_M=64, BLOCK_N=128), 4, 2),
    _case(
        "fwd_fp32",
        "attention_fwd_kernel",
        _FWD,
        dict(T=250, BLOCK_M=32, BLOCK_N=32),
        4,
        2,
        element="*fp32",
        wgmma=False,
    ),
    _case(
        "bwd_one_pass",
        "attention_bwd_dkdv_kernel",
        _ONE_PASS,
        dict(T=64, BLOCK_M=64, BLOCK_N=64, ONE_PASS=True, delta_ptr=None),
        4,
        1,
    ),
    _case(
        "bwd_dq",
        "attention_bwd_dq_kernel",
        _TWO_PASS,
        dict(T=256, BLOCK_M=64, BLOCK_N=64),
        4,
        2,
    ),
    _case(
        "bwd_dkdv",
        "attention_bwd_dkdv_kernel",
        _TWO_PASS,
        dict(T=256, BLOCK_M=64, BLOCK_N=64, ONE_PASS=False),
        4,
        2,
    ),
    _case("fwd_widest", "attention_fwd_kernel", _FWD, _WIDE, 4, 2, wgmma=False),
    _case("bwd_dq_widest", "attention_bwd_dq_kernel", _TWO_PASS, _WIDE, 8, 2, wgmma=False),
    _case(
        "bwd_dkdv_widest",
        "attention_bwd_dkdv_kernel",
        _TWO_PASS,
        _WIDE | {"ONE_PASS": False},
        8,
        2,
        wgmma=False,
    ),
    # for three programs on a multiprocessor the forward pass lets go of a few loop constants
    _head("fwd_head", 256, 32, 256, step=128, spills=64),
    _head("fwd_head_ragged", 200, 32, 256, step=128, spills=64),
    _head("fwd_head_wide", 128, 64, 128, step=128),
    _head("bwd_head", 256, 32, 256),
    _head("bwd_head_ragged", 200, 32, 256),
    _head("bwd_head_of_one_tile", 64, 32, 64),
    _head("bwd_head_wide", 128, 64, 128, spills=16),
    _head("bwd_head_of_two_warpgroups", 256, 64, 256, spills=64),
    _norm_attention("of_three_heads", 256, 192, (3, 64, 8), True),
    _norm_attention("of_normalized", 64, 256, (1, 64, 4), False),
]
