"""benchmarks.calls: which call of an op a kernel of the trace belongs to, and its line."""

import json

import torch

from benchmarks import calls
from benchmarks.work import Work, noted_work
from triton_kernels import fused_ops as fused


def test_kernels_belong_to_the_call_that_launched_them():
    def event(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    trace = {
        "traceEvents": [
            event("user_annotation", "call 0", 10, 5),
            event("user_annotation", "call 1", 20, 5),
            event("cuda_driver", "cuLaunchKernelEx", 11, 1, correlation=7),
            event("cuda_driver", "cuLaunchKernelEx", 13, 1, correlation=8),
            event("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=9),
            event("cuda_runtime", "cudaLaunchKernel", 30, 1, correlation=10),
            event("kernel", "second", 116, 2, correlation=8),
            event("kernel", "first", 112, 3, correlation=7),
            event("kernel", "other", 123, 4, correlation=9),
            event("kernel", "alone", 131, 5, correlation=10),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = calls.kernels_of_calls(trace)
    assert found == {
        0: [("first", 3), ("second", 2)],
        1: [("other", 4)],
        -1: [("alone", 5)],
    }


def test_a_line_has_the_median_of_steps_the_floor_and_what_was_chosen():
    noted = []

    class Around:
        def __init__(self, name, args):
            noted.append(calls.Call(name, args))

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    x = torch.zeros(2, 4, 4, 16)
    with noted_work(Around) as work:
        fused.pad_channels(x, 32, torch.bfloat16)
    [call], [needs] = noted, work
    assert call.shapes == "2x4x4x16" and call.chosen == json.dumps([])
    steps = [(noted, work, {0: [("pad", us)], -1: [("memset", 1.0)]}) for us in (3.0, 9.0, 4.0)]
    [line, alone] = calls.lines(steps, (1.0, 1.0))
    assert line[:3] == [0, "pad_channels", "2x4x4x16"]
    assert line[4] == "4.00" and float(line[5]) == round(needs.floor_us(1.0, 1.0), 2)
    assert alone[8] == "memset" and isinstance(needs, Work)
    [line, _] = calls.lines(steps, (0, 1.0))
    assert line[5] == ""


def test_kinds_of_calls_are_summed_up():
    def line(op, us, floor, kernels):
        return [0, op, "2x4", "", us, floor, "", "", kernels, "[]"]

    found = [
        line("a", "5.0", "4.0", "k: 2.0; k: 3.0"),
        line("b", "9.0", "1.0", "l: 9.0"),
        line("a", "8.0", "4.0", "k: 4.0; k: 4.0"),
        line("c", "7.0", "", "m: 7.0"),
        line("a", "7.0", "4.0", "k: 7.0"),
    ]
    assert [line.split() for line in calls.above_floors(found)] == [
        "8 us above: 1 of 9.0 us, floor 1.0: b 2x4: l".split(),
        "5 us above: 2 of 6.5 us, floor 4.0: a 2x4: 2 k".split(),
        "3 us above: 1 of 7.0 us, floor 4.0: a 2x4: k".split(),
    ]
