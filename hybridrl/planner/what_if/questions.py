"""Predictions of the time that a run would have taken otherwise: its recorded steps, changed and
replayed.

What was measured is changed in proportion to what the planner says: a setting that makes the plan's
training 1.3 times as long makes the recorded training 1.3 times as long. So only the difference is
predicted. Links need no plan: each rank's record says what it waited for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridrl.config.changed import Setting
from hybridrl.errors import ConfigError
from hybridrl.placement import GENERATOR_ROLE
from hybridrl.placement.disaggregated_actor import STREAM_PARTS
from hybridrl.planner.step.graph_replay import NO_PLACE, ReplayResult, WorkGraph, replay_graph
from hybridrl.planner.what_if.graph_changes import (
    OWN,
    NodeFilter,
    find_slowest_rank,
    move_role,
    overlap_scoring,
    scale_links,
    scale_responses,
    scale_speed,
)
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.planner.what_if.replanning import replan_graph
from hybridrl.system.cluster_spec import LinkSpec

_REWARD_ROLE = "reward"


@dataclass(frozen=True)
class WhatIfQuestion:
    """A what-if question: the changes of settings, devices, links and lengths that it asks about.

    Attributes:
        settings: Of the job, names with values.
        devices: How many there are; None: as many as there were.
        link: How many times as fast links are.
        moves: By role, its devices, or `OWN`.
        responses: How many times as long.
        longer: By role, or `role.phase`, how many times as long it takes.
        fix_slowest: Whether the rank that others wait for is as fast as they.
        overlap_scoring: Whether samples are scored as they finish, as those of a generator are
            that has devices of its own.
    """

    settings: Sequence[Setting] = ()
    devices: int | None = None
    link: float = 1.0
    moves: Mapping[str, str | Sequence[int]] = field(default_factory=dict)
    responses: float = 1.0
    longer: Mapping[str, float] = field(default_factory=dict)
    fix_slowest: bool = False
    overlap_scoring: bool = False


@dataclass(frozen=True)
class WhatIfPrediction:
    """The answer to a what-if: the measured, replayed and predicted time of a step.

    Attributes:
        measured: Seconds of a step of the run.
        before, after: The replay of `steps` steps, as it was and changed.
        held: How many steps the replay is of; see `RecordedRun.held`.
        slowest: The rank that was mended, if one was.
        unseen: Settings that change nothing in the plan, of which so nothing was predicted.
        source: Which measurement plans rest on, where they were made; empty: the record is enough.
    """

    measured: float
    before: ReplayResult
    after: ReplayResult
    steps: int
    held: float
    slowest: str = ""
    unseen: Sequence[str] = ()
    source: str = ""

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.after.makespan / self.held

    @property
    def replayed(self) -> float:
        """Return the seconds of a step in the unchanged replay."""
        return self.before.makespan / self.held

    @property
    def change(self) -> float:
        """Return the relative change of a step's time: -0.3 if it takes 30% less."""
        return self.after.makespan / self.before.makespan - 1


def predict_step(run: RecordedRun, question: WhatIfQuestion) -> WhatIfPrediction:
    """Predict the time of a step under the changes of a question.

    Raises:
        ConfigError: for roles, devices and settings that cannot be.
    """
    _check_names(run, question)
    graph = run.graph
    before, said, source = replay_graph(graph), "", ""
    unseen: Sequence[str] = ()
    if question.fix_slowest:
        found = find_slowest_rank(graph)
        if found is None:
            said = "no rank keeps others waiting"
        else:
            where, speed = found
            said = f"{where.role} rank {min(where.ranks or [0])}, {speed:.2f} times as fast"
            graph = scale_speed(graph, where, speed)
    if question.link != 1.0:
        graph = scale_links(graph, question.link)
    for name, times in question.longer.items():
        role, _, phase = name.partition(".")
        graph = scale_speed(graph, NodeFilter(role, phase), 1 / times)
    if question.responses != 1.0:
        prompt, response, _ = run.lengths
        share = response / (prompt + response)
        graph = scale_responses(graph, question.responses, share)
    if question.settings or question.devices is not None:
        graph, unseen, source = replan_graph(run, graph, question.settings, question.devices)
    if question.overlap_scoring:
        graph = overlap_scoring(graph, _REWARD_ROLE, STREAM_PARTS)
    for role, asked in question.moves.items():
        graph = move_role(graph, role, _places(graph, role, asked))
    after = replay_graph(graph)
    steps, held = len(run.steps), run.held
    return WhatIfPrediction(run.seconds, before, after, steps, held, said, unseen, source)


def _check_names(run: RecordedRun, question: WhatIfQuestion) -> None:
    roles = sorted({node.role for node in run.graph.nodes if node.place != NO_PLACE})
    phases = {(node.role, node.phase) for node in run.graph.nodes}
    for role in question.moves:
        if role not in roles:
            raise ConfigError(f"--move {role}=...: the run has the roles {', '.join(roles)}.")
    is_late = (_REWARD_ROLE, "score") in phases and GENERATOR_ROLE not in roles
    if question.overlap_scoring and (not is_late or run.config.reward.model):
        raise ConfigError(
            "--overlap scoring: for runs in which reward functions wait until all samples are "
            "made; a generator with devices of its own has them scored as they finish."
        )
    for name in question.longer:
        role, _, phase = name.partition(".")
        if role not in roles or (phase and (role, phase) not in phases):
            known = sorted({f"{r}.{p}" for r, p in phases if r in roles})
            raise ConfigError(
                f"--scale {name}=...: name `responses`, a role, or one of {', '.join(known)}."
            )


def _places(graph: WorkGraph, role: str, asked: str | Sequence[int]) -> Sequence[int]:
    """Resolve a move into the numbers of devices."""
    mine = sorted({node.place for node in graph.nodes if node.role == role and node.place >= 0})
    if asked == OWN:
        return range(len(graph.places), len(graph.places) + len(mine))
    if isinstance(asked, str):
        others = {node.place for node in graph.nodes if node.role == asked and node.place >= 0}
        if not others:
            raise ConfigError(
                f"--move {role}={asked}: name devices by their numbers (2,3), another role, or "
                f"`{OWN}`."
            )
        return sorted(others)
    return asked


def compute_link_speedup(run: RecordedRun, wanted: LinkSpec) -> float:
    """Compute how many times as fast as the run's links a link of this rate is.

    Raises:
        ConfigError: if nobody knows those of the run.
    """
    nodes = run.cluster.nodes
    host = run.cluster.hosts.get(nodes[0])
    if host is None:
        raise ConfigError(
            f"--set link=...: {run.folder}/cluster.json does not say how fast the run's links are. "
            "Say how many times as fast: --set link=2x; or write `hosts` into that file, as "
            "`hybridrl cluster probe --json` prints them."
        )
    now = host.network if len(nodes) > 1 else host.inside
    return wanted.bandwidth / now.bandwidth
