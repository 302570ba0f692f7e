"""The interface between a run and the console that shows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from hybridrl.console.sample_table_text import ShownSample


class RunView(ABC):
    """The interface of a console. Use it in a `with`, so that an error restores the terminal."""

    @abstractmethod
    def phase(self, text: str) -> None:
        """Start a phase, such as `starting 2 workers`; this ends the phase before it."""

    @abstractmethod
    def phase_progress(self, done: int, total: int, note: str = "") -> None:
        """Show the progress of the current phase."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, the first being 1; this ends the current phase. Missing metrics are
        shown as '-'.

        Known keys: `reward/mean`, `accuracy` (greedy, of the evaluation set; kept until the next),
        `accuracy/step` (after which step that was; else this one),
        `response/length_mean`, `policy/kl`, `policy/entropy`, `throughput/tokens_per_second`,
        `mismatch/k3`, `time/step` and `share/<phase>`.
        """

    @abstractmethod
    def samples(self, prompt: str, completions: Sequence[ShownSample]) -> None:
        """Shows samples of one prompt; any text is safe."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Show lines that stay, above what is redrawn."""

    @abstractmethod
    def close(self, final: str = "") -> None:
        """Stop, and print `final` as the last line. A second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
