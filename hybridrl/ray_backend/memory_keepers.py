"""Keepers of checkpoints: a process on each node of a job that has copies in its memory. The driver
starts them, and they outlive the hosts: a job that has lost some goes on from what is there."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec
import numpy as np

from hybridrl.checkpoint.copies.memory_files import URL_SCHEME, KeeperFileSystem, MemoryKeeper
from hybridrl.ray_backend.ray_import import ignore_interrupts, ray

KEEPER_TIMEOUT_SECONDS = 30.0
"""The time limit for an answer of a keeper, whose calls take milliseconds."""


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RayMemoryKeeper(MemoryKeeper):
    """A `MemoryKeeper` in a process of its own."""

    def __init__(self) -> None:
        ignore_interrupts()
        super().__init__()


class MemoryKeepers:
    """The memory keepers of one job, one on each node.

    Args:
        others: On so many nodes besides its own is what a process writes.

    Attributes:
        url: Of the folder of their files, for every process of the job.
    """

    def __init__(self, others: int) -> None:
        self._job = f"{others + 1}-{uuid.uuid4().hex[:12]}"
        self._actors: dict[str, Any] = {}
        self.url = f"{URL_SCHEME}://{self._job}"

    def start(self, nodes: Iterable[str]) -> None:
        """Start a keeper on each of these nodes, again where one was lost, without waiting for
        them."""
        there = ray.util.list_named_actors()
        for node in sorted(set(nodes)):
            if not any(name.startswith(f"{self._job}/{node}/") for name in there):
                name = f"{self._job}/{node}/{len(self._actors)}"  # of a lost one it is not free
                pin = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, False)
                actor: Any = RayMemoryKeeper
                made = actor.options(name=name, scheduling_strategy=pin)
                self._actors[name] = made.remote()  # which ends with its handle

    def close(self) -> None:
        """End all keepers."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


class RayKeeperFileSystem(KeeperFileSystem):
    """The file system of a job's memory keepers, which are found by their actor names."""

    def keepers(self, job: str) -> list[Any]:
        names = sorted(n for n in ray.util.list_named_actors() if n.startswith(f"{job}/"))
        here = f"{job}/{ray.get_runtime_context().get_node_id()}/"
        found = []
        for name in [*(n for n in names if n >= here), *(n for n in names if n < here)]:
            with contextlib.suppress(ValueError):  # it has just ended
                found.append(ray.get_actor(name))
        return found

    def ask(self, keepers: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        # In the object store an array is sent to several at once, and read where it lies.
        stored = [ray.put(a) if isinstance(a, np.ndarray) else a for a in arguments]
        asked = [getattr(keeper, method).remote(*stored) for keeper in keepers]
        until, answers = time.monotonic() + KEEPER_TIMEOUT_SECONDS, list[Any]()
        for answer in asked:
            try:
                answers.append(ray.get(answer, timeout=max(0.0, until - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                limit = f"within {KEEPER_TIMEOUT_SECONDS:g} s"
                said = f"a process that keeps copies did not answer {limit}"
                answers.append(OSError(said))
            except ray.exceptions.RayError as error:
                why = str(error).partition("\n")[0]
                answers.append(OSError(f"a process that keeps copies is lost: {why}"))
        return answers


fsspec.register_implementation(URL_SCHEME, RayKeeperFileSystem, clobber=True)
