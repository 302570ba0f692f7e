"""`hybridrl checkpoint`: looks at the checkpoints of a run, and after them.

A run is named by its folder, checkpoints elsewhere by the folder or URL that they are in, a step by
its own. Nothing here needs a device, nor that the run has ended.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.table import Table

from hybridrl.checkpoint.pruning import KeepRule, check_best
from hybridrl.checkpoint.store import StepFolders
from hybridrl.commands.steps import settings_of, show, show_json
from hybridrl.config.resume import Source, named_source
from hybridrl.errors import ConfigError
from hybridrl.run_files.metric_reader import read_metrics
from hybridrl.system.formatting import readable_bytes, readable_seconds

DAMAGED = 1
"""Exit code of `verify` where a step is not as it was written."""
REWARD = "reward/mean"
"""What is shown of the training step itself, besides what was evaluated after it."""
_ONE_RUN = "a run's folder, or the folder or URL of its checkpoints"
_ONE_STEP = "a step's folder or URL; of a run its newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `checkpoint` takes."""
    parser.description = (
        "Looks at the checkpoints of a run, which may still go on. Needs no device."
    )
    actions = parser.add_subparsers(dest="action", required=True)

    def action(name: str, what: str, *places: tuple[str, str]) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        for place, meaning in places:
            added.add_argument(place, metavar=place.upper(), help=meaning)
        added.add_argument("--json", action="store_true", help="as data")
        return added

    action("list", "lists the steps of a run", ("run", _ONE_RUN))
    action("inspect", "says what a step holds", ("step", _ONE_STEP))
    action(
        "verify",
        "reads all of a run's steps; exit code 1 if one is damaged",
        ("run", f"{_ONE_RUN}; a step"),
    )
    export = action(
        "export",
        "writes the model of a step as a folder of Hugging Face",
        ("step", _ONE_STEP),
        ("folder", "a new folder"),
    )
    export.add_argument("--role", default="actor", help="whose model (actor)")
    export.add_argument("--dtype", help="of its weights; else that of the run's own model")
    export.add_argument(
        "--file-gib", type=float, default=5.0, metavar="GIB", help="largest file, in GiB (5)"
    )
    action("diff", "says how far two steps are apart", ("before", _ONE_STEP), ("after", _ONE_STEP))
    prune = action("prune", "removes the steps that the rule does not keep", ("run", _ONE_RUN))
    prune.add_argument("--dry-run", action="store_true", help="only says which")
    prune.add_argument(
        "--keep-last", type=int, metavar="N", help="in place of checkpoint.keep_last of the run"
    )
    prune.add_argument(
        "--keep-every", type=int, metavar="N", help="in place of checkpoint.keep_every"
    )
    prune.add_argument(
        "--best", metavar="METRIC", help="in place of checkpoint.best; --best=-METRIC with a minus"
    )


def run(chosen: argparse.Namespace) -> int:
    """Does what was asked for; gives the exit code.

    Raises:
        HybridRLError: if it cannot be done.
    """
    if chosen.action in ("inspect", "export", "diff"):
        from hybridrl.commands import contents, export, step_difference

        commands = {
            "inspect": contents.inspect,
            "export": export.export,
            "diff": step_difference.diff,
        }
        return commands[chosen.action](chosen)
    return {"list": list_steps, "verify": verify, "prune": prune}[chosen.action](chosen)


def list_steps(chosen: argparse.Namespace) -> int:
    """`hybridrl checkpoint list`."""
    source = named_source("", chosen.run)
    folders = StepFolders(source.steps)
    figures, rewards = folders.figures(), _rewards(source)
    best = _rule(source).best_of(figures)
    rows = []
    for step in sorted({*folders.steps(), *folders.unfinished()}):
        row: dict[str, Any] = {"step": step, "state": "not complete"}
        if step in figures:
            fault = folders.fault(step, contents=False)
            row |= {"state": f"damaged: {fault}" if fault else "complete", "best": step == best}
            row["metrics"] = figures[step] | rewards.get(step, {})
            if not fault:
                noted = folders.completed(step)
                row |= {"bytes": noted.bytes, "time": noted.time}
        rows.append(row)
    if chosen.json:
        return show_json({"folder": str(folders.path), "steps": rows})
    table = Table("step", "size", "age", "state", "metrics")
    for row in rows:
        size = readable_bytes(row["bytes"]) if "bytes" in row else ""
        age = readable_seconds(time.time() - row["time"]) if "time" in row else ""
        state = f"{row['state']}, the best" if row.get("best") else row["state"]
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row.get("metrics", {}).items())
        table.add_row(str(row["step"]), size, age, state, metrics)
    return show(table)


def verify(chosen: argparse.Namespace) -> int:
    """`hybridrl checkpoint verify`."""
    source = named_source("", chosen.run)
    folders = StepFolders(source.steps)
    steps = folders.steps() if source.step is None else [source.step]
    faults = {step: folders.fault(step) for step in steps}
    if chosen.json:
        show_json({"steps": [{"step": step, "fault": fault} for step, fault in faults.items()]})
    else:
        lines = [f"step {step}: {fault or 'as it was written'}" for step, fault in faults.items()]
        show(*(lines or ["There are no complete steps."]))
    return DAMAGED if any(faults.values()) else 0


def prune(chosen: argparse.Namespace) -> int:
    """`hybridrl checkpoint prune`."""
    source = named_source("", chosen.run)
    if source.step is not None:
        raise ConfigError(
            f"{chosen.run} is a single step. Name the run, or the folder of its steps."
        )
    rule = _rule(source, chosen.keep_last, chosen.keep_every, chosen.best)
    for option, value, least in (("last", rule.last, 1), ("every", rule.every, 0)):
        if value < least:
            raise ConfigError(f"--keep-{option} {value}: must be {least} or more.")
    folders = StepFolders(source.steps)
    if chosen.best is not None:
        check_best(chosen.best, {k: 0.0 for step in folders.figures().values() for k in step})
    if chosen.dry_run:
        figures = folders.figures()
        removed = sorted(figures.keys() - rule.kept(figures))
    else:
        removed = folders.prune(rule)
    if chosen.json:
        return show_json({"removed": removed, "dry_run": chosen.dry_run})
    steps = ", ".join(map(str, removed)) or "none"
    return show(f"steps {'that would be ' if chosen.dry_run else ''}removed: {steps}")


def _rule(
    source: Source, last: int | None = None, every: int | None = None, best: str | None = None
) -> KeepRule:
    """That of the run's settings, but for what is given."""
    settings = settings_of(source).get("checkpoint") or {}
    return KeepRule(
        settings.get("keep_last", 2) if last is None else last,
        settings.get("keep_every", 0) if every is None else every,
        settings.get("best") if best is None else best,
    )


def _rewards(source: Source) -> dict[int, dict[str, float]]:
    """The mean reward of each step, where the run's own folder is here."""
    if source.run is None:
        return {}
    rows = read_metrics(source.run / "metrics.jsonl")
    return {row["step"]: {REWARD: row[REWARD]} for row in rows if REWARD in row}
