"""What a run leaves at its end: its models, and what there is to say of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridrl.console.run_view import StepView
from hybridrl.run_files.provenance import provenance
from hybridrl.run_files.run_status import outcome_of
from hybridrl.system.storage import replacing_folder

if TYPE_CHECKING:
    from hybridrl.job.job import Job


class _TooBusyError(Exception):
    """The workers did not come to saving a model in time."""


def save_models(job: Job, view: StepView, until: float = math.inf) -> None:
    """Saves the models of the roles that leave one; gives up at that moment of the monotonic
    clock."""
    view.phase("saving")
    for role, spec in job.roles.items():
        if spec.saves_as is None:
            continue
        try:
            with replacing_folder(job.directory.path / spec.saves_as) as folder:
                saved = job.groups[role].save_model(str(folder.absolute()))
                left = None if until == math.inf else max(0.0, until - time.monotonic())
                if not saved.done_within(left):
                    raise _TooBusyError
        except _TooBusyError:
            view.message(f"The workers were busy for too long; the {role} was not saved.")


def write_summary(job: Job, summary: Mapping[str, Any], error: BaseException | None = None) -> None:
    """Writes what there is to say of a run, what it came from, and what has ended it."""
    state, why = outcome_of(error)
    ended = {"state": state, "why": why, **provenance(job.config.run.seed, job.command)}
    job.directory.write_summary({**summary, **ended})
