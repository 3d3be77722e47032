"""The kernel of `conv.gluon.rows_meeting` as compile_only.py compiles it."""

from triton_kernels.conv.gluon import rows_meeting
from triton_kernels.gluon.descriptors import SUPPORTED

from .cases_conv_gluon import _rows


def _case(
    name: str,
    residual: bool = False,
    keep: bool = False,
    emb: bool = False,
    k: int = 64,
    extra: tuple[int, int] = (0, 0),
    also: bool = False,
    upsampled: bool = False,
) -> dict:
    spills = 800 if any(extra) else 64
    form = rows_meeting.FORMS[k, sum(extra)]
    tile, row, filters = _rows(1, form.stage, 64, 64), _rows(1, 1, 64, 64), _rows(1, 64, 64)
    absent = [] if any(extra) else ["extra_bias_ptr"]
    for e, blocks in enumerate(extra):
        absent += [] if blocks else [f"extra{e + 1}_desc", f"extra{e + 1}_w_desc"]
    absent += [] if residual else ["beside_desc"]
    absent += [] if emb else ["emb_ptr"]
    absent += [] if keep else ["partial_ptr"]
    absent += [] if also else ["second_a_desc", "second_weight_ptr", "second_bias_ptr"]
    vectors = ("vectors_ptr", "extra_bias_ptr", "emb_ptr", "partial_ptr")
    vectors += ("norm_weight_ptr", "norm_bias_ptr", "second_weight_ptr", "second_bias_ptr")
    signature = {
        "x_desc": _rows(1, 1, 64, min(64, k)),
        "w_desc": _rows(1, 64, min(64, k)),
        **dict.fromkeys(("beside_desc", "y_desc", "a_desc", "second_a_desc"), tile),
        "extra1_desc": _rows(1, 1, 32, 2, 64) if upsampled else row,
        "extra2_desc": row,
        **dict.fromkeys(("extra1_w_desc", "extra2_w_desc"), filters),
        **dict.fromkeys(vectors, "*fp32"),
        "slots_ptr": "*i64",
        "eps": "fp32",
        **dict.fromkeys(("stride_emb", "tiles"), "i32"),
    }
    return {
        "name": f"meeting_{name}",
        "kernel": "triton_kernels.conv.gluon.resident_meeting:conv_resident_meeting_kernel",
        "signature": {key: kind for key, kind in signature.items() if key not in absent},
        "constexprs": {
            **dict.fromkeys(absent),
            "ROWS": form.rows,
            "STAGE": form.stage,
            "W": 64,
            "BLOCKS": max(1, k // 64),
            "EXTRA1": extra[0],
            "EXTRA2": extra[1],
            "ACT": "silu_tanh",
            "SLOTS": form.slots,
            "CG": 2,
            "CG2": 4 if also else 2,
            "KEEP": keep,
            "TILES": 64 // form.rows,
            "OVERLAP": True,
            "num_warps": 4,
        },
        "options": {"num_warps": 4, "maxnreg": 168},
        # a few numbers that are needed once a tile go to memory, no accumulators
        "expect": {
            "wgmma": "registers",
            "tma": True,
            "arches": (90,),
            "spills": spills,
        },
    }


COMPILE_CASES = (
    [
        _case("alone", emb=True),
        _case("residual", residual=True, keep=True),
        _case("residual_also", residual=True, keep=True, also=True),
        _case("stem", keep=True, k=16, also=True),
        _case("of_128", emb=True, k=128),
        _case("extra", keep=True, extra=(1, 1)),
        _case("extra_upsampled", keep=True, extra=(2, 1), upsampled=True),
    ]
    if SUPPORTED
    else []
)
