"""Models as they are published generate with vLLM, on text, from the weights of the trainer."""

import json

import pyarrow.parquet as pq
import pytest
from published_models import publish

pytestmark = pytest.mark.more

BFLOAT16 = ["model.dtype=bfloat16"]
JOB = [
    *("num_devices=1", "model.dtype=float32", "rollout=vllm", "data=jsonl"),
    *("rollout.kv_cache_gib=0.1", "rollout.verify_weights=true", "rollout.max_tokens=24"),
    *("data.answer_column=null", "data.max_prompt_tokens=64", "data.prompts_per_step=2"),
    *("reward.function=length", "reward.options.length.limit=4", "reward.options.length.ramp=4"),
    *("trainer.steps=2", "eval.prompts=4", "warmup.steps=0"),
]
ENDS = list(range(24, 320, 8))


def long(name, *more):
    return pytest.param(name, more, marks=pytest.mark.long)


@pytest.fixture
def job(run, tmp_path):
    """Trains a published model two steps; gives its figures, and its first responses."""

    def finish(name, *more):
        folder = publish(tmp_path / name, name)
        config = json.loads((folder / "config.json").read_text())
        config["eos_token_id"] = ENDS  # which no other file names
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").unlink(missing_ok=True)
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(20)))
        own = {setting.partition("=")[0] for setting in more}
        usual = [setting for setting in JOB if setting.partition("=")[0] not in own]
        found = run(f"model.path={folder}", f"data.path={data}", *usual, *more)
        lines = (found / "metrics.jsonl").read_text().splitlines()
        mismatch = [k3 for line in lines if (k3 := json.loads(line).get("mismatch/k3")) is not None]
        tokens = pq.read_table(found / "tokens" / "step-000001.parquet")
        return mismatch, tokens.column("response_ids").to_pylist()

    return finish


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma3", ()),
        ("gemma3", ("rollout=transformers",)),
        ("qwen3_vl", ()),
        *map(long, ("mistral3", "gemma4", "glm4_moe")),
        # vLLM does not take new weights of their experts: see docs/models.md.
        *(long(name, "rollout=transformers") for name in ("gpt_oss", "deepseek_v3")),
        long("qwen3_5", *BFLOAT16),
        long("gemma3", "num_devices=2", "rollout.parallel.tp=2"),
        long("gemma3", "actor.lora.rank=4"),
    ],
)
def test_a_published_class_generates_as_it_is_trained_and_ends_where_its_config_says(
    name, more, job
):
    mismatch, responses = job(name, *more)
    assert len(mismatch) == 2 and max(mismatch) < (
        1e-4 if "model.dtype=bfloat16" in more else 1e-10
    )
    assert all(not {*ENDS} & {*tokens[:-1]} for tokens in responses)
    assert any(tokens[-1] in ENDS for tokens in responses)
