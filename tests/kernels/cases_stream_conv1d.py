"""Kernels of stream_conv1d to compile, in bf16: layers of the network of the published size (256,
512 and 1024 channels in 8 groups, 16 positions) at batch 1, and what batches have instead."""

_LAUNCH = {"num_warps": 4}
_POINTERS = (
    "bias_ptr", "gamma_ptr", "beta_ptr", "film_ptr", "cond_ptr", "row_ptr", "residual_bias_ptr",
    "sums_ptr", "x_ptr", "stem_ptr", "residual_ptr", "residual_stem_ptr", "keep_ptr", "skip_ptr",
)  # fmt: skip
_INPUT = {"C2": 0, "SCALE": False, "SPLITS": 8, "RES_SPLITS": 0, "CX": 2, "TAPS_X": 5}
_HOPPER = (90, 100, 120)  # where launches overlap


def _case(name: str, kernel: str, pointers: tuple, absent: tuple, constexprs: dict, **more) -> dict:
    """The pointers of a kernel's input are float32 but the row; those in `absent` are None."""
    signature = {p: "*i64" if p == "row_ptr" else "*fp32" for p in pointers if p not in absent}
    signature |= {"weight_ptr": "*bf16"} if "weight_ptr" in pointers else {}
    signature |= {"a_ptr": "*bf16"} if "a_ptr" in pointers else {}
    return {
        "name": name,
        "kernel": f"triton_kernels.stream.conv1d_kernels:{kernel}",
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
        options={"launch_pdl": True} if overlaps else {},
        expect={"arches": arches} | expect,
    )


_NO_STEM = ("x_ptr", "stem_ptr", "residual_stem_ptr")
_NO_FILM = ("film_ptr", "cond_ptr", "row_ptr")
_NO_RESIDUAL = ("residual_ptr", "residual_bias_ptr", "keep_ptr")
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
        _INPUT | {"RES_SPLITS": 8, "SCALE": True, "PDL": False, "PRECISION": "tf32"}
        | {k: v for k, v in _DEEP.items() if k not in ("TO", "TAPS")},
        numbers={"film_stride": "i32", "cond_stride": "i32", "eps": "fp32"},
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
        expect={"wgmma": True, "narrow": False, "arches": (90, 100)},
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
        {"C": 256, "T": 16, "CPG": 32, "BT": 16, "SPLITS": 8, "CX": 2, "PDL": True},
        numbers={"eps": "fp32"},
        options={"num_warps": 8, "launch_pdl": True},
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
