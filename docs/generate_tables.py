"""Writes the tables of drivers.md, from the workers' own `@transfer`.

python docs/generate_tables.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.algorithms import PolicyObjective, PreferenceObjective
from hybridrl.batch.batch import LIBRARY_COLUMNS
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller import Worker
from hybridrl.controller.transfer_protocol import TransferSpec
from hybridrl.trainers.policy_trainer import PolicyTrainer
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.meta_reward_worker import MetaRewardWorker
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.remote_teacher import RemoteTeacher
from hybridrl.workers.reward_model_worker import RewardModelWorker
from hybridrl.workers.reward_worker import RewardWorker

PAGE = Path(__file__).parent / "drivers.md"
BEGIN = "<!-- Written by docs/generate_tables.py from the workers' own @transfer. -->"
END = "<!-- End of what is written. -->"
TRAINER_BEGIN = "<!-- Written by docs/generate_tables.py from PolicyTrainer. -->"
TRAINER_END = "<!-- End of PolicyTrainer. -->"
OF_TRAINER = ("samples", "judge", "rewarded", "unfold", "score", "learn")
OF_DATA = "a column of the data"
"""Stands for every name that the library does not know."""
PLUMBING = {
    "open_rendezvous",
    "join_generator",
    "join_trainer",
    "send_weights",
    "pack_weights",
    "pack_whole_weights",
    "forget_sent_weights",
    "take_sequences",
}
"""What separate generation asks of an actor; no driver program does."""


class Group(NamedTuple):
    """Workers as they are built for a kind of role.

    Attributes:
        names: Roles of the built-in programs, or what is particular.
        built: Keywords on which columns depend.
        refused: Methods that their loss has no use for.
    """

    names: str
    worker: type[Worker]
    built: Mapping[str, Any] = {}
    refused: tuple[str, ...] = ()


POLICY = {"objective": PolicyObjective(), "rollout": RolloutConfig(routing_replay=True)}
PAIRS = {**POLICY, "objective": PreferenceObjective()}
EPISODES = {**POLICY, "rollout": RolloutConfig(episode="tools.py:Tool")}
GROUPS = [
    Group("`actor`", ActorWorker, POLICY, ("update_preference",)),
    Group("`actor` with a loss of pairs", ActorWorker, PAIRS, ("update_actor",)),
    Group(
        "`actor` with `rollout.episode`",
        ActorWorker,
        EPISODES,
        ("update_preference", "compute_log_prob"),
    ),
    Group("`reference`", ReferenceWorker),
    Group("`teacher` with `models.teacher.url`", RemoteTeacher),
    Group("`reward`", RewardWorker, {"kind": "reward"}),
    Group("`cost`", RewardWorker, {"kind": "cost"}),
    Group("`critic`", CriticWorker, {"prefix": ""}),
    Group("`cost_critic`", CriticWorker, {"prefix": "cost_"}),
    Group("`reward_model`", RewardModelWorker),
    Group("`reward_model` of `algorithm=meta_reward_model`", MetaRewardWorker),
]


def tables() -> str:
    """One table for each group. Of groups of one worker class, the later ones have the rows that
    differ from those of the first."""
    found, first = [], {}
    for group in GROUPS:
        rows = _rows(group)
        known = first.setdefault(group.worker, rows)
        if known is not rows:
            rows = [row for row in rows if row not in known]
        head = f"**{group.names}** (`{group.worker.__module__}.{group.worker.__name__}`)"
        found.append("\n".join([head, "", "| call | reads | gives |", "|---|---|---|", *rows]))
    return "\n\n".join(found)


def trainer_table() -> str:
    """A row for each method of a PolicyTrainer that a step calls."""
    rows = ["| method | |", "|---|---|"]
    for name in OF_TRAINER:
        method = getattr(PolicyTrainer, name)
        parameters = list(inspect.signature(method).parameters.values())[1:]
        shown = ", ".join(str(one).partition(":")[0] + _default(one) for one in parameters)
        shown = shown.replace("log_probs", "*, log_probs") if name == "score" else shown
        about = (inspect.getdoc(method) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{name}({shown})` | {about} |")
    return "\n".join(rows)


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default!r}"


def written(page: str) -> str:
    """The page with the tables as they are now between their marks."""
    for begin, end, table in (
        (BEGIN, END, tables()),
        (TRAINER_BEGIN, TRAINER_END, trainer_table()),
    ):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def _rows(group: Group) -> list[str]:
    """A row for each method that a driver program may call, in the order of the class, and those
    of the classes that it derives from after its own."""
    methods: dict[str, Any] = {}
    for base in group.worker.__mro__:
        for name, method in vars(base).items():
            if hasattr(method, "__transfer__") and name not in {*PLUMBING, *group.refused}:
                methods.setdefault(name, method)
    return [_row(name, method, group.built) for name, method in methods.items()]


def _row(name: str, method: Any, built: Mapping[str, Any]) -> str:
    spec: TransferSpec = method.__transfer__
    transfer = spec.bind(built)
    signature = inspect.signature(method)
    call = f"`{name}({', '.join(list(signature.parameters)[1:])})`"
    if transfer.returns_batch:
        gives = _listed(transfer.columns.certain, transfer.columns.possible)
    elif signature.return_annotation in ("None", None):
        gives = "a handle"
    else:
        kind = str(signature.return_annotation).replace("|", r"\|")  # which ends a cell
        gives = f"a handle: {_of_ranks(spec)}`{kind}`"
    return f"| {call} | {_reads(spec, built)} | {gives} |"


def _of_ranks(transfer: TransferSpec) -> str:
    return "" if transfer.protocol.answers == "one" else "of each rank "


def _reads(transfer: TransferSpec, built: Mapping[str, Any]) -> str:
    wanted = transfer.bind(built).wanted
    if wanted is None:
        return ""
    may = wanted.others or (lambda _: False)
    further = [
        name
        for name in sorted(LIBRARY_COLUMNS - wanted.names)
        if may(name) or name in wanted.following
    ]
    if len(further) == len(LIBRARY_COLUMNS - wanted.names):
        possible = ["any other that the loss reads"]
    else:
        possible = [f"`{name}`" for name in [*further, *_named(transfer)]]
        possible += ["columns of the data"] if may(OF_DATA) else []
    listed = _listed(wanted.names, ())
    return f"{listed}; where there: {', '.join(possible)}" if possible else listed


def _named(transfer: TransferSpec) -> list[str]:
    """Names outside the library's list that a method reads where they are there."""
    if callable(transfer.may_read):
        return []
    return [name for name in transfer.may_read if name not in LIBRARY_COLUMNS]


def _listed(certain: Any, possible: Any) -> str:
    """Names of columns, sorted, and patterns of those that may be there."""
    names = ", ".join(f"`{name}`" for name in sorted(certain))
    return f"{names}; maybe {', '.join(f'`{name}`' for name in possible)}" if possible else names


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
