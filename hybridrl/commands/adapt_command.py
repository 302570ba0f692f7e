"""`hybridrl adapt`: make a reward model for an annotator, domain or user from a few pairs."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridrl.commands.output import print_for_people, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the folder of a run with algorithm=meta_reward_model")
    parser.add_argument("pairs", help="a file of preference pairs with the columns of that run")
    parser.add_argument("folder", help="a new folder, for reward.model")
    parser.add_argument(
        "--task", help="a task of that run, to begin with what is known of it; else a new one"
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Adapt the model and say how many of the pairs it tells right.

    Raises:
        ConfigError, DataError: as `adapt_reward_model` does.
    """
    from hybridrl.job.reward_adaptation import adapt_reward_model

    found = adapt_reward_model(Path(chosen.run), chosen.pairs, Path(chosen.folder), chosen.task)
    if chosen.json:
        return print_json({"folder": chosen.folder, **found._asdict()})
    return print_for_people(
        f"{chosen.folder}: adapted to {found.pairs} pairs, of which it tells {found.after:.0%} "
        f"right ({found.before:.0%} before). To reward with it: reward.model={chosen.folder}"
    )
