"""The columns of a batch of finished episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.rollout.rollout_engine import build_response_batch, ragged
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
_TOKEN_COLUMNS: Mapping[str, tuple[Callable[[TokenTranscript], Sequence[float]], type]] = {
    "response_ids": (lambda transcript: transcript.response_ids, np.int64),
    "response_mask": (lambda transcript: transcript.mask, np.uint8),
    "rollout_log_probs": (lambda transcript: transcript.log_probs, np.float32),
    "turn": (lambda transcript: transcript.turns, np.int32),
    "token_versions": (lambda transcript: transcript.versions, np.int64),
}
"""The columns of response tokens that a branch has, and where they come from."""


def build_episode_batch(
    samples: Sequence[EpisodeSample],
    prompts: RaggedColumn | Sequence[Sequence[int]],
    *,
    branching: bool,
    keeps_sets: bool = False,
) -> Batch:
    """Build a batch with a row for each episode.

    Args:
        prompts: The prompt ids of the rows, which one without any branch keeps.
        branching: Whether episodes may have several branches, with prompts of their own.
        keeps_sets: Whether there is a column `kept_sets`, too.

    Returns:
        `finish_reason`, `turns` (of the model), `turn_rewards`, `episode_rewards`, the columns of
        tokens `response_ids`, `response_mask`, `rollout_log_probs`, `turn` and `token_versions`
        (see `TokenTranscript`), and `environment/<name>` for each further number (NaN where an
        episode does not have it). With `branching` also the row's own `prompt_ids`, the number of
        `branches`, and what lies in those before the last, one after the other: `branch_` with the
        names of these columns, and how long each is, `branch_prompt_lengths` and
        `branch_response_lengths`.
    """
    own = [sample.branches[-1] if sample.branches else TokenTranscript([]) for sample in samples]
    batch = build_response_batch(
        [transcript.response_ids for transcript in own],
        [transcript.log_probs for transcript in own],
        [sample.finish_reason for sample in samples],
        kept=[transcript.kept for transcript in own] if keeps_sets else None,
    )
    turns = [sum(branch.sampled_turns for branch in sample.branches) for sample in samples]
    columns = {
        name: ragged([of(t) for t in own], kind) for name, (of, kind) in _TOKEN_COLUMNS.items()
    }
    columns |= {
        "turns": torch.tensor(turns, dtype=torch.int64),
        "turn_rewards": ragged([sample.rewards for sample in samples], np.float32),
        "episode_rewards": torch.tensor([s.reward for s in samples], dtype=torch.float32),
        **_metrics(samples),
    }
    if branching:
        columns |= _branches(samples, own, prompts)
    if branching and keeps_sets:
        encoded = [[branch.kept.encode() for branch in s.branches[:-1]] for s in samples]
        rows = [np.concatenate([np.zeros(0, np.int32), *row]) for row in encoded]
        columns[f"branch_{KEPT_SETS}"] = ragged(rows, np.int32)
    return batch.with_columns(columns)


def _branches(
    samples: Sequence[EpisodeSample],
    own: Sequence[TokenTranscript],
    prompts: RaggedColumn | Sequence[Sequence[int]],
) -> dict[str, RaggedColumn | torch.Tensor]:
    """Build the columns of branches; see `build_episode_batch`."""
    given = (
        [row.tolist() for row in prompts.rows()] if isinstance(prompts, RaggedColumn) else prompts
    )
    further = [sample.branches[:-1] for sample in samples]
    own_prompts = [
        transcript.prompt_ids if sample.branches else list(prompt)
        for sample, transcript, prompt in zip(samples, own, given, strict=True)
    ]

    def together(of: Callable[[TokenTranscript], Sequence[float]], kind: type) -> RaggedColumn:
        return ragged([[x for branch in row for x in of(branch)] for row in further], kind)

    return {
        "prompt_ids": ragged(own_prompts, np.int64),
        "branches": torch.tensor([len(sample.branches) for sample in samples], dtype=torch.int64),
        "branch_prompt_ids": together(lambda branch: branch.prompt_ids, np.int64),
        **{f"branch_{name}": together(of, kind) for name, (of, kind) in _TOKEN_COLUMNS.items()},
        "branch_prompt_lengths": ragged(
            [[len(branch.prompt_ids) for branch in row] for row in further], np.int64
        ),
        "branch_response_lengths": ragged(
            [[len(branch) for branch in row] for row in further], np.int64
        ),
    }


def _metrics(samples: Sequence[EpisodeSample]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    return {
        f"environment/{name}": torch.tensor(
            [sample.metrics.get(name, math.nan) for sample in samples], dtype=torch.float32
        )
        for name in names
    }
