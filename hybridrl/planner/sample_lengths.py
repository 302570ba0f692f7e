"""Lengths of a job's samples as a person says them, in numbers or by naming a run."""

from __future__ import annotations

import math
import re
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.planner.what_if.recorded_run import RecordedRun

_NUMBER = r"(\d+(?:\.\d+)?)"
_WRITTEN = re.compile(rf"{_NUMBER}\+{_NUMBER}(?:\.\.{_NUMBER})?")


def parse_sample_lengths(said: str, name: str) -> SampleLengths:
    """Parse sample lengths: `300+800`, `300+800..4096`, or the folder of a run.

    Args:
        name: Of what says it, for messages.

    Raises:
        ConfigError: if it is none of these.
    """
    written = _WRITTEN.fullmatch(said.strip())
    if written is None:
        return _of_run(said, name)
    prompt, response = float(written[1]), float(written[2])
    longest = float(written[3]) if written[3] else response
    if not (prompt and response and math.isfinite(prompt + longest)):
        raise ConfigError(f"{name}={said}: numbers of tokens are above 0.")
    if longest < response:
        raise ConfigError(
            f"{name}={said}: the longest response of a step, behind `..`, is at least as long as "
            "a usual one."
        )
    return SampleLengths(prompt, response, longest)


def _of_run(said: str, name: str) -> SampleLengths:
    folder = Path(said).expanduser()
    try:
        is_folder = bool(said) and folder.is_dir()
    except OSError:  # no file can have such a name
        is_folder = False
    if not is_folder:
        raise ConfigError(
            f"{name}={said}: write PROMPT+RESPONSE, numbers of tokens such as 300+800; "
            "PROMPT+RESPONSE..LONGEST, such as 300+800..4096, if a step waits for one that is much "
            "longer; or the folder of a run, whose lengths they are."
        )
    return RecordedRun.at(folder).lengths
