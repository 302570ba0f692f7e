"""RewardWorker: scores samples by the user's functions, by a judge and by a reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from hybridrl.config.schema import ActorConfig, RewardConfig, RolloutConfig
from hybridrl.controller import THREE_D, Context, transfer
from hybridrl.core.batch import Batch, is_of_data
from hybridrl.engine.train import TrainEngine
from hybridrl.errors import RewardError
from hybridrl.models import load_tokenizer
from hybridrl.rewards import RewardPool, function_list
from hybridrl.rewards.loading import in_words_of, said_of
from hybridrl.workers.engines import ModelSource, scalar_engine
from hybridrl.workers.judge import Judge
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.reward_model import sample_scores

COLUMN = {"reward": "scores", "cost": "costs"}
"""Column of what is reinforced, and of what is to stay below a limit."""

SCORE = replace(THREE_D, balance="rows")
"""Rows split over ranks in blocks, which is how generation left them: texts need not move."""


def _may_read(column: str) -> bool:
    return column in ("prompt_ids", "episode_rewards") or is_of_data(column)


class RewardWorker(ModelWorker):
    """Scores the rows of its rank: by functions, in child processes so that none can stop the job,
    by a judge and by a model, if there are any.

    A model that is cut over ranks is computed by all of them; functions and the judge are asked by
    the one rank that answers for those rows.

    Args:
        config: Functions, weights, time-outs.
        tokenizer: Folder or hub name.
        model: The reward model.
        model_config: Its micro-batch budget and offload.
        judge: The model that grades in words.
        rollout: How the judge generates.
        kind: What the score is: a reward or a cost.
        job: A name that no other job on this machine has.
    """

    def __init__(
        self,
        context: Context,
        config: RewardConfig,
        tokenizer: str,
        model: ModelSource | None,
        model_config: ActorConfig,
        judge: ModelSource | None,
        rollout: RolloutConfig,
        kind: Literal["reward", "cost"],
        job: str,
    ) -> None:
        super().__init__(context)
        self._config = config
        self._kind = kind
        self._engine = None
        self._answers = True
        if model is not None:
            self._engine = scalar_engine(context, model, model_config, "after", trains=False)
            mesh = self._engine.mesh.mesh
            places = [mesh.coordinates(rank) for rank in range(mesh.size)]
            self._answers = SCORE.speaks(context.rank, places)
        functions = function_list(config.function)
        self._pool = None
        if functions and self._answers:
            with said_of(kind):
                self._pool = RewardPool(
                    functions,
                    config.weights,
                    options=config.options,
                    processes=config.processes,
                    timeout_s=config.timeout_s,
                    on_error=config.on_error,
                    error_value=config.error_value,
                )
        self._tokenizer = load_tokenizer(tokenizer)
        self._judge = None
        if judge is not None:
            self._judge = Judge(context, judge, config.judge, rollout, job)
        if self._pool is not None:
            with said_of(kind):
                self._pool.start()

    @property
    def model_engine(self) -> TrainEngine | None:
        return self._engine

    @property
    def takes_memory(self) -> bool:
        return self._engine is not None or self._judge is not None

    @transfer(
        SCORE,
        reads=("response_ids",),
        may_read=_may_read,
        makes=lambda built: ["response", COLUMN[built["kind"]]],
        may_make=lambda built: [f"{built['kind']}/*"],
        streams=True,
    )
    def compute_reward(self, batch: Batch) -> Batch:
        """`scores`, or `costs` (NaN: dropped), the `response` as text, and a column for each
        function and the model."""
        with self.phase("score"), said_of(self._kind):
            scores, columns = torch.zeros(len(batch), dtype=torch.float32), {}
            # First: all ranks of a cut model take part in it, also should a function fail on one.
            by_model = None if self._engine is None else sample_scores(self._engine, batch)
            ids = [row.tolist() for row in batch["response_ids"].rows()]
            # (transformers decodes no rows to one text)
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
            if not self._answers:
                return Batch.from_columns({"response": texts, COLUMN[self._kind]: scores})
            rows = batch.rows_for_users()
            for row, text in zip(rows, texts, strict=True):
                row["response"] = text
            if self._pool is not None:
                scores, columns = self._by_functions(rows)
            if self._judge is not None:
                columns[f"{self._kind}/judge"] = self._graded(rows)
                scores = scores + self._config.judge.weight * columns[f"{self._kind}/judge"]
            if by_model is not None:
                columns[f"{self._kind}/model"] = by_model
                scores = scores + self._config.model_weight * by_model
            if self._kind == "reward" and "episode_rewards" in batch.columns:
                scores = scores + batch["episode_rewards"]
        self._report(scores)
        self._report_columns(columns)
        return Batch.from_columns({"response": texts, COLUMN[self._kind]: scores, **columns})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._judge is not None:
            self._judge.close()

    def _graded(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        """The judge's grades; one that it did not give is treated as `on_error` says."""
        grades = self._judge.grade(rows)  # type: ignore[union-attr]
        missing = torch.isnan(grades)
        self.report(**{f"{self._kind}_ungraded": float(missing.sum())})
        if missing.any() and self._config.on_error == "fail":
            raise RewardError(
                f"The judge gave {int(missing.sum())} of {len(rows)} answers no grade that "
                f"`reward.judge.pattern` ({self._config.judge.pattern}) finds. Mend the pattern or "
                "the template, or set `reward.on_error` to `drop` or `value`."
            )
        if self._config.on_error == "value":
            grades = grades.nan_to_num(self._config.error_value)
        return grades

    def _by_functions(self, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, Any]]:
        found = self._pool.score(rows, self.progress)  # type: ignore[union-attr]
        self.report(
            **{
                f"{self._kind}_failures": found.failures,
                f"{self._kind}_timeouts": found.timeouts,
            }
        )
        if found.first_failure is not None:
            self.record.notices.append(in_words_of(self._kind, found.first_failure))
        columns = {
            name.replace("reward/", f"{self._kind}/", 1): column
            for name, column in found.columns.items()
        }
        return torch.tensor(found.scores, dtype=torch.float32), columns

    def _report(self, scores: torch.Tensor) -> None:
        counted = [score for score in scores.tolist() if not math.isnan(score)]
        self.report(
            **{
                f"{self._kind}_count": len(counted),
                f"{self._kind}_dropped": len(scores) - len(counted),
                f"{self._kind}_sum": sum(counted),
                f"{self._kind}_square_sum": sum(score * score for score in counted),
                f"{self._kind}_correct": sum(s >= self._config.correct_at for s in counted),
            }
        )

    def _report_columns(self, columns: Mapping[str, Any]) -> None:
        """For mean and spread of each function, of the judge and the model, and of further
        numbers."""
        for name, column in columns.items():
            known = [value for value in map(float, column) if not math.isnan(value)]
            self.report(
                **{
                    f"{name}_sum": sum(known),
                    f"{name}_square_sum": sum(value * value for value in known),
                    f"{name}_count": len(known),
                }
            )
