"""Advice on where the time of a step goes: generation, rewards, updates, evaluations,
checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.errors import HybridRLError
from hybridrl.planner.what_if.questions import WhatIfQuestion, predict_step
from hybridrl.report.advice import RunAdvice, make_tip, make_warning
from hybridrl.report.device_spans import GENERATE, SCORE, UPDATE
from hybridrl.report.run_evidence import RunEvidence
from hybridrl.run_files.recorded_steps import CHECKPOINT, DRIVER_EVALUATION

_REWARD_ROLE = "reward"
_TIP_REWARD_SHARE, _WARNING_REWARD_SHARE = 0.15, 0.4
_TIP_GENERATION_SHARE = 0.5
_TIP_EVALUATION_SHARE, _TIP_CHECKPOINT_SHARE = 0.25, 0.1
_MIN_UPDATE_SHARE = 0.2
"""What is less of the time is not worth an advice."""
_SMALL_MICROBATCH_TOKENS, _MANY_MICROBATCHES = 2048, 8
"""Of micro-batches that are so small, and so many, overhead is most."""
_SUGGESTED_MICROBATCH_TOKENS = 8192
_MIN_GAIN = 0.02
"""Of a step: less is not worth a word."""
_REWARD_SPEEDUP_TIME = 0.25
"""With four times as many processes, a reward takes so much of its time."""


def find_slow_rewards(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on reward functions that take much of the step, with the time that more
    processes would save."""
    share = seen.work.get((_REWARD_ROLE, SCORE), 0.0) + seen.waits.get(
        f"{_REWARD_ROLE}.{SCORE}", 0.0
    )
    if share < _TIP_REWARD_SHARE or (seen.config is not None and seen.config.reward.model):
        return
    processes = 1 if seen.config is None else seen.config.reward.processes or 1
    numbers = {"share": share, "processes": processes}
    title = f"reward functions take {share:.0%} of the step"
    gained = _predict_change(seen, WhatIfQuestion(longer={_REWARD_ROLE: _REWARD_SPEEDUP_TIME}))
    action = f"Give them more processes: reward.processes={4 * processes}"
    if gained is not None:
        numbers["change"] = gained
        action += f"; four times as fast, steps would take {-gained:.0%} less"
    overlapped = None  # placement=separation needs two devices
    if seen.devices[1:]:
        overlapped = _predict_change(seen, WhatIfQuestion(overlap_scoring=True))
    if overlapped is not None and overlapped < -_MIN_GAIN:
        numbers["overlapped"] = overlapped
        action += (
            f"; with scoring overlapped, as placement=separation does, up to {-overlapped:.0%} less"
        )
    say = make_warning if share >= _WARNING_REWARD_SHARE else make_tip
    yield say(title, numbers, f"{action}.", share)


def find_slow_generation(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice if most of the step is generation."""
    shares = {role: s for (role, phase), s in seen.work.items() if phase == GENERATE and role}
    role = max(shares, key=shares.__getitem__, default="")
    if not role or shares[role] < _TIP_GENERATION_SHARE:
        return
    share, config = shares[role], seen.config
    on = f"{len(seen.devices)} device{'s' if len(seen.devices) > 1 else ''}"
    title = f"generation is {share:.0%} of the step on {on}"
    numbers = {"share": share, "devices": len(seen.devices)}
    gained = _predict_change(seen, WhatIfQuestion(longer={f"{role}.{GENERATE}": 0.5}))
    if gained is None:
        return
    numbers["change"] = gained
    ways = ["rollout.max_sequences"]
    if config is not None and config.rollout.engine == "transformers":
        ways = ["rollout.engine=vllm"]
    elif config is not None and config.placement.strategy != "separation" and seen.devices[1:]:
        ways.append("placement=separation with placement.staleness=1, which overlaps it")
    action = f"Twice as fast, steps would take {-gained:.0%} less: try {' or '.join(ways)}."
    yield make_tip(title, numbers, action, -gained)


def find_small_microbatches(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield a warning if an update runs in many very small micro-batches."""
    share = sum(s for (role, phase), s in seen.work.items() if phase == UPDATE and role)
    if seen.config is None or share < _MIN_UPDATE_SHARE:
        return
    actor = seen.config.actor
    tokens = _count_update_tokens(seen) / actor.step_updates
    size = actor.tokens_per_microbatch or _SUGGESTED_MICROBATCH_TOKENS
    number = math.ceil(tokens / size)
    if size >= _SMALL_MICROBATCH_TOKENS or number < _MANY_MICROBATCHES:
        return
    larger = min(_SUGGESTED_MICROBATCH_TOKENS, 2 ** math.ceil(math.log2(max(2.0, tokens))))
    title = (
        f"micro-batches are tiny: {size} tokens, so that an update of {tokens:.0f} tokens a device "
        f"runs in {number} of them or more, and updates are {share:.0%} of the time"
    )
    numbers = {"tokens_per_microbatch": size, "micro_batches": number, "share": share}
    if peak := max(seen.values("memory/actor/train_peak_gib"), default=0.0):
        numbers["peak_gib"] = peak
    action = (
        f"actor.tokens_per_microbatch={larger} runs the same update in fewer pieces; hybridrl plan "
        "says what memory that takes."
    )
    yield make_warning(title, numbers, action, share)


def find_slow_evaluations(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice if evaluations take much of the time between steps."""
    share = seen.beside.get(DRIVER_EVALUATION, 0.0)
    if share >= _TIP_EVALUATION_SHARE:
        every = 0 if seen.config is None else seen.config.eval.every
        now = f" (now every {every} steps)" if every else ""
        action = f"Evaluate less often{now}: eval.every; or fewer prompts."
        title = f"evaluations take {share:.0%} of the time"
        yield make_tip(title, {"share": share, "every": every}, action, share / 2)


def find_slow_checkpoints(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice if training waits long for checkpoints."""
    share = seen.beside.get(CHECKPOINT, 0.0)
    if share < _TIP_CHECKPOINT_SHARE:
        return
    numbers = {"share": share, "stall_seconds": seen.recent("checkpoint/stall_seconds") or 0.0}
    action = "Save less often (checkpoint.every), or to a quicker disk (checkpoint.folder)"
    if seen.config is not None and not seen.config.checkpoint.asynchronous:
        action = "Write while the next steps go on: checkpoint.asynchronous=true"
    yield make_tip(f"checkpoints take {share:.0%} of the time", numbers, f"{action}.", share)


TIME_RULES = (
    find_slow_rewards,
    find_slow_generation,
    find_small_microbatches,
    find_slow_evaluations,
    find_slow_checkpoints,
)


def _predict_change(seen: RunEvidence, question: WhatIfQuestion) -> float | None:
    """Predict the relative change of step time: -0.3 means 30% less. None if the run cannot be
    replayed."""
    if seen.replayed is None:
        return None
    try:
        return predict_step(seen.replayed, question).change
    except HybridRLError:
        return None


def _count_update_tokens(seen: RunEvidence) -> float:
    """Return the mean number of tokens that a device learns from in a step."""
    steps = {span.step for span in seen.spans}
    updates = [span for span in seen.spans if span.phase == UPDATE and not span.cause]
    devices = {span.device for span in updates}
    return sum(span.tokens for span in updates) / max(1, len(steps) * len(devices))
