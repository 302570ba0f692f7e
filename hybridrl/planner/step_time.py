"""How long a step will last: each call from the rates of a device; `step_graph` puts all calls
together, along the placement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from hybridrl.compress.gradient_choice import Choice
from hybridrl.core.cluster import Cluster, DeviceModel, Host
from hybridrl.core.training_mesh import devices_of
from hybridrl.planner.dataflow import Call
from hybridrl.planner.gradient_sums import Links, chosen, units_of, ways
from hybridrl.planner.memory import MASTER, ModelPart, cache_bytes, generation_copy
from hybridrl.planner.step_graph import SteadySteps

if TYPE_CHECKING:
    from hybridrl.planner.planner import Planner

COMPUTE, BANDWIDTH, WIRE = 0.45, 0.7, 0.7
"""Of what the makers promise, the shares that training reaches in matrix products, and memory and
links in streaming; for machines that cannot be probed."""
HOST_LINK = 20e9
"""Bytes per second between an accelerator and its host, of what is offloaded."""
LAUNCH_OPS = 15
"""A layer's kernels are launched in so many small operations; a backward takes twice as many."""
TAKEN = ("forward_overhead", "training_overhead", "sums", "small_op")
"""Of the rates, those of which less is quicker."""
ADAM_TOUCHES = 10
"""Times that AdamW and the gradients' norm and scaling read or write an element."""
LOGIT_TOUCHES = 24
"""Times that an update reads or writes a logit; scoring does half as often."""
SMALL_OPS = {
    "call": 700,
    "sample": 7,
    "tensor": 7,
    "synced tensor": 200,
    "vllm step": 300,
    "vllm sample": 28,
    "transformers step": 40,
    "transformers layer": 260,
}
"""What costs no arithmetic, in small operations: a call of a group and a sample in it; a tensor
that the optimizer steps, or a sync brings to the generator; a token-step of a generator, and a
sample or a layer in it. Counted once, from the default job and one more; the probe says what a
small operation takes."""


@dataclass(frozen=True)
class Rates:
    """What one device does in a second, while all work.

    Attributes:
        forward, training: Floating-point operations in a layer's forward, or forward and backward.
        forward_overhead, training_overhead: Seconds of a layer that do not grow with its tokens.
        memory: Bytes of memory, read or written.
        link, network: Bytes from other devices of its node, and of other nodes, as a layer's
            parameters are gathered.
        sums: Times that a reduce-scatter takes of an all-gather of as much.
        small_op: Seconds of an operation on a handful of numbers, dispatched from Python.
        source: Where this is from.
    """

    forward: float
    training: float
    forward_overhead: float
    training_overhead: float
    memory: float
    link: float
    network: float
    sums: float
    small_op: float
    source: str

    @classmethod
    def known(cls, cluster: Cluster, dtype: str) -> list[Rates]:
        """Of each device of a cluster whose rates are known.

        Args:
            dtype: Name of the precision of computation.
        """
        made: dict[tuple[str, Host], Rates] = {}
        found = []
        for device in cluster.devices:
            key = device.model, cluster.hosts[device.node]
            if key not in made:
                made[key] = _known(cluster.models[device.model], key[1], dtype)
            found.append(made[key])
        return found

    @classmethod
    def of_slowest(cls, several: Iterable[Rates]) -> Rates:
        """Of devices that work together: each waits for the slowest of them."""
        found = set(several)
        if len(found) == 1:
            return found.pop()
        rates = {
            one.name: (max if one.name in TAKEN else min)(getattr(each, one.name) for each in found)
            for one in fields(cls)
        }
        return cls(**rates)


def _known(model: DeviceModel, host: Host, dtype: str) -> Rates:
    compute, bandwidth, wire, said = COMPUTE, BANDWIDTH, WIRE, "known rates"
    if model.measured:
        compute = bandwidth = wire = 1.0
        said = "measured rates"
    precision = "float32" if dtype == "float32" else "bfloat16"
    return Rates(
        forward=compute * model.flops[precision],
        training=compute * model.flops[precision],
        forward_overhead=LAUNCH_OPS * model.small_op,
        training_overhead=3 * LAUNCH_OPS * model.small_op,
        memory=bandwidth * model.bandwidth,
        link=wire * host.inside.bandwidth,
        network=wire * host.network.bandwidth,
        sums=1.0,
        small_op=model.small_op,
        source=f"{said}, of which {compute:.0%} in products, {bandwidth:.0%} of memory and "
        f"{wire:.0%} of links",
    )


