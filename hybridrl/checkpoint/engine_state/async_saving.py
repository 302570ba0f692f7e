"""Save beside training: copy what is to be written to host memory, and write it on a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.file_plan import FilePart
from hybridrl.checkpoint.tensors.rank_manifest import SaveResult
from hybridrl.checkpoint.tensors.tensor_reader import TensorInFiles
from hybridrl.checkpoint.tensors.tensor_writer import slice_part
from hybridrl.layout.boxes import box_shape
from hybridrl.system.device_traits import allocate_host_memory, record_event

_THREAD_NICENESS = 10
"""Of the thread, on Linux: work in the foreground comes first where cores are scarce."""


class BackgroundTask:
    """A save on a thread of its own; the next one begins when the one before is done."""

    def __init__(self) -> None:
        self._last: Future[SaveResult] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self, work: Callable[[Callable[[], bool]], SaveResult]) -> None:
        """Start a task after the one before is done; raises as `wait` does.

        Args:
            work: Called on the thread, with a function that says whether it is to give up.
        """
        self.settle()
        self._last = last = Future[SaveResult]()

        def run() -> None:
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICENESS)
            try:
                last.set_result(work(self._stopped.is_set))
            except BaseException as error:
                last.set_exception(error)

        # It ends with the process: a rank that is to die does not write on.
        self._thread = threading.Thread(target=run, name="background", daemon=True)
        self._thread.start()

    def result(self, wait: bool) -> SaveResult | None:
        """Return what the last task returned; None if none was started, or if it still runs and is
        not to be waited for.

        Raises:
            Exception: what it raised.
        """
        if self._last is None or not (wait or self._last.done()):
            return None
        return self._last.result()

    def settle(self) -> None:
        """Wait for the last task and forget it.

        Raises:
            Exception: what it raised.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Ask the task to stop, and wait until it has."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()


class StagingBuffer:
    """A buffer in host memory for the values of these parts, one after the other, reused for every
    checkpoint.

    Attributes:
        values: Of each part, of the shape of its box and in the precision of its file.
    """

    def __init__(self, parts: Sequence[FilePart], device: torch.device) -> None:
        self._parts, self._device = parts, device
        self.values: list[Tensor] = []
        memory = allocate_host_memory(sum(part.size for part in parts), device)
        at = 0
        for part in parts:
            flat = memory[at : at + part.size].view(part.entry.dtype)
            self.values.append(flat.view(box_shape(part.box)))
            at += part.size

    @torch.no_grad()
    def fill(self, sources: Mapping[str, Tensor | TensorInFiles | None]) -> Callable[[], None]:
        """Copy the current values of local tensors into the buffer, zeros where there is none;
        return a function that waits for the copies.

        From GPUs the copies are under way when this returns: the device does them before anything
        that it is given to do later, and the function that this gives waits for them. They go on
        the stream of training on purpose: what changes the originals next, the optimizer's step or
        a move to the host, is behind them in any case. On a stream of their own they would run
        beside the next forward only if each of these waited for them, one forgotten wait would
        write a state of two moments, and what is won is at most the time of the copies.
        """
        for part, into in zip(self._parts, self.values, strict=True):
            source = sources[part.source.tensor]
            if source is None:
                into.zero_()
            else:
                into.copy_(slice_part(part, source), non_blocking=True)
        return record_event(self._device)
