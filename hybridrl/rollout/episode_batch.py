"""The columns of a batch of finished episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.rollout.rollout_engine import ragged
from hybridrl.rollout.transcript import TokenTranscript


class EpisodeSample(NamedTuple):
    """A finished episode: its transcripts, rewards and finish reason.

    Attributes:
        branches: What the model saw and sampled: one transcript, or several where the conversation
            was not only continued; none if nothing was sampled. The last is the row's own.
        rewards: One for each turn of the model, over all branches in the order of the turns; none
            where turns have no rewards of their own.
        reward: Of the whole; NaN: it is to be dropped.
        finish_reason: `stop`, `length`, `max_turns`, `tool_timeout`, `tool_error`, or the kind of
            failure.
        metrics: Further numbers of the environment.
    """

    branches: list[TokenTranscript]
    rewards: list[float]
    reward: float
    finish_reason: str
    metrics: Mapping[str, float] = {}


EMPTY_EPISODE = EpisodeSample([], [], 0.0, "stop")
"""In the place of an episode that another rank plays."""
_TOKEN_COLUMNS: Mapping[str, tuple[Callable[[TokenTranscript], npt.ArrayLike], type]] = {
    "response_ids": (lambda transcript: transcript.response_ids, np.int64),
    "response_mask": (lambda transcript: transcript.mask, np.uint8),
    "rollout_log_probs": (lambda transcript: transcript.log_probs, np.float32),
    "turn": (lambda transcript: transcript.turns, np.int32),
    "token_versions": (lambda transcript: transcript.versions, np.int64),
}
"""The columns of response tokens that a branch has, and where they come from."""


def build_episode_batch(
    samples: Sequence[EpisodeSample],
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    keeps_sets: bool = False,
) -> Batch:
    """Build a batch with a row for each episode.

    Args:
        prompts: Of episodes that may have several branches, with prompts of their own: the prompt
            ids of the rows, which one without any branch keeps. None: each has one branch.
        keeps_sets: Whether there is a column `kept_sets`, too.

    Returns:
        `finish_reason`, `turns` (of the model), `turn_rewards`, `episode_rewards`, the columns of
        tokens `response_ids`, `response_mask`, `rollout_log_probs`, `turn` and `token_versions`
        (see `TokenTranscript`), and `environment/<name>` for each further number (NaN where an
        episode does not have it). With `prompts` also the row's own `prompt_ids`, the number of
        `branches`, and what lies in those before the last, one after the other: `branch_` with the
        names of these columns, and how long each is, `branch_prompt_lengths` and
        `branch_response_lengths`.
    """
    own = [sample.branches[-1] if sample.branches else TokenTranscript([]) for sample in samples]
    of_tokens = dict(_TOKEN_COLUMNS)
    if keeps_sets:
        of_tokens[KEPT_SETS] = (lambda transcript: transcript.kept.encode(), np.int32)
    turns = [sum(branch.sampled_turns for branch in sample.branches) for sample in samples]
    columns: dict[str, Any] = {
        **{name: ragged([of(t) for t in own], kind) for name, (of, kind) in of_tokens.items()},
        "finish_reason": pa.array([sample.finish_reason for sample in samples], pa.string()),
        "turns": torch.tensor(turns, dtype=torch.int64),
        "turn_rewards": ragged([sample.rewards for sample in samples], np.float32),
        "episode_rewards": torch.tensor([s.reward for s in samples], dtype=torch.float32),
        **_metrics(samples),
    }
    if prompts is None:
        return Batch.from_columns(columns)
    further = [sample.branches[:-1] for sample in samples]

    def together(of: Callable[[TokenTranscript], npt.ArrayLike], kind: type) -> RaggedColumn:
        rows = [np.concatenate([np.zeros(0, kind), *map(of, branches)]) for branches in further]
        return ragged(rows, kind)

    columns |= {
        "prompt_ids": ragged(
            [
                transcript.prompt_ids if sample.branches else prompt
                for sample, transcript, prompt in zip(samples, own, prompts, strict=True)
            ],
            np.int64,
        ),
        "branches": torch.tensor([len(sample.branches) for sample in samples], dtype=torch.int64),
        "branch_prompt_ids": together(lambda branch: branch.prompt_ids, np.int64),
        **{f"branch_{name}": together(of, kind) for name, (of, kind) in of_tokens.items()},
        "branch_prompt_lengths": together(lambda branch: [len(branch.prompt_ids)], np.int64),
        "branch_response_lengths": together(lambda branch: [len(branch)], np.int64),
    }
    return Batch.from_columns(columns)


def _metrics(samples: Sequence[EpisodeSample]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    return {
        f"environment/{name}": torch.tensor(
            [sample.metrics.get(name, math.nan) for sample in samples], dtype=torch.float32
        )
        for name in names
    }
