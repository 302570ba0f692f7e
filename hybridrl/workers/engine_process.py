"""A generation engine in a process of its own, beside that of the worker that asks it.

vLLM supposes that a process has one engine: tables of positions, workspaces and communicators are
variables of its modules. Of two engines in a process the second uses memory of the first, which on
a GPU is not there while the first one sleeps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.errors import HybridRLError
from hybridrl.parallel.process_group import join_group_world
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup, RolloutEngine
from hybridrl.system.redaction import redact_output
from hybridrl.workers.rollout_engines import build_inference_engine

CLOSE_SECONDS = 10.0
"""The time limit for an engine to close before its process is killed."""


class EngineProcess:
    """An engine in a child process, which ends when this process does.

    Args:
        context: The worker's. The engine has the same device, in a world of its own.
        setup, config: As for `build_inference_engine`.

    Raises:
        ConfigError: if the engine does not start.
        HybridRLError: if the process ends, here and in later calls.
    """

    def __init__(self, context: WorkerContext, setup: EngineSetup, config: RolloutConfig) -> None:
        self._role = context.role
        self._connection, theirs = multiprocessing.Pipe()
        # Not by multiprocessing, which would run a user's program again, and not by a fork, after
        # which CUDA cannot be used.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self._call(replace(context, rank=0, world_size=1, rendezvous=None), setup, config)

    def generate(self, batch: Batch, sampling: SamplingSettings, seed: int) -> Batch:
        """Generate a response to each row; see `RolloutEngine.generate`."""
        responses: Batch = self._call(batch, sampling, seed)
        return responses

    def close(self) -> None:
        """Close the engine and end its process."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.send(None)
        self._wait()

    def _wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        try:
            return self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _call(self, *request: Any) -> Any:
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise HybridRLError(
                f"The process of the engine of `{self._role}` ended (exit code {self._wait()}). "
                "The log of this rank says why, unless it was killed because memory ran out."
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(connection: Connection) -> None:
    """Build an engine from the first request and answer the others with it, until one is None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    redact_output()
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    engine: RolloutEngine | None = None
    while (request := requests.get()) is not None:
        answer: Any = None
        try:
            if engine is not None:
                answer = engine.generate(*request)
            else:
                context, setup, config = request
                join_group_world(context)
                engine = build_inference_engine(setup, config)
        except Exception as error:
            traceback.print_exc()  # to the log of the rank; it does not travel
            answer = make_picklable(error)
        connection.send(answer)
    if engine is not None:
        engine.close()


def make_picklable(error: Exception) -> Exception:
    """Return the error; one that cannot be pickled and unpickled as a `HybridRLError` with its
    words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return HybridRLError(f"{type(error).__name__}: {error}")
    return error


def _receive(connection: Connection, requests: SimpleQueue[Any]) -> None:
    """Queue requests, the last of which is None. Without it the process that asks is gone, and this
    one ends at once, because its memory may be wanted."""
    request: Any = ()
    while request is not None:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        requests.put(request)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
