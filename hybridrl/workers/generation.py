"""What is reported of generated samples, wherever they were generated."""

from __future__ import annotations

from hybridrl.controller import Worker
from hybridrl.core.batch import Batch
from hybridrl.engine.weight_sync import SyncCost


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


def report_sync(worker: Worker, cost: SyncCost | None) -> None:
    """What new weights cost this rank, if they came box by box."""
    if cost is not None:
        worker.report(
            sync_received=cost.received, sync_redundant=cost.redundant, sync_peak=cost.peak
        )


def first_seed(seed: int, generations: int) -> int:
    """The seed of the first row of a job's next generation. Where rows are generated does not
    matter."""
    return hash((seed, generations)) % 2**62
