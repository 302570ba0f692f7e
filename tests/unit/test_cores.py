"""The cores that a process may use, of all that its machine has."""

import os

import pytest

from hybridrl.system import cpu_cores as cores


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
    monkeypatch.setattr(cores, "CPU_QUOTA_FILE", tmp_path / "cpu.max")
    if quota is not None:
        cores.CPU_QUOTA_FILE.write_text(f"{quota}\n")
    assert cores.count_usable_cores() == usable
