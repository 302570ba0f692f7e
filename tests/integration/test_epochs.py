"""Passes over rows that are mapped from the cache: real workers in this process."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.data import row_blocks, token_cache
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
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
    for name, weights in whole.items():
        assert torch.equal(weights, resumed[name])
        assert torch.equal(weights, in_memory[name])


def test_a_run_has_one_length():
    with pytest.raises(ConfigError, match="two lengths of one run"):
        load_config(["trainer.steps=3", "trainer.epochs=2"])
    assert load_config(["trainer.steps=3", "trainer.epochs=null"]).trainer.steps == 3
