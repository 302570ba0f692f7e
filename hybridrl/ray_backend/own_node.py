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

GCS_PROCESS, RAYLET_PROCESS = "gcs_server", "raylet"
"""The names of Ray's two processes of a node that everything else depends on."""
PROCESS_PURPOSES = {
    GCS_PROCESS: "the process that knows where everything is",
    RAYLET_PROCESS: "the process that starts workers and keeps what they return",
}
NODE_MARK_VARIABLE = "HYBRIDRL_NODE"
"""The environment variable that marks all processes started by one driver."""
_AGENT_PATTERN = "gent"
"""The text that the command line of every agent contains, whose first letter may be a capital, and
that of no worker."""
_CLEANUP_SCRIPT = (
    "trap '' INT TERM HUP; while read -r key line; do export \"$key=$line\"; done; "
    'if [ "$words" ] && '
    'grep -qsie "terminate the process" -e "local raylet is dead" "$session"/logs/*driver*.log; '
    "then printf '\\nerror: %s\\n' \"$words\" >&2; session=; fi; "
    'for process in $(grep -ls "$1" /proc/[0-9]*/environ); do '
    f'grep -aqs {_AGENT_PATTERN} "${{process%environ}}cmdline" || continue; '
    'process=${process%/environ}; kill -9 "${process#/proc/}"; done; '
    'case "$session" in */session_*) rm -rf "$session";; esac'
)
"""The script of the cleanup process, which waits for the end of the driver, then kills the agents
and removes the folder of Ray's session if it was given one. Ray ends a driver that loses its raylet
in the middle of a call before the driver can print anything; the script then prints its message."""

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


class LocalRayNode:
    """The processes of Ray that this process starts.

    Attributes:
        logs: Ray's own.
    """

    def __init__(self) -> None:
        """Start the cleanup process. It has to exist before Ray starts, so that a driver that is
        killed during the start leaves nothing behind."""
        self.logs = ""
        self._parts: dict[str, psutil.Process] = {}
        mark = os.environ[NODE_MARK_VARIABLE] = secrets.token_hex(8)
        os.environ["SPT_NOENV"] = "1"  # else the titles that agents give themselves cost them it
        self._watching = subprocess.Popen(
            ["/bin/sh", "-c", _CLEANUP_SCRIPT, "sh", f"{NODE_MARK_VARIABLE}={mark}"],
            stdin=subprocess.PIPE,  # at its end there is no driver any more
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},  # or it would find itself
            cwd="/",
        )

    def started(self, session: str) -> None:
        """Record that Ray has started, with the session folder that is removed when it ends."""
        self.logs = f"{session}/logs"
        self._tell("session", session)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if child.name() in PROCESS_PURPOSES:
                    self._parts[child.name()] = child
        if RAYLET_PROCESS in self._parts:
            self._tell(
                "words",
                f"{self._ended(RAYLET_PROCESS)} Ray has ended the driver with it. Where there is a "
                "checkpoint, resume=<run folder> goes on from it.",
            )

    def fault(self) -> str:
        """Return a sentence on a process of Ray that has ended; empty if none has."""
        for name, process in self._parts.items():
            if _find_status(process) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                self.keep_logs()
                return self._ended(name)
        return ""

    def keep_logs(self) -> None:
        """Keep Ray's log files after its end."""
        self._tell("session", "")

    def stopped(self) -> str:
        """Return a clause that names the process of Ray that is stopped; empty if none is."""
        for name, process in self._parts.items():
            if _find_status(process) == psutil.STATUS_STOPPED:
                return f"Ray's {name} ({PROCESS_PURPOSES[name]}; process {process.pid}) is stopped"
        return ""

    @contextlib.contextmanager
    def ending(self, seconds: float) -> Iterator[None]:
        """Kill what is left of Ray after this many seconds, while Ray ends itself in the block."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the node; the workers notice that it is gone, and end."""
        self._tell("words", "")
        for process in self._parts.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with self._watching:  # which ends the agents
            assert self._watching.stdin is not None
            self._watching.stdin.close()

    def _ended(self, name: str) -> str:
        return (
            f"Ray's {name} ({PROCESS_PURPOSES[name]}; process {self._parts[name].pid}) ended: it "
            "was killed from outside (kill -9, the kernel's out-of-memory killer) or crashed. Its "
            f"own log is in {self.logs}."
        )

    def _tell(self, key: str, line: str) -> None:
        """Send a variable to the cleanup process."""
        assert self._watching.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._watching.stdin.write(f"{key} {line}\n".encode())
            self._watching.stdin.flush()


def _find_status(process: psutil.Process) -> str:
    """Return psutil's word for the state of a process, of one that has ended, too."""
    try:
        return str(process.status() if process.is_running() else psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
