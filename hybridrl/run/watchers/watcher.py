"""Watchers: what observes a run and has a say in how it goes on. Here are their base and those that
look at one step at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from hybridrl.batch.call_record import CallRecord
from hybridrl.batch.turn import EPISODE_FAILURES
from hybridrl.config.schema import Config
from hybridrl.errors import RewardError, TrainingError
from hybridrl.system.cluster_spec import DeviceSlot
from hybridrl.trainers.objectives import find_low_bit_setting, has_lossy_weight_sync
from hybridrl.trainers.trainer import StepResult

Finding = str | Mapping[str, float]
"""A sentence for the user, or metrics that join those of the step."""


class EndRun(Exception):  # noqa: N818 (it is no error)
    """The run is to end early: after an evaluation of the sets that are due at the end, and with a
    checkpoint. Its text says why, without a full stop."""


class RewindRequest(Exception):  # noqa: N818 (it is no error: the loop goes on from a checkpoint)
    """A request to return to the newest checkpoint.

    Attributes:
        groups: Numbers of the prompts to leave out.
    """

    def __init__(self, step: int, groups: Sequence[int]) -> None:
        super().__init__(step)
        self.step, self.groups = step, groups


class FinishedStep(NamedTuple):
    """A step whose updates are done.

    Attributes:
        records: Of its calls, by every rank.
        updates: The metrics of each update.
        metrics: All that are known of the step so far.
        groups: Numbers of its prompts.
    """

    number: int
    result: StepResult
    records: Sequence[CallRecord]
    updates: Sequence[Mapping[str, float]]
    metrics: dict[str, float]
    groups: Sequence[int] = ()


class FinishedEvaluation(NamedTuple):
    """An evaluation of one or more sets after a step, 0 being before the first.

    Attributes:
        figures: Metrics of all its sets.
        calls: The records of the calls for each set, by a sentence that says which they were.
        accuracy: Of the held-out rows, the first of the run and this one, where it has them.
        covers: Whether the set that a figure is of was among those that were evaluated.
    """

    step: int
    figures: Mapping[str, float]
    calls: Mapping[str, Sequence[CallRecord]] = {}
    accuracy: tuple[float, float] | None = None
    covers: Callable[[str], bool] = lambda figure: True


class Watcher:
    """Observes a run. Its hooks yield what is to be shown and written, and raise what ends the run
    or has it go back (`EndRun`, `RewindRequest`, an error). All watchers are asked, and what was
    found is written, before the first of what they raised is raised again."""

    def on_resume(self, step: int) -> Iterable[Finding]:
        """The steps up to this one are done, and the next begins."""
        return ()

    def on_step_end(self, step: FinishedStep) -> Iterable[Finding]:
        """The updates of a step are done."""
        return ()

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterable[Finding]:
        """Sets were evaluated."""
        return ()

    def on_rewind(self, rewind: RewindRequest, step: int) -> Iterable[Finding]:
        """The run goes back to the checkpoint of this step."""
        return ()

    def on_run_end(self) -> Iterable[Finding]:
        """Called when the last step is done."""
        return ()


_SCORE_KINDS = ("reward", "cost")


class UnscoredSamplesWatcher(Watcher):
    """A watcher for failed scoring; it reports the first failure of each role once.

    Args:
        trains: Whether the run learns: then an evaluation may go without scores.
    """

    def __init__(self, trains: bool = True) -> None:
        self._trains = trains
        self._told: set[str] = set()

    def on_step_end(self, step: FinishedStep) -> Iterator[str]:
        """Tell of samples of a step.

        Raises:
            RewardError: if none of them has a score.
        """
        return self._look(f"step {step.number}", step.records, is_needed=True)

    def on_evaluation(self, evaluation: FinishedEvaluation) -> Iterator[str]:
        """Tell of samples of an evaluation; raises as `on_step_end` if nothing else is done."""
        for where, records in evaluation.calls.items():
            yield from self._look(where, records, is_needed=not self._trains)

    def _look(self, where: str, records: Sequence[CallRecord], is_needed: bool) -> Iterator[str]:
        for record in records:
            yield from self._new(record, where)
        for kind in _SCORE_KINDS:
            if why := _none_scored(kind, records):
                if is_needed:
                    raise RewardError(f"{where}: {why.format('nothing is left to learn from')}")
                yield f"{where}: {why.format('its figures say nothing')}"

    def _new(self, record: CallRecord, where: str) -> list[str]:
        if not record.notices or record.role in self._told:
            return []
        self._told.add(record.role)
        kind, counted = "reward", "`reward/failures` counts such rows"
        if "episode_turns" in record.metrics:
            kind, counted = "environment", "`environment/<kind>` counts such episodes"
        elif "cost_count" in record.metrics:
            kind, counted = "cost", "`cost/failures` counts such rows"
        return [
            f"{where}: {record.notices[0].rstrip()}\nThe run goes on, as {kind}.on_error says; "
            f"{counted}, and this is said once."
        ]


def _none_scored(kind: str, records: Sequence[CallRecord]) -> str:
    """Return why no sample has a score of this kind, with `{}` for what follows; empty: some
    have, or nothing was scored."""
    scored = sum(record.metrics.get(f"{kind}_count", 0) for record in records)
    dropped = sum(record.metrics.get(f"{kind}_dropped", 0) for record in records)
    if scored or not dropped:
        return ""
    first = next((said for record in records for said in record.notices), "")
    shown = first.replace("{", "{{").replace("}", "}}")
    failed = sum(r.metrics.get(f"episode_{name}", 0) for r in records for name in EPISODE_FAILURES)
    if dropped <= failed:
        return (
            f"none of the {dropped:g} episodes could be played, and all were dropped, as "
            f"environment.on_error=drop says: {{}}. {shown}".rstrip()
        )
    plays = any("episode_turns" in record.metrics for record in records)
    why = (
        f"could be scored, and all were dropped, as {kind}.on_error=drop says"
        if first
        else "has a reward: their episodes returned None and reported none, or a "
        f"function of {kind}.function returned None, which drops a sample"
        if plays
        else f"has a score, because a function of {kind}.function returned None for "
        "each, which drops it"
    )
    return f"none of the {dropped:g} samples {why}: {{}}. {shown}".rstrip()


_MAX_K3_BY_DTYPE = {"float32": 1e-4, "bfloat16": 0.05}
"""KL divergence (k3 estimate, a token) that rounding explains. Seen on CPUs: 1e-14 in float32 and
1e-5 in bfloat16; the rest is for larger models, whose tokens rounding may send to other experts,
and for kernels that add up in another order."""


_MAX_K3_LOW_BIT = 0.1
"""The same where generator or trainer compute in fewer bits (`rollout.quantization`,
`rollout.plan`, `models.actor.precision`)."""


class GeneratorCheck(Watcher):
    """Compares them after the first step that learns from samples, also of a run that goes on;
    later ones may learn from those of older policies."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._compared = False

    def on_step_end(self, step: FinishedStep) -> Sequence[Finding]:
        """Raises as `check_generator`."""
        if not self._compared and "mismatch/k3" in step.metrics:
            check_generator(self._config, step.metrics)
            self._compared = True
        return ()


