"""Every recipe composes, passes the checks, and says what it is."""

from pathlib import Path

import pytest

from hybridrl.checks.settings import check
from hybridrl.config.load import load_config
from hybridrl.config.recipe import expand

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/config.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_is_ready_to_run(path):
    config = load_config([f"recipe={path}", "run.dry=true"])
    check(config)
    assert config.model.path and config.data.path and config.devices == "cuda"
    readme = (path.parent / "README.md").read_text()
    assert f"recipe=recipes/{path.parent.name}/config.yaml" in readme


def test_numbers_that_equal_a_truth_value_stay_numbers(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("eval.every: 0\nrollout.samples_per_prompt: 1\ndata.shuffle: false\n")
    assert expand([f"recipe={recipe}"]) == [
        "eval.every=0",
        "rollout.samples_per_prompt=1",
        "data.shuffle=false",
    ]
