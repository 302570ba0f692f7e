"""A run that is interrupted and resumed is the run that was not: real workers in this process."""

import datetime
import json
import os
import shutil
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.composition.load import load_run_config
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.errors import ConfigError, DataError, StorageError
from hybridrl.job.config_resolution import load_config, with_date
from hybridrl.job.job import Job
from hybridrl.models.lora import add_adapters
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run import loop
from hybridrl.trainers import grpo

pytestmark = pytest.mark.usefixtures("process_group")

# What a machine took for it; and weights go to the generator again after a resume.
MEASURED = ("time/", "share/", "throughput/", "memory/", "sync/", "checkpoint/")
SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=2"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "eval.every=3", "checkpoint.every=3", "observe.samples_every=1"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 2, schedule: constant}",
    "observe.show_every=0",
]
OWN = '''
def odd(prompt, response, **row):
    """Differs between most answers."""
    return float(sum(map(ord, response)) % 7)

class Hardest:
    """Draws the rows that scored worst so far."""

    def __init__(self, rows):
        self.scores = {row: -1.0 - row / 1000 for row in range(len(rows))}

    def draw(self, number):
        return sorted(self.scores, key=self.scores.get)[:number]

    def update(self, rows, scores):
        for row in set(rows.tolist()):
            self.scores[row] = float(scores[rows == row].mean())

    def state(self):
        return {"scores": {str(row): score for row, score in self.scores.items()}}

    def load_state(self, state):
        self.scores = {int(row): score for row, score in state["scores"].items()}

class Unsaveable(Hardest):
    def state(self):
        return {"scores": self.scores}
'''
KL = ["algorithm.kl_coefficient=0.1"]
ADAPTS = [*KL, "algorithm.kl_in_reward=true", "algorithm.kl_target=0.5", "algorithm.kl_horizon=20"]
PROGRAMS = {
    "grpo, a reference": KL,
    "ppo, a critic": [
        *("algorithm=ppo", *ADAPTS, "actor.updates_per_step=2"),
        *("actor.epochs=2", "actor.max_kl=1e-2", "critic.epochs=1"),
    ],
    "safe_rlhf, a multiplier": ["algorithm=safe_rlhf", "cost.limit=0.1"],
    "sft, saved while nothing goes on": [
        *("algorithm=sft", "warmup.steps=0", "checkpoint.asynchronous=false"),
    ],
    "dpo": ["algorithm=dpo", "warmup.steps=0"],
    "reward_model": ["algorithm=reward_model", "warmup.steps=0"],
    "meta_reward_model": ["algorithm=meta_reward_model", "warmup.steps=0"],
    "dapo": ["algorithm=dapo", "algorithm.max_refills=2"],
    "muon and int8, warmed up by adamw": [
        *("actor.optimizer.name=muon", "actor.optimizer.moments=int8"),
    ],
    "shared prompts": ["actor.share_prefixes=true", "actor.updates_per_step=2"],
    "a sampler": ["data.sampler={file}:Hardest"],
    "partial rollouts": ["rollout.partial=0.5", "rollout.max_tokens=12"],
    "adapters": [*KL, "actor.lora={rank: 2, alpha: 4}", "model.path={model}", "warmup.steps=0"],
    "adapters around 4 bits": [
        *(*KL, "actor.lora={rank: 2, alpha: 4, base_format: nf4}"),
        *("model.path={model}", "warmup.steps=0"),
    ],
}
AS_OTHERS = ("sft, saved while nothing goes on", "reward_model", "dapo")
"""Programs whose state is like another's: left to `make test-long`."""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer, shape = (
        build_character_tokenizer(CHARACTERS),
        {"hidden_size": 32, "layers": 1, "heads": 1},
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(make_tiny_model(folder, tokenizer, seed=7, context=128, **shape))


@pytest.fixture
def run(tmp_path, own, model, monkeypatch):
    """Runs a whole job in a folder of this name; gives the folder and what the console said."""

    def adapt(model, settings, seed):  # with other values in a run that is resumed
        add_adapters(model, settings, seed + len(resumed))

    resumed = []
    monkeypatch.setattr("hybridrl.workers.training_engines.add_adapters", adapt)

    def finish(name, *overrides, **objects):
        given = [f"run.directory={tmp_path / name}", f"reward.function={own}:odd"]
        return resume(*SMALL, *given, *overrides, **objects)

    def resume(*overrides, **objects):
        said = []
        named = [o.replace("{file}", str(own)).replace("{model}", model) for o in overrides]
        config = load_config(named)
        resumed[:] = [1] if config.resume else []
        with make_console(1, "test") as view:
            view.message = view.phase = said.append
            with Job(config, **objects) as job:
                said += job.resumed.notices
                loop.RunLoop(job, view).run()
        return job.directory.path, said

    finish.resume = resume
    return finish


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def assert_same_run(found, expected):
    assert rows_of(found) == rows_of(expected)
    for folder in ("model", "critic", "cost_critic"):
        for file in (expected / folder).glob("*.safetensors"):
            mine, other = load_file(found / folder / file.name), load_file(file)
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in other)
    summaries = [json.loads((f / "summary.json").read_text()) for f in (found, expected)]
    mine, other = ({k: v for k, v in s.items() if "seconds" not in k} for s in summaries)
    assert mine == other


