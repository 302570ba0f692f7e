"""Advice on devices that are idle: waiting for another role, for slower ranks, or for the
driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from hybridrl.batch.call_record import DRIVER_ROLE
from hybridrl.planner.what_if.questions import WhatIfQuestion, predict_step
from hybridrl.report.advice import RunAdvice, make_tip, make_warning
from hybridrl.report.device_spans import NO_MORE_WORK, WAIT_FOR_PEERS, format_cause
from hybridrl.report.run_evidence import RunEvidence
from hybridrl.run_files.recorded_steps import DATA

_UNUSED_IDLE_SHARE = 0.97
_TIP_IDLE_SHARE, _WARNING_IDLE_SHARE = 0.2, 0.4
"""Shares of a device's time that it waits for other roles."""
_TIP_PEER_WAIT_SHARE = 0.1
_TIP_DATA_WAIT_SHARE, _TIP_DRIVER_WAIT_SHARE = 0.1, 0.3


def find_idle_devices(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on devices that wait for other roles, grouped by the role that they wait for
    most."""
    if len(seen.devices) < 2:
        return
    waits = {device: _select_waits_for_roles(causes) for device, causes in seen.idle.items()}
    alike: dict[str, list[int]] = defaultdict(list)
    for device, causes in waits.items():
        if sum(causes.values()) >= _TIP_IDLE_SHARE:
            alike[max(causes, key=causes.__getitem__)].append(device)
    for cause, devices in alike.items():
        idle = sum(sum(waits[device].values()) for device in devices) / len(devices)
        share = sum(waits[device][cause] for device in devices) / len(devices)
        if sum(sum(seen.idle[device].values()) for device in devices) >= _UNUSED_IDLE_SHARE * len(
            devices
        ):
            title = f"{_format_devices(devices)} had nothing to do"
            action = "Put a role on it (placement.strategy), or leave it to others: num_devices."
            yield make_warning(title, {"idle": idle, "devices": len(devices)}, action, 1.0)
            continue
        numbers = {"idle": idle, "share": share, "devices": len(devices)}
        title = (
            f"{_format_devices(devices)} waited for other roles {idle:.0%} of the time, most of "
            f"all {format_cause(cause)} ({share:.0%})"
        )
        action, numbers = _suggest_placement(seen, numbers)
        yield (make_warning if idle >= _WARNING_IDLE_SHARE else make_tip)(
            title, numbers, action, idle
        )


def _suggest_placement(
    seen: RunEvidence, numbers: dict[str, float]
) -> tuple[str, dict[str, float]]:
    """Return the setting that would keep both sides busy, and the numbers with the change predicted
    for it."""
    placement = None if seen.config is None else seen.config.placement
    if placement is None or placement.strategy != "separation":
        together = "placement=flattening has every role on every device"
        return f"Share devices otherwise: {together}; hybridrl plan --search looks.", numbers
    if not placement.staleness:
        change = -min(
            sum(_select_waits_for_roles(causes).values()) for causes in seen.idle.values()
        )
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


def find_slow_ranks(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on slow ranks for which the others wait in collectives."""
    share = seen.waits.get(WAIT_FOR_PEERS, 0.0)
    if share < _TIP_PEER_WAIT_SHARE or seen.replayed is None:
        return
    found = predict_step(seen.replayed, WhatIfQuestion(fix_slowest=True))
    numbers = {"share": share, "change": found.change}
    title = f"devices wait for slower ranks {share:.0%} of the time"
    action = "Their shares of the tokens differ; look at lengths of samples and what else runs."
    if found.change < -0.02:
        title += f"; the slowest is {found.slowest.partition(',')[0]}"
        action = f"As fast as its peers, steps would take {-found.change:.0%} less: look at what "
        action += "else runs on its device, at its clock and its memory."
    yield make_tip(title, numbers, action, max(share / 2, -found.change))


def find_slow_driver(seen: RunEvidence) -> Iterator[RunAdvice]:
    """Yield advice on time that devices wait for the driver program or for its data."""
    if (share := seen.waits.get(DATA, 0.0)) >= _TIP_DATA_WAIT_SHARE:
        title = f"devices wait for data {share:.0%} of the time"
        action = "Look at data.sampler and at what reads the rows: a step asks it once."
        yield make_tip(title, {"share": share}, action, share)
    if (share := seen.waits.get(DRIVER_ROLE, 0.0)) >= _TIP_DRIVER_WAIT_SHARE:
        title = f"devices wait for the driver {share:.0%} of the time: steps are short"
        action = "More work a step (data.prompts_per_step) makes up for it; or executor=inline."
        yield make_tip(title, {"share": share}, action, share / 2)


DEVICE_RULES = find_idle_devices, find_slow_ranks, find_slow_driver


def _select_waits_for_roles(causes: Mapping[str, float]) -> dict[str, float]:
    """Return the part of a device's idle time in which other roles worked, by cause."""
    return {
        cause: share for cause, share in causes.items() if "." in cause or cause == NO_MORE_WORK
    }


def _format_devices(devices: list[int]) -> str:
    numbers = ", ".join(map(str, devices))
    return f"device{'s' if devices[1:] else ''} {numbers}"
