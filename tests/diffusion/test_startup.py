"""What the time to the first step goes into."""

import time

from diffusion.runtime import startup
from diffusion.runtime.startup import StartUp


def test_every_part_is_timed_from_the_one_before():
    clock = StartUp(before=2.0)
    clock.reached("imports")
    time.sleep(0.2)
    clock.reached("data")
    (_, imports), (_, data) = clock.parts
    assert 2.0 <= imports < 2.1 and 0.2 <= data < 0.4
    line = clock.finish()
    assert line.startswith("the first step was done after 2.2 s: imports 2.0, data 0.2")


def test_only_the_first_run_of_a_process_counts():
    clock = StartUp(before=0.0)
    assert clock.finish() is None  # nobody has said anything
    clock.reached("imports")
    assert clock.finish() is not None
    clock.reached("imports")
    assert clock.finish() is None and len(clock.parts) == 1


def test_the_time_before_python_imports_counts(monkeypatch, tmp_path):
    assert 0 < startup._age() < 3600 * 24
    monkeypatch.setattr(startup, "_STAT", tmp_path / "nothing")
    assert startup._age() == 0.0
