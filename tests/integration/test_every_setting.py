"""Each setting, flipped through the main program, changes what a run leaves behind or the plan of a
job, or the user is told that it does nothing, or it is refused. Settings come from the schema: a
new number or choice needs no line here, a new text one in `VALUES`."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from flips import another_value

from hybridrl import main
from hybridrl.cli import main as command_line
from hybridrl.composition.setting_names import list_settings
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.errors import HybridRLError
from hybridrl.job.config_resolution import load_config

pytestmark = pytest.mark.long

JOB = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "model.dtype=float32"),
    *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2", "eval.prompts=4"),
    *("warmup.steps=0", "trainer.steps=2", "actor.updates_per_step=2", "rollout.max_tokens=6"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=40"),
    *("actor.optimizer.learning_rate=1e-2", "actor.optimizer.schedule=constant"),
    *("actor.optimizer.warmup_steps=0", "reward.function=code.py:short"),
]
"""A second of work whose scores differ; paths are in the folder of the module."""
PLAN = ["model.tiny.hidden_size=256", "model.tiny.heads=8", "model.tiny.layers=4", "warmup.steps=0"]
"""A job that is only planned."""
FULL_CACHE = [
    *("data.prompts_per_step=4096", "rollout.max_tokens=16000", "rollout.max_sequences=4096"),
    "model.tiny.context=32768",
]
"""More tokens at once than vLLM's cache on a GPU holds, even of a tiny model."""
FILE = ["data=jsonl", "data.path=rows.jsonl", "model.path=model"]
CHAT = [*FILE, "data.chat=true"]
GYM = [
    *("data=reasoning_gym", "data.tasks=[chain_sum]", "data.rows=20", "model.tiny.context=512"),
    *("data.max_prompt_tokens=256", "reward.function=code.py:short"),
]
SPLIT = ["data=jsonl", "model.path=model", "data.path=split", "data.split=train"]
SFT = ["algorithm=sft", *FILE]
DPO = ["algorithm=dpo", *FILE, "actor.updates_per_step=1"]
KTO = ["algorithm=kto", *FILE, "actor.updates_per_step=1"]
PAIRS = ["algorithm=reward_model", *FILE, "actor.updates_per_step=1"]
META = ["algorithm=meta_reward_model", "actor.updates_per_step=1", "data.prompts_per_step=40"]
EXPERT = ["algorithm=expert_iteration"]
PPO = ["algorithm=ppo"]
SAFE = ["algorithm=safe_rlhf", "cost.function=code.py:ones"]
KL = ["algorithm.kl_coefficient=0.1"]
IN_REWARD = [*PPO, *KL, "algorithm.kl_in_reward=true"]
TRUNCATES = ["algorithm.correction=truncate", "algorithm.correction_high=0.9"]
MASKS = ["algorithm.correction=mask", "algorithm.correction_high=1.5"]
REPLAYS = ["algorithm.replay_share=0.5", "trainer.steps=4"]
TURNS = ["rollout.max_tokens=12", "rollout.stop=['0','1','2','3','4','=']"]
EPISODE = ["rollout.episode=code.py:Tool", *TURNS]
LORA = ["model.path=model", "actor.lora.rank=4"]
EXPERTS = ["model.tiny.experts=4"]
STOPS = ["trainer.steps=4", "eval.every=1", "eval.stop.metric=accuracy"]
TEACHER = ["algorithm=distillation", "models.teacher.path=other"]
SELF = [
    *("algorithm=distillation", "distillation.teacher=self"),
    "distillation.teacher_prompt=hint.txt",
]
SAVES = ["checkpoint.every=1", "trainer.steps=4"]
WATCHES = ["reward.check=code.py:ones", "guard.tripwires=1", "trainer.steps=4"]


