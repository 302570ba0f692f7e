"""The supervisor process of a sandboxed program as the caller sees it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from confined.supervisor import main; "
    "sys.path.remove(sys.argv[1]); main(*map(int, sys.argv[2:]))"
)
# Nothing of the caller's. Numerical libraries otherwise start a thread per core, and the C library
# reserves address space for every thread.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_SUPERVISOR_OVERHEAD_S = 30.0  # what the supervisor may need beside the program
_PIECE = 1 << 16


class SandboxSupervisor:
    """A supervisor process, and the output of it and of the program so far.

    Args:
        job: the message to the supervisor, and the one that it leaves to the judge.
        wall_s: seconds that the program may take.
        output_limit: bytes that it may write to each of its outputs.
        memory_entrance: the entrance of a `MemoryCgroup` for it.

    Attributes:
        stdout, stderr: of the program, up to the limit.
        report: of the supervisor, as it sends it; empty if it died.
        is_over: whether the program wrote more than the limit.
    """

    def __init__(
        self, job: Sequence[bytes], wall_s: float, output_limit: int, memory_entrance: int | None
    ) -> None:
        self.stdout, self.stderr, self.report = bytearray(), bytearray(), bytearray()
        self.is_over = False
        self._limit = output_limit
        self._deadline = time.monotonic() + wall_s + _SUPERVISOR_OVERHEAD_S
        self._report, report_to = os.pipe()
        try:
            with os.fdopen(os.memfd_create("job"), "wb") as message:
                message.writelines(len(part).to_bytes(8, "little") + part for part in job)
                message.seek(0)
                kept = [report_to, message.fileno()]
                kept += [] if memory_entrance is None else [memory_entrance]
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-E", "-X", "utf8", "-c", _BOOTSTRAP),
                        *(str(Path(__file__).parent), *map(str, kept)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=kept,
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C in the terminal is the caller's to judge
                )
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(report_to)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        # As long as its input is open, the supervisor knows that somebody waits.
        self._control = self._process.stdin
        self._sinks = {
            self._process.stdout.fileno(): self.stdout,
            self._process.stderr.fileno(): self.stderr,
            self._report: self.report,
        }

    def finish(self) -> None:
        """Read until the other side has closed every pipe."""
        poll, waiting = select.poll(), len(self._sinks)
        for descriptor in self._sinks:
            poll.register(descriptor, select.POLLIN)
        while waiting:
            rest = self._deadline - time.monotonic()
            if rest <= 0:
                self._process.kill()  # and with it the program
            for descriptor, _ in poll.poll(max(rest, 1.0) * 1000):
                if not self._receive(descriptor):
                    poll.unregister(descriptor)
                    waiting -= 1
            if self.is_over:
                self._control.close()

    def close(self) -> None:
        """End the program if it still runs, and wait for the supervisor."""
        self._control.close()
        try:
            self._process.wait(_SUPERVISOR_OVERHEAD_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        os.close(self._report)

    def _receive(self, descriptor: int) -> bool:
        """Read a piece of output; return False at its end."""
        piece = os.read(descriptor, _PIECE)
        sink = self._sinks[descriptor]
        sink += piece
        if len(sink) > self._limit and sink is not self.report:
            self.is_over = True
            del sink[self._limit :]
        return bool(piece)
