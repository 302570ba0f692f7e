"""Wrong settings, and right ones that look odd: for every setting what its type and its range rule
out, and by hand what does not go together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_origin

from campaigns.campaign import Case

from hybridrl.composition.setting_names import OPEN_SETTINGS, list_settings
from hybridrl.config.constraints import (
    NameOrNames,
    NotEmpty,
    NumberRange,
    OneOf,
    OneOrMoreOf,
    RegexWithGroup,
)
from hybridrl.config.setting_types import is_optional, list_constraints, strip_annotations

HERE = ["executor=inline", "rollout=transformers"]
PRESETS = {"preference": ["algorithm=dpo"], "cost": ["algorithm=safe_rlhf"]}
"""What makes groups that are not in every job."""


def case(overrides: str, expect: str, before: list[str] = HERE) -> Case:
    """Overrides with two blanks between them."""
    return Case(overrides, lambda _: [*before, *overrides.split("  ")], expect)


def of_types() -> Iterator[Case]:
    """Values of another type, or outside of the range, of every setting."""
    for name, hint in list_settings().items():
        if name in OPEN_SETTINGS:
            continue
        before = [*HERE, *PRESETS.get(name.split(".")[0], [])]
        said = rf"(^|\* ){re.escape(name)}=.*(must|names no folder)"
        for value in sorted({*_of_type(hint), *_of_range(hint)}):
            yield case(f"{name}={value}", said, before)
        if not is_optional(hint) and strip_annotations(hint) is not Any:
            yield case(f"{name}=null", rf"{re.escape(name)}=null: must have a value", before)


def _of_type(hint: Any) -> Iterator[str]:
    kind = strip_annotations(hint)
    if kind is int:
        yield from ("soon", "1.5", "[1]", "99999999999999999999999")
    elif kind is float:
        yield from ("much", "nan", "-inf", "[1.0]")
    elif kind is bool:
        yield from ("perhaps", "[true]")
    elif get_origin(kind) is list:
        yield from ("5", "{a: 1}")


def _of_range(hint: Any) -> Iterator[str]:
    for bound in list_constraints(hint):
        if isinstance(bound, NumberRange):
            if bound.least is not None:
                yield f"{bound.least - 1}"
            if bound.above is not None:
                yield f"{bound.above}"
            if bound.most is not None:
                yield f"{bound.most + 1}"
            elif bound.below is not None:
                yield f"{bound.below}"
            else:
                yield "10000000000"
        elif isinstance(bound, OneOf | OneOrMoreOf):
            yield from ("nonsense", "5")
        elif isinstance(bound, NotEmpty):
            yield " "
        elif isinstance(bound, RegexWithGroup):
            yield from ("(", "score")
        elif isinstance(bound, NameOrNames):
            yield from ("5", "[exact, 5]", "{a: 1}")


TYPES = list(of_types())
NAMES = [
    case("trainer.stepz=3", "Did you mean `trainer.steps`"),
    case("+trainer.stps=3", "Did you mean `trainer.steps`"),
    case("++trainer.stps=3", "Did you mean `trainer.steps`"),
    case("++models_.critic.path=x", "There is no setting"),
    case("lr=1e-4", "`actor.optimizer.learning_rate`"),
    case("actor.optim.lr=1e-4", "`actor.optimizer.learning_rate`"),
    case("algorithm.kl_coef=0.1", "`algorithm.kl_coefficient`"),
    case("num_generations=4", "`rollout.samples_per_prompt`"),
    case("gpu_memory_utilization=0.4", "`rollout.memory_share`"),
    case("trainer.save_freq=20", "`checkpoint.every`"),
    case("data.train_batch_size=8", "`data.prompts_per_step`.*counts prompts"),
    case("trust_remote_code=true", "are not loaded"),
    case("=5", "There is no setting ``"),
    case("steps", "write key=value"),
    case("~algorithm", "can be taken away"),
    case("~data.system_prompt=x", "can be taken away"),
    case("algorithm=ppoo", "Did you mean `ppo`"),
    case("algorithm=", "there is no `algorithm` called"),
    case("algorithm=null", "there is no `algorithm` called"),
    case("algorithm=[ppo,dpo]", "there is no `algorithm` called"),
    case("algorithm=ppo  algorithm=dpo", "a job has one `algorithm`"),
    case("rollout=sglang", "there is no `rollout` called"),
    case("data=csv", "there is no `data` called"),
    case("placement=everywhere", "there is no `placement` called"),
    case("trainer=ppo", "`trainer` is a group of settings"),
    case("actor.optimizer=adam", "`actor.optimizer` is a group of settings"),
    case("model=Qwen/Qwen3-8B", "`model` is a group of settings"),
    case("model=null", "`model` is a group of settings"),
    case("model.tiny={layrs: 1}", "no setting `model.tiny.layrs`"),
    case("model.tiny={layers: many}", "model.tiny.layers=many: must be a whole number"),
    case("cost.limit=3", "`cost` is set by algorithm=safe_rlhf"),
    case("preference.beta=3", "`preference` is set by algorithm=dpo"),
    case("recipe=/no/such.yaml", "recipe=/no/such.yaml could not be read"),
    case("recipe=/", "recipe=/ could not be read: Is a directory"),
    case("resume=/no/such/run", "resume=/no/such/run: there is no such folder"),
    case("fork=/no/such/run", "fork=/no/such/run: there is no such folder"),
    case("resume=auto", "resume=auto"),
    case("trainer.steps=${oc.env:HYBRIDRL_NOT_SET}", "HYBRIDRL_NOT_SET' not found"),
    case("trainer.steps=${run.name}", "trainer.steps.*must be a whole number"),
    case("trainer.steps=${nothing}", "trainer.steps=.*nothing"),
    case("run.name=${", "begins a reference"),
    case("run.name=a\0b", "without the character NUL"),
    case("data.system_prompt=\0", "without the character NUL"),
]
TOGETHER = [
    case("trainer.name=gpro", "Did you mean `grpo`"),
    case("trainer.name=no/such.py:Class", "trainer.name"),
    case("trainer.name=os:path", "trainer.name=os:path"),
    case("algorithm.advantage=gae", "algorithm.advantage=gae: must be one of"),
    case("algorithm.policy_loss=ppo", "algorithm.policy_loss=ppo: must be one of"),
    case("algorithm.policy_loss=os:getcwd", "algorithm.policy_loss"),
    case("algorithm.loss_options.tau=1", "loss_options has `tau`"),
    case("algorithm.loss_options.tau=nan", "loss_options"),
    case("algorithm.loss_options=5", "must be a dictionary"),
    case("algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0"),
    case("algorithm.kl_target=0.1", "algorithm.kl_target"),
    case("algorithm.correction=mask  algorithm.correction_high=null", "has no bound"),
    case(
        "algorithm.correction=mask  algorithm.correction_low=3",
        "algorithm.correction_low=3.0.*high",
    ),
    case("algorithm.overlong_buffer=99", "algorithm.overlong_buffer=99"),
    case("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1"),
    case("rollout.min_tokens=99", "rollout.min_tokens=99"),
    case("rollout.top_p=0.9", "rollout.top_p=0.9"),
    case("rollout.top_k=50", "rollout.top_k=50"),
    case("rollout.parallel.tp=2", "rollout.parallel.tp=2 needs rollout=vllm"),
    case("rollout.routing_replay=true", "rollout.routing_replay=true"),
    case("rollout.adapters=separate", "rollout.adapters=separate"),
    case("rollout.episode=nowhere:Tool", "rollout.episode"),
    case("rollout.episode=Tool", "rollout.episode"),
    case("rollout.stop=['']", "each must not be empty"),
    case("rollout.stop=</s>", "Write it in brackets"),
    case("rollout.engine_options=5", "must be a dictionary"),
    case("rollout.engine_options.block_size=16", "they need rollout=vllm"),
    case("rollout.engine_options.blok_size=16", "no such option", ["num_devices=1"]),
    case("rollout.engine_options.dtype=half", "set model.dtype instead", ["num_devices=1"]),
    case("rollout.engine_options.load_format=dummy", "cannot be set", ["num_devices=1"]),
    case("model.dtype=float16", "model.dtype=float16"),
    case("model.tiny.heads=256", "model.tiny"),
    case("model.tiny.hidden_size=3  model.tiny.heads=1", "model.tiny"),
    case("model.tiny.hidden_size=100  model.tiny.heads=3", "model.tiny"),
    case("model.tiny.experts=1", "model.tiny.experts=1"),
    case("model.path=/no/such", "model.path=/no/such.*no such folder"),
    case("model.path=/tmp", "model.path=/tmp has no config.json"),
    case("model.tokenizer=/no/such", "model.tokenizer=/no/such"),
    case("models.actor.path=x", "models.actor.path is called model.path"),
    case("models.critic.path=x", "has no role `critic`"),
    case("models.critic=5", "models.critic=5: is a group of settings", [*HERE, "algorithm=ppo"]),
    case("models=5", "models=5: must be a dictionary"),
    case("models.critic.pth=x", "no setting `models.critic.pth`", [*HERE, "algorithm=ppo"]),
    case("models.critic.path=/no/such", "models.critic.path=/no/such", [*HERE, "algorithm=ppo"]),
    case("models.critic.path=5", "models.critic.path=5", [*HERE, "algorithm=ppo"]),
    case("models.critic.parallel=2", "is a group of settings", [*HERE, "algorithm=ppo"]),
    case("models.critic.parallel.tq=2", "no setting `models.crit", [*HERE, "algorithm=ppo"]),
    case("models.critic.parallel.tp=0", "critic.parallel.tp=0: must", [*HERE, "algorithm=ppo"]),
    case("models.critic.parallel.tp=x", "critic.parallel.tp=x: must", [*HERE, "algorithm=ppo"]),
    case("models.critic.optimizer.lr=1", "`models.critic.optimizer.lr`", [*HERE, "algorithm=ppo"]),
    case("models.critic.optimizer.learning_rate=nan", "must be a finite", [*HERE, "algorithm=ppo"]),
    case("models.critic.optimizer.betas=[0.9]", "must have 2", [*HERE, "algorithm=ppo"]),
    case("models.critic.optimizer.schedule=exp", "must be one of", [*HERE, "algorithm=ppo"]),
    case("actor.lora.rank=8", "actor.lora.rank=8"),
    case("actor.lora.targets=[]", "actor.lora.targets"),
    case("actor.optimizer.betas=[0.9]", "must have 2 entries"),
    case("actor.optimizer.betas=[0.9,1.0]", "less than 1"),
    case("actor.optimizer.betas=[a,b]", "must be a list"),
    case("actor.optimizer.moments=bfloat16  actor.optimizer.betas=[0.9,0.999]", "rounds away"),
    case("actor.updates_per_step=99999", "more than the 1024 samples"),
    case("actor.parallel.tp=2", "actor.parallel"),
    case("actor.parallel.dp=3", "actor.parallel"),
    case("actor.parallel.chunks=2", "actor.parallel"),
    case("actor.parallel.shards=3", "actor.parallel"),
    case("actor.gradient_checkpointing=selective  actor.parallel.ring=2", "ring"),
    case("actor.router_loss_weight=0.1", "actor.router_loss_weight=0.1"),
    case("num_devices=2", "executor=inline runs on one device"),
    case("num_devices=100000", "num_devices", ["rollout=transformers"]),
    case("devices=cuda", "devices=cuda"),
    case("devices=tpu", "devices=tpu: must be one of"),
    case("placement.staleness=1", "needs generation on devices of its own"),
    case("placement.in_flight=true", "placement.in_flight=true"),
    case("placement.generation_devices=1", "placement.generation_devices=1.*placement=separation"),
    case("placement=separation", "needs a device that trains and one that generates"),
    case("placement=file", "placement.path"),
    case("placement=file  placement.path=/no/such.json", "placement.path=/no/such.json"),
    case("placement=explicit", "placement.roles"),
    case("placement=explicit  placement.roles.actor.devices=[7]", "devices"),
    case("placement=explicit  placement.roles.actor.devices=0", "must be a list of device numbers"),
    case(
        "placement.roles.actor.devicez=[0]", "There is no setting `placement.roles.actor.devicez`"
    ),
    case("placement.roles.actr.devices=[0]", "placement.roles.actr"),
    case("placement.roles.actor.share=2", "placement.roles.actor.share=2"),
    case("placement.roles.actor.share=nan", "placement.roles.actor.share=nan"),
    case("placement.roles.actor=5", "placement.roles.actor=5"),
    case("placement.roles=5", "must be a dictionary"),
    case("placement.strategy=nowhere.py:place", "placement.strategy"),
    case("checkpoint.memory_copies=1  checkpoint.every=1", "one process"),
    case("checkpoint.folder=nope://x  checkpoint.every=1", "nope"),
    case("guard.on_nan=rewind", "nothing to go back to"),
    case("recover.min_devices=5", "recover.min_devices=5"),
    case("warmup.steps=5  data=jsonl  data.path=/x", "warmup.steps=5"),
    case("data.task=arithmatic", "data.task.*Did you mean `arithmetic`"),
    case("data.task=no.such.module", "data.task"),
    case("data.path=/no/such.jsonl", "Both data.task=arithmetic and data.path"),
    case("data=jsonl", "There are no prompts"),
    case("data=jsonl  data.path=/no/such.jsonl  model.path=/tmp", "no config.json"),
    case("data.sampler=nowhere:Sampler", "data.sampler"),
    case("data.sampler=5", "data.sampler"),
    case("reward.function=exakt", "Did you mean `exact`"),
    case("reward.function=null", "reward"),
    case("reward.function=[]", "reward"),
    case("reward.function=/no/such.py:f", "/no/such.py"),
    case("reward.function=os:nothing", "nothing"),
    case("reward.options=5", "must be a dictionary"),
    case("reward.options.exact.tolerence=1", "tolerence"),
    case("reward.options.numeric.tolerance=1", "reward.options"),
    case("reward.function=format  reward.options.format.pattern=(", "pattern"),
    case("reward.weights=[1,2]", "reward.weights"),
    case("reward.weights=1,2", "Write it in brackets"),
    case("reward.model=/no/such", "reward.model=/no/such"),
    case("reward.judge.path=/no/such", "reward.judge.path=/no/such"),
    case("reward.judge.template=/no/such", "reward.judge.template=/no/such", HERE),
    case("reward.judge.path=some/judge  reward.judge.context=9", "leaves no room"),
    case("critic.value_clip=0.2", "has no critic"),
    case("algorithm=ppo  trainer.name=grpo", "has no critic"),
    case("algorithm=dapo  trainer.name=ppo", "algorithm.dynamic_sampling"),
    case("algorithm=safe_rlhf  cost=null", "cost belongs to Safe-RLHF"),
    case("algorithm=safe_rlhf  cost.multiplier_max=0.1", "cost.multiplier_max=0.1"),
    case("algorithm=safe_rlhf  cost.weights=[1,2]", "weights. has 2 entries"),
    case("algorithm=dpo  actor.updates_per_step=2", "actor.updates_per_step=2"),
    case("algorithm=evaluate  resume=/tmp", "resume=/tmp"),
    case("metrics=weights", "metrics=weights: must be one of"),
    case("metrics=[wandb,tensorbord]", "Did you mean `tensorboard`"),
    case("run.directory=/proc/nothing", "run.directory"),
    case("run.root=/proc/nothing", "run.root"),
    case("eval.by_column=nothing", "eval.by_column is `nothing`"),
    case("eval.prompts=100000", "eval.prompts"),
    case("data.max_prompt_tokens=2", "data.max_prompt_tokens"),
    case("model.tiny.context=8", "longest sample has 14 tokens"),
]
RIGHT = [
    case(overrides, "works")
    for overrides in (
        "run.name=日本語",
        "run.name=a = ~b, [c {d 100% \\e",
        "run.name='hello, world'",
        "+trainer.steps=3",
        "++trainer.steps=3",
        "trainer.steps=3  trainer.steps=4",
        "rollout.stop=[</s>, <|im_end|>]",
        "reward.function=[exact,contains]  reward.weights=[1,0.5]",
        "reward.function=format  reward.options.format.pattern=<think>.*</think>.*",
        "model.tiny={hidden_size: 64, layers: 1, heads: 2}",
        "actor.compile=true",
        "actor.gradient_checkpointing=true",
        "metrics=null",
        "preference=null",
        "algorithm=safe_rlhf  cost.limit=-3",
        "algorithm=ppo  models.critic.optimizer.learning_rate=1e-4",
        "reward.error_value=-1",
        "algorithm.entropy_coefficient=-0.01",
        "run.seed=4294967295",
    )
]
CASES = [*TYPES, *NAMES, *TOGETHER, *RIGHT]
