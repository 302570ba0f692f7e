"""A watcher for devices that take longer than their peers for as many tokens."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from hybridrl.batch.call_record import CallRecord
from hybridrl.run.watchers.watcher import Finding, FinishedStep, Watcher
from hybridrl.system.cluster_spec import DeviceSlot

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