@dataclass(frozen=True)
class Times:
    """Of one step.

    Attributes:
        calls: Each call of the step with its seconds.
        step: Seconds from one step's end to the next one's.
        idle: Shares of the time of all devices in which they do nothing, by what they wait for,
            the largest first.
        source: Where the rates are from.
        sums: How roles that learn sum the gradients of each unit (of the slowest stage).
    """

    calls: Sequence[tuple[Call, float]]
    step: float
    idle: Mapping[str, float]
    source: str
    sums: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def phases(self) -> Mapping[tuple[str, str], float]:
        """Seconds by role and phase."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for call, seconds in self.calls:
            found[call.role, call.phase] += seconds
        return dict(found)

    @property
    def idle_share(self) -> float:
        """Of the time of all devices, that in which they do nothing."""
        return sum(self.idle.values())

    @property
    def overlap(self) -> float:
        """Share of the work that is done beside other work."""
        together = sum(seconds for _, seconds in self.calls)
        return max(0.0, 1 - self.step / together) if together else 0.0


def estimate(planner: Planner, rates: Rates | Sequence[Rates]) -> Times:
    """The time of a step, and of its calls.

    Args:
        rates: Of every device, or of each.
    """
    each = rates if isinstance(rates, Sequence) else [rates] * len(planner.cluster.devices)
    devices = {role: place.devices for role, place in planner.placement.roles.items()}
    clocks = {
        role: CallClock(planner, Rates.of_slowest(each[device] for device in numbers))
        for role, numbers in devices.items()
    }
    calls = [(call, clocks[call.role].seconds(call)) for call in planner.calls]
    sums = {role: choice for clock in clocks.values() for role, choice in clock.sums.items()}
    staleness = planner.config.placement.staleness if planner.placement.is_separated else 0
    steps = SteadySteps(calls, devices, staleness)
    return Times(calls, steps.seconds, steps.idle, each[0].source, sums)


def simulate(
    calls: Sequence[tuple[Call, float]], devices: Mapping[str, Sequence[int]], staleness: int
) -> float:
    """Seconds between the ends of two steps; see `SteadySteps`."""
    return SteadySteps(calls, devices, staleness).seconds


class CallClock:
    """Seconds of the calls of a role, whose devices have these rates.

    Attributes:
        sums: See `Times`; known once the call is.
    """

    def __init__(self, planner: Planner, rates: Rates) -> None:
        self.sums: dict[str, Choice] = {}
        self.planner, self.rates = planner, rates
        self.devices = planner.cluster.devices

    def seconds(self, call: Call) -> float:
        """Of one call on its devices."""
        place = self.planner.placement.roles[call.role]
        rows = call.samples / len(place.devices)
        fixed = SMALL_OPS["call"] * call.updates + SMALL_OPS["sample"] * rows
        driver = fixed * self.rates.small_op
        if call.phase == "sync":
            return self._sync(call.role)
        if call.phase == "generate":
            return driver + self._generate(call)
        if not self.planner.has_model(call.role):
            return driver
        stages = range(place.parallel.pp)
        parts = [self.planner.part(call.role, stage) for stage in stages]
        work = self._train if call.phase == "train" else self._score
        slowest = max(work(call, part) for part in parts)
        batch = self.planner.batches[call.role, call.phase]
        bubble = (batch.count + len(stages) - 1) / batch.count
        moves = 0.0
        if self.planner.cluster.is_cuda and self.planner.config.actor.offload_between_calls:
            moves = 2 * max(sum(part.resident().values()) for part in parts) / HOST_LINK
        return driver + moves + slowest * bubble

    def _score(self, call: Call, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "score"]
        compute = self._layers(part, batch.count, batch.total, False)
        compute += self._head(part, batch.total, 2, LOGIT_TOUCHES / 2)
        moved = part.shape.item * part.parameters.all
        rounds = 1 if part.is_small else batch.count
        copies = 3 * rounds * moved / rates.memory
        return self._with_transfer(compute + copies, call.role, part, part.gathers(rounds, False))

    def _train(self, call: Call, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "train"]
        again = self.planner.config.actor.gradient_checkpointing in ("full", "offload")
        compute = self._layers(part, batch.count, batch.total, True)
        compute += self._layers(part, batch.count, batch.total, False) if again else 0.0
        compute += self._head(part, batch.total, 8, LOGIT_TOUCHES)
        gathers = batch.count * (1 if part.is_small else 2)
        reduces = 1 if part.is_small else batch.count
        gathered = gathers * part.shape.item * part.parameters.all
        received = part.gathers(gathers, True)
        reduced = reduces * MASTER * part.parameters.trained
        copies = (3 * gathered + 4 * reduced) / rates.memory
        step = ADAM_TOUCHES * MASTER * part.parameters.trained / part.shards / rates.memory
        step += SMALL_OPS["tensor"] * part.shape.tensors * part.layers * rates.small_op
        actor, is_cuda = self.planner.config.actor, self.planner.cluster.is_cuda
        if is_cuda and actor.offload_optimizer and not actor.offload_parameters:
            step += 2 * 2 * part.moment * part.parameters.trained / part.shards / HOST_LINK
        backward = compute * (1 / 2 if again else 2 / 3) / batch.count
        codec, link = self._sum(call.role, part, backward)
        coding, summing = reduces * codec, reduces * link
        one = self._with_transfer(
            compute + copies + coding, call.role, part, received, summing, coding
        )
        return call.updates * (one + step)

    def _sum(self, role: str, part: ModelPart, backward: float) -> tuple[float, float]:
        """Seconds of codecs and of the link, to sum all gradients once."""
        place = self.planner.placement.roles[role]
        row = part.shards * devices_of(replace(place.parallel, ring=1, ulysses=1))
        nodes = {self.devices[device].node for device in place.devices[:row]}
        rates, ring = self.rates, self._wire(place.devices)
        links = Links(rates.memory, rates.link, rates.network, ring, rates.sums)
        found = ways(links, part.device, part.shards, len(nodes))
        choice = chosen(place.parallel.gradients, part, found, backward)
        self.sums[role] = choice
        pairs = Counter(zip(units_of(part), choice.ways, strict=True)).items()
        return (
            sum(count * found[name].codec(values) for (values, name), count in pairs),
            sum(count * found[name].link(values) for (values, name), count in pairs),
        )

    def _layers(self, part: ModelPart, count: int, tokens: float, trains: bool) -> float:
        """All layers over all micro-batches: matrix products and attention."""
        rates, shape = self.rates, part.shape
        length = self.planner.sizes.sample_tokens
        passes = 3 if trains else 1
        # Two operations for each parameter, and causal attention over half of the sample.
        operations = 2 * shape.active_of_layer + 2 * length * shape.query
        overhead, rate = rates.forward_overhead, rates.forward
        if trains:
            overhead, rate = rates.training_overhead, rates.training
        return part.layers * (count * overhead + tokens * passes * operations / rate)

    def _head(self, part: ModelPart, tokens: float, operations: int, touches: float) -> float:
        """The output embedding: `operations` for each of its parameters and response tokens."""
        if not part.ends[1] or part.shape.vocabulary == 1:
            return 0.0
        shape, sizes = part.shape, self.planner.sizes
        tokens *= sizes.response_tokens / sizes.sample_tokens
        products = operations * tokens * shape.head.all / self.rates.forward
        return products + touches * MASTER * tokens * shape.vocabulary / self.rates.memory

    def _with_transfer(
        self,
        compute: float,
        role: str,
        part: ModelPart,
        size: float,
        summing: float = 0.0,
        coding: float = 0.0,
    ) -> float:
        """GPUs gather the next layer while they compute; CPUs have one thread for both.

        Args:
            summing: Seconds of the link besides.
            coding: Of the computation, what the link waits for.
        """
        place = self.planner.placement.roles[role]
        wire = self._wire(place.devices)
        moved = size * (1 - 1 / part.shards) / wire + summing
        tp = place.parallel.tp
        if tp > 1:  # two sums of the states in a layer's forward, two in its backward
            batch = self.planner.batches.get((role, "train")) or self.planner.batches[role, "score"]
            states = batch.total * part.shape.hidden * part.shape.item * part.layers
            compute += 4 * states * 2 * (1 - 1 / tp) / self.rates.link
        return max(compute, moved + coding) if self.planner.cluster.is_cuda else compute + moved

    def _wire(self, devices: Sequence[int]) -> float:
        """Bytes per second that each of these receives in a collective. Between nodes a ring goes
        through the network cards of all devices of a node, each with a part of the data."""
        nodes = [self.devices[device].node for device in devices]
        if len(set(nodes)) == 1:
            return self.rates.link
        return min(self.rates.link, self.rates.network * nodes.count(nodes[0]))

    def _sync(self, role: str) -> float:
        shape = self.planner.generation_shape(role)
        place = self.planner.placement.roles[role]
        copies = 4 * generation_copy(shape) / self.rates.memory
        small = SMALL_OPS["synced tensor"] * shape.tensors * shape.layers * self.rates.small_op
        return copies + small + self.planner.sync_bytes(role) / self._wire(place.devices)

    def _generate(self, call: Call) -> float:
        planner, rates = self.planner, self.rates
        rollout, sizes = planner.config.rollout, planner.sizes
        shape = planner.generation_shape(call.role)
        replicas = len(planner.placement.roles[call.role].devices) / planner.rollout_tp(call.role)
        rows = max(1.0, call.samples / replicas)
        running = min(rows, rollout.max_sequences)
        rounds = max(1.0, rows / running)
        steps = sizes.response_tokens
        kv = cache_bytes(shape, running * (sizes.prompt_tokens + steps / 2))
        operations = 2 * shape.active_of_layer * shape.layers
        head = 2 * running * shape.head.all / rates.forward
        head += 8 * MASTER * running * shape.vocabulary / rates.memory
        copy = generation_copy(shape, rollout.quantization) / rates.memory
        products = max(copy, operations * running / rates.forward)
        layers = shape.layers * rates.forward_overhead
        if rollout.engine == "vllm":
            layers = 0.0 if planner.cluster.is_cuda and rollout.cuda_graphs else layers
            small = SMALL_OPS["vllm step"] + SMALL_OPS["vllm sample"] * running
            prompts = rows / max(1, rollout.samples_per_prompt)
        else:  # its cache grows by copying
            small = SMALL_OPS["transformers step"] + running
            small += SMALL_OPS["transformers layer"] * shape.layers
            kv *= 3
            prompts = rows
        step = layers + products + head + kv / rates.memory + small * rates.small_op
        prefill = operations * prompts * sizes.prompt_tokens / rates.forward
        return rounds * steps * step + prefill
