"""Models as they are published: whatever class a folder names, its language model is trained, and
what is saved is a folder of that class with every tensor that came in."""

import json
import signal
from pathlib import Path

import pytest
import torch
import transformers
from published_models import PUBLISHED, publish
from ranks import run_ranks
from safetensors.torch import load_file

from hybridrl import cli, load_config, main
from hybridrl.checks.models.model_folder_checks import check_model
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, ParallelConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.workers.training_engines import ModelSource, build_policy_engine

pytestmark = pytest.mark.more

WORLD = 2
EVERYWHERE = ("gemma3", "qwen3_5", "mistral3", "deepseek_v3")
"""Under every cut; the others under the first."""
CUTS = {
    "dp2": ActorConfig(),
    "tp2": ActorConfig(parallel=ParallelConfig(tp=2)),
    "pp2": ActorConfig(parallel=ParallelConfig(pp=2)),
    "adapters": ActorConfig(lora=LoraAdapterConfig(rank=4)),
}
REFUSED = {("tp2", "gemma3"), ("tp2", "qwen3_5")}
"""What these cuts would change."""
QUICK = {("qwen3_5", "grpo"), ("mistral3", "sft"), ("deepseek_v3", "sft")}
PROMPTS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "1"},
        ]
    }
    for row in PROMPTS
]
JOB = [
    *("executor=inline", "rollout=transformers", "data=jsonl", "data.max_prompt_tokens=128"),
    *("trainer.steps=2", "data.prompts_per_step=4", "warmup.steps=0", "eval.prompts=4"),
]
OF = {
    "grpo": [
        *("rollout.samples_per_prompt=2", "rollout.max_tokens=8", "reward.function=length"),
        *("reward.options.length.limit=4", "reward.options.length.ramp=4"),
        "actor.optimizer.learning_rate=0.01",
    ],
    "sft": ["algorithm=sft", "data.messages_column=messages", "actor.optimizer.learning_rate=0.01"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("published")
    for kind, rows in (("grpo", PROMPTS), ("sft", TALKS)):
        (place / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in PUBLISHED:
        publish(place / name, name)
    return place


def program(rank, folders, saved):
    """Saves under every cut what was read; gives what was refused."""
    found = {}
    for cut, config in CUTS.items():
        for name in PUBLISHED if cut == "dp2" else EVERYWHERE:
            source = ModelSource(str(folders / name), "", "float32", 64, ())
            try:
                engine = build_policy_engine(WorkerContext("actor", rank, WORLD), source, config)
                engine.save(saved / cut / name, torch.bfloat16, file_bytes=40_000)
            except HybridRLError as error:
                found[cut, name] = str(error)
    return found


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved")
    return place, run_ranks(program, tmp_path_factory.mktemp("ranks"), WORLD, folders, place)


def tensors(folder: Path):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def described(folder: Path):
    """What stands beside the weights."""
    names = ("config.json", "generation_config.json")
    here = [path for path in folder.iterdir() if path.name in names or "processor" in path.name]
    return {path.name: json.loads(path.read_text()) for path in here}


@pytest.mark.parametrize(
    ("cut", "name"),
    [("dp2", name) for name in PUBLISHED] + [(c, n) for c in ("tp2", "pp2") for n in EVERYWHERE],
)
def test_what_is_not_trained_comes_back_bit_for_bit(saved, folders, cut, name):
    place, ranks = saved
    said = [rank.get((cut, name), "") for rank in ranks]
    if (cut, name) in REFUSED:
        assert all("cannot be cut by actor.parallel.tp=2" in one for one in said), said
        return
    assert said == ["", ""]
    before, after = tensors(folders / name), tensors(place / cut / name)
    assert after.keys() == before.keys()
    assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in before.items())
    assert described(place / cut / name) == described(folders / name)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "mistral3"])
def test_adapters_are_beside_layers_of_the_language_model_alone(saved, name):
    place, ranks = saved
    assert not any(("adapters", name) in rank for rank in ranks)
    names = tensors(place / "adapters" / name)
    assert names and all(".language_model." in one for one in names)


