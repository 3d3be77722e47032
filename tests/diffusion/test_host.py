"""What a process may use of a machine."""

import os

import pytest

from diffusion.runtime import host

GIB = 2**30
MEMINFO = "MemTotal:  67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\n"  # 32 GiB


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that writes files of /proc and of /sys/fs/cgroup; with 32 processors."""
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32), raising=False)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write(proc__meminfo=MEMINFO)
    return write


def test_a_machine_without_limits(machine):
    assert (host.processors(), host.free_memory()) == (32, 32 * GIB)
    machine(
        proc__self__cgroup="0::/user.slice\n",
        groups__cpu_DOT_max="max 100000\n",
        groups__memory_DOT_max="max\n",
        groups__memory_DOT_current="1\n",
    )
    assert (host.processors(), host.free_memory()) == (32, 32 * GIB)


def test_a_container(machine):
    """Of which an outer group may be the one that limits it."""
    machine(
        proc__self__cgroup="0::/job/step\n",
        groups__job__cpu_DOT_max="250000 100000\n",
        groups__job__step__memory_DOT_max=f"{30 * GIB}\n",
        groups__job__step__memory_DOT_current=f"{GIB}\n",
        groups__job__memory_DOT_max=f"{16 * GIB}\n",
        groups__job__memory_DOT_current=f"{12 * GIB}\n",
        groups__job__memory_DOT_stat=f"anon 1\ninactive_file {2 * GIB}\n",
    )
    assert (host.processors(), host.free_memory()) == (3, 6 * GIB)


def test_control_groups_of_version_1(machine):
    machine(
        proc__self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n2:freezer:/\n",
        groups__memory__job__memory_DOT_limit_in_bytes=f"{8 * GIB}\n",
        groups__memory__job__memory_DOT_usage_in_bytes=f"{9 * GIB}\n",
        groups__cpu__job__cpu_DOT_cfs_quota_us="400000\n",
        groups__cpu__job__cpu_DOT_cfs_period_us="100000\n",
        groups__cpu__cpu_DOT_cfs_quota_us="-1\n",
        groups__cpu__cpu_DOT_cfs_period_us="100000\n",
    )
    assert (host.processors(), host.free_memory()) == (4, 0)


def test_another_system(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    machine(proc__meminfo="")
    assert (host.processors(), host.free_memory()) == (1, 8 * GIB)
