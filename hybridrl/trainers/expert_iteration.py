"""Expert iteration: supervised learning of the policy's own best responses.

With `expert.choose=right` each different right answer counts once (rejection sampling): Zelikman et
al. 2022 (STaR), arXiv:2203.14465; Singh et al. 2023 (ReST-EM), arXiv:2312.06585. An answer that
comes often counts no more than one that comes rarely, so prompts that are easy already do not drown
the others. With `expert.choose=best` it is the best-scored answer to each prompt (best of n): Dong
et al. 2023 (RAFT), arXiv:2304.06767. A step learns from the answers of `expert.steps_kept` steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from hybridrl.batch.batch import OUTCOMES, Batch, is_right, outcomes_of
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config, ExpertIterationConfig
from hybridrl.controller import BatchRef
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult

KEPT_COLUMNS = (*SAMPLE_COLUMNS, "response_mask")


class Trainer(PolicyTrainer):
    """The trainer of expert iteration. Responses stay with the workers that made them; the driver
    receives one score and one text for each."""

    USES = trainer_settings("expert_iteration")

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return standard_roles("actor", "reward")

    def prepare(self) -> None:
        super().prepare()
        self.settings = self.config.expert or ExpertIterationConfig()
        self.pool: deque[BatchRef] = deque(maxlen=self.settings.steps_kept)

    def step(self) -> StepResult:
        samples = self.samples()
        samples = join_columns(samples, self.judge(samples))
        columns = ["group_id", "scores"]
        if self.settings.choose == "right":
            seen = samples.collect([*columns, OUTCOMES, "response"], partial=True)
            right = is_right(outcomes_of(seen), self.config.reward.correct_at).tolist()
            rows = select_distinct_correct(seen.to_pylist(), right, self.settings.most_per_prompt)
        else:
            rows = select_best_per_prompt(samples.collect(columns).to_pylist())
        actor = self.groups["actor"]
        kept = samples.take(rows).apply(
            _keep_answers, KEPT_COLUMNS, makes=KEPT_COLUMNS, on=actor, together=1
        )
        self.pool.append(kept)
        parts = self.mini_batches(BatchRef.concat(list(self.pool)))
        updates = [actor.update_supervised(part.select(*UPDATE_COLUMNS)) for part in parts]
        return StepResult(samples, updates, {"expert/answers": float(len(rows))})

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "pool": [kept.collect(KEPT_COLUMNS).to_pylist() for kept in self.pool],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.pool.extend(self.put(_build_batch(rows)) for rows in state["pool"])


def _keep_answers(batch: Batch) -> Batch:
    """Return the rows as a table of their own, so that nothing else of the step stays in memory."""
    return batch


def select_distinct_correct(
    rows: Sequence[Mapping[str, Any]], right: Sequence[bool], most: int | None = None
) -> list[int]:
    """Return, in order, the row of the first sample with each distinct correct response to each
    prompt.

    Args:
        rows: `group_id` and `response` of each sample.
        right: Whether each is right.
        most: So many of a prompt at most; None: any number.
    """
    found: dict[int, dict[str, int]] = {}
    for number, row in enumerate(rows):
        answers = found.setdefault(row["group_id"], {})
        if right[number] and (most is None or len(answers) < most):
            answers.setdefault(row["response"], number)
    return sorted(number for answers in found.values() for number in answers.values())


def select_best_per_prompt(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return, in order, the row of the best-scored sample of each prompt, the first of equals.
    Dropped samples (NaN) are left out.

    Args:
        rows: `group_id` and `scores` of each sample.
    """
    best: dict[int, int] = {}
    for number, row in enumerate(rows):
        score, group = row["scores"], row["group_id"]
        if score == score and (group not in best or score > rows[best[group]]["scores"]):
            best[group] = number
    return sorted(best.values())


def _build_batch(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """The rows that a checkpoint has of a step: none at all where nothing was right."""
    kind = pa.large_list(pa.int64())
    return Batch.from_columns({n: pa.array([row[n] for row in rows], kind) for n in KEPT_COLUMNS})
