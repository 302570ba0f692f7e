"""The metrics of a step, from the records of its calls and the results of its updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hybridrl.batch.batch import LIBRARY_PREFIXES
from hybridrl.batch.call_record import CallRecord
from hybridrl.batch.turn import EPISODE_FAILURES
from hybridrl.config.schema import CACHED_KINDS
from hybridrl.console.phase_colors import STEP_PHASES
from hybridrl.trainers.data_feed import compute_source_metrics
from hybridrl.trainers.policy_trainer import mean_of_updates

_UPDATE_METRICS = {
    "loss": "policy/loss",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "approx_kl": "policy/approx_kl",
    "step_kl": "policy/step_kl",
    "over_step_kl": "policy/step_kl_at_stop",
    "clip_fraction": "policy/clip_fraction",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/learning_rate",
    "router_busiest": "router/busiest",
    "router_entropy": "router/entropy",
    "router_loss": "router/loss",
    "correction_weight": "policy/correction_weight",
    "masked_fraction": "policy/masked_fraction",
    "label_accuracy": "labels/accuracy",
    "label_reward": "labels/reward",
    "label_kl": "labels/kl",
    "pair_accuracy": "pairs/accuracy",
    "pair_margin": "pairs/margin",
    "critic_loss": "critic/loss",
    "critic_grad_norm": "critic/grad_norm",
    "critic_value": "critic/value_mean",
    "cost_critic_loss": "cost_critic/loss",
    "cost_critic_value": "cost_critic/value_mean",
}
"""Metrics of an update, and the names under which they are written: means over the step's updates,
weighted by their tokens. One that has a slash in its name, as the metrics of a user's loss may
have, is written as it is."""
COUNTS = {
    "tokens": "policy/tokens",
    "updates": "policy/updates",
    "skipped_updates": "policy/skipped_updates",
    "critic_skipped_updates": "critic/skipped_updates",
    "cost_critic_skipped_updates": "cost_critic/skipped_updates",
}
"""Metrics of an update that add up over the step: tokens learned from, updates made (reported with
`actor.max_kl`), and updates that were left out because their gradient was not finite."""
_MISMATCH_METRICS = {
    "mismatch_kl": "mismatch/kl",
    "mismatch_k3": "mismatch/k3",
    "mismatch_ppl_ratio": "mismatch/ppl_ratio",
    "mismatch_abs_max": "mismatch/max_abs",
}
OF_SAMPLES = ("samples", "reward_count", "cost_count")
"""What a call reports that makes samples, or scores them."""
OF_STEP = ("sync_", "behind_", "cache_")
"""How figures begin that are of the step whatever samples a call makes."""
OTHER = "other"
"""Samples that are not of the step, and that the program gives no name."""
_SYNC_METRICS = ("received", "redundant", "peak")
"""Of all ranks together; see `hybridrl.weights.encoded_reshard.SyncCost`."""


def compute_step_metrics(
    records: Sequence[CallRecord],
    updates: Sequence[Mapping[str, float]],
    seconds: float,
    drawn: Mapping[int, str] | None = None,
) -> dict[str, float]:
    """Compute all metrics of one step.

    Args:
        records: Of every call of the step, by every rank.
        updates: Metrics of each optimizer step.
        seconds: Wall time of the step.
        drawn: Calls by number, and what the names of figures of their samples begin with: "" for
            the samples of the step. Other calls that sample or score begin with `OTHER`. None: all
            samples are the step's.
    """
    of_step, of_samples = _totals(records, drawn)
    metrics: dict[str, float] = {}
    for name, total in of_samples.items():
        found = _of_samples(total)
        metrics |= {f"{name}/{key}": x for key, x in found.items()} if name else found
    if generated := [total for total in of_samples.values() if "samples" in total]:
        tokens = sum(total["response_tokens"] for total in generated)
        metrics["throughput/tokens_per_second"] = tokens / seconds
    if "behind_rows" in of_step:
        metrics["staleness/mean"] = of_step["behind_sum"] / max(1.0, of_step["behind_rows"])
        metrics["staleness/max"] = of_step["behind_max"]
    if "sync_received" in of_step:  # weights went to the generator box by box
        metrics |= {f"sync/{name}_bytes": of_step[f"sync_{name}"] for name in _SYNC_METRICS}
    metrics |= _weight_sync_metrics(of_step)
    for kind in CACHED_KINDS:
        if asked := of_step.get(f"cache_{kind}_asked"):
            metrics[f"cache/{kind}_hit_rate"] = of_step[f"cache_{kind}_hits"] / asked
    of_users = {name: name for update in updates for name in update if "/" in name}
    for name, written in (_UPDATE_METRICS | of_users).items():
        if any(name in update for update in updates):
            metrics[written] = mean_of_updates(name, updates)
    for name, written in COUNTS.items():
        if counts := [update[name] for update in updates if name in update]:
            metrics[written] = sum(counts)
    # A step with several updates begins at the policy that sampled: there mismatch counts.
    first = next((update for update in updates if "mismatch_k3" in update), None)
    if first is not None:
        metrics |= {written: first[name] for name, written in _MISMATCH_METRICS.items()}
        square = first["mismatch_weight_square"]
        metrics["mismatch/ess"] = first["mismatch_weight"] ** 2 / square if square else 1.0
    if any("critic_return" in update for update in updates):
        metrics["critic/explained_variance"] = _explained_variance(updates)
    return (
        metrics
        | {"time/step": seconds}
        | compute_phase_shares(records, seconds)
        | _memory_metrics(records)
    )


def _totals(
    records: Sequence[CallRecord], drawn: Mapping[int, str] | None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return what the records add up to: of the step as a whole, and of samples, by the beginning
    of their figures' names."""
    of_step: dict[str, float] = defaultdict(float)
    of_samples: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    drawn = drawn or {}
    # A program may return rows that it put together itself: then it is unknown which were drawn.
    known = {_made_of(record) for record in records if drawn.get(record.call) == ""} - {""}
    for record in records:
        made = _made_of(record)
        whose = drawn.get(record.call, OTHER if made in known else "")
        for name, value in record.metrics.items():
            total = of_step if name.startswith(OF_STEP) else of_samples[whose]
            if name.endswith("_max"):
                total[name] = max(total.get(name, value), value)
            else:
                total[name] += value
    return of_step, of_samples


