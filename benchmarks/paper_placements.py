"""Which placement is best, by size of model and number of devices, beside what HybridFlow's authors
measured (Sheng et al., EuroSys 2025, section 8.3): machines of eight A100-80GB with 200 Gbit/s
each, PPO with four models of one size, 1,024 prompts and responses of 1,024 tokens.

    python benchmarks/paper_placements.py [13b 34b ...]

The paper found all models on the same devices best with 16 to 64 of them; two halves best with 96
and 128 for 34B, models apart from each other best with 128 for 13B. Nothing runs here: the times
are those of the plan's search.
"""

from __future__ import annotations

import sys
import time

from figures import SMOKE, report

from hybridrl.job.config_resolution import load_config
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.search.placement_search import search_placements
from hybridrl.planner.search.placement_space import PlacementShape
from hybridrl.planner.search.planned_costs import PlannedSearchCosts
from hybridrl.planner.step.step_calls import SampleLengths

DEVICES = (16, 32, 64, 96, 128)
PLACEMENTS = {
    "together": PlacementShape((("actor", "reference", "critic", "reward"),)),
    "halves": PlacementShape((("actor", "reference"), ("critic", "reward"))),
    "apart": PlacementShape((("actor",), ("reference",), ("critic",), ("reward",))),
}
FOUND = {
    "13b": {16: "together", 32: "together", 64: "together", 128: "apart"},
    "34b": {32: "together", 64: "together", 96: "halves", 128: "halves"},
}
"""What the paper's measurements say is best, by size and devices."""
LENGTHS = SampleLengths.alike(1024, 1024)
DEADLINE_S = 5.0 if SMOKE else 120.0


def main() -> None:
    """Prints a row for each size and number."""
    sizes = sys.argv[1:] or ["7b", "13b", "34b", "70b"]
    agreed, asked, crossed, begin = 0, 0, 0, time.perf_counter()
    print(f"{'model':6}{'devices':>8}" + "".join(f"{name:>10}" for name in PLACEMENTS) + "   paper")
    for size in sizes:
        for devices in DEVICES[:1] if SMOKE else DEVICES:
            seconds = best_seconds(size, devices)
            best = min(seconds, key=lambda name: seconds[name]) if seconds else "nothing fits"
            said = FOUND.get(size, {}).get(devices)
            cells = "".join(
                f"{seconds[name]:>10.1f}" if name in seconds else f"{'-':>10}"
                for name in PLACEMENTS
            )
            verdict = f"best: {best}; paper: {said or 'not shown'}"
            print(f"{size:6}{devices:>8}{cells}   {verdict}")
            if said is not None:
                asked += 1
                agreed += best == said
                crossed += (best == "together") == (said == "together")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if asked:
        report("placements_as_in_paper", agreed, asked, ">= 0.9", "settings")
        report("together_or_not_as_in_paper", crossed, asked, ">= 0.9", "settings")


def best_seconds(size: str, devices: int) -> dict[str, float]:
    """A step's seconds by placement, of those that fit."""
    model = f"llama-{size}"
    settings = [
        "algorithm=ppo",
        f"model.path={model}",
        f"reward.model={model}",
        "data.prompts_per_step=1024",
        "rollout.samples_per_prompt=1",
        "actor.updates_per_step=8",
        "algorithm.kl_coefficient=0.01",
    ]
    cluster = parse_cluster(f"{devices // 8}x8xA100@25Gbps")
    with materialize_named_models(load_config(settings), None) as config:
        costs = PlannedSearchCosts(config, cluster, DeviceRates.known(cluster, "bfloat16"), LENGTHS)
        found = {}
        for name, shape in PLACEMENTS.items():
            report_ = search_placements(costs, deadline_s=DEADLINE_S, among=[shape])
            if report_.best:
                found[name] = report_.best[0].step
    return found


if __name__ == "__main__":
    main()
