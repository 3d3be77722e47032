"""What the code of each kernel is to be, as `test_compile` checks it of what was recorded.

A kernel that is not listed spills no registers and may have any instructions. Of a list the first
entry counts whose conditions a case fulfils: values of constants, `arch`, or `float32`, if no
tensor has 16 bits. wgmma and TMA are looked for in the code for sm_90 alone.
"""

from typing import Any, NamedTuple


class Expect(NamedTuple):
    """Of the code of a case."""

    # True: both operands in shared memory; "registers": A may come from registers, as P in
    # attention; False: none
    wgmma: bool | str | None = None
    tma: bool | None = None  # whether tiles are loaded by it
    spills: int = 0  # bytes of registers, as found when it was recorded: what is large is a defect
    # False: no load of a single number of 16 bits, which is what comes of a tile whose alignment
    # the compiler does not see
    narrow: bool | None = None


_SHARED, _REGISTERS = Expect(wgmma=True, tma=True), Expect(wgmma="registers", tma=True)
_NONE = Expect(wgmma=False, tma=True)  # fewer rows than the 64 of a wgmma
_EXACT = {"PRECISION": "ieee"}  # products are FMAs, or three in TF32
_FMA = _EXACT | {"float32": True}  # products of 16-bit numbers are exact in wgmma, too

