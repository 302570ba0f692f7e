"""The errors HybridRL raises. Each message is a sentence that names the setting and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridRLError(Exception):
    """Base of every error that HybridRL raises on purpose."""


class ConfigError(HybridRLError):
    """A setting, or a combination of settings, is wrong. Raised before anything starts."""


class DataError(HybridRLError):
    """A data file, a row or a column is missing or malformed. Names the file and the line."""


class MissingPackageError(HybridRLError):
    """An optional package is needed and not installed. Names the extra that brings it."""


class RewardError(HybridRLError):
    """A reward function could not be loaded, or failed while `reward.on_error` is `fail`."""


class LayoutError(HybridRLError):
    """Two layouts of the same tensors do not fit together. Names the tensor and the part."""


class RolloutError(HybridRLError):
    """Generation did not keep to the tokens of a sample. Names the tokens."""


class TrainingError(HybridRLError):
    """Training cannot go on: its gradients are no numbers. Names what to look at."""


class WorkerError(HybridRLError):
    """A worker raised or died. Names role, rank and method, and carries the worker's traceback."""


class LostError(WorkerError):
    """The job's processes are to be started again, for one of them or a machine is gone or does
    not go on: a host, the relay, a node. A run with checkpoints goes on from the newest; see
    `recover`.

    Args:
        if_again: A sentence, of a loss that will not be the last one if the one before it was the
            same: why it does not help to go on.
    """

    def __init__(self, message: str, if_again: str = "") -> None:
        super().__init__(message)
        self.if_again = if_again


class CallTimeoutError(LostError):
    """A call outlived `controller.timeout_s`. Names role, rank and method; carries all stacks."""


class Preempted(KeyboardInterrupt):
    """SIGTERM ended the run where it can go on: whoever took the machine may start it again."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean `x`?' for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean `{close[0]}`?" if close else ""


class StorageError(HybridRLError):
    """A file of the run could not be written. Names the path, the free space and the cure."""
