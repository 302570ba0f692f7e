"""A run's folder has one job at a time, and a dead one does not keep it."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from hybridrl.errors import ConfigError, StorageError
from hybridrl.run_files import run_lock
from hybridrl.run_files.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys
from pathlib import Path
from hybridrl.run_files.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_job_is_refused_until_the_first_has_ended_or_died(tmp_path, holder):
    words = rf"{tmp_path} is in use: process {holder.pid} on .* since \d{{4}}-.*fork= in place"
    with pytest.raises(ConfigError, match=words), RunLock(tmp_path):
        pass
    holder.kill()
    holder.wait()
    assert (tmp_path / LOCK_FILE).exists(), "it could not tidy up"
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path):
    with RunLock(tmp_path):
        noted = json.loads((tmp_path / LOCK_FILE).read_text())
    (tmp_path / LOCK_FILE).write_text(json.dumps({**noted, "started": noted["started"] - 100}))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_was_not_written_to_its_end_is_nobodys(tmp_path, text):
    (tmp_path / LOCK_FILE).write_text(text)
    with RunLock(tmp_path):
        pass


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The lock of a job on another machine."""
    monkeypatch.setattr(run_lock, "_POLL_SECONDS", 0.01)
    noted = {"host": "far", "machine": "another", "pid": 1, "started": 1.0, "since": 1.0}
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps(noted))
    return file


def test_a_job_on_another_machine_is_known_by_its_beat(elsewhere):
    stop = threading.Event()

    def beat():
        while not stop.wait(0.005):
            os.utime(elsewhere)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(ConfigError, match="process 1 on far"), RunLock(elsewhere.parent):
            pass
    finally:
        stop.set()
        beating.join()
    long_ago = time.time() - 2 * run_lock.LEASE_SECONDS
    os.utime(elsewhere, (long_ago, long_ago))
    with RunLock(elsewhere.parent):
        pass


def test_one_that_falls_silent_is_waited_for_and_then_dead(elsewhere, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 0.05)
    with RunLock(elsewhere.parent):
        assert json.loads(elsewhere.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "this user may not write there"),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch, number, words):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock.os, "open", refuses)
    with pytest.raises(StorageError, match=f"Cannot write {tmp_path}.*{words}"), RunLock(tmp_path):
        pass


def test_what_another_has_taken_meanwhile_stays_its_own(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / LOCK_FILE).write_text('{"another": "job"}')
    assert (tmp_path / LOCK_FILE).read_text() == '{"another": "job"}'
