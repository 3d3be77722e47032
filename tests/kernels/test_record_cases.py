"""Which of the recorded launches are kept, and that the file can be compiled."""

import json

from tests.end_to_end.run import run
from triton_kernels.attention.kernels import attention_bwd_delta_kernel
from triton_kernels.conv.hopper.stationary.stationary_weights_kernel import (
    conv_stationary_weights_kernel,
)
from triton_kernels.conv.plain.fused_kernels import conv_forward_kernel

from .compile_only import RECORDED
from .expected import Expect, expected
from .recorded_choice import covering, multiplies


def case(**constants) -> dict:
    return {"constexprs": constants, "signature": {"x_ptr": "*bf16"}, "options": {}}


def test_what_shows_most_is_kept():
    """Every flag and what has a few values at least once; of what has many, anything."""
    plain, second = case(ACT=None, W=64, PIXELS=0), case(ACT="silu", W=32, PIXELS=1)
    neither = [case(ACT=None, W=64, PIXELS=i) for i in range(2, 9)]
    kept = covering([plain, *neither, second, case(ACT="gelu", W=32, PIXELS=9)], 5)
    assert len(kept) == 3 and kept[0] in (plain, second)
    assert {c["constexprs"]["ACT"] for c in kept} == {None, "silu", "gelu"}
    assert covering([plain, second], 1) == [plain]
    assert covering([plain, second], 0) == []


def test_products_are_looked_for_where_they_are_called():
    """Of none of the first two are they in its own file; the third is in a file with products."""
    assert multiplies(conv_forward_kernel) and multiplies(conv_stationary_weights_kernel)
    assert not multiplies(attention_bwd_delta_kernel)


def test_the_file_is_what_is_recorded():
    """Of one job: what the file has of it, all of what no other job launches."""
    code, out, err = run("-m", "tests.kernels.record_cases", "job=small ops")
    assert code == 0, err
    written, launched = RECORDED.read_text().splitlines(), out.splitlines()
    of_job = [line for line in written if json.loads(line)["job"] == "small ops"]
    assert of_job and set(of_job) <= set(launched)
    alone = '{"arch":90,"job":"small ops","kernel":"triton_kernels.denoise.step:_denoise_step'
    kept, all_of_it = ({x for x in text if x.startswith(alone)} for text in (written, launched))
    assert kept == all_of_it and len(kept) == 3


def test_the_file_is_well_formed():
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len({json.dumps(line) for line in lines}) == len(lines)
    assert {line["arch"] for line in lines} == {80, 89, 90, 100, 120}
    for line in lines:
        assert not line["signature"].keys() & line["constexprs"].keys()
        assert set(line["multiples"]) <= line["signature"].keys()


def test_conditions_of_what_is_expected():
    attention = {"kernel": "triton_kernels.attention.kernels:attention_fwd_kernel", "arch": 90}
    low = {"signature": {"q_ptr": "*bf16"}, "constexprs": {"PRECISION": "tf32"}}
    exact = {"signature": {"q_ptr": "*fp32"}, "constexprs": {"PRECISION": "ieee"}}
    assert expected(attention | low).wgmma == "registers"
    assert expected(attention | exact).wgmma is False
    assert expected(low | {"kernel": "a:unknown_kernel", "arch": 90}) == Expect()