EXPECTED: dict[str, Expect | list[tuple[dict[str, Any], Expect]]] = {
    "attention_bwd_delta_kernel": Expect(wgmma=False, tma=False, narrow=False),
    "attention_bwd_dkdv_kernel": [(_FMA, Expect(wgmma=False)), ({}, Expect("registers"))],
    "attention_bwd_dq_kernel": [
        (_FMA, Expect(wgmma=False, spills=104)),
        ({}, Expect(wgmma="registers")),
    ],
    "attention_bwd_head_kernel": [
        ({"num_warps": 8}, _REGISTERS._replace(spills=244)),  # with 64 when it leaves rows
        ({}, _REGISTERS),
    ],
    "attention_bwd_relayed_kernel": _REGISTERS,
    "attention_few_keys_bwd_kernel": [
        ({"arch": 90, "BY_QUERY": True}, Expect(wgmma="registers", spills=16)),
        ({}, Expect(wgmma="registers")),
    ],
    "attention_few_keys_fwd_kernel": Expect(wgmma="registers"),
    "attention_fwd_head_kernel": [({"T": 256}, _REGISTERS._replace(spills=64)), ({}, _REGISTERS)],
    "attention_fwd_kernel": [
        (_FMA, Expect(wgmma=False)),
        ({"arch": 80, "BLOCK_M": 128, "BLOCK_N": 128}, Expect(spills=4)),
        ({"arch": 89, "BLOCK_M": 128, "BLOCK_N": 128}, Expect(spills=4)),
        ({}, Expect(wgmma="registers")),
    ],
    "attention_fwd_kept_kernel": _REGISTERS,
    "attention_fwd_streamed_kernel": _REGISTERS,
    "_im2col_fwd_kernel": _NONE,
    "conv1d_apply_kernel": Expect(tma=False),
    "conv1d_head_kernel": Expect(tma=False),
    "conv1d_multiply_kernel": [
        ({"arch": 120}, Expect(spills=4)),
        ({}, Expect(wgmma=True, tma=False, narrow=False, spills=8)),
    ],
    "conv1d_project_kernel": Expect(tma=False),
    "conv1d_stage_kernel": Expect(wgmma=True, tma=False),
    "conv1d_whole_kernel": [({"float32": True}, _REGISTERS), ({}, _SHARED)],
    "_conv2d_gather_kernel": [
        (_EXACT | {"SPLIT": False}, Expect(wgmma=False, tma=False)),
        ({"SPLIT": True}, Expect(wgmma="registers", tma=False, spills=8)),
        ({"BLOCK_C": 16}, Expect(wgmma=False, tma=False)),  # fewer rows than the 64 of a wgmma
        ({}, Expect(wgmma=True, tma=False)),
    ],
    "_conv2d_wgrad_gather_kernel": [
        ({"SPLIT": True}, Expect(wgmma="registers", tma=False)),
        (_EXACT, Expect(wgmma=False, tma=False)),
        ({"BLOCK_CO": 16}, Expect(wgmma=False, tma=False)),  # as above
        ({}, Expect(wgmma=True, tma=False)),
    ],
    "_conv2d_wgrad_tma_kernel": _SHARED,
    "conv_unfused_single_tile_kernel": _SHARED,
    "conv_unfused_single_tile_tf32_kernel": _REGISTERS,
    "conv_unfused_pointwise_kernel": _SHARED,
    "conv_early_kernel": _SHARED,
    "conv_forward_kernel": [
        (_EXACT | {"x_small_desc": None}, _REGISTERS),
        (_EXACT | {"extra1_desc": None, "arch": 120}, _SHARED._replace(spills=44)),
        (_EXACT | {"extra1_desc": None}, _SHARED),
        (_EXACT, _REGISTERS),  # what 1x1 filters see is split there
        ({"BLOCK_C": 16}, _NONE),
        ({"BLOCK_C": 32}, _NONE),
        ({}, _SHARED),
    ],
    "conv_fp16_split_wgrad_kernel": _REGISTERS,
    "conv_input_grad_kernel": [(_EXACT, _REGISTERS), ({}, _SHARED)],
    "conv_linear_mma_kernel": _SHARED,
    "conv_mma_wgrad_kernel": Expect(wgmma=False, tma=True),
    "conv_narrow_output_kernel": _SHARED,
    "conv_single_tile_kernel": _SHARED,
    "conv_one_row_kernel": _SHARED,
    "conv_parity_kernel": _SHARED,
    "conv_points_wgrad_kernel": [
        ({"ACROSS": 5, "SWAPPED": True}, _REGISTERS._replace(spills=96)),  # of where it writes
        ({"WIDTH": 64}, _REGISTERS),
        ({}, _SHARED),
    ],
    "conv_pointer_input_grad_kernel": [
        ({"ROWS": 4, "arch": 80}, Expect(spills=16)),
        ({"ROWS": 4, "arch": 89}, Expect(spills=20)),
        ({}, Expect()),
    ],
    "_conv_pointer_wgrad_kernel": [
        ({"ROWS": 4, "arch": 80}, Expect(spills=48)),
        ({"ROWS": 4, "arch": 89}, Expect(spills=48)),
        ({"ROWS": 4, "arch": 120}, Expect(spills=88)),
        # in TF32, whose tile of 16 bits spills nothing
        ({"BLOCK_CO": 128, "BLOCK_CI": 128, "STRIDE": 2, "arch": 120}, Expect(spills=288)),
        ({}, Expect()),
    ],
    "conv_stationary_weights_kernel": [
        ({"PRODUCERS": 2}, _REGISTERS._replace(spills=24)),
        ({"PRODUCERS": 1, "EXTRA1": 1}, _REGISTERS._replace(spills=4)),
        ({}, _REGISTERS),
    ],
    "conv_row_group_wgrad_kernel": [
        ({"RAGGED": True}, _REGISTERS._replace(spills=64)),
        ({}, _REGISTERS),
    ],
    "conv_row_wgrad_kernel": [
        ({"W": 32, "SWAP": False}, _REGISTERS._replace(spills=4)),
        ({}, _REGISTERS),
    ],
    "conv_tile_mma_kernel": [
        ({"kept_ptr": None, "ROWS": 16, "W": 16, "DGRAD": True}, _SHARED._replace(spills=4)),
        ({"kept_ptr": None}, _SHARED),
        ({}, _SHARED._replace(spills=108)),  # of the words of a mask
    ],
    "_group_norm_bwd_params_kernel": [({"arch": 120}, Expect(spills=8)), ({}, Expect())],
    "group_norm_cluster_fwd_kernel": [({"TILES": 16}, Expect(spills=4)), ({}, Expect())],
    "_fp16_split_kernel": Expect(tma=False),
    "_largest_kernel": Expect(tma=False),
    "norm_apply_kernel": Expect(narrow=False),
    "norm_attention_kernel": _REGISTERS,
    "norm_single_cta_kernel": [  # sums of eight parts, of 28 channels and 256 pixels
        ({"SPLITS": 8, "CG": 28, "BLOCK_P": 256}, Expect(spills=244)),
        ({}, Expect()),
    ],
    "norm_dx_kernel": [({"TILES": 4, "BLOCK_P": 16}, Expect(spills=4)), ({}, Expect())],
    "_pointwise_wgrad_kernel": _NONE,
    "_skip_dx_kernel": [(_EXACT, _REGISTERS), ({}, _SHARED)],
    "_split_kernel": Expect(wgmma=False, tma=False),
    "_transpose_weights_kernel": Expect(wgmma=False, tma=False),
}


def expected(case: dict[str, Any]) -> Expect:
    """Of a recorded case."""
    entry = EXPECTED.get(case["kernel"].split(":")[1], Expect())
    if isinstance(entry, Expect):
        return entry
    float32 = not any("16" in kind for kind in case["signature"].values())
    facts = case["constexprs"] | {"arch": case["arch"], "float32": float32}
    fulfilled = [e for when, e in entry if when.items() <= facts.items()]
    return fulfilled[0]
