"""A copy, in host memory, of what a rank holds of an engine's training state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridrl.compress.dynamic_codes import BlockCodes
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.parallel.process_group import to_local


class TrainingSnapshot:
    """The weights, the optimizer's state and the position in the schedule of an engine between two
    updates; each rank has its own shards. Learning rates are not part of it."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._weights = {name: _copy(part) for name, part in engine.local_parameters().items()}
        # With the dictionaries themselves: their tensors are where and as they have to be.
        self._states = {
            parameter: (state, {name: _copy(value) for name, value in state.items()})
            for parameter, state in engine.optimizer.state.items()
        }
        self._position, self._skipped = engine.schedule.last_epoch, engine.skipped_in_a_row

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the engine back to this state. Call it on every rank."""
        engine = self._engine
        for name, part in engine.local_parameters().items():
            part.copy_(self._weights[name])
        states = engine.optimizer.state
        for parameter in list(states):
            if parameter not in self._states:
                del states[parameter]  # it had made no step
        for parameter, (state, kept) in self._states.items():
            states[parameter] = state
            for name, value in kept.items():
                state[name] = _put_back(state[name], value)
        engine.schedule.last_epoch, engine.skipped_in_a_row = self._position, self._skipped
        engine.gather_anew()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the engine in this state inside the block."""
        now = TrainingSnapshot(self._engine)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _copy(value: Any) -> Any:
    if isinstance(value, BlockCodes):
        return BlockCodes(_copy(value.codes), _copy(value.scales), value.signed)
    return to_local(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _put_back(now: Any, kept: Any) -> Any:
    """Write a kept value over the one that there is now, which lies where it belongs."""
    if isinstance(kept, BlockCodes):
        _put_back(now.codes, kept.codes)
        _put_back(now.scales, kept.scales)
    elif isinstance(kept, Tensor):
        to_local(now).copy_(kept)
    else:
        return kept
    return now
