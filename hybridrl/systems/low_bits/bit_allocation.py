"""Choose the layers that a slower device computes in fewer bits, so that others need not wait.

QSync's allocator (Zhao et al. 2024, arXiv:2407.02327, its "allocator"): begin with the fastest
choice that fits the device, then raise the layer whose rise takes away most noise, as long as the
predicted time of a step does not rise, until none can be raised.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.errors import ConfigError
from hybridrl.system.formatting import format_bytes
from hybridrl.systems.unequal_devices import UnequalDevice


@dataclass(frozen=True)
class LayerCost:
    """The time and memory of one layer in one number of bits, on the measured device.

    Attributes:
        seconds: Of a step, casts and rounding included.
        bytes: Of memory.
    """

    seconds: float
    bytes: float = 0.0


@dataclass(frozen=True)
class DeviceWorkload:
    """The cost of a step on one device: layers by bits, and what is always in full precision.

    Attributes:
        layers: By layer and bits, of the measured device; the most are those of a whole one.
        ends: Seconds of what is always whole: embedding, head, optimizer.
        fixed: Seconds that no device makes faster: messages between them.
        end_bytes: Memory of what is always whole.
    """

    layers: Sequence[Mapping[int, LayerCost]]
    ends: float = 0.0
    fixed: float = 0.0
    end_bytes: float = 0.0

    def seconds(self, bits: Sequence[int], share: float) -> float:
        """Predict the seconds of a step on a device with this share of the measured speed."""
        layers = math.fsum(self.layers[n][b].seconds for n, b in enumerate(bits))
        return (self.ends + layers) / share + self.fixed

    def bytes(self, bits: Sequence[int]) -> float:
        """Return the bytes of the model with these bits."""
        return self.end_bytes + math.fsum(self.layers[n][b].bytes for n, b in enumerate(bits))


@dataclass(frozen=True)
class BitAllocation:
    """The chosen bits of each device's layers, with the predicted seconds."""

    bits: Sequence[Sequence[int]]
    seconds: Sequence[float]
    target: float


def allocate_bits(
    work: DeviceWorkload,
    devices: Sequence[UnequalDevice],
    indicators: Mapping[int, Mapping[int, float]],
) -> BitAllocation:
    """Choose the fewest and least harmful low-bit layers with which no device holds up the others.

    A step lasts as long as its slowest device. That may be the fastest device with whole
    layers, or a weak one that is slower in its fewest bits; nothing is made slower than that.

    Args:
        indicators: By layer and bits, what computing so changes; see
            `hybridrl.quantization.output_kl`. Bits that are not there change nothing.

    Raises:
        ConfigError: if a device has no room even for the fewest bits; names it.
    """
    starts = [_fastest(work, device) for device in devices]
    whole = [max(costs) for costs in work.layers]
    target = min(work.seconds(whole, d.share) for d in devices)
    allowed = max(
        [target] + [work.seconds(bits, d.share) for bits, d in zip(starts, devices, strict=True)]
    )
    chosen = [
        _raised(work, device, bits, allowed, indicators)
        for device, bits in zip(devices, starts, strict=True)
    ]
    seconds = [work.seconds(bits, d.share) for bits, d in zip(chosen, devices, strict=True)]
    return BitAllocation(chosen, seconds, target)


def _fastest(work: DeviceWorkload, device: UnequalDevice) -> list[int]:
    """Choose for each layer the bits in which it is fastest, then fewer bits until the model fits,
    beginning with the layers that lose least time per byte saved."""
    bits = [min(costs, key=lambda b: (costs[b].seconds, -b)) for costs in work.layers]
    smaller = []
    for n, costs in enumerate(work.layers):
        now = costs[bits[n]]
        for other, cost in costs.items():
            if (saved := now.bytes - cost.bytes) > 0:
                smaller.append(((cost.seconds - now.seconds) / saved, n, other))
    for _, n, other in sorted(smaller):
        if work.bytes(bits) <= device.memory:
            break
        if work.layers[n][other].bytes < work.layers[n][bits[n]].bytes:
            bits[n] = other
    if (taken := work.bytes(bits)) > device.memory:
        raise ConfigError(
            f"The model takes {format_bytes(taken)} in the fewest bits, and the device "
            f"`{device.name}` has {format_bytes(device.memory)} (memory_gib). Give it more, or "
            "leave it out of --devices."
        )
    return bits


def _raised(
    work: DeviceWorkload,
    device: UnequalDevice,
    bits: list[int],
    allowed: float,
    indicators: Mapping[int, Mapping[int, float]],
) -> list[int]:
    heap: list[tuple[float, int, int]] = []

    def offer(layer: int) -> None:
        for higher in sorted(b for b in work.layers[layer] if b > bits[layer])[:1]:
            harm = indicators[layer]
            gain = harm.get(bits[layer], 0.0) - harm.get(higher, 0.0)
            heapq.heappush(heap, (-gain, layer, higher))

    for layer in range(len(bits)):
        offer(layer)
    while heap:
        _, layer, higher = heapq.heappop(heap)
        before, bits[layer] = bits[layer], higher
        fits = work.bytes(bits) <= device.memory
        if fits and work.seconds(bits, device.share) <= allowed:
            offer(layer)
        else:
            bits[layer] = before
    return bits
