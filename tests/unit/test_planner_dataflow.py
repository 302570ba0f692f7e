"""The plan counts the calls that a driver program makes, by running it without data."""

import pytest
from settings import configured

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.step.call_recorder import record_calls
from hybridrl.planner.step.step_calls import PlannedCall, compute_step_sizes
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers import load_roles

SIZES = ["data.prompts_per_step=4", "rollout.samples_per_prompt=2"]
KL = "algorithm.kl_coefficient=0.1"
PAIRS = ["data=jsonl", "data.path=pairs.jsonl", "model.path=llama-7b"]

SYNC, GENERATE, REWARD = ("actor", "sync", 8), ("actor", "generate", 8), ("reward", "score", 8)
OLD, REFERENCE = ("actor", "score", 8), ("reference", "score", 8)
LEARN = ("actor", "train", 8)
VALUES, FIT = ("critic", "score", 8), ("critic", "train", 8)
COST = ("cost", "score", 8)
COST_VALUES, COST_FIT = ("cost_critic", "score", 8), ("cost_critic", "train", 8)


def recorded(overrides):
    """The calls of a step, and the notice."""
    config = configured([*SIZES, *overrides])
    placement = resolve_placement(config, ClusterSpec.of_one_node("cpu", 2))
    calls, notice = record_calls(config, compute_step_sizes(config), placement, load_roles(config))
    return calls, notice


@pytest.mark.more
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [SYNC, GENERATE, REWARD, LEARN]),
        (["algorithm=dapo"], [SYNC, GENERATE, REWARD, LEARN]),
        (
            [KL, "actor.updates_per_step=2"],
            [SYNC, GENERATE, REWARD, REFERENCE, OLD, (*LEARN, 2)],
        ),
        (
            ["placement=separation"],
            [("generator", *SYNC[1:]), ("generator", *GENERATE[1:]), REWARD, LEARN],
        ),
        (
            ["algorithm=ppo", KL, "actor.updates_per_step=2", "critic.warmup_steps=3"],
            [SYNC, GENERATE, REWARD, REFERENCE, OLD, VALUES, (*FIT, 2), (*LEARN, 2)],
        ),
        (
            ["algorithm=ppo", "actor.updates_per_step=2", "actor.epochs=3", "critic.epochs=2"],
            [
                *(SYNC, GENERATE, REWARD, OLD, VALUES),
                *(("critic", "train", 16, 4), ("actor", "train", 24, 6)),
            ],
        ),
        (["actor.epochs=2"], [SYNC, GENERATE, REWARD, OLD, ("actor", "train", 16, 2)]),
        (
            ["algorithm=ppo", "actor.lora.rank=4", KL, "algorithm.ptx_coefficient=0.5"],
            [SYNC, GENERATE, REWARD, OLD, OLD, VALUES, FIT, LEARN, ("actor", "train", 4)],
        ),
        (
            ["algorithm=remax"],
            [SYNC, ("actor", "generate", 4), GENERATE, ("reward", "score", 4), REWARD, OLD, LEARN],
        ),
        (
            ["algorithm=safe_rlhf", "cost.function=length"],
            [SYNC, GENERATE, REWARD, COST, OLD, VALUES, COST_VALUES, FIT, COST_FIT, LEARN],
        ),
        (["algorithm=dpo", *PAIRS], [REFERENCE, LEARN]),
        (["algorithm=dpo", "preference.loss=orpo", *PAIRS], [LEARN]),
        (["algorithm=online_dpo", "preference.loss=simpo"], [SYNC, GENERATE, REWARD, LEARN]),
        (["algorithm=sft", *PAIRS, "actor.updates_per_step=2"], [("actor", "train", 4, 2)]),
        (["algorithm=reward_model", *PAIRS], [("reward_model", "train", 8)]),
        (
            ["algorithm=meta_reward_model", *PAIRS],
            [("reward_model", "score", 8), ("reward_model", "train", 8)],
        ),
        (["trainer.name=evaluate"], [GENERATE, REWARD]),
    ],
)
def test_a_plan_counts_the_calls_that_are_made(overrides, expected):
    calls, notice = recorded(overrides)
    assert calls == [PlannedCall(*call) for call in expected]
    assert not notice


