"""The command line's `key=value`: text needs no quotes, and what is wrong is a sentence."""

import pytest
from tiers import few_of

from hybridrl.composition.aliases import explain_alias, foreign_settings
from hybridrl.composition.overrides import expand_sweep
from hybridrl.composition.setting_names import is_open_setting, list_settings
from hybridrl.config.presets import DEFAULT_PRESETS
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config

TEXTS = [
    *(
        "Ünïcödé",
        "日本語",
        "~/models/x",
        "/x=y/z",
        "hello, world",
        "train[:1%]",
        "a]b",
        "{a: 1",
        "it's",
    ),
    *(
        r"<think>\d+.*</think>.*",
        r"C:\new\table",
        "a (b) 'c' d",
        "x # y",
        "key: value",
        "100%",
        "@*|^",
    ),
    *("@*|^", "{a: 1", "it's", "1e-3", "true", "007", "a;b&c", "'", '"'),
]


def value_of(key, *overrides):
    found = load_config(overrides)
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


@pytest.mark.parametrize("text", few_of(TEXTS, 2))
@pytest.mark.parametrize(
    "key", few_of(["data.system_prompt", "run.name", "eval.by_column"], ["data.system_prompt"])
)
def test_text_is_taken_as_it_stands(key, text):
    assert value_of(key, f"{key}={text}") == text


@pytest.mark.parametrize("text", few_of(TEXTS[:16], 3))
def test_text_below_open_settings_needs_no_quotes_either(text):
    key = "reward.options.format.pattern"
    assert value_of(key, f"{key}={text}") == text
    assert value_of("rollout.episode", f"rollout.episode={text}") == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name='hello, \"world\"'", 'hello, "world"'),
        ('run.name="a b"', "a b"),
        (r"run.name='it\'s'", "it's"),
        ("data.split=null", None),
        ("data.split='null'", "null"),
        ("run.name=${oc.env:HYBRIDRL_NAME}", "addition"),
        ("run.name='${oc.env:HYBRIDRL_NAME}-${run.seed}'", "addition-0"),
        (r"run.name=\${x}", "${x}"),
        ("rollout.stop=[a,'b, c']", ["a", "b, c"]),
        ("rollout.stop=[</s>, <|im_end|>]", ["</s>", "<|im_end|>"]),
        ("reward.function=[exact, ~/my.py:score]", ["exact", "~/my.py:score"]),
        ("reward.weights=[1, 0.5]", [1.0, 0.5]),
        ("reward.options={length: {limit: 4}}", {"length": {"limit": 4}}),
        ("reward.options.length.limit=4", 4),
        ("reward.options.length.limit='4'", "4"),
        ("algorithm.loss_options.tau_positive=1e-1", 0.1),
        ("actor.gradient_checkpointing=true", "full"),
        ("actor.optimizer.learning_rate=1e-5", 1e-5),
        ("+trainer.steps=7", 7),
        ("++trainer.steps=7", 7),
        ("rollout.parallel={tp: 2}", None),
    ],
)
def test_other_values_are_as_ever(override, value, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_NAME", "addition")
    key = override.split("=")[0].lstrip("+")
    found = value_of(key, override)
    assert found == value if value is not None or "null" in override else found.tp == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["++trainer.stps=3"],
            r"^There is no setting `trainer\.stps`\. Did you mean `trainer\.st",
        ),
        (["run.steps=3"], r"^There is no setting `run\.steps`\. Did you mean .*`trainer\.steps`\?"),
        (["trainer.max_tokens=3"], r"Did you mean `rollout\.max_tokens` or `reward\.judge\.max"),
        (["max_tokens=3"], r"no setting `max_tokens`\. Did you mean `rollout\.max_tokens` or "),
        (
            ["~data.path"],
            r"^~data\.path: no setting can be taken away.*or write data\.path=null\.$",
        ),
        (["algorithm=ppo", "algorithm=dpo"], r"^algorithm=ppo algorithm=dpo: a job has one `algor"),
        (
            ["trainer.steps=1,2"],
            r"must be a whole number, 1 or more\. For a job with each, add --mul",
        ),
        (["rollout=vllm,transformers"], r"no `rollout` called `vllm,transformers`.*add --multirun"),
        (
            ["rollout.stop=</s>"],
            r"must be a list, each .* Write it in brackets: 'rollout\.st",
        ),
        (["reward.weights=1,2"], r"Write it in brackets: 'reward\.weights=\[1,2\]'\.$"),
        (["trainer.steps=null"], r"^trainer\.steps=null: must have a value"),
        (["reward.options=5"], r"^reward\.options=5: must be a dictionary\.$"),
        (["algorithm.loss_options.tau=x"], r"^algorithm\.loss_options\.tau=x: must be a number\.$"),
        (["run.name=???"], "must have a value"),
        (["run.name=${oc.env:HYBRIDRL_NONE}"], r"^run\.name=\$\{oc.*HYBRIDRL_NONE' not found\.$"),
        (
            ["trainer.steps=${run.name}"],
            r"^trainer\.steps=\$\{run\.name\}: what it refers to mus",
        ),
        (["rollout.stop=${run.seed}"], r"^rollout\.stop=0: must be a list, each text\.$"),
        (["reward.weights=${actor.lora.targets}"], r"^reward\.weights=all-linear: must be a list"),
        (["run.name=${x"], r"^run\.name=\$\{x: `\$\{` begins a reference"),
        (["steps"], r"^`steps` is not an override; write key=value"),
        (["=5"], r"^There is no setting ``"),
        (["reward.options.a b=3"], r"^`reward\.options\.a b` is no name"),
        (["hydra.run.dir=x"], r"^There is no setting `hydra\.run\.dir`"),
        (["model.tiny={layrs: 1}"], r"^There is no setting `model\.tiny\.layrs`"),
        (["recipe=/no/such.yaml"], r"^recipe=/no/such\.yaml could not be read: No such file"),
    ],
)
def test_what_is_wrong_is_a_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides)


