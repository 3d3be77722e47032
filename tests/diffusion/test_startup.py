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
    assert clock.parts == {"imports": 2.5, "data": 0.75}
    line = clock.finish()
    assert line.startswith("the first step was done after 3.2 s: imports 2.5, data 0.8")


def test_a_part_has_one_time_if_jobs_of_a_sweep_ended_before_a_step():
    clock = StartUp(before=3.0)
    for part in ("imports", "device", "imports", "device", "data"):
        clock.reached(part)
    assert list(clock.parts) == ["imports", "device", "data"]
    assert clock.finish().count("imports") == 1


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
