"""`hybridrl whatif RUN`: predict the step time of a recorded run after a change."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hybridrl.commands.output import print_for_people, print_json
from hybridrl.composition.overrides import parse_overrides
from hybridrl.config.changed import apply_changes
from hybridrl.config.setting_types import find_invalid_values
from hybridrl.errors import ConfigError, ErrorCollector
from hybridrl.planner.step.graph_replay import ReplayResult
from hybridrl.planner.what_if.graph_changes import OWN
from hybridrl.planner.what_if.recorded_graph import BESIDE
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.system.cluster_spec import MAX_DEVICES

if TYPE_CHECKING:
    from hybridrl.planner.what_if.questions import WhatIfPrediction, WhatIfQuestion

_TIMES = re.compile(r"(\d+(?:\.\d+)?)x")
_MIN_SHOWN_SHARE = 0.005
"""Of a step: what is less of it is not worth a line."""
_RESPONSES, _LINK, _DEVICES = "responses", "link", "devices"
_PLANNER_SETTINGS = ("actor.tokens_per_microbatch", "reward.processes", "checkpoint.every_minutes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says how long a step of a run would take if something were different, by "
        "replaying its recorded steps."
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the job; devices=16; link=200Gbps, or link=2x: twice as fast",
    )
    parser.add_argument(
        "--move",
        action="append",
        default=[],
        metavar="ROLE=DEVICES",
        help=f"a role on other devices: reward=2,3, reward=actor (where that is), reward={OWN}",
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="WHAT=TIMES",
        help="responses=2x: twice as long; reward=3x, reward.score=3x: what takes so long",
    )
    parser.add_argument("--fix", choices=["slowest"], help="the rank that the others wait for")
    parser.add_argument(
        "--overlap",
        choices=["scoring"],
        help="samples scored as they finish, as if they did so evenly: what could be won at most",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="how many of the newest steps count (10)"
    )
    parser.add_argument("--json", action="store_true", help="as data")


def run(chosen: argparse.Namespace) -> int:
    """Predict the step time and print it.

    Raises:
        ConfigError: for what cannot be asked.
    """
    if chosen.steps < 1:
        raise ConfigError(f"--steps {chosen.steps}: must be 1 or more.")
    recorded = RecordedRun.at(Path(chosen.run), chosen.steps)
    # These bring torch, which takes seconds; a wrong folder is refused without them.
    from hybridrl.planner.what_if.backtest import median_error
    from hybridrl.planner.what_if.questions import predict_step
    from hybridrl.systems.operator_costs.cost_source import offer_costs

    offer_costs()
    question = parse_question(recorded, chosen)
    found = predict_step(recorded, question)
    if chosen.json:
        return print_json(_build_data(found))
    lines = [
        f"{found.steps} steps of {recorded.folder}: {found.measured:.4g} s each, replayed "
        f"{found.replayed:.4g} s",
    ]
    if found.slowest:
        lines.append(f"the slowest: {found.slowest}")
    if found.unseen:
        lines.append(
            f"no plan of a step depends on {', '.join(found.unseen)}: nothing was predicted of it"
        )
    if found.source:
        lines.append(f"plans are by {found.source}")
    known = median_error()
    within = f" (of earlier predictions half were off by more than {known:.0%})" if known else ""
    if known is None:
        within = " (no prediction has been compared yet: hybridrl plan --backtest RUN RUN2)"
    lines.append(f"predicted: {found.seconds:.4g} s, {found.change:+.1%}{within}")
    return print_for_people(*lines, "", _build_path_table(found, question.devices))


def parse_question(recorded: RecordedRun, chosen: argparse.Namespace) -> WhatIfQuestion:
    """Parse the options to a question.

    Raises:
        ConfigError: if they cannot be read.
    """
    from hybridrl.planner.machine.device_catalog import parse_link
    from hybridrl.planner.what_if.questions import WhatIfQuestion, compute_link_speedup

    settings: list[tuple[str, Any]] = []
    devices, link, responses = None, 1.0, 1.0
    for text in chosen.set:
        name, value = _split_option("--set", text)
        if name == _DEVICES:
            if not value.isdecimal() or not int(value):
                raise ConfigError(f"--set {text}: must be a number of devices.")
            if int(value) > MAX_DEVICES:
                raise ConfigError(f"--set {text}: must be {MAX_DEVICES:,} or fewer.")
            devices = int(value)
        elif name == _LINK:
            times = _TIMES.fullmatch(value)
            link = (
                float(times[1])
                if times
                else compute_link_speedup(recorded, parse_link(text, value))
            )
            if not link:
                raise ConfigError(f"--set {text}: must be above 0.")
        else:
            settings.append(_parse_setting(text))
    for name, value in settings:
        if value is None and name in _PLANNER_SETTINGS:
            raise ConfigError(f"--set {name}=null: name a number: the run has had one.")
    if wrong := dict(find_invalid_values(apply_changes(recorded.config, settings))):
        raise ConfigError(*wrong.values())
    moves: dict[str, Any] = {}
    for text in chosen.move:
        role, where = _split_option("--move", text)
        numbers = re.fullmatch(r"\d+(,\d+)*", where)
        moves[role] = [int(one) for one in where.split(",")] if numbers else where
        if numbers and len(set(moves[role])) < len(moves[role]):
            raise ConfigError(f"--move {text}: names a device twice.")
        if numbers and max(moves[role]) > MAX_DEVICES:
            raise ConfigError(f"--move {text}: devices have numbers up to {MAX_DEVICES:,}.")
    longer = {}
    for text in chosen.scale:
        name, value = _split_option("--scale", text)
        times = _TIMES.fullmatch(value)
        if not times or not float(times[1]):
            raise ConfigError(f"--scale {text}: write how many times as long: {name}=2x.")
        if name == _RESPONSES:
            responses = float(times[1])
        else:
            longer[name] = float(times[1])
    fix, overlap = chosen.fix is not None, chosen.overlap is not None
    return WhatIfQuestion(settings, devices, link, moves, responses, longer, fix, overlap)


def _parse_setting(text: str) -> tuple[str, Any]:
    problems = ErrorCollector()
    found = parse_overrides([text], problems)
    problems.raise_if_any()
    if len(found) != 1 or found[0].is_preset:
        raise ConfigError(
            f"--set {text}: name one setting, such as actor.tokens_per_microbatch=4096."
        )
    return found[0].key, found[0].value


def _split_option(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ConfigError(f"{option} {text}: write NAME=VALUE.")
    return name, value


def _build_data(found: WhatIfPrediction) -> dict[str, Any]:
    """Return the prediction as plain data, in seconds of a step."""
    from hybridrl.planner.what_if.backtest import median_error

    return {
        "steps": found.steps,
        "measured": found.measured,
        "replayed": found.replayed,
        "predicted": found.seconds,
        "change": found.change,
        "spread": median_error(),
        "slowest": found.slowest,
        "unseen": list(found.unseen),
        "source": found.source,
        "critical_path": {
            "before": sum_critical_path(found.before),
            "after": sum_critical_path(found.after),
        },
    }


def sum_critical_path(replayed: ReplayResult) -> dict[str, float]:
    """Sum the seconds on the critical path by the kind of work."""
    found: defaultdict[str, float] = defaultdict(float)
    for number in replayed.critical:
        node = replayed.graph.nodes[number]
        found[node.name] += replayed.own_ends[number] - replayed.starts[number]
    found["waiting to begin"] = replayed.makespan - sum(found.values())
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _build_path_table(found: WhatIfPrediction, devices: int | None) -> Table:
    table = Table(title="what a step's time is made of", title_justify="left", box=None)
    for column in ("", "as it was", "", "changed", ""):
        table.add_column(column, justify="left" if not table.columns else "right")
    paths = [sum_critical_path(found.before), sum_critical_path(found.after)]
    wholes = [found.before.makespan or 1.0, found.after.makespan or 1.0]
    for name in {**paths[0], **paths[1]}:
        cells = []
        shares = [path.get(name, 0.0) / whole for path, whole in zip(paths, wholes, strict=True)]
        if max(shares) < _MIN_SHOWN_SHARE:
            continue
        for path, share in zip(paths, shares, strict=True):
            seconds = path.get(name, 0.0)
            cells += [f"{seconds / found.held:.4g} s", f"{share:.0%}"]
        table.add_row(name, *cells)
    idle = [_idle(found.before, None), _idle(found.after, devices)]
    table.add_row("devices are idle", "", f"{idle[0]:.0%}", "", f"{idle[1]:.0%}")
    return table


def _idle(replayed: ReplayResult, devices: int | None) -> float:
    """Return the mean idle share of the first devices: those that were taken away are not idle."""
    names = replayed.graph.places
    shares = [
        share
        for place, share in replayed.idle_shares.items()
        if (devices is None or place < devices) and not names[place].endswith(BESIDE)
    ]
    return sum(shares) / max(1, len(shares))
