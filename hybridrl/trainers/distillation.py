"""On-policy distillation: a student learns from its own samples what teachers think of them.

Agarwal et al. 2024, arXiv:2306.13649. With `distillation.loss=sampled` a token's advantage is how
much likelier the teacher finds it than the student that chose it, against the mean of all tokens:
KL(student, teacher), estimated by the tokens that were sampled. Else the divergence itself is the
loss, by the tokens that the teacher finds likeliest. Rewards are for evaluations and metrics only.

A teacher may read more than the student (`distillation.teacher_prompt`), and may then be the policy
itself, as it began or as an average of what it was since (`distillation.teacher=self`): Shenfeld et
al. 2026 (SDFT), arXiv:2601.19897; SDPO, arXiv:2601.20802.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hybridrl.algorithms import (
    DistillationObjective,
    PolicyObjective,
    sum_over_chunks,
    whiten,
)
from hybridrl.batch.batch import TEACHER_CHUNKS, TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config, DistillationConfig
from hybridrl.controller import BatchRef
from hybridrl.errors import ConfigError
from hybridrl.trainers.objectives import build_policy_objective
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.teacher_prompt import TeacherPrompt
from hybridrl.trainers.teacher_role import build_teacher_role
from hybridrl.trainers.trainer import ROLLOUT_COLUMNS, SAMPLE_COLUMNS, UPDATE_COLUMNS, StepResult

TEACHER_ROLE = "teacher"
_TEACHER_WEIGHTS_FOLDER = "teacher_weights"
"""Folder of the run through which a teacher that is the policy takes its weights."""
_ADVANTAGE_INPUTS = ("ref_log_probs", "rollout_log_probs", "response_mask")


class Trainer(PolicyTrainer):
    """The trainer of on-policy distillation. The student is the role `actor`; `teacher` is a role
    with its own model, or there is one role `teacher_<value>` for each value of a column of the
    data."""

    USES = trainer_settings("distillation")
    UNREAD_REASONS: ClassVar[Mapping[str, str]] = {
        **PolicyTrainer.UNREAD_REASONS,
        "algorithm.turn_credit": "a student learns what a teacher thinks of tokens, and not from "
        "rewards",
    }

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        settings = config.distillation or DistillationConfig()
        if settings.teacher == "self":
            _check_self_teaching(config, settings)
            top_k = 0 if settings.loss == "sampled" else settings.top_k
            own = {TEACHER_ROLE: RoleSpec("reference", {"top_k": top_k})}
            return {**standard_roles("actor", "reward"), **own}
        names = [name for name in config.models if _is_teacher_role(name, settings.by)]
        if not names:
            raise ConfigError(
                "trainer.name=distillation needs a teacher: set models.teacher.path=<folder>"
                + (f", or models.teacher_<value of {settings.by}>.path." if settings.by else ".")
            )
        return {
            **standard_roles("actor", "reward"),
            **{name: build_teacher_role(config, name) for name in names},
        }

    @staticmethod
    def objective(config: Config) -> PolicyObjective | DistillationObjective:
        settings = config.distillation or DistillationConfig()
        if settings.loss != "sampled":
            return DistillationObjective(settings.loss)
        # The column of the reference is the teacher's, which the advantages are of already.
        return replace(build_policy_objective(config), kl_coefficient=0.0, kl_estimator=None)

    def prepare(self) -> None:
        super().prepare()
        self.settings = self.config.distillation or DistillationConfig()
        self.prompt = TeacherPrompt.read(self.settings.teacher_prompt)
        self.since_refresh = 0
        self._resume_notices: list[str] = []

    def step(self) -> StepResult:
        settings = self.settings
        if settings.refresh_every and self.since_refresh >= settings.refresh_every:
            self.refresh(settings.refresh_share)
        self.since_refresh += 1
        notices, self._resume_notices = self._resume_notices, []
        samples = self.samples()
        judged = self.judge(samples)
        scored = [join_columns(samples, judged)]
        rows, judged = self.unfold(samples, judged)
        batch = join_columns(rows, [*judged, self._taught(rows)])
        if settings.loss == "sampled":
            # Later updates of a step learn from samples of the policy before the first one.
            old = ["log_probs"] if self.config.actor.step_updates > 1 else []
            batch = join_columns(batch, self.score(rows) if old else [])
            inputs, makes = list(_ADVANTAGE_INPUTS), ["advantages"]
            if settings.alignment == "bytes":
                inputs, makes = [*inputs, TEACHER_CHUNKS], [*makes, "ref_log_probs"]
            batch |= batch.apply(teacher_advantages, inputs, makes=makes)
            updates = self.learn(batch, "ref_log_probs", *old)
            return StepResult(batch, updates, notices=notices, scored_samples=scored)
        needed = (*UPDATE_COLUMNS, *ROLLOUT_COLUMNS, TEACHER_IDS, TEACHER_LOG_PROBS)
        update = self.groups["actor"].update_actor
        self.steps += 1
        updates = [update(part.select(*needed)) for part in self.mini_batches(batch)]
        return StepResult(batch, updates, notices=notices, scored_samples=scored)

    def refresh(self, share: float) -> None:
        """Load a share of the policy's weights into the teacher, through a folder."""
        actor = self.groups["actor"]
        folder = str(
            Path(actor.run_directory or tempfile.mkdtemp()).absolute() / _TEACHER_WEIGHTS_FOLDER
        )
        actor.save_model(folder, "float32").get()
        self.groups[TEACHER_ROLE].load_weights(folder, share).get()
        self.since_refresh = 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "since_refresh": self.since_refresh}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        every = self.settings.refresh_every
        if every and state["since_refresh"] < state["steps"]:
            self.since_refresh = every
            self._resume_notices.append(
                "The teacher's weights are not part of a checkpoint: it goes on from those that "
                "the policy has now (distillation.refresh_every)."
            )

    def _taught(self, samples: BatchRef) -> BatchRef:
        """Return the teachers' columns, each teacher scoring the samples assigned to it."""
        settings, sampled = self.settings, self.settings.loss == "sampled"
        method = "compute_ref_log_prob" if sampled else "compute_top_log_probs"
        if self.prompt is not None and self.data is not None:  # a plan has no data
            read = samples.collect(self.prompt.columns).to_pylist()
            ids = [self.prompt.encoded(row, self.tokenizer) for row in read]
            samples = samples | self.put(Batch.from_columns({"prompt_ids": ids}))
        tokens = samples.select(*SAMPLE_COLUMNS)
        if settings.by is None:
            said: BatchRef = getattr(self.groups[TEACHER_ROLE], method)(tokens)
            return said
        values = samples.collect([settings.by])[settings.by]
        rows = group_rows_by_teacher(values, settings.by, list(self.groups))
        if not rows:  # every episode has failed; any teacher says nothing of none
            teacher = next(name for name in self.groups if _is_teacher_role(name, settings.by))
            rows = {teacher: np.arange(0)}
        parts = [
            getattr(self.groups[name], method)(tokens.take(found)) for name, found in rows.items()
        ]
        order = np.concatenate(list(rows.values()))
        return BatchRef.concat(parts).take(np.argsort(order))


