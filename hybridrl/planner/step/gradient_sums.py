"""The time that a role's sums of gradients will take, and the way that `parallel.gradients=auto`
would choose, by the rates of devices and links. A job that starts measures instead."""

from __future__ import annotations

from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    ZERO_COST,
    CostCurve,
    GradientBucket,
    HopCost,
    MethodCost,
    ReductionChoice,
    choose_methods,
    predict_backward_seconds,
)
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.model_part import FLOAT32_BYTES, ModelPart

_COMPRESSION_RATIOS = {"float32": 1.0, "bfloat16": 2.0, "int8": 3.97, "int4": 7.53}
"""Times fewer bytes than float32."""
_CODEC_MEMORY_PASSES = {
    "cpu": {"float32": 0, "bfloat16": 0, "int8": 22, "int4": 95},
    "accelerators": {"float32": 0, "bfloat16": 0, "int8": 5, "int4": 5},
}
"""Times that encoding and decoding read or write the bytes of a float32 value. On CPUs by
`benchmarks/codecs.py` (docs/precision.md); on accelerators what the kernels need that go over
values once, which have not been measured."""


def list_sum_candidates(
    rates: DeviceRates, ring: float, kind: str, shards: int, nodes: int
) -> dict[str, MethodCost]:
    """List, by name, the ways to sum gradients that a setting or `auto` may choose.

    Args:
        ring: Bytes that each rank receives in a second of a collective over all of them.
        kind: Of the devices.
        shards: Ranks that share parameters.
        nodes: On which these are.
    """
    touches = _CODEC_MEMORY_PASSES.get(kind, _CODEC_MEMORY_PASSES["accelerators"])
    on_each = shards // nodes if nodes > 1 and shards % nodes == 0 else 1

    def part(share: float, codec: str, ranks: int, seconds_a_byte: float) -> HopCost:
        others = 1 - 1 / ranks
        encoding = touches[codec] * FLOAT32_BYTES * others / rates.memory
        sending = seconds_a_byte * FLOAT32_BYTES * others / _COMPRESSION_RATIOS[codec]
        return HopCost(share, _linear(encoding), _linear(sending))

    found = [
        MethodCost(name, (HopCost(1.0, ZERO_COST, part(1, codec, shards, rates.sums / ring).link),))
        for name, codec in (
            (FULL_REDUCTION, "float32"),
            ("bfloat16", "bfloat16"),
        )
    ]
    # All to all: what goes to other nodes, goes for each rank by itself.
    near = min(shards, on_each) if nodes > 1 else shards
    flat = (near - 1) / rates.link + (shards - near) / min(rates.link, rates.network)
    flat /= max(1, shards - 1)
    for codec in ("float32", "int8", "int4"):
        if codec != "int4" or (nodes > 1 and on_each == 1):
            found.append(MethodCost(codec, (part(1.0, codec, shards, flat),)))
    if nodes > 1 and on_each > 1:
        between = 1 / min(rates.link, rates.network)
        found += [
            MethodCost(
                f"{inside}+{across}",
                (
                    part(1.0, inside, on_each, 1 / rates.link),
                    part(1 / on_each, across, nodes, between),
                ),
            )
            for across in ("float32", "int8", "int4")
            for inside in ("float32", "int8")
        ]
    return {way.name: way for way in found}


def choose_gradient_sums(
    setting: str, part: ModelPart, found: dict[str, MethodCost], backward: float
) -> ReductionChoice:
    """Choose how the units of a part are summed; return the seconds that this adds to a backward on
    CPUs, or that a backward takes with it on accelerators.

    Args:
        setting: `parallel.gradients`.
        found: By `list_sum_candidates`.
        backward: Seconds of computation of one.
    """
    sizes = list_unit_sizes(part)
    beside = part.device != "cpu"
    ready = backward if beside else 0.0
    buckets = [
        GradientBucket(size, ready * (number + 1) / len(sizes)) for number, size in enumerate(sizes)
    ]
    if setting == "auto":
        ways = [way for name, way in found.items() if name != "bfloat16"]
        return choose_methods(buckets, ways, beside)
    name = setting
    if setting == "two_level_int4":  # what it means on these nodes
        name = next(name for name in ("int8+int4", "int4", "int8") if name in found)
    same = [found[name]] * len(buckets)
    full = [found[FULL_REDUCTION]] * len(buckets)
    return ReductionChoice(
        (name,) * len(buckets),
        predict_backward_seconds(buckets, same, beside),
        predict_backward_seconds(buckets, full, beside),
        with_backward=beside,
    )


def list_unit_sizes(part: ModelPart) -> list[int]:
    """List the number of values in each unit that is summed; embedding and head count as one
    unit."""
    if part.is_small:
        return [part.parameters.trained]
    return [part.shape.layer.trained] * part.layers + [part.around.trained]


def _linear(seconds: float) -> CostCurve:
    """Return a curve that takes this many seconds for each value."""
    return CostCurve(((0.0, 0.0), (1.0, seconds)))
