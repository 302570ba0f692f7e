"""Runs that begin from another's step, that keep their steps at a URL, and which steps they keep:
real workers in this process."""

import json
import os
import shutil
import uuid

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError, DataError, StorageError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.run import loop
from hybridrl.system.locations import list_file_sizes, parse_location

pytestmark = pytest.mark.usefixtures("process_group")

MEASURED = ("time/", "share/", "throughput/", "memory/", "sync/", "checkpoint/")
SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=2"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "eval.every=3", "checkpoint.every=3", "observe.samples_every=1"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 2, schedule: constant}",
    *("observe.show_every=0", "algorithm.kl_coefficient=0.1"),
]


def train(*overrides):
    """Runs a whole job; gives its folder and what the console said."""
    said = []
    with make_console(1, "test") as view:
        view.message = said.append
        with Job(load_config([*overrides])) as job:
            said += job.resumed.notices
            loop.RunLoop(job, view).run()
    return job.directory.path, said


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def model_of(folder):
    return load_file(folder / "model" / "model.safetensors")


def assert_goes_on_as(found, whole, after):
    assert rows_of(found) == [row for row in rows_of(whole) if row["step"] > after]
    mine, other = model_of(found), model_of(whole)
    assert mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, process_group):
    """Six steps, of which the third and the sixth are kept."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(*SMALL, f"run.directory={folder}", "trainer.steps=6")[0]


def test_a_fork_goes_on_as_the_run_would_have_and_leaves_it_as_it_is(whole, tmp_path):
    before = list_file_sizes(whole)
    new = f"run.directory={tmp_path / 'new'}"
    command = [f"fork={whole}/checkpoints/step-000003", new, "resume=auto", "trainer.steps=6"]
    folder, said = train(*command)
    assert f"a new run from {whole} after step 3" in said
    assert_goes_on_as(folder, whole, after=3)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000006"]
    _, said = train(*command)  # now it has a checkpoint of its own
    assert f"resuming {folder} after step 6" in said
    other = "algorithm.clip_high=0.5"
    _, said = train(f"fork={folder}", other, f"run.directory={tmp_path / 'other'}")
    marked = [line for line in said if "algorithm.clip_high: " in line]
    assert marked and marked[0].endswith("(what is learned from here on differs)")
    assert list_file_sizes(whole) == before


def test_steps_at_a_url_outlive_the_machine_of_the_run(whole, tmp_path):
    url = f"memory://{uuid.uuid4()}/run"
    command = [*SMALL, f"checkpoint.folder={url}", "resume=auto"]
    first, _ = train(*command, f"run.directory={tmp_path / 'first'}", "trainer.steps=3")
    assert not (first / "checkpoints").exists()
    shutil.rmtree(first)
    second, said = train(*command, f"run.directory={tmp_path / 'second'}", "trainer.steps=6")
    assert f"resuming {second} after step 3" in said
    assert_goes_on_as(second, whole, after=3)
    folders = CheckpointStore(parse_location(url))
    assert folders.steps() == [3, 6] and not folders.fault(3) and not folders.fault(6)
    third = f"run.directory={tmp_path / 'third'}"
    forked, _ = train(f"fork={url}/step-000003", third, "trainer.steps=6")
    assert_goes_on_as(forked, whole, after=3)


@pytest.mark.more
def test_a_folder_of_checkpoints_is_of_one_run(tmp_path):
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    train(*SMALL, shared, f"run.directory={tmp_path / 'one'}", "trainer.steps=3")
    before = list_file_sizes(tmp_path / "shared")
    with pytest.raises(ConfigError, match=r"checkpoint.folder=.* holds step 3 of an earlier run"):
        train(*SMALL, shared, f"run.directory={tmp_path / 'two'}", "trainer.steps=3")
    assert list_file_sizes(tmp_path / "shared") == before


@pytest.mark.more
def test_a_url_is_of_one_run_and_who_goes_on_with_it_ends_the_other(tmp_path, process_group):
    url = f"memory://{uuid.uuid4()}/run"
    command = [*SMALL, f"checkpoint.folder={url}", "trainer.steps=3"]
    with Job(load_config([*command, f"run.directory={tmp_path / 'one'}"])) as job:
        with pytest.raises(ConfigError, match=rf"{url} is that of the run in {tmp_path}/one \("):
            train(*command, f"run.directory={tmp_path / 'two'}")
        train(*command, "resume=auto", f"run.directory={tmp_path / 'elsewhere'}")
        written = list_file_sizes(parse_location(url))
        words = rf"has been taken over by the run in {tmp_path}/elsewhere \(.*This job ends"
        with make_console(1, "test") as view, pytest.raises(StorageError, match=words):
            loop.RunLoop(job, view).run()
    assert list_file_sizes(parse_location(url)) == written
    refused = r"is that of the run in .*/elsewhere"
    with pytest.raises(ConfigError, match=refused):
        train(*command, "resume=auto", f"run.directory={tmp_path / 'one'}", "trainer.steps=6")


@pytest.mark.more
def test_which_steps_are_saved_and_stay(tmp_path):
    rules = ["checkpoint.every=0", "checkpoint.every_minutes=1e-9", "checkpoint.best=accuracy"]
    rules += ["checkpoint.keep_last=1", "checkpoint.keep_every=2", "eval.every=1"]
    folder, _ = train(*SMALL, *rules, f"run.directory={tmp_path / 'run'}", "trainer.steps=3")
    folders = CheckpointStore(folder / "checkpoints")
    best = json.loads((folders.path / "best.json").read_text())
    assert set(folders.steps()) == {2, 3, best["step"]}
    evaluated = {row["step"]: row["accuracy"] for row in rows_of(folder) if "accuracy" in row}
    assert best["accuracy"] == max(evaluated[step] for step in (1, 2, 3))
    settings = (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="no evaluation of this run gives `acuracy`"):
        train(f"resume={folder}", "checkpoint.best=acuracy", "trainer.steps=4")
    assert (folder / "config.yaml").read_text() == settings
    wrong = [*SMALL, "checkpoint.best=acuracy", f"run.directory={tmp_path / 'wrong'}"]
    with pytest.raises(ConfigError, match="gives `acuracy`; there are accuracy"):
        train(*wrong, "trainer.steps=3")


def test_what_does_not_fit_is_a_sentence_before_anything_of_the_run_is_changed(whole, tmp_path):
    settings = (whole / "config.yaml").read_text()
    before, held = list_file_sizes(whole), Job(load_config([f"resume={whole}"]))
    with pytest.raises(ConfigError, match=rf"{whole} is in use: process {os.getpid()} on"):
        train(f"resume={whole}")
    held.close()
    tokenizer = tmp_path / "tokenizer"
    build_character_tokenizer("9876543210+=").save_pretrained(tokenizer)
    refused = {
        "model.tiny.hidden_size=64": r"another model \(.*hidden_size: 32 -> 64",
        f"model.tokenizer={tokenizer}": "made with another tokenizer",
        "algorithm=ppo": "other roles: this job trains `critic`",
        "run.seed=1": "other data than this one's",
    }
    for override, words in refused.items():
        for how in (f"resume={whole}", f"fork={whole}"):
            new = [f"run.directory={tmp_path / 'new'}"] if how.startswith("fork") else []
            with pytest.raises((ConfigError, DataError), match=words):
                train(how, override, *new)
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert list_file_sizes(whole) == before and (whole / "config.yaml").read_text() == settings


def test_a_store_that_goes_away_is_a_sentence_and_the_step_before_still_loads(
    tmp_path, monkeypatch
):
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"memory://{uuid.uuid4()}/run"
    command = [*SMALL, f"checkpoint.folder={url}", "resume=auto"]
    command += [f"run.directory={tmp_path / 'run'}", "trainer.steps=6"]
    opened = MemoryFileSystem.open

    def gone(self, path, mode="rb", **options):
        if "step-000006" in path and mode == "wb":
            raise ConnectionError("no route to host")
        return opened(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "open", gone)
    words = r"Cannot write memory://.*step-000006.*no route to host\. See whether it can be reached"
    with pytest.raises(StorageError, match=words):
        train(*command)
    monkeypatch.undo()
    _, said = train(*command)
    assert any(line.endswith("after step 3") for line in said)
    assert CheckpointStore(parse_location(url)).steps() == [3, 6]
