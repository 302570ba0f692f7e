"""Ranks that write one folder together: what one of them cannot do, all of them hear of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hybridrl.errors import HybridRLError, StorageError
from hybridrl.system.formatting import format_bytes
from hybridrl.system.locations import UNREACHABLE_HINT, Location, RemotePath, find_free_bytes
from hybridrl.system.storage import translate_os_errors


@contextmanager
def convert_write_errors(path: Location) -> Iterator[None]:
    """Raise `StorageError`, naming `path`, in place of an `OSError` while `path` is written."""
    try:
        with translate_os_errors():
            yield
    except OSError as error:
        cure = "Free some space there, or save in a folder that every rank can write to."
        why = error.strerror or str(error)
        if isinstance(path, RemotePath):
            cure = UNREACHABLE_HINT
        elif (free := find_free_bytes(path)) is not None:
            why += f" ({format_bytes(free)} free there)"
        raise StorageError(f"Cannot write {path}: {why}. {cure}") from error


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Wait for all ranks at the end of the block and raise on all of them if the block failed on
    one. Collective.

    Args:
        group: The ranks; None: there is one only.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is: the others must not wait for this rank
        mine = error
    failures: list[str | None] = []
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, None if mine is None else _told(mine), group=group)
    if mine is not None:
        raise mine
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise StorageError(f"Rank {rank} could not write its part of the model: {failure}")


def _told(error: Exception) -> str:
    """Return an error as another rank reports it: the library's own as sentences, others with their
    type."""
    return str(error) if isinstance(error, HybridRLError) else f"{type(error).__name__}: {error}"
