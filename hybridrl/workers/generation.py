"""Metrics and seeds of generations, in every worker that generates."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch, is_user_column, sampled_tokens
from hybridrl.batch.begun_responses import UNFINISHED, list_begun_columns
from hybridrl.batch.kept_sets import KEPT_SETS, restricts_sampling
from hybridrl.batch.turn import EPISODE_FAILURES
from hybridrl.checkpoint.engine_state.training_state import read_state_numbers
from hybridrl.checkpoint.tensors.tensor_writer import write_small_file
from hybridrl.config.schema import is_served
from hybridrl.controller import Worker
from hybridrl.rollout.sample_generator import drop_token_versions
from hybridrl.system.locations import Location
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.weights.weight_message import SYNC_METHODS

if TYPE_CHECKING:
    from hybridrl.rollout.sample_generator import SampleGenerator

SAMPLE_COLUMNS = ("prompt_ids", "response_ids")
"""The columns that a model needs to score a sample."""
UPDATE_COLUMNS = (*SAMPLE_COLUMNS, "response_mask", "loss_weights")
"""The columns that every update needs."""
GENERATED_COLUMNS = (
    *("response_ids", "response_mask", "rollout_log_probs", "finish_reason", "policy_version"),
)
"""The columns that a generation makes."""
_BRANCH_COLUMNS = (
    *("branch_prompt_ids", "branch_response_ids", "branch_response_mask"),
    *("branch_rollout_log_probs", "branch_turn"),
    *("branch_prompt_lengths", "branch_response_lengths"),
)
"""The columns of a sample's branches before its last one."""


GENERATION_COUNT_FILE = "generations.json"
"""The file with the number of generations, in the folder of the actor's state. It is in the same
place whether the actor or a generator generates, because a run may resume with another
placement."""


def list_optional_columns(keywords: Mapping[str, Any]) -> Sequence[str]:
    """Return the further columns that a generation makes in workers built with these keywords."""
    rollout, branches, found = keywords["rollout"], has_branches(keywords), []
    if branches:
        found += ["prompt_ids", "branches", *_BRANCH_COLUMNS, "environment/*"]
    if found or rollout.episode is not None:
        found += ["turn", "turns", "turn_rewards", "episode_rewards"]
    if rollout.routing_replay:
        found.append(ROUTED_EXPERTS)
    if restricts_sampling(rollout):
        found += [KEPT_SETS, *([f"branch_{KEPT_SETS}"] if branches else [])]
    if keywords.get("in_flight") or rollout.partial is not None:
        found += ["token_versions", *(["branch_token_versions"] if branches else [])]
    return found


def list_continued_columns(keywords: Mapping[str, Any]) -> Sequence[str]:
    """Return the columns of a response that a generation continues in workers built with these
    keywords."""
    rollout = keywords["rollout"]
    return () if rollout.partial is None else list_begun_columns(rollout)


def keeps_prompts_whole(keywords: Mapping[str, Any]) -> bool:
    """Return whether the samples of a prompt are made on one replica in workers built with these
    keywords: several branches may be scored together, and partial rollouts count prompts."""
    return keywords["rollout"].partial is not None or has_branches(keywords)


def has_branches(keywords: Mapping[str, Any]) -> bool:
    """Return whether a sample of workers built with these keywords may have several branches."""
    environment = keywords.get("environment")
    return environment is not None and is_served(keywords["rollout"], environment)


def is_generation_input(column: str) -> bool:
    """Return whether a generation reads this column besides the prompt where it exists: a column of
    the data, or `group_id`, which marks the samples of one prompt."""
    return column == "group_id" or is_user_column(column)


def add_policy_version(samples: Batch, version: int, *, keeps_tokens: bool) -> Batch:
    """Add `policy_version`, the oldest version that sampled a token of each row, from
    `token_versions`, which are dropped unless `keeps_tokens`.

    Args:
        version: Of rows without any such token.
    """
    found = [version] * len(samples)
    for prefix in ("", "branch_"):
        if f"{prefix}token_versions" not in samples:
            continue
        tokens = samples.ragged(f"{prefix}token_versions").rows()
        masks = [torch.ones_like(row) for row in tokens]
        if f"{prefix}response_mask" in samples:
            masks = samples.ragged(f"{prefix}response_mask").rows()
        for row, (versions, mask) in enumerate(zip(tokens, masks, strict=True)):
            if (sampled := versions[mask.bool()]).numel():
                found[row] = min(found[row], int(sampled.min()))
    samples = samples.with_columns({"policy_version": torch.tensor(found, dtype=torch.int64)})
    return samples if keeps_tokens else drop_token_versions(samples)


