"""Every recipe composes, passes the checks, and says what it is."""

import importlib.util
from pathlib import Path

import pytest

from hybridrl.checks.check_list import check
from hybridrl.composition.overrides import parse_overrides
from hybridrl.errors import ErrorCollector
from hybridrl.job.config_resolution import load_config
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/config.yaml"))
PLANNED = [path.parent for path in RECIPES if (path.parent / "model").is_dir()]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_is_ready_to_run(path):
    config = load_config([f"recipe={path}", "run.dry=true"])
    check(config)
    assert config.model.path and config.data.path and config.devices == "cuda"
    readme = (path.parent / "README.md").read_text()
    assert f"recipe=recipes/{path.parent.name}/config.yaml" in readme


@pytest.mark.more
@pytest.mark.parametrize("recipe", PLANNED, ids=lambda path: path.name)
def test_a_recipe_for_many_devices_is_planned_without_the_hub(recipe):
    config = load_config(
        [f"recipe={recipe}/config.yaml", f"model.path={recipe}/model", "run.dry=true"]
    )
    cluster = parse_cluster(recipe.name.rpartition("_")[2])
    check(config)
    assert config.num_devices == len(cluster.devices)
    assert build_job_plan(config, cluster).fits()
    page = (recipe / "README.md").read_text()
    assert _plans().written(page, recipe) == page, (
        f"The plan in recipes/{recipe.name}/README.md is out of date: python docs/generate_plans.py"
    )


def _plans():
    path = ROOT / "docs" / "generate_plans.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_that_equal_a_truth_value_stay_numbers(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("eval.every: 0\nrollout.samples_per_prompt: 1\ndata.shuffle: false\n")
    read = parse_overrides([f"recipe={recipe}"], ErrorCollector())
    values = [(override.key, override.value) for override in read]
    assert repr(values) == (
        "[('eval.every', 0), ('rollout.samples_per_prompt', 1), ('data.shuffle', False)]"
    )
