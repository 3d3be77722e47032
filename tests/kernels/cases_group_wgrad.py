"""The kernels of `conv.hopper.group_wgrad` as compile_only.py compiles them."""

from triton_kernels.hopper.descriptors import SUPPORTED

from .cases_conv_hopper import _rows


def _operands(count: int, x: str, dy: str) -> tuple[dict, dict]:
    """The descriptors that are there, and those that are not."""
    names = [(f"x{i}_desc", f"dy{i}_desc") for i in range(1, 5)]
    there = {name: kind for pair in names[:count] for name, kind in zip(pair, (x, dy), strict=True)}
    return there, dict.fromkeys(name for pair in names[count:] for name in pair)


def _case(name: str, kernel: str, operands: tuple[dict, dict], numbers: tuple, constants: dict):
    channels = [f"{c}{i}" for c in ("CI", "CO") for i in range(1, 5)]
    return {
        "name": name,
        "kernel": f"triton_kernels.conv.hopper.group_wgrad_kernels:{kernel}",
        "signature": {
            **operands[0],
            "part_ptr": "*fp32",
            **dict.fromkeys((*channels, *numbers), "i32"),
        },
        "constexprs": {**operands[1], **constants, "num_warps": 4},
        "multiples": channels,
        "expect": {"wgmma": "registers", "tma": True, "arches": (90,)},
    }


def _of_rows(count: int, width: int, images: int = 1) -> dict:
    row, rows = width // images, 256 // width
    x = _rows(1, row, images, 64) if images > 1 else _rows(1, 1, row, 64)
    dy = _rows(rows, row, images, 64) if images > 1 else _rows(1, rows, row, 64)
    case = _case(
        f"rows_{row}_of_{count}",
        "conv_rows_group_wgrad_kernel",
        _operands(count, x, dy),
        ("tiles", "tiles_h"),
        {"COUNT": count, "W": width, "IMAGES": images, "STAGES": 2},
    )
    return case | {"options": {"num_warps": 4, "maxnreg": 128}}


def _of_points(count: int, groups: int, blocks: int, steps: int, stages: int) -> dict:
    case = _case(
        f"points_{groups}x{blocks}_{steps}_of_{count}",
        "conv_points_group_wgrad_kernel",
        _operands(count, _rows(64, 64), _rows(64, 64)),
        ("tiles",),
        {"COUNT": count, "GROUPS": groups, "BLOCKS": blocks, "STEPS": steps, "STAGES": stages},
    )
    return case | {"options": {"num_warps": 4, "maxnreg": 168 if groups == 2 else 128}}


COMPILE_CASES = (
    [
        _of_rows(4, 64),
        _of_rows(2, 16),
        _of_rows(2, 64, images=8),
        _of_points(4, 1, 1, 2, 3),
        _of_points(3, 2, 2, 2, 3),
        _of_points(2, 3, 3, 1, 4),
    ]
    if SUPPORTED
    else []
)
