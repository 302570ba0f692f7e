"""What `--cfg job` prints: the settings that do something in the job."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from settings import configured
from tiers import few_of

from hybridrl.composition.load import format_effective_yaml
from hybridrl.composition.setting_names import is_open_setting, list_settings
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.config.presets import DEFAULT_PRESETS
from hybridrl.config.presets import flatten_settings as nested_leaves
from hybridrl.config.presets import list_presets as preset_names
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import find_condition

DOCS = Path(__file__).parents[2] / "docs"


def names(*overrides):
    return {
        name
        for name, _ in nested_leaves(yaml.safe_load(format_effective_yaml(configured(overrides))))
    }


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm=ppo"],
        ["algorithm=sft"],
        ["algorithm=dapo", "rollout=transformers"],
        ["data=jsonl", "data.path=some.jsonl", "model.path=some/model"],
    ],
)
def test_a_usual_job_has_no_more_settings_than_a_person_can_read(overrides):
    assert len(names(*overrides)) <= 121


def test_what_is_switched_on_brings_its_settings():
    assert "actor.parallel.chunks" not in names()
    assert "actor.parallel.chunks" in names("actor.parallel.pp=2")
    without, judged = names(), names("reward.judge.path=some/judge")
    assert "reward.judge.path" in without and "reward.judge.scale" not in without
    assert judged - without >= {"reward.judge.scale", "reward.judge.pattern"}
    assert names("algorithm=ppo") - without >= {"critic.value_clip", "algorithm.lam"}
    assert names("algorithm=safe_rlhf") >= {"cost.limit", "cost.function"}
    assert not {name for name in without if name.startswith(("cost", "critic", "preference"))}


def test_what_is_said_is_shown_though_it_does_nothing():
    assert "rollout.max_turns" in names("rollout.max_turns=3")
    assert "rollout.max_turns" not in names("rollout.max_turns=8")


def test_what_is_said_and_does_nothing_is_told():
    assert find_ineffective_settings(
        configured(["rollout.max_turns=3", "reward.judge.scale=5"])
    ) == [
        "reward.judge.scale=5.0 does nothing in this job: it counts with `reward.judge.path`.",
        "rollout.max_turns=3 does nothing in this job: it counts with `rollout.episode`.",
    ]


@pytest.mark.parametrize(
    "preset", few_of([f"{g}={name}" for g in DEFAULT_PRESETS for name in preset_names(g)], 5)
)
def test_no_preset_sets_what_does_nothing(preset):
    assert not find_ineffective_settings(configured([preset]))


def test_a_program_of_the_users_may_use_all():
    config = Config()
    config.trainer.name = "my.py:Program"
    config.critic.value_clip, config.algorithm.kl_in_reward = 0.2, True
    assert not [said for said in find_ineffective_settings(config) if "trainer.name" in said]


def test_conditions_name_settings():
    known = list_settings()
    for name, hint in known.items():
        for condition in (one for said in find_condition(hint) for one in said.conditions):
            setting = re.split("[=>]", condition)[0]
            group = name.rpartition(".")[0] if setting.startswith(".") else ""
            assert f"{group}{setting}" in known or is_open_setting(setting), name


def test_the_page_of_all_settings_is_current():
    path = DOCS / "generate_settings.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    current = module.written(page)
    assert current == page, "docs/settings.md is out of date: python docs/generate_settings.py"
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    without = [name for name, row in rows.items() if re.search(r"\|  \|$|\| Only used with", row)]
    without = [name for name in without if name in list_settings()]
    assert not without, "settings without a docstring"
    missing = {
        name for name in list_settings() if name not in rows and not name.startswith("cost.")
    }
    assert not missing
