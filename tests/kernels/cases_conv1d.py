"""Kernels of stream_conv1d to compile, in bf16: layers of the network of the published size (256,
512 and 1024 channels in 8 groups, 16 positions) at batch 1, and what batches have instead."""

from triton_kernels.hopper.descriptors import SUPPORTED

_LAUNCH = {"num_warps": 4}
_REGISTERS = {"maxnreg": 255}  # of those that have all their loads under way at once
_POINTERS = (
    "bias_ptr", "gamma_ptr", "beta_ptr", "film_ptr", "cond_ptr", "row_ptr", "residual_bias_ptr",
    "sums_ptr", "x_ptr", "stem_ptr", "residual_ptr", "residual_stem_ptr", "keep_ptr", "skip_ptr",
)  # fmt: skip
_INPUT = {"C2": 0, "SCALE": False, "SPLITS": 8, "RES_SPLITS": 0, "CX": 2, "TAPS_X": 5}
_INPUT["LAST"] = False
_HOPPER = (90, 100, 120)  # where launches overlap


def _case(name: str, kernel: str, pointers: tuple, absent: tuple, constexprs: dict, **more) -> dict:
    """The pointers of a kernel's input are float32 but the row; those in `absent` are None."""
    signature = {p: "*i64" if p == "row_ptr" else "*fp32" for p in pointers if p not in absent}
    signature |= {"weight_ptr": "*bf16"} if "weight_ptr" in pointers else {}
    signature |= {"a_ptr": "*bf16"} if "a_ptr" in pointers else {}
    return {
        "name": name,
        "kernel": f"triton_kernels.conv1d.conv1d_kernels:{kernel}",
        "signature": signature | more.pop("numbers", {}),
        "constexprs": dict.fromkeys(absent) | constexprs,
        "options": _LAUNCH | more.pop("options", {}),
        "multiples": ("film_stride", "cond_stride"),
        "expect": {"tma": False} | more.pop("expect", {}),
    }


def _stage(name: str, absent: tuple, constexprs: dict, arches: tuple, **expect) -> dict:
    overlaps = min(arches) >= 90
    pointers = (*_POINTERS, "weight_ptr", "out_ptr", "side_ptr")
    return _case(
        name,
        "conv1d_stage_kernel",
        pointers,
        absent,
        _INPUT
        | {
            "STRIDE": 1,
            "TRANSPOSED": False,
            "BTO": 16,
            "PRECISION": "tf32",
            "PDL": overlaps,
            "WIDEST": 4,
        }
        | constexprs,
        numbers={"film_stride": "i32", "cond_stride": "i32", "eps": "fp32"},
        options=_REGISTERS | ({"launch_pdl": True} if overlaps else {}),
        expect={"arches": arches} | expect,
    )


def _whole(name: str, cut: tuple, dtype: str, side: bool, **shape) -> dict:
    from triton.experimental.gluon import language as gl

    samples, times, blocks, slots = cut
    bits = 32 if dtype == "fp32" else 16
    fetched = times + (2 if shape["TRANSPOSED"] else shape["TAPS"] - 1)
    together = fetched & -fetched if shape["STRIDE"] == 1 else 1

    def boxes(*box: int) -> str:
        layout = gl.NVMMASharedLayout(128, bits, rank=3)
        return f"tensordesc<{dtype}{[*box, 1024 // bits]},{layout!r}>"

    return {
        "name": name,
        "kernel": "triton_kernels.conv1d.batched_kernels:conv1d_whole_kernel",
        "signature": {
            "x_desc": boxes(together, samples),
            "w_desc": boxes(1, 64),
            "out_ptr": "*fp32",
            **({"side_ptr": "*fp32"} if side else {}),
            "N": "i32",
        },
        "constexprs": {
            **({} if side else {"side_ptr": None}),
            "SAMPLES": samples,
            "TT": times,
            "BLOCKS": blocks,
            "SLOTS": slots,
            "TOGETHER": together,
            "PDL": True,
            "num_warps": 4,
            "C": 1024,
            "SPLIT": False,
            **shape,
        },
        "options": {"num_warps": 4, "launch_pdl": True},
        "expect": {
            "wgmma": "registers" if shape.get("SPLIT") else True,
            "tma": True,
            "arches": (90,),
        },
    }


_NO_STEM = ("x_ptr", "stem_ptr", "residual_stem_ptr")
_NO_FILM = ("film_ptr", "cond_ptr", "row_ptr")
_NO_RESIDUAL = ("residual_ptr", "residual_bias_ptr", "keep_ptr")
_KEEPS = {"TAPS": 5, "STRIDE": 1, "TRANSPOSED": False}
_DEEP = {"C": 1024, "T": 4, "TO": 4, "CG": 128, "CPG": 128, "BT": 4, "TAPS": 5}
_FIRST = {"C": 256, "T": 16, "TO": 16, "CG": 32, "CPG": 32, "BT": 16, "TAPS": 5}

