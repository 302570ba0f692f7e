"""An actor that trains on some devices and generates on others, called as one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hybridrl.config.schema import LOSSY_WEIGHT_SYNCS, Config
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.system.cluster_spec import DeviceSlot
from hybridrl.system.deferred_interrupts import interrupts_deferred

STREAM_PARTS = 6
"""The number of equal parts in which samples leave the generator, so that some are scored while
others are still generated. Scores begin when the first is made, and nothing hides those of the
last; each takes a call more."""
_TRIALS = 2
"""Of each way to pack weights, where the faster one is found by measuring; the best one counts."""


def choose_weight_transport(config: Config, devices: Iterable[DeviceSlot]) -> tuple[bool, str]:
    """Choose how weights travel to the generator.

    Args:
        devices: Of trainer and generator.

    Returns:
        Whether as parcels in the object store, and by which `rollout.weight_sync`.
    """
    flow, method = config.placement, config.rollout.weight_sync
    store = flow.transport == "store" or (flow.transport == "auto" and flow.staleness > 1)
    if method == "auto" and len({device.node for device in devices}) == 1:
        method = "full"  # within a node to copy is quicker than to encode
    return store, method


class StreamingActor:
    """An actor whose samples leave it in parts, so that roles on the same devices that need no
    accelerator score some while others are still generated.

    Args:
        actor: The group.
    """

    def __init__(self, actor: WorkerGroup) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._actor, name)

    def generate_sequences(self, batch: BatchRef, sampling: Any) -> BatchRef:
        """Generate as `ActorWorker.generate_sequences` does. Whoever keeps unfinished samples waits
        for the last part anyway, and gets one."""
        number = STREAM_PARTS if sampling.partial is None else 1
        parts = [self._actor.generate_sequences(batch, sampling, number)]
        parts += [self._actor.take_sequences(part, number) for part in range(1, number)]
        return BatchRef.of_stream(parts)


class DisaggregatedActor:
    """An actor with the interface of a worker group. `generate_sequences` runs on the generator,
    all else on the trainer.

    With `staleness` 0 a generation waits for the weights of all updates called before it. With n it
    uses those that there were n generations earlier, so that it need not wait for the updates
    called since. What is called decides, not what is done first: the same calls always give the
    same samples (but for `in_flight`).

    Args:
        trainer, generator: The groups.
        staleness: See above.
        in_flight: The generator takes weights as soon as the trainer has them, between two tokens.
        store: Weights travel as parcels in the object store, and the trainer never waits for the
            generator; otherwise by collectives.
        weight_sync: How they are compressed, as the setting `rollout.weight_sync`.
        differs_from_folder: The trainer begins with other weights than the generator reads from the
            model's folder, and sends them at once.
    """

    def __init__(
        self,
        trainer: WorkerGroup,
        generator: WorkerGroup,
        *,
        staleness: int,
        in_flight: bool,
        store: bool,
        weight_sync: str,
        differs_from_folder: bool = False,
    ) -> None:
        self._trainer, self._generator = trainer, generator
        self._staleness, self._in_flight, self._store = staleness, in_flight, store
        self._updates = 0  # called so far, and weights loaded
        self._on_their_way = 0  # the number of updates in the weights that were last sent
        self._sent = 0  # times
        self._differs = weight_sync != "full"
        self._seconds: dict[str, list[float]] | None = None  # of parcels, by how they are packed
        if store and weight_sync == "auto":
            self._seconds = {"full": [], "delta": []}
        self._is_rough = weight_sync in LOSSY_WEIGHT_SYNCS
        self._packed = self._loaded = 0  # times, and which of them the generator has
        self._parcels: deque[_PackedWeights] = deque()
        rendezvous = trainer.open_rendezvous().get()
        ranks = (len(trainer.devices), len(generator.devices))
        joined = (
            trainer.join_generator(rendezvous, ranks[1], store, weight_sync),
            generator.join_trainer(rendezvous, ranks[0], store, weight_sync),
        )
        for handle in joined:
            handle.get()
        if differs_from_folder:
            self._on_their_way = -1
            self.publish()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # of an object that is being copied or unpickled
            raise AttributeError(name)
        method: Callable[..., Any] = getattr(self._trainer, name)
        if not name.startswith(("update_", "load_weights")):
            return method

        def update(*arguments: Any, **keywords: Any) -> Any:
            self._updates += 1
            return method(*arguments, **keywords)

        return update

    @property
    def devices(self) -> list[int]:
        """The devices of the ranks that train."""
        return self._trainer.devices

    def generate_sequences(self, batch: BatchRef, sampling: Any) -> BatchRef:
        """Generate on the generator's devices; see `ActorWorker.generate_sequences`."""
        if self._store:
            self._give_parcels(kept=self._staleness + 1)
        elif self._in_flight:
            self._send()
        elif not self._staleness:
            self.publish()
        self._generator.start_sequences(batch, sampling)
        parts = [self._generator.take_sequences(part, STREAM_PARTS) for part in range(STREAM_PARTS)]
        if self._staleness and not self._store:
            # The trainer has nothing to do before these samples are there, so it does not mind
            # that the generator takes weights after them only.
            self.publish()
        return BatchRef.of_stream(parts)

    def save_state(self, folder: str) -> Handle:
        """Save the state of both groups in one folder."""
        self._generator.save_state(folder).get()
        self._begin_anew()
        saving: Handle = self._trainer.save_state(folder)
        return saving

    def start_saving(self, folder: str, copy: str | None = None) -> Handle:
        """Start saving the state of both groups; see `TrainedModelWorker.start_saving`."""
        self._generator.save_state(folder).get()
        self._begin_anew()
        saving: Handle = self._trainer.start_saving(folder, copy)
        return saving

    def load_state(self, folder: str) -> Handle:
        """Load the saved state of both groups; `publish` gives the generator the
        weights."""
        self._trainer.load_state(folder).get()
        # Updates are counted as the trainer counts versions, which samples carry.
        self._updates = self._trainer.policy_version().get()[0]
        self._on_their_way = 0
        self._parcels.clear()  # of the weights before
        self._begin_anew()
        loading: Handle = self._generator.load_state(folder)
        return loading

    def _begin_anew(self) -> None:
        """Restart a lossy weight sync at a checkpoint. Its weights depend on all messages before,
        which a run that resumes from the checkpoint does not have."""
        if self._is_rough and self._updates:
            self._trainer.forget_sent_weights()
            self._on_their_way = 0
            self._parcels.clear()

    def publish(self) -> None:
        """Make the next generation use the weights of all updates called so far."""
        if self._store:
            self._give_parcels(kept=1)
            return
        with interrupts_deferred():  # else the senders wait for receivers
            self._send()
            self._generator.receive_weights(self._sent)

    def _send(self) -> None:
        if self._on_their_way != self._updates:
            self._trainer.send_weights()
            self._on_their_way = self._updates
            self._sent += 1

    def _give_parcels(self, kept: int) -> None:
        """Append the current weights to the queue, keep its newest, and give the generator those at
        its head."""
        is_new = not self._parcels or self._parcels[-1].updates != self._updates
        self._parcels.append(self._pack() if is_new else self._parcels[-1])
        while len(self._parcels) > kept:
            self._parcels.popleft()
        self._load(self._parcels[0])

    def _pack(self) -> _PackedWeights:
        if not self._updates:
            return _PackedWeights(0, 0, None, None)
        self._packed += 1
        method, is_trial = self._choose_method()
        if is_trial:
            self._trainer.policy_version().get()  # what it did before is no part of the time
        begin = time.perf_counter()
        packed = whole = self._trainer.pack_weights(method)
        if self._differs and method != "plain":
            whole = self._trainer.pack_whole_weights()
        if not is_trial or method is None:
            return _PackedWeights(self._updates, self._packed, packed, whole)
        len(whole)  # waits for both
        trial = method, time.perf_counter() - begin
        return _PackedWeights(self._updates, self._packed, packed, whole, trial)

    def _choose_method(self) -> tuple[str | None, bool]:
        """Return how the next parcels are packed (None: as is set), and whether that is a trial:
        with `rollout.weight_sync=auto` the first parcels are packed whole and as differences by
        turns, and later ones in the way that took less time, from packing to loading."""
        if self._seconds is None:
            return None, False
        full, delta = self._seconds["full"], self._seconds["delta"]
        if len(delta) < _TRIALS:  # which need whole values, with a record of them, to differ from
            return ("full" if len(full) <= len(delta) else "delta"), True
        return ("plain" if min(full) <= min(delta) else "delta"), False

    def _load(self, parcels: _PackedWeights) -> None:
        if parcels.updates == self._on_their_way:
            return
        if parcels.trial is not None:
            self._generator.receive_weights(0).get()  # what it did before is no part of the time
        begin = time.perf_counter()
        # Differences are differences to the weights that were packed just before.
        follows = parcels.number == self._loaded + 1
        table = parcels.packed if follows else parcels.whole
        loading = self._generator.load_weights(table, parcels.updates)
        if parcels.packed is not parcels.whole:
            loading = self._generator.complete_weights(parcels.whole)
        self._on_their_way, self._loaded = parcels.updates, parcels.number
        if self._seconds is not None and parcels.trial is not None:
            loading.get()
            method, packing = parcels.trial
            self._seconds[method].append(packing + time.perf_counter() - begin)


class _PackedWeights(NamedTuple):
    """Packed weights in the queue.

    Attributes:
        updates: In these weights.
        number: Of the packing, from 1.
        packed, whole: The same weights, as differences if these are wanted, and as they are.
        trial: How they were packed and the seconds that it took, where ways are compared.
    """

    updates: int
    number: int
    packed: BatchRef | None
    whole: BatchRef | None
    trial: tuple[str, float] | None = None
