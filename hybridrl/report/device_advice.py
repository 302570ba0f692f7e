"""Advice on devices that are idle: waiting for another role, for slower ranks, or for the
driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from hybridrl.planner.what_if.questions import Question, predict
from hybridrl.planner.what_if.recorded_graph import DRIVER
from hybridrl.report.advice import Advice, tip, warning
from hybridrl.report.device_spans import OVER, PEERS, in_words
from hybridrl.report.run_evidence import Evidence
from hybridrl.run_files.recorded_steps import DATA

UNUSED = 0.97
MUCH_IDLE, TOO_IDLE = 0.2, 0.4
"""Shares of a device's time that it waits for other roles."""
MUCH_PEERS = 0.1
MUCH_DATA, MUCH_DRIVER = 0.1, 0.3


def idle_devices(seen: Evidence) -> Iterator[Advice]:
    """Yield advice on devices that wait for other roles, grouped by the role that they wait for
    most."""
    if len(seen.devices) < 2:
        return
    waits = {device: _for_others(causes) for device, causes in seen.idle.items()}
    alike: dict[str, list[int]] = defaultdict(list)
    for device, causes in waits.items():
        if sum(causes.values()) >= MUCH_IDLE:
            alike[max(causes, key=causes.__getitem__)].append(device)
    for cause, devices in alike.items():
        idle = sum(sum(waits[device].values()) for device in devices) / len(devices)
        share = sum(waits[device][cause] for device in devices) / len(devices)
        if sum(sum(seen.idle[device].values()) for device in devices) >= UNUSED * len(devices):
            title = f"{_names(devices)} had nothing to do"
            action = "Put a role on it (placement.strategy), or leave it to others: num_devices."
            yield warning(title, {"idle": idle, "devices": len(devices)}, action, 1.0)
            continue
        numbers = {"idle": idle, "share": share, "devices": len(devices)}
        title = (
            f"{_names(devices)} waited for other roles {idle:.0%} of the time, most of all "
            f"{in_words(cause)} ({share:.0%})"
        )
        action, numbers = _cure(seen, numbers)
        yield (warning if idle >= TOO_IDLE else tip)(title, numbers, action, idle)


def _cure(seen: Evidence, numbers: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Return the setting that would keep both sides busy, and the numbers with the change predicted
    for it."""
    placement = None if seen.config is None else seen.config.placement
    if placement is None or placement.strategy != "separation":
        together = "placement=flattening has every role on every device"
        return f"Share devices otherwise: {together}; hybridrl plan --search looks.", numbers
    if not placement.staleness:
        change = -min(sum(_for_others(causes).values()) for causes in seen.idle.values())
        action = (
            "Let both sides work at the same time: placement.staleness=1 "
            f"(steps up to {-change:.0%} shorter); or placement=flattening."
        )
        return action, {**numbers, "change": change}
    action = (
        "Give the side that is waited for more devices: placement.generation_devices; or "
        "placement=flattening."
    )
    return action, numbers


def slow_ranks(seen: Evidence) -> Iterator[Advice]:
    """Yield advice on slow ranks for which the others wait in collectives."""
    share = seen.waits.get(PEERS, 0.0)
    if share < MUCH_PEERS or seen.replayed is None:
        return
    found = predict(seen.replayed, Question(fix_slowest=True))
    numbers = {"share": share, "change": found.change}
    title = f"devices wait for slower ranks {share:.0%} of the time"
    action = "Their shares of the tokens differ; look at lengths of samples and what else runs."
    if found.change < -0.02:
        title += f"; the slowest is {found.slowest.partition(',')[0]}"
        action = f"As fast as its peers, steps would take {-found.change:.0%} less: look at what "
        action += "else runs on its device, at its clock and its memory."
    yield tip(title, numbers, action, max(share / 2, -found.change))


def slow_driver(seen: Evidence) -> Iterator[Advice]:
    """Yield advice on time that devices wait for the driver program or for its data."""
    if (share := seen.waits.get(DATA, 0.0)) >= MUCH_DATA:
        title = f"devices wait for data {share:.0%} of the time"
        action = "Look at data.sampler and at what reads the rows: a step asks it once."
        yield tip(title, {"share": share}, action, share)
    if (share := seen.waits.get(DRIVER, 0.0)) >= MUCH_DRIVER:
        title = f"devices wait for the driver {share:.0%} of the time: steps are short"
        action = "More work a step (data.prompts_per_step) makes up for it; or executor=inline."
        yield tip(title, {"share": share}, action, share / 2)


DEVICES = idle_devices, slow_ranks, slow_driver


def _for_others(causes: Mapping[str, float]) -> dict[str, float]:
    """Return the part of a device's idle time in which other roles worked, by cause."""
    return {cause: share for cause, share in causes.items() if "." in cause or cause == OVER}


def _names(devices: list[int]) -> str:
    numbers = ", ".join(map(str, devices))
    return f"device{'s' if devices[1:] else ''} {numbers}"
