"""Whether a run goes on after a loss, and what it writes of it."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from settings import configured

from hybridrl.config.changed import apply_changes
from hybridrl.errors import LostError
from hybridrl.job import job as job_module
from hybridrl.job.config_resolution import PlacedRoles
from hybridrl.run.recovery import RunRecovery

AT_STEP = {"steps": 7, "seconds_train": 70.0}
BEFORE = {"steps": 6, "seconds_train": 60.0}


@pytest.fixture
def made(tmp_path):
    """Recoveries of a run with these settings."""
    return lambda *overrides: RunRecovery(configured(overrides), tmp_path)


def lose(recoveries, from_step=6, summary=AT_STEP, if_again=""):
    recoveries.begin(LostError("a worker died.\nits log", if_again), from_step, summary, 0.0)


def test_a_recovery_is_a_line_a_sentence_and_a_count(made, tmp_path):
    recoveries = made("checkpoint.every=2")
    assert recoveries.end(6, BEFORE, 2) == ""
    lose(recoveries)
    said = recoveries.end(6, BEFORE, 2)
    assert "the checkpoint of step 6 with 2 devices; 1 step is repeated" in said
    (row,) = [json.loads(line) for line in (tmp_path / "recoveries.jsonl").open()]
    assert (row["lost"], row["after_step"], row["from_step"]) == ("a worker died.", 7, 6)
    assert row["seconds_lost"] > 10
    lose(recoveries, 0)
    assert "from the beginning" in recoveries.end(0, {"steps": 0, "seconds_train": 0.0}, 1)
    summary = {}
    made().count(summary)  # of another process
    assert summary["recoveries"] == 2 and summary["seconds_lost"] > 80


def test_what_is_lost_again_meanwhile_is_a_line_of_its_own(made):
    recoveries, summary = made("checkpoint.every=2"), {}
    lose(recoveries)
    lose(recoveries)
    recoveries.end(6, BEFORE, 2)
    recoveries.count(summary)
    assert summary["recoveries"] == 2


def test_without_progress_it_ends(made):
    recoveries = made("checkpoint.every=2", "recover.max_restarts=2")
    for from_step in (6, 6, 8, 8):
        lose(recoveries, from_step)
        recoveries.end(from_step, BEFORE, 2)
    with pytest.raises(LostError, match=r"max_restarts=2.*2 times in a row"):
        lose(recoveries, 8)
    with pytest.raises(LostError, match="max_restarts=0"):
        lose(made("checkpoint.every=2", "recover.max_restarts=0"))


def test_without_checkpoints_it_says_what_they_are_good_for(made):
    with pytest.raises(LostError, match=r"(?s)a worker died.*checkpoint\.every="):
        lose(made())


def test_what_comes_twice_in_a_row_in_one_place_ends_it(made):
    recoveries = made("checkpoint.every=2", "recover.max_restarts=9")
    for where in ("It hung here.", "It hung there.", "", "It hung there."):
        lose(recoveries, if_again=where)
    lose(recoveries, 8, if_again="It hung there.")  # there was a new checkpoint
    with pytest.raises(LostError, match=r"(?s)a worker died.*It hung there\."):
        lose(recoveries, 8, if_again="It hung there.")


PROGRAM = """
import atexit, signal, sys, time
from hybridrl.config.schema import RecoveryConfig
from hybridrl.errors import PreemptionInterrupt
from hybridrl.run import signals
from hybridrl.run.signals import SignalHandler, exit_after_signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
if sys.argv[1] == "hangs":
    signals.CLOSE_TIMEOUT_S = 0.2
    atexit.register(time.sleep, 600)
try:
    with SignalHandler(RecoveryConfig(grace_s=0.4), 75) as interrupts:
        interrupts.on_terminate = lambda name: print("asked", flush=True)
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt as error:
    print("raised", type(error).__name__, error, flush=True)
    if sys.argv[1] == "goes on":
        sys.exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    exit_after_signal(75 if isinstance(error, PreemptionInterrupt) else 130)
