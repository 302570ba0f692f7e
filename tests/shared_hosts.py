"""Host processes that many tests use, one after another: they import torch and vLLM once.

A job on them is a job like any other, but that the processes stay when it ends.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import psutil

from hybridrl.config.schema import Config
from hybridrl.controller import Worker, WorkerGroup
from hybridrl.controller.executor import Executor
from hybridrl.job.job import Job
from hybridrl.ray_backend.call_transport import DirectTransport
from hybridrl.ray_backend.ray_executor import RayExecutor
from hybridrl.ray_backend.ray_import import ray
from hybridrl.system.cluster_spec import DEFAULT_CPU_SLOTS, ClusterSpec

NUMBER = 4
PRELOAD = ["hybridrl.workers.actor_worker", "hybridrl.rollout.vllm_engine"]
CLOSE_SECONDS = 60.0

_pids: set[int] = set()


def stays(process: psutil.Process) -> bool:
    """Whether a process is a shared host, or the one that Python starts with its first segment of
    shared memory."""
    if process.pid in _pids:
        return True
    return process.ppid() in _pids and "multiprocessing.resource_tracker" in str(process.cmdline())


class Sweeper(Worker):
    """Removes, as it is built, what a job leaves in a process that otherwise would end with it."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        import torch.distributed as dist
        from torch.distributed.tensor import _redistribute, debug

        from hybridrl.parallel import process_group

        if dist.is_initialized():
            dist.destroy_process_group()  # of all worlds
        process_group._worlds.clear()
        process_group._current = ""
        # A mesh of the same ranks is taken for the mesh of the job before, and its groups are gone.
        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        gc.collect()


class SharedHosts:
    """Hosts of this machine, lent to one job at a time; others, after one that has failed."""

    def __init__(self) -> None:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # hosts cannot import it
        self._start()

    def lend(self, number: int) -> RayExecutor:
        """The first hosts, as an executor that has made no call yet; to close it ends its workers
        and nothing else."""
        if not self._executor.takes_calls:
            self.close()
            self._start()
        Executor.__init__(self._executor)
        self._executor._transport = DirectTransport(self._executor._hosts)
        self._executor.cluster = ClusterSpec(self._devices[:number])
        return self._executor

    def job(self, config: Config, *arguments: Any, **options: Any) -> Job:
        """`Job(config)` on these hosts. To them the paths of its settings have to be absolute."""

        def start(job: Job) -> RayExecutor:
            executor = self.lend(config.num_devices or DEFAULT_CPU_SLOTS)
            executor.run_directory = job.directory.path.absolute()
            return executor

        return type("Job", (Job,), {"_make_executor": start})(config, *arguments, **options)

    def _start(self) -> None:
        self._executor = RayExecutor("cpu", NUMBER, timeout_s=200, preload=PRELOAD)
        self._devices = self._executor.cluster.devices
        self.close = self._executor.close
        self._executor.close = self._take_back
        _pids.update(identity.pid for identity in self._executor._identities)

    def _take_back(self) -> None:
        if not self._executor.takes_calls:
            return
        everyone = list(range(NUMBER))
        closing = [host.close.remote() for host in self._executor._hosts]
        ray.get(closing, timeout=CLOSE_SECONDS)
        self._executor._transport = DirectTransport(self._executor._hosts)
        Executor.__init__(self._executor)
        self._executor.run_directory = None
        self._executor.cluster = ClusterSpec(self._devices)
        WorkerGroup(self._executor, "sweeper", Sweeper, everyone).ready()
