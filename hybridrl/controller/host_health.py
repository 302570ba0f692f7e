"""How a host is: its status, which is asked often, and a snapshot, for when it hangs."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import hybridrl
from hybridrl.system import collective_waits as waits
from hybridrl.system.collective_waits import Waiting

OURS = str(Path(hybridrl.__file__).parent)
INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
COMMUNICATION = ("/torch/distributed/", "/vllm/distributed/")
"""Code in which a thread only is to talk with other ranks."""
PASSED_ON = ("/torch/_ops.py",)
"""Code that does nothing itself: its caller counts."""


@dataclass(frozen=True)
class Status:
    """What a host is doing: the call in hand, for how long (seconds, without the time that it
    waited for its inputs, and since a part of it was last done; see `Worker.progress`), and whether
    it still waits for its inputs. `method` is empty when the host is idle; `phase` is empty between
    phases."""

    role: str = ""
    rank: int = 0
    method: str = ""
    seconds: float = 0.0
    waiting: bool = False
    phase: str = ""

    @property
    def is_working(self) -> bool:
        """Whether a call is in hand whose inputs are there."""
        return bool(self.method) and not self.waiting


@dataclass(frozen=True)
class Snapshot:
    """What a host is doing, with all that helps to see why it does not end.

    Attributes:
        place: File, line and function of the user's code that it is in, or of the library's.
        communicates: Whether it is there to wait for other ranks.
        waiting: For what, as far as torch says.
        begun: By process group: how many operations it has begun there.
        stacks: The Python stacks of all its threads.
    """

    status: Status
    place: str = ""
    communicates: bool = False
    waiting: Waiting | None = None
    begun: Mapping[str, int] = field(default_factory=dict)
    stacks: str = ""


def take_snapshot(status: Status, worker_thread: int | None) -> Snapshot:
    """Of this process; `worker_thread` is the one that does the calls. Safe from any other."""
    frames = _frames(worker_thread)
    waiting = waits.waiting(worker_thread)
    communicates = waiting is not None or _communicates(frames)
    return Snapshot(status, _place(frames), communicates, waiting, waits.begun(), _all_stacks())


def _all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _frames(thread: int | None) -> list[FrameType]:
    """Of a thread, the innermost first."""
    frame = None if thread is None else sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _place(frames: Sequence[FrameType]) -> str:
    """Where a thread is, for people: in the user's code, if any of that is on its stack."""

    def is_users(file: str) -> bool:
        return not file.startswith((OURS, *INSTALLED, "<"))

    named = [(frame, frame.f_code.co_filename) for frame in frames]
    of_user = [frame for frame, file in named if is_users(file)]
    of_library = [frame for frame, file in named if file.startswith(OURS)]
    if not (found := of_user or of_library or list(frames)):
        return ""
    code = found[0].f_code
    return f"{code.co_filename}:{found[0].f_lineno} in {code.co_name}"


def _communicates(frames: Sequence[FrameType]) -> bool:
    files = [frame.f_code.co_filename for frame in frames]
    innermost = next((file for file in files if not file.endswith(PASSED_ON)), "")
    return any(part in innermost for part in COMMUNICATION)
