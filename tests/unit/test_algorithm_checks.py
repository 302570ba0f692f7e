"""Contradictions are refused before anything starts, each by a sentence that names the setting."""

import re

import pytest
from settings import configured
from tiers import few_of

from hybridrl.checks.check_list import check
from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.composition.setting_names import list_settings
from hybridrl.config.presets import PRESETS_FOLDER
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.trainers import load_trainer
from hybridrl.trainers.objectives import build_policy_objective as objective
from hybridrl.trainers.objectives import format_correction_notice

PRESETS = sorted(path.stem for path in (PRESETS_FOLDER / "algorithm").glob("*.yaml"))
HERE = ["executor=inline", "rollout=transformers"]
LORA = ["actor.lora.rank=8", "model.path=some/model"]
PPO_KL = ["algorithm=ppo", "algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"]

UNCORRECTED = "algorithm.correction=none"
STALE = ["placement=separation", "placement.staleness=1"]
GSPO = ["algorithm.policy_loss=gspo"]

# Overrides, and what the sentence begins with (a regular expression) and names besides.
WRONG = [
    (["rollout.quantization=int8"], "rollout.quantization=int8 needs rollout=vllm", "=none"),
    # A part that the driver program does not have, or one that it misses.
    (["critic.value_clip=0.2"], "`critic` is set, but trainer.name=grpo", "algorithm=ppo"),
    (["algorithm=dpo", "critic.warmup_steps=3"], "`critic` is set", "trainer.name=dpo"),
    (
        ["algorithm=safe_rlhf", "trainer.name=grpo", "critic.value_clip=null"],
        "trainer.name=grpo with cost=...",
        "algorithm=safe_rlhf",
    ),
    (
        ["algorithm=safe_rlhf", "cost=null"],
        "trainer.name=safe_rlhf with cost=null",
        "algorithm=safe_rlhf",
    ),
    (
        ["algorithm=safe_rlhf", "data=jsonl", "data.path=rows.jsonl"],
        "cost.function=hybridrl.data.tasks.arithmetic:odd is the cost of a built-in",
        "cost.model",
    ),
    (
        ["algorithm=safe_rlhf", "cost.correct_at=0.5"],
        "cost.correct_at=0.5: no cost is right",
        "Leave it out",
    ),
    (
        ["algorithm=dpo", "trainer.name=grpo"],
        "trainer.name=grpo with preference=...",
        "algorithm=dpo",
    ),
    (
        ["algorithm=dpo", "preference=null"],
        "trainer.name=dpo with preference=null",
        "algorithm=dpo",
    ),
    (
        ["trainer.name=reward_model"],
        "trainer.name=reward_model with preference=null",
        "algorithm=reward_model",
    ),
    (
        ["algorithm=dpo", "actor.updates_per_step=2"],
        "actor.updates_per_step=2",
        "data.prompts_per_step",
    ),
    (["algorithm=sft", "actor.epochs=2"], "actor.epochs=2", "learns once"),
    (["algorithm=dpo", "actor.epochs=2"], "actor.epochs=2", "trainer.name=dpo"),
    (["critic.epochs=2"], "`critic` is set", "algorithm=ppo"),
    (
        ["algorithm=distillation", "actor.epochs=2", "actor.max_kl=0.1"],
        "actor.max_kl=0.1",
        "trainer.name=distillation",
    ),
    (
        ["actor.epochs=2", "actor.max_kl=0.1", "algorithm.replay_share=0.5"],
        "actor.max_kl=0.1",
        "algorithm.replay_share=0.5",
    ),
    (
        ["algorithm=reward_model", "actor.updates_per_step=2"],
        "actor.updates_per_step=2",
        "trainer.name=reward_model",
    ),
    (
        ["algorithm=remax", "algorithm.dynamic_sampling=true"],
        "algorithm.dynamic_sampling=true",
        "trainer.name=remax",
    ),
    # Values that only one kind of program reads.
    (["algorithm=dpo", "preference.loss=sigmod"], "preference.loss=sigmod", "`sigmoid`?"),
    (["algorithm=dpo", "preference.beta=0"], "preference.beta=0", "more than 0"),
    (["algorithm=dpo", "preference.nll_coefficient=-1"], "preference.nll_coefficient=-1", "0 or"),
    (["algorithm=safe_rlhf", "cost.multiplier=0"], "cost.multiplier=0", "more than 0"),
    (
        ["algorithm=safe_rlhf", "cost.multiplier_max=0.4"],
        "cost.multiplier_max=0.4",
        "cost.multiplier=0.5",
    ),
    (["algorithm.max_refills=-1"], "algorithm.max_refills=-1", "0 or more"),
    # Adapters.
    (["actor.lora.rank=0", *LORA[1:]], "actor.lora.rank=0", "1 or more"),
    (["actor.lora.rank=-2", *LORA[1:]], "actor.lora.rank=-2", "1 or more"),
    (["actor.lora.rank=8"], "actor.lora.rank=8", "model.path"),
    (["rollout.adapters=separate"], "rollout.adapters=separate: there are none", "merged"),
    ([*LORA, "rollout.adapters=apart"], "rollout.adapters=apart", "merged, separate"),
    (
        [*LORA, "rollout.adapters=separate", "rollout=transformers"],
        "rollout.adapters=separate: only vLLM",
        "rollout.adapters=merged",
    ),
    ([*LORA, "warmup.steps=5"], "warmup.steps=5 with actor.lora.rank=8", "warmup.steps=0"),
    # Advantages.
    (["algorithm.advantage=leave_one"], "algorithm.advantage=leave_one", "`leave_one_out`?"),
    (
        ["algorithm=ppo", "algorithm.advantage=leave_one_out"],
        "algorithm.advantage=leave_one_out: trainer.name=ppo does not read it",
        "trainer.name=ppo",
    ),
    (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt=1", "at least 2"),
    (
        ["algorithm=rloo", "rollout.samples_per_prompt=1"],
        "rollout.samples_per_prompt=1",
        "leave_one_out",
    ),
    (
        [
            "algorithm=reinforce_plus_plus",
            "rollout.samples_per_prompt=1",
            "algorithm.dynamic_sampling=true",
        ],
        "algorithm.dynamic_sampling=true",
        "rollout.samples_per_prompt=1",
    ),
    (
        ["algorithm=rloo", "algorithm.advantage_scale=batch"],
        "algorithm.advantage_scale=batch",
        "algorithm.advantage=leave_one_out",
    ),
    # The KL.
    (
        ["algorithm=ppo", "algorithm.kl_in_reward=true"],
        "algorithm.kl_in_reward=true",
        "algorithm.kl_coefficient",
    ),
    (["algorithm.kl_estimator=k4"], "algorithm.kl_estimator=k4", "`k3`?"),
    (
        ["algorithm.kl_target=0.1", "algorithm.kl_coefficient=0.1"],
        "algorithm.kl_target=0.1",
        "kl_in_reward",
    ),
    (
        ["algorithm=ppo", "algorithm.kl_target=0.1", "algorithm.kl_coefficient=0.1"],
        "algorithm.kl_target=0.1",
        "kl_in_reward",
    ),
    (
        [*PPO_KL, "algorithm.kl_target=0.1", "algorithm.kl_horizon=1024"],
        "algorithm.kl_horizon=1024",
        "1024 samples",
    ),
    # The loss.
    (["algorithm.correction=truncat"], "algorithm.correction=truncat", "`truncate`?"),
    (["algorithm.correction_level=row"], "algorithm.correction_level=row", "token, sequence"),
    (
        ["algorithm.correction=truncate", "algorithm.correction_high=null"],
        "algorithm.correction=truncate",
        "algorithm.correction_high",
    ),
    (
        [
            "algorithm.correction=truncate",
            "algorithm.correction_high=null",
            "algorithm.correction_low=0.5",
        ],
        "algorithm.correction=truncate",
        "correction_high",
    ),
    (
        ["algorithm.correction=mask", "algorithm.correction_high=null"],
        "algorithm.correction=mask",
        "no bound",
    ),
    (
        ["algorithm=sapo", "algorithm.loss_options={tau_positve: 2}"],
        "algorithm.loss_options has `tau_positve`",
        "`tau_positive`?",
    ),
    (
        ["algorithm.policy_loss=reinforce", "algorithm.loss_options={x: 2}"],
        "algorithm.loss_options has `x`",
        "none",
    ),
    (["algorithm.overlong_buffer=-1"], "algorithm.overlong_buffer=-1", "0 or more"),
    (["algorithm.overlong_buffer=9"], "algorithm.overlong_buffer=9", "rollout.max_tokens=8"),
    (["algorithm=ppo", "critic.value_clip=0"], "critic.value_clip=0", "null"),
    (["model.tiny.experts=1"], "model.tiny.experts=1", "2 or more"),
    (["actor.parallel.tp=0"], "actor.parallel.tp=0", "1 or more"),
    # Programs from outside play, and take as many turns as they like.
    (["rollout.serve=true", "algorithm=sft"], "rollout.serve=true, but", "samples nothing"),
    (["rollout.serve=true", "algorithm.overlong_buffer=4"], "rollout.serve=true with", "=0"),
    # Scores on one scale, their parts on another.
    (
        ["reward.normalise_by=answer", "algorithm.step_credit=sum"],
        "reward.normalise_by=answer with algorithm.step_credit=sum",
        "another scale",
    ),
    *(
        (["algorithm.advantage=gdpo", setting, *more], setting, "learns from each reward by itself")
        for setting, *more in (
            ("algorithm.overlong_buffer=4",),
            ("algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"),
            ("reward.shorter=0.5",),
            ("reward.normalise_by=answer",),
            ("algorithm.turn_credit=turn", "rollout.episode=a.py:Talk"),
        )
    ),
    (
        ["algorithm=gdpo", "reward.function=[]"],
        "algorithm.advantage=gdpo",
        "Name them in reward.function",
    ),
    (["algorithm.replay_share=0.001"], "algorithm.replay_share=0.001 of a step", "or more"),
    (["data.sampler=pass_rate", "algorithm=sft"], "data.sampler=pass_rate", "learns from examples"),
    (["reward.check=exakt"], "`reward.check` holds `exakt`", "Did you mean"),
    (
        ["algorithm.replay_share=0.5", "actor.epochs=3", "actor.updates_per_step=3"],
        "algorithm.replay_age=8",
        "Set it to 9 or more",
    ),
    (
        ["algorithm=maxrl", "algorithm.overlong_buffer=2"],
        "algorithm.overlong_buffer=2 makes scores negative",
        "Leave one of the two out",
    ),
    # Samples that are not the policy's own.
    *(
        (
            [f"algorithm={name}", *STALE, UNCORRECTED],
            "placement.staleness=1",
            "Leave algorithm.corr",
        )
        for name in ("opo", "rloo", "remax")
    ),
    (
        [
            *("algorithm.policy_loss=reinforce", "placement=separation"),
            *("placement.in_flight=true", UNCORRECTED),
        ],
        "placement.in_flight=true",
        "algorithm.policy_loss=ppo_clip",
    ),
    (
        ["algorithm=rloo", "placement=separation", "rollout.weight_sync=int8", UNCORRECTED],
        "rollout.weight_sync=int8",
        "Leave algorithm.correction out",
    ),
    (
        ["actor.lora.rank=4", "placement=separation", "rollout.weight_sync=delta"],
        "rollout.weight_sync=delta",
        "adapters go whole",
    ),
]

RIGHT = [
    ["algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"],
    ["algorithm=rloo", "algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"],
    ["algorithm=evaluate", "rollout.min_tokens=4"],
    ["rollout.min_tokens=4"],
    ["rollout.top_p=0.9"],
    ["algorithm=ppo", "rollout.top_k=5", "rollout.min_p=0.1"],
    ["algorithm=rloo", "rollout.weight_sync=int8"],  # nothing travels
    ["rollout.verify_weights=true", "rollout.weight_sync=int4_delta"],
    ["algorithm=evaluate", "rollout.top_p=0.9"],
    ["algorithm=sft", "rollout.top_k=5"],
    ["algorithm=ppo", "critic.value_clip=null"],
    ["algorithm=reinforce_plus_plus", "rollout.samples_per_prompt=1"],
    ["algorithm=pass_at_k", "algorithm.advantage_scale=none"],
    [
        "algorithm=reinforce_plus_plus",
        "algorithm.kl_in_reward=true",
        "algorithm.kl_coefficient=0.1",
    ],
    [*PPO_KL, "algorithm.kl_target=0.1", "algorithm.kl_horizon=1025"],
    ["algorithm.correction=mask", "algorithm.correction_high=null", "algorithm.correction_low=0.5"],
    ["algorithm.correction=mask", "algorithm.correction_level=sequence"],
    ["algorithm.overlong_buffer=8"],
    ["algorithm.loss_options={clip_low: 0.1}"],
    # What only samples are compared for does not matter to a program that draws none.
    ["algorithm=sft", "rollout.samples_per_prompt=1"],
    ["algorithm=sft", *LORA, "warmup.steps=5"],
    ["algorithm=dpo", "preference.loss=ipo"],
]


def case_name(value):
    return " ".join(value) if isinstance(value, list) else ""


@pytest.mark.parametrize(("overrides", "begins", "names"), WRONG, ids=case_name)
def test_a_contradiction_is_a_sentence(overrides, begins, names):
    config = configured([*HERE, *overrides])
    with pytest.raises(ConfigError) as caught:
        check(config)
    problems = caught.value.problems
    assert any(said.startswith(begins) and names in said for said in problems)
    assert all(said.endswith((".", "?")) for said in problems)


@pytest.mark.parametrize("overrides", RIGHT, ids=case_name)
def test_what_makes_sense_passes(overrides):
    check(configured([*HERE, *overrides]))


@pytest.mark.more
@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm={name}"] for name in ("grpo", "gspo", "cispo", "sapo", "gmpo", "ppo")),
        *([f"algorithm={name}"] for name in ("rloo", "opo", "remax", "vespo", "dppo", "luspo")),
        *([f"algorithm={name}", UNCORRECTED] for name in ("grpo", "gspo", "vespo", "ppo")),
        ["algorithm=opo", "algorithm.policy_loss=ppo_clip"],
    ],
    ids=case_name,
)
def test_samples_of_an_older_policy_are_weighed_by_the_loss_or_by_a_correction(overrides):
    config = configured([*HERE, *overrides, *STALE])
    check_algorithm(config)
    assert objective(config).off_policy
    assert not objective(configured([*HERE, *overrides])).off_policy


