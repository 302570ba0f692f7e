"""`hybridrl checkpoint`: list, inspect, verify, export, compare and prune a run's checkpoints.

A run is named by its folder, checkpoints elsewhere by the folder or URL that they are in, a step by
its own. Nothing here needs a device, nor that the run has ended.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridrl.checkpoint.keep_rule import KeepRule, check_figure
from hybridrl.checkpoint.resume import Source, find_resume_source
from hybridrl.checkpoint.store import COMPLETE_FILE, CheckpointStore
from hybridrl.checkpoint.stored_settings import differences, load_stored
from hybridrl.checkpoint.tensors.rank_manifest import read_manifests
from hybridrl.commands.output import print_for_people, print_json
from hybridrl.errors import EXIT_FAILURE, ConfigError
from hybridrl.run_files.run_paths import SETTINGS
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.bounded_files import load_object
from hybridrl.system.formatting import format_bytes, format_seconds
from hybridrl.system.locations import Location

_REWARD_METRIC = "reward/mean"
"""What is shown of the training step itself, besides what was evaluated after it."""
_ONE_RUN = "a run's folder, or the folder or URL of its checkpoints"
_ONE_STEP = "a step's folder or URL; of a run its newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    export.add_argument(
        "--merged", action="store_true", help="adapters multiplied into the model they belong to"
    )
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
    """Do what was asked for; return the exit code.

    Raises:
        HybridRLError: if it cannot be done.
    """
    actions = {
        **{"list": _list_checkpoints, "inspect": inspect, "verify": _verify_checkpoints},
        **{"export": export_model, "diff": diff, "prune": _prune_checkpoints},
    }
    return actions[chosen.action](chosen)


def _list_checkpoints(chosen: argparse.Namespace) -> int:
    """Show the steps of a run."""
    source = find_resume_source("", chosen.run)
    folders = CheckpointStore(source.steps)
    figures, rewards = folders.figures(), _read_rewards(source)
    best = _resolve_keep_rule(source).best_of(figures)
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
        return print_json({"folder": str(folders.path), "steps": rows})
    table = Table("step", "size", "age", "state", "metrics")
    for row in rows:
        size = format_bytes(row["bytes"]) if "bytes" in row else ""
        age = format_seconds(time.time() - row["time"]) if "time" in row else ""
        state = f"{row['state']}, the best" if row.get("best") else row["state"]
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row.get("metrics", {}).items())
        table.add_row(str(row["step"]), size, age, state, metrics)
    return print_for_people(table)


def _verify_checkpoints(chosen: argparse.Namespace) -> int:
    """Read all of a run's steps."""
    source = find_resume_source("", chosen.run)
    folders = CheckpointStore(source.steps)
    steps = folders.steps() if source.step is None else [source.step]
    faults = {step: folders.fault(step) for step in steps}
    if chosen.json:
        print_json({"steps": [{"step": step, "fault": fault} for step, fault in faults.items()]})
    else:
        lines = [f"step {step}: {fault or 'as it was written'}" for step, fault in faults.items()]
        print_for_people(*(lines or ["There are no complete steps."]))
    return EXIT_FAILURE if any(faults.values()) else 0


def inspect(chosen: argparse.Namespace) -> int:
    """Show what a step holds, from its lists alone; no tensor is read."""
    _, folders, step = _one_step(chosen.step)
    noted = folders.completed(step)
    try:
        roles = {role: _describe_role(folders.at(step) / role) for role in noted.roles}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folders.at(step)} is damaged: {error}.") from error
    if chosen.json:
        known = {"step": step, "bytes": noted.bytes, "time": noted.time, "metrics": noted.figures}
        return print_json(known | roles)
    size = format_bytes(noted.bytes)
    print_for_people(f"step {step} in {folders.path}: {size} in {len(noted.files)} files")
    for role, found in roles.items():
        numbers = {**found["counters"], **found["counters"].get("counters", {})}
        text = ", ".join(f"{k} {v}" for k, v in numbers.items() if k != "counters")
        print_for_people(f"\n{role}, written by {found['ranks']} ranks; {text}")
        table = Table("tensor", "dtype", "shape", "boxes", "file")
        for name, tensor in found["tensors"].items():
            shape = " x ".join(map(str, tensor["shape"])) or "()"
            boxes = str(len(tensor["boxes"]))
            table.add_row(name, tensor["dtype"], shape, boxes, ", ".join(tensor["files"]))
        print_for_people(table)
    return 0


def export_model(chosen: argparse.Namespace) -> int:
    """Write the model of a role as a Hugging Face folder of its own."""
    from hybridrl.checkpoint.export import export_model, saved_dtype
    from hybridrl.system.dtypes import DTYPES

    run, folders, step = _one_step(chosen.step)
    target, role, dtype = Path(chosen.folder), chosen.role, chosen.dtype
    if dtype is None:
        dtype = saved_dtype(load_stored(run.settings))
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}.")
    if not 0 < chosen.file_gib < math.inf:
        raise ConfigError(f"--file-gib {chosen.file_gib:g}: must be a number of more than 0.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already, and is not empty. Name a new folder.")
    noted = folders.completed(step)
    if role not in noted.roles:
        raise ConfigError(f"--role {role}: step {step} has {', '.join(noted.roles)}.")
    files = [n.removeprefix(f"{role}/") for n in noted.files if n.startswith(f"{role}/")]
    most = int(chosen.file_gib * 2**30)
    place = folders.at(step) / role
    if chosen.merged:
        from hybridrl.commands.merged_export import export_merged_model

        lora = load_stored(run.settings)["actor"]["lora"]
        size = export_merged_model(str(place), lora.get("base_format"), target, dtype, most)
    else:
        size = export_model(place, files, target, dtype, most)
    if chosen.json:
        return print_json({"step": step, "role": role, "folder": str(target), "bytes": size})
    return print_for_people(f"{target}: {role} of step {step}, {format_bytes(size)} of {dtype}")


