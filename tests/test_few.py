"""What `make test` runs of tests with many cases."""

from types import SimpleNamespace

import pytest

from .conftest import few_of


class _Case:
    def __init__(self, name: str, **marks: str) -> None:
        self.nodeid, self.marks = f"tests/test_x.py::{name}", marks

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self.marks[name],)) if name in self.marks else None


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2]), (9, [0, 3, 6])]
)
def test_few_cases_are_spread(count, wanted):
    alone, many = _Case("test_alone"), [_Case(f"test_many[{i}]") for i in range(count)]
    assert few_of([*many, alone], 3) == [*(many[i] for i in wanted), alone]


def test_one_of_those_that_are_alike():
    kernels = [_Case(f"test_compiles[{k} {i}]", one_of=k) for k in "abcde" for i in range(3)]
    assert few_of(kernels, 2) == kernels[::3]


def test_long_ones_are_left_out():
    short = [_Case(f"test_short[{i}]") for i in range(2)]
    assert few_of([_Case("test_long", long=""), *short], 3) == short
