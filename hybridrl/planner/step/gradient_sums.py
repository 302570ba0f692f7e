"""What a role's sums of gradients will take, and which way `parallel.gradients=auto` would choose,
by the rates of devices and rates. A job that starts measures instead."""

from __future__ import annotations

from hybridrl.parallel.reduction_choice import (
    FULL,
    IN_ORDER,
    NOTHING,
    ON_A_STREAM,
    Bucket,
    Choice,
    Curve,
    Part,
    Way,
    choose,
    seconds_of,
)
from hybridrl.planner.machine.device_rates import Rates
from hybridrl.planner.memory.model_part import MASTER, ModelPart

SMALLER = {"float32": 1.0, "int8": 3.97, "int4": 7.53}
"""Times fewer bytes than float32."""
TOUCHES = {
    "cpu": {"float32": 0, "int8": 22, "int4": 95},
    "accelerators": {"float32": 0, "int8": 5, "int4": 5},
}
"""Times that encoding and decoding read or write the bytes of a float32 value. On CPUs by
`benchmarks/codecs.py` (docs/precision.md); on accelerators what the kernels need that go over
values once, which have not been measured."""


def ways(rates: Rates, ring: float, kind: str, shards: int, nodes: int) -> dict[str, Way]:
    """List, by name, the ways to sum gradients that a setting or `auto` may choose.

    Args:
        ring: Bytes that each rank receives in a second of a collective over all of them.
        kind: Of the devices.
        shards: Ranks that share parameters.
        nodes: On which these are.
    """
    touches = TOUCHES.get(kind, TOUCHES["accelerators"])
    on_each = shards // nodes if nodes > 1 and shards % nodes == 0 else 1

    def part(share: float, codec: str, ranks: int, seconds_a_byte: float) -> Part:
        others = 1 - 1 / ranks
        encoding = touches[codec] * MASTER * others / rates.memory
        sending = seconds_a_byte * MASTER * others / SMALLER[codec]
        return Part(share, _linear(encoding), _linear(sending))

    found = [Way(FULL, (Part(1.0, NOTHING, part(1, "float32", shards, rates.sums / ring).link),))]
    # All to all: what goes to other nodes, goes for each rank by itself.
    near = min(shards, on_each) if nodes > 1 else shards
    flat = (near - 1) / rates.link + (shards - near) / min(rates.link, rates.network)
    flat /= max(1, shards - 1)
    for codec in ("float32", "int8", "int4"):
        if codec != "int4" or (nodes > 1 and on_each == 1):
            found.append(Way(codec, (part(1.0, codec, shards, flat),)))
    if nodes > 1 and on_each > 1:
        between = 1 / min(rates.link, rates.network)
        found += [
            Way(
                f"{inside}+{across}",
                (
                    part(1.0, inside, on_each, 1 / rates.link),
                    part(1 / on_each, across, nodes, between),
                ),
            )
            for across in SMALLER
            for inside in ("float32", "int8")
        ]
    return {way.name: way for way in found}


def chosen(setting: str, part: ModelPart, found: dict[str, Way], backward: float) -> Choice:
    """Choose how the units of a part are summed; return the seconds that this adds to a backward on
    CPUs, or that a backward takes with it on accelerators.

    Args:
        setting: `parallel.gradients`.
        found: By `ways`.
        backward: Seconds of computation of one.
    """
    sizes = units_of(part)
    overlap = IN_ORDER if part.device == "cpu" else ON_A_STREAM
    beside = backward if overlap.beside else 0.0
    buckets = [
        Bucket(size, beside * (number + 1) / len(sizes)) for number, size in enumerate(sizes)
    ]
    if setting == "auto":
        return choose(buckets, list(found.values()), overlap)
    name = {"two_level_int4": _two_level(found)}.get(setting, setting)
    same = [found[name]] * len(buckets)
    full = [found[FULL]] * len(buckets)
    return Choice(
        (name,) * len(buckets),
        seconds_of(buckets, same, overlap),
        seconds_of(buckets, full, overlap),
        with_backward=overlap.beside,
    )


def units_of(part: ModelPart) -> list[int]:
    """List the number of values in each unit that is summed; embedding and head count as one
    unit."""
    if part.is_small:
        return [part.parameters.trained]
    return [part.shape.layer.trained] * part.layers + [part.around.trained]


def _two_level(found: dict[str, Way]) -> str:
    """Return the name of the way that `two_level_int4` means on these nodes."""
    return next(name for name in ("int8+int4", "int4", "int8") if name in found)


def _linear(seconds: float) -> Curve:
    """Return a curve that takes this many seconds for each value."""
    return Curve(((0.0, 0.0), (1.0, seconds)))
