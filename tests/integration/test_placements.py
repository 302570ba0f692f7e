"""Where models live never changes what is learned: PPO with four models under every placement."""

import json
import time
from collections import deque
from dataclasses import replace

import pytest
from settings import TINY
from tiers import few_of

from hybridrl import load_config
from hybridrl.planner.step.graph_replay import replay_graph
from hybridrl.planner.what_if.recorded_graph import build_recorded_graph
from hybridrl.trainers import ppo
from hybridrl.trainers.objectives import build_policy_objective

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 5
PPO = [
    *TINY,
    *("algorithm=ppo", "algorithm.kl_coefficient=0.1", "rollout=transformers", "num_devices=2"),
    *("warmup.steps=0", "data.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("reward.function=length", "reward.options.length.limit=4", "reward.options.length.ramp=3"),
    *("actor.optimizer.learning_rate=1e-3", "actor.updates_per_step=2", "eval.prompts=8"),
]
EXPLICIT = [
    "placement=explicit",
    *("placement.roles.actor.devices=[0,1]", "placement.roles.critic.devices=[1]"),
    *("placement.roles.reference.devices=[0]", "placement.roles.reward.devices=[1,0]"),
]
PLACEMENTS = {
    "interleaving": ["placement=interleaving"],
    "explicit": EXPLICIT,
    "separation": ["placement=separation"],
    "auto": ["placement=auto", "placement.lengths=4+1.5..3"],
}


@pytest.fixture(scope="module")
def on_policy(hosts, tmp_path_factory):
    return run(hosts, tmp_path_factory.mktemp("flattening"))


@pytest.mark.parametrize("placement", few_of(PLACEMENTS, ["separation"]))
def test_every_placement_learns_the_same(placement, on_policy, hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that `auto` measures
    found, versions = run(hosts, tmp_path, *PLACEMENTS[placement])
    assert found == pytest.approx(on_policy[0], abs=1e-5)
    assert versions == on_policy[1]


@pytest.mark.more
def test_staleness_1_is_one_step_off(on_policy, hosts, tmp_path):
    """The reference generates, with one set of weights, before the updates of the step before."""
    wanted, versions = run(hosts, tmp_path / "reference", ahead=OneStepOff)
    assert wanted != pytest.approx(on_policy[0], abs=1e-5)
    assert [sorted(set(v)) for v in versions] == [[0], [0], [2], [4], [6]]
    found = run(hosts, tmp_path / "separated", "placement=separation", "placement.staleness=1")
    assert found[0] == pytest.approx(wanted, abs=1e-5)
    assert found[1] == versions


@pytest.mark.more
def test_older_weights_come_from_the_object_store(hosts, tmp_path):
    _, versions = run(hosts, tmp_path, "placement=separation", "placement.staleness=2")
    assert [sorted(set(v)) for v in versions] == [[0], [0], [0], [2], [4]]


class OffPolicy(ppo.Trainer):
    """Takes the samples for those of an older policy, as separation does."""

    @staticmethod
    def objective(config):
        return replace(build_policy_objective(config), off_policy=True)


def run(hosts, folder, *overrides, ahead=None):
    """Losses of the policy and the critic in five steps, and the versions that made the samples."""
    config = load_config([*PPO, *overrides, f"run.directory={folder / 'run'}"])
    with hosts.job(config, trainer=None if ahead is None else OffPolicy) as job:
        trainer = job.make_trainer()
        if ahead is not None:
            trainer.groups = {**job.groups, "actor": ahead(job)}
            trainer.next_batch = trainer.groups["actor"].next_batch
        if config.placement.strategy == "explicit":
            place_is_what_was_written(job)
        if config.placement.strategy == "auto":
            all_was_chosen_and_kept(job)
        job.executor.take_records()  # of what was built
        begin = time.time()
        steps = [trainer.step() for _ in range(STEPS)]
        losses = [
            update[name]
            for _, handles in steps
            for update in (handle.get() for handle in handles)
            for name in ("loss", "critic_loss")
            if name in update
        ]
        records, end = job.executor.take_records(), time.time()
        if ahead is None:  # else the first samples were called for before
            is_replayed(records, begin, end)
        versions = [batch.collect(["policy_version"])["policy_version"] for batch, _ in steps]
    assert len(losses) == 2 * 2 * STEPS and len(set(losses)) > STEPS
    return losses, [v.tolist() for v in versions]


def place_is_what_was_written(job):
    written = json.loads((job.directory.path / "placement.json").read_text())
    assert written["roles"]["critic"] == {
        "devices": [1],
        "parallel": {},
        "co_residents": ["actor", "reward"],
    }


def all_was_chosen_and_kept(job):
    """Roles on devices. Who resumes searches again."""
    written = json.loads((job.directory.path / "placement.json").read_text())
    assert written["strategy"] == "auto" and written["settings"] == {}
    assert written["roles"].keys() == {"actor", "critic", "reference", "reward"} == set(job.groups)
    assert job.placement_notice.startswith("placement=auto chose")
    assert "with samples of 4+1.5..3 tokens." in job.placement_notice
    assert "strategy: auto" in (job.directory.path / "config.yaml").read_text()
    assert job.plan.fits() and job.plan.times.step > 0


def is_replayed(records, begin, end):
    """What each call read and where it ran is known, so steps can be replayed of which some
    overlap."""
    assert replay_graph(build_recorded_graph(records, begin, end)).makespan > 0
    calls = {record.call: record for record in records}
    trained = [record for record in records if record.method == "update_actor"]
    assert trained and all(
        {"generate_sequences", "take_sequences"} & {calls[n].method for n in one.reads}
        for one in trained
    )
    assert all([span.phase for span in one.spans] == ["train"] for one in trained)


class OneStepOff:
    """An actor whose samples were generated before the last step's updates were called."""

    def __init__(self, job):
        self.job, self.actor = job, job.groups["actor"]
        self.prompts, self.samples = deque(), deque()
        self.generate()

    def __getattr__(self, name):
        return getattr(self.actor, name)

    def generate(self):
        prompts = self.job.next_batch()
        repeated = prompts.repeat(self.job.config.rollout.samples_per_prompt)
        self.prompts.append(prompts)
        self.samples.append(self.actor.generate_sequences(repeated, self.job.sampling))

    def next_batch(self):
        self.generate()
        return self.prompts.popleft()

    def generate_sequences(self, batch, sampling):
        return self.samples.popleft()