def steps_of(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.more if number else ())
        for number, name in enumerate(PROGRAMS)
        if name not in AS_OTHERS
    ]
    + [pytest.param(name, marks=pytest.mark.long) for name in AS_OTHERS],
)
def test_three_steps_and_three_more_are_six(run, program):
    if program == "adapters":
        pytest.importorskip("peft")
    settings = PROGRAMS[program]
    whole, _ = run("whole", *settings, "trainer.steps=6")
    half, _ = run("half", *settings, "trainer.steps=3")
    assert len(rows_of(half)) < len(rows_of(whole))
    resumed, said = run.resume(f"resume={half}", "trainer.steps=6")
    assert resumed == half and "changed: trainer.steps: 3 -> 6" in said
    assert not [line for line in said if "warm" in line or "step 0:" in line]
    assert_same_run(resumed, whole)
    assert any(row.get("policy/grad_norm", 0) > 0 for row in rows_of(whole)), "it learned"
    assert steps_of(resumed) == ["step-000003", "step-000006"]


def prompts_of(folder):
    """How many samples were learned from of each prompt, in the order of its first step."""
    files = sorted((folder / "samples").glob("step-*.parquet"))
    return Counter(prompt for file in files for prompt in read_table(file)["prompt"].to_pylist())


def test_prompts_that_partial_rollouts_kept_come_first_in_a_run_resumed_without(run):
    settings = ["rollout.max_tokens=12", "warmup.steps=0", "eval.every=0"]
    plain, _ = run("plain", *settings, "trainer.steps=5")
    dealt = list(prompts_of(plain))
    folder, _ = run("run", *settings, "rollout.partial=0.5", "trainer.steps=3")
    trained = prompts_of(folder)
    kept = set(dealt[:12]) - set(trained)
    assert kept
    _, said = run.resume(f"resume={folder}", "rollout.partial=null", "trainer.steps=5")
    told = f"Prompts that rollout.partial had kept with unfinished samples: {len(kept)}. They are "
    assert [line for line in said if line.startswith(told)]
    found = prompts_of(folder)
    assert set(list(found)[len(trained) :][: len(kept)]) == kept
    assert set(found) == set(dealt[: len(found)]) and len(found) == len(trained) + 8
    assert set(found.values()) == {2}, "none is dealt twice"


@pytest.mark.more
def test_partial_rollouts_begin_in_a_run_that_went_without(run):
    settings = ["rollout.max_tokens=12", "warmup.steps=0", "eval.every=0"]
    folder, _ = run("run", *settings, "trainer.steps=3")
    _, said = run.resume(f"resume={folder}", "rollout.partial=0.5", "trainer.steps=6")
    assert not [line for line in said if "unfinished" in line]
    assert any(row.get("partial/carried") for row in rows_of(folder))
    assert set(prompts_of(folder).values()) == {2}


def fails_in_step(monkeypatch, number):
    """Once, in the middle of this step: its samples are under way."""
    step = grpo.Trainer.step

    def fail(self):
        found = step(self)
        if self.steps == number:
            monkeypatch.setattr(grpo.Trainer, "step", step)
            raise ZeroDivisionError
        return found

    monkeypatch.setattr(grpo.Trainer, "step", fail)