def check_generator(config: Config, metrics: Mapping[str, float]) -> None:
    """Compare generator and trained model by the metrics of a step.

    Args:
        metrics: Of the step.

    Raises:
        TrainingError: if the generator is another model.
    """
    rollout = config.rollout
    is_rough = has_lossy_weight_sync(config)
    if is_rough and config.guard.most_mismatch is None:
        return  # the generator has other weights, as far as the person wished
    if "mismatch/k3" not in metrics or metrics.get("staleness/max", 0.0) > 0:
        return
    found = metrics["mismatch/k3"]
    precision, explained = config.model.dtype, _MAX_K3_BY_DTYPE[config.model.dtype]
    if setting := find_low_bit_setting(config):
        precision, explained = setting, _MAX_K3_LOW_BIT
    most = config.guard.most_mismatch or explained
    if math.isnan(found) and not math.isfinite(metrics.get("policy/loss", math.nan)):
        return  # the trainer's numbers are none either, which is the guard's affair
    if found <= most:
        return
    if is_rough:
        raise TrainingError(
            f"The generator is further from the model that is trained than guard.most_mismatch="
            f"{most:g} allows: mismatch/k3 is {found:.2g} with rollout.weight_sync="
            f"{rollout.weight_sync}, which brings weights there roughly. rollout.weight_sync=delta "
            "brings them exactly; a larger guard.most_mismatch lets the difference pass."
        )
    raise TrainingError(
        f"The generator is not the model that is trained: its log-probabilities of its own samples "
        f"are off by {metrics['mismatch/max_abs']:.2g} at most, mismatch/k3 is {found:.2g}, and "
        f"rounding in {precision} explains {most:g}. {rollout.engine}'s class for "
        f"this model computes something else on this device than transformers', which trains it. "
        "rollout=transformers generates with the class that is trained; guard.most_mismatch lets a "
        "larger difference pass, which algorithm.correction should then correct."
    )


