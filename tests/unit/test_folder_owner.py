"""A folder of checkpoints that stands apart is one run's, on a disk and at a URL."""

import json
import shutil
import uuid

import pytest

from hybridrl.checkpoint.ownership import OWNER_FILE, FolderOwnership
from hybridrl.errors import ConfigError, StorageError
from hybridrl.system.locations import list_file_sizes, parse_location, write_atomically


@pytest.fixture(params=["disk", "memory://"])
def shared(request, tmp_path):
    where = tmp_path / "shared" if request.param == "disk" else f"memory://{uuid.uuid4()}/run"
    return parse_location(where)


@pytest.fixture
def owner_of(shared, tmp_path):
    """Claims the folder for the run of this name."""

    def claim(name, resumes=False):
        (tmp_path / name).mkdir(exist_ok=True)
        owner = FolderOwnership(shared, tmp_path / name)
        owner.claim(resumes=resumes)
        return owner

    return claim


def complete_step(shared):
    write_atomically(shared / "step-000003" / "complete.json", b"{}")


def dead(shared):
    """Has its owner be a process that is gone, on this machine."""
    noted = json.loads((shared / OWNER_FILE).read_text())
    write_atomically(
        shared / OWNER_FILE, json.dumps(noted | {"started": noted["started"] - 100}).encode()
    )


def elsewhere(shared):
    noted = json.loads((shared / OWNER_FILE).read_text())
    write_atomically(
        shared / OWNER_FILE, json.dumps(noted | {"machine": "another", "host": "far"}).encode()
    )


def test_the_second_run_is_refused_and_the_first_goes_on(shared, owner_of, tmp_path):
    first = owner_of("one")
    words = rf"checkpoint\.folder={shared} is that of the run in {tmp_path}/one .*remove .*owner"
    with pytest.raises(ConfigError, match=words):
        owner_of("two")
    first.check()
    elsewhere(shared)
    with pytest.raises(ConfigError, match=r"on far\), and each run needs one"):
        owner_of("two")
    with pytest.raises(StorageError, match="taken over by the run in"):
        first.check()
    dead(shared)  # on a machine that cannot be asked
    with pytest.raises(ConfigError, match="If that run is gone for good, remove"):
        owner_of("two")


def test_a_dead_job_keeps_nothing_from_its_own_run_and_from_new_ones(shared, owner_of):
    owner_of("one")
    dead(shared)
    again = owner_of("one", resumes=True)
    again.check()
    dead(shared)
    owner_of("two").check()
    assert again.is_taken()


def test_a_run_that_lost_its_folder_takes_it_and_the_old_job_hears_of_it(shared, owner_of):
    old = owner_of("one")
    complete_step(shared)
    new = owner_of("two", resumes=True)
    new.check()
    with pytest.raises(StorageError, match=r"taken over by the run in .*/two .*This job ends"):
        old.check()
    old.release()
    new.check()
    with pytest.raises(ConfigError, match="is that of the run in"):  # it comes back
        owner_of("one", resumes=True)


def test_a_folder_without_a_step_is_given_back(shared, owner_of, tmp_path):
    owner_of("one").release()
    assert list_file_sizes(shared) == {} and list((tmp_path / "one").iterdir()) == []
    one = owner_of("two")
    complete_step(shared)
    one.release()
    one.check()
    with pytest.raises(ConfigError, match="two"):
        owner_of("three")


def test_a_note_that_is_damaged_is_nobodys(shared, owner_of):
    write_atomically(shared / OWNER_FILE, b'{"run"')
    owner_of("one").check()


def test_a_copy_of_a_run_takes_nothing_from_a_job_that_goes_on(shared, owner_of, tmp_path):
    first = owner_of("one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(ConfigError, match=rf"is that of the run in {tmp_path}/one "):
        owner_of("copy", resumes=True)
    first.check()
    dead(shared)  # then it may be the run itself, under another name
    owner_of("copy", resumes=True).check()