def _check_self_teaching(config: Config, settings: DistillationConfig) -> None:
    """Refuse a policy as its own teacher where it has nothing to teach, or beside other
    teachers."""
    if settings.teacher_prompt is None:
        raise ConfigError(
            "distillation.teacher=self: a policy that reads what its student reads has nothing to "
            "teach. Set distillation.teacher_prompt=<a file with {prompt} and more>."
        )
    if settings.by is not None or any(
        _is_teacher_role(name, settings.by) for name in config.models
    ):
        raise ConfigError(
            "distillation.teacher=self: the policy is the teacher of all rows, so there are no "
            "others. Leave distillation.by and the teachers' models out."
        )
    if settings.alignment != "tokens":
        raise ConfigError(
            f"distillation.teacher=self with distillation.alignment={settings.alignment}: the "
            "policy has one tokenizer. Leave distillation.alignment out."
        )
    if config.actor.lora.rank is not None:
        raise ConfigError(
            f"distillation.teacher=self with actor.lora.rank={config.actor.lora.rank}: the teacher "
            "is a model of its own. Set distillation.teacher=model models.teacher.path=<the folder "
            "of model.path>."
        )


def teacher_advantages(batch: Batch) -> Batch:
    """Return `advantages` that descend KL(student, teacher), estimated on the sampled tokens. They
    depend on all rows.

    With `teacher_chunks` each token of a chunk has the gain of all of it, for the gradient of the
    chunk's log-probability is the sum of theirs, and `ref_log_probs` are returned in which its
    tokens share that gain; the others gain nothing.
    """
    teacher, student, mask = (batch.ragged(name) for name in _ADVANTAGE_INPUTS)
    gain, counts = teacher.values - student.values, mask.values.bool()
    found = {}
    if TEACHER_CHUNKS in batch.columns:
        chunks = batch.ragged(TEACHER_CHUNKS).values
        starts = mask.cu_seqlens[:-1].repeat_interleave(mask.lengths)
        gain, sizes = sum_over_chunks(gain, chunks, starts)
        found["ref_log_probs"] = mask._replace(values=student.values + gain / sizes)
        counts &= chunks >= 0
    return Batch.from_columns(found | {"advantages": mask._replace(values=whiten(gain, counts))})


def _is_teacher_role(name: str, by: str | None) -> bool:
    return name == TEACHER_ROLE or (by is not None and name.startswith(f"{TEACHER_ROLE}_"))


def group_rows_by_teacher(
    values: Sequence[object], by: str, groups: Sequence[str]
) -> dict[str, np.ndarray]:
    """Group rows by teacher: `teacher_<value>` of the row's value, else `teacher`.

    Raises:
        ConfigError: names a value without a teacher.
    """
    found: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        name = f"{TEACHER_ROLE}_{value}"
        name = name if name in groups else TEACHER_ROLE
        if name not in groups:
            raise ConfigError(
                f"distillation.by={by}: a row of the data has {by}={value}, for which there is no "
                f"teacher. Set models.{TEACHER_ROLE}_{value}.path, or models.{TEACHER_ROLE}.path "
                "for all rows without one."
            )
        found.setdefault(name, []).append(row)
    return {name: np.asarray(rows, dtype=np.int64) for name, rows in found.items()}
