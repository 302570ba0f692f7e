"""The last sentence on the console of a run: what it gained, and where it is kept."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.schema import RewardConfig
from hybridrl.run_files.run_paths import REPORT
from hybridrl.system.formatting import format_seconds

_GAIN_LABELS = {
    "accuracy": "greedy accuracy",
    "reward": "reward",
    "cost": "cost",
    "pair_accuracy": "pair accuracy",
    "loss": "held-out loss",
}
"""What a run may gain, and how it is called."""


_CHECKING_FUNCTIONS = ("exact", "numeric", "contains", "boxed", "math", "passes_tests")
"""Functions of the library that score an answer 1 if it is right, and less if not."""


def resolve_accuracy_name(reward: RewardConfig, short: bool = False) -> str:
    """Return what the metric `accuracy` stands for: the share of correct responses if one function
    of the library checks them, else the share of greedy responses that score `reward.correct_at` or
    more, since a grading model may be wrong and the scale of other functions is unknown."""
    checks = [reward.function] if isinstance(reward.function, str) else reward.function
    is_checked = isinstance(checks, list) and len(checks) == 1 and isinstance(checks[0], str)
    if (
        is_checked
        and checks[0].rpartition(":")[2] in _CHECKING_FUNCTIONS
        and not (reward.model or reward.judge.path or reward.weights not in (None, [1.0]))
    ):
        return "accuracy" if short else _GAIN_LABELS["accuracy"]
    limit = f"{reward.correct_at:g}"
    return f"score>={limit}" if short else f"greedy responses (score >= {limit})"


def format_final_sentence(
    summary: Mapping[str, Any], directory: Path, accuracy: str = _GAIN_LABELS["accuracy"]
) -> str:
    """Return a sentence such as: greedy accuracy 0.53 -> 0.86, reward 0.48 -> 0.84 in 60 steps (41
    s); model, ...

    Args:
        summary: `<name>_first` and `<name>_last` of any of `_GAIN_LABELS`, `steps` and `seconds`;
            what is missing or None is left out of the sentence.
        directory: the run's folder.
        accuracy: see `resolve_accuracy_name`.
    """
    labels = _GAIN_LABELS | {"accuracy": accuracy}
    gains = [text for name, label in labels.items() if (text := _format_gain(label, name, summary))]
    steps = summary.get("steps")
    seconds = summary.get("seconds")
    sentence = ", ".join(gains) or "finished"
    if steps:  # an evaluation has none
        sentence += f" in {steps:,} {'step' if steps == 1 else 'steps'}"
    if seconds is not None:
        sentence += f" ({format_seconds(seconds)})"
    return (
        f"{sentence}; {_kept_in(directory)}: {directory}\n"
        f"next: open {shlex.quote(str(directory / REPORT))}"
    )


def interrupted_sentence(why: str, steps: int, saved: int, directory: Path) -> str:
    """The last words of a run that was ended from outside: where the model is, and how to go on.

    Args:
        why: `Interrupted`, or the name of a signal.
        steps: How many are done.
        saved: That of the newest checkpoint; 0: there is none.
    """
    folder = shlex.quote(str(directory))
    has_model = (directory / "model").is_dir()
    cure = ""
    if saved:
        cure = f"to go on from step {saved}: python -m hybridrl.main resume={folder}\n"
    elif has_model:
        cure = (
            "without a checkpoint (checkpoint.every) it cannot be resumed; to train on from its "
            f"model: model.path={folder}/model\n"
        )
    return (
        f"{why} after step {steps}; {_kept_in(directory)}: {directory}\n"
        f"{cure}next: open {shlex.quote(str(directory / REPORT))}"
    )


def _kept_in(directory: Path) -> str:
    return ("model, " if (directory / "model").is_dir() else "") + "metrics and report"


def _format_gain(label: str, key: str, summary: Mapping[str, Any]) -> str:
    first, last = summary.get(f"{key}_first"), summary.get(f"{key}_last")
    if last is None:
        return ""
    if summary.get("steps") == 0:  # nothing has gained anything
        first = None
    return f"{label} {last:.2f}" if first is None else f"{label} {first:.2f} -> {last:.2f}"
