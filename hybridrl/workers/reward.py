"""RewardWorker: turns responses into text and scores them with the user's functions."""

from __future__ import annotations

import math

import torch

from hybridrl.config.schema import RewardConfig
from hybridrl.controller import THREE_D_ALL_MICRO_DP, Context, Worker, transfer
from hybridrl.core.batch import Batch
from hybridrl.models import load_tokenizer
from hybridrl.rewards import RewardPool, function_list


class RewardWorker(Worker):
    """Scores the rows of its rank in child processes, so that no function can stop the job.

    Args:
        config: Functions, weights, time-outs.
        tokenizer: Folder or hub name.
    """

    def __init__(self, context: Context, config: RewardConfig, tokenizer: str) -> None:
        super().__init__(context)
        self._correct_at = config.correct_at
        self._pool = RewardPool(
            function_list(config.function),
            config.weights,
            processes=config.processes,
            timeout_s=config.timeout_s,
            on_error=config.on_error,
            error_value=config.error_value,
        )
        self._tokenizer = load_tokenizer(tokenizer)
        self._pool.start()

    @transfer(THREE_D_ALL_MICRO_DP)
    def compute_reward(self, batch: Batch) -> Batch:
        """`scores` (NaN: dropped), the `response` as text, and a column for each function."""
        with self.phase("score"):
            ids = [row.tolist() for row in batch["response_ids"].rows()]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            hidden = [name for name in batch.columns if not _is_for_users(name)]
            rows = batch.table.drop_columns(hidden).to_pylist()
            for row, text in zip(rows, texts, strict=True):
                row["response"] = text
            found = self._pool.score(rows)
        counted = [score for score in found.scores if not math.isnan(score)]
        self.report(
            scored=len(counted),
            reward_sum=sum(counted),
            reward_square_sum=sum(score * score for score in counted),
            correct=sum(score >= self._correct_at for score in counted),
            reward_failures=found.failures,
            reward_timeouts=found.timeouts,
        )
        scores = torch.tensor(found.scores, dtype=torch.float32)
        return Batch.from_columns({"response": texts, "scores": scores, **found.columns})

    def close(self) -> None:
        self._pool.close()


def _is_for_users(column: str) -> bool:
    """Token columns and the trainer's own are no business of a reward function."""
    return not column.endswith(("_ids", "_mask", "_log_probs")) and column not in (
        "group_id",
        "policy_version",
    )
