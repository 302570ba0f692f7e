"""Jobs that learn from environments: episodes of several branches, turns, failures."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from pyarrow import parquet
from watching import finished, watched

from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.errors import ConfigError, RewardError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run.step_metrics import compute_step_metrics
from hybridrl.run.watchers.unscored_samples import UnscoredSamplesWatcher

pytestmark = pytest.mark.usefixtures("process_group")
PROMPTS, SAMPLES = 3, 4
ENVIRONMENT = '''
async def play(row, model, fails=()):
    """Two turns of one conversation, and one of another; the first letters are what counts."""
    if row["kind"] in fails:
        raise ValueError("no such move")
    messages = [{"role": "user", "content": row["question"]}]
    rewards = []
    for _ in range(2):
        messages.append(await model.chat(messages, max_tokens=4))
        messages.append({"role": "user", "content": "go on"})
        rewards.append(float(messages[-2]["content"][:1] < "M"))
    answer = await model.chat([{"role": "user", "content": "what was it?"}], max_tokens=3)
    rewards.append(float(answer["content"][:1] < "M"))
    return {"reward": sum(rewards), "turn_rewards": rewards, "metrics": {"kind": len(row["kind"])}}
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that chats, rows and the environment."""
    folder = tmp_path_factory.mktemp("environment")
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    make_tiny_model(folder / "model", tokenizer, seed=3, hidden_size=64, layers=1, heads=2,
                    context=256)  # fmt: skip
    rows = [{"question": f"{n} + {n} = ?", "kind": "ab"[n % 2]} for n in range(12)]
    lines = [json.dumps({**row, "prompt": row["question"]}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "play.py").write_text(ENVIRONMENT)
    return folder


def settings_of(place, *overrides):
    return [
        *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
        *(f"model.path={place}/model", "data=jsonl", f"data.path={place}/rows.jsonl"),
        *(
            "data.max_prompt_tokens=120",
            "data.answer_column=null",
            f"data.prompts_per_step={PROMPTS}",
            "eval.prompts=2",
        ),
        *(f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_tokens=8", "reward.function=[]"),
        *("actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",),
        f"environment.name={place}/play.py:play",
        *overrides,
    ]


@pytest.fixture
def start(tmp_path, place):
    """Starts a job of these settings; gives the job and its driver program."""
    with contextlib.ExitStack() as stack:

        def make(*overrides):
            config = load_config([f"run.root={tmp_path}", *settings_of(place, *overrides)])
            job = stack.enter_context(Job(config))
            return job, job.make_trainer()

        yield make


def step(job, trainer):
    batch, handles = trainer.step()
    updates = [handle.get() for handle in handles]
    assert all(math.isfinite(value) for update in updates for value in update.values())
    records = job.executor.take_records()
    return batch.collect(), updates, compute_step_metrics(records, updates, 1.0), records


def test_each_branch_is_a_row_and_all_share_the_credit_of_their_episode(start):
    job, trainer = start("actor.updates_per_step=2", "algorithm.kl_coefficient=0.1")
    rows, updates, metrics, _ = step(job, trainer)
    count = PROMPTS * SAMPLES
    assert metrics["episode/turns"] == 3 and metrics["environment/kind"] == 1
    assert metrics["episode/branches"] * count == len(rows) >= 2 * count
    assert sorted(set(rows["episode"].tolist())) == list(range(count)) and len(updates) == 2
    assert metrics["environment/error"] == 0 and "response/turns" not in metrics
    # Every row is what the engine continued, and was sampled as it is scored.
    mask = rows["response_mask"].values.bool()
    torch.testing.assert_close(
        *(rows[name].values[mask] for name in ("log_probs", "rollout_log_probs")),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert mask[rows["response_mask"].cu_seqlens[1:] - 1].all()
    by_episode = {}
    for row in rows.to_pylist():
        sampled = zip(row["advantages"], row["response_mask"], strict=True)
        given = by_episode.setdefault(row["episode"], (row["group_id"], row["scores"], set()))
        assert given[:2] == (row["group_id"], row["scores"]) and row["scores"] == sum(
            row["turn_rewards"]
        )
        given[2].update(advantage for advantage, is_sampled in sampled if is_sampled)
    assert all(len(advantages) == 1 for _, _, advantages in by_episode.values())
    for group in range(PROMPTS):
        known = [e for e in by_episode.values() if e[0] == group]
        assert len(known) == SAMPLES
        assert sum(next(iter(e[2])) for e in known) == pytest.approx(0, abs=1e-4)
    assert job.groups["actor"].policy_version().get() == [2]


def test_turns_have_credit_of_their_own(start):
    job, trainer = start("algorithm.turn_credit=turn")
    rows, *_ = step(job, trainer)
    turns = {}
    for row in rows.to_pylist():
        for advantage, turn, sampled in zip(
            row["advantages"], row["turn"], row["response_mask"], strict=True
        ):
            if sampled:
                turns.setdefault((row["group_id"], turn), {}).setdefault(row["episode"], set())
                turns[row["group_id"], turn][row["episode"]].add(advantage)
    assert {turn for _, turn in turns} == {0, 1, 2}
    for samples in turns.values():
        assert all(len(advantages) == 1 for advantages in samples.values())
        total = sum(next(iter(advantages)) for advantages in samples.values())
        assert total == pytest.approx(0, abs=1e-4)


@pytest.mark.more
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=ppo", "algorithm.turn_credit=turn"],
        ["algorithm=remax", "algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"],
        ["algorithm=dapo", "algorithm.max_refills=1"],
        ["algorithm=safe_rlhf", "cost.function={place}/cost.py:cost"],
    ],
    ids=["ppo", "remax", "dapo", "safe_rlhf"],
)
def test_every_program_learns_from_episodes(start, place, overrides):
    (place / "cost.py").write_text("def cost(response, **row):\n    return float(len(response))\n")
    job, trainer = start(*(text.format(place=place) for text in overrides))
    for _ in range(2):
        rows, _, metrics, _ = step(job, trainer)
        assert len(rows) and metrics["episode/branches"] >= 2


def test_what_failed_costs_nothing_and_is_said(start):
    job, trainer = start("environment.options={fails: [a]}", "data.prompts_per_step=6")
    rows, _, metrics, records = step(job, trainer)
    said = [notice for record in records for notice in record.notices]
    failed = int(metrics["environment/error"])
    assert 0 < failed < 6 * SAMPLES and metrics["reward/dropped"] == failed
    assert "no such move" in said[0] and len(said) == 1
    assert len(set(rows["episode"].tolist())) == 6 * SAMPLES - failed
    assert not rows["scores"].isnan().any()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_where_all_fail_there_are_no_rows_and_the_reason_is_said(start, algorithm):
    job, trainer = start(f"algorithm={algorithm}", "environment.options={fails: [a, b]}")
    rows, _, metrics, records = step(job, trainer)
    assert len(rows) == 0 and metrics["environment/error"] == PROMPTS * SAMPLES
    with pytest.raises(
        RewardError, match=r"(?s)none of the 12 episodes could be played.*no such move"
    ):
        watched(UnscoredSamplesWatcher(), finished(1, records))


def test_a_single_sample_is_an_episode_of_its_own(start):
    one = ["data.prompts_per_step=1", "rollout.samples_per_prompt=1"]
    job, trainer = start(*one, "algorithm.advantage=reinforce_plus_plus")
    rows, _, metrics, _ = step(job, trainer)
    assert set(rows["episode"].tolist()) == {0} and len(rows) == metrics["episode/branches"] >= 2


def samples_of(directory, step):
    table = parquet.read_table(directory / "samples" / f"step-{step:06d}.parquet")
    return table.select(["group_id", "episode", "branch", "response", "scores"]).to_pylist()


@pytest.mark.more
def test_a_run_that_goes_on_samples_what_it_would_have_sampled(tmp_path, place):
    def run(name, *overrides):
        from hybridrl import main

        further = ("eval.every=1", "checkpoint.every=1", "observe.samples_every=1")
        settings = settings_of(place, f"run.directory={tmp_path / name}", *further, *overrides)
        main.run(load_config(settings))
        return tmp_path / name

    whole = run("whole", "trainer.steps=2")
    run("half", "trainer.steps=1")
    half = run("half", "trainer.steps=2", "resume=auto")
    assert samples_of(half, 2) == samples_of(whole, 2) != samples_of(whole, 1)


RANKS = {
    "four replicas": ["num_devices=4", "ray.address=auto"],
    "a generator, weights in flight": [
        *("num_devices=2", "placement=separation"),
        *("placement.staleness=1", "placement.in_flight=true"),
    ],
    "one engine of two ranks": [
        *("rollout.engine=vllm", "num_devices=2", "rollout.parallel.tp=2"),
        "rollout.kv_cache_gib=0.05",
    ],
}


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("four replicas", marks=pytest.mark.long),
        "a generator, weights in flight",
        pytest.param("one engine of two ranks", marks=pytest.mark.vllm),
    ],
)
def test_ranks_play_environments(run, place, ranks):
    settings = settings_of(place, *RANKS[ranks], "executor=ray", "trainer.steps=2", "eval.every=0")
    directory = run(*settings, "observe.samples_every=1")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "episode/turns" in row]
    assert len(steps) == 2
    for number, row in enumerate(steps, 1):
        assert row["episode/turns"] == 3 and row["environment/error"] == 0
        assert "in flight" in ranks or row["mismatch/k3"] < 1e-6
        known = samples_of(directory, number)
        assert len({sample["episode"] for sample in known}) == PROMPTS * SAMPLES


