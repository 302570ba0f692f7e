"""What went wrong, as one sentence with the traceback or log of the worker that is the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.controller.host import Failure
from hybridrl.errors import CallTimeoutError, WorkerError

Identities = Sequence[tuple[str, int]]
"""Node address and process id of every host."""
LOG_LINES = 15


@dataclass(frozen=True)
class Death:
    """A host process ended while a call was due, or (`refused`) could not even read the call.
    `text` is what Ray says of it."""

    host: int
    call: str
    text: str
    refused: bool = False


def explain(
    found: Sequence[Failure | Death], identities: Identities, run_directory: Path | None
) -> WorkerError:
    """The error to report: a death comes before an exception, because a rank that dies makes its
    peers raise; among exceptions the earliest is the cause."""
    if deaths := [item for item in found if isinstance(item, Death)]:
        return _of_death(deaths, identities, run_directory)
    cause = min((item for item in found if isinstance(item, Failure)), key=lambda item: item.time)
    return WorkerError(
        f"{cause.role}.{cause.method} failed on rank {cause.rank}: {cause.message}\n\n"
        f"{cause.traceback.rstrip()}"
    )


def timed_out(
    late: Mapping[int, str],
    limit: float,
    identities: Identities,
    stacks: Sequence[str | None],
) -> CallTimeoutError:
    """The error for calls that ran longer than `limit` seconds, with the stacks of every host."""
    who = ", ".join(f"{call} on rank {host}" for host, call in late.items())
    text = []
    for host, stack in enumerate(stacks):
        node, pid = identities[host]
        text.append(f"--- host {host} (process {pid} on {node}) ---")
        text.append(
            stack
            or "did not answer within 5 s: stopped, or blocked in native code (see `py-spy dump`)"
        )
    return CallTimeoutError(
        f"{who} did not finish within {limit:g} s (controller.timeout_s). If the work is only "
        "slow, raise that setting. The stacks of every host:\n\n" + "\n".join(text)
    )


def _of_death(
    deaths: Sequence[Death], identities: Identities, run_directory: Path | None
) -> WorkerError:
    death = deaths[0]
    node, pid = identities[death.host]
    role = death.call.split(".")[0]
    if death.refused:
        return WorkerError(
            f"Rank {death.host} could not read the call {death.call}. A worker's class and all "
            "that it is called with must be importable where the workers run: install the module "
            f"that defines them, or define them in the driver's own script.\n\n{death.text}"
        )
    sentence = f"Rank {death.host} (process {pid} on {node}) died during {death.call}."
    if "OutOfMemory" in death.text or "memory monitor" in death.text:
        sentence += " Ray's memory monitor ended it: the machine ran out of memory."
    else:
        sentence += (
            " A process that ends without a traceback was killed from outside (kill -9, the"
            " kernel's out-of-memory killer) or crashed in native code."
        )
    if run_directory is None:
        return WorkerError(sentence)
    log = run_directory / "logs" / f"{role}-{death.host}.log"
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
    return WorkerError(f"{sentence}\nThe last lines of {log}:\n{tail}")
