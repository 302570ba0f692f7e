"""Describe the health of a host: its status, which is asked often, and a snapshot for hangs."""

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
from hybridrl.system.collective_waits import CollectiveWait

_PACKAGE_FOLDER = str(Path(hybridrl.__file__).parent)
_INSTALLED_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_COMMUNICATION_PATHS = ("/torch/distributed/", "/vllm/distributed/")
"""The code in which a thread only communicates with other ranks."""
_DISPATCH_PATHS = ("/torch/_ops.py",)
"""The code that only dispatches; its caller counts."""


@dataclass(frozen=True)
class HostStatus:
    """The current call of a host, the seconds spent on it (without the wait for its inputs, and
    since its last progress; see `Worker.progress`), and whether it still waits for its
    inputs. `method` is empty when the host is idle; `phase` is empty between phases."""

    role: str = ""
    rank: int = 0
    method: str = ""
    seconds: float = 0.0
    waiting: bool = False
    phase: str = ""

    @property
    def is_working(self) -> bool:
        """True while the host runs a call whose inputs have arrived."""
        return bool(self.method) and not self.waiting


@dataclass(frozen=True)
class HostSnapshot:
    """A host's status with the details that show why a call does not end.

    Attributes:
        place: File, line and function of the user's code that it is in, or of the library's.
        communicates: Whether it is there to wait for other ranks.
        waiting: For what, as far as torch says.
        begun: By process group: how many operations it has begun there.
        stacks: The Python stacks of all its threads.
    """

    status: HostStatus
    place: str = ""
    communicates: bool = False
    waiting: CollectiveWait | None = None
    begun: Mapping[str, int] = field(default_factory=dict)
    stacks: str = ""


def capture_snapshot(status: HostStatus, worker_thread: int | None) -> HostSnapshot:
    """Capture a snapshot of this process, whose calls run on `worker_thread`. Safe from any other
    thread."""
    frames = _list_frames(worker_thread)
    waiting = waits.find_current_wait(worker_thread)
    communicates = waiting is not None or _is_communicating(frames)
    return HostSnapshot(
        status,
        _format_location(frames),
        communicates,
        waiting,
        waits.count_started_operations(),
        _format_all_stacks(),
    )


def _format_all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _list_frames(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = None if thread is None else sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _format_location(frames: Sequence[FrameType]) -> str:
    """Format where a thread is: in the user's code if any of it is on the stack, else in the
    library's."""

    def is_users(file: str) -> bool:
        return not file.startswith((_PACKAGE_FOLDER, *_INSTALLED_FOLDERS, "<"))

    named = [(frame, frame.f_code.co_filename) for frame in frames]
    of_user = [frame for frame, file in named if is_users(file)]
    of_library = [frame for frame, file in named if file.startswith(_PACKAGE_FOLDER)]
    if not (found := of_user or of_library or list(frames)):
        return ""
    code = found[0].f_code
    return f"{code.co_filename}:{found[0].f_lineno} in {code.co_name}"


def _is_communicating(frames: Sequence[FrameType]) -> bool:
    files = [frame.f_code.co_filename for frame in frames]
    innermost = next((file for file in files if not file.endswith(_DISPATCH_PATHS)), "")
    return any(part in innermost for part in _COMMUNICATION_PATHS)