"""


def interrupted(then, number, times=1):
    """What the program says to a signal, and its exit code."""
    run = subprocess.Popen([sys.executable, "-c", PROGRAM, then], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "ready\n"
    for _ in range(times):
        os.kill(run.pid, number)
        time.sleep(0.1)
    said, _ = run.communicate(timeout=300)
    return said, run.returncode


@pytest.mark.parametrize(("then", "code"), [("ends", 75), ("hangs", 75), ("goes on", 0)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_the_grace_ends_everything(then, code, number):
    said, found = interrupted(then, number)
    assert said == f"asked\nraised PreemptionInterrupt {number.name}\n" and found == code


@pytest.mark.parametrize(("then", "code"), [("ends", 130), ("hangs", 130), ("goes on", 0)])
def test_ctrl_c_raises_at_once_and_has_an_end(then, code):
    said, found = interrupted(then, signal.SIGINT)
    assert said == "raised KeyboardInterrupt Ctrl-C\n" and found == code


def test_the_second_signal_waits_for_nothing():
    said, found = interrupted("ends", signal.SIGTERM, times=2)
    assert said == "asked\nraised PreemptionInterrupt SIGTERM\n" and found == 75


CLOSING = """
import os, signal, time
from hybridrl.config.schema import RecoveryConfig
from hybridrl.run.signals import SignalHandler
with SignalHandler(RecoveryConfig(grace_s=2.0), 75) as interrupts:
    interrupts.on_terminate = lambda name: None
    os.kill(os.getpid(), signal.SIGTERM)
    interrupts.closing(0)
    signal.signal(signal.SIGTERM, lambda *_: print("again"))
    time.sleep(1.5)
"""


def test_who_is_closing_gets_no_second_signal():
    """It ends a program in which Ray, as it ends, removes the handler."""
    run = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_what_is_ignored_from_the_start_stays_so():
    script = "import signal; from hybridrl.run.signals import SignalHandler\n"
    script += "from hybridrl.config.schema import RecoveryConfig\n"
    ignored = "signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    script += f"with SignalHandler(RecoveryConfig()): print({ignored})"
    run = ["nohup", sys.executable, "-c", script]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "True\n"


def test_open_settings_are_chosen_again_for_fewer_devices_and_as_before_for_as_many(monkeypatch):
    """Else a job with `recover.min_devices` ends, where its new devices are no multiple of the
    shards that were chosen for the others, or have less room."""

    def resolve(config, known):
        return apply_changes(config, [("actor.parallel.shards", known)]), ["chosen"]

    monkeypatch.setattr(job_module, "resolve_settings", resolve)
    asked = configured(["recover.min_devices=2", "checkpoint.every=1"])
    first = apply_changes(asked, [("actor.parallel.shards", 8)])
    job = SimpleNamespace(_chosen=(asked, first, 16), config=first)
    for devices, shards in ((12, 12), (3, 3), (16, 8)):
        job.executor = SimpleNamespace(cluster=SimpleNamespace(devices=range(devices)))
        job._known = lambda devices=devices: devices
        job_module.Job._choose_again(job)
        assert job.config.actor.parallel.shards == shards


def test_a_placement_is_searched_with_the_settings_that_were_chosen_last(monkeypatch):
    def place(config, *_):
        searched.append(config.actor.parallel.shards)
        moved = apply_changes(config, [("actor.parallel.shards", 1)])
        return PlacedRoles(moved, placement=None, plan=None, plan_notice="")

    searched = []
    monkeypatch.setattr(job_module, "place_roles", place)
    asked = configured(["placement=auto"])
    job = SimpleNamespace(_as_asked=None, _make_feed=lambda: None, _known=lambda: None)
    job._usual_lengths = job.executor = job.directory = None
    for shards in (8, 3):
        job.config = apply_changes(asked, [("actor.parallel.shards", shards)])
        job_module.Job._place(job, print)
    assert searched == [8, 3]
    assert job._as_asked.actor.parallel.shards == 8  # what a resume is to find
