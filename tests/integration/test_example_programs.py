"""The programs of examples/ that docs/drivers.md shows, tiny and in this process."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hybridrl import Job, load_config
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run import loop

pytestmark = pytest.mark.usefixtures("process_group")

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = {"hidden_size": 32, "layers": 1, "heads": 1}
SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=4", "rollout.max_tokens=3"),
    *("eval.prompts=8", "trainer.steps=3", "observe.show_every=1", "observe.samples_every=1"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
]


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(program, *overrides, **objects):
            named = [f"{program.partition('=')[0]}={EXAMPLES}/{program.partition('=')[2]}"]
            config = load_config([*SMALL, f"run.root={tmp_path}", *named, *overrides])
            return stack.enter_context(Job(config, **objects))

        yield make


def run(job):
    """The whole loop; what it wrote of each step."""
    with make_console(1, "test") as view:
        loop.RunLoop(job, view).run()
    lines = (job.directory.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def samples(job, step=1):
    return pq.read_table(job.directory.path / "samples" / f"step-{step:06d}.parquet").to_pydict()


def digits(response):
    """As many digits as there are in the answer, of three."""
    return sum(character.isdigit() for character in response) / 3


@pytest.mark.more
def test_distillation_brings_the_student_to_the_teacher(start, tmp_path):
    teacher = make_tiny_model(
        tmp_path / "teacher", build_character_tokenizer(CHARACTERS), seed=7, context=128, **SHAPE
    )
    steps = run(
        start(
            "trainer.name=distill.py:Distill",
            *(f"models.teacher.path={teacher}", "trainer.steps=12", "data.prompts_per_step=64"),
        )
    )
    divergence = [row["policy/kl"] for row in steps]
    assert np.mean(divergence[-3:]) < 0.7 * np.mean(divergence[:3])
    assert "memory/teacher/score_peak_gib" in steps[0]


def test_samples_of_a_program_that_asks_no_reward_are_shown_as_texts(start):
    job = start("trainer.name=distill.py:Distill", "trainer.steps=1")
    run(job)
    rows = samples(job)
    assert len(rows["response"]) == 32 and all(isinstance(text, str) for text in rows["response"])


@pytest.mark.more
def test_self_play_asks_sums_and_keeps_both_models(start):
    job = start("trainer.name=self_play.py:SelfPlay")
    steps = run(job)
    assert all(0 <= row["asker/pay"] <= 1 for row in steps)
    for folder in ("model", "asker"):
        assert (job.directory.path / folder / "model.safetensors").is_file()
    rows = samples(job)
    assert len(rows["prompt"]) == 8 * 4 * 4, "four asked of each prompt, and four answers to each"
    for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True):
        left, right = prompt.removesuffix("=").split("+")
        assert int(left) + int(right) == int(answer) and int(right) < 100
    groups = job.groups
    assert [groups[role].policy_version().get() for role in ("actor", "asker")] == [[3], [3]]


@pytest.mark.more
def test_the_curriculum_asks_what_is_right_half_of_the_time(start):
    job = start("data.sampler=curriculum.py:PassRate", "data.prompts_per_step=64", reward=digits)
    run(job)
    sampler = job.feed.deck.sampler
    asked = np.flatnonzero(sampler.rates != 0.5)
    assert 0 < len(asked) <= 3 * 64
    # Then all but a tenth of the rows turn out never to be right.
    number = len(sampler.rates)
    for _ in range(3):
        sampler.update(np.arange(number), np.zeros(number, np.float32))
    sampler.rates[: number // 10] = 0.5
    drawn = sampler.draw(100)
    assert (drawn < number // 10).mean() > 0.4, "as against a tenth of them by chance"
    state = sampler.state()
    expected = sampler.draw(5).tolist()
    sampler.load_state(state)
    assert sampler.draw(5).tolist() == expected


def test_the_curriculum_leaves_out_dropped_scores(start):
    sampler = start("data.sampler=curriculum.py:PassRate").feed.deck.sampler
    sampler.update(np.array([0, 0, 1]), np.array([1.0, np.nan, np.nan], np.float32))
    assert sampler.rates[0] > 0.5 and sampler.rates[1] == 0.5
