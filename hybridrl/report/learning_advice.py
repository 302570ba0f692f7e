"""Advice on rewards and evaluations: whether the run learns, and whether what it learns is
meant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from hybridrl.report.advice import RunAdvice, make_tip, make_warning
from hybridrl.report.run_evidence import MetricChange, RunEvidence, SampleGroup

_TIP_DEAD_SHARE, _WARNING_DEAD_SHARE = 0.3, 0.8
"""Shares of prompts whose samples all score alike. On the built-in task 0.2 to 0.6 are usual."""
_REFILLS = "algorithm.dynamic_sampling"
_BATCH_ADVANTAGE = "reinforce_plus_plus"
"""The advantage of GRPO that compares with the whole batch."""
_SOLVED_SCORE_SHARE = 0.9
"""As a share of the way from the least to the largest score: what is left is luck."""
_TIP_TRUNCATED_SHARE, _WARNING_TRUNCATED_SHARE = 0.03, 0.15
_WARNING_CLIP_FRACTION = 0.25
_MISMATCH_LIMIT_BY_DTYPE = {"float32": 1e-3}
_DEFAULT_MISMATCH_LIMIT = 0.05
"""Of `mismatch/k3`, in nats a token, by `model.dtype`: more than rounding explains."""
_TIP_MISMATCH_SHARE = 0.1
"""Of what is too much: from there on it is worth a look, and a rise is no chance."""
_RISING_MISMATCH_FACTOR = 3.0
"""A mismatch that has become so many times as large rises."""
_SIGNIFICANT_STANDARD_ERRORS = 4.0
"""Standard errors that are no chance."""
_MIN_FALL_SPREADS, _MIN_RISE_SPREADS = 0.35, 0.25
"""Of the spread of rewards: what is less is neither."""
_COLLAPSE_SEVERITY = 0.5
"""More than the fall itself, for other faults come of it."""
_RATE_DIVISOR, _COLLAPSE_RATE_DIVISOR = 3.0, 10.0
"""Rates are to be divided by."""
_COLLAPSED_ENTROPY_SHARE = 0.1
"""As a share of the entropy of the first steps."""
_SPIKE_FACTOR = 10.0
"""Times the median norm of gradients."""
_LENGTH_GROWTH_FACTOR = 1.3
_LENGTH_CORRELATION_LIMIT = 0.7
"""Correlation of score and length within the groups: what is more is a score of lengths."""
_MIN_CORRELATED_GROUPS = 8
_WARNING_FAILED_SHARE = 0.01
MIN_STEPS_TO_JUDGE = 10
"""Steps before which no run has to have learned anything."""


def find_dead_groups(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on prompts whose samples all score alike, which give no gradient to losses that
    compare them."""
    groups = seen.groups if _compares_samples(seen) else []
    dead = [group for group in groups if max(group.scores) == min(group.scores)]
    share = len(dead) / len(groups) if groups else 0.0
    # What fell that far is all alike.
    if share < _TIP_DEAD_SHARE or _find_reward_fall(seen) is not None:
        return
    scores = [score for group in groups for score in group.scores]
    low, high = min(scores), max(scores)
    if low == high and any(seen.values("reward/std")):  # earlier ones differed
        rewards = seen.values("reward/mean")
        low, high = min(low, *rewards), max(high, *rewards)
    top = sum(group.scores[0] == high for group in dead) / len(dead) if high > low else 0.0
    numbers = {"dead_share": share, "groups": len(groups), "dead_at_best_score": top}
    title = f"{share:.0%} of {len(groups)} groups have zero variance: they teach nothing"
    if high > low and statistics.fmean(scores) > low + _SOLVED_SCORE_SHARE * (high - low):
        action = "The data is solved: harder prompts, or the run can end (eval.stop)."
        yield make_tip(title, numbers, action, share)
        return
    if high == low:
        cause = f"All samples score {low:g}: see whether the reward tells responses apart"
    elif top > 0.5:
        cause = "Most of them are always right: take harder prompts (data.sampler=pass_rate)"
    else:
        cause = "Most of them are never right: take easier prompts"
        cause += " or a warm-up (warmup.steps)" if _has_reference_answers(seen) else ""
    config = seen.config
    more = f", or have them replaced ({_REFILLS}=true)"
    may_refill = seen.program is not None and _REFILLS in seen.program.USES
    if config is not None and (config.algorithm.dynamic_sampling or not may_refill):
        more = f", or more samples of each (now {config.rollout.samples_per_prompt})"
    say = make_warning if share >= _WARNING_DEAD_SHARE else make_tip
    yield say(title, numbers, f"{cause}{more}.", share)


