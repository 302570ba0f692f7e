"""Small jobs to be worked out again by `plain_torch`: every program, with what changes the numbers
that it learns from."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.models.model_loading import make_tiny_model

PROGRAM = '''
import math
from hybridrl import Turn

def digits(prompt, response, **row):
    """Differs between most answers."""
    return float(sum(map(ord, response)) % 7) / 3

def holes(prompt, response, **row):
    """As `digits`; none for a third of the answers to what is learned from."""
    number = sum(place * ord(c) for place, c in enumerate(prompt + response, 1))
    is_held_out = prompt.startswith("1")
    return math.nan if number % 3 == 0 and not is_held_out else digits(prompt, response)

def short(prompt, response, **row):
    """Of another size than `digits`."""
    return -10.0 * len(response)

def cost(prompt, response, **row):
    return float(len(response) % 3)

class Talk:
    """Says one to three digits after each turn but the third, which is the last."""

    async def reset(self, row):
        self.turns = 0

    async def step(self, text, ids):
        self.turns += 1
        number = sum(map(ord, text))
        return Turn("7" * (1 + number % 3), done=self.turns == 3, reward=float(number % 5))
'''
TASK = f"""
CHARACTERS = {CHARACTERS!r}

def problems(count_held_out, seed):
    rows = [{{"prompt": f"{{n}}+{{n}}=", "answer": str(2 * n)}} for n in range(1, 9)]
    return rows[:3], rows[3 : 3 + count_held_out]
