"""What is to be said of a run, from its folder alone: what was learned, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hybridrl.report.advice import TIP, WARNING, Advice
from hybridrl.report.device_advice import DEVICES
from hybridrl.report.learning_advice import LEARNING
from hybridrl.report.run_evidence import Evidence
from hybridrl.report.run_summary import learned
from hybridrl.report.time_advice import TIME
from hybridrl.run_files.run_reader import RunReader

__all__ = ["TIP", "WARNING", "Advice", "advise", "advise_of", "what_was_learned"]

LOOKS: tuple[Callable[[Evidence], Iterator[Advice]], ...] = (*LEARNING, *TIME, *DEVICES)
"""Everything that is looked for."""


def advise(run_folder: Path) -> list[Advice]:
    """All that there is to say of a run, what matters most first; nothing of a run that is well and
    has no time to win, nor of one that has not done a step."""
    return advise_of(Evidence(RunReader(run_folder)))


def advise_of(seen: Evidence) -> list[Advice]:
    """See `advise`."""
    found = [advice for look in LOOKS for advice in look(seen)]
    return sorted(found, key=lambda advice: -advice.weight)


def what_was_learned(run_folder: Path) -> list[str]:
    """Sentences: what the run learned, how sure that is, and where its time went."""
    return learned(Evidence(RunReader(run_folder)))
