"""How much memory this process took of its device at the fullest moment of a phase.

On accelerators what torch's allocator has handed out; on CPUs the resident memory of the process,
whose high-water mark Linux lets a process set back.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What sets VmHWM back when written to clear_refs; see man 5 proc."""


class PeakMemory:
    """The fullest moment since it was made.

    Where Linux's high-water mark cannot be set back, the greater of the two ends of the phase.

    Args:
        device_kind: `cpu` or `cuda`.
    """

    def __init__(self, device_kind: str) -> None:
        self._is_cpu = device_kind == "cpu"
        self._begin = 0
        self._has_mark = False
        if self._is_cpu:
            self._has_mark = _set_mark_back()
            self._begin = 0 if self._has_mark else psutil.Process().memory_info().rss
        else:
            torch.accelerator.reset_peak_memory_stats()

    def bytes(self) -> int:
        """Until now."""
        if not self._is_cpu:
            return torch.accelerator.max_memory_allocated()
        if self._has_mark:
            return _mark()
        return max(self._begin, psutil.Process().memory_info().rss)


def _set_mark_back() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # another system, or a container that forbids it
        return False
    return STATUS.is_file()


def _mark() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
