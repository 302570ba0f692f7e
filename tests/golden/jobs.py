"""Tiny jobs whose figures, samples and summaries may not change unless somebody wants it.

Each runs in this process (`executor=inline`) for seconds, in a folder of its own with relative
paths only, so that nothing of the machine gets into what it leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

KEPT = Path(__file__).parent / "run_folders"
"""Run folders that an earlier version of the code left: to be read, and to be resumed."""
_TINY = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "observe.show_every=0"),
    *("trainer.steps=3", "warmup.steps=2", "rollout.samples_per_prompt=4", "rollout.max_tokens=4"),
    *("data.prompts_per_step=4", "eval.prompts=8", "eval.every=2", "observe.samples_every=1"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 1, schedule: cosine}",
]
_SMALL = "model.tiny={hidden_size: 32, layers: 1, heads: 1}"
_SHORT_PAYS = [
    *("reward.function=length", "reward.options.length.limit=2", "reward.options.length.ramp=3"),
]
_HALF_ALIKE = ["reward.function=rewards.py:half_alike"]
_REWARDS = """
def half_alike(prompt, response, **row):
    return float(response[:1] < "5") if sum(map(ord, prompt)) % 2 else 0.5
"""
_TEACHER_PROMPT = "{answer}{answer}{prompt}"

JOBS: dict[str, list[str]] = {
    "grpo": [*_TINY, *_SHORT_PAYS],
    "ppo": [*_TINY, *_SHORT_PAYS, "algorithm=ppo"],
    "grpo-lora": [
        *(*_TINY, *_SHORT_PAYS, "model.path=model", "warmup.steps=0"),
        *("actor.lora.rank=4", "actor.lora.alpha=8"),
    ],
    "evaluate": [*_TINY, *_SHORT_PAYS, "algorithm=evaluate", "model.path=teacher"],
} | {
    name: [*_TINY, *([] if "model.path=model" in settings else [_SMALL]), *settings]
    for name, settings in {
        "grpo-mini-batches": [
            *(*_SHORT_PAYS, "actor.updates_per_step=2", "actor.tokens_per_microbatch=24"),
            *("algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.01"),
            *("algorithm.overlong_buffer=2", "actor.gradient_checkpointing=full"),
        ],
        "grpo-replay": [
            *(*_HALF_ALIKE, "algorithm.dynamic_sampling=true", "algorithm.replay_share=0.5"),
            "algorithm.correction=none",
        ],
        "grpo-evaluation-sets": [
            *("eval.samples=2", "eval.sets.more.data.task=arithmetic", "eval.sets.more.samples=2"),
            *("eval.sets.more.prompts=4", "eval.sets.more.metrics=[accuracy,pass@2]"),
            *("checkpoint.every=1", "checkpoint.best=accuracy", "checkpoint.keep_last=1"),
        ],
        "grpo-experts": [*_SHORT_PAYS, "model.tiny.experts=2", "actor.router_loss_weight=0.01"],
        "grpo-data-of-files": [
            *(*_SHORT_PAYS, "data=jsonl", "data.path=rows.jsonl", "warmup.steps=0"),
            "model.path=model",
            *("reward.function=[exact,length]", "reward.weights=[2.0,1.0]"),
            *("data.prompt_column=question", "data.too_long=drop", "data.max_prompt_tokens=8"),
            *("eval.by_column=source", "data.bad_rows=drop"),
        ],
        "calculator": ["data=calculator", "rollout.max_tokens=6"],
        "dapo": [*_HALF_ALIKE, "algorithm=dapo"],
        "dr_grpo": [*_SHORT_PAYS, "algorithm=dr_grpo"],
        "cispo": [*_SHORT_PAYS, "algorithm=cispo", "actor.updates_per_step=2"],
        "gmpo": [*_SHORT_PAYS, "algorithm=gmpo", "actor.updates_per_step=2"],
        "gspo": [*_SHORT_PAYS, "algorithm=gspo", "algorithm.correction=truncate"],
        "sapo": [*_SHORT_PAYS, "algorithm=sapo", "algorithm.correction=mask"],
        "opo": [*_SHORT_PAYS, "algorithm=opo"],
        "pass_at_k": [*_SHORT_PAYS, "algorithm=pass_at_k"],
        "rloo": [
            *(*_SHORT_PAYS, "algorithm=rloo", "algorithm.kl_in_reward=true"),
            "algorithm.kl_coefficient=0.05",
        ],
        "reinforce_plus_plus": [
            *(*_SHORT_PAYS, "algorithm=reinforce_plus_plus", "algorithm.kl_in_reward=true"),
            "algorithm.kl_coefficient=0.05",
        ],
        "reinforce_plus_plus_baseline": [*_SHORT_PAYS, "algorithm=reinforce_plus_plus_baseline"],
        "ppo-kl-in-reward": [
            *(*_SHORT_PAYS, "algorithm=ppo", "algorithm.kl_in_reward=true"),
            *("algorithm.kl_coefficient=0.05", "algorithm.kl_target=0.01"),
            *("algorithm.kl_horizon=100", "actor.updates_per_step=2", "algorithm.gamma=0.9"),
            *("algorithm.ptx_coefficient=0.1", "critic.warmup_steps=1"),
        ],
        "remax": [*_SHORT_PAYS, "algorithm=remax"],
        "safe_rlhf": [*_SHORT_PAYS, "algorithm=safe_rlhf"],
        "expert_iteration": [*_SHORT_PAYS, "algorithm=expert_iteration", "expert.choose=best"],
        "online_dpo": [*_SHORT_PAYS, "algorithm=online_dpo"],
        "dpo": ["algorithm=dpo"],
        "dpo-ipo": ["algorithm=dpo", "preference.loss=ipo", "preference.nll_coefficient=0.1"],
        "reward_model": ["algorithm=reward_model"],
        "sft": ["algorithm=sft"],
        "distillation": ["algorithm=distillation", "models.teacher.path=teacher"],
        "distillation-self": [
            *("algorithm=distillation", "distillation.teacher=self", "distillation.top_k=5"),
            *("distillation.teacher_prompt=teacher.txt", "distillation.refresh_every=2"),
            *("data.max_prompt_tokens=16", "distillation.loss=forward"),
        ],
        "offline_distillation": ["algorithm=offline_distillation", "models.teacher.path=teacher"],
    }.items()
}
"""The settings of each job, by its name."""

_KEPT = [*_TINY, "checkpoint.every=2", "checkpoint.keep_last=1", "trainer.steps=2"]
_OWN = [*_KEPT, "model.path=model", "warmup.steps=0"]
_SCRATCH = Path("/tmp/hybridrl-golden")
"""Where kept run folders are made: a checkpoint of adapters says where its model lies."""
KEPT_JOBS: dict[str, list[str]] = {
    "grpo": [*_KEPT, _SMALL, *_SHORT_PAYS, "algorithm.kl_coefficient=0.1"],
    "ppo": [*_OWN, *_SHORT_PAYS, "algorithm=ppo"],
    "lora": [*_OWN, *_SHORT_PAYS, "actor.lora.rank=2"],
    "dpo": [*_OWN, "algorithm=dpo"],
    "sft": [*_OWN, "algorithm=sft"],
    "reward_model": [*_OWN, "algorithm=reward_model"],
    "elsewhere": [*_OWN, *_SHORT_PAYS, "checkpoint.folder=elsewhere-checkpoints"],
    "two-ranks": [*_OWN, *_SHORT_PAYS, "executor=ray", "num_devices=2"],
}
"""What left the kept run folders: the name of each folder, and its settings."""
RESUMED: dict[str, list[str]] = {
    f"resumed-{name}": [
        *(one for one in settings if not one.startswith(("executor=", "num_devices="))),
        *("executor=inline", "num_devices=1", "trainer.steps=3", "resume=auto"),
    ]
    for name, settings in KEPT_JOBS.items()
}
"""Jobs that go on for a step where the kept run folders end."""
_OF_THE_MACHINE = ("time/", "share/", "throughput/", "memory/", "checkpoint/")
_OF_STEPS = ("file", "metrics", "step-", "eval")
_NOT_OF_THE_SUMMARY = ("command", "versions", "seconds")


def prepare(folder: Path) -> None:
    """Put what the jobs read into an empty folder: data, rewards, models and the kept runs."""
    rows = [
        {"question": f"{a}+{b}=", "answer": str(a + b), "source": ("odd", "even")[a % 2]}
        for a in range(40)
        for b in (3, 14)
    ]
    rows += [{"question": "1234567890", "answer": "1"}, {"question": "", "answer": "2"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(_REWARDS)
    (folder / "teacher.txt").write_text(_TEACHER_PROMPT)
    shutil.copytree(KEPT / "model", folder / "model")
    shutil.copytree(KEPT / "grpo" / "model", folder / "teacher")
    shutil.copytree(KEPT / "elsewhere-checkpoints", folder / "elsewhere-checkpoints")
    for name in KEPT_JOBS:
        shutil.copytree(KEPT / name, folder / f"resumed-{name}")


def run_job(name: str, folder: Path) -> Path:
    """Run a job in a folder that was prepared; return the folder that it leaves."""
    settings = {**JOBS, **RESUMED}[name]
    run(folder, f"run.directory={name}", f"run.name={name}", *settings)
    return folder / name


def run(folder: Path, *settings: str) -> None:
    """Do what `python -m hybridrl.main` does of these settings, in this process and a folder."""
    from hybridrl import load_config
    from hybridrl.main import run as run_to_its_end

    before, path = signal.getsignal(signal.SIGTERM), list(sys.path)
    with chdir(folder):
        try:
            run_to_its_end(load_config(settings))
        finally:
            signal.signal(signal.SIGTERM, before)
            sys.path[:] = path


def lines_of_run(run: Path) -> dict[str, str]:
    """Return each figure of a run by its name, as JSON, without times and other facts of the
    machine. Of a run that was resumed: what it added."""
    before = KEPT / run.name.removeprefix("resumed-")
    known = dict(_lines_of_run(before)) if run.name in RESUMED else {}
    known = {name: value for name, value in known.items() if name.startswith(_OF_STEPS)}
    return {name: value for name, value in _lines_of_run(run) if known.get(name) != value}


def _lines_of_run(run: Path) -> Iterator[tuple[str, str]]:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    yield from ((f"file {name}", "true") for name in sorted(names))
    for number, row in enumerate(_rows(run / "metrics.jsonl")):
        for name, value in sorted(row.items()):
            if not name.startswith(_OF_THE_MACHINE) and not name.endswith("seconds"):
                yield f"metrics row {number}, step {row['step']}, {name}", json.dumps(value)
    summary = json.loads((run / "summary.json").read_text())
    for name, value in summary.items():
        if not name.startswith(_NOT_OF_THE_SUMMARY):
            yield f"summary, {name}", json.dumps(value)
    for file in sorted(run.glob("samples/*.parquet")):
        columns = pq.read_table(file).to_pydict()
        tokens = run / "tokens" / file.name
        columns |= pq.read_table(tokens).to_pydict() if tokens.exists() else {}
        for column, values in sorted(columns.items()):
            yield f"{file.stem}, {column}", json.dumps(values)
    for name in ("evaluations", "data-report", "placement"):
        if (file := run / f"{name}.json").exists():
            for line, value in flat(json.loads(file.read_text()), name, 3):
                if not line.endswith(", date"):
                    yield line, value
    for file in sorted(run.glob("model/*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            yield f"model, sum of absolute {name}", json.dumps(tensor.double().abs().sum().item())


def flat(value: Any, name: str, depth: int = 9) -> Iterator[tuple[str, str]]:
    """Return nested data as (name, JSON), down to a depth; lists of plain values stay together."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict) and value:
        children = [(f"{name}, {key}", child) for key, child in value.items()]
    elif isinstance(value, list) and any(isinstance(child, dict | list) for child in value):
        children = [(f"{name}, {number}", child) for number, child in enumerate(value)]
    if not children or not depth:
        yield name, json.dumps(value, ensure_ascii=False)
        return
    for child_name, child in children:
        yield from flat(child, child_name, depth - 1)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_kept_runs(names: list[str]) -> None:
    """Write kept run folders anew, with the code of today: of all jobs, or of these."""
    shutil.rmtree(_SCRATCH, ignore_errors=True)
    _SCRATCH.mkdir()
    _make_smallest_model(_SCRATCH / "model")
    for name in names or KEPT_JOBS:
        run(_SCRATCH, f"run.directory={name}", f"run.name={name}", *KEPT_JOBS[name])
        (_SCRATCH / name / "report.html").unlink(missing_ok=True)
        shutil.rmtree(_SCRATCH / name / "logs", ignore_errors=True)
        summary = _SCRATCH / name / "summary.json"
        summary.write_text(summary.read_text().replace(sys.executable, "python"))
    KEPT.mkdir(exist_ok=True)
    for made in filter(Path.is_dir, _SCRATCH.iterdir()):
        shutil.rmtree(KEPT / made.name, ignore_errors=True)
        shutil.copytree(made, KEPT / made.name)
    shutil.rmtree(_SCRATCH)


def _make_smallest_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hybridrl.data.character_tokenizer import build_character_tokenizer

    tokenizer = build_character_tokenizer("0123456789+=")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


os.environ.setdefault("OMP_NUM_THREADS", "1")
