"""The seconds that each call of a step lasts, from the rates of the devices of its role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.models.activation_checkpointing import OFFLOAD_CHECKPOINTING
from hybridrl.models.model_shape import ModelShape
from hybridrl.parallel.reduction_choice import ReductionChoice
from hybridrl.placement import GENERATOR_ROLE
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory.generation_memory import generation_copy_bytes, kv_cache_bytes
from hybridrl.planner.memory.model_part import FLOAT32_BYTES, ModelPart
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
from hybridrl.planner.step.step_calls import MicroBatchPlan, PlannedCall

if TYPE_CHECKING:
    from hybridrl.planner.job_roles import JobRoles

_HOST_MEMORY_RATE = 60e9
"""Bytes per second that the cores of an accelerator's share of its host read and write; seen with
16 cores beside an H100, which step AdamW for 600 million parameters in 0.4 s."""
_SUM_MEMORY_PASSES = 3
"""Times that adding a gradient to another one in the host's memory reads or writes an element."""
_COMPILED_LAUNCHES = 0.375
"""Of the time in which the kernels of a layer are launched, what is left of it when torch has
compiled the layer; seen on an H100."""
RUNNING_SAMPLES_FACTOR = 2 * math.log(2)
"""How many times as many samples as are not finished `rollout=transformers` has under way, where
they finish one after the other: it drops those that are when they are half of all."""
_ADAM_MEMORY_PASSES = 10
"""Times that AdamW and the gradients' norm and scaling read or write an element."""
_LOGIT_MEMORY_PASSES = 24
"""Times that an update reads or writes a logit; scoring does half as often."""
_CPU_COUNTS: Mapping[str, float] = {
    "call": 700,
    "sample": 7,
    "tensor": 7,
    "synced tensor": 200,
    "synced part": 0,
    "vllm step": 300,
    "vllm sample": 28,
    "transformers step": 40,
    "transformers layer": 260,
}
_GPU_COUNTS = {
    **_CPU_COUNTS,
    "synced tensor": 4,
    "synced part": 2,
    "vllm step": 100,
    "vllm sample": 1.5,
    "vllm layer": 15,
    "transformers layer": 80,
}
SMALL_OP_COUNTS = {"cpu": _CPU_COUNTS, "cuda": _GPU_COUNTS}
"""What costs no arithmetic, in small operations: a call of a group and a sample in it; a tensor
that the optimizer steps, or that a sync brings to the generator, and each part of it that another
rank has; a token-step of a generator, and a sample or a layer in it. Counted once, on CPUs from
the default job and one more, on an H100 from a sync and from `rollout=transformers`, of parts from
copies by `BoxTable`; vLLM's on GPUs are estimates. The probe says what a small operation takes."""


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
        self.counts = SMALL_OP_COUNTS[planner.cluster.kind]

    def seconds(self, call: PlannedCall) -> float:
        """Estimate the seconds of one call on its devices."""
        place = self.planner.placement.roles[call.role]
        rows = call.samples / len(place.devices)
        fixed = self.counts["call"] * call.updates + self.counts["sample"] * rows
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
            moves = 2 * max(sum(part.resident().values()) for part in parts) / self.rates.host_link
        return driver + moves + slowest * bubble

    def _score(self, call: PlannedCall, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "score"]
        compute = self._layers(part, batch, False)
        compute += self._head(part, batch, 2, _LOGIT_MEMORY_PASSES / 2)
        moved = part.shape.item * part.parameters.all
        rounds = 1 if part.is_small else batch.count
        copies = 3 * rounds * moved / rates.memory
        received = part.gathers(rounds, False)
        return self._with_transfer(compute + copies, call, part, received, rounds)

    def _train(self, call: PlannedCall, part: ModelPart) -> float:
        rates, batch = self.rates, self.planner.batches[call.role, "train"]
        again = part.repeated
        compute = self._layers(part, batch, True)
        repeated = self._layers(part, batch, False, attends=again == 1.0)
        compute += again * repeated
        # Logits are made twice; gradients of states always, those of a frozen head are not.
        operations = 6 + 2 * part.shape.head.trained / part.shape.head.all
        compute += self._head(part, batch, operations, _LOGIT_MEMORY_PASSES)
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
        if part.checkpointing == OFFLOAD_CHECKPOINTING and self.planner.cluster.is_cuda:
            # To the host and back, by the stream that computes.
            states = batch.total * part.shape.hidden * part.shape.item * part.layers
            compute += 2 * states / rates.host_link
        if part.offload_parameters:
            # Gradients go to the host while nothing else runs, and are added and stepped there.
            step = _ADAM_MEMORY_PASSES * FLOAT32_BYTES * elements / _HOST_MEMORY_RATE
            added = (reduces - 1) * _SUM_MEMORY_PASSES / _HOST_MEMORY_RATE
            step += FLOAT32_BYTES * elements * (reduces / rates.host_link + added)
        if part.offload_optimizer:
            step += 2 * 2 * part.moment * elements / rates.host_link
        step += self.counts["tensor"] * part.shape.tensors * part.layers * rates.small_op
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
        self, part: ModelPart, batch: MicroBatchPlan, trains: bool, attends: bool = True
    ) -> float:
        """Return the seconds of all layers over all micro-batches: matrix products and, if it
        `attends`, attention."""
        rates, shape, count, tokens = self.rates, part.shape, batch.count, batch.total
        length = batch.length if attends else 0.0
        # Two operations for each parameter, and causal attention over half of the sample.
        products, attention = 2 * shape.active_of_layer, 2 * length * shape.query
        operations = float(products + attention)
        overhead, rate = rates.forward_overhead, rates.forward
        if trains:  # parameters that are frozen have no gradients
            frozen = 1 - shape.layer.trained / max(1, shape.layer.all)
            operations = 3 * operations - frozen * products
            overhead, rate = rates.training_overhead, rates.training
        if rates.costs is not None:
            work = _layer(TRAIN if trains else FORWARD, shape, tokens / count, length)
            share = operations / (3 if trains else 1) / (products + attention)
            return part.layers * count * share * rates.costs.seconds(work)
        overhead *= _COMPILED_LAUNCHES if part.compiled else 1.0
        return part.layers * (count * overhead + tokens * operations / rate)

    def _head(
        self, part: ModelPart, batch: MicroBatchPlan, operations: float, touches: float
    ) -> float:
        """Return the seconds of the output embedding, with `operations` for each of its parameters
        and response tokens."""
        if not part.ends[1] or part.shape.vocabulary == 1:
            return 0.0
        shape, tokens = part.shape, batch.total * batch.response_share
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
        if tp > 1:  # two sums of the states in each forward of a layer, two in its backward
            batch = self.planner.batches[call.role, call.phase]
            states = batch.total * part.shape.hidden * part.shape.item * part.layers
            sums = 2 if call.phase == "score" else 4 + 2 * part.repeated
            compute += sums * self._tensor_sum(states, tp, batch.count * part.layers)
        if not self.planner.cluster.is_cuda:
            return compute + moved
        brought = part.offload_parameters * rounds * part.shard_bytes / self.rates.host_link
        return max(compute, moved + coding, brought)

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
        parts = 1 if role == GENERATOR_ROLE else self.planner.part(role, 0).shards
        small = (self.counts["synced tensor"] + parts * self.counts["synced part"]) * shape.tensors
        small *= shape.layers * self.rates.small_op
        return copies + small + self.planner.sync_bytes(role) / self._wire(place.devices)

    def _generate(self, call: PlannedCall) -> float:
        planner, rates = self.planner, self.rates
        rollout, sizes = planner.config.rollout, planner.sizes
        shape = planner.generation_shape(call.role)
        replicas = len(planner.placement.roles[call.role].devices) / planner.rollout_tp(call.role)
        rows = max(1.0, call.samples / replicas)
        at_once, again = self._samples_at_once(call.role, shape, rows)
        steps, running = self._decoding(rows, at_once)
        length = sizes.prompt_tokens + sizes.longest_response / 2
        kv = kv_cache_bytes(shape, running * length, rollout.kv_cache)
        operations = 2 * shape.active_of_layer * shape.layers
        head = 2 * running * shape.head.all / rates.forward
        head += 8 * FLOAT32_BYTES * running * shape.vocabulary / rates.memory
        copy = generation_copy_bytes(shape, rollout.quantization) / rates.memory
        products = max(copy, operations * running / rates.forward)
        # On GPUs a graph launches all kernels of a step, or the counts have their launches.
        layers = 0.0 if planner.cluster.is_cuda else shape.layers * rates.forward_overhead
        if rates.costs is not None:
            work = _layer(DECODE, shape, running, length)
            products, layers, kv = shape.layers * rates.costs.seconds(work), 0.0, 0.0
        if rollout.engine == "vllm":
            small = self.counts["vllm step"] + self.counts["vllm sample"] * running
            if planner.cluster.is_cuda and not rollout.cuda_graphs:
                small += self.counts["vllm layer"] * shape.layers
            prompts = rows / max(1, rollout.samples_per_prompt)
        else:  # its cache grows by copying
            small = self.counts["transformers step"] + running
            small += self.counts["transformers layer"] * shape.layers
            kv *= 3
            prompts = rows
        step = layers + products + head + kv / rates.memory
        small *= rates.small_op
        tp = planner.rollout_tp(call.role)
        if tp > 1:  # a layer sums twice
            states = 2 * shape.layers * running * shape.hidden * shape.item
            step += self._tensor_sum(states, tp, 2 * shape.layers)
        # vLLM prepares a step while the device is at the one before, where it may.
        ahead = rollout.engine_options.get(
            "async_scheduling", not planner.config.placement.in_flight
        )
        hides = ahead and rollout.engine == "vllm" and planner.cluster.is_cuda
        step = max(step, small) if hides else step + small
        prefill = operations * (prompts * sizes.prompt_tokens + again) / rates.forward
        if rates.costs is not None:
            tokens = at_once * sizes.prompt_tokens
            first = rates.costs.seconds(_layer(FORWARD, shape, tokens, sizes.prompt_tokens))
            prefill = shape.layers * first * (prompts + again / sizes.prompt_tokens) / at_once
        return steps * step + prefill

    def _samples_at_once(self, role: str, shape: ModelShape, rows: float) -> tuple[float, float]:
        """Return the samples of a replica that run at a time, and the tokens that are read again.

        vLLM begins as many as it may, and they grow together: those that its cache cannot hold to
        their end are preempted, half grown in the mean, and begin again with what they have.
        """
        planner, sizes, rollout = self.planner, self.planner.sizes, self.planner.config.rollout
        begun = min(rows, rollout.max_sequences)
        sample = kv_cache_bytes(shape, sizes.sample_tokens, rollout.kv_cache)
        if rollout.engine != "vllm" or not sample:
            return begun, 0.0
        devices = planner.placement.roles[role].devices
        memory = min(map(planner.cluster.memory_of, devices)) if planner.sleeps else 0.0
        at_once = min(begun, max(1.0, planner.cache_bytes(role, memory) / sample))
        grown = sizes.prompt_tokens + sizes.response_tokens / 2
        return at_once, (begun - at_once) * grown

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