def _made_of(record: CallRecord) -> str:
    """Return the kind of samples' figures that a call reported: of generation or of a role that
    scores; empty if none."""
    return next((name for name in OF_SAMPLES if name in record.metrics), "")


def _of_samples(total: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of samples that were drawn together."""
    return (
        _reward_column_metrics(total)
        | _score_metrics("reward", total)
        | _score_metrics("cost", total)
        | _response_metrics(total)
        | compute_source_metrics(total)
    )


def _memory_metrics(records: Sequence[CallRecord]) -> dict[str, float]:
    """Return the peak memory of any rank, by role and phase."""
    found: dict[str, float] = defaultdict(float)
    for record in records:
        for phase, size in record.peaks.items():
            name = f"memory/{record.role}/{phase}_peak_gib"
            found[name] = max(found[name], size / 2**30)
    return dict(found)


def _reward_column_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return mean and `/std` of the columns `reward/...` and `cost/...`, over the samples that have
    a number there."""
    names = [
        name.removesuffix("_count")
        for name in total
        if name.startswith(LIBRARY_PREFIXES) and name.endswith("_count")
    ]
    figures = {}
    for name in names:
        if total[f"{name}_count"]:
            figures[name], figures[f"{name}/std"] = _mean_and_std(name, total)
    return figures


def _score_metrics(kind: str, total: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of rewards, or of costs; empty if there are none."""
    if f"{kind}_count" not in total:
        return {}
    figures = {}
    if count := total[f"{kind}_count"]:  # else all samples were dropped, and there is no mean
        figures[f"{kind}/mean"], figures[f"{kind}/std"] = _mean_and_std(kind, total)
        if kind == "reward":
            figures["reward/correct"] = total["reward_correct"] / count
    for name in ("dropped", "failures", "timeouts"):
        figures[f"{kind}/{name}"] = total[f"{kind}_{name}"]
    if f"{kind}_ungraded" in total:  # there is a judge
        figures[f"{kind}/ungraded"] = total[f"{kind}_ungraded"]
    return figures


def _mean_and_std(name: str, total: Mapping[str, float]) -> tuple[float, float]:
    """Return mean and standard deviation of the numbers summed under this name."""
    mean = total[f"{name}_sum"] / total[f"{name}_count"]
    variance = total[f"{name}_square_sum"] / total[f"{name}_count"] - mean * mean
    return mean, math.sqrt(max(0.0, variance))


def _response_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of generated responses; empty if nothing was generated."""
    if "samples" not in total:
        return {}
    samples = max(1.0, total["samples"])
    figures = {
        "response/length_mean": total["response_tokens"] / samples,
        "response/length_max": total["response_tokens_max"],
        "response/truncated": total["truncated"] / samples,
        "response/tokens": total["response_tokens"],
    }
    if total.get("begun"):  # partial rollouts
        figures["partial/carried"] = total["unfinished"] / total["begun"]
        figures["partial/token_age"] = total["token_ages"] / max(1.0, total["response_tokens"])
    if "observed_tokens" in total:  # tools or environments speak, too
        figures["response/observed_tokens"] = total["observed_tokens"]
    if "drafted_tokens" in total:
        drafted = total["drafted_tokens"]
        figures["response/accepted_drafts"] = total["accepted_tokens"] / max(1.0, drafted)
    if total.get("prompt_tokens"):
        figures["prompt/cached"] = total["cached_tokens"] / total["prompt_tokens"]
    if "episode_turns" in total:  # an environment plays
        figures["episode/turns"] = total["episode_turns"] / samples
        figures["episode/branches"] = total["episode_branches"] / samples
        figures |= {f"environment/{kind}": total[f"episode_{kind}"] for kind in EPISODE_FAILURES}
    if "repeated" in total:
        figures["response/repeated"] = total["repeated"] / samples
    if "turns" in total:
        figures["response/turns"] = total["turns"] / samples
        figures["tools/timeouts"] = total["tool_timeouts"]
        figures["tools/errors"] = total["tool_errors"]
    return figures


def _weight_sync_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of weights sent to a disaggregated generator; empty if none were."""
    if "sync_method_max" not in total:
        return {}
    figures = {
        "sync/codec": total["sync_method_max"],
        "sync/encode_seconds": total["sync_encode_seconds_max"],
        "sync/record_bytes": total["sync_record"],
        "sync/repeated": total["sync_repeated"],
    }
    if compared := total["sync_compared"]:
        figures["sync/changed_share"] = total["sync_changed"] / compared
    return figures


def _explained_variance(updates: Sequence[Mapping[str, float]]) -> float:
    """Return the share of the returns' variance that the values explain; 1 is best."""
    mean, square, error = (
        mean_of_updates(f"critic_{name}", updates)
        for name in ("return", "return_square", "error_square")
    )
    variance = square - mean**2
    return 1.0 - error / variance if variance > 1e-12 else 0.0


def compute_phase_shares(records: Iterable[CallRecord], wall_seconds: float) -> dict[str, float]:
    """Compute seconds and shares of a step's wall time by phase, from the records of its calls.

    Args:
        records: one per call and rank.
        wall_seconds: how long the step took for the driver.

    Returns:
        `time/<phase>` in seconds and `share/<phase>` of `wall_seconds`, for each of `STEP_PHASES`.
        A role counts with the mean over its ranks, and roles add up: where roles take turns on the
        same devices the shares sum to 1, `other` being what no phase covers. Roles that work side
        by side can sum to more; `other` is then 0.
    """
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    ranks: dict[str, set[int]] = defaultdict(set)
    for record in records:
        ranks[record.role].add(record.rank)
        for phase, duration in record.phases.items():
            seconds[record.role][phase] += duration
    totals = {
        phase: sum(seconds[role].get(phase, 0.0) / len(ranks[role]) for role in seconds)
        for phase in STEP_PHASES[:-1]
    }
    totals["other"] = max(0.0, wall_seconds - sum(totals.values()))
    times = {f"time/{phase}": total for phase, total in totals.items()}
    shares = {
        f"share/{phase}": total / wall_seconds if wall_seconds > 0 else 0.0
        for phase, total in totals.items()
    }
    return times | shares