def report_samples(
    worker: Worker, samples: Batch, begun: Batch | None = None, version: int = 0
) -> None:
    """Number, length and ends of the samples, in tokens that were sampled; of episodes also their
    turns and the tokens of what they were told, and of those that an environment played, branches,
    failures and the environment's own numbers.

    Args:
        begun: Of partial rollouts, the same rows before this generation. Each sample then counts
            once, when it ends; and the rows that have not ended, and the ages of tokens, in
            updates of the policy, are reported as well.
        version: Of the policy.
    """
    if begun is not None:
        pairs = list(zip(begun["finish_reason"], samples["finish_reason"], strict=True))
        unfinished = sum(now == UNFINISHED for _, now in pairs)
        samples = samples.take(
            [n for n, (was, now) in enumerate(pairs) if was == UNFINISHED != now]
        )
        ages = version - samples.ragged("token_versions").values
        worker.report(begun=len(begun), unfinished=unfinished, token_ages=float(ages.sum()))
    reasons = samples["finish_reason"]
    served = "branches" in samples
    tokens = sampled_tokens(samples)
    worker.report(
        samples=len(samples),
        response_tokens=int(tokens.sum()),
        response_tokens_max=max([0, *tokens.tolist()]),
        truncated=reasons.count("length"),
    )
    if "turns" in samples:
        names = ["response_ids", *(["branch_response_ids"] if served else [])]
        every = sum(int(samples.lengths(name).sum()) for name in names)
        worker.report(observed_tokens=every - int(tokens.sum()))
    if served:
        worker.report(
            episode_turns=int(samples["turns"].sum()),
            episode_branches=int(samples["branches"].sum()),
            **{f"episode_{kind}": reasons.count(kind) for kind in EPISODE_FAILURES},
        )
        names = [name for name in samples.columns if name.startswith("environment/")]
        report_column_sums(worker, {name: samples[name].tolist() for name in names})
    elif "turns" in samples:
        worker.report(
            turns=int(samples["turns"].sum()),
            tool_timeouts=reasons.count("tool_timeout"),
            tool_errors=reasons.count("tool_error"),
        )


def report_column_sums(worker: Worker, columns: Mapping[str, Sequence[float]]) -> None:
    """Report sums for the mean and standard deviation of each column, over the samples that have a
    number there."""
    for name, column in columns.items():
        known = [value for value in map(float, column) if not math.isnan(value)]
        worker.report(
            **{
                f"{name}_sum": sum(known),
                f"{name}_square_sum": sum(value * value for value in known),
                f"{name}_count": len(known),
            }
        )


def report_generation(
    worker: Worker,
    generator: SampleGenerator,
    samples: Batch,
    begun: Batch | None = None,
    version: int = 0,
) -> None:
    """Report the samples of a replica on its first rank (see `report_samples`), what its engine has
    counted since the last report (see `RolloutEngine.counts`), and what there is to say of its
    episodes."""
    if worker.coordinates()["rollout_tp"].index:
        return
    report_samples(worker, samples, begun, version)
    worker.report(**generator.engine.counts())
    worker.record.notices += generator.notices
    worker.record.remarks += generator.remarks
    generator.notices.clear()
    generator.remarks.clear()


def report_weights_received(worker: Worker, cost: SyncCost | None) -> None:
    """Report the cost of receiving new weights on this rank, if they came box by box. Of several
    syncs of one call the bytes add up, and the highest peak counts."""
    if cost is not None:
        peak = max(0, cost.peak - worker.record.metrics.get("sync_peak", 0))
        worker.report(sync_received=cost.received, sync_redundant=cost.redundant, sync_peak=peak)


def report_weights_sent(worker: Worker, cost: SyncCost | None) -> None:
    """Report the cost of sending new weights from this rank, if they went box by box: the method,
    how many of the values sent as differences had changed, and the time it took to find out."""
    if cost is not None:
        worker.report(
            sync_method_max=SYNC_METHODS.index(cost.method),
            sync_changed=cost.changed,
            sync_compared=cost.compared,
            sync_encode_seconds_max=cost.encode_seconds,
            sync_record=cost.record,
            sync_repeated=cost.repeated,
        )


class SampleSeeds:
    """The seeds of a job's samples: of the row in the driver's table, and of which generation it
    is, whichever rank or replica generates it.

    Args:
        seed: Of all sampling.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.generations = 0

    def next(self, rows: Iterable[int], series: str | None) -> list[int]:
        """The seeds of these rows of the next generation; with the name of a series, of one that
        does not count among the others. Neighbouring rows have consecutive seeds."""
        if series is None:
            drawn: tuple[int, ...] = (self.generations,)
            self.generations += 1
        else:
            drawn = (-1, zlib.crc32(series.encode()))
        first = hash((self._seed, *drawn)) % 2**62
        return [first + int(row) for row in rows]

    def save(self, folder: Location) -> None:
        """Writes the number of generations to the folder of the actor's state."""
        counted = json.dumps({"generations": self.generations})
        write_small_file(folder / GENERATION_COUNT_FILE, counted.encode())

    def load(self, folder: Location) -> None:
        """Goes on from what was saved."""
        self.generations = read_state_numbers(folder / GENERATION_COUNT_FILE)["generations"]
