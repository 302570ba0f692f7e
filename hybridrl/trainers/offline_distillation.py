"""Offline distillation: a student learns a teacher's distribution at every position of given
responses, not only the written token.

Hinton et al. 2015, arXiv:1503.02531; for sequences Kim and Rush 2016, arXiv:1606.07947; GKD's case
without samples of the student (lambda = 0), Agarwal et al. 2024, arXiv:2306.13649. Where there is
no teacher but only what it wrote, `algorithm=sft` learns that.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.algorithms import DistillationObjective
from hybridrl.batch.batch import TEACHER_IDS, TEACHER_LOG_PROBS
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config, DistillationConfig
from hybridrl.errors import ConfigError
from hybridrl.trainers import sft
from hybridrl.trainers.distillation import TEACHER_ROLE
from hybridrl.trainers.role_spec import LEARNER_ROLE, RoleSpec
from hybridrl.trainers.teacher_role import build_teacher_role
from hybridrl.trainers.trainer import SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult


class Trainer(sft.Trainer):
    """The trainer of distillation from given responses, which evaluates as `sft` does."""

    USES = trainer_settings("offline_distillation")

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        settings = config.distillation or DistillationConfig()
        _check_settings(config, settings)
        return {
            "actor": LEARNER_ROLE,
            TEACHER_ROLE: build_teacher_role(config, TEACHER_ROLE),
        }

    @staticmethod
    def objective(config: Config) -> DistillationObjective:
        return DistillationObjective((config.distillation or DistillationConfig()).loss)

    def step(self) -> StepResult:
        batch, update = self.next_batch(), self.groups["actor"].update_actor
        batch |= self.groups[TEACHER_ROLE].compute_top_log_probs(batch.select(*SAMPLE_COLUMNS))
        needed = (*UPDATE_COLUMNS, TEACHER_IDS, TEACHER_LOG_PROBS)
        return StepResult(
            batch, [update(part.select(*needed)) for part in self.mini_batches(batch)]
        )


def _check_settings(config: Config, settings: DistillationConfig) -> None:
    """Refuse settings that need samples of the student, or more columns than prompt and
    response."""
    begin = "trainer.name=offline_distillation"
    if not (config.models.get(TEACHER_ROLE) or {}).keys() & {"path", "url"}:
        raise ConfigError(
            f"{begin} needs a teacher: set models.teacher.path=<folder>. Where there are only "
            "texts that it wrote, algorithm=sft learns from them."
        )
    if settings.loss == "sampled":
        raise ConfigError(
            f"{begin} with distillation.loss=sampled: nothing is sampled. Set "
            "distillation.loss=forward (or reverse)."
        )
    for name, value in (("by", settings.by), ("teacher_prompt", settings.teacher_prompt)):
        if value is not None:
            raise ConfigError(
                f"{begin} with distillation.{name}={value}: the teacher reads what the student "
                "reads. Leave it out, or use algorithm=distillation."
            )
    if settings.teacher == "self":
        raise ConfigError(
            f"{begin} with distillation.teacher=self: it would learn what it thinks already. Leave "
            "it out."
        )
