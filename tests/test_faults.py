"""The script behind docs/reliability.md, with few of each kind."""

import pytest

from .end_to_end.run import ROOT, run
from .faults import main


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


@pytest.mark.slow
def test_faults_cost_nothing():
    few = ("kills=2", "flips=20", "tries=0", "restarts=1", "seed=1")
    code, out, err = run("-m", "tests.faults", *few)
    assert code == 0, err
    expected = [["2", "0"], ["1", "0"], ["1", "0"], ["20", "0"], ["20", "0"]]
    assert [row[1::2] for row in table(out)] == expected
    sections = (ROOT / "docs" / "reliability.md").read_text().split("\n## ")
    page = table(next(text for text in sections if text.startswith("Faults tried")))
    assert {row[0] for row in table(out)} < {row[0] for row in page}
    assert all(row[3] == "0" for row in page)


def test_settings_of_the_script(capsys):
    assert main(["--help"]) == 0 and "[restarts=5]" in capsys.readouterr().out
    for wrong in ("kils=3", "kills=many", "kills=-1", "kills"):
        assert main([wrong]) == 2
        assert "is wrong; expected kills=NUMBER, flips=NUMBER" in capsys.readouterr().err
