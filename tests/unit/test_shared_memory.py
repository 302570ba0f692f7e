"""What is in use in shared memory stays, whoever asks; what nobody uses any more goes."""

import subprocess
import sys

import pytest

from hybridrl.system import shared_memory
from hybridrl.system.shared_memory import remove_shared_memory, remove_stale_segments

HOLDS = """
import sys, pathlib
from hybridrl.system import shared_memory
shared_memory.SHARED_MEMORY_FOLDER = pathlib.Path(sys.argv[1])
shared_memory.lock_shared_memory("hybridrl-1-20")
(shared_memory.SHARED_MEMORY_FOLDER / "psm_hybridrl-1-20_0").touch()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY_FOLDER", tmp_path)
    return tmp_path


def test_a_job_that_lives_keeps_its_segments_and_a_killed_one_does_not(folder):
    (folder / "psm_hybridrl-2-30_0").touch()  # its job never came to hold anything
    (folder / "somebody-elses").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    remove_stale_segments()
    names = {path.name for path in folder.iterdir()}
    assert names == {"psm_hybridrl-1-20_0", "hybridrl-1-20.lock", "somebody-elses"}
    holder.kill()
    holder.communicate()
    remove_stale_segments()
    assert [path.name for path in folder.iterdir()] == ["somebody-elses"]


def test_the_end_of_a_job_takes_all_of_it_away(folder):
    shared_memory.lock_shared_memory("hybridrl-3-40")
    (folder / "hybridrl-3-40-abc").touch()
    remove_shared_memory("hybridrl-3-40")
    assert not list(folder.iterdir())


def test_a_link_among_the_locks_is_not_followed(folder, tmp_path_factory):
    mine = tmp_path_factory.mktemp("home") / "mine"
    (folder / "hybridrl-3-40.lock").symlink_to(mine)
    remove_stale_segments()
    assert not mine.exists()
    with pytest.raises(OSError, match="symbolic link"):
        shared_memory.lock_shared_memory("hybridrl-3-40")
    assert not mine.exists()