def of_scores(kind: str) -> dict[str, tuple]:
    """What `reward` and `cost` have alike."""
    fails = [f"{kind}.function=code.py:fails", f"{kind}.on_error=value"]
    model = [*FILE, f"{kind}.model=scorer"]
    return {
        f"{kind}.function": ("code.py:sevens",),
        f"{kind}.options": (
            "{length: {limit: 3, ramp: 2}}",
            *(f"{kind}.function=length", f"{kind}.options={{length: {{limit: 5}}}}"),
        ),
        f"{kind}.weights": ("[0.5]",),
        f"{kind}.model": ("scorer", *FILE),
        f"{kind}.model_weight": (None, *model),
        f"{kind}.model_steps": ("+", *model, "algorithm.step_credit=sum"),
        f"{kind}.shorter": (0.5,),
        f"{kind}.normalise_by": ("source", *FILE),
        f"{kind}.check": ("code.py:sevens",),
        f"{kind}.timeout_s": (0.3, f"{kind}.function=code.py:slow", f"{kind}.on_error=drop"),
        f"{kind}.on_error": ("drop", *fails),
        f"{kind}.error_value": (-2.5, *fails),
        f"{kind}.correct_at": (0.5, f"{kind}.function=code.py:short"),
    }


VALUES: dict[str, tuple] = {
    **of_scores("reward"),
    **of_scores("cost"),
    "cost.limit": (-1.0,),
    "cost.multiplier": (2.0,),
    "cost.multiplier_rate": (0.9, "cost.limit=-3"),
    "cost.multiplier_max": (
        1.01,
        "cost.multiplier=1",
        "cost.multiplier_rate=5",
        *("cost.limit=-3", "trainer.steps=3"),
    ),
    "algorithm.advantage": ("leave_one_out",),
    "algorithm.turn_credit": ("turn", *EPISODE),
    "algorithm.step_credit": ("sum", "reward.function=code.py:stepped"),
    "algorithm.gamma": (0.5, *PPO),
    "algorithm.lam": (0.5, *PPO),
    "algorithm.policy_loss": ("cispo",),
    "algorithm.clip_low": (1e-4,),
    "algorithm.clip_high": (1e-4,),
    "algorithm.dual_clip": (1.0001,),
    "algorithm.loss_options": ("{tau_positive: 2.0}", "algorithm.policy_loss=sapo"),
    "algorithm.kl_estimator": ("k1", *KL),
    "algorithm.kl_in_reward": (True, *KL),
    "algorithm.kl_target": (0.05, *IN_REWARD, "algorithm.kl_horizon=20"),
    "algorithm.kl_horizon": (40, *IN_REWARD, "algorithm.kl_target=0.05", "algorithm.kl_horizon=20"),
    "algorithm.correction_level": ("sequence", *MASKS, "algorithm.correction_low=1.0"),
    "algorithm.correction_high": (0.5, *TRUNCATES),
    "algorithm.correction_low": (1.0, *MASKS),
    "algorithm.correction_kl": (1e-17, "algorithm.correction=kpop"),
    "algorithm.negative_kl_max": (1e-9,),
    "algorithm.max_refills": (
        0,
        "algorithm.dynamic_sampling=true",
        "reward.function=code.py:sevens",
    ),
    "algorithm.replay_share": (0.5,),
    "algorithm.replay_age": (1, *REPLAYS),
    "algorithm.overlong_buffer": (3,),
    "algorithm.overlong_factor": (0.5, "algorithm.overlong_buffer=3"),
    "critic.value_clip": (1e-3,),
    "critic.warmup_steps": (1,),
    "critic.epochs": (2,),
    "actor.max_kl": (1e-6,),
    "preference.loss": ("ipo",),
    "preference.beta": (0.5,),
    "preference.margin": (0.5, "preference.loss=simpo"),
    "preference.length_normalised": (True,),
    "preference.nll_coefficient": (1.0,),
    "preference.centre": (0.1, *PAIRS),
    "preference.desirable_weight": (2.0, *KTO),
    "preference.undesirable_weight": (2.0, *KTO),
    "rollout.serve_host": ("localhost",),
    "expert.choose": ("best",),
    "expert.most_per_prompt": (1, "reward.correct_at=0.1"),
    "expert.steps_kept": (1, "reward.correct_at=0.1"),
    "distillation.loss": ("forward",),
    "distillation.top_k": (2,),
    "distillation.teacher": ("self",),
    "distillation.teacher_prompt": ("hint.txt",),
    "distillation.refresh_every": (1, *SELF),
    "distillation.refresh_share": (0.5, *SELF, "distillation.refresh_every=1"),
    "distillation.by": ("answer", *FILE, "models.teacher_x.path=model", "distillation.by=source"),
    "data.task": ("calculator",),
    "data.tasks": ("[basic_arithmetic]", *GYM),
    "data.task_options": ("{chain_sum: {max_terms: 2}}", *GYM),
    "data.rows": (10, *GYM),
    "data.path": ("others.jsonl", *FILE),
    "data.sources": (
        "{a: {path: others.jsonl}}",
        "data=mixture",
        "model.path=model",
        "data.sources={a: {path: rows.jsonl}}",
    ),
    "data.split": ("test", *SPLIT),
    "data.eval_path": ("others.jsonl", *FILE),
    "data.eval_split": ("validation", *SPLIT, "data.eval_path=split", "data.eval_split=test"),
    "data.prompt_column": ("question", *FILE),
    "data.answer_column": ("other", *FILE, "reward.function=contains"),
    "data.answer_format": ("gsm8k", *FILE, "data.answer_column=gsm", "reward.function=contains"),
    "data.response_column": ("reply", *SFT),
    "data.messages_column": ("talk", *SFT),
    "data.learn": ("last", *SFT, "data.messages_column=talk"),
    "data.chosen_column": ("better", *DPO),
    "data.rejected_column": ("worse", *DPO),
    "data.ranked_column": ("ranking", *PAIRS),
    "data.scores_column": ("scores", *PAIRS, "data.ranked_column=ranking"),
    "data.ranked_pairs": ("ends", *PAIRS, "data.ranked_column=ranking"),
    "meta.new_share": (1.0,),
    "data.task_column": ("gsm", *META, *FILE, "data.task_column=source"),
    "data.label_column": ("other_label", *KTO),
    "data.margin_column": ("margin", *PAIRS),
    "data.chat": (True, *FILE),
    "data.system_prompt": ("77", *CHAT),
    "data.tools_column": ("no_tools", *CHAT),
    "data.chat_template_options": ("{extra: 99}", *CHAT),
    "data.date": ("2020-01-23", *CHAT),
    "data.max_prompt_tokens": (4, *FILE, "data.path=long.jsonl", "data.too_long=drop"),
    "data.max_response_tokens": (1, *SFT),
    "data.too_long": ("drop", *FILE, "data.path=long.jsonl"),
    "data.bad_rows": ("drop", *FILE, "data.path=bad.jsonl", "data.bad_rows_limit=0.2"),
    "data.bad_rows_limit": (
        0.01,
        *FILE,
        "data.path=bad.jsonl",
        "data.bad_rows=drop",
        "data.bad_rows_limit=0.2",
    ),
    "data.sampler": ("pass_rate", "trainer.steps=4"),
    "data.sampler_options": ("{explore: 0.9}", "data.sampler=pass_rate", "trainer.steps=4"),
    "actor.tokens_per_microbatch": (32,),
    "actor.lora.rank": (4, "model.path=model"),
    "actor.lora.alpha": (4.0, *LORA),
    "actor.lora.targets": ("[q_proj]", *LORA),
    "actor.lora.path": ("adapters", "model.path=model"),
    "actor.lora.base_format": ("nf4", *LORA),
    "actor.optimizer.warmup_steps": (3,),
    "actor.optimizer.min_ratio": (0.5, "actor.optimizer.schedule=linear"),
    "actor.optimizer.max_grad_norm": (0.01,),
    "actor.optimizer.moments": ("int8",),
    "actor.optimizer.name": ("muon",),
    "actor.optimizer.options": ("{nesterov: false}", "actor.optimizer.name=muon"),
    "actor.optimizer.decay_share": (0.9, "actor.optimizer.schedule=wsd"),
    "actor.router_loss_weight": (0.1, *EXPERTS),
    "rollout.engine": ("pipeline",),
    "rollout.min_tokens": (4,),
    "rollout.partial": (0.5,),
    "rollout.partial_steps": (1, "rollout.partial=0.2", "rollout.max_tokens=24", "trainer.steps=4"),
    "rollout.top_p": (0.5,),
    "rollout.top_k": (2,),
    "rollout.min_p": (0.5,),
    "rollout.stop": ("['1']",),
    "rollout.episode": ("code.py:Tool",),
    "rollout.max_turns": (1, *EPISODE),
    "rollout.max_turn_tokens": (2, *EPISODE),
    "rollout.tool_timeout_s": (0.1, "rollout.episode=code.py:SlowTool", *TURNS),
    "eval.every": (1,),
    "eval.by_column": ("source", *FILE),
    "eval.sets": ("{a: {samples: 2}}",),
    "eval.held_out": (False, "eval.sets={a: {samples: 2}}"),
    "eval.baseline": ("first",),
    "eval.stop.metric": ("accuracy", "trainer.steps=4", "eval.every=1", "eval.stop.patience=1"),
    "eval.stop.patience": (1, *STOPS, "eval.stop.target=5"),
    "eval.stop.target": (-1.0, *STOPS, "eval.stop.patience=9"),
    "eval.stop.least": (9.0, *SFT, *STOPS, "eval.stop.metric=-eval/loss", "eval.stop.patience=2"),
    "rollout.plan": ("plan.json",),
    "rollout.engine_options": ("{block_size: 16}",),
    "rollout.adapters": ("separate", *LORA),
    "checkpoint.best": ("accuracy",),
    "checkpoint.folder": ("kept", "checkpoint.every=1"),
    "warmup.steps": (3,),
    "warmup.examples_per_step": (8, "warmup.steps=3"),
    "warmup.learning_rate": (1e-4, "warmup.steps=3"),
    "trainer.name": ("remax",),
    "observe.samples_every": (1,),
    "cache.use": ("[log_probs]", *KL, "cache.folder=cached"),
    "guard.most_mismatch": "a generator that is far off ends a job: test_generator_check.py",
    "observe.show_every": (1,),
    "model.path": ("other", "model.path=model"),
    "model.tokenizer": ("model", "model.path=other"),
    "model.save_dtype": ("bfloat16",),
    "model.file_gib": (1e-4,),
}
"""The value of a setting, None for any other than the job's, and what makes it count."""
PLANNED: dict[str, tuple] = {
    "actor.gradient_checkpointing": ("full",),
    "actor.offload_parameters": (True,),
    "actor.offload_optimizer": (True,),
    "actor.offload_between_calls": (True,),
    "actor.parallel.tp": (2,),
    "actor.parallel.pp": (2,),
    "actor.parallel.chunks": (2, "actor.parallel.pp=2"),
    "actor.parallel.ulysses": (2,),
    "actor.parallel.ring": (2,),
    "actor.parallel.shards": (2,),
    "actor.parallel.gradients": ("int8",),
    "actor.parallel.weights": ("int4_difference",),
    "rollout.parallel.tp": (2,),
    "rollout.memory_share": (0.2,),
    "rollout.kv_cache": ("fp8", *FULL_CACHE),
    "rollout.cuda_graphs": (False,),
    "rollout.quantization": ("fp8",),
    "rollout.max_sequences": (4,),
}
"""Settings of memory and of cuts, which change no number, but the plan for other devices."""
EXCEPTIONS = {
    "*.judge.*": "a judge is a vLLM of its own: test_judge.py, test_judge_modes.py",
    "actor.compile": "kernels of layers, which change the time alone: test_compiled_layers.py",
    "*.processes": "how many work, which changes the time alone",
    "rollout.kv_cache_gib": "the cache of vLLM on CPUs: test_planner_memory.py",
    "*.env": "variables that a reward function's process is given: test_secret_variables.py",
    "rollout.verify_weights": "a comparison that sound weights pass: test_weight_sync.py",
    "guard.on_nan": "what becomes of a loss that is not finite: test_bad_steps.py",
    "guard.most_skipped": "how many such losses end a job: test_bad_steps.py",
    "guard.most_mismatch": "a generator that is far off ends a job: test_generator_check.py",
    "resources": "speed and the console alone: test_core_isolation.py, test_pinned_stages.py",
    "cache.folder": "where values are kept: test_content_cache.py",
    "distillation.alignment": "nothing changes with one tokenizer: test_other_teachers.py",
    "cache.max_gib": "how many values are kept: test_content_cache.py",
    "observe.show_every": "the console alone: test_observe_console.py",
    "rollout.serve": "such a job waits for programs that others start: test_environment_jobs.py",
}
"""Settings that this test does not flip, and why."""
BY_GROUP = {
    **{"cost": SAFE, "preference": DPO, "expert": EXPERT, "distillation": TEACHER, "critic": PPO},
    "meta": META,
    **dict.fromkeys(("algorithm", "reward", "rollout", "actor", "data", "eval", "warmup"), ()),
    **dict.fromkeys(("trainer", "observe", "cache", "guard", "model", "checkpoint"), ()),
}
"""The groups whose settings are flipped, and the job in which they count."""
CODE = """
import asyncio
import time

import hybridrl


def short(response, **row):
    return max(0.0, 1.0 - len(response) / 6)


def ones(response, **row):
    return float(response.count("1"))


def sevens(response, **row):
    return float(response.count("7"))


def slow(response, **row):
    time.sleep(0.7 if "7" in response else 0.0)
    return float(len(response))


def fails(response, **row):
    if "7" in response:
        raise ValueError("a seven")
    return float(len(response))


def stepped(response, **row):
    steps = [[at, 0.5 * response[:at].count("1")] for at in (1, 3, 5) if at <= len(response)]
    return {"score": 0.0, "steps": steps}


class Tool:
    async def reset(self, row):
        return None

    async def step(self, text, ids):
        return hybridrl.Turn("+1=", reward=0.3 * text.count("1"), done="7" in text)


class SlowTool(Tool):
    async def step(self, text, ids):
        await asyncio.sleep(0.3 if "1" in text else 0.0)
        return await super().step(text, ids)
"""
TEMPLATE = """\
{% if tools %}{{ tools | length }}=={% endif %}{{ strftime_now('%d') }}+{{ extra or '' }}\
{% for m in messages %}{{ '=' if m.role == 'assistant' }}{{ m.content }}+{% endfor %}\
{{ '=' if add_generation_prompt }}"""
NOT_COMPARED = {"config.yaml", "cluster.json", "status.json", "steps.jsonl", "report.html"}
MEASURED = ("time/", "share/", "throughput/", "memory/")
OF_THE_MOMENT = ("seconds", "command", "versions", "git_commit", "date", "model", "baseline")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Runs jobs in a folder with all that they name."""
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        _write_inputs(folder)
        yield Jobs(folder)


class Jobs:
    """Runs of this module; that of the unchanged settings is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._kept, self._number = folder, {}, 0

    def left_by(self, overrides: list[str]) -> dict[str, object]:
        """What a run of these settings leaves, without what is measured."""
        self._number += 1
        run = self.folder / f"run-{self._number}"
        try:
            main.run(load_config([f"run.directory={run}", *overrides]))
            files = [path for path in run.rglob("*") if path.is_file()]
            return {str(path.relative_to(run)): _content(path) for path in files}
        finally:
            shutil.rmtree(run, ignore_errors=True)

    def before(self, overrides: list[str]) -> dict[str, object]:
        """As `left_by`, once for all settings that are flipped in this job; a refusal is all that
        a job leaves that is refused."""
        if (key := tuple(overrides)) not in self._kept:
            try:
                self._kept[key] = self.left_by(overrides)
            except HybridRLError as error:
                self._kept[key] = {"refused": str(error)}
        return self._kept[key]


