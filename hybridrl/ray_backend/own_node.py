"""The node that Ray starts with a driver, for a job of one machine: what becomes of its processes.

The kernel ends most of them with the driver. The agents outlive one that is killed by a minute if
nobody ends them: they see that their node has gone and want to tell the head of the cluster, which
has gone, too. And a driver that closes waits for ever for a process that was stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import threading
from collections.abc import Iterator

import psutil

CONTROL, RAYLET = "gcs_server", "raylet"
"""The names of Ray's two processes of a node that everything else depends on."""
ROLES = {
    CONTROL: "the process that knows where everything is",
    RAYLET: "the process that starts workers and keeps what they return",
}
MARK = "HYBRIDRL_NODE"
"""A variable in the environment of all processes that come of a driver; others have another."""
_AGENT = "gent"
"""What is in the command of an agent, whose first letter may be a capital, and of no worker."""
_WATCH = (
    "trap '' INT TERM HUP; while read -r key line; do export \"$key=$line\"; done; "
    'if [ "$words" ] && '
    'grep -qsie "terminate the process" -e "local raylet is dead" "$session"/logs/*driver*.log; '
    "then printf '\\nerror: %s\\n' \"$words\" >&2; session=; fi; "
    'for process in $(grep -ls "$1" /proc/[0-9]*/environ); do '
    f'grep -aqs {_AGENT} "${{process%environ}}cmdline" || continue; '
    'process=${process%/environ}; kill -9 "${process#/proc/}"; done; '
    'case "$session" in */session_*) rm -rf "$session";; esac'
)
"""Waits for the end of the driver; then it ends the agents, and removes the folder of Ray's session
if it was told one. A driver that misses its raylet in the middle of a call is ended by Ray at once
and can say nothing: then this says its words."""

CURES = {
    "AF_UNIX path": "Give Ray a folder with a short path: RAY_TMPDIR=/tmp.",
    "No space left|Disk quota": "Free space in {folder} and in /dev/shm, or name another folder "
    "with a short path: RAY_TMPDIR=<folder>.",
    "Permission denied|Read-only file": "Ray has to write to {folder}. Name another folder with a "
    "short path: RAY_TMPDIR=<folder>.",
    "/dev/shm|shared memory|object store memory|Cannot allocate": "Ray keeps its objects in "
    "/dev/shm. Give that more space: docker run --shm-size=8g; in Kubernetes an emptyDir with "
    "medium Memory, mounted there.",
    "Address already in use|EADDRINUSE": "Another process took a port that Ray had chosen. Start "
    "the job again.",
}
"""What helps where Ray could not be started, by words of its message. What none of these causes, a
second attempt may mend."""


def cure_of(error: Exception, folder: str) -> str:
    """Return what to do about an error of Ray's start, as sentences; empty if the message does not
    name a known cause.

    Args:
        folder: Where Ray has its files.
    """
    for words, cure in CURES.items():
        if re.search(words, str(error), re.IGNORECASE):
            return cure.format(folder=folder)
    return ""


class OwnNode:
    """The processes that Ray starts with this one.

    Attributes:
        logs: Ray's own.
    """

    def __init__(self) -> None:
        """To be made before Ray starts, so that what it has started by then ends with a driver that
        is killed meanwhile."""
        self.logs = ""
        self._parts: dict[str, psutil.Process] = {}
        mark = os.environ[MARK] = secrets.token_hex(8)
        os.environ["SPT_NOENV"] = "1"  # else the titles that agents give themselves cost them it
        self._watching = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", f"{MARK}={mark}"],
            stdin=subprocess.PIPE,  # at its end there is no driver any more
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},  # or it would find itself
            cwd="/",
        )

    def started(self, session: str) -> None:
        """Ray has started, and has its files there, which go when it ends."""
        self.logs = f"{session}/logs"
        self._tell("session", session)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if child.name() in ROLES:
                    self._parts[child.name()] = child
        if RAYLET in self._parts:
            self._tell(
                "words",
                f"{self._ended(RAYLET)} Ray has ended the driver with it. Where there is a "
                "checkpoint, resume=<run folder> goes on from it.",
            )

    def fault(self) -> str:
        """What of Ray has ended, as a sentence; empty if nothing has."""
        for name, process in self._parts.items():
            if not _is(process, alive=True):
                self.keep_logs()
                return self._ended(name)
        return ""

    def keep_logs(self) -> None:
        """Ray's files stay, for people to look at."""
        self._tell("session", "")

    def stopped(self) -> str:
        """Which of Ray's processes is stopped, for the middle of a sentence; empty if none is."""
        for name, process in self._parts.items():
            if _is(process, psutil.STATUS_STOPPED):
                return f"Ray's {name} ({ROLES[name]}; process {process.pid}) is stopped"
        return ""

    @contextlib.contextmanager
    def ending(self, seconds: float) -> Iterator[None]:
        """While Ray ends itself: what of it is there after so many seconds is killed."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.kill()

    def kill(self) -> None:
        """Ends all of it; the workers see that their node has gone, and end."""
        self._tell("words", "")
        for process in self._parts.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with self._watching:  # which ends the agents
            assert self._watching.stdin is not None
            self._watching.stdin.close()

    def _ended(self, name: str) -> str:
        return (
            f"Ray's {name} ({ROLES[name]}; process {self._parts[name].pid}) ended: it was killed "
            "from outside (kill -9, the kernel's out-of-memory killer) or crashed. Its own log is "
            f"in {self.logs}."
        )

    def _tell(self, key: str, line: str) -> None:
        """Gives the one that watches a variable."""
        assert self._watching.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._watching.stdin.write(f"{key} {line}\n".encode())
            self._watching.stdin.flush()


def _is(process: psutil.Process, status: str = "", *, alive: bool = False) -> bool:
    try:
        found = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        found = psutil.STATUS_DEAD
    return found not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) if alive else found == status