OWN = """
from hybridrl.controller import DP, Worker, transfer
from hybridrl.batch.batch import Batch
from hybridrl.controller import BatchRef
from hybridrl.trainers.trainer import Trainer
from hybridrl.trainers.role_spec import RoleSpec, standard_roles

class Counts(Worker):
    @transfer(DP)
    def count_words(self, batch: Batch) -> Batch:
        return batch

    @transfer(DP)
    def remember(self, batch: Batch) -> int:
        return 0

class BestOfN(Trainer):
    @staticmethod
    def roles(config):
        return {
            **standard_roles("actor", "reward"),
            "teacher": RoleSpec("reference"),
            "counter": RoleSpec(Counts),
        }

    def step(self):
        actor = self.groups["actor"]
        prompts = self.next_batch()
        first = prompts.repeat(4)
        first |= actor.generate_sequences(first, self.sampling)
        first |= self.groups["reward"].compute_reward(first)
        second = prompts | actor.generate_sequences(prompts, self.sampling)
        both = BatchRef.concat([first.take([0, 4, 8, 12]), second])
        both |= self.groups["teacher"].compute_ref_log_prob(both)
        both |= self.groups["counter"].count_words(both)
        self.groups["counter"].remember(both)
        known = both.collect(["scores"])["scores"]
        half = both.take((known > 0.5).nonzero().flatten().numpy())
        return both, [actor.update_supervised(half)]

class Asks(BestOfN):
    def step(self):
        raise RuntimeError(self.data["prompt"])
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_program_of_the_users_is_planned_by_its_rows(own):
    calls, notice = recorded([f"trainer.name={own}:BestOfN"])
    assert not notice
    assert [(call.role, call.phase, call.samples) for call in calls] == [
        ("actor", "sync", 8),
        ("actor", "generate", 16),
        ("reward", "score", 16),
        ("actor", "generate", 4),
        ("teacher", "score", 8),
        ("counter", "score", 8),  # by what @transfer says; `remember` is no phase of a step
        ("actor", "train", 4),
    ]


def test_a_program_that_asks_for_data_is_planned_from_its_roles(own):
    calls, notice = recorded([f"trainer.name={own}:Asks"])
    assert "could not be planned by running it without data (TypeError" in notice
    found = {(call.role, call.phase) for call in calls}
    assert {("actor", "generate"), ("teacher", "score"), ("actor", "train")} <= found


def test_a_plan_counts_the_memory_of_a_teacher(own):
    sizes = ["rollout=transformers", "model.dtype=bfloat16", "model.path=llama-7b"]
    overrides = [*SIZES, *sizes, f"trainer.name={own}:BestOfN", "models.teacher.path=llama-13b"]

    def parts(overrides):
        with materialize_named_models(configured(overrides)) as config:
            plan = build_job_plan(config, parse_cluster("4xH100"))
        return plan.parameters, plan.fullest.fullest.parts["parameters"]

    parameters, resident = parts(overrides)
    assert 12.5e9 < parameters["teacher"] < 13.5e9 and "counter" not in parameters
    same = [o for o in overrides if not o.startswith("models.teacher")]
    parameters, less = parts(same)
    assert parameters["teacher"] == parameters["actor"]
    # Two bytes each, as a teacher lies in bfloat16, over four devices: 3.15 GB.
    assert resident - less == pytest.approx(2 * (13.0e9 - 6.7e9) / 4, rel=0.05)


def test_a_plan_counts_no_reference_where_the_loss_needs_none():
    def planned(loss):
        job = ["algorithm=dpo", f"preference.loss={loss}", "model.dtype=bfloat16", *PAIRS]
        with materialize_named_models(configured([*SIZES, *job])) as config:
            plan = build_job_plan(config, parse_cluster("4xH100"))
        return plan.parameters, plan.fullest.fullest.parts["parameters"]

    (compared, with_reference), (alone, without) = planned("sigmoid"), planned("simpo")
    assert compared.keys() - alone.keys() == {"reference"}
    # Two bytes each, as a reference lies in bfloat16, over four devices.
    assert with_reference - without == pytest.approx(2 * alone["actor"] / 4, rel=0.05)
