"""Driver programs of the user's own: roles, losses, samplers and Python objects, with tiny real
workers in this process."""

import contextlib
import json

import numpy as np
import pytest
import torch

from hybridrl import main
from hybridrl.algorithms import PreferenceObjective
from hybridrl.batch.batch import Batch
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run import loop
from hybridrl.run.warmup import warm_up
from hybridrl.trainers import grpo
from hybridrl.trainers.role_spec import RoleSpec, standard_roles

pytestmark = pytest.mark.usefixtures("process_group")

SHAPE = {"hidden_size": 32, "layers": 1, "heads": 1}
SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "trainer.steps=2"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
    *("observe.samples_every=0", "observe.show_every=0"),
]
OWN = '''
from functools import partial

import numpy as np

from hybridrl.batch.batch import Batch
from hybridrl.trainers import grpo
from hybridrl.trainers.trainer import UPDATE_COLUMNS, SAMPLE_COLUMNS, Trainer
from hybridrl.trainers.objectives import build_preference_objective
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.update_columns import loss_weights

def towards(batch):
    """The teacher's log-probability of each token is its advantage."""
    return Batch.from_columns({"advantages": batch.ragged("ref_log_probs")})

class Distill(Trainer):
    """On-policy distillation."""

    @staticmethod
    def roles(config):
        return {**standard_roles("actor", "reward"), "teacher": RoleSpec("reference")}

    def step(self):
        samples = self.next_batch()
        samples |= self.groups["actor"].generate_sequences(samples, self.sampling)
        scored = samples.select(*SAMPLE_COLUMNS)
        batch = samples | self.groups["teacher"].compute_ref_log_prob(scored)
        batch |= batch.apply(towards, ["ref_log_probs"])
        return batch, [self.groups["actor"].update_actor(p) for p in self.mini_batches(batch)]

def best_and_worst(batch):
    order = np.argsort(batch["scores"].numpy().reshape(-1, 2), axis=1)[:, ::-1]
    return Batch.from_columns({"order": order.reshape(-1).copy()})

class OnlineDPO(Trainer):
    USES = Trainer.USES | {"preference", "preference.beta", "preference.loss"}

    @staticmethod
    def roles(config):
        return standard_roles("actor", "reference", "reward")

    @staticmethod
    def objective(config):
        return build_preference_objective(config)

    def step(self):
        samples = self.next_batch().repeat(2)
        samples |= self.groups["actor"].generate_sequences(samples, self.sampling)
        scored = samples | self.groups["reward"].compute_reward(samples)
        pair = scored.apply(best_and_worst, ["scores"]).collect(["order"])["order"].numpy()
        batch = scored.take(pair + 2 * (np.arange(len(pair)) // 2))
        batch |= self.groups["reference"].compute_ref_log_prob(batch.select(*SAMPLE_COLUMNS))
        weigh = partial(loss_weights, mode="seq-mean-token-mean")
        batch |= batch.apply(weigh, ["response_mask"])
        update = self.groups["actor"].update_preference
        return batch, [update(batch.select(*UPDATE_COLUMNS, "ref_log_probs"))]

class Pair(grpo.Trainer):
    """Two policies learn, each from samples of its own."""

    @staticmethod
    def roles(config):
        return {**standard_roles("actor", "reward"), "solver": RoleSpec("actor", saves_as="solver")}

    def step(self):
        batch, handles = super().step()
        groups = self.groups
        self.groups = {**groups, "actor": groups["solver"]}
        try:
            return batch, [*handles, *super().step().updates]
        finally:
            self.groups = groups

class Hardest:
    """Draws the rows that scored worst so far."""

    def __init__(self, rows, seed):
        self.scores = {row: -1.0 - row / 1000 for row in range(len(rows))}
        self.drawn, self.told = [], []

    def draw(self, number):
        rows = sorted(self.scores, key=self.scores.get)[:number]
        self.drawn.append(rows)
        return rows

    def update(self, rows, scores):
        self.told.append((rows.tolist(), scores.tolist()))
        for row in set(rows.tolist()):
            self.scores[row] = float(scores[rows == row].mean())

    def state(self):
        return {"scores": {str(row): score for row, score in self.scores.items()}}

    def load_state(self, state):
        self.scores = {int(row): score for row, score in state["scores"].items()}

class Short(Hardest):
    def draw(self, number):
        return [0]

class Far(Hardest):
    def draw(self, number):
        return np.arange(number) + 10**6

class NoUpdate:
    def draw(self, number):
        return range(number)
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path}/own.py:{name}"


@pytest.fixture
def model(tmp_path):
    """A model of another seed than that of the jobs."""
    tokenizer = build_character_tokenizer(CHARACTERS)
    return str(make_tiny_model(tmp_path / "other", tokenizer, seed=7, context=128, **SHAPE))


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(*overrides, **objects):
            config = load_config([*SMALL, f"run.root={tmp_path}", *overrides])
            return stack.enter_context(Job(config, **objects))

        yield make


def run(job):
    """The whole loop, without a console."""
    with make_console(1, "test") as view:
        loop.RunLoop(job, view).run()


def log_probs(group, batch, method="compute_log_prob"):
    found = getattr(group, method)(batch.select("prompt_ids", "response_ids")).collect()
    return next(iter(found.ragged(name).values for name in found.columns if "log_probs" in name))


def sampled(job):
    prompts = job.next_batch()
    return prompts | job.groups["actor"].generate_sequences(prompts, job.sampling)


def test_a_teacher_with_a_model_of_its_own(start, own, model):
    job = start(f"trainer.name={own('Distill')}", f"models.teacher.path={model}")
    assert set(job.groups) == {"actor", "reward", "teacher"}
    assert job.plan.parameters["teacher"] == job.plan.parameters["actor"]
    batch = sampled(job)
    student = log_probs(job.groups["actor"], batch)
    teacher = log_probs(job.groups["teacher"], batch, "compute_ref_log_prob")
    assert (student - teacher).abs().max() > 1e-3
    run(job)
    assert job.groups["actor"].policy_version().get() == [2]


def test_a_teacher_without_one_begins_as_the_actor_after_warm_up(start, own):
    job = start(f"trainer.name={own('Distill')}", "warmup.steps=2")
    warm_up(job)
    batch = sampled(job)
    teacher = log_probs(job.groups["teacher"], batch, "compute_ref_log_prob")
    torch.testing.assert_close(log_probs(job.groups["actor"], batch), teacher)


def test_a_model_of_another_vocabulary_is_refused(start, own, tmp_path):
    other = make_tiny_model(
        tmp_path / "abc", build_character_tokenizer("abc"), seed=0, context=128, **SHAPE
    )
    with pytest.raises(ConfigError, match=r"models\.teacher\.path=.* has another vocabulary"):
        start(f"trainer.name={own('Distill')}", f"models.teacher.path={other}")


def test_online_dpo_learns_from_its_own_loss(start, own):
    job = start("algorithm=dpo", f"trainer.name={own('OnlineDPO')}", "warmup.steps=0")
    trainer = job.make_trainer()
    assert isinstance(trainer.objective(job.config), PreferenceObjective)
    _, (update,) = trainer.step()
    metrics = update.get()
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-5), "the policy is the reference"
    assert "pair_accuracy" in metrics


def test_a_second_actor_is_warmed_trained_evaluated_and_saved(start, own):
    job = start(f"trainer.name={own('Pair')}", "warmup.steps=2")
    warm_up(job)
    batch = sampled(job)
    actor, solver = job.groups["actor"], job.groups["solver"]
    torch.testing.assert_close(log_probs(actor, batch), log_probs(solver, batch))
    prompts = job.next_batch()
    samples = prompts | solver.generate_sequences(prompts, job.sampling)
    torch.testing.assert_close(  # it samples from what it took
        samples.collect(["rollout_log_probs"])["rollout_log_probs"].values,
        log_probs(solver, samples),
        rtol=1e-4,
        atol=1e-4,
    )
    run(job)
    assert (job.directory.path / "model" / "config.json").is_file()
    assert (job.directory.path / "solver" / "model.safetensors").is_file()
    figures = job.make_trainer().evaluate(job.put(job.held_out))
    assert set(figures) == {"accuracy", "solver/accuracy"}


def test_a_sampler_draws_and_learns_scores(start, own):
    job = start(f"data.sampler={own('Hardest')}")
    run(job)
    sampler = job.feed.deck.sampler
    assert len(sampler.drawn) == len(sampler.told) == 2
    for drawn, (rows, scores) in zip(sampler.drawn, sampler.told, strict=True):
        assert rows == [row for row in drawn for _ in range(2)] and len(scores) == 8
    assert not job.feed._row_of, "nothing is kept of prompts that have been scored"
    state = job.feed.state()
    job.feed.load_state({**state, "sampler": {"scores": {"3": 0.0}}})
    assert sampler.scores == {3: 0.0}


def test_a_sampler_learns_of_prompts_that_dynamic_sampling_leaves_out(start, own):
    job = start(
        *("algorithm=dapo", "algorithm.max_refills=1", f"data.sampler={own('Hardest')}"),
        "trainer.steps=1",
    )
    run(job)
    told = [row for rows, _ in job.feed.deck.sampler.told for row in rows]
    assert set(told) == {row for rows in job.feed.deck.sampler.drawn for row in rows}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Short", r"draw\(4\) must return 4 row numbers"),
        ("Far", r"returned row numbers from 1000000 to 1000003, but the data has rows 0 to"),
        ("NoUpdate", "has no method `update`"),
    ],
)
def test_a_wrong_sampler_is_a_sentence(start, own, name, words):
    with pytest.raises(ConfigError, match=rf"data\.sampler=.*{words}"):
        start(f"data.sampler={own(name)}").next_batch()


class InProgram(grpo.Trainer):
    """A driver program that stands in no file that a setting could name."""

    @staticmethod
    def roles(config):
        return {**standard_roles("actor"), "reward": RoleSpec("reward")}


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(1, 9)] * 4


@pytest.mark.parametrize("kind", ["rows", "dataset", "batch"])
def test_a_job_takes_python_objects(start, model, kind):
    if kind == "dataset":
        data = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    else:
        data = ROWS
    if kind == "batch":
        columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
        data = Batch.from_columns(columns)
    job = start("data=jsonl", f"model.path={model}", trainer=InProgram, data=data)
    assert isinstance(job.make_trainer(), InProgram)
    assert len(job.training) + len(job.held_out) == len(ROWS)
    assert {"prompt", "answer", "level"} <= set(job.training.columns)
    assert (job.directory.path / "data.parquet").is_file()
    assert "InProgram" in (job.directory.path / "config.yaml").read_text()
    run(job)


def says_even(prompt, response, **row):
    """Even digits are better."""
    return float(response[:1] in "02468")


def is_short(response):
    return -float(len(response))


def test_rewards_as_python_objects(start):
    job = start("observe.samples_every=1", reward=[says_even, is_short])
    run(job)
    assert "says_even" in (job.directory.path / "config.yaml").read_text()
    batch, _ = job.make_trainer().step()
    rows = batch.collect(["scores", "response"]).to_pylist()
    assert [row["scores"] for row in rows] == [
        says_even("", row["response"]) + is_short(row["response"]) for row in rows
    ]


def test_a_whole_run_takes_python_objects_and_tries_them_first(tmp_path, model, capsys):
    settings = [*SMALL, f"run.root={tmp_path}", "run.name=mine", f"model.path={model}"]
    objects = {"reward": is_short, "data": ROWS, "trainer": InProgram}
    assert main.run(load_config([*settings, "run.dry=true"]), **objects) == {}
    assert "All checks passed" in capsys.readouterr().err and not (tmp_path / "latest").exists()

    summary = main.run(load_config(settings), **objects)
    assert summary["steps"] == 2 and summary["reward_last"] < 0
    assert (tmp_path / "latest" / "model" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="height"):
        main.run(load_config(settings), reward=lambda response, height: 0.0, data=ROWS)


@pytest.mark.parametrize("program", ["ppo", "safe_rlhf"])
def test_the_state_of_a_program_is_plain_and_goes_on(start, program):
    kl = ["algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.5"]
    settings = [f"algorithm={program}", *kl, "algorithm.kl_horizon=20"]
    settings += ["reward.function=numeric"]
    job = start(*settings)
    first = job.make_trainer()
    for _ in range(2):
        first.step()
    state = json.loads(json.dumps({"trainer": first.state(), "feed": job.feed.state()}))
    again = job.make_trainer()
    assert again.state() != first.state()
    again.load_state(state["trainer"])
    assert again.state() == first.state() and again.steps == 2
    assert again.kl.coefficient == first.kl.coefficient != 0.1
    expected = job.next_batch().collect()
    job.feed.load_state(state["feed"])
    found = job.next_batch().collect()
    assert found["group_id"].tolist() == expected["group_id"].tolist()
    assert found.to_pylist() == expected.to_pylist()


def test_a_weight_of_the_kl_of_ones_own_is_asked_told_of_updates_and_saved(start):
    class Halving:
        coefficient, seen = 0.2, ()

        def update(self):
            self.coefficient /= 2
            return self.coefficient

        def watch(self, handle):
            self.seen += (handle.get()["kl"],)
            return handle

        def state(self):
            return {"coefficient": self.coefficient}

        def load_state(self, state):
            self.coefficient = state["coefficient"]

    kl = ["algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"]
    trainer = start("algorithm=ppo", *kl).make_trainer()
    trainer.kl = Halving()
    weights = []
    for _ in range(2):
        weights.append(trainer.step().metrics["policy/kl_coefficient"])
    assert weights == [0.1, 0.05] and len(trainer.kl.seen) == 2
    assert trainer.state()["kl"] == {"coefficient": 0.05}


@pytest.mark.parametrize("data", [[], [1, 2], "rows.jsonl", [{"prompt": 1}, {"prompt": "x"}]])
def test_data_that_is_none_is_a_sentence(start, model, data):
    with pytest.raises(ConfigError, match=r"Job\(data=\.\.\.\)"):
        start("data=jsonl", f"model.path={model}", data=data)


def test_a_trainer_that_is_none_is_a_sentence(start):
    with pytest.raises(ConfigError, match=r"is no subclass of hybridrl\.trainers\.trainer"):
        start(trainer=dict)


def test_roles_of_a_program_without_a_trainer(start, model):
    roles = {**standard_roles("actor"), "teacher": RoleSpec("reference")}
    job = start(f"models.teacher.path={model}", roles=roles)
    assert set(job.groups) == {"actor", "teacher"}


def test_a_job_closes_what_it_opened(tmp_path, monkeypatch):
    closed = []

    class Writer:
        def write(self, step, metrics):
            pass

        def close(self, state):
            closed.append(state)

    monkeypatch.setattr("hybridrl.job.job.open_metric_writers", lambda *_: [Writer(), Writer()])

    def fails(self):
        raise RuntimeError("no executor")

    monkeypatch.setattr(Job, "_make_executor", fails)
    with pytest.raises(RuntimeError, match="no executor"):
        Job(load_config([*SMALL, f"run.root={tmp_path}"]))
    assert closed == ["failed", "failed"]


def test_closing_goes_on_after_an_exception(start):
    job, closed = start(), []
    job._opened.callback(closed.append, "opened before")

    def fails():
        raise RuntimeError("would not close")

    job._opened.callback(fails)
    with pytest.raises(RuntimeError, match="would not close"):
        job.close()
    assert closed == ["opened before"]


def test_a_program_that_fails_saves_the_model_as_it_is(tmp_path):
    class Fails(grpo.Trainer):
        def step(self):
            if self.steps == 1:
                raise ZeroDivisionError("a mistake of mine")
            return super().step()

    config = load_config([*SMALL, f"run.root={tmp_path}"])
    with pytest.raises(ZeroDivisionError, match="of mine"), Job(config, trainer=Fails) as job:
        run(job)
    assert (job.directory.path / "model" / "model.safetensors").exists()
    assert json.loads((job.directory.path / "summary.json").read_text())["steps"] == 1