@pytest.mark.parametrize(
    ("overrides", "chosen", "is_said"),
    [
        ([], "none", False),
        (["rollout.quantization=int8"], "truncate", True),
        (STALE, "none", False),
        ([*STALE, "rollout.quantization=int8"], "none", False),
        (["placement=separation", "placement.in_flight=true"], "none", False),
        (["algorithm.replay_share=0.5"], "none", False),
        (["rollout.partial=0.5"], "none", False),
        (["placement=separation", "rollout.weight_sync=int4_delta"], "none", False),
        (["placement=separation", "rollout.weight_sync=int4_delta", *GSPO], "truncate", True),
        ([*STALE, *GSPO], "truncate", True),
        (["placement=separation", "rollout.weight_sync=delta"], "none", False),
        (["rollout.weight_sync=int8"], "none", False),
        ([*STALE, "algorithm.policy_loss=vespo"], "none", False),
        ([*STALE, "algorithm.policy_loss=reinforce"], "truncate", True),
        ([*STALE, UNCORRECTED], "none", False),
        ([*STALE, "algorithm.correction=mask"], "mask", False),
        (["rollout.quantization=int8", "algorithm.correction=none"], "none", False),
        (["rollout.quantization=int8", "algorithm.correction=mask"], "mask", False),
    ],
)
def test_samples_of_another_policy_are_corrected(overrides, chosen, is_said):
    config = configured([*HERE, *overrides])
    assert objective(config).correction == chosen
    assert bool(notice_of(config)) is is_said


