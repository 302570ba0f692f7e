"""The interface between rollouts and whatever plays their episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class EpisodeRequest(NamedTuple):
    """A request to play an episode.

    Attributes:
        key: Comes back with what came of it.
        row: Of the data.
        url: Where the model answers this episode: `http://127.0.0.1:PORT/session/<session>/v1`.
        token: With which its programs sample.
        session: Of the endpoint, in `url`.
        greedy: For an evaluation.
        report_token: With which one says what it was worth.
    """

    key: int
    row: Mapping[str, Any]
    url: str
    token: str
    session: str
    greedy: bool
    report_token: str = ""


class EpisodeResult(NamedTuple):
    """The result of an episode.

    Attributes:
        key: As given.
        reward: NaN after a failure; and where the program was to tell the endpoint itself. What the
            endpoint was told goes before this, and before a failure of kind `error`.
        turn_rewards: One for each turn of the model, if the environment says.
        metrics: Further numbers of the environment.
        failure: What went wrong, for people; None: nothing.
        kind: `ok`, `error`, `crash`, `timeout`, `memory` or `output`.
        sessions: The conversations that count, with their rewards; None: `session` and all that
            begin with it and a dot. Others of the episode were given up, when its process was lost
            and it was played again, say.
    """

    key: int
    reward: float
    turn_rewards: list[float] | None
    metrics: dict[str, float]
    failure: str | None
    kind: str
    sessions: dict[str, float] | None = None
