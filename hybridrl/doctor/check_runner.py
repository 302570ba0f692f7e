"""Parallel execution of the doctor's checks; none can fail or delay the others."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hybridrl.doctor.finding import DoctorFinding, report_note

_DoctorCheck = Callable[[], Iterable[DoctorFinding]]
CHECK_MODULES = {
    "packages": "package_check",
    "libraries": "library_check",
    "machine": "machine_check",
    "disk": "disk_check",
    "network": "network_check",
    "hub": "hub_check",
    "processes": "ray_check",
}
"""The module of this room whose `check` looks at each family, in the order of their lines."""


def list_checks(runs: Path, seconds: float) -> dict[str, _DoctorCheck]:
    """List the checks by name, in display order.

    Args:
        runs: The folder that jobs make theirs in.
        seconds: In which imports of large libraries have to end.
    """
    told = {"libraries": (seconds,), "disk": (runs,)}

    def check_of(name: str) -> _DoctorCheck:  # a small package that it needs may be what is missing
        module = f"hybridrl.doctor.{CHECK_MODULES[name]}"
        return lambda: importlib.import_module(module).check(*told.get(name, ()))

    return {name: check_of(name) for name in CHECK_MODULES}


def run_doctor_checks(checks: Mapping[str, _DoctorCheck], seconds: float) -> list[DoctorFinding]:
    """Run all checks in threads; return their findings in order. A check that raises or is late has
    a note in its place."""
    found: dict[str, list[DoctorFinding]] = {name: [] for name in checks}

    def look(name: str, check: _DoctorCheck) -> None:
        try:
            for finding in check():
                found[name].append(finding)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            found[name].append(report_note(name, f"could not be looked at to its end: {why}"))

    ends = time.monotonic() + seconds
    threads = {
        name: threading.Thread(target=look, args=(name, check), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, ends - time.monotonic()))
    for name, thread in threads.items():
        if thread.is_alive():
            found[name].append(report_note(name, f"was not looked at to its end in {seconds:g} s"))
    return [finding for several in found.values() for finding in several]
