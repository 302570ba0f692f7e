"""A policy that is its own teacher, because it reads more as one: tiny and in this process."""

import contextlib
import json

import pytest
import torch

from hybridrl import Batch, Job, load_config
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run import loop
from hybridrl.trainers.teacher_prompt import TeacherPrompt

pytestmark = pytest.mark.usefixtures("process_group")

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=16", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "trainer.steps=4", "observe.show_every=0", "observe.samples_every=0"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
    *("algorithm=distillation", "distillation.teacher=self", "distillation.top_k=12"),
]


@pytest.fixture
def start(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{answer}{answer}{prompt}")
    with contextlib.ExitStack() as stack:

        def make(*overrides):
            told = f"distillation.teacher_prompt={prompt}"
            config = load_config([*SMALL, f"run.root={tmp_path}", told, *overrides])
            return stack.enter_context(Job(config))

        yield make


def run(job):
    with make_console(1, "test") as view:
        loop.RunLoop(job, view).run()
    lines = (job.directory.path / "metrics.jsonl").read_text().splitlines()
    return [row["policy/loss"] for row in map(json.loads, lines) if "policy/loss" in row]


def said(job, group):
    """Log-probabilities that a model gives to what is always the same."""
    data = job.training.take(range(4)).select(["prompt_ids"])
    ids = torch.ones(4, 2, dtype=torch.int64)
    found = job.groups[group].compute_ref_log_prob(
        job.put(data.with_columns({"response_ids": ids}))
    )
    return found.collect()["ref_log_probs"].values


def test_the_teacher_says_what_it_thinks_after_its_own_prompt(start):
    job = start()
    trainer = job.make_trainer()
    batch, handles = trainer.step()
    rows = batch.collect(["prompt", "answer", "response_ids", "teacher_log_probs"]).to_pylist()
    shown = [row["answer"] * 2 + row["prompt"] for row in rows]
    asked = {
        "prompt_ids": [job.tokenizer(text)["input_ids"] for text in shown],
        "response_ids": [row["response_ids"] for row in rows],
    }
    found = job.groups["teacher"].compute_top_log_probs(job.put(Batch.from_columns(asked)))
    expected = found.collect()["teacher_log_probs"].values
    heard = torch.tensor([x for row in rows for x in row["teacher_log_probs"]])
    torch.testing.assert_close(heard, expected)
    assert handles[0].get()["loss"] > 1e-5, "it is not what the student thinks"


@pytest.mark.more
def test_a_teacher_that_is_refreshed_is_the_policy_or_on_its_way_there(start):
    began = said(start(), "teacher")
    found = {}
    for share in (1.0, 0.25):
        job = start("distillation.refresh_every=2", f"distillation.refresh_share={share}")
        run(job)
        assert job.make_trainer().state()["since_refresh"] == 0
        found[share] = said(job, "teacher")
    whole, part = ((found[share] - began).norm() for share in (1.0, 0.25))
    assert whole > 1e-3 and 0.1 * whole < part < 0.6 * whole


def test_braces_of_data_are_braces_and_chats_begin_once(tmp_path):
    class Tokenizer:
        bos_token = "<s>"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [*([0] if add_special_tokens else []), *map(ord, text)]}

    path = tmp_path / "prompt.txt"
    path.write_text("{answer}{prompt}")
    prompt = TeacherPrompt.read(str(path))
    row = {"prompt": "{answer}", "answer": "4"}
    assert prompt.encoded(row, Tokenizer()) == [0, *map(ord, "4{answer}")]
    assert prompt.encoded(row | {"answer": "<s>"}, Tokenizer())[0] == ord("<")
    assert sorted(prompt.columns) == ["answer", "prompt"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["distillation.teacher_prompt=null"], "has nothing to teach"),
        (["distillation.by=source"], "no others"),
        (["models.teacher.path=some/model"], "no others"),
        (["actor.lora.rank=4"], "a model of its own"),
        (["distillation.teacher_prompt=nowhere.txt"], "could not be read"),
    ],
)
def test_a_teacher_that_could_teach_nothing_is_refused(start, overrides, words):
    with pytest.raises(ConfigError, match=words):
        run(start(*overrides))


@pytest.mark.more
def test_a_student_learns_from_given_responses_what_a_teacher_would_have_said(tmp_path):
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    student, teacher = (
        make_tiny_model(
            tmp_path / f"model-{seed}",
            build_character_tokenizer(CHARACTERS),
            **{"seed": seed, "hidden_size": 32, "layers": 1, "heads": 1, "context": 2048},
        )
        for seed in (1, 2)
    )
    settings = [
        *SMALL[:4],  # of devices
        *(
            f"model.path={student}",
            "algorithm=offline_distillation",
            "data=jsonl",
            f"run.root={tmp_path}",
        ),
        *(f"data.path={tmp_path}/rows.jsonl", "data.prompts_per_step=16", "trainer.steps=10"),
        *(f"models.teacher.path={teacher}", "distillation.top_k=15", "eval.prompts=4"),
        "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0}",
    ]
    with Job(load_config(settings)) as job:
        losses = run(job)
    assert losses[-1] < 0.3 * losses[0]
    with pytest.raises(ConfigError, match="nothing is sampled"):
        run(Job(load_config([*settings, "distillation.loss=sampled"])))
