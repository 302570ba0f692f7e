import pytest

from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config

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
