"""Copies that do not block, as an accelerator makes them: memory at once, values later.

On a CPU such copies are done when the call returns, and code that reads them too early goes
unseen. `DeferredCopies` fills what they make with NaN until something waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.engine_state import async_saving
from hybridrl.engine import moment_storage, train_engine

PACKAGE = Path(train_engine.__file__).parents[1]
IN_ORDER = ("system/device_traits.py", "copy_to_device")
"""The function whose copies are on the stream of whatever reads them, which need not wait."""


class DeferredCopies:
    """Stands for a device and its streams while a test runs.

    What a copy brings is there when something waits: for the device, an event or a side stream.

    Attributes:
        places: File and function of the package where such copies were made.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.places: set[tuple[str, str]] = set()
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_in_order = False
        self._to, self._copy = torch.Tensor.to, torch.Tensor.copy_
        patch.setattr(torch.Tensor, "to", self._deferred_to())
        patch.setattr(torch.Tensor, "copy_", self._deferred_copy())
        patch.setattr(train_engine, "synchronize_device", lambda device: self.arrive())
        patch.setattr(async_saving, "record_event", lambda device: self.arrive)
        patch.setattr(moment_storage, "SideStream", lambda device: _SideStream(self))

    def arrive(self) -> None:
        """What is under way is there now."""
        while self._pending:
            made, values = self._pending.pop(0)
            self._copy(made, values)

    @contextmanager
    def from_host(self) -> Iterator[None]:
        """Inside, copies are to the device, on the stream of training: whatever reads them runs
        there, too, after them."""
        self._are_in_order = True
        yield
        self._are_in_order = False

    @property
    def under_way(self) -> int:
        return len(self._pending)

    def _defer(self, made: torch.Tensor) -> None:
        made = made.detach().to_local() if isinstance(made, DTensor) else made.detach()
        if not self._are_in_order:
            self._pending.append((made, made.clone()))
            made.fill_(torch.nan if made.is_floating_point() else 0)

    def _waits(self) -> bool:
        """Note where in the package a copy is made, and return whether its reader has to wait."""
        frame = sys._getframe(2)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                place = (file.relative_to(PACKAGE).as_posix(), frame.f_code.co_name)
                if place != IN_ORDER:
                    self.places.add(place)
                return place != IN_ORDER
            frame = frame.f_back
        return True

    def _deferred_to(self):
        def to(tensor, *arguments, **keywords):
            made = self._to(tensor, *arguments, **keywords)
            if not any(one is True for one in (*arguments, keywords.get("non_blocking"))):
                return made
            if self._waits():
                made = made.clone()
                self._defer(made)
            return made

        return to

    def _deferred_copy(self):
        def copy_(into, source, non_blocking=False):
            self._copy(into, source)
            if non_blocking and self._waits():
                self._defer(into)
            return into

        return copy_


class _SideStream:
    """`SideStream` of a device that is not there."""

    def __init__(self, copies: DeferredCopies) -> None:
        self._copies = copies

    def __enter__(self):
        pass

    def __exit__(self, *raised):
        pass

    def wait_for_current(self):
        pass

    def reads(self, tensor):
        pass

    def join(self):
        self._copies.arrive()

    finish = join
