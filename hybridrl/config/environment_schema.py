"""The schema of environments: programs that play episodes with the model and score them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    NameOrPath,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Seconds,
)

if TYPE_CHECKING:
    from hybridrl.config.rollout_schema import RolloutConfig

_WITH_ENVIRONMENT = AppliesIf("environment.name")
_WITH_ENDPOINT = AppliesIf("environment.name", "rollout.serve")


@dataclass
class EnvironmentConfig:
    """The environment that plays each row of the data, in processes of its own."""

    name: Annotated[NameOrPath | None, _WITH_ENVIRONMENT] = None
    """A built-in adapter (`verifiers`, `gymnasium`, `openenv`, `mcp`, `command`), or a function of
    yours, `path/to/file.py:name`; null: none. See docs/environments.md."""
    options: Annotated[dict[str, Any], _WITH_ENVIRONMENT] = field(default_factory=dict)
    """Keyword arguments of the adapter or function."""
    python: Annotated[NameOrPath | None, _WITH_ENVIRONMENT] = None
    """The Python that runs it: that of a virtual environment with the packages that it needs; null:
    the one that runs the job."""
    env: Annotated[list[str], _WITH_ENVIRONMENT] = field(default_factory=list)
    """Environment variables with secrets that it gets, by name or pattern (`OPENAI_API_KEY`,
    `AWS_*`). It starts without all others: RAY_*, *_KEY, *_TOKEN, *_SECRET, *PASSWORD* and such."""
    hidden_columns: Annotated[list[str], AppliesIf("environment.name=command")] = field(
        default_factory=lambda: ["answer", "tests"]
    )
    """Columns of the data that programs do not get, for they may run what the model wrote."""
    processes: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 1
    """Processes per replica that generates."""
    episodes: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 64
    """Episodes that a process plays at a time."""
    tasks: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 1024
    """With `data=environment`: most of the environment's own tasks."""
    timeout_s: Annotated[Seconds, _WITH_ENDPOINT] = 300.0
    """Longest time for one episode."""
    memory_gib: Annotated[PositiveFloat, _WITH_ENVIRONMENT] = 4.0
    """Most memory of one process, with what it starts."""
    on_error: Annotated[str, OneOf("fail", "drop", "value"), _WITH_ENDPOINT] = "drop"
    """An episode that raises, hangs, or takes its process with it: `drop` leaves it out of the
    update, `value` scores it `error_value`, `fail` ends the job."""
    error_value: Annotated[float, AppliesIf("environment.on_error=value")] = 0.0
    """The score of such an episode."""


def is_served(rollout: RolloutConfig, environment: EnvironmentConfig) -> bool:
    """Return whether samples are produced by programs that call the model over an endpoint. Then a
    sample may have several branches with different prompts."""
    return environment.name is not None or rollout.serve
