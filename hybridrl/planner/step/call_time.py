"""The seconds that each call of a step lasts, from the rates of the devices of its role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.models.model_shape import ModelShape
from hybridrl.parallel.reduction_choice import ReductionChoice
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.model_part import (
    FLOAT32_BYTES,
    ModelPart,
    generation_copy_bytes,
    kv_cache_bytes,
)
from hybridrl.planner.step.gradient_sums import (
    choose_gradient_sums,
    list_sum_candidates,
    list_unit_sizes,
)
from hybridrl.planner.step.operator_work import (
    DECODE,
    FORWARD,
    HEAD,
    HEAD_TRAIN,
    OPTIMIZER,
    TRAIN,
    OperatorWork,
)
from hybridrl.planner.step.step_calls import PlannedCall

if TYPE_CHECKING:
    from hybridrl.planner.job_roles import JobRoles

_HOST_LINK_RATE = 20e9
"""Bytes per second between an accelerator and its host, of what is offloaded."""
RUNNING_SAMPLES_FACTOR = 2 * math.log(2)
"""How many times as many samples as are not finished `rollout=transformers` has under way, where
they finish one after the other: it drops those that are when they are half of all."""
_ADAM_MEMORY_PASSES = 10
"""Times that AdamW and the gradients' norm and scaling read or write an element."""
_REPEATED_SHARES = {"block": 0.65, "full": 1.0, "offload": 1.0}
"""Of a forward's matrix products, those that the backward repeats with a value of
`actor.gradient_checkpointing`: with `block` all that come before a layer's last product, and no
attention (counted in compiled layers of Qwen3's shape)."""
_LOGIT_MEMORY_PASSES = 24
"""Times that an update reads or writes a logit; scoring does half as often."""
SMALL_OP_COUNTS = {
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


class RingCost(NamedTuple):
    """The rate and delay of a ring collective over ranks that may lie on several nodes.

    Attributes:
        rate: Bytes per second that each rank receives.
        delay: Seconds of going round, whatever the size.
    """

    rate: float
    delay: float


class CallTimeEstimator:
    """An estimator of the seconds that calls of a role take on devices with these rates.

    Attributes:
        sums: See `Times`; known once the call is.
    """

    def __init__(self, planner: JobRoles, rates: DeviceRates) -> None:
        self.sums: dict[str, ReductionChoice] = {}
        self.planner, self.rates = planner, rates
        self.devices = planner.cluster.devices

    def seconds(self, call: PlannedCall) -> float:
        """Estimate the seconds of one call on its devices."""
        place = self.planner.placement.roles[call.role]
        rows = call.samples / len(place.devices)
        fixed = SMALL_OP_COUNTS["call"] * call.updates + SMALL_OP_COUNTS["sample"] * rows
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
            moves = 2 * max(sum(part.resident().values()) for part in parts) / _HOST_LINK_RATE
        return driver + moves + slowest * bubble

    def _score(self, call: PlannedCall, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "score"]
        compute = self._layers(part, batch.count, batch.total, False)
        compute += self._head(part, batch.total, 2, _LOGIT_MEMORY_PASSES / 2)
        moved = part.shape.item * part.parameters.all
        rounds = 1 if part.is_small else batch.count
        copies = 3 * rounds * moved / rates.memory
        received = part.gathers(rounds, False)
        return self._with_transfer(compute + copies, call, part, received, rounds)

    def _train(self, call: PlannedCall, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "train"]
        again = _REPEATED_SHARES.get(self.planner.config.actor.gradient_checkpointing, 0.0)
        compute = self._layers(part, batch.count, batch.total, True)
        repeated = self._layers(part, batch.count, batch.total, False, attends=again == 1.0)
        compute += again * repeated
        compute += self._head(part, batch.total, 8, _LOGIT_MEMORY_PASSES)
        gathers = batch.count * (1 if part.is_small else 2)
        reduces = 1 if part.is_small else batch.count
        gathered = gathers * part.shape.item * part.parameters.all
        received = part.gathers(gathers, True)
        reduced = reduces * FLOAT32_BYTES * part.parameters.trained
        copies = (3 * gathered + 4 * reduced) / rates.memory
        elements = part.parameters.trained / part.shards
        step = _ADAM_MEMORY_PASSES * FLOAT32_BYTES * elements / rates.memory
        if rates.costs is not None and elements:
            step = rates.costs.seconds(OperatorWork(OPTIMIZER, elements))
        step += SMALL_OP_COUNTS["tensor"] * part.shape.tensors * part.layers * rates.small_op
        actor, is_cuda = self.planner.config.actor, self.planner.cluster.is_cuda
        if is_cuda and actor.offload_optimizer and not actor.offload_parameters:
            step += 2 * 2 * part.moment * part.parameters.trained / part.shards / _HOST_LINK_RATE
        backward = compute * 2 / (3 + again) / batch.count
        codec, link = self._sum(call.role, part, backward)
        coding, summing = reduces * codec, reduces * (link + self._between_copies(call.role, part))
        compute += copies + coding
        one = self._with_transfer(compute, call, part, received, gathers, summing, coding)
        return call.updates * (one + step)

    def _sum(self, role: str, part: ModelPart, backward: float) -> tuple[float, float]:
        """Return the seconds of codecs and of the link for summing all gradients once."""
        place = self.planner.placement.roles[role]
        row = part.shards * model_parallel_size(replace(place.parallel, ring=1, ulysses=1))
        nodes = {self.devices[device].node for device in place.devices[:row]}
        rates, ring = self.rates, self._ring(role, part.shards)
        found = list_sum_candidates(rates, ring.rate, part.device, part.shards, len(nodes))
        choice = choose_gradient_sums(place.parallel.gradients, part, found, backward)
        self.sums[role] = choice
        pairs = Counter(zip(list_unit_sizes(part), choice.ways, strict=True)).items()
        return (
            sum(count * found[name].codec(values) for (values, name), count in pairs),
            sum(count * (found[name].link(values) + ring.delay) for (values, name), count in pairs),
        )

    def _between_copies(self, role: str, part: ModelPart) -> float:
        """Return the seconds of summing gradients over ranks that hold the same shards
        (`parallel.shards`)."""
        place = self.planner.placement.roles[role]
        cut = part.shards * place.parallel.tp * place.parallel.pp
        if (copies := len(place.devices) // cut) == 1:
            return 0.0
        ring, units = self._ring(role, copies, part.shards), list_unit_sizes(part)
        moved = 2 * (1 - 1 / copies) * part.summed * sum(units) / part.shards
        return moved / ring.rate + 2 * len(units) * ring.delay

    def _layers(
        self, part: ModelPart, count: int, tokens: float, trains: bool, attends: bool = True
    ) -> float:
        """Return the seconds of all layers over all micro-batches: matrix products and, if it
        `attends`, attention."""
        rates, shape = self.rates, part.shape
        length = self.planner.sizes.sample_tokens if attends else 0.0
        if rates.costs is not None:
            work = _layer(TRAIN if trains else FORWARD, shape, tokens / count, length)
            return part.layers * count * rates.costs.seconds(work)
        passes = 3 if trains else 1
        # Two operations for each parameter, and causal attention over half of the sample.
        operations = 2 * shape.active_of_layer + 2 * length * shape.query
        overhead, rate = rates.forward_overhead, rates.forward
        if trains:
            overhead, rate = rates.training_overhead, rates.training
        return part.layers * (count * overhead + tokens * passes * operations / rate)

    def _head(self, part: ModelPart, tokens: float, operations: int, touches: float) -> float:
        """Return the seconds of the output embedding, with `operations` for each of its parameters
        and response tokens."""
        if not part.ends[1] or part.shape.vocabulary == 1:
            return 0.0
        shape, sizes = part.shape, self.planner.sizes
        tokens *= sizes.response_tokens / sizes.sample_tokens
        if self.rates.costs is not None:
            op = HEAD if operations == 2 else HEAD_TRAIN
            parameters = float(shape.head.all)
            work = OperatorWork(op, tokens, 1.0, shape.hidden, parameters, item=shape.item)
            return self.rates.costs.seconds(work)
        products = operations * tokens * shape.head.all / self.rates.forward
        return products + touches * FLOAT32_BYTES * tokens * shape.vocabulary / self.rates.memory

    def _with_transfer(
        self,
        compute: float,
        call: PlannedCall,
        part: ModelPart,
        size: float,
        rounds: int,
        summing: float = 0.0,
        coding: float = 0.0,
    ) -> float:
        """Combine computation and gathering: GPUs gather the next layer while they compute, CPUs
        have one thread for both.

        Args:
            size: Bytes that are gathered.
            rounds: Times that each unit is.
            summing: Seconds of the link besides.
            coding: Of the computation, what the link waits for.
        """
        ring, units = self._ring(call.role, part.shards), 1 if part.is_small else part.layers + 1
        moved = size * (1 - 1 / part.shards) / ring.rate + rounds * units * ring.delay + summing
        tp = self.planner.placement.roles[call.role].parallel.tp
        if tp > 1:  # two sums of the states in a layer's forward, two in its backward
            batch = self.planner.batches[call.role, call.phase]
            states = batch.total * part.shape.hidden * part.shape.item * part.layers
            sums = 4 if call.phase == "train" else 2
            compute += sums * self._tensor_sum(states, tp, batch.count * part.layers)
        return max(compute, moved + coding) if self.planner.cluster.is_cuda else compute + moved

    def _tensor_sum(self, size: float, tp: int, times: float) -> float:
        """Return the seconds of `times` sums over a tensor-parallel group, of `size` bytes in all;
        inside a node they go down and up a tree."""
        hops = 2 * math.ceil(math.log2(tp))
        return 2 * (1 - 1 / tp) * size / self.rates.link + times * hops * self.rates.hop

    def _ring(self, role: str, ranks: int, apart: int = 1) -> RingCost:
        """Return the ring cost of ranks that hold the same tensor-parallel and pipeline part of a
        model.

        Args:
            apart: Of ranks that are counted without such cuts, from each to the next.
        """
        place, rates = self.planner.placement.roles[role], self.rates
        stride = apart * place.parallel.tp * place.parallel.pp
        nodes = [self.devices[device].node for device in place.devices[: ranks * stride]]
        if len(set(nodes)) == 1:
            return RingCost(rates.link, (ranks - 1) * rates.hop)
        near = max(1, nodes.count(nodes[0]) // stride)
        far = math.ceil(ranks / near)
        delay = (ranks - far) * rates.hop + far * rates.network_hop
        return RingCost(min(rates.link, rates.network * near), delay)

    def _wire(self, devices: Sequence[int]) -> float:
        """Return the bytes per second that each of these devices receives in a weight sync in which
        all take part."""
        nodes = [self.devices[device].node for device in devices]
        if len(set(nodes)) == 1:
            return self.rates.link
        return min(self.rates.link, self.rates.network * nodes.count(nodes[0]))

    def _sync(self, role: str) -> float:
        shape = self.planner.generation_shape(role)
        place = self.planner.placement.roles[role]
        copies = 4 * generation_copy_bytes(shape) / self.rates.memory
        small = (
            SMALL_OP_COUNTS["synced tensor"] * shape.tensors * shape.layers * self.rates.small_op
        )
        return copies + small + self.planner.sync_bytes(role) / self._wire(place.devices)

    def _generate(self, call: PlannedCall) -> float:
        planner, rates = self.planner, self.rates
        rollout, sizes = planner.config.rollout, planner.sizes
        shape = planner.generation_shape(call.role)
        replicas = len(planner.placement.roles[call.role].devices) / planner.rollout_tp(call.role)
        rows = max(1.0, call.samples / replicas)
        at_once = min(rows, rollout.max_sequences)
        steps, running = self._decoding(rows, at_once)
        length = sizes.prompt_tokens + sizes.longest_response / 2
        kv = kv_cache_bytes(shape, running * length)
        operations = 2 * shape.active_of_layer * shape.layers
        head = 2 * running * shape.head.all / rates.forward
        head += 8 * FLOAT32_BYTES * running * shape.vocabulary / rates.memory
        copy = generation_copy_bytes(shape, rollout.quantization) / rates.memory
        products = max(copy, operations * running / rates.forward)
        layers = shape.layers * rates.forward_overhead
        if rates.costs is not None:
            work = _layer(DECODE, shape, running, length)
            products, layers, kv = shape.layers * rates.costs.seconds(work), 0.0, 0.0
        if rollout.engine == "vllm":
            layers = 0.0 if planner.cluster.is_cuda and rollout.cuda_graphs else layers
            small = SMALL_OP_COUNTS["vllm step"] + SMALL_OP_COUNTS["vllm sample"] * running
            prompts = rows / max(1, rollout.samples_per_prompt)
        else:  # its cache grows by copying
            small = SMALL_OP_COUNTS["transformers step"] + running
            small += SMALL_OP_COUNTS["transformers layer"] * shape.layers
            kv *= 3
            prompts = rows
        step = layers + products + head + kv / rates.memory + small * rates.small_op
        tp = planner.rollout_tp(call.role)
        if tp > 1:  # a layer sums twice
            states = 2 * shape.layers * running * shape.hidden * shape.item
            step += self._tensor_sum(states, tp, 2 * shape.layers)
        prefill = operations * prompts * sizes.prompt_tokens / rates.forward
        if rates.costs is not None:
            tokens = at_once * sizes.prompt_tokens
            first = rates.costs.seconds(_layer(FORWARD, shape, tokens, sizes.prompt_tokens))
            prefill = shape.layers * first * prompts / at_once
        return steps * step + prefill

    def _decoding(self, rows: float, at_once: float) -> tuple[float, float]:
        """Return the decode steps of a replica, and the mean number of samples that run in them;
        all wait for the longest response.

        Args:
            rows: That it generates, of which so many can be under way.
        """
        sizes, rounds = self.planner.sizes, max(1.0, rows / at_once)
        if self.planner.config.rollout.engine == "vllm":  # whose places are filled again at once
            steps = rounds * sizes.response_tokens + sizes.longest_response - sizes.response_tokens
            return steps, rows * sizes.response_tokens / steps
        share = sizes.response_tokens / sizes.longest_response
        return rounds * sizes.longest_response, at_once * min(1.0, RUNNING_SAMPLES_FACTOR * share)


def _layer(op: str, shape: ModelShape, tokens: float, length: float) -> OperatorWork:
    return OperatorWork(
        *(op, max(1.0, tokens), max(1.0, length), shape.hidden, shape.active_of_layer),
        *(shape.query, shape.key_value, shape.item),
    )