def test_the_same_command_goes_on_after_a_failure_and_starts_where_there_is_nothing(
    run, monkeypatch
):
    settings = ["trainer.steps=6", "resume=auto", *KL]
    whole, said = run("whole", *settings)
    assert not [line for line in said if "resuming" in line]
    fails_in_step(monkeypatch, 2)  # before there is a checkpoint
    with pytest.raises(ZeroDivisionError):
        run("again", *settings)
    fails_in_step(monkeypatch, 5)
    with pytest.raises(ZeroDivisionError):
        run("again", *settings)
    folder = whole.parent / "again"
    assert rows_of(folder)[-1]["step"] == 4 and steps_of(folder) == ["step-000003"]
    assert (folder / "samples" / "step-000004.parquet").exists()
    again, said = run("again", *settings)
    assert f"resuming {folder} after step 3" in said
    assert not [line for line in said if line.startswith("changed: ")]
    assert_same_run(again, whole)
    once_more, said = run("again", *settings)  # it is done
    assert_same_run(once_more, whole)


@pytest.mark.more
def test_what_a_later_step_left_is_gone_when_an_earlier_one_is_resumed(run):
    settings = ["checkpoint.every=1", "checkpoint.keep_last=3", "trainer.steps=4", "eval.every=0"]
    folder, _ = run("run", *settings)
    assert steps_of(folder) == ["step-000002", "step-000003", "step-000004"]
    (folder / "checkpoints" / "step-000005").mkdir()
    run.resume(f"resume={folder}/checkpoints/step-000002", "trainer.steps=3")
    assert steps_of(folder) == ["step-000002", "step-000003"]
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 3, 3]
    of_steps = [f"step-{step:06d}.parquet" for step in (1, 2, 3)]
    evaluated = [f"eval-held_out-step-{step:06d}.parquet" for step in (0, 3)]
    for kept, wanted in {"samples": evaluated + of_steps, "tokens": of_steps}.items():
        assert sorted(path.name for path in (folder / kept).iterdir()) == wanted


def test_a_damaged_step_is_named_and_the_one_before_it_taken(run):
    folder, _ = run("run", "trainer.steps=6", *KL)
    whole = shutil.copytree(folder, folder.parent / "whole")
    file = folder / "checkpoints" / "step-000006" / "actor" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    _, said = run.resume(f"resume={folder}")
    assert said[0].startswith(
        f"The checkpoint of step 6 is damaged: {file} is not what was written"
    )
    assert_same_run(folder, whole)


def test_steps_go_on_while_one_is_written_and_it_is_as_it_was(run, monkeypatch):
    whole, _ = run("whole", "trainer.steps=9", *KL)
    write, step, begun, held = os.pwrite, grpo.Trainer.step, threading.Event(), []

    def waits(*arguments):
        if threading.current_thread() is not threading.main_thread():  # as models are written
            held.append(begun.wait(60))
        return write(*arguments)

    def goes_on(self):
        if self.steps == 4:  # the fifth begins, and that of the third waits
            begun.set()
        return step(self)

    monkeypatch.setattr(os, "pwrite", waits)
    monkeypatch.setattr(grpo.Trainer, "step", goes_on)
    folder, said = run("run", "trainer.steps=9", *KL)
    assert held and all(held)
    saved = [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if "step" in row]
    figures = [row for row in saved if "checkpoint/bytes" in row]
    assert [row["step"] for row in figures] and figures[0]["step"] > 4
    assert figures[0]["checkpoint/bytes"] == 12 * parameters_of(folder)
    assert all(figures[0][f"checkpoint/{of}_seconds"] > 0 for of in ("write", "stall"))
    about = [line.partition(";")[0] for line in said if "checkpoint" in line]
    assert about == [f"step {step}: checkpoint saved" for step in (3, 6, 9)], "a line for each"
    assert_same_run(folder, whole)
    shutil.rmtree(folder / "checkpoints" / "step-000009")
    run.resume(f"resume={folder}")
    assert_same_run(folder, whole)


