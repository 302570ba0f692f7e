"""Copies of the newest checkpoint in the memory of nodes, which survive the loss of some."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.checkpoint.keep_rule import KeepRule
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.errors import HybridRLError
from hybridrl.system.locations import Location, copy_files, list_file_sizes


class MemoryCopies:
    """Copies of the newest checkpoint in the memory of nodes, in folders like those of its steps.
    They are read first after a loss; if anything goes wrong with them the run continues with the
    files.

    Args:
        place: The folder that they are in.
    """

    def __init__(self, place: Location) -> None:
        self._copies = CheckpointStore(place)

    def at(self, step: int) -> Location:
        """Return the folder of a step, whether it exists or not."""
        return self._copies.at(step)

    def complete(
        self, step: int, fault: str, files: CheckpointStore, figures: Mapping[str, float]
    ) -> str:
        """Add what the ranks have not written of a step, and remove the copy before it; return why
        there is none, else an empty text.

        Args:
            fault: Why the ranks could not write their parts; empty: they have.
            files: The steps of the run.
            figures: What was evaluated after the step.
        """
        if not fault:
            try:
                there = list_file_sizes(self.at(step))
                listed = files.completed(step).files
                # Tensors have their checksums in lists of the ranks.
                small = [name for name, file in listed.items() if "crc32" in file]
                names = [name for name in small if name not in there]
                copy_files(files.at(step), self.at(step), names)
                self._copies.complete(step, figures)
                self._copies.prune(KeepRule(last=1))
                self._copies.forget_after(step)  # what losses have left
            except (HybridRLError, OSError) as error:
                fault = str(error)
        if fault:
            self.discard(step)
        return fault

    def newest(self) -> int | None:
        """Return the newest step with a complete copy, and remove what remains of others."""
        try:
            step, _ = self._copies.newest()
            self._copies.forget_after(step or 0)
        except (HybridRLError, OSError):
            return None
        return step

    def discard(self, step: int) -> None:
        self._copies.discard(step)
