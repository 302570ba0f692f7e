"""Advice on where the time of a step goes: generation, rewards, updates, evaluations,
checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridrl.errors import HybridRLError
from hybridrl.planner.what_if.questions import Question, predict
from hybridrl.report.advice import Advice, tip, warning
from hybridrl.report.device_spans import GENERATE, SCORE, UPDATE
from hybridrl.report.run_evidence import Evidence
from hybridrl.run_files.recorded_steps import CHECKPOINT, EVALUATION

REWARD = "reward"
MUCH_REWARD, TOO_MUCH_REWARD = 0.15, 0.4
MUCH_GENERATION = 0.5
MUCH_EVALUATION, MUCH_SAVING = 0.25, 0.1
LITTLE_UPDATE = 0.2
"""What is less of the time is not worth an advice."""
FEW_TOKENS, MANY_MICROBATCHES = 2048, 8
"""Of micro-batches that are so small, and so many, overhead is most."""
ENOUGH_TOKENS = 8192
LITTLE_GAIN = 0.02
"""Of a step: less is not worth a word."""
FASTER = 0.25
"""With four times as many processes, a reward takes so much of its time."""


def slow_reward(seen: Evidence) -> Iterator[Advice]:
    """Yield advice on reward functions that take much of the step, with the time that more
    processes would save."""
    share = seen.work.get((REWARD, SCORE), 0.0) + seen.waits.get(f"{REWARD}.{SCORE}", 0.0)
    if share < MUCH_REWARD or (seen.config is not None and seen.config.reward.model):
        return
    processes = 1 if seen.config is None else seen.config.reward.processes or 1
    numbers = {"share": share, "processes": processes}
    title = f"reward functions take {share:.0%} of the step"
    gained = change_of(seen, Question(longer={REWARD: FASTER}))
    action = f"Give them more processes: reward.processes={4 * processes}"
    if gained is not None:
        numbers["change"] = gained
        action += f"; four times as fast, steps would take {-gained:.0%} less"
    overlapped = None  # placement=separation needs two devices
    if seen.devices[1:]:
        overlapped = change_of(seen, Question(overlap_scoring=True))
    if overlapped is not None and overlapped < -LITTLE_GAIN:
        numbers["overlapped"] = overlapped
        action += (
            f"; with scoring overlapped, as placement=separation does, up to {-overlapped:.0%} less"
        )
    say = warning if share >= TOO_MUCH_REWARD else tip
    yield say(title, numbers, f"{action}.", share)


def generation(seen: Evidence) -> Iterator[Advice]:
    """Yield advice if most of the step is generation."""
    shares = {role: s for (role, phase), s in seen.work.items() if phase == GENERATE and role}
    role = max(shares, key=shares.__getitem__, default="")
    if not role or shares[role] < MUCH_GENERATION:
        return
    share, config = shares[role], seen.config
    on = f"{len(seen.devices)} device{'s' if len(seen.devices) > 1 else ''}"
    title = f"generation is {share:.0%} of the step on {on}"
    numbers = {"share": share, "devices": len(seen.devices)}
    gained = change_of(seen, Question(longer={f"{role}.{GENERATE}": 0.5}))
    if gained is None:
        return
    numbers["change"] = gained
    ways = ["rollout.max_sequences"]
    if config is not None and config.rollout.engine == "transformers":
        ways = ["rollout.engine=vllm"]
    elif config is not None and config.placement.strategy != "separation" and seen.devices[1:]:
        ways.append("placement=separation with placement.staleness=1, which overlaps it")
    action = f"Twice as fast, steps would take {-gained:.0%} less: try {' or '.join(ways)}."
    yield tip(title, numbers, action, -gained)


def small_microbatches(seen: Evidence) -> Iterator[Advice]:
    """Yield a warning if an update runs in many very small micro-batches."""
    share = sum(s for (role, phase), s in seen.work.items() if phase == UPDATE and role)
    if seen.config is None or share < LITTLE_UPDATE:
        return
    actor = seen.config.actor
    tokens = _tokens_of_update(seen) / actor.updates_per_step
    size = actor.tokens_per_microbatch
    number = math.ceil(tokens / size)
    if size >= FEW_TOKENS or number < MANY_MICROBATCHES:
        return
    larger = min(ENOUGH_TOKENS, 2 ** math.ceil(math.log2(max(2.0, tokens))))
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
    yield warning(title, numbers, action, share)


def evaluations(seen: Evidence) -> Iterator[Advice]:
    """Yield advice if evaluations take much of the time between steps."""
    share = seen.beside.get(EVALUATION, 0.0)
    if share >= MUCH_EVALUATION:
        every = 0 if seen.config is None else seen.config.eval.every
        now = f" (now every {every} steps)" if every else ""
        action = f"Evaluate less often{now}: eval.every; or fewer prompts."
        title = f"evaluations take {share:.0%} of the time"
        yield tip(title, {"share": share, "every": every}, action, share / 2)


def checkpoints(seen: Evidence) -> Iterator[Advice]:
    """Yield advice if training waits long for checkpoints."""
    share = seen.beside.get(CHECKPOINT, 0.0)
    if share < MUCH_SAVING:
        return
    numbers = {"share": share, "stall_seconds": seen.recent("checkpoint/stall_seconds") or 0.0}
    action = "Save less often (checkpoint.every), or to a quicker disk (checkpoint.folder)"
    if seen.config is not None and not seen.config.checkpoint.asynchronous:
        action = "Write while the next steps go on: checkpoint.asynchronous=true"
    yield tip(f"checkpoints take {share:.0%} of the time", numbers, f"{action}.", share)


TIME = slow_reward, generation, small_microbatches, evaluations, checkpoints


def change_of(seen: Evidence, question: Question) -> float | None:
    """Predict the relative change of step time: -0.3 means 30 % less. None if the run cannot be
    replayed."""
    if seen.replayed is None:
        return None
    try:
        return predict(seen.replayed, question).change
    except HybridRLError:
        return None


def _tokens_of_update(seen: Evidence) -> float:
    """Return the mean number of tokens that a device learns from in a step."""
    steps = {span.step for span in seen.spans}
    updates = [span for span in seen.spans if span.phase == UPDATE and not span.cause]
    devices = {span.device for span in updates}
    return sum(span.tokens for span in updates) / max(1, len(steps) * len(devices))
