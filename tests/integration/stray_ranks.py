"""Ranks that meet in collectives, of which one goes astray: for tests, and for a benchmark."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from hybridrl.controller import ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.controller.executor import Executor
from hybridrl.errors import CallTimeoutError

PRELOAD = ["hybridrl.parallel.process_group"]


class Peers(Worker):
    """Ranks that meet."""

    def __init__(self, context: Any, **keywords: Any) -> None:
        from hybridrl.parallel.process_group import join_group_world

        super().__init__(context)
        join_group_world(context)

    @transfer(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @transfer(ONE_TO_ALL)
    def meet(self, way: str, missing: int) -> None:
        with self.phase("train"):
            for _ in range(3):
                self._reduce()
            if self.context.rank == missing:
                getattr(self, way)()
            if way == "messages" and self.context.rank == missing + 1:
                torch.distributed.recv(torch.zeros(1), missing)
            self._reduce()

    def _reduce(self) -> None:
        torch.distributed.all_reduce(torch.ones(2))

    def frozen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60.0)  # another thread may take the signal, and stop this one a little later

    def endless(self) -> None:
        while True:
            time.sleep(0.01)

    messages = endless

    def deadlock(self) -> None:
        lock = threading.Lock()
        with lock, lock:
            pass

    def left(self) -> None:
        """Another operation than the others'."""
        self._reduce = lambda: None


def go_astray(executor: Executor, ranks: int, way: str, missing: int) -> tuple[str, str, float]:
    """Has so many ranks meet, of which one does not come.

    Returns:
        The error, the words that would name the missing rank, and the seconds until it was raised.
    """
    begin = time.monotonic()
    try:
        with executor:
            peers = WorkerGroup(executor, "peers", Peers, range(ranks)).ready()
            pid = peers.process().get()[missing]
            begin = time.monotonic()
            peers.meet(way, missing).get()
    except CallTimeoutError as error:
        named = f"The rank that is missing: peers rank {missing} (process {pid} on "
        return str(error), named, time.monotonic() - begin
    raise AssertionError("Nobody was missing.")