COMPILE_CASES = [
    _stage(
        "1024 channels, norm and FiLM",
        (*_NO_STEM, *_NO_RESIDUAL, "skip_ptr", "side_ptr"),
        _DEEP | {"CO": 1024, "BM": 64, "SCALE": True},
        _HOPPER[:1],
        wgmma=True,
    ),
    _stage(
        "2048 channels with a skip connection and a 1x1 skip",
        (*_NO_STEM, *_NO_FILM, "residual_bias_ptr"),
        _DEEP | {"C2": 1024, "CO": 512, "BM": 32},
        (80, 90, 100, 120),
    ),
    _stage(
        "behind the stem",
        ("sums_ptr", "residual_ptr", "keep_ptr", "skip_ptr", "side_ptr"),
        _FIRST | {"CO": 256, "BM": 16, "SPLITS": 0, "SCALE": True},
        _HOPPER,
    ),
    _stage(
        "stride 2",
        (*_NO_STEM, *_NO_FILM, "skip_ptr", "side_ptr"),
        _FIRST | {"CO": 256, "BM": 16, "TO": 8, "TAPS": 3, "STRIDE": 2, "RES_SPLITS": 8},
        _HOPPER[:1],
    ),
    _stage(
        "transposed, two groups a slice",
        (*_NO_STEM, *_NO_FILM, *_NO_RESIDUAL, "skip_ptr", "side_ptr"),
        _FIRST | {"CO": 256, "BM": 16, "TO": 32, "TAPS": 2, "TRANSPOSED": True, "CPG": 16},
        (80, 89),
    ),
    _case(
        "apply",
        "conv1d_apply_kernel",
        (*_POINTERS, "a_ptr"),
        (*_NO_STEM, "skip_ptr"),
        _INPUT
        | {"RES_SPLITS": 8, "SCALE": True, "LAST": True, "SPLIT": False, "PDL": False}
        | {"PRECISION": "tf32"}
        | {k: v for k, v in _DEEP.items() if k not in ("TO", "TAPS")},
        numbers={"film_stride": "i32", "cond_stride": "i32", "eps": "fp32"},
        options=_REGISTERS,
    ),
    _case(
        "multiply",
        "conv1d_multiply_kernel",
        ("a_ptr", "weight_ptr", "out_ptr", "side_ptr"),
        (),
        {k: v for k, v in _DEEP.items() if k not in ("CPG", "BT")}
        | {"CO": 1024, "BM": 64, "BN": 128, "ROWS": 64, "BK": 64, "CHANNELS": 256}
        | {"WIDEST": 4, "STRIDE": 1, "TRANSPOSED": False, "PRECISION": "tf32", "PDL": False},
        numbers={"N": "i32"},
        options={"num_stages": 4},
        expect={"wgmma": True, "narrow": False, "spills": 8, "arches": (90, 100)},  # of sm_100
    ),
    _case(
        "multiply, several pieces of the weights a tile",
        "conv1d_multiply_kernel",
        ("a_ptr", "weight_ptr", "out_ptr"),
        ("side_ptr",),
        {k: v for k, v in _FIRST.items() if k not in ("CPG", "BT")}
        | {"CO": 256, "BM": 16, "BN": 128, "ROWS": 64, "BK": 64, "CHANNELS": 64}
        | {"WIDEST": 4, "STRIDE": 1, "TRANSPOSED": False, "PRECISION": "tf32", "PDL": True},
        numbers={"N": "i32"},
        options={"num_stages": 4, "launch_pdl": True},
        expect={"wgmma": True, "narrow": False, "arches": (90,)},
    ),
    _case(
        "head",
        "conv1d_head_kernel",
        ("sums_ptr", "bias_ptr", "gamma_ptr", "beta_ptr", "weight_ptr", "head_bias_ptr", "out_ptr"),
        (),
        {"C": 256, "T": 16, "CPG": 32, "BT": 16, "SPLITS": 8, "CX": 2, "LAST": True, "PDL": True},
        numbers={"eps": "fp32"},
        options=_REGISTERS | {"num_warps": 8, "launch_pdl": True},
        expect={"arches": _HOPPER},
    ),
    _case(
        "project",
        "conv1d_project_kernel",
        ("z_ptr", "weight_ptr", "bias_ptr", "out_ptr"),
        (),
        {"EP": 1088, "BF": 64, "BE": 64, "BR": 16, "PRECISION": "tf32"},
        numbers={"R": "i32", "E": "i32", "F": "i32"},
        options={"num_stages": 4},
    ),
]  # fmt: skip

if SUPPORTED:
    COMPILE_CASES += [
        _whole("whole, 64 samples", (64, 4, 2, 2), "bf16", False, T=4, CO=1024, **_KEEPS),
        _whole("whole, a 1x1 skip, slots", (16, 8, 4, 2), "bf16", True, T=8, CO=512, **_KEEPS),
        _whole(
            "whole, transposed, odd length", (8, 2, 2, 2), "bf16", False,
            T=7, CO=512, TAPS=2, STRIDE=1, TRANSPOSED=True,
        ),
        _whole(
            "whole, stride 2", (8, 4, 2, 2), "fp16", False,
            T=7, CO=512, TAPS=3, STRIDE=2, TRANSPOSED=False,
        ),
        _whole("whole, tf32", (8, 4, 4, 4), "fp32", True, T=4, CO=1024, **_KEEPS),
        _whole(
            "whole, float32", (32, 4, 8, 2), "fp32", False, T=4, CO=1024, SPLIT=True, **_KEEPS
        ),
    ]  # fmt: skip
