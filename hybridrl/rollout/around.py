"""AroundEngine: what stands around a rollout engine and leaves its weights to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from hybridrl.batch.batch import Batch
from hybridrl.rollout.rollout_engine import Finished, Request, RolloutEngine, Sampling
from hybridrl.rollout.weight_writer import Pieces, WeightWriter


class AroundEngine(RolloutEngine):
    """Hands on all that concerns the weights, the memory and the requests of the engine within."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self._engine = engine

    def generate(self, batch: Batch, sampling: Sampling, seed: int | Sequence[int]) -> Batch:
        return self._engine.generate(batch, sampling, seed)

    def start(self, request: Request) -> None:
        self._engine.start(request)

    def poll(self) -> list[Finished]:
        return self._engine.poll()

    def abort(self, keys: Iterable[int]) -> None:
        self._engine.abort(keys)

    def partial(self) -> dict[int, list[int]]:
        return self._engine.partial()

    def progress(self) -> dict[int, int]:
        return self._engine.progress()

    def cancel(self) -> None:
        self._engine.cancel()

    def counts(self) -> dict[str, int]:
        return self._engine.counts()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._engine.load(weights)

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> Pieces | None:
        return self._engine.pieces(shapes)

    def writer(self) -> WeightWriter:
        return self._engine.writer()

    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        return self._engine.differences(weights)

    def wake(self) -> None:
        self._engine.wake()

    def sleep(self) -> None:
        self._engine.sleep()

    @property
    def awaits_weights(self) -> bool:
        return self._engine.awaits_weights

    @property
    def keeps_weights(self) -> bool:
        return self._engine.keeps_weights

    @property
    def takes_adapters(self) -> bool:
        return self._engine.takes_adapters

    def close(self) -> None:
        self._engine.close()
