"""Faults that tests plan happen in the call that they name, and in no other."""

import subprocess
import sys

import pytest

from hybridrl.batch.call_record import CallRecord
from hybridrl.controller import ONE_TO_ALL, transfer
from hybridrl.controller.fault_injection import FaultInjector
from hybridrl.errors import ConfigError


def meets(faults, role, method, rank=0):
    try:
        faults.meet(CallRecord(role, rank, method))
    except RuntimeError:
        return True
    return False


def test_a_fault_is_of_one_call_of_one_rank():
    faults = FaultInjector("actor.update@1:2:raise; reward.score:1:raise")
    calls = [("actor", "update", 1), ("actor", "other", 1), ("critic", "update", 1)]
    assert not any(meets(faults, *call) for call in calls)
    assert meets(faults, "actor", "update", 1)
    assert not meets(faults, "actor", "update", 1)
    assert meets(faults, "reward", "score", 3)
    other = FaultInjector("actor.update@1:1:raise")
    assert not meets(other, "actor", "update", 0)
    assert not meets(FaultInjector(""), "actor", "update")


@pytest.mark.parametrize("text", ["actor", "a.b:x:kill", "a.b:1:explode", "a.b@r:1:kill"])
def test_what_cannot_be_read_is_a_sentence(text):
    with pytest.raises(ConfigError, match=r"HYBRIDRL_FAULT=.*kinds are kill, stop, raise, enospc"):
        FaultInjector(text)


class Actor:
    @transfer(ONE_TO_ALL)
    def update(self) -> None:
        raise NotImplementedError

    def inner(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actr.update:1:kill", "no role `actr`; the job's workers are actor. Did you mean `actor`"),
        ("actor.updat:1:kill", "no call of `actor`; there are __init__, update. Did you mean `upd"),
        ("actor.inner:1:kill", "plans a fault in actor.inner, which is no call"),
        ("actor.update@2:1:kill", "on rank 2, and `actor` has the ranks 0 to 1 here"),
    ],
)
def test_what_no_call_would_meet_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        FaultInjector(text).check({"actor": (Actor, 2)})
    FaultInjector("actor.update@1:1:kill; actor.__init__:1:raise").check({"actor": (Actor, 2)})


@pytest.mark.more
def test_a_full_disk_takes_no_new_file(tmp_path):
    script = (
        "import sys; from hybridrl.controller.fault_injection import FAULT_ACTIONS\n"
        "FAULT_ACTIONS['enospc']()\n"
        "open(sys.argv[1]).read()\n"
        "try: open(sys.argv[1], 'a')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    (tmp_path / "file").touch()
    run = [sys.executable, "-c", script, str(tmp_path / "file")]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert said == "No space left on device\n"
