"""The cores and the memory that a process may use, of all that its machine has."""

import os

import pytest

from hybridrl.system import container_limits


def write_group(folder, monkeypatch, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(container_limits, "CGROUP_FOLDER", folder)


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        (None, 8),  # no container
        ("max 100000", 8),
        ("1600000 100000", 8),
        ("250000 100000", 3),
        ("20000 100000", 1),
        ("written by nobody", 8),
    ],
)
def test_a_quota_leaves_fewer_cores_than_there_are(tmp_path, monkeypatch, quota, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    write_group(tmp_path, monkeypatch, {} if quota is None else {"cpu.max": quota})
    assert container_limits.count_usable_cores() == usable


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("250000", 2.5)])
def test_a_quota_in_version_1_of_control_groups(tmp_path, monkeypatch, quota, cores):
    files = {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": 100000}
    write_group(tmp_path, monkeypatch, files)
    assert container_limits.read_core_quota() == cores


STATISTICS = "anon 700\ninactive_file 200\ntotal_inactive_file 200"


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": 900, "memory.stat": STATISTICS}, None),
        ({"memory.max": 1000, "memory.current": 900, "memory.stat": STATISTICS}, (1000, 700)),
        ({"memory.max": 1000, "memory.current": 900, "memory.stat": "anon 7"}, (1000, 900)),
        (
            {
                "memory/memory.limit_in_bytes": 1000,
                "memory/memory.usage_in_bytes": 900,
                "memory/memory.stat": STATISTICS,
            },
            (1000, 700),
        ),
        (
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/memory.usage_in_bytes": 900,
                "memory/memory.stat": STATISTICS,
            },
            None,
        ),
    ],
)
def test_the_memory_of_a_container_in_both_versions_without_droppable_pages(
    tmp_path, monkeypatch, files, memory
):
    write_group(tmp_path, monkeypatch, files)
    assert container_limits.read_container_memory() == memory
