"""The calls of a step, recorded: the driver program itself runs, on groups that only note what they
are called for and on tables that know nothing but their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridrl.batch.batch import Batch, resolve_row_numbers
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Worker
from hybridrl.controller.group_call import UNKNOWN, Rows, ShardedResult
from hybridrl.controller.table_expression import ConcatenatedTable, TableExpression
from hybridrl.placement import ACTOR_ROLE, GENERATOR_ROLE, Placement
from hybridrl.planner.step.step_calls import PlannedCall, StepSizes
from hybridrl.rollout import SamplingSettings
from hybridrl.trainers import load_roles, load_trainer
from hybridrl.trainers.role_spec import RoleSpec, find_playing_role

_PHASE_OF_VERB = {"generate": "generate", "compute": "score", "update": "train"}
"""What a method does, by the first word of its name."""


def record_calls(
    config: Config, sizes: StepSizes, placement: Placement, roles: Mapping[str, RoleSpec]
) -> tuple[list[PlannedCall], str]:
    """Record the calls of one step, in order, of the roles that are placed; return also a sentence
    if the program could not be run and these are the usual calls of its roles.

    Args:
        roles: Those of the job, beside those of the trainer.
    """
    trainer_class, own = load_trainer(config.trainer.name), load_roles(config)
    noted: list[tuple[str, str, str, int]] = []
    groups = {role: _Group(role, spec, sizes, noted) for role, spec in own.items()}
    notice = ""
    try:
        trainer = trainer_class(
            config, groups, SamplingSettings(1), _Feed(trainer_class.DATA, sizes)
        )
        if trainer.TRAINS:
            # What is different in the first steps, while only critics learn, is not what is asked.
            for _ in range(config.critic.warmup_steps + 1):
                noted.clear()
                trainer.step()
        else:
            trainer.evaluate(_table(sizes.samples, 1))
    except Exception as error:  # whatever a user's program does with numbers that are none
        notice = (
            f"The step of trainer.name={config.trainer.name} could not be planned by running it "
            f"without data ({type(error).__name__}: {error}); the plan assumes what its roles "
            "usually do: each of them once, on all samples."
        )
        noted[:] = _usual(own, sizes, config.actor.updates_per_step)
    syncs = trainer_class.TRAINS
    calls = []
    for call in _merged(noted):
        player = find_playing_role({**own, **roles}, call.role, config)
        if player == ACTOR_ROLE and call.phase == "generate" and placement.is_separated:
            player = GENERATOR_ROLE
        calls.append(replace(call, role=player))
    generators = dict.fromkeys(call.role for call in calls if call.phase == "generate")
    first = [PlannedCall(role, "sync", sizes.samples) for role in generators if syncs]
    return [call for call in [*first, *calls] if call.role in placement.roles], notice


def _merged(noted: Iterable[tuple[str, str, str, int]]) -> list[PlannedCall]:
    """Merge the updates of a role by one method into one call, in the place of the first."""
    found: dict[Any, PlannedCall] = {}
    for number, (role, method, phase, rows) in enumerate(noted):
        key = (role, method) if phase == "train" else number
        if key in found:
            before = found[key]
            rows, updates = rows + before.samples, before.updates + 1
            found[key] = replace(before, samples=rows, updates=updates)
        else:
            found[key] = PlannedCall(role, phase, rows)
    return list(found.values())


def _usual(
    roles: Mapping[str, RoleSpec], sizes: StepSizes, parts: int
) -> list[tuple[str, str, str, int]]:
    """List the usual calls: roles that can generate do, then all others score, then trained roles
    train, in each update on one of so many parts."""
    n = sizes.samples
    generate = [(r, "generate", "generate", n) for r, spec in roles.items() if spec.generates]
    score = [(r, "score", "score", n) for r, spec in roles.items() if not spec.generates]
    update = [(r, "train", "train", n // parts) for r, spec in roles.items() if spec.trains]
    return generate + score + update * sizes.updates


class _Group:
    """A stand-in for a worker group that records its calls."""

    def __init__(
        self, role: str, spec: RoleSpec, sizes: StepSizes, noted: list[tuple[str, str, str, int]]
    ) -> None:
        self.devices = [0]
        self._role, self._noted, self._sizes = role, noted, sizes
        self._worker = spec.worker if isinstance(spec.worker, type) else None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)
        phase, returns_batch = _phase(method, self._worker)

        def call(*arguments: Any, **keywords: Any) -> Any:
            given = [*arguments, *keywords.values()]
            table = next((value for value in given if isinstance(value, _Table)), None)
            rows = table.rows if table is not None else np.arange(self._sizes.samples)
            if phase is not None:
                self._noted.append((self._role, method, phase, len(rows)))
            return _Table(_Rows(rows)) if returns_batch else _Result()

        return call


def _phase(method: str, worker: type[Worker] | None) -> tuple[str | None, bool]:
    """Return the phase of a method (None if it does not count) and whether it returns a batch; for
    a user's worker class, `@transfer` says more than the name."""
    phase = _PHASE_OF_VERB.get(method.split("_")[0])
    marked = getattr(getattr(worker, method, None), "__transfer__", None)
    if marked is None:
        return phase, phase in ("generate", "score")
    if phase is None:
        phase = "score" if marked.returns_batch else None
    return phase, marked.returns_batch


