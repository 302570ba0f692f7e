"""The choice of a reduction method for the gradients of each unit, by predicted cost.

A model's backward gives the gradients of one unit (what FSDP gathers together) after the other, and
each unit's are summed over the ranks as soon as they are there. A way to sum them has up to two
hops; what a hop encodes takes time of the device, what it sends takes time of a link. What of it
overlaps with what is a property of the device, and `predict_backward_seconds` is the timeline that
follows. On GPUs sums go on beside the backward, on a stream of their own: encoding, sending and
decoding follow each other on it, and the backward waits where it would begin the next sum. That
codecs take the whole device while they run is the careful assumption: they are limited by memory,
as much of a backward is, and have not been measured beside one. On CPUs torch's hooks, our codecs
and gloo's synchronous collectives share the backward's thread, and nothing overlaps, whatever a
link could do meanwhile.

After Espresso (ByteComp), arXiv 2205.14465, which has every tensor's gradients go at any time and
searches: a tensor's compression there moves the communication of all later ones. FSDP2 starts no
sum before the one before is done and lets the backward wait for it (`post_backward` in
torch.distributed.fsdp), so between two sums lies a time that only the earlier one's way has a part
in. The best way for each unit alone is then the best for all together, and nothing is searched.
Where a sum ends before the next gradients are there (a bubble), encoding cannot help, and `full` is
kept.

Plain data in and out; nothing here knows of tensors or process groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridrl.system.measured_choice import quickest

FULL_REDUCTION = "full"
"""torch's own sum in float32: what every choice is compared with."""
_MIN_SAVING = 0.02
"""The share of a sum's time that a way has to save over one that stands before it."""


@dataclass(frozen=True)
class CostCurve:
    """A piecewise linear cost in seconds by number of values, extrapolated beyond the last two
    points.

    Args:
        points: (values, seconds), rising in values; at least two.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, values: float) -> float:
        """Return the seconds for this many values, at least 0."""
        last = len(self.points) - 2
        segments = enumerate(pairwise(self.points))
        (x, y), (further, later) = next(
            pair for number, pair in segments if number == last or values <= pair[1][0]
        )
        return max(y + (values - x) * (later - y) / (further - x), 0.0)


ZERO_COST = CostCurve(((0.0, 0.0), (1.0, 0.0)))


@dataclass(frozen=True)
class HopCost:
    """The cost of one hop of a reduction method.

    Attributes:
        share: Of a unit's values, those that enter this hop on a rank.
        codec: What encoding and decoding takes, by values that enter.
        link: What sending takes, by values that enter.
    """

    share: float
    codec: CostCurve
    link: CostCurve


@dataclass(frozen=True)
class MethodCost:
    """The predicted cost of a reduction method.

    Attributes:
        name: `full`, or the codecs of its hops.
        parts: Its hops.
    """

    name: str
    parts: tuple[HopCost, ...]

    def codec(self, values: float) -> float:
        """Return the seconds of encoding and decoding a unit of this many values."""
        return sum(part.codec(part.share * values) for part in self.parts)

    def link(self, values: float) -> float:
        """Return the seconds of sending them."""
        return sum(part.link(part.share * values) for part in self.parts)


@dataclass(frozen=True)
class GradientBucket:
    """A unit's gradients: their number, and when the backward has computed them.

    Attributes:
        values: How many, whole.
        ready: Seconds of computation from the backward's begin until they are there.
    """

    values: int
    ready: float = 0.0


@dataclass(frozen=True)
class ReductionChoice:
    """The chosen reduction methods and their predicted seconds.

    Attributes:
        ways: The name of each bucket's way.
        seconds: Of backward and sums, as far as buckets say when they are ready.
        full_seconds: The same with `full` for all.
        with_backward: Whether buckets do.
    """

    ways: tuple[str, ...]
    seconds: float
    full_seconds: float
    with_backward: bool = False

    @property
    def of_full(self) -> float:
        """The predicted share of the time of `full`."""
        return self.seconds / self.full_seconds if self.full_seconds else 1.0

    def sentence(self) -> str:
        """Format the choice for users: `int8 for 7 of 10 units, full for 3: sums are expected to
        take 0.31 of the time of full`."""
        counts, total = Counter(self.ways), len(self.ways)
        (first, number), *others = counts.most_common()
        said = [f"{first} for {number} of {total} unit{'s' if total > 1 else ''}"]
        said += [f"{name} for {number}" for name, number in others]
        if set(counts) == {FULL_REDUCTION}:
            return f"{said[0]}, because nothing else is expected to be quicker"
        what = "backward and sums" if self.with_backward else "sums"
        return (
            f"{', '.join(said)}: {what} are expected to take {self.of_full:.2g} of the time of full"
        )


def predict_backward_seconds(
    buckets: Sequence[GradientBucket], ways: Sequence[MethodCost], beside: bool
) -> float:
    """Predict the seconds from the start of a backward until all its gradients are reduced.

    Args:
        buckets: In the order in which they are ready.
        ways: Of each bucket.
        beside: Sums go on beside the backward.
    """
    backward = summed = before = lost = 0.0
    taken: dict[tuple[int, float], tuple[float, float]] = {}  # most buckets are alike
    for bucket, way in zip(buckets, ways, strict=True):
        key = id(way), bucket.values
        if key not in taken:
            taken[key] = way.codec(bucket.values), way.link(bucket.values)
        codec, link = taken[key]
        backward += bucket.ready - before + lost
        before = bucket.ready
        if beside:
            backward = max(backward, summed)
            summed = backward + codec + link
            lost = codec
        else:
            summed = backward = backward + codec + link
    return max(backward, summed)


def choose_methods(
    buckets: Sequence[GradientBucket], ways: Sequence[MethodCost], beside: bool
) -> ReductionChoice:
    """Choose the method of each bucket that makes the backward shortest; a method replaces an
    earlier one only if it saves at least the share `_MIN_SAVING`.

    Args:
        buckets: In the order in which they are ready.
        ways: What may be chosen, `full` among them; where two are alike the first is taken, so
            what loses nothing is to stand first.
        beside: Sums go on beside the backward.
    """
    by_name = {way.name: way for way in ways}
    found = []
    for number, bucket in enumerate(buckets):
        is_last = number == len(buckets) - 1
        gap = 0.0 if is_last else buckets[number + 1].ready - bucket.ready
        alone = {way.name: _seconds_alone(bucket, way, gap, is_last, beside) for way in ways}
        found.append(by_name[quickest(alone, _MIN_SAVING)])
    full = [by_name[FULL_REDUCTION]] * len(buckets)
    return ReductionChoice(
        tuple(way.name for way in found),
        predict_backward_seconds(buckets, found, beside),
        predict_backward_seconds(buckets, full, beside),
        with_backward=any(bucket.ready for bucket in buckets),
    )


def _seconds_alone(
    bucket: GradientBucket, way: MethodCost, gap: float, is_last: bool, beside: bool
) -> float:
    """Return the seconds from the start of a bucket's reduction to the start of the next, or to the
    end."""
    codec, link = way.codec(bucket.values), way.link(bucket.values)
    if is_last or not beside:
        return codec + link
    return max(gap + codec, codec + link)
