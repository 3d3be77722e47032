"""The script behind docs/reliability.md, with few of each kind."""

import pytest

from .end_to_end.run import ROOT, run


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


@pytest.mark.slow
def test_faults_cost_nothing():
    code, out, err = run("-m", "tests.faults", "kills=2", "flips=20", "tries=0", "seed=1")
    assert code == 0, err
    assert [row[1::2] for row in table(out)] == [["2", "0"], ["20", "0"], ["20", "0"]]
    sections = (ROOT / "docs" / "reliability.md").read_text().split("\n## ")
    page = table(next(text for text in sections if text.startswith("Faults tried")))
    assert {row[0] for row in table(out)} < {row[0] for row in page}
    assert all(row[3] == "0" for row in page)