def test_all_that_is_wrong_is_said(tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text("trainer.stepz: 1\nalgorithm.gama: 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config([f"recipe={recipe}", "run.seed=x", "data.shufle=false", "eval.every=soon"])
    said = raised.value.problems
    assert len(said) == 5 and said[0].startswith(
        f"recipe={recipe}: There is no setting `trainer.st"
    )


def test_a_recipe_s_preset_gives_way(tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text("algorithm: ppo\ndata.system_prompt: 'a = ~b, [c'\n")
    found = load_config([f"recipe={recipe}", "algorithm=rloo"])
    assert found.algorithm.advantage == "leave_one_out"
    assert found.data.system_prompt == "a = ~b, [c"


def test_a_sweep_is_every_choice_of_one_value_each():
    found = expand_sweep(["algorithm=grpo,rloo", "trainer.steps=3", "run.seed=range(0,2)"])
    assert len(found) == 4 and found[1] == ["algorithm=grpo", "trainer.steps=3", "run.seed=1"]
    assert expand_sweep(["model.path=~/a,~/b"]) == [["model.path=~/a"], ["model.path=~/b"]]
    assert expand_sweep(["data.system_prompt='a, ü'", "rollout.stop=[</s>,x]"]) == [
        ["data.system_prompt='a, ü'", "rollout.stop=[</s>,x]"]
    ]
    with pytest.raises(ConfigError, match="a sweep has values with commas between"):
        expand_sweep(["data.path=glob(*)"])


def test_other_libraries_names_are_answered_with_ours():
    known = list_settings()
    for row in foreign_settings():
        assert row.settings or row.here in (("none",), ("automatic",)), row
        for setting in row.settings:
            assert setting in known or setting in DEFAULT_PRESETS or is_open_setting(setting), (
                row.names,
                setting,
            )
        assert not row.note or row.note.endswith("."), row.names
        for name in row.names:
            assert explain_alias(name) != "" and (
                row.library == "verl" or explain_alias(f"some.group.{name}")
            )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (  # verl multiplies it by rollout.n, so that it counts prompts
            [
                *("data.train_batch_size=1024", "actor_rollout_ref.rollout.n=5"),
                "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            ],
            "Write actor.updates_per_step=4.",
        ),
        (["data.prompts_per_step=64", "ppo_mini_batch_size=16"], "actor.updates_per_step=4."),
        (["generation_batch_size=64", "num_generations=8"], "Write data.prompts_per_step=8."),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], "Write num_devices=16."),
        (["num_iterations=3"], "`actor.epochs`"),
        (["max_epochs=3"], "`actor.epochs`"),
        (["actor_rollout_ref.actor.ppo_epochs=3"], "`actor.epochs`"),
        (["critic.ppo_epochs=3"], "`critic.epochs`"),
        (
            [
                "trainer.steps=50",
                "actor.updates_per_step=2",
                "num_iterations=3",
                "warmup_ratio=0.1",
            ],
            "Write actor.optimizer.warmup_steps=30.",
        ),
        (["kl_loss_type=low_var_kl"], "Write algorithm.kl_estimator=k3."),
        (["algorithm.kl_penalty=kl"], "Write algorithm.kl_estimator=k1."),
        (["scale_rewards=False"], "Write algorithm.advantage_scale=none."),
        (["enforce_eager=True"], "Write rollout.cuda_graphs=false."),
        (["rollout.name=vllm"], "Write rollout=vllm."),
        (["train_batch_size=64"], "Of verl: It is called `data.prompts_per_step` here."),
        (["train_batch_size=64"], "it counts samples, here updates"),
        (["critic_warmup=3"], "`critic.warmup_steps`"),
        (["mask_truncated_completions=true"], "There is none here."),
        (["trainer.project_name=x"], "There is none here."),
    ],
)
def test_values_of_other_libraries_are_converted(overrides, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(overrides)
    assert sentence in str(raised.value)


def test_a_value_that_cannot_be_computed_is_left_out():
    with pytest.raises(ConfigError) as raised:
        load_config(["data.train_batch_size=1000", "ppo_mini_batch_size=256"])
    assert "`actor.updates_per_step`" in str(raised.value) and "Write" not in str(raised.value)


def test_a_mapping_takes_the_place_of_none():
    key = "reward.judge.chat_template_options"
    assert value_of(key, f"{key}={{a: {{b: 1}}}}") == {"a": {"b": 1}}


def test_options_of_a_template_have_any_name():
    assert value_of("data.chat_template_options", "data.chat_template_options.x=false") == {
        "x": False
    }


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lr", r"`actor\.optimizer\.learning_rate`"),
        ("actor_rollout_ref.actor.optim.lr", r"`actor\.optimizer\.learning_rate`"),
        ("critic.optim.lr", r"`models\.critic\.optimizer\.learning_rate`"),
        ("actor_rollout_ref.rollout.n", r"`rollout\.samples_per_prompt`"),
        ("rollout_batch_size", r"`data\.prompts_per_step` here\. It counts prompts"),
        ("trust_remote_code", "are not loaded"),
    ],
)
def test_a_name_of_another_library_is_known_below_any_group(key, words):
    with pytest.raises(ConfigError, match=rf"^There is no setting `{key}`\. .*{words}"):
        load_config([f"{key}=1"])