def test_kpop_compares_tokens_whatever_the_level_of_other_corrections():
    config = configured(["algorithm.correction=kpop", "algorithm.correction_level=sequence"])
    assert objective(config).correction_level == "token"


def test_no_correction_is_told_of_where_the_loss_weighs_nothing():
    taught = ["rollout.quantization=int8", "algorithm=distillation", "models.teacher.path=t"]
    assert not notice_of(configured([*HERE, *taught]))
    assert notice_of(configured([*HERE, *taught, "distillation.loss=sampled"]))


def test_the_notice_of_a_correction_says_why():
    assert "come from a policy of other bits" in notice_of(
        configured([*HERE, "rollout.quantization=int8"])
    )
    said = notice_of(configured([*HERE, *STALE, *GSPO]))
    assert said.startswith(
        "placement.staleness=1: samples are weighed by algorithm.correction=trun"
    )
    assert "the clipped ratio of the loss weighs them" in said
    said = notice_of(configured([*HERE, *STALE, "algorithm.policy_loss=reinforce"]))
    assert "algorithm.correction=none" not in said, "it would be refused"


def notice_of(config):
    return format_correction_notice(config, load_trainer(config.trainer.name))


def test_a_model_that_goes_on_to_reinforcement_is_not_annealed():
    assert configured(["data=arithmetic"]).actor.optimizer.schedule == "cosine"
    assert configured(["algorithm=sft"]).actor.optimizer.schedule == "constant"
    mine = ["algorithm=sft", "actor.optimizer.schedule=cosine"]
    assert configured(mine).actor.optimizer.schedule == "cosine"


