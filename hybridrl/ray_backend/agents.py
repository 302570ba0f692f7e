"""Ray's agents, which outlive a killed driver by a minute if nobody ends them.

All else that Ray starts with a driver the kernel ends with it. The agents see that their node has
gone and want to tell the head of the cluster, which has gone, too.
"""

from __future__ import annotations

import contextlib
import subprocess

import psutil

_AGENT = "gent"
"""What is in the command of an agent, whose first letter may be a capital, and of no worker."""
_WATCH = (
    "trap '' INT TERM; while read -r line; do :; done; "
    f'for pid; do grep -aq {_AGENT} "/proc/$pid/cmdline" && kill -9 "$pid"; done'
)
_watching: list[subprocess.Popen[bytes]] = []


def end_with_driver() -> None:
    """Has a shell wait for the end of this process, and then end the agents of the node that this
    process has started."""
    agents = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            is_of_node = (parent := child.parent()) is not None and parent.name() == "raylet"
            if is_of_node and _AGENT in " ".join(child.cmdline()):
                agents.append(str(child.pid))
    watching = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", *agents],
        stdin=subprocess.PIPE,  # at its end there is no driver any more
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    _watching.append(watching)


def end_watch() -> None:
    """Ends what `end_with_driver` has started, when Ray has ended in good order."""
    while _watching:
        with _watching.pop() as watching:
            watching.kill()
