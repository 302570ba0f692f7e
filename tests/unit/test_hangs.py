"""Who is named when calls do not end."""

import threading
import time

import pytest

from hybridrl.controller.failures import HostIdentity, HostRegistry
from hybridrl.controller.group_call import GroupCall
from hybridrl.controller.hang_report import HangReport
from hybridrl.controller.host_health import HostSnapshot, HostStatus, capture_snapshot
from hybridrl.system import collective_waits as waits
from hybridrl.system.collective_waits import CollectiveWait

RANKS = (0, 1, 2)
HOSTS = HostRegistry(
    [HostIdentity("10.0.0.1", 100 + host) for host in RANKS],
    {host: {"actor": host} for host in RANKS},
    None,
)
CALL = GroupCall(7, "actor", "update_actor", RANKS, [None] * 3, step=4)
WORKS = HostStatus("actor", 0, "update_actor", 60.0, phase="train")
REDUCES = CollectiveWait("all_reduce", 55.0, "g", 17, RANKS)
IN_COLLECTIVE = HostSnapshot(WORKS, "torch:1 in wait", True, REDUCES, {"g": 17}, "stack of waiting")
BEHIND = {"g": 16, "h": 5}
IN_USERS_CODE = HostSnapshot(WORKS, "/home/me/reward.py:3 in score", False, None, BEHIND)
GETS_INPUTS = HostSnapshot(
    HostStatus("actor", 1, "update_actor", 5.0, True), "x", False, None, BEHIND
)
IDLE = HostSnapshot(HostStatus(), "", False, None, BEHIND)
RECEIVES = HostSnapshot(
    WORKS, "pipeline.py:7 in _wait", True, CollectiveWait("a message", 55.0), {"g": 9}
)


def hang(snapshots, late=RANKS, done=(), hosts=HOSTS):
    pending = {host: (CALL, host) for host in RANKS if host not in done}
    return HangReport(pending, list(late), 50.0, snapshots, hosts)


@pytest.mark.parametrize(
    ("rank_1", "late", "done", "said"),
    [
        (None, (0, 2), (), "which does not answer: it was stopped"),
        (IN_USERS_CODE, RANKS, (), "which is in /home/me/reward.py:3 in score, phase train"),
        (IN_USERS_CODE, (0, 2), (), "which is in /home/me/reward.py:3 in score, phase train"),
        (GETS_INPUTS, (0, 2), (), "which waits for the inputs of actor.update_actor"),
        (IDLE, (0, 2), (1,), "which has no call in hand: it has left this one"),
    ],
    ids=["frozen", "in user code", "in user code, for less long", "no inputs", "left"],
)
def test_the_rank_that_has_not_entered_is_named(rank_1, late, done, said):
    found = hang([IN_COLLECTIVE, rank_1, IN_COLLECTIVE], late, done)
    assert found.missing() == [1]
    text = str(found.error())
    assert "did not finish within 50 s (controller.timeout_s)" in text
    assert f"The rank that is missing: actor rank 1 (process 101 on 10.0.0.1), {said}" in text
    waiting = "actor ranks 0 2 wait for it in all_reduce (number 17 among ranks 0 1 2), phase train"
    assert f"{waiting}, for 55 s." in text
    assert "--- host 2" in text and "stack of waiting" in text


def test_with_messages_between_ranks_it_is_the_one_that_does_something_else():
    found = hang([RECEIVES, IN_USERS_CODE, RECEIVES], late=[0])
    assert found.missing() == [1]
    assert "a message (pipeline.py:7 in _wait), phase train, for 55 s" in str(found.error())


def test_all_that_hang_by_themselves_are_named():
    found = hang([IN_USERS_CODE, IN_USERS_CODE, IN_COLLECTIVE])
    assert found.missing() == [0, 1]
    assert "The ranks that are missing: actor rank 0 (" in str(found.error())


def test_of_ranks_that_wait_for_their_gpus_it_is_the_one_that_has_queued_less():
    def on_gpu(number):
        return HostSnapshot(
            WORKS, "train.py:9 in _step", False, None, {"nccl:g": number, "gloo:g": 1}
        )

    assert hang([on_gpu(40), on_gpu(39), on_gpu(40)]).missing() == [1]
    assert hang([on_gpu(40)] * 3).missing() == [0, 1, 2]


