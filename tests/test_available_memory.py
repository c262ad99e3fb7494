"""What can still be allocated: the smaller one of what the machine has and what the limit of a container leaves."""

import os

import pytest

from forgather.available_memory import available_bytes, container_limit
from forgather.ml.planner import processors_here

GIB = 2**30


@pytest.mark.parametrize(
    ("expected", "limit", "stat"),
    [
        (8 * GIB, None, None),
        (8 * GIB, "max", None),
        (1 * GIB, str(4 * GIB), None),
        (3 * GIB, str(4 * GIB), f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n"),
        (4 * GIB, str(4 * GIB), f"active_file {GIB}\ninactive_file {9 * GIB}\n"),
        (8 * GIB, str(64 * GIB), None),
        (1 * GIB, str(4 * GIB), "active_file\n"),
    ],
)
def test_the_smaller_room_counts(expected, limit, stat, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB\n")
    for name, text in (("memory.max", limit), ("memory.current", str(3 * GIB)), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert available_bytes(str(tmp_path / "meminfo"), str(tmp_path)) == expected


def test_a_plan_for_this_machine_has_no_more_than_the_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{GIB // 4}\n")
    monkeypatch.setattr(processors_here, "container_limit", lambda: container_limit(str(tmp_path)))
    assert processors_here._memory() == GIB // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert processors_here._memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB", "MemAvailable: much kB", "MemAvailable:"])
def test_a_system_that_does_not_say_is_not_guessed(text, tmp_path):
    (tmp_path / "meminfo").write_text(text)
    assert available_bytes(str(tmp_path / "meminfo"), str(tmp_path)) is None
    assert available_bytes("/no/such/file", str(tmp_path)) is None


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="the system does not report its memory")
def test_this_machine_has_some():
    assert GIB // 64 < available_bytes() < 2**50
