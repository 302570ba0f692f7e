"""What the driver says while it runs; how it looks is the business of who shows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from hybridrl.console.sample_table_text import Completion


class StepView(ABC):
    """Shows the progress of a run. Use it in a `with`, so that an error restores the terminal."""

    @abstractmethod
    def phase(self, text: str) -> None:
        """Says what begins now, such as `starting 2 workers`; ends the phase before it."""

    @abstractmethod
    def phase_progress(self, done: int, total: int, note: str = "") -> None:
        """Says how far the present phase is."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step, the first being 1; ends the present phase. Missing keys are '-'.

        Known keys: `reward/mean`, `accuracy` (greedy, of the evaluation set; kept until the next),
        `accuracy/step` (after which step that was; else this one),
        `response/length_mean`, `policy/kl`, `policy/entropy`, `throughput/tokens_per_second`,
        `mismatch/k3`, `time/step` and `share/<phase>`.
        """

    @abstractmethod
    def samples(self, prompt: str, completions: Sequence[Completion]) -> None:
        """Shows samples of one prompt; any text is safe."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Shows lines that stay, above whatever is redrawn."""

    @abstractmethod
    def close(self, final: str = "") -> None:
        """Stops, and prints `final` as the very last line. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
