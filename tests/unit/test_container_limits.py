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
        ("100000 0", 8),
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


V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"
V2 = "memory.max", "memory.current", "memory.stat"
TABLE = "anon 500\nactive_file 150\ninactive_file 50\nodd\nrow of words"
TOTALS = "active_file 1\ntotal_active_file 150\ntotal_inactive_file 50"
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, None),
        (dict(zip(V2, ("max", 900, TABLE), strict=True)), None),
        (dict(zip(V2, (1000, 900, TABLE), strict=True)), (1000, 700)),
        ({"memory.max": 1000, "memory.current": 900}, (1000, 900)),
        ({"memory.max": 1000}, (1000, 0)),
        (dict(zip(V2, (1000, 100, TABLE), strict=True)), (1000, 0)),
        (dict(zip(V1, (1000, 900, TOTALS), strict=True)), (1000, 700)),
        (dict(zip(V1, (UNLIMITED, 900, TOTALS), strict=True)), None),
        (
            dict(zip(V1, (UNLIMITED, 900, "hierarchical_memory_limit 2000"), strict=True)),
            (2000, 900),
        ),
    ],
)
def test_the_memory_of_a_container_in_both_versions_without_cached_files(
    tmp_path, monkeypatch, files, memory
):
    write_group(tmp_path, monkeypatch, files)
    assert container_limits.read_container_memory() == memory
