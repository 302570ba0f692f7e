"""On-policy distillation: a student learns from its own samples what teachers think of them.

Agarwal et al. 2024, arXiv:2306.13649. With `distillation.loss=sampled` a token's advantage is how
much likelier the teacher finds it than the student that chose it, against the mean of all tokens:
KL(student, teacher), estimated by the tokens that were sampled. Else the divergence itself is the
loss, by the tokens that the teacher finds likeliest. Rewards are for evaluations and metrics only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hybridrl.algorithms import Distillation, PolicyObjective, whiten
from hybridrl.config.schema import Config, DistillationConfig
from hybridrl.controller import BatchRef, Handle
from hybridrl.core.batch import TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.errors import ConfigError
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE, SAMPLED
from hybridrl.trainers.objectives import policy_objective
from hybridrl.trainers.policy import PolicyTrainer, joined
from hybridrl.trainers.role_spec import RoleSpec, standard

TEACHER = "teacher"
READ = ("ref_log_probs", "rollout_log_probs", "response_mask")


class Trainer(PolicyTrainer):
    """The driver program of distillation. The student is the role `actor`; `teacher` is a role with
    a model of its own, or there is one for each value of a column of the data, `teacher_<value>`.
    """

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        settings = config.distillation or DistillationConfig()
        top_k = 0 if settings.loss == "sampled" else settings.top_k
        names = [name for name in config.models if _is_teacher(name, settings.by)]
        if not names:
            raise ConfigError(
                "trainer.name=distillation needs a teacher: set models.teacher.path=<folder>"
                + (f", or models.teacher_<value of {settings.by}>.path." if settings.by else ".")
            )
        for name in names:
            if not (config.models[name] or {}).get("path"):
                raise ConfigError(
                    f"models.{name}.path is not set: a teacher has a model of its own, with the "
                    "tokenizer of the student."
                )
        return {
            **standard("actor", "reward"),
            **{name: RoleSpec("reference", {"top_k": top_k}) for name in names},
        }

    @staticmethod
    def objective(config: Config) -> PolicyObjective | Distillation:
        settings = config.distillation or DistillationConfig()
        return (
            policy_objective(config) if settings.loss == "sampled" else Distillation(settings.loss)
        )

    def step(self) -> tuple[BatchRef, list[Handle]]:
        settings = self.config.distillation or DistillationConfig()
        prompts = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        samples = prompts | self.groups["actor"].generate_sequences(prompts, self.sampling)
        batch = joined(samples, [*self.judge(samples), self._taught(prompts, samples)])
        if settings.loss == "sampled":
            batch |= batch.apply(towards_teacher, list(READ), makes=["advantages"])
            return batch, self.learn(batch, "ref_log_probs")
        needed = (*LEARNED_FROM, *SAMPLED, TEACHER_IDS, TEACHER_LOG_PROBS)
        update = self.groups["actor"].update_actor
        return batch, [update(part.select(*needed)) for part in self.mini_batches(batch)]

    def _taught(self, prompts: BatchRef, samples: BatchRef) -> BatchRef:
        """What the teachers say, each of the samples that are its own."""
        settings = self.config.distillation or DistillationConfig()
        sampled = settings.loss == "sampled"
        method = "compute_ref_log_prob" if sampled else "compute_top_log_probs"
        tokens = samples.select(*SAMPLE)
        if settings.by is None:
            said: BatchRef = getattr(self.groups[TEACHER], method)(tokens)
            return said
        values = prompts.collect([settings.by])[settings.by]
        rows = _rows_by_teacher(values, settings.by, list(self.groups))
        parts = [
            getattr(self.groups[name], method)(tokens.take(found)) for name, found in rows.items()
        ]
        order = np.concatenate(list(rows.values()))
        return BatchRef.concat(parts).take(np.argsort(order))


def towards_teacher(batch: Batch) -> Batch:
    """`advantages` that descend KL(student, teacher), of the tokens that were sampled. They depend
    on all rows."""
    teacher, student, mask = (batch.ragged(name) for name in READ)
    gain = whiten(teacher.values - student.values, mask.values.bool())
    return Batch.from_columns({"advantages": mask._replace(values=gain)})


def _is_teacher(name: str, by: str | None) -> bool:
    return name == TEACHER or (by is not None and name.startswith(f"{TEACHER}_"))


def _rows_by_teacher(
    values: Sequence[object], by: str, groups: Sequence[str]
) -> dict[str, np.ndarray]:
    """The rows of each teacher: of its value, or of all values that have none where there is a
    `teacher`.

    Raises:
        ConfigError: names a value without a teacher.
    """
    found: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        name = f"{TEACHER}_{value}"
        name = name if name in groups else TEACHER
        if name not in groups:
            raise ConfigError(
                f"distillation.by={by}: a row of the data has {by}={value}, for which there is no "
                f"teacher. Set models.{TEACHER}_{value}.path, or models.{TEACHER}.path for all "
                "rows without one."
            )
        found.setdefault(name, []).append(row)
    return {name: np.asarray(rows, dtype=np.int64) for name, rows in found.items()}