def test_wrong_settings_are_sentences(place):
    from hybridrl.checks.check_list import check

    for overrides, words in [
        (["algorithm=remax", "algorithm.turn_credit=turn"], "the greedy response of ReMax"),
        (["environment.name=null", "algorithm.turn_credit=turn"], "samples have one turn"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check(load_config(settings_of(place, *overrides)))


OPTIONS = '''
async def play(row, model):
    """How many more tokens a prompt has by the option of the job, and by that of a request."""
    messages = [{"role": "user", "content": row["question"]}]
    read = {}
    for name, options in {"job": {}, "request": {"effort": 9}, "none": {"effort": 0}}.items():
        body = {"model": model.name, "messages": messages, "max_tokens": 1}
        body["chat_template_kwargs"] = options
        usage = (await model.request("/chat/completions", body))["usage"]
        read[name] = usage["prompt_tokens"]
    metrics = {name: read[name] - read["none"] for name in ("job", "request")}
    return {"reward": 0.0, "metrics": metrics}
'''


@pytest.mark.more
def test_options_of_the_chat_template_reach_the_endpoint_of_a_job(start, place, tmp_path):
    (tmp_path / "play.py").write_text(OPTIONS)
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    tokenizer.chat_template = "{{ 'x' * (effort | default(1)) }}" + tokenizer.chat_template
    make_tiny_model(tmp_path / "model", tokenizer, seed=3, hidden_size=64, layers=1, heads=2,
                    context=256)  # fmt: skip
    job, trainer = start(
        f"environment.name={tmp_path}/play.py:play",
        f"model.path={tmp_path}/model",
        "data.chat_template_options.effort=4",
    )
    *_, metrics, _ = step(job, trainer)
    assert (metrics["environment/job"], metrics["environment/request"]) == (4, 9)