def find_reward_collapse(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning if the reward is significantly below its earlier level."""
    fall = _find_reward_fall(seen)
    if fall is None:
        return
    numbers = {"reward_best": fall.first, "reward_last": fall.last} | _read_learning_rate(seen)
    title = f"the reward fell from {fall.first:.3g} to {fall.last:.3g}"
    if entropy := seen.change("policy/entropy"):
        numbers |= {"entropy_first": entropy.first, "entropy_last": entropy.last}
        title += f", entropy went from {entropy.first:.2g} to {entropy.last:.2g}"
    # Evaluations that fall, answers cut and samples all alike come of it.
    severity = _COLLAPSE_SEVERITY + (fall.first - fall.last) / max(seen.values("reward/std"))
    yield make_warning(title, numbers, suggest_lower_rate(seen, _COLLAPSE_RATE_DIVISOR), severity)


def find_clipped_updates(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning if too many tokens of an update reach the clip range of the loss."""
    share = seen.recent("policy/clip_fraction")
    if share is None or share < _WARNING_CLIP_FRACTION:
        return
    title = f"the clip fraction is {share:.2g}: updates move the policy too far"
    numbers = {"clip_fraction": share} | _read_learning_rate(seen)
    yield make_warning(title, numbers, suggest_lower_rate(seen), 2 * share)


def find_bad_gradients(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on skipped updates and on gradient norms far above the median."""
    roles = ("policy", "critic", "cost_critic")
    of_all = sum(seen.values("guard/skipped"))
    skipped = of_all or sum(sum(seen.values(f"{role}/skipped_updates")) for role in roles)
    if skipped:
        title = f"{skipped:.0f} updates were left out: their numbers were not finite"
        action = (
            f"{suggest_lower_rate(seen)} bad-steps/ has what they learned from; "
            "model.dtype=float32 tells whether it is the precision."
        )
        share = skipped / max(1, len(seen.rows))
        yield make_warning(title, {"skipped": skipped}, action, 0.3 + share)
    norms = seen.values("policy/grad_norm")
    if len(norms) < 5:
        return
    middle, most = statistics.median(norms), max(norms[2:])
    limit = 1.0 if seen.config is None else seen.config.actor.optimizer.max_grad_norm
    if middle > 0 and most > _SPIKE_FACTOR * middle and (most > 10 * limit or not limit):
        steps = [row["step"] for row in seen.rows if row.get("policy/grad_norm") == most]
        step = steps[-1]
        title = f"the gradient's norm rose to {most:.3g} at step {step}, usually {middle:.2g}"
        action = (
            "Look at the samples of that step; a lower actor.optimizer.max_grad_norm "
            f"(now {limit:g}) or learning rate holds it."
        )
        yield make_tip(title, {"most": most, "median": middle, "step": step}, action, 0.5)


def find_generator_mismatch(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on the KL between generator and trainer, if rounding does not explain it."""
    change = seen.change("mismatch/k3")
    dtype = "" if seen.config is None else seen.config.model.dtype
    stale = max(seen.values("staleness/max"), default=0.0)
    # Samples of an older policy differ by what it has learned since.
    limit = (
        _DEFAULT_MISMATCH_LIMIT
        if stale
        else _MISMATCH_LIMIT_BY_DTYPE.get(dtype, _DEFAULT_MISMATCH_LIMIT)
    )
    if change is None or change.last < _TIP_MISMATCH_SHARE * limit:
        return
    rising = not stale and change.last > _RISING_MISMATCH_FACTOR * max(change.first, 1e-12)
    numbers = {"k3_first": change.first, "k3_last": change.last, "staleness": stale}
    how = f"rising, from {change.first:.2g} to" if rising else "at"
    title = f"mismatch KL between generator and trainer is {how} {change.last:.2g} nats a token"
    correction = "auto" if seen.config is None else seen.config.algorithm.correction
    action = "Make both compute alike (model.dtype, rollout.quantization)"
    if stale:
        title += f", at a staleness of up to {stale:.0f}"
        carries = any(seen.values("partial/carried"))
        older = "rollout.partial, rollout.partial_steps" if carries else "placement.staleness"
        action = f"Let samples be less old ({older}), or lower the rate"
    elif rising:
        action = "See whether it gets the weights that are trained (rollout.verify_weights=true)"
        action += "; make both compute alike (model.dtype, rollout.quantization)"
    if correction == "none" or (correction == "auto" and not stale):
        action += ", or weigh samples by it (algorithm.correction=truncate)"
    severity = math.log10(change.last / limit) / 3 + 0.4
    say = make_warning if change.last >= limit or rising else make_tip
    yield say(title, numbers, f"{action}.", severity)


def find_truncated_responses(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on responses that are truncated at `rollout.max_tokens`."""
    share = seen.recent("response/truncated")
    if share is None or share < _TIP_TRUNCATED_SHARE:
        return
    numbers = {"truncated": share, "length": seen.recent("response/length_mean") or 0.0}
    title = f"{share:.0%} of the responses end at the limit"
    action = "Raise rollout.max_tokens"
    if seen.config is not None:
        numbers["max_tokens"] = seen.config.rollout.max_tokens
        title += f" of {seen.config.rollout.max_tokens} tokens"
        if not seen.config.algorithm.overlong_buffer:
            action += ", or have long responses cost something (algorithm.overlong_buffer)"
    yield (make_warning if share >= _WARNING_TRUNCATED_SHARE else make_tip)(
        title, numbers, f"{action}.", share
    )


def find_length_hacking(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning if scores follow the length of responses. Episodes are left out: a tool call
    or a further turn has more tokens, and may be what the task asks for."""
    groups = [] if _has_episodes(seen) else seen.groups
    related = [r for group in groups if (r := _correlate_score_and_length(group)) is not None]
    together = statistics.fmean(related) if len(related) >= _MIN_CORRELATED_GROUPS else 0.0
    lengths, rewards = seen.change("response/length_mean"), seen.change("reward/mean")
    grown = 1.0 if lengths is None or not lengths.first else lengths.last / lengths.first
    rose = rewards is not None and _rose(seen, rewards)
    by_growth = grown >= _LENGTH_GROWTH_FACTOR and rose and not _improved_in_evaluations(seen)
    if together < _LENGTH_CORRELATION_LIMIT and not by_growth:
        return
    numbers = {"correlation": together, "length_ratio": grown}
    parts = []
    if together >= _LENGTH_CORRELATION_LIMIT:
        parts.append(
            f"among samples of a prompt, score and length go together (correlation {together:.2f} "
            f"in {len(related)} groups)"
        )
    if by_growth and rewards is not None and lengths is not None:
        numbers |= {"reward_first": rewards.first, "reward_last": rewards.last}
        parts.append(
            f"the reward rose from {rewards.first:.3g} to {rewards.last:.3g} as responses grew "
            f"from {lengths.first:.3g} to {lengths.last:.3g} tokens, and "
            + ("evaluations did not rise" if seen.evaluated else "no evaluation tells of more")
        )
    title = f"length itself seems to be rewarded: {'; '.join(parts)}"
    action = (
        "Read the longest samples; reward.shorter or algorithm.overlong_buffer hold length, and "
        "reward.check measures what is meant without rewarding it."
    )
    yield make_warning(title, numbers, action, max(together, 0.6 if by_growth else 0.0))


def find_entropy_collapse(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning if the policy's entropy has collapsed while rewards are no higher."""
    change, rewards = seen.change("policy/entropy"), seen.change("reward/mean")
    if change is None or rewards is None or seen.steps < MIN_STEPS_TO_JUDGE:
        return
    if (
        change.first <= 0
        or change.last > _COLLAPSED_ENTROPY_SHARE * change.first
        or _rose(seen, rewards)
    ):
        return
    title = f"entropy fell from {change.first:.2g} to {change.last:.2g}, and rewards are no higher"
    action = (
        "Have the policy go on trying: algorithm.clip_high=0.28, algorithm.entropy_coefficient, or "
        "a lower rate."
    )
    numbers = {"entropy_first": change.first, "entropy_last": change.last}
    yield make_warning(title, numbers, action, 1 - change.last / change.first)


def find_reward_plateau(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice if the change of the reward since the first steps is not significant."""
    rewards, spread = seen.change("reward/mean"), seen.recent("reward/std")
    if rewards is None or not spread or seen.steps < MIN_STEPS_TO_JUDGE:
        return
    if abs(rewards.last - rewards.first) > 2 * math.sqrt(2) * seen.reward_doubt():
        return
    if _is_near_best_score(seen):
        return
    title = (
        f"the reward has not moved by more than chance in {seen.steps} steps "
        f"({rewards.first:.3g} to {rewards.last:.3g})"
    )
    numbers = {"reward_first": rewards.first, "reward_last": rewards.last} | _read_learning_rate(
        seen
    )
    action = "Try a higher actor.optimizer.learning_rate, more prompts a step, or easier prompts."
    yield make_tip(title, numbers, action, 0.8)


def find_reward_failures(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield warnings on samples that could not be scored, timed out, or were dropped."""
    for name, said in {
        "reward/failures": "could not be scored",
        "reward/timeouts": "took longer to be scored than reward.timeout_s",
        "reward/dropped": "were left out of updates",
    }.items():
        lost, samples = sum(seen.values(name)), _count_samples(seen)
        if not samples or lost / samples < _WARNING_FAILED_SHARE:
            continue
        action = "The logs of the reward role name the rows; see reward.on_error, reward.timeout_s."
        title = f"{lost / samples:.1%} of the samples {said} ({lost:.0f})"
        numbers = {name.partition("/")[2]: lost, "samples": samples}
        yield make_warning(title, numbers, action, lost / samples)


def find_evaluation_regressions(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning for each evaluation whose interval now lies below that of the first one."""
    for name, first, last in seen.evaluated:
        if last["high"] < first["low"]:
            title = f"{name} fell from {format_interval(first)} to {format_interval(last)}"
            numbers = {"first": first["value"], "last": last["value"]}
            action = (
                "What is rewarded is not what is evaluated, or updates are too large: compare "
                "samples, and try a lower actor.optimizer.learning_rate."
            )
            yield make_warning(title, numbers, action, 0.7)


def find_uninformative_critic(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice if the critic's values explain less of the returns than their mean does."""
    explained = seen.recent("critic/explained_variance")
    if explained is not None and seen.steps >= MIN_STEPS_TO_JUDGE and explained < 0:
        title = f"the critic explains nothing of the returns (explained variance {explained:.2g})"
        action = "Try a higher models.critic.optimizer.learning_rate, or steps of the critic alone."
        yield make_tip(title, {"explained_variance": explained}, action, 0.6)


REWARD_RULES = (
    find_dead_groups,
    find_reward_collapse,
    find_clipped_updates,
    find_bad_gradients,
    find_generator_mismatch,
    find_truncated_responses,
    find_length_hacking,
    find_entropy_collapse,
    find_reward_plateau,
    find_reward_failures,
    find_evaluation_regressions,
    find_uninformative_critic,
)


def _has_episodes(seen: RunEvidence) -> bool:
    """Return whether the run's samples are episodes with several turns."""
    config = seen.config
    if config is None:
        return False
    return bool(config.rollout.episode or config.rollout.serve or config.environment.name)


def _compares_samples(seen: RunEvidence) -> bool:
    """Return whether the algorithm compares the samples of a prompt with each other; True where the
    settings are unknown. A critic's values, a greedy answer, a teacher or answers to imitate are
    learned from where all score alike, too."""
    if seen.config is None:
        return True
    compares = seen.program is not None and seen.program.COMPARES_SAMPLES
    return compares and seen.config.algorithm.advantage != _BATCH_ADVANTAGE


def _has_reference_answers(seen: RunEvidence) -> bool:
    """Return whether a warm-up would have reference answers to learn from: built-in tasks have
    them, environments do not."""
    if seen.config is None:
        return False
    data = seen.config.data
    sources = [said for said in data.sources.values() if isinstance(said, Mapping)]
    tasks = [said.get("task") for said in sources] or [data.task]
    return any(task not in (None, "environment") for task in tasks)


def _find_reward_fall(seen: RunEvidence) -> MetricChange | None:
    """Return the reward at its best and at the end, if it fell significantly: from its best window,
    or directly after the first steps, as one far too large update makes it fall."""
    rewards, spreads = seen.values("reward/mean"), seen.values("reward/std")
    change = seen.change("reward/mean")
    if change is None or seen.config is None or len(rewards) < 3 or len(spreads) != len(rewards):
        return None
    least = _MIN_FALL_SPREADS * max(spreads)
    if not least:
        return None
    window = max(1, min(10, len(rewards) // 3))
    ends = range(window, len(rewards) - window + 1)
    best = max(statistics.fmean(rewards[end - window : end]) for end in ends)
    if best - change.last >= max(least, _SIGNIFICANT_STANDARD_ERRORS * seen.reward_doubt()):
        return MetricChange(best, change.last)
    variance = statistics.fmean(spread**2 for spread in spreads)  # as if nothing had changed
    for steps in range(1, window + 1):
        first, rest = statistics.fmean(rewards[:steps]), statistics.fmean(rewards[steps:])
        more = 1 / steps + 1 / (len(rewards) - steps)
        doubt = math.sqrt(variance * more / seen.config.data.prompts_per_step)
        if min(first - rest, first - change.last) >= max(
            least, _SIGNIFICANT_STANDARD_ERRORS * doubt
        ):
            return MetricChange(first, change.last)
    return None


def _read_learning_rate(seen: RunEvidence) -> dict[str, float]:
    rates = seen.values("policy/learning_rate")
    if not rates:
        return {}
    rate = max(rates) if seen.config is None else seen.config.actor.optimizer.learning_rate
    return {"learning_rate": rate}


def suggest_lower_rate(seen: RunEvidence, times: float = _RATE_DIVISOR) -> str:
    rate = _read_learning_rate(seen).get("learning_rate")
    if not rate:
        return "Lower actor.optimizer.learning_rate."
    return f"Lower the rate: actor.optimizer.learning_rate={rate / times:.1g} (now {rate:.2g})."


def format_interval(figures: Mapping[str, float]) -> str:
    """Format a figure of an evaluation with its interval."""
    return f"{figures['value']:.3g} ({figures['low']:.3g} to {figures['high']:.3g})"


def _rose(seen: RunEvidence, rewards: MetricChange) -> bool:
    spread = max(seen.values("reward/std"), default=0.0)
    doubt = max(seen.reward_doubt(), seen.scatter("reward/mean"))
    least = max(2 * math.sqrt(2) * doubt, _MIN_RISE_SPREADS * spread, 1e-9)
    return rewards.last - rewards.first > least


def _improved_in_evaluations(seen: RunEvidence) -> bool:
    """Return whether any evaluation rose beyond the interval of its first result."""
    return any(last["value"] > first["high"] for _, first, last in seen.evaluated)


def _is_near_best_score(seen: RunEvidence) -> bool:
    scores = [score for group in seen.groups for score in group.scores]
    reward = seen.recent("reward/mean")
    if not scores or reward is None or max(scores) == min(scores):
        return False
    return reward > min(scores) + _SOLVED_SCORE_SHARE * (max(scores) - min(scores))


def _correlate_score_and_length(group: SampleGroup) -> float | None:
    if _is_constant(group.scores) or _is_constant(group.lengths):
        return None
    return statistics.correlation(group.scores, group.lengths)


def _is_constant(values: Sequence[float]) -> bool:
    return max(values) == min(values)


def _count_samples(seen: RunEvidence) -> float:
    """Estimate the number of samples of all steps from tokens and mean lengths."""
    found = zip(seen.values("response/tokens"), seen.values("response/length_mean"), strict=False)
    return sum(tokens / length for tokens, length in found if length)