def diff(chosen: argparse.Namespace) -> int:
    """Show how far the weights of two steps are apart, and their settings."""
    from hybridrl.checkpoint.comparison import compare_weights

    (_, before, old), (_, after, new) = _one_step(chosen.before), _one_step(chosen.after)
    first, second = before.at(old), after.at(new)
    shared = set(before.completed(old).roles) & set(after.completed(new).roles)
    roles = {role: compare_weights(first / role, second / role) for role in sorted(shared)}
    settings = differences(load_stored(first / SETTINGS), load_stored(second / SETTINGS))
    if chosen.json:
        return print_json({"before": old, "after": new, "roles": roles, "settings": settings})
    for role, tensors in roles.items():
        print_for_people(f"{role}, step {old} -> {new}")
        table = Table("weight", "largest change", "relative change", "share changed")
        for name, change in tensors.items():
            if (other := change.get("other")) is not None:
                table.add_row(name, other)
            else:
                largest, relative = change["largest"], change["relative"]
                table.add_row(name, f"{largest:.3g}", f"{relative:.3g}", f"{change['changed']:.1%}")
        print_for_people(table)
    return print_for_people(*(f"changed: {line}" for line in settings))


def _prune_checkpoints(chosen: argparse.Namespace) -> int:
    """Remove the steps that the rule does not keep."""
    source = find_resume_source("", chosen.run)
    if source.step is not None:
        raise ConfigError(
            f"{chosen.run} is a single step. Name the run, or the folder of its steps."
        )
    rule = _resolve_keep_rule(source, chosen.keep_last, chosen.keep_every, chosen.best)
    for option, value, least in (("last", rule.last, 1), ("every", rule.every, 0)):
        if value < least:
            raise ConfigError(f"--keep-{option} {value}: must be {least} or more.")
    folders = CheckpointStore(source.steps)
    if chosen.best is not None:
        known = {name: 0.0 for step in folders.figures().values() for name in step}
        check_figure("checkpoint.best", chosen.best, known)
    if chosen.dry_run:
        figures = folders.figures()
        removed = sorted(figures.keys() - rule.kept(figures))
    else:
        removed = folders.prune(rule)
    if chosen.json:
        return print_json({"removed": removed, "dry_run": chosen.dry_run})
    steps = ", ".join(map(str, removed)) or "none"
    return print_for_people(f"steps {'that would be ' if chosen.dry_run else ''}removed: {steps}")


def _resolve_keep_rule(
    source: Source, last: int | None = None, every: int | None = None, best: str | None = None
) -> KeepRule:
    """Return the rule of the run's settings, but for what is given."""
    settings = load_stored(source.settings).get("checkpoint") or {}
    return KeepRule(
        settings.get("keep_last", 2) if last is None else last,
        settings.get("keep_every", 0) if every is None else every,
        settings.get("best") if best is None else best,
    )


def _read_rewards(source: Source) -> dict[int, dict[str, float]]:
    """Return the mean reward of each step, where the run's own folder is here."""
    rows = [] if source.run is None else RunReader(source.run).rows()
    return {
        row["step"]: {_REWARD_METRIC: row[_REWARD_METRIC]} for row in rows if _REWARD_METRIC in row
    }


def _one_step(named: str) -> tuple[Source, CheckpointStore, int]:
    """Return the step that is named, of a run the newest that is complete.

    Raises:
        ConfigError: if it is not complete, or if there is none.
    """
    source = find_resume_source("", named)
    folders = CheckpointStore(source.steps)
    steps = folders.steps()
    step = source.step if source.step is not None else max(steps, default=None)
    if step is None or step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{named}: no such complete step is in {folders.path}; there are {known}."
        )
    try:
        folders.completed(step)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folders.at(step) / COMPLETE_FILE} could not be read ({error}). Bring it back from a "
            "copy, or name another step."
        ) from error
    return source, folders, step


def _describe_role(folder: Location) -> dict[str, Any]:
    lists = read_manifests(folder)
    tensors: dict[str, Any] = {}
    for rank, one in enumerate(lists):
        for box in one.boxes:
            known = {"dtype": box.dtype, "shape": box.shape, "files": [], "boxes": []}
            tensor = tensors.setdefault(box.tensor, known)
            if (file := one.file_of(box)) not in tensor["files"]:
                tensor["files"].append(file)
            tensor["boxes"].append({"rank": rank, "box": box.box})
    counters: dict[str, Any] = {}
    for name in ("training.json", "generations.json"):
        if (folder / name).is_file():
            counters |= load_object(folder / name)
    return {"ranks": len(lists), "counters": counters, "tensors": tensors}
