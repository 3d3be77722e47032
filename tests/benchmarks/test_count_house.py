"""What `benchmarks.count_house` counts."""

from benchmarks.count_house import count, places

KERNELS = """
import triton
_LEAST, _MOST = 4, 2**6
_SHAPES = {"few": (1, 2)}
_NAMES = ("a", "b")
_EMPTY = ()
PUBLIC = 3

@triton.jit
def helper(x):
    return x

@gluon.jit(do_not_specialize=["H"])
def conv_kernel(x_ptr) -> bool:
    pass

def serves(x) -> bool:
    return x > _LEAST

def refuse(spec, gpu) -> str | None:
    return None

def name(x) -> str:
    return ""
"""


def test_what_is_counted():
    found = count(
        iter(
            [
                ("triton_kernels/conv/a.py", KERNELS),
                ("triton_kernels/reference/a.py", "_A = 1\n"),
                ("diffusion/plan/a.py", "_A = 1\n\n"),
                ("diffusion/models/a.py", "_A = 1\n"),
                ("tests/kernels/cases_a.py", "a\n"),
                ("tests/kernels/test_a.py", "a\nb\n"),
            ]
        )
    )
    assert found == {
        "kernels": 1,
        "choices": 2,
        "thresholds": 2,  # a line each
        "limits": 1,
        "files": 1,
        "lines": KERNELS.count("\n"),
        "reference": 1,
        "plan": 2,
        "tests": 3,
        "cases": 1,
    }


def test_thresholds_are_listed_where_they_are():
    files = [("triton_kernels/conv/a.py", KERNELS), ("tests/kernels/test_a.py", KERNELS)]
    assert list(places(iter(files), "thresholds")) == [
        "triton_kernels/conv/a.py:3: _LEAST, _MOST = 4, 2**6",
        'triton_kernels/conv/a.py:4: _SHAPES = {"few": (1, 2)}',
    ]
    (limit,) = places(iter(files), "limits")
    assert limit.endswith("_LEAST, _MOST = 4, 2**6")
