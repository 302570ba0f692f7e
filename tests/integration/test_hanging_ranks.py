"""Whoever keeps the others waiting is named: frozen, in endless code of a user's, in a deadlock."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch

from hybridrl.controller import ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.errors import CallTimeoutError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
RANKS, MISSING, LIMIT = 3, 1, 8.0


class Peers(Worker):
    """Ranks that meet in collectives, of which one goes astray."""

    def __init__(self, context, **keywords):
        from hybridrl.parallel.process_group import join

        super().__init__(context)
        join(context)

    @transfer(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @transfer(ONE_TO_ALL)
    def meet(self, way: str) -> None:
        with self.phase("train"):
            for _ in range(3):
                self._reduce()
            if self.context.rank == MISSING:
                getattr(self, way)()
            if way == "messages" and self.context.rank == MISSING + 1:
                torch.distributed.recv(torch.zeros(1), MISSING)
            self._reduce()

    def _reduce(self):
        torch.distributed.all_reduce(torch.ones(2))

    def frozen(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def endless(self):
        while True:
            time.sleep(0.01)

    messages = endless

    def deadlock(self):
        lock = threading.Lock()
        with lock, lock:
            pass

    def left(self):
        """Another operation than the others'."""
        self._reduce = lambda: None


@pytest.fixture
def meet(ray, tmp_path):
    """Has ranks meet in a way; the error, their processes, and what the driver was told before."""
    from hybridrl.ray_backend.executor import RayExecutor

    said: list[str] = []

    def meet(way):
        with pytest.raises(CallTimeoutError) as caught, RayExecutor(
            *("cpu", RANKS), cpus_per_host=0.5, timeout_s=LIMIT, heartbeat_s=2.0,
            run_directory=tmp_path, preload=["hybridrl.parallel.process_group"],
        ) as executor:  # fmt: skip
            (tmp_path / "logs").mkdir()
            executor.notify = said.append
            peers = WorkerGroup(executor, "peers", Peers, range(RANKS)).ready()
            pids = peers.process().get()
            peers.meet(way).get()
        return str(caught.value), pids, said

    return meet


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("way", "does", "waiting"),
    [
        ("frozen", "does not answer: it was stopped", "ranks 0 2 wait for it in all_reduce"),
        ("deadlock", r"is in \S+_ranks\.py:\d+ in deadlock", "ranks 0 2 wait for it in all"),
        long("endless", r"is in \S+_ranks\.py:\d+ in endless", "0 2 wait for it in all_reduce"),
        long("messages", r"is in \S+_ranks\.py:\d+ in endless", "rank 2 waits for it in a message"),
        long("left", "has no call in hand", "ranks 0 2 wait for it in all_reduce"),
    ],
)
def test_the_missing_rank_is_named(meet, tmp_path, way, does, waiting):
    text, pids, said = meet(way)
    who = rf"The rank that is missing: peers rank 1 \(process {pids[MISSING]} on [\d.]+\), which "
    assert re.search(who + does, text), text
    assert waiting in text and ", phase train" in text
    stacks = (tmp_path / "stacks-000001.txt").read_text()
    assert "in all_reduce" in stacks and "stacks-000001.txt" in text
    assert len(said) == (way == "frozen"), said
