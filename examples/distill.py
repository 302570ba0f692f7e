"""On-policy distillation: a student learns from its own samples what a teacher thinks of them.

    python -m hybridrl.main trainer.name=examples/distill.py:Distill models.teacher.path=<folder>

Agarwal et al. 2024, arXiv:2306.13649. The teacher is a role of this program: a second model, of
the student's tokenizer, that only scores. It is in the plan, on the devices, and in the timeline
like every other. A token's advantage is how much likelier the teacher finds it than the student
that chose it, against the mean of all tokens; so an update descends the divergence of the student
from the teacher, which `policy/kl` shows. Rewards are for evaluations only.
"""

from collections.abc import Mapping

from hybridrl import Batch
from hybridrl.algorithms import whiten
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers.policy_trainer import PolicyTrainer
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.trainer import SAMPLE_COLUMNS

READ = ["ref_log_probs", "rollout_log_probs", "response_mask"]


def towards(batch: Batch) -> Batch:
    teacher, student, mask = (batch.ragged(name) for name in READ)
    gain = whiten(teacher.values - student.values, mask.values.bool())
    return Batch.from_columns({"advantages": mask._replace(values=gain)})


class Distill(PolicyTrainer):
    """The student is the role `actor`."""

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return {**standard_roles("actor", "reward"), "teacher": RoleSpec("reference")}

    def step(self) -> tuple[BatchRef, list[Handle]]:
        batch = self.samples()
        batch |= self.groups["teacher"].compute_ref_log_prob(batch.select(*SAMPLE_COLUMNS))
        batch |= batch.apply(towards, READ, makes=["advantages"])
        return batch, self.learn(batch, "ref_log_probs")
