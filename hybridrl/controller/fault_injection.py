"""Faults that are planned, for tests of what becomes of a job that meets one.

    HYBRIDRL_FAULT="actor.update_actor@1:3:kill; reward.compute_reward:2:raise"

The third call of `update_actor` that rank 1 of `actor` gets kills its process; the second of
`compute_reward` raises, on every rank. A host that is started again counts again.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybridrl.batch.call_record import Record
from hybridrl.errors import ConfigError, nearest

VARIABLE = "HYBRIDRL_FAULT"
_FAULT = re.compile(r"(\w+)\.(\w+)(?:@(\d+))?:0*([1-9]\d*):(\w+)")


class Fault(NamedTuple):
    """A fault in one call of a method, on one rank or, with `rank` None, on every rank."""

    role: str
    method: str
    rank: int | None
    call: int
    kind: str


class PlannedFaults:
    """The faults that this process injects.

    Args:
        text: As the variable says; empty: none.

    Raises:
        ConfigError: if it cannot be read.
    """

    def __init__(self, text: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if text is None else text
        self._faults = [_read(part.strip()) for part in text.split(";") if part.strip()]
        self._calls: Counter[tuple[str, str]] = Counter()

    def __bool__(self) -> bool:
        """Return whether any faults are planned."""
        return bool(self._faults)

    def meet(self, record: Record) -> None:
        """Count a call that begins, and trigger the faults planned for it."""
        if not self._faults:
            return
        name = record.role, record.method
        self._calls[name] += 1
        for fault in self._faults:
            is_here = fault.rank in (None, record.rank)
            if fault[:2] == name and fault.call == self._calls[name] and is_here:
                KINDS[fault.kind]()

    def check(self, workers: Mapping[str, tuple[type, int]]) -> None:
        """Refuse faults that no call would trigger.

        Args:
            workers: The class of each role's workers, and how many there are.

        Raises:
            ConfigError: names the role, the method or the rank that is not there.
        """
        for fault in self._faults:
            said = f"{VARIABLE} plans a fault in {fault.role}.{fault.method}"
            if fault.role not in workers:
                raise ConfigError(
                    f"{said}, and there is no role `{fault.role}`; the job's workers are "
                    f"{', '.join(workers)}.{nearest(fault.role, workers)}"
                )
            kind, number = workers[fault.role]
            methods = [n for n in dir(kind) if hasattr(getattr(kind, n), "__transfer__")]
            if fault.method not in ("__init__", *methods):
                raise ConfigError(
                    f"{said}, which is no call of `{fault.role}`; there are __init__, "
                    f"{', '.join(methods)}.{nearest(fault.method, methods)}"
                )
            if fault.rank is not None and fault.rank >= number:
                raise ConfigError(
                    f"{said} on rank {fault.rank}, and `{fault.role}` has the ranks 0 to "
                    f"{number - 1} here. Name one of these, or leave @{fault.rank} out."
                )


def _read(text: str) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None or found[5] not in KINDS:
        raise ConfigError(
            f"{VARIABLE}={text}: write `role.method:call:kind` or `role.method@rank:call:kind`, "
            f"several separated by `;`. Calls are counted from 1, and kinds are {', '.join(KINDS)}."
        )
    rank = None if found[3] is None else int(found[3])
    return Fault(found[1], found[2], rank, int(found[4]), found[5])


def _raise() -> None:
    raise RuntimeError(f"planned by {VARIABLE}")


def _fill_disk() -> None:
    """Make every later attempt of this process to open a file for writing fail with ENOSPC."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[2], int):
            return
        path, _, flags = arguments
        is_device = str(path).startswith(("/dev/", "/proc/"))
        if flags & (os.O_WRONLY | os.O_RDWR) and not is_device:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sys.addaudithook(refuse)


KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "enospc": _fill_disk,
}
