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
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybridrl.batch.call_record import CallRecord
from hybridrl.controller.transfer_protocol import list_transfer_methods
from hybridrl.errors import ConfigError, suggest_name

FAULT_VARIABLE = "HYBRIDRL_FAULT"
_FAULT_PATTERN = re.compile(r"(\w+)\.(\w+)(?:@(\d+))?:0*([1-9]\d*):(\w+)")


class _InjectedFault(NamedTuple):
    """A fault in one call of a method, on one rank or, with `rank` None, on every rank."""

    role: str
    method: str
    rank: int | None
    call: int
    kind: str


class FaultInjector:
    """The faults that this process injects.

    Args:
        text: As the variable says; empty: none.

    Raises:
        ConfigError: if it cannot be read.
    """

    def __init__(self, text: str | None = None) -> None:
        text = os.environ.get(FAULT_VARIABLE, "") if text is None else text
        self._faults = [_parse_fault(part.strip()) for part in text.split(";") if part.strip()]
        self._calls: Counter[tuple[str, str]] = Counter()

    def __bool__(self) -> bool:
        """Return whether any faults are planned."""
        return bool(self._faults)

    def meet(self, record: CallRecord) -> None:
        """Count a call that begins, and trigger the faults planned for it."""
        name = record.role, record.method
        self._calls[name] += 1
        for fault in self._faults:
            is_here = fault.rank in (None, record.rank)
            if fault[:2] == name and fault.call == self._calls[name] and is_here:
                FAULT_ACTIONS[fault.kind]()

    def check(self, workers: Mapping[str, tuple[type, int]]) -> None:
        """Refuse faults that no call would trigger.

        Args:
            workers: The class of each role's workers, and how many there are.

        Raises:
            ConfigError: names the role, the method or the rank that is not there.
        """
        for fault in self._faults:
            said = f"{FAULT_VARIABLE} plans a fault in {fault.role}.{fault.method}"
            if fault.role not in workers:
                raise ConfigError(
                    f"{said}, and there is no role `{fault.role}`; the job's workers are "
                    f"{', '.join(workers)}.{suggest_name(fault.role, workers)}"
                )
            kind, number = workers[fault.role]
            methods = list_transfer_methods(kind)
            if fault.method not in ("__init__", *methods):
                raise ConfigError(
                    f"{said}, which is no call of `{fault.role}`; there are __init__, "
                    f"{', '.join(methods)}.{suggest_name(fault.method, methods)}"
                )
            if fault.rank is not None and fault.rank >= number:
                raise ConfigError(
                    f"{said} on rank {fault.rank}, and `{fault.role}` has the ranks 0 to "
                    f"{number - 1} here. Name one of these, or leave @{fault.rank} out."
                )


def _parse_fault(text: str) -> _InjectedFault:
    found = _FAULT_PATTERN.fullmatch(text)
    if found is None or found[5] not in FAULT_ACTIONS:
        raise ConfigError(
            f"{FAULT_VARIABLE}={text}: write `role.method:call:kind` or "
            "`role.method@rank:call:kind`, several separated by `;`. Calls are counted from 1, and "
            f"kinds are {', '.join(FAULT_ACTIONS)}."
        )
    rank = None if found[3] is None else int(found[3])
    return _InjectedFault(found[1], found[2], rank, int(found[4]), found[5])


def _raise_error() -> None:
    raise RuntimeError(f"planned by {FAULT_VARIABLE}")


def _simulate_full_disk() -> None:
    """Make every later attempt of this process to open a file for writing fail with ENOSPC."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[2], int):
            return
        path, _, flags = arguments
        is_device = str(path).startswith(("/dev/", "/proc/"))
        if flags & (os.O_WRONLY | os.O_RDWR) and not is_device:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sys.addaudithook(refuse)


def _stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # Another thread may take the signal, and this one would go on until that has stopped them all.
    time.sleep(1.0)


FAULT_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop_process,
    "raise": _raise_error,
    "enospc": _simulate_full_disk,
}