@pytest.mark.parametrize("name", few_of(PRESETS, 4))
def test_every_preset_passes(name):
    teacher = ["models.teacher.path=teacher"] if "distillation" in name else []
    config = configured([*HERE, f"algorithm={name}", *teacher])
    check(config)
    text = (PRESETS_FOLDER / "algorithm" / f"{name}.yaml").read_text()
    assert f"name: {config.trainer.name}\n" in text


AGGREGATIONS = {
    **dict.fromkeys(("sapo", "gmpo", "gspo"), "seq-mean-token-mean"),
    **dict.fromkeys(("dapo", "opo", "grpo", "cispo", "ppo"), "token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
    "rloo": "seq-mean-token-sum",
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_presets_weigh_tokens_as_their_papers_do(name):
    assert configured([*HERE, f"algorithm={name}"]).algorithm.aggregation == AGGREGATIONS[name]


# Settings of a group that only a preset creates.
WITHOUT_PRESET = [
    (
        "cost.limit=3",
        r"^cost\.limit=3: `cost` is set by algorithm=safe_rlhf; .*leave cost\.limit out",
    ),
    ("++cost.options.odd.digits=2", r"^cost\.options\.odd\.digits=2: `cost` is set by"),
    ("cost={limit: 3}", r"^cost\.limit=3: `cost` is set by algorithm=safe_rlhf"),
    ("cost.limt=3", r"^There is no setting `cost\.limt`\. Did you mean `cost\.limit`\?$"),
    ("cost.nothing_like_it=3", r"^There is no setting `cost\.nothing_like_it`\."),
    (
        "preference.beta=1",
        r"`preference` is set by algorithm=dpo or algorithm=kto or algorithm=online_dpo or ",
    ),
    ("preference.bta=1", r"Did you mean `preference\.beta`\?$"),
]


@pytest.mark.parametrize(("override", "sentence"), WITHOUT_PRESET)
def test_a_setting_of_a_group_needs_the_preset_that_makes_the_group(override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(["algorithm=ppo", override])


def test_with_the_preset_the_settings_of_its_group_are_as_any():
    config = load_config(["cost.limit=3", "algorithm=safe_rlhf", "cost.options.odd.digits=2"])
    assert (config.cost.limit, config.cost.options) == (3.0, {"odd": {"digits": 2}})
    assert load_config(["algorithm=reward_model", "preference.centre=0.5"]).preference.centre == 0.5
    assert load_config(["cost=null", "preference=null"]).cost is None
    for overrides, sentence in (
        (
            ["algorithm=dpo", "preference.bta=1"],
            r"no setting `preference\.bta`.*`preference\.beta`\?",
        ),
        (["algorithm=safe_rlhf", "cost.limt=1"], r"no setting `cost\.limt`.*`cost\.limit`\?"),
        (["algorithm=safe_rlhf", "cost.limit=much"], r"^cost\.limit=much: must be a number\.$"),
        (["algorithm=safe_rlhf", "cost=5"], r"`cost` is a group of settings; set cost\.function"),
        (["cost=null", "trainer.stepz=1"], r"no setting `trainer\.stepz`"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_config(overrides)


def test_options_of_a_loss_can_be_set_whatever_the_preset():
    for override in ("loss_options.tau_positive=2", "loss_options={tau_positive: 2}"):
        config = load_config(["algorithm.policy_loss=sapo", f"algorithm.{override}"])
        assert config.algorithm.loss_options == {"tau_positive": 2.0}


def test_the_names_of_all_settings():
    names = list(list_settings())
    assert {"trainer.steps", "cost.limit", "cost.function", "preference.beta"} <= set(names)
    assert len(names) == len(set(names)) and not {"cost", "preference", "actor"} & set(names)
    assert all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", name) for name in names)


OWN = """
from hybridrl.trainers import grpo
from hybridrl.trainers.policy_trainer import PolicyTrainer


class Mine(PolicyTrainer):
    def step(self): ...


class Draws(Mine):
    USES = Mine.USES | {"algorithm.dynamic_sampling"}


class Derived(grpo.Trainer):
    pass
"""


@pytest.mark.parametrize(
    ("name", "unread"),
    [("Mine", ["dynamic_sampling", "replay_share"]), ("Draws", ["replay_share"]), ("Derived", [])],
)
def test_what_a_trainer_of_ones_own_does_not_read_is_refused(tmp_path, name, unread):
    file = tmp_path / f"{name.lower()}_of_mine.py"
    file.write_text(OWN)
    own = [*HERE, f"trainer.name={file}:{name}"]
    check_algorithm(configured(own))
    settings = {"dynamic_sampling": "true", "replay_share": "0.5"}
    for setting, value in settings.items():
        config = configured([*own, f"algorithm.{setting}={value}"])
        if setting not in unread:
            check_algorithm(config)
            continue
        with pytest.raises(ConfigError, match=rf"algorithm\.{setting}={value}.*USES"):
            check_algorithm(config)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.task_column=null"], "data.task_column=null.*annotator, domain or user"),
        (["meta.task_pairs=1"], "meta.task_pairs=1"),
        (["actor.lora.rank=2", "model.path=model"], "actor.lora: .* trains all weights"),
        (["data.shuffle=false"], "data.shuffle=false: .* an order of its own"),
        (["actor.updates_per_step=2"], "actor.updates_per_step=2"),
        (["meta=null"], "meta=null.*algorithm=meta_reward_model"),
    ],
)
def test_what_reward_models_of_many_tasks_do_without(overrides, sentence):
    config = load_config(["algorithm=meta_reward_model", *overrides])
    with pytest.raises(ConfigError, match=sentence):
        check_algorithm(config)