def test_what_stands_in_a_dictionary_has_its_type_too():
    with pytest.raises(ConfigError, match=r"loss_options=\{a: \{b: 1\}\}: each must be a number"):
        load_config(["algorithm.loss_options={a: {b: 1}}"])
    assert value_of("algorithm.loss_options.a", "algorithm.loss_options={a: 1}") == 1


PATTERN = r"<a>\d+\.it's \' and \\"


def test_options_of_reward_functions_have_names_of_the_users():
    options = ["reward.options.format.pattern='<a>.*'", "reward.options.length.words=[a,b]"]
    found = load_config([*options, "reward.options={length: {limit: 4}}"]).reward.options
    assert found == {"format": {"pattern": "<a>.*"}, "length": {"words": ["a", "b"], "limit": 4}}
    assert load_config().reward.options == {}
    with pytest.raises(ConfigError, match=r"no setting `reward.optons.a.*Did you mean `reward.op"):
        load_config(["reward.optons.a=1"])
    with pytest.raises(ConfigError, match=r"no setting `trainer.stepz`"):
        load_config([*options, "trainer.stepz=1"])
    both = r"(?s)2 things.*no setting `trainer.stepz`.*trainer.steps=-1: must be 1 or more"
    with pytest.raises(ConfigError, match=both):
        load_config(["trainer.stepz=1", "trainer.steps=-1"])


def test_a_recipe_says_what_the_command_line_says(tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text(f"reward.options.format.pattern: |-\n  {PATTERN}\ntrainer.steps: 3\n")
    config = load_config([f"recipe={recipe}", "trainer.steps=4"])
    assert config.reward.options["format"]["pattern"] == PATTERN
    assert config.trainer.steps == 4


@pytest.mark.parametrize("value", ["[]", "[1,2]", "fast"])
def test_engine_options_are_a_dictionary(value):
    with pytest.raises(ConfigError, match=r"engine_options=.*: must be a dictionary"):
        load_config([f"rollout.engine_options={value}"])
    found = load_config(["rollout.engine_options={block_size: 32}", "rollout.engine_options.a=1"])
    assert found.rollout.engine_options == {"block_size": 32, "a": 1}
