"""Control groups that bound all memory of a program, where this process may make them."""

import os
import subprocess

import pytest

from hybridrl.sandbox.python_runner import SandboxLimits, find_confinement, run_python
from hybridrl.system import memory_cgroup as memory_group


@pytest.fixture
def parent():
    found = memory_group._find_parent_cgroup()
    if found is None:
        pytest.skip("this process may make no control group that counts memory")
    return found


def left(parent, process=None):
    return list(parent.glob(f"hybridrl-program-{process or os.getpid()}-*"))


def test_files_of_a_program_count(parent):
    assert find_confinement().memory_groups
    if find_confinement().namespaces == "none":
        pytest.skip("files are on the disk")
    program = "x = b'x' * (1 << 20)\nfor i in range(40): open(f'{i}', 'wb').write(x)\nprint('all')"
    assert run_python(program, limits=SandboxLimits(memory_mib=256)).stdout == "all\n"
    outcome = run_python(program, limits=SandboxLimits(memory_mib=32))
    assert (outcome.ended, outcome.stdout) == ("memory", "")
    assert left(parent) == []


def test_what_killed_processes_left_is_removed(parent):
    with subprocess.Popen(["true"]) as ended:
        pass
    (parent / f"hybridrl-program-{ended.pid}-0").mkdir()
    group = memory_group.make_memory_cgroup(1 << 30)
    memory_group._remove_leftovers(parent)
    assert left(parent, ended.pid) == []
    assert len(left(parent)) == 1
    group.close()
    assert left(parent) == []


def test_groups_of_version_2(tmp_path, monkeypatch):
    """By files of their names; the kernel of the tests may have version 1 alone."""
    (tmp_path / "leaf").mkdir()
    (tmp_path / "leaf/memory.max").write_text("max\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    monkeypatch.setattr(memory_group, "_ROOT", tmp_path)
    assert memory_group._counts_memory(tmp_path)
    assert not memory_group._counts_memory(tmp_path / "leaf")
    assert memory_group._list_v2_candidates("/leaf") == [tmp_path]
    (tmp_path / "leaf/memory.max").write_text("1000000\n")
    assert (
        memory_group._list_v2_candidates("/leaf") == []
    )  # to leave it would be to escape that limit
