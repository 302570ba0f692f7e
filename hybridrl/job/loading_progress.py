"""The progress of what loads in another thread."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.errors import HybridRLError


class LoadingProgress:
    """Passes on what loading tells, each text once, and ends it when the job has ended: it may take
    an hour, in another thread than that which is interrupted."""

    def __init__(self, progress: Callable[[str], None], bar: Callable[[int, int], None]) -> None:
        self._progress, self._bar, self._text, self.is_ended = progress, bar, "", False

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if self.is_ended:
            raise HybridRLError("The job has ended.")
        if text != self._text:
            self._text = text
            self._progress(text)
        if total:
            self._bar(done, total)