"""
STEPS, PROMPTS, SAMPLES = 3, 3, 4
BASE = [
    *("rollout=transformers", "devices=cpu", "warmup.steps=0", f"trainer.steps={STEPS}"),
    *(f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
    *("rollout.max_tokens=6", "eval.prompts=1", "eval.every=0"),
    *("observe.samples_every=1", "observe.show_every=0", "metrics=null"),
    # Where a gradient is as small as its rounding, Adam moves by as much as elsewhere: a low rate.
    "actor.optimizer={learning_rate: 3e-4, warmup_steps: 1, schedule: cosine, min_ratio: 0.2}",
    "actor.optimizer.weight_decay=0.1",
    "actor.tokens_per_microbatch=40",
]

OF_2026 = ("luspo", "vespo", "dppo", "dppo_kl", "maxrl", "gdpo")
GRPO = ("dr_grpo", "dapo", "cispo", "gspo", "sapo", "gmpo", "rloo", "opo", "pass_at_k", *OF_2026)
"""Programs that are settings of `grpo`."""
PLUS_PLUS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
CRITICS = ("ppo", "remax", "safe_rlhf")
TAUGHT = ("distillation", "forward", "sampled")
WITHOUT_REFERENCE = {
    "simpo": ("preference.loss=simpo", "preference.beta=2.0", "preference.margin=0.7"),
    "orpo": ("preference.loss=orpo", "preference.beta=0.4"),
    "cpo": ("preference.loss=cpo", "preference.beta=0.3", "preference.nll_coefficient=0.6"),
}
"""Losses of `dpo` and `online_dpo` that need no reference model."""
PAIRED = ("dpo", "ipo", *WITHOUT_REFERENCE, "reward_model", "kto")
GIVEN = ("sft", *PAIRED, "offline_distillation", "offline_reverse")
"""Programs that learn from files."""
ONLINE = tuple(f"online_{name}" for name in WITHOUT_REFERENCE)
PROGRAMS = (
    *("grpo", *GRPO, *PLUS_PLUS, *CRITICS),
    *("expert_iteration", "best_of_n", "online_dpo", *ONLINE, *TAUGHT, *GIVEN),
)
SAME = {  # other names for programs with other settings
    "best_of_n": ("expert_iteration", "expert.choose=best", "expert.steps_kept=2"),
    "forward": ("distillation", "distillation.loss=forward"),
    "sampled": ("distillation", "distillation.loss=sampled"),
    "dppo_kl": ("dppo", "algorithm.policy_loss=dppo_kl"),
    "ipo": ("dpo", "preference.loss=ipo", "preference.length_normalised=true"),
    **{name: ("dpo", *settings) for name, settings in WITHOUT_REFERENCE.items()},
    **{f"online_{n}": ("online_dpo", *settings) for n, settings in WITHOUT_REFERENCE.items()},
    "offline_reverse": ("offline_distillation", "distillation.loss=reverse"),
}
SLOWER = "actor.optimizer.learning_rate=1e-4"
"""At the usual rate, a few weights whose gradient is rounding change log-probabilities by 4e-5."""
CLIPPED = ("algorithm.clip_low=0.003", "algorithm.clip_high=0.005")
"""Close enough for some tokens of a second update to be clipped."""
OWN = {
    **dict.fromkeys(("grpo", "dr_grpo", "cispo", "gmpo", "pass_at_k", *PLUS_PLUS), CLIPPED),
    "gspo": ("algorithm.clip_low=0.001", "algorithm.clip_high=0.002", "actor.updates_per_step=1"),
    "luspo": ("algorithm.clip_low=0.001", "algorithm.clip_high=0.002", "actor.updates_per_step=1"),
    "dppo": ("algorithm.clip_low=2e-4", "algorithm.clip_high=3e-4"),
    "dppo_kl": ("algorithm.clip_low=2e-7", "algorithm.clip_high=3e-7"),
    "vespo": (SLOWER,),
    "gdpo": ("reward.weights=[1.0, 0.3]", SLOWER),
    "dapo": ("algorithm.max_refills=1", *CLIPPED),
    "ppo": (*CLIPPED, "algorithm.gamma=0.9", "algorithm.lam=0.8"),
    "safe_rlhf": (
        *(*CLIPPED, "algorithm.gamma=0.9"),
        *("cost.limit=0.7", "cost.multiplier_rate=0.5"),
    ),
    "reinforce_plus_plus": ("algorithm.gamma=0.9", *CLIPPED),
    "reward_model": ("preference.centre=0.02",),
    "dpo": ("preference.beta=0.3", "preference.nll_coefficient=0.2"),
    "distillation": ("distillation.top_k=5",),
    "forward": ("distillation.top_k=5",),
    "online_dpo": ("preference.beta=0.3",),
    "kto": ("preference.beta=0.3", "preference.desirable_weight=1.5"),
}
OPTIONS = {
    "alone": (),
    "temperature": ("rollout.temperature=0.7",),
    "two updates": ("actor.updates_per_step=2",),
    "two epochs": ("actor.epochs=2",),
    "critic epochs": ("critic.epochs=3",),
    "KL limit": ("actor.epochs=2", "actor.max_kl=1e-4"),
    "KL in the loss": ("algorithm.kl_coefficient=0.1",),
    "KL in the reward": ("algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"),
    "entropy": ("algorithm.entropy_coefficient=0.05",),
    "LoRA": ("actor.lora.path={adapters}",),
    "4 bits": ("actor.lora.path={adapters}", "actor.lora.base_format=nf4"),
    "correction": ("algorithm.correction=truncate", "algorithm.correction_high=0.9"),
    "kept sets": ("rollout.top_p=0.8", "rollout.top_k=7", "rollout.min_tokens=2"),
    "geometric": (
        *("algorithm.correction=mask", "algorithm.correction_level=geometric"),
        *("algorithm.correction_low=0.9995", "algorithm.correction_high=1.0005"),
    ),
    "kpop": ("algorithm.correction=kpop", "algorithm.correction_kl=1e-7"),
    "far negatives": ("algorithm.negative_kl_max=3e-4",),
    "uncorrected": ("algorithm.correction=none",),
    "staleness": (
        "placement=separation",
        "placement.staleness=1",
        "placement.generation_devices=1",
    ),
    "tool tokens": (
        *("rollout.episode={program}:Talk", "rollout.max_turn_tokens=2"),
        "rollout.max_tokens=10",
    ),
    "supervised": (
        *("algorithm.ptx_coefficient=0.05", "data.task=plain_tasks.doubles"),
        *("data.path=null", "data.eval_path=null"),
    ),
    "dropped samples": ("reward.function={program}:holes", "reward.on_error=drop"),
}
# Muon computes in bfloat16, in which a gradient that is rounded otherwise may differ by 0.4%.
_MUON = ("actor.optimizer.name=muon", "actor.optimizer.learning_rate=5e-5")
OPTIMIZERS = {
    "muon": _MUON,
    "adafactor": ("actor.optimizer.name=adafactor", "actor.optimizer.learning_rate=1e-2"),
    "int8": ("actor.optimizer.moments=int8", "actor.optimizer.schedule=inverse_sqrt"),
    "muon in int8": (*_MUON, "actor.optimizer.moments=int8"),
}
CHOSEN = ("expert_iteration", "best_of_n", "online_dpo", *ONLINE)
"""Programs that learn from some of their samples, without advantages."""
WITHOUT_RATIOS = (*CHOSEN, "sft", *PAIRED)
REFUSED = {
    "two updates": ("online_dpo", *ONLINE, *PAIRED),
    "two epochs": (*CHOSEN, *GIVEN),
    "critic epochs": tuple(name for name in PROGRAMS if name not in ("ppo", "safe_rlhf")),
    "KL limit": (*CHOSEN, *TAUGHT, *GIVEN),
    "KL in the loss": (*CHOSEN, *TAUGHT, *GIVEN),
    "KL in the reward": (*CHOSEN, *TAUGHT, *GIVEN, "gdpo", "maxrl"),
    **dict.fromkeys(("entropy", "correction"), WITHOUT_RATIOS),
    **dict.fromkeys(("geometric", "kpop", "far negatives"), (*WITHOUT_RATIOS, *TAUGHT[:2], *GIVEN)),
    "uncorrected": (*WITHOUT_RATIOS, *TAUGHT[:2], *GIVEN, "rloo", "opo", "remax"),
    "supervised": (*CHOSEN, *TAUGHT[:2], *GIVEN),
    **dict.fromkeys(("kept sets", "staleness", "tool tokens"), GIVEN),
    "dropped samples": (*GIVEN, "gdpo"),
}
"""By option, the programs that cannot have it: the library refuses it, or says that it does nothing
there."""


CUTTABLE = "two heads"
"""Beside the folder of the model, one that tensor parallelism can cut."""


class Folders(NamedTuple):
    """What the jobs read."""

    model: str
    scalar: str
    teacher: str
    adapters: str
    program: str
    prompts: str
    responses: str
    pairs: str
    labels: str


def make_folders(root):
    """Models of one layer, adapters, functions and rows of data."""
    tokenizer = build_character_tokenizer(CHARACTERS)
    shape = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 64}
    two_heads = {**shape, "hidden_size": 64, "heads": 2}
    for name, seed, of in (("model", 7, shape), ("teacher", 8, shape), (CUTTABLE, 7, two_heads)):
        make_tiny_model(root / name, tokenizer, seed=seed, **of)
        model = AutoModelForCausalLM.from_pretrained(root / name)
        with torch.no_grad():  # a model that begins without preferences has nothing to show
            for parameter in model.parameters():
                parameter *= 4 if parameter.ndim > 1 else 1
        model.save_pretrained(root / name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = str(root / "model")
        scalar = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        with torch.no_grad():
            scalar.score.weight.normal_(0, 0.1)
        scalar.save_pretrained(root / "scalar")
        tokenizer.save_pretrained(root / "scalar")
        targets = ["q_proj", "v_proj", "down_proj"]
        lora = LoraConfig(r=2, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.05)
        adapted.save_pretrained(root / "adapters")
    (root / "program.py").write_text(PROGRAM)
    (root / "plain_tasks").mkdir()
    (root / "plain_tasks" / "__init__.py").touch()
    (root / "plain_tasks" / "doubles.py").write_text(TASK)
    numbers = [(n, 3 * n % 10) for n in range(1, 8)]
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in numbers]
    responses = [{**row, "response": row["answer"] * (1 + n % 3)} for n, row in enumerate(prompts)]
    pairs = [
        {**row, "chosen": row["answer"], "rejected": "1" * (1 + n % 4) + "3", "margin": n / 10}
        for n, row in enumerate(prompts)
    ]
    labels = [{**row, "label": n % 3 > 0} for n, row in enumerate(responses)]
    tables = {"prompts": prompts, "responses": responses, "pairs": pairs, "labels": labels}
    for name, rows in tables.items():
        for file, part in ((f"{name}.jsonl", rows[1:]), (f"held_out_{name}.jsonl", rows[:1])):
            (root / file).write_text("".join(json.dumps(row) + "\n" for row in part))
    files = (f"{name}.jsonl" for name in tables)
    names = ("model", "scalar", "teacher", "adapters", "program.py", *files)
    return Folders(*(str(root / name) for name in names))


def settings_of(program, options, folders):
    """The overrides of a job."""
    name, *further = SAME.get(program, (program,))
    wanted = [setting for option in options for setting in OPTIONS[option]]
    file = folders.prompts
    if program in GIVEN:
        of = {"dpo": folders.pairs, "reward_model": folders.pairs, "kto": folders.labels}
        file = of.get(name, folders.responses)
    held_out = Path(file).with_name(f"held_out_{Path(file).name}")
    lora = not {"LoRA", "4 bits"}.isdisjoint(options)
    model = folders.scalar if name == "reward_model" and not lora else folders.model
    chosen = [f"algorithm={name}", *(s for s in wanted if s.startswith("placement="))]
    found = [
        *(*chosen, *BASE, f"model.path={model}", *further, *OWN.get(program, ())),
        *("data=jsonl", f"data.path={file}", f"data.eval_path={held_out}", "data.shuffle=false"),
    ]
    if name == "reward_model":
        found.append("data.margin_column=margin")
    if program not in GIVEN:
        functions = [f"{folders.program}:{n}" for n in ("digits", "short")[: 1 + (name == "gdpo")]]
        found.append(f"reward.function=[{','.join(functions)}]")
    if "distillation" in name:
        found.append(f"models.teacher.path={folders.teacher}")
    if name == "safe_rlhf":
        found.append(f"cost.function={folders.program}:cost")
    for critic in {"ppo": ["critic"], "safe_rlhf": ["critic", "cost_critic"]}.get(name, []):
        found.append(f"models.{critic}.optimizer.learning_rate=1e-4")
        if critic == "critic" and not lora:
            found.append(f"models.critic.path={folders.scalar}")
    if name == "remax":
        found.append("rollout.samples_per_prompt=4")
    found += [s.format(**folders._asdict()) for s in wanted if not s.startswith("placement=")]
    return found


def exists(program, option):
    """Whether a program can have an option."""
    return program not in REFUSED.get(option, ())
