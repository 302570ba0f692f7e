"""The base class of adapters, the episode it is given and the score it returns."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Union

MODEL_NAME = "policy"
"""The name by which programs ask for the model, if they name one; the endpoint knows no other."""

LARGEST_REWARD = 1e6
"""Of an episode or a turn, whatever its sign."""
MOST_METRICS, LONGEST_NAME = 256, 128
"""Of an episode."""


@dataclass
class AdapterEpisode:
    """An episode for an adapter to play.

    Attributes:
        row: Of the data.
        url: Where the model answers, as OpenAI's API does: ends in `/v1`, and belongs to this
            episode.
        token: Of the header `Authorization: Bearer`.
        session: Identifies the episode. What has other conversations with the model may name them
            in the header `X-Session-ID`: this, a dot, and anything.
        greedy: The model answers greedily, for this is an evaluation.
        report_token: With which a program says itself what the episode was worth, if it asked so.
        is_left_running: To be set by an adapter that cannot stop what it has started: its process
            gets no further episodes.
    """

    row: dict[str, Any]
    url: str
    token: str
    session: str
    greedy: bool = False
    report_token: str = ""
    is_left_running: bool = False


@dataclass
class EpisodeScore:
    """The score of an episode.

    Attributes:
        reward: None: the program has told the endpoint itself.
        turn_rewards: One for each turn of the model, if known.
        metrics: Further numbers.
        sessions: The conversations to learn from and their rewards, where an episode has several;
            None: all that there was.
    """

    reward: float | None
    turn_rewards: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sessions: dict[str, float] | None = None


class EpisodeError(Exception):
    """An expected failure of an episode; the message is shown without a traceback.

    Args:
        kind: `error`, `crash`, `timeout`, `memory` or `output`.
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentSetupError(Exception):
    """A failure to build an environment from its settings; the message is shown without a
    traceback."""


EpisodeReturn = Union[float, "dict[str, Any]", EpisodeScore, None]


class EnvironmentAdapter:
    """The base class of adapters, which play episodes of one kind of environment.

    Args:
        options: `environment.options`.
        name: Of the user's function, `path/to/file.py:name`; of other adapters their own.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        self.options = options
        self.name = name

    async def start(self) -> None:
        """Prepare for episodes; called once, first, in the loop that plays them."""

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        """Play an episode; the call is cancelled at the time limit.

        Raises:
            EpisodeError: if it failed; any other error is shown with its traceback.
        """
        raise NotImplementedError

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """Return at most `count` of the environment's own tasks, each with a `prompt`."""
        raise EnvironmentSetupError(
            f"data=environment: environment.name={self.name} has no tasks of its own. Name rows by "
            "data=jsonl data.path=<file>."
        )

    def take(self, known: dict[str, Any]) -> dict[str, Any]:
        """Return the options with these defaults filled in.

        Raises:
            EnvironmentSetupError: if there are others.
        """
        unknown = [key for key in self.options if key not in known]
        if unknown:
            raise EnvironmentSetupError(
                f"environment.options.{unknown[0]}: environment.name={self.name} has no such "
                f"option; it has {', '.join(known) or 'none'}."
            )
        return {**known, **self.options}


def import_file(file: Path, name: str) -> ModuleType:
    """Import a file of the user's as a module of this name. Like a script, it may import its
    neighbours."""
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_episode_score(returned: EpisodeReturn) -> EpisodeScore:
    """Convert what an episode returned into an `EpisodeScore`.

    Raises:
        EpisodeError: if it is neither a number nor a dictionary with a `reward`, or has a number
            that nothing can be learned from.
    """
    score = _convert_score(returned)
    fault = fault_of(score.reward, score.turn_rewards, score.metrics)
    if fault is not None:
        raise EpisodeError(f"An episode returned {fault}.")
    return score


def fault_of(
    reward: float | None, turn_rewards: list[float] | None, metrics: Mapping[str, float]
) -> str | None:
    """Return what is wrong with the score of an episode, as the end of a sentence; None if nothing
    is."""
    for name, values in (("reward", [reward]), ("turn_rewards", turn_rewards or [])):
        for value in values:
            if value is not None and not abs(value) <= LARGEST_REWARD:  # or it is no number
                return f"{name} of {value}, expected -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
    if len(metrics) > MOST_METRICS:
        return f"{len(metrics)} metrics, expected at most {MOST_METRICS}"
    for name, metric in metrics.items():
        if len(name) > LONGEST_NAME or not name.isprintable():
            return (
                f"a metric named {name[:LONGEST_NAME]!r}, expected at most {LONGEST_NAME} "
                "printable characters"
            )
        if not math.isfinite(metric):
            return f"the metric `{name}` of {metric}"
    return None


def _convert_score(returned: EpisodeReturn) -> EpisodeScore:
    if isinstance(returned, EpisodeScore):
        return returned
    if returned is None or isinstance(returned, int | float):
        return EpisodeScore(None if returned is None else _float(returned))
    if isinstance(returned, dict) and set(returned) <= {"reward", "turn_rewards", "metrics"}:
        try:
            reward, turns = returned.get("reward"), returned.get("turn_rewards")
            return EpisodeScore(
                None if reward is None else _float(reward),
                None if turns is None else [_float(turn) for turn in turns],
                {str(name): _float(value) for name, value in returned.get("metrics", {}).items()},
            )
        except (TypeError, ValueError, AttributeError):
            pass
    if hasattr(returned, "item"):  # a number of numpy's or torch's
        return EpisodeScore(float(returned.item()))
    raise EpisodeError(
        f"An episode returned {str(returned)[:200]!r} ({type(returned).__name__}), expected a "
        "number, or a dictionary with `reward`, and `turn_rewards` (a list of numbers) "
        "and `metrics` (numbers by name) if there are any."
    )


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float holds
        return math.inf
