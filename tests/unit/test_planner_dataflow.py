"""What the planner believes that a step calls is what the driver programs call."""

import pytest
from settings import configured

from hybridrl.config.placement_checks import check_placement
from hybridrl.core.cluster import Cluster
from hybridrl.planner.dataflow import calls_of, sizes_of
from hybridrl.rollout import Sampling
from hybridrl.trainers import load_trainer

SIZES = ["data.prompts_per_step=4", "rollout.samples_per_prompt=2"]
KL = "algorithm.kl_coefficient=0.1"


class Table:
    """Stands for any `BatchRef`."""

    def __or__(self, other):
        return self

    def split(self, parts, *_):
        return [self] * parts

    def __getattr__(self, name):
        return lambda *_, **__: self


class Update:
    def get(self):
        return {"kl": 0.1}


class Group:
    """Notes what it is called for."""

    def __init__(self, role, calls):
        self.role, self.calls = role, calls

    def __getattr__(self, method):
        phase = {"generate": "generate", "compute": "score", "update": "train"}[
            method.split("_")[0]
        ]

        def call(*_, **__):
            self.calls.append((self.role, phase))
            return Update() if phase == "train" else Table()

        return call


def called(config):
    """Role and phase of every call of a step, one for each update."""
    calls = []
    trainer_class = load_trainer(config.trainer.name)
    groups = {role: Group(role, calls) for role in trainer_class.roles(config)}
    trainer = trainer_class(config, groups, Sampling(8), Table, lambda _: Table())
    trainer.step()
    return calls


def believed(config):
    placement = check_placement(config, Cluster.of_one_node("cpu", 2))
    return [
        (call.role, call.phase)
        for call in calls_of(config, sizes_of(config), placement)
        if call.phase != "sync"
        for _ in range(call.updates)
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [KL, "actor.updates_per_step=2"],
        ["algorithm=ppo", KL, "actor.updates_per_step=2"],
        ["algorithm=ppo", "algorithm.ptx_coefficient=0.5"],
        ["algorithm=remax", KL],
        ["algorithm=safe_rlhf", KL, "cost.function=length"],
        ["algorithm=dpo", "data=jsonl", "data.path=pairs.jsonl", "model.path=llama-7b"],
        ["algorithm=sft", "data=jsonl", "data.path=examples.jsonl", "model.path=llama-7b"],
        ["algorithm=reward_model", "data=jsonl", "data.path=pairs.jsonl", "model.path=llama-7b"],
    ],
)
def test_a_plan_counts_the_calls_that_are_made(overrides):
    config = configured([*SIZES, *overrides])
    assert sorted(believed(config)) == sorted(called(config))
