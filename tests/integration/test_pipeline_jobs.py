"""A model that generates over stages, through the built-in trainer."""

import json

import pytest
from settings import LEARNS, SHORT

from hybridrl.systems.unequal_generation.generation_plan import (
    GenerationPlan,
    GenerationStage,
    format_generation_plan,
)

PLAN = GenerationPlan((GenerationStage(1, (8,)), GenerationStage(0, (16,))), 3, 2, kl=0.005)
USES = ["rollout=pipeline", "rollout.parallel.pp=2", "rollout.verify_weights=true"]
PLACES = {
    "on the trainer's devices": ["num_devices=2"],
    "on its own": ["placement=separation", "num_devices=3", "placement.generation_devices=2"],
}


@pytest.fixture
def plan(tmp_path):
    """A file."""

    def write(plan=PLAN):
        (tmp_path / "plan.json").write_text(format_generation_plan(plan))
        return f"rollout.plan={tmp_path / 'plan.json'}"

    return write


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize("place", PLACES)
def test_rounded_weights_follow_the_trainers_and_samples_are_weighed(run, plan, place):
    folder = run(*SHORT, "ray.address=auto", *USES, plan(), *PLACES[place])
    steps = [line for line in lines_of(folder) if "mismatch/k3" in line]
    assert len(steps) == 2
    for step in steps:
        assert 1e-7 < step["mismatch/k3"] < 0.01
        assert "policy/correction_weight" in step


@pytest.mark.ray
def test_whole_weights_over_stages_are_the_trainers(run):
    folder = run(*SHORT, "ray.address=auto", *USES, "num_devices=2", "model.dtype=float32")
    steps = [line for line in lines_of(folder) if "mismatch/k3" in line]
    assert all(step["mismatch/k3"] < 1e-9 for step in steps)
    assert all("policy/correction_weight" not in step for step in steps)


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.long
def test_it_learns(run, plan):
    folder = run(
        *SHORT, "ray.address=auto", *LEARNS, "trainer.steps=8", *USES, plan(), *PLACES["on its own"]
    )
    rewards = [line["reward/mean"] for line in lines_of(folder) if "reward/mean" in line]
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["rollout.parallel.pp=2"], "rollout.parallel.pp=2 needs rollout=pipeline"),
        (["rollout=pipeline", "rollout.parallel.tp=2"], "divides a model by layers"),
        (["rollout=pipeline", "rollout.quantization=int8"], "needs rollout=vllm"),
        (["rollout=pipeline", "rollout.plan=none.json"], "could not be read"),
        (
            ["rollout=pipeline", "rollout.parallel.pp=2", "model.tiny.layers=1", "executor=ray"],
            "has only 1 layers",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused(refusal, settings, sentence):
    assert sentence in refusal("executor=inline", "run.dry=true", *settings).replace("\n", " ")


@pytest.mark.parametrize(
    ("changed", "settings", "sentence"),
    [
        (PLAN, [], "has 2 stages"),
        (PLAN, ["rollout.parallel.pp=2", "rollout.max_kl=0.001"], "more than rollout.max_kl"),
        (GenerationPlan((GenerationStage(0, (8, 8, 8)),), 1), [], "is for a model of 3 layers"),
    ],
)
def test_plans_of_something_else_are_refused(refusal, plan, changed, settings, sentence):
    said = refusal("executor=inline", "run.dry=true", "rollout=pipeline", plan(changed), *settings)
    assert sentence in said.replace("\n", " ")
