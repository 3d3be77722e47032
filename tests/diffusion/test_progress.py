"""What is shown of work that takes long, where there is a terminal and where there is none."""

import io
import sys

import pytest

from diffusion.data.elephants import elephants
from diffusion.runtime import progress
from diffusion.runtime.progress import Progress, duration


@pytest.fixture
def clock(monkeypatch):
    """One that stands until it is set."""
    clock = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock["now"])
    return clock


def test_a_log_gets_a_line_every_ten_seconds(clock, capsys):
    with Progress(1000, unit="img", what="PHOTOS") as shown:
        for second in range(26):
            clock["now"] = float(second)
            shown.reach(20 * second)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "PHOTOS: 200 of 1000, 20 img/s, about 40 s left",
        "PHOTOS: 400 of 1000, 20 img/s, about 30 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0, "0 s"), (1e-5, "1 ms"), (0.034, "34 ms"), (0.9, "900 ms"), (1, "1 s")),
        *((89, "89 s"), (90, "2 min"), (7200, "2.0 h")),
    ],
)
def test_a_duration_is_said_in_its_unit(seconds, said):
    assert duration(seconds) == said


def test_before_the_first_is_done_there_is_no_rate(clock, capsys):
    with Progress(4, unit="episode") as shown:
        clock["now"] = 12.0
        shown.reach(0, said="step 50")
    assert capsys.readouterr().out == "episode: 0 of 4, step 50\n"


def test_one_process_of_several_says_it(clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Progress(4, unit="img") as shown:
        clock["now"] = 12.0
        shown.reach(2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(4, unit="img", what="PHOTOS") as shown:
        shown.reach(2)
        shown.reach(4, said="two more")
    assert "PHOTOS: 100%" in terminal.getvalue() and "two more" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_pictures_that_are_drawn_say_how_many_are_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    elephants(count=3, size=8)
    assert capsys.readouterr().out.startswith("elephants: 3 of 3, ")
