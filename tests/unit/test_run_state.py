"""What has become of a run, also where nobody was left to say so."""

import json
import subprocess
import sys

import pytest

from hybridrl.errors import PreemptionInterrupt, StorageError, WorkerError
from hybridrl.run_files.run_lock import RunLock
from hybridrl.run_files.run_status import RunStatus, read_run_status
from hybridrl.system.storage import replace_folder

DIES = """
import os, sys, pathlib
from hybridrl.run_files.run_lock import RunLock
from hybridrl.run_files.run_status import RunStatus
folder = pathlib.Path(sys.argv[1])
RunLock(folder).__enter__()
RunStatus(folder).begin()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (None, ("finished", "")),
        (WorkerError("actor died.\nIts log: ..."), ("failed", "actor died.")),
        (ValueError("3"), ("failed", "ValueError: 3")),
        (KeyboardInterrupt("Ctrl-C"), ("interrupted", "Ctrl-C")),
        (KeyboardInterrupt(), ("interrupted", "Ctrl-C")),
        (PreemptionInterrupt("SIGTERM"), ("interrupted", "SIGTERM")),
    ],
)
def test_the_end_is_noted_once_with_its_cause(tmp_path, error, found):
    assert read_run_status(tmp_path) == ("", "")
    with RunLock(tmp_path):
        state = RunStatus(tmp_path)
        state.begin()
        assert read_run_status(tmp_path) == ("running", "")
        state.end(error)
        state.end(None if error else ValueError())
    assert read_run_status(tmp_path) == found
    noted = json.loads((tmp_path / "status.json").read_text())
    assert noted["began"] <= noted["ended"]


def test_a_run_that_goes_on_began_when_it_first_did(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "interrupted", "began": "2020-01-01"}')
    RunStatus(tmp_path).begin()
    assert json.loads((tmp_path / "status.json").read_text())["began"] == "2020-01-01"


def test_a_killed_job_does_not_seem_to_run(tmp_path):
    with RunLock(tmp_path):
        RunStatus(tmp_path).begin()
    assert read_run_status(tmp_path) == ("killed", "The job ended without a word.")
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)])
    state, why = read_run_status(tmp_path)
    assert state == "killed" and "is gone" in why
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_a_folder_is_the_old_one_or_the_new_one(tmp_path):
    model = tmp_path / "model"
    for content in ("old", "new"):
        with replace_folder(model) as part:
            part.mkdir()
            (part / "weights").write_text(content)
        assert (model / "weights").read_text() == content
    with pytest.raises(StorageError), replace_folder(model) as part:
        part.mkdir()
        (part / "weights").write_text("half")
        raise OSError(28, "No space left on device")
    assert (model / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