def flipped(name: str, before: list[str], value: object) -> str:
    config = load_config(before)
    if value is None:
        now = config
        for part in name.split("."):
            now = getattr(now, part)
        value = another_value(name, list_settings()[name], now)
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def names() -> list[str]:
    found = [name for name in list_settings() if name.partition(".")[0] in BY_GROUP]
    return [name for name in found if not any(fnmatch(name, one) for one in EXCEPTIONS)]


@pytest.mark.parametrize("name", names())
def test_a_setting_changes_something_or_is_told(name, jobs, capsys):
    value, *beside = VALUES.get(name, PLANNED.get(name, (None,)))
    is_other_program = any(one.startswith("algorithm=") for one in beside)
    of_group = () if is_other_program else BY_GROUP[name.partition(".")[0]]
    before = [*(PLAN if name in PLANNED else JOB), *of_group, *beside]
    change = flipped(name, before, value)
    try:
        if any(
            said.startswith(f"{name}=")
            for said in find_ineffective_settings(load_config([*before, change]))
        ):
            return
        if name in PLANNED:
            assert _plan(before, capsys) != _plan([*before, change], capsys)
            return
        after = jobs.left_by([*before, change])
    except HybridRLError as error:
        assert name in str(error)
        return
    said = capsys.readouterr().out
    if after == jobs.before(before):
        assert re.search(rf"^{re.escape(name)}=", said, re.M), f"{change} did nothing, in silence"


