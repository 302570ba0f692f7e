"""Writes the plans into the README files of recipes that have a `model/config.json` beside them.

python docs/generate_plans.py
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from hybridrl.job.config_resolution import load_config
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.plan_tables import build_memory_table, build_roles_table, format_step_sizes

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*/model/config.json"))
BEGIN = "<!-- Written by docs/generate_plans.py. -->"
END = "<!-- End of what is written. -->"
WIDTH = 160


def plan_of(recipe: Path) -> str:
    """The command that plans a recipe, and what it says but for times.

    Args:
        recipe: Its folder, whose name ends in the machines that it is for.
    """
    name, devices = recipe.name, recipe.name.rpartition("_")[2]
    config = load_config([f"recipe={recipe}/config.yaml", f"model.path={recipe}/model"])
    plan = build_job_plan(config, parse_cluster(devices))
    out = io.StringIO()
    console = Console(file=out, width=WIDTH)
    for line in format_step_sizes(plan):
        console.print(line, highlight=False, markup=False)
    for table in (build_roles_table(plan), build_memory_table(plan)):
        console.print()
        console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    at = f"recipes/{name}"
    command = f"hybridrl plan recipe={at}/config.yaml model.path={at}/model --devices {devices}"
    return "\n".join(["```", f"$ {command}", *lines, "```"])


def written(page: str, recipe: Path) -> str:
    """The page with the plan as it is now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{plan_of(recipe)}\n\n{END}{after}"


if __name__ == "__main__":
    for found in RECIPES:
        page = found.parents[1] / "README.md"
        page.write_text(written(page.read_text(), page.parent))
