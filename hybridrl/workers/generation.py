"""What is reported and kept of generations, wherever they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.compress.weight_message import METHODS
from hybridrl.controller import Worker
from hybridrl.core.batch import ROUTES, Batch
from hybridrl.core.locations import Location
from hybridrl.engine.training_state import read_numbers, write_numbers
from hybridrl.engine.weight_sync import SyncCost

if TYPE_CHECKING:
    from hybridrl.rollout import RolloutEngine

SAMPLE = ("prompt_ids", "response_ids")
"""The columns that a model needs to score a sample."""
LEARNED = (*SAMPLE, "response_mask", "loss_weights")
"""The columns that every update needs."""
GENERATED = (
    *("response_ids", "response_mask", "rollout_log_probs", "finish_reason", "policy_version"),
)
"""The columns that a generation makes."""


GENERATIONS = "generations.json"
"""The number of generations, in the folder of the actor's state: in the same place whether the
actor generates or another group does for it, for a run may go on with another placement."""


def may_be_generated(keywords: Mapping[str, Any]) -> Sequence[str]:
    """The further columns that a generation makes in workers built with these keywords."""
    rollout, found = keywords["rollout"], []
    if rollout.episode is not None:
        found += ["turns", "turn_rewards", "episode_rewards"]
    if rollout.routing_replay:
        found.append(ROUTES)
    return [*found, "token_versions"] if keywords.get("in_flight") else found


def report_samples(worker: Worker, samples: Batch) -> None:
    """Number, length and ends of the samples; of episodes also their turns."""
    lengths, reasons = samples.lengths("response_ids"), samples["finish_reason"]
    worker.report(
        samples=len(samples),
        response_tokens=int(lengths.sum()),
        truncated=reasons.count("length"),
    )
    if "turns" in samples:
        worker.report(
            turns=int(samples["turns"].sum()),
            tool_timeouts=reasons.count("tool_timeout"),
            tool_errors=reasons.count("tool_error"),
        )


def report_engine(worker: Worker, engine: RolloutEngine) -> None:
    """What the engine counted since it was asked last; see `RolloutEngine.counts`."""
    worker.report(**engine.counts())


def report_sync(worker: Worker, cost: SyncCost | None) -> None:
    """What new weights cost this rank, if they came box by box. Of several syncs of one call the
    bytes add up, and the highest peak counts."""
    if cost is not None:
        peak = max(0, cost.peak - worker.record.metrics.get("sync_peak", 0))
        worker.report(sync_received=cost.received, sync_redundant=cost.redundant, sync_peak=peak)


def report_compression(worker: Worker, cost: SyncCost | None) -> None:
    """What sending new weights cost this rank, if they went box by box: how, how many of the values
    that went as differences had changed, and what finding that out took."""
    if cost is not None:
        worker.report(
            sync_method_max=METHODS.index(cost.method),
            sync_changed=cost.changed,
            sync_compared=cost.compared,
            sync_encode_seconds_max=cost.encode_seconds,
            sync_record=cost.record,
            sync_repeated=cost.repeated,
        )


def first_seed(seed: int, generations: int) -> int:
    """The seed of the first row of a job's next generation. Where rows are generated does not
    matter."""
    return hash((seed, generations)) % 2**62


def save_generations(folder: Location, generations: int) -> None:
    """Keeps the number of generations."""
    write_numbers(folder / GENERATIONS, {"generations": generations})


def load_generations(folder: Location) -> int:
    """What `save_generations` kept."""
    return read_numbers(folder / GENERATIONS)["generations"]