def _plan(overrides: list[str], capsys) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command_line(["plan", "--json", "--devices", "8xH100", *overrides])
    assert end.value.code == 0
    return capsys.readouterr().out


def _content(path: Path) -> object:
    if path.name in NOT_COMPARED or path.suffix == ".log":
        return None
    if path.suffix == ".jsonl":
        return [_lasting(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return _lasting(json.loads(path.read_text()))
    if path.suffix == ".parquet":
        return repr(pq.read_table(path).to_pylist())  # NaN equals itself as text
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lasting(read: object) -> object:
    """Without measurements, of which only the names are compared."""
    if isinstance(read, list):
        return [_lasting(one) for one in read]
    if isinstance(read, dict):
        return {
            key: None if key.startswith((*MEASURED, *OF_THE_MOMENT)) else _lasting(value)
            for key, value in read.items()
        }
    return repr(read) if isinstance(read, float) else read


def _write_inputs(folder: Path) -> None:
    (folder / "code.py").write_text(CODE)
    (folder / "hint.txt").write_text("{answer}+{prompt}")
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    rows = []
    for a in range(24):
        b = (7 * a) % 10
        rows.append(
            {
                **{"prompt": f"{a}+{b}=", "question": f"{b}+{a}=", "answer": str(b)},
                **{"other": str((b + 3) % 10), "response": str(a + b), "reply": str(a)},
                **{"chosen": f"{a + b}", "rejected": str(b), "worse": "+", "better": f"{a}{b}"},
                **{"margin": float(a % 3), "source": "xy"[a % 2], "gsm": f"so #### {b}"},
                "tools": [{"type": "function", "function": tool}],
                "no_tools": [],
                "label": a % 3 == 0,
                "other_label": a % 2,
                "ranking": [str(a + b), f"{a}{b}", str(b)],
                "scores": [0.0, float(a), 2.0],
                "talk": [
                    {"role": role, "content": text}
                    for role, text in (
                        *(("user", str(a)), ("assistant", str(b))),
                        *(("user", "1"), ("assistant", "23")),
                    )
                ],
            }
        )
    (folder / "split").mkdir()
    files = {
        "rows.jsonl": rows,
        "others.jsonl": [{**row, "prompt": f"{row['question']}1="} for row in rows],
        "bad.jsonl": [{**rows[0], "prompt": None}, *rows[1:]],
        "long.jsonl": [{**rows[0], "prompt": "1+" * 30}, *rows[1:]],
        "split/train.jsonl": rows[:12],
        "split/test.jsonl": rows[12:18],
        "split/validation.jsonl": rows[18:],
    }
    for name, written in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, written)))
    made = {
        "first": JOB,
        "second": [*JOB, "run.seed=1", "trainer.steps=1"],
        "third": [*JOB, "algorithm=reward_model", "actor.updates_per_step=1"],
    }
    for name, overrides in made.items():
        main.run(load_config([f"run.directory={folder / name}", *overrides]))
    shutil.copytree(folder / "first/initial_model", folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    shutil.copytree(folder / "second/model", folder / "other")
    shutil.copytree(folder / "third/model", folder / "scorer")
    lora = ["model.path=model", "actor.lora.rank=2", f"run.directory={folder / 'fourth'}"]
    main.run(load_config([*JOB, *lora]))
    shutil.copytree(folder / "fourth/model", folder / "adapters")
