"""vLLM's process groups, one set for each engine.

vLLM keeps them in variables of a module: one set for a process. Here a process may hold several
engines - the actor's and a judge's - in worker groups of different devices.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed import parallel_state

NAMES = [
    name
    for name, kind in parallel_state.__annotations__.items()
    if name.isupper() and ("GroupCoordinator" in str(kind) or name == "_NODE_COUNT")
]


class EngineGroups:
    """The groups of one engine, made by vLLM when they are first entered."""

    _current: ClassVar[EngineGroups | None] = None

    def __init__(self) -> None:
        self._kept: dict[str, Any] = dict.fromkeys(NAMES)

    def enter(self) -> None:
        """Makes these the groups that vLLM speaks of."""
        if (left := EngineGroups._current) is self:
            return
        if left is not None:
            left._kept = {name: getattr(parallel_state, name) for name in NAMES}
        for name, group in self._kept.items():
            setattr(parallel_state, name, group)
        EngineGroups._current = self