def parameters_of(run):
    return sum(tensor.numel() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_a_step_is_a_model_that_transformers_and_other_jobs_begin_with(run):
    folder, _ = run("run", "trainer.steps=3", *KL)
    step = folder / "checkpoints" / "step-000003"
    wanted = load_file(folder / "model" / "model.safetensors")
    loaded = dict(AutoModelForCausalLM.from_pretrained(step / "actor").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    still = ["actor.optimizer={learning_rate: 1e-30}", "warmup.steps=0", "trainer.steps=1"]
    for start in (step, folder):
        begun, _ = run(f"from {start.name}", *still, f"model.path={start}")
        found = load_file(begun / "model" / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.more
def test_a_full_disk_is_a_sentence_and_leaves_the_step_before(run, monkeypatch):
    whole, _ = run("whole", "trainer.steps=6")

    def full(*_):
        raise OSError(28, "No space left on device")

    prune = CheckpointStore.prune

    def fills_up(self, keep):
        prune(self, keep)
        monkeypatch.setattr(os, "pwrite", full)

    monkeypatch.setattr(CheckpointStore, "prune", fills_up)
    with pytest.raises(StorageError, match=r"model\.safetensors: No space left on device"):
        run("run", "trainer.steps=6")
    monkeypatch.undo()
    folder = whole.parent / "run"
    assert steps_of(folder) == ["step-000003"]
    run.resume(f"resume={folder}")
    assert_same_run(folder, whole)


@pytest.mark.more
def test_a_run_keeps_the_date_of_its_first_start(run, tmp_path, monkeypatch):
    """Chat templates write it into prompts: a resume on the next day has the same ones, and so has
    an evaluation of the run's model."""

    def move_clock(day):
        now = datetime.datetime(2024, 3, day)
        clock = SimpleNamespace(date=SimpleNamespace(today=now.date), now=lambda: now)
        monkeypatch.setattr("hybridrl.job.config_resolution.datetime", clock)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)

    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    tokenizer.chat_template = "{{ strftime_now('%d %b') }}" + tokenizer.chat_template
    shape = {"hidden_size": 32, "layers": 1, "heads": 1}
    model = make_tiny_model(tmp_path / "tiny", tokenizer, seed=7, context=128, **shape)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    settings = ["algorithm=sft", "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    settings += ["data.messages_column=messages", f"model.path={model}", "warmup.steps=0"]
    move_clock(1)
    folder, _ = run("run", *settings, "trainer.steps=3", "eval.every=0")
    move_clock(2)
    run.resume(f"resume={folder}", "trainer.steps=6")
    assert load_run_config(folder / "config.yaml").data.date == "2024-03-01"
    of_model = load_config(["algorithm=evaluate", f"model.path={folder}", *settings[1:3]])
    assert with_date(of_model).data.date == "2024-03-01"
    assert with_date(load_config(settings)).data.date == "2024-03-02"
    words = r"first row differs after 1 characters: it was '01 Mar.* and is '02 Mar"
    with pytest.raises(DataError, match=words):
        run.resume(f"resume={folder}", "trainer.steps=9", "data.date=2024-03-02")


def test_what_does_not_fit_is_a_sentence_and_changes_nothing(run):
    folder, _ = run("run", "trainer.steps=3", *KL)
    before = rows_of(folder)
    refused = {
        "model.tiny.hidden_size=64": (ConfigError, "is the state of another model"),
        "algorithm=ppo": (ConfigError, "other roles: this job trains `critic`, and it does not"),
        "actor.optimizer.name=muon": (ConfigError, "has the state of adamw, from which no other"),
        "run.seed=1": (DataError, "other data than this one's"),
        "eval.prompts=16": (DataError, r"other data than this one's .* first row"),
        "checkpoint.every=-1": (ConfigError, "checkpoint.every=-1: must be 0 or more"),
        "checkpoint.keep_last=0": (ConfigError, "checkpoint.keep_last=0: must be 1 or more"),
    }
    for override, (kind, words) in refused.items():
        with pytest.raises(kind, match=words):
            run.resume(f"resume={folder}", override)
    assert rows_of(folder) == before and steps_of(folder) == ["step-000003"]
    with pytest.raises(ConfigError, match=r"holds an earlier run.*resume=auto"):
        run("run", "trainer.steps=3")


@pytest.mark.more
def test_a_sampler_whose_state_is_no_plain_data_is_named(run):
    with pytest.raises(ConfigError, match=r"data\.sampler=.*keys are texts"):
        run("run", "trainer.steps=3", "data.sampler={file}:Unsaveable")