_WINDOW_STEPS = 6
"""So many steps are looked at."""
_MIN_SLOW_STEPS = 5
"""In so many of them a device has to be slow."""
_MIN_SPREADS = 3.0
"""A device is slow that is so many spreads above the median."""
_MIN_SPREAD = 0.15
"""As a share of the median. Less is noise on any machine: nobody is slow who takes less than 1.45
times as long."""
_STD_OF_MEDIAN_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, as a multiple of its median deviation."""
_MIN_SECONDS = 0.02
"""What takes less in a step is not looked at."""


class SlowDeviceWatcher(Watcher):
    """A watcher that reports each slow device once.

    Args:
        devices_by_role: The devices of each role, in rank order.
        devices: All of them.
    """

    def __init__(
        self, devices_by_role: Mapping[str, Sequence[int]], devices: Sequence[DeviceSlot]
    ) -> None:
        self._devices_by_role, self._devices = devices_by_role, devices
        self._ratios: deque[dict[int, float]] = deque(maxlen=_WINDOW_STEPS)
        self._slow: deque[set[int]] = deque(maxlen=_WINDOW_STEPS)
        self._named: set[int] = set()

    def on_step_end(self, step: FinishedStep) -> Iterator[Finding]:
        """Give the largest ratio as a metric, where devices can be compared, and a sentence about
        each device that is named now."""
        ratios = compute_slowdowns(step.records, self._devices_by_role)
        self._ratios.append(ratios)
        self._slow.append(find_slow_devices(ratios))
        if len(ratios) > 1:
            yield {"time/slowest_ratio": max(ratios.values())}
        for device in sorted(self._slow[-1] - self._named):
            if sum(device in slow for slow in self._slow) >= _MIN_SLOW_STEPS:
                self._named.add(device)
                yield f"step {step.number}: {self._sentence(device)}"

    def _sentence(self, device: int) -> str:
        ratio = median_low([step[device] for step in self._ratios if device in step])
        lived = ", ".join(
            f"{role} rank {list(devices).index(device)}"
            for role, devices in self._devices_by_role.items()
            if device in devices
        )
        return (
            f"device {device} on {self._devices[device].node} ({lived}) takes {ratio:.1f} times as "
            f"long as its peers for as many tokens, in {_MIN_SLOW_STEPS} or more of "
            f"{_WINDOW_STEPS} steps, and the others wait for it. Look there at what else runs "
            "(`top`), at clock and temperature, and at memory (swapping)."
        )


def find_slow_devices(ratios: Mapping[int, float]) -> set[int]:
    """Return the devices whose slowdown is an outlier."""
    if len(ratios) < 2:
        return set()
    middle = median_low(ratios.values())
    spread = _STD_OF_MEDIAN_DEVIATION * median_low(
        [abs(ratio - middle) for ratio in ratios.values()]
    )
    limit = middle + _MIN_SPREADS * max(spread, _MIN_SPREAD * middle)
    return {device for device, ratio in ratios.items() if ratio > limit}


def compute_slowdowns(
    records: Sequence[CallRecord], devices_by_role: Mapping[str, Sequence[int]]
) -> dict[int, float]:
    """Return each device's slowdown: the seconds of its calls without waiting for other ranks,
    divided by the seconds that the same tokens take at its peers' median speed. Calls without
    tokens, without peers, or with unknown waiting time are left out."""
    worked: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0])
    )
    for record in records:
        devices = devices_by_role.get(record.role, ())
        if 0 <= record.rank < len(devices) and record.tokens and record.waited is not None:
            done = worked[record.role, record.method, record.stage][devices[record.rank]]
            done[0] += record.end - record.start - record.waited
            done[1] += record.tokens
    took: dict[int, float] = defaultdict(float)
    expected: dict[int, float] = defaultdict(float)
    for by_device in worked.values():
        if len(by_device) < 2:
            continue
        speed = median_low([seconds / tokens for seconds, tokens in by_device.values()])
        for device, (seconds, tokens) in by_device.items():
            took[device] += seconds
            expected[device] += speed * tokens
    return {
        device: took[device] / seconds
        for device, seconds in expected.items()
        if seconds > _MIN_SECONDS
    }
