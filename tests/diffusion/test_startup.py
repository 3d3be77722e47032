"""What the time to the first step goes into."""

from types import SimpleNamespace

from diffusion.runtime import startup
from diffusion.runtime.startup import StartUp


def test_every_part_is_timed_from_the_one_before(monkeypatch):
    now = iter([100.0, 100.5, 101.25])
    monkeypatch.setattr(startup, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = StartUp(before=2.0)
    clock.reached("imports")
    clock.reached("data")
    assert clock.parts == [("imports", 2.5), ("data", 0.75)]
    line = clock.finish()
    assert line.startswith("the first step was done after 3.2 s: imports 2.5, data 0.8")


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