class _Result:
    """A stand-in for a handle, whose metrics are all 0."""

    def get(self) -> Any:
        return defaultdict[str, float](float)

    def done_within(self, seconds: float | None) -> bool:
        return True


class _Feed:
    """A stand-in for the feed of data."""

    data: Any = None
    tokenizer: Any = None
    numbered = 0

    def __init__(self, kind: str, sizes: StepSizes) -> None:
        self._kind, self._sizes = kind, sizes

    def next_batch(self) -> BatchRef:
        pairs = self._kind == "pairs"
        return _table(self._sizes.samples if pairs else self._sizes.prompts, 2 if pairs else 1)

    def next_examples(self, coefficient: float = 1.0) -> BatchRef:
        return _table(self._sizes.prompts, 1)

    def put(self, batch: Batch) -> BatchRef:
        return _table(len(batch), 1)

    def hold(self, groups: set[int]) -> None:
        pass


@dataclass(frozen=True, eq=False)
class _Rows(TableExpression):
    """A table node that knows only the number of the prompt of each row."""

    prompts: Rows
    columns = UNKNOWN

    @property
    def known_rows(self) -> int:
        return len(self.prompts)

    def num_rows(self) -> int:
        return len(self.prompts)

    def tokens(self) -> dict[str, Rows]:
        return {}

    def read(self, rows: Rows, names: frozenset[str] | None) -> Batch | None:
        return None

    def shards(self) -> list[ShardedResult]:
        return []


@dataclass(frozen=True, eq=False)
class _Table(BatchRef):
    """A stand-in for a table: it has every column, and no values."""

    @property
    def rows(self) -> Rows:
        return _rows(self.node)

    def __or__(self, other: BatchRef) -> BatchRef:
        return self

    def select(self, *columns: str) -> BatchRef:
        return self

    def by_parts(self) -> list[BatchRef]:
        return [self]

    def take(self, rows: Sequence[int] | Rows, copies: int = 1) -> BatchRef:
        return _Table(_Rows(self.rows[resolve_row_numbers(rows, len(self.rows))]))

    def repeat(self, times: int) -> BatchRef:
        return _Table(_Rows(np.repeat(self.rows, times)))

    def split(self, parts: int, balance: str = "rows") -> list[BatchRef]:
        return [_Table(_Rows(part)) for part in np.array_split(self.rows, parts)]

    def apply(self, function: Any, columns: Iterable[str], **options: Any) -> BatchRef:
        return self

    def collect(self, columns: Iterable[str] | None = None, *, partial: bool = False) -> Batch:
        """Return made-up numbers: the samples of a prompt score 0 and 1 in turn, each is an episode
        of one branch, everything else is 0."""
        rows = self.rows
        found = {name: np.zeros(len(rows), np.float32) for name in columns or ()}
        scores = np.arange(len(rows), dtype=np.float32) % 2
        values = {
            **dict.fromkeys(("scores", "outcomes", "shaped_scores"), scores),
            "group_id": rows,
            "episode": np.arange(len(rows)),
            "branches": np.ones(len(rows), np.int64),
        }
        return Batch.from_columns(found | {k: v for k, v in values.items() if k in (columns or k)})

    def __len__(self) -> int:
        return len(self.rows)


def _table(rows: int, together: int) -> BatchRef:
    return _Table(_Rows(np.arange(rows) // together))


def _rows(node: TableExpression) -> Rows:
    """Return the prompts of a table's rows, also of tables that `BatchRef.concat` joined."""
    if isinstance(node, ConcatenatedTable):
        return np.concatenate([_rows(table) for table in node.tables])
    assert isinstance(node, _Rows)
    return node.prompts