def test_when_all_are_in_one_operation_it_is_the_network():
    found = hang([IN_COLLECTIVE] * 3)
    assert found.missing() == []
    assert "wait in all_reduce" in str(found.error())
    assert "look at the network between their nodes" in str(found.error())


def test_ranks_in_different_operations_are_all_told():
    other = HostSnapshot(
        WORKS, "x", True, CollectiveWait("broadcast", 55.0, "h", 5, (1, 2)), BEHIND
    )
    found = hang([IN_COLLECTIVE, other, IN_COLLECTIVE])
    assert found.missing() == [1]
    assert "which waits for other ranks itself, in broadcast (number 5" in str(found.error())


def test_a_hang_is_the_same_again_if_the_same_ranks_are_missing_in_the_same_call():
    found = [
        hang([IN_COLLECTIVE, rank_1, IN_COLLECTIVE]).error() for rank_1 in (None, IN_USERS_CODE)
    ]
    assert found[0].if_again == found[1].if_again
    assert "update_actor on rank 1 hung the time before, too" in found[0].if_again
    other = hang([IN_COLLECTIVE, IN_COLLECTIVE, None]).error()
    assert other.if_again != found[0].if_again


def test_a_silent_host_without_a_call_is_named_when_the_others_wait_for_its_data():
    waits = HostSnapshot(HostStatus("actor", 0, "update_actor", 0.0, waiting=True))
    found = hang([waits, None, waits], late=[0, 2], done=[1])
    assert found.missing() == [1]
    assert "actor rank 1 (process 101 on 10.0.0.1), which does not answer" in str(found.error())


def test_the_stacks_are_in_a_file_of_the_run(tmp_path):
    hosts = HostRegistry(HOSTS.identities, HOSTS.roles, tmp_path)
    text = str(hang([IN_COLLECTIVE, None, IN_COLLECTIVE], hosts=hosts).error())
    assert text.endswith(f"The stacks of every host are in {tmp_path / 'stacks-000005.txt'}.")
    written = (tmp_path / "stacks-000005.txt").read_text()
    assert "stack of waiting" in written and "did not answer" in written


def test_a_snapshot_says_where_the_user_code_is():
    entered, leave = threading.Event(), threading.Event()

    def of_user():
        entered.set()
        leave.wait()  # in a file of Python's own

    thread = threading.Thread(target=of_user)
    thread.start()
    entered.wait()
    try:
        found = capture_snapshot(HostStatus("actor", 0, "call"), thread.ident)
    finally:
        leave.set()
        thread.join()
    assert __file__ in found.place and found.place.endswith("in of_user")
    assert not found.communicates and "in of_user" in found.stacks


def test_waits_are_timed(monkeypatch):
    class Work:
        def wait(self, timeout=None):
            return threading.Event().wait(timeout)

    monkeypatch.setattr(waits.distributed_c10d, "Work", Work)
    for _ in range(2):
        waits.start_timing_waits()
    before, began = waits.read_wait_seconds(), time.perf_counter()
    Work().wait(0.02)
    # Counted once, though it was asked for twice: no more than has passed.
    assert 0.02 <= waits.read_wait_seconds() - before <= time.perf_counter() - began


def test_what_a_thread_waits_in_is_known(process_group):
    import torch
    import torch.distributed as dist

    waits.start_timing_waits()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen = []

    class Slow(torch._C._distributed_c10d.Work):
        """Stands for the operation that has begun last."""

        def __init__(self, kind):
            super().__init__()
            self._get_op_type = lambda: kind

    dist.all_reduce(torch.ones(2))
    group = dist.group.WORLD.group_name
    for kind in (1, 13):
        waits._waiting[0] = Slow(kind), time.perf_counter()
        seen.append(waits.find_current_wait(threading.get_ident()))
        waits._waiting[threading.get_ident()] = waits._waiting.pop(0)
        seen.append(waits.find_current_wait(threading.get_ident()))
        del waits._waiting[threading.get_ident()]
    operation, message = seen[1], seen[3]
    assert seen[0] is None and seen[2] is None
    assert (operation.operation, operation.number, operation.ranks) == ("all_reduce", 1, (0,))
    assert operation.group == f"gloo:{group}" and waits.count_started_operations() == {
        f"gloo:{group}": 1
    }
    assert (message.operation, message.group) == ("a message from another rank", "")