def train(folders, name, trainer, *overrides):
    before = signal.getsignal(signal.SIGTERM)
    data = f"data.path={folders / trainer}.jsonl"
    main.run(load_config([*JOB, *OF[trainer], data, f"model.path={folders / name}", *overrides]))
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        pytest.param(n, t, marks=[] if (n, t) in QUICK else [pytest.mark.long])
        for n in PUBLISHED
        for t in OF
    ],
)
def test_a_job_leaves_a_folder_of_the_same_class(folders, tmp_path, capsys, name, trainer):
    model, run = folders / name, tmp_path / "run"
    train(folders, name, trainer, f"run.directory={run}")
    was, now = tensors(model), tensors(run / "model")
    assert now.keys() == was.keys()
    changed = {n for n, tensor in was.items() if not torch.equal(tensor, now[n])}
    assert changed and not [n for n in changed if is_beside(n, name)]
    kind = getattr(transformers, PUBLISHED[name].architecture)
    _, report = kind.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert report["unexpected_keys"] <= PUBLISHED[name].unbuilt.keys() | FUSED
    assert described(run / "model") == described(model)
    said = capsys.readouterr()
    has_more = bool(PUBLISHED[name].unbuilt) or any(is_beside(n, name) for n in was)
    assert ("The language model is trained" in said.out + said.err) == has_more


def test_checkpoints_exports_and_the_next_stage_have_all_of_it(folders, tmp_path):
    run, exported, was = tmp_path / "run", tmp_path / "exported", tensors(folders / "qwen3_5")
    train(folders, "qwen3_5", "sft", f"run.directory={run}", "checkpoint.every=1")
    last = run / "checkpoints" / "step-000002"
    kept = tensors(last / "actor")
    assert was.keys() <= kept.keys()
    beside = [name for name in was if is_beside(name, "qwen3_5")]
    assert all(torch.equal(kept[name], was[name]) for name in beside)
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", "export", str(last), str(exported)])
    assert not ended.value.code
    saved, found = tensors(run / "model"), tensors(exported)
    assert saved.keys() == found.keys() == was.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert described(exported) == described(folders / "qwen3_5")
    train(folders, "qwen3_5", "sft", f"run.directory={run}", f"resume={run}", "trainer.steps=3")
    train(folders, run / "model", "sft", f"run.directory={tmp_path / 'next'}")
    for folder in (run / "model", tmp_path / "next" / "model"):
        now = tensors(folder)
        assert now.keys() == was.keys() and all(torch.equal(now[n], was[n]) for n in beside)


@pytest.mark.long
def test_a_reward_model_keeps_the_tower(folders, tmp_path):
    pairs = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "none"} for row in PROMPTS
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    before = signal.getsignal(signal.SIGTERM)
    main.run(
        load_config(
            [
                *(*JOB, "algorithm=reward_model", f"data.path={tmp_path / 'pairs.jsonl'}"),
                *(f"model.path={folders / 'gemma3'}", f"run.directory={tmp_path / 'run'}"),
            ]
        )
    )
    signal.signal(signal.SIGTERM, before)
    kind = transformers.Gemma3ForSequenceClassification
    _, report = kind.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    was, now = tensors(folders / "gemma3"), tensors(tmp_path / "run" / "model")
    assert now.keys() == was.keys() | {"score.weight"}
    assert all(torch.equal(now[n], was[n]) for n in was if is_beside(n, "gemma3"))


def test_a_class_without_a_scalar_head_is_refused(folders):
    with pytest.raises(ConfigError, match=r"mistral3.* cannot be a critic or a reward model"):
        check_model(str(folders / "mistral3"), "models.critic.path", scalar=True, learns=True)


FUSED = {"model.layers.2.mlp.experts.gate_up_proj"}
"""What transformers calls a further layer's experts in its report."""


def is_beside(tensor: str, name: str) -> bool:
    """Whether a tensor is of no language model."""
    towers = ("visual", "vision", "projector", "audio")
    return any(part in tensor for part in towers) or tensor in PUBLISHED[name].unbuilt
