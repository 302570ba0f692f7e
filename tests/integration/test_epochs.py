"""Passes over rows that are mapped from the cache: real workers in this process."""

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.data import row_blocks, token_cache
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "algorithm=sft", "data=jsonl"),
    *("data.prompts_per_step=8", "eval.prompts=4", "eval.every=0", "observe.samples_every=0"),
    *("observe.show_every=0", "checkpoint.every=100", "actor.optimizer.learning_rate=1e-2"),
]


@pytest.mark.usefixtures("process_group")
def test_a_run_resumes_in_the_middle_of_the_second_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(token_cache, "count_usable_cores", lambda: 1)
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS)
    sizes = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 64}
    model = make_tiny_model(tmp_path / "model", tokenizer, seed=0, **sizes)
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(40)]  # 4 are held out
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    places = [f"data.path={tmp_path / 'rows.jsonl'}", f"cache.folder={tmp_path / 'cache'}"]

    def trained(name, *settings, small_bytes=0):
        monkeypatch.setattr(row_blocks, "SMALL_BYTES", small_bytes)
        folder = tmp_path / name
        where = [f"run.directory={folder}", f"model.path={model}"]
        run(load_config([*SMALL, *places, *where, *settings]))
        written = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        steps = max(one["step"] for one in written if "step" in one)
        return steps, load_file(folder / "model" / "model.safetensors")

    steps, whole = trained("whole", "trainer.epochs=2")
    assert steps == 9  # of 8 rows, of 36
    assert trained("part", "trainer.epochs=1.25")[0] == 6
    steps, resumed = trained("part", "trainer.epochs=2", "resume=auto")
    assert steps == 9
    _, in_memory = trained("memory", "trainer.steps=9", small_bytes=1 << 30)
    # 24 of 72 rows are behind it.
    assert trained("wider", "trainer.steps=3")[0] == 3
    wider = ["trainer.epochs=2", "data.prompts_per_step=16", "resume=auto"]
    assert trained("wider", *wider)[0] == 3 + 3
    for name, weights in whole.items():
        assert torch.equal(weights, resumed[name])
        assert torch.equal(weights, in_memory[name])


def test_a_run_has_one_length():
    with pytest.raises(ConfigError, match="two lengths of one run"):
        load_config(["trainer.steps=3", "trainer.epochs=2"])
    assert load_config(["trainer.steps=3", "trainer.epochs=null"]).trainer.steps == 3


def test_loading_ends_with_its_job(tmp_path, monkeypatch):
    begun, ended, told, bars = threading.Event(), [], [], []

    def load(job, progress):
        begun.set()
        try:
            for _ in range(600):
                progress("tokenizing", 1, 2)
                time.sleep(0.05)
        except HybridRLError as error:
            ended.append(error)

    def interrupt(job):
        begun.wait()
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "_load", load)
    monkeypatch.setattr(Job, "_start_executor", interrupt)
    with pytest.raises(KeyboardInterrupt):
        config = load_config(["executor=inline", f"run.directory={tmp_path}"])
        Job(config, told.append, bar=lambda *given: bars.append(given))
    assert len(ended) == 1
    assert told == ["loading data", "tokenizing"]
    assert set(bars) == {(1, 2)}
