"""What every benchmark here shares: arms that take turns, medians, and one JSON line per figure.

Importing it makes the program print each line at once and say how long it takes. With
HYBRIDRL_BENCH_SMOKE=1 programs run as small as they can (`make bench-smoke`): that shows that they
still run, and their figures mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

Arm = Callable[[], float]
SMOKE = os.environ.get("HYBRIDRL_BENCH_SMOKE") == "1"
ANNOUNCED = "HYBRIDRL_BENCH_ANNOUNCED"
TAKES = {
    "auto_choice": "an hour",
    "auto_learning_rate": "4 hours",
    "checkpoint": "5 minutes",
    "codecs": "2 minutes",
    "core_isolation": "10 minutes",
    "content_cache": "3 minutes",
    "curriculum": "an hour",
    "dispatch": "2 minutes",
    "distillation": "half an hour",
    "endpoint": "5 minutes; with --load 10 minutes",
    "endurance": "20 minutes",
    "gpu": "2 minutes with --size tiny",
    "gradient_choice": "20 minutes",
    "hangs": "20 minutes",
    "kept_sets": "15 minutes",
    "loading": "15 minutes",
    "low_bit_training": "an hour",
    "meta_reward_models": "20 minutes",
    "mixed_devices": "5 minutes",
    "mixed_generation": "10 minutes",
    "operator_cost": "half an hour",
    "output_head": "5 minutes",
    "overhead": "4 minutes",
    "packing": "2 minutes",
    "paper_placements": "15 minutes",
    "placement": "half an hour",
    "plan": "20 minutes",
    "plan_at_size": "2 minutes",
    "prefix_order": "3 minutes",
    "quantised_generation": "half an hour",
    "recovery": "10 minutes",
    "reshard": "10 minutes",
    "sandbox": "1 minute",
    "scaling": "3 minutes",
    "shared_prompts": "5 minutes",
    "slow_device": "half an hour",
    "slow_link": "20 minutes",
    "streamed_data": "3 minutes; with --rows 1000000 an hour",
    "timeline": "5 minutes",
    "unwaited_generation": "half an hour",
    "versus_trl": "an hour",
    "weight_sync": "half an hour",
    "what_if": "half an hour",
}
"""Estimates for two idle cores and the default size."""


def announce(program: str) -> None:
    """Print how long a program takes, and have each of its lines appear when it is printed."""
    if program in TAKES and not os.environ.get(ANNOUNCED):
        os.environ[ANNOUNCED] = "1"  # the processes that it starts print nothing of their own
        sys.stdout.reconfigure(line_buffering=True)
        size = "the smallest size" if SMOKE else f"about {TAKES[program]} on two idle cores"
        print(f"# {program}: {size}; a JSON line for each figure", flush=True)


def interleave(ours: Arm, baseline: Arm, rounds: int) -> tuple[float, float]:
    """Runs the arms in turn and gives the median of each, so that drift of the machine's speed
    falls on both."""
    measured = []
    for number in range(1, 1 + (1 if SMOKE else rounds)):
        measured.append((ours(), baseline()))
        print(f"# round {number}: {measured[-1][0]:.4g} and {measured[-1][1]:.4g}", flush=True)
    return tuple(statistics.median(column) for column in zip(*measured, strict=True))


def report(name: str, ours: float, baseline: float, goal: str, unit: str) -> None:
    """Prints a figure as one JSON line; the ratio is ours / baseline."""
    figure = {
        "name": name,
        "ratio": round(ours / baseline, 4) if baseline else None,
        "goal": goal,
        "ours": ours,
        "baseline": baseline,
        "unit": unit,
    }
    print(json.dumps(figure), flush=True)


announce(Path(sys.argv[0]).stem)
