"""Bytes that a role takes of one device: what stays there, and what each phase adds at its fullest
moment.

A model that is trained lies in float32 shards, with Adam's two moments beside them; one that only
scores, in the precision of computation. FSDP gathers a unit (a layer, the embedding, the head, or
the whole of a small model) in that precision, and sums its gradients in float32 or bfloat16.
`hybridrl.parallel.fsdp` and `hybridrl.engine.train_engine` do what is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.models.activation_checkpointing import (
    BLOCK_CHECKPOINTING,
    FULL_CHECKPOINTING,
    NO_CHECKPOINTING,
    OFFLOAD_CHECKPOINTING,
    SELECTIVE_CHECKPOINTING,
)
from hybridrl.models.log_probs import vocabulary_block_size
from hybridrl.models.model_shape import ModelShape, ParameterCounts
from hybridrl.parallel.compressed_collectives import DIFFERENCE_CODEC
from hybridrl.planner.step.step_calls import MicroBatchPlan
from hybridrl.quantization.nf4_base import NF4_BYTES
from hybridrl.system.device_traits import (
    SMALL_MODEL_BYTES,
    has_mm_out_dtype,
    has_varlen_attention,
    logits_per_chunk,
    round_pinned_bytes,
)

FLOAT32_BYTES = 4
"""Bytes of float32: parameters, their summed gradients and each of Adam's two moments."""
_LOGIT_CHUNKS = 2
"""Chunks of float32 logits that live at once in `token_log_probs`, forward or backward; with its
Triton kernels one and a half at most."""
_REPEATED_SHARES = {BLOCK_CHECKPOINTING: 0.65, FULL_CHECKPOINTING: 1.0, OFFLOAD_CHECKPOINTING: 1.0}
"""Of a forward's matrix products, those that the backward repeats with a value of
`actor.gradient_checkpointing`: with `block` all that come before a layer's last product, and no
attention (counted in compiled layers of Qwen3's shape)."""

_NO_PARAMETERS = ParameterCounts(0, 0)

MemoryParts = dict[str, float]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class ModelPart:
    """The part of a role's model that one device holds.

    Attributes:
        shape: Of its tensor-parallel part.
        layers: How many it has.
        ends: Whether it has the input embedding, and whether it has the output.
        shards: Devices that share its parameters.
        micro_batches_held: Forwards that wait for their backward in a pipeline.
        trains: Whether it learns.
        device: Kind of the device.
        offload_parameters, offload_optimizer: See `ActorConfig`.
        moment: Bytes that the optimizer remembers of a parameter, halved: of AdamW an element of a
            moment.
        restores: Moments rest in another precision than that of a step.
        gathered_by_step: See `count_gathered_bytes`.
        summed: Bytes of an element of a gradient while it is summed over ranks.
        by_difference: Weights are gathered as differences (`ParallelConfig.weights`).
        compiled: Its layers are compiled (`ActorConfig.compile`).
        checkpointing: See `ActorConfig.gradient_checkpointing`.
    """

    shape: ModelShape
    layers: int
    ends: tuple[bool, bool]
    shards: int
    micro_batches_held: int
    trains: bool
    device: str
    offload_parameters: bool
    offload_optimizer: bool
    moment: float = FLOAT32_BYTES
    restores: bool = False
    gathered_by_step: float = 0.0
    summed: int = FLOAT32_BYTES
    by_difference: bool = False
    compiled: bool = False
    checkpointing: str = NO_CHECKPOINTING

    @property
    def around(self) -> ParameterCounts:
        """Return the parameters outside of the layers."""
        shape, (first, last) = self.shape, self.ends
        found = _NO_PARAMETERS
        if first or (last and shape.tied):
            found += shape.embedding
        if last:
            found += shape.norm
            found += _NO_PARAMETERS if shape.tied else shape.head
        return found

    @property
    def root(self) -> ParameterCounts:
        """Return those parameters outside of the layers that stay gathered from their first use to
        their last."""
        if self.shape.tied:
            return self.around
        return self.shape.norm if self.ends[1] else _NO_PARAMETERS

    @property
    def head(self) -> ParameterCounts:
        """Return the parameters of the output embedding where it is a unit of its own."""
        return self.shape.head if self.ends[1] and not self.shape.tied else _NO_PARAMETERS

    @property
    def parameters(self) -> ParameterCounts:
        """Return the parameters of this part before sharding."""
        return self.layer.times(self.layers) + self.around

    @property
    def layer(self) -> ParameterCounts:
        """Return the parameters of one layer that are sharded and gathered: not those in NF4, of
        which each device has all."""
        return self.shape.layer - ParameterCounts(self.shape.quantized, 0)

    @property
    def is_small(self) -> bool:
        """Return whether the part is gathered whole, with its gradients summed once per update."""
        return self.parameters.all * FLOAT32_BYTES < SMALL_MODEL_BYTES

    @property
    def repeated(self) -> float:
        """Return the share of a forward's matrix products that its backward repeats; from 1 on,
        attention is repeated, too."""
        return _REPEATED_SHARES.get(self.checkpointing, 0.0)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of an element of a parameter in a shard."""
        return FLOAT32_BYTES if self.trains else self.shape.item

    @property
    def _brought_back(self) -> MemoryParts:
        """Return the bytes of a weight in NF4 while it is brought back for a product."""
        size = (FLOAT32_BYTES + max(2, self.shape.item)) * self.shape.largest_quantized
        return {"base": size} if size else {}

    def resident(self) -> MemoryParts:
        """Return the bytes that stay on the device between calls."""
        # The copy of what others hold, in the precision of computation.
        kept = self.shape.item * self.parameters.all if self.by_difference else 0
        base: MemoryParts = {}
        if self.shape.quantized:
            base["base"] = NF4_BYTES * self.shape.quantized * self.layers
        if self.offload_parameters:
            return base | ({"gathered": kept} if kept else {})
        shards: MemoryParts = {"parameters": self.shard_bytes + kept, **base}
        if self.trains and not self.offload_optimizer:
            shards["optimizer"] = 2 * self.moment * self.parameters.trained / self.shards
        return shards

    @property
    def shard_bytes(self) -> float:
        """Return the bytes of this device's shards of all parameters."""
        return self.parameter_bytes * self.parameters.all / self.shards

    def hosted(self, between_calls: bool) -> MemoryParts:
        """Return the bytes that stay in the memory of the host.

        Args:
            between_calls: As `actor.offload_between_calls`.
        """
        trained = self.parameters.trained / max(1, self.parameters.all) if self.trains else 0.0
        shards, found = self._pinned(self.parameter_bytes), MemoryParts()
        if self.offload_parameters:  # an optimizer that steps there does not pin its moments
            elements = trained * self.parameters.all / self.shards
            found = {"gradients": shards * trained, "optimizer": 2 * self.moment * elements}
        elif self.offload_optimizer or between_calls:
            found = {"optimizer": 2 * self._pinned(self.moment) * trained}
        if self.offload_parameters or between_calls:
            found["parameters"] = shards
        return found

    def _pinned(self, item: float) -> float:
        """Return the bytes of pinned memory for the shards of all parameters, with so many for an
        element; each tensor is rounded up."""
        first = self.shape.embedding.all if self.ends[0] else 0
        ends = [self.around.all] if self.shape.tied else [first, self.head.all]
        sizes = [*self.shape.tensor_sizes * self.layers, *ends]
        return sum(round_pinned_bytes(item * size / self.shards) for size in sizes)

    def gathers(self, times: int, updates: bool) -> float:
        """Return the bytes that a rank receives when it gathers all parameters `times` times.

        Args:
            updates: Once since the last update, or never.
        """
        if self.by_difference:
            return float(DIFFERENCE_CODEC.size(self.parameters.all)) if updates else 0.0
        return float(times * self.shape.item * self.parameters.all)

    def scoring(self, batch: MicroBatchPlan) -> MemoryParts:
        """Return the peak of a forward, beside what is resident."""
        again = 0 if self.is_small or batch.count < 2 else self.shape.item * self.head.all
        between = {"gathered": self._gathered(forward=True) + again}  # the head stays meanwhile
        inside = {"gathered": self._gathered(forward=self.is_small) + again} | self._brought_back
        layers = batch.tokens * self.shape.scoring.of(self.layers)
        states = batch.tokens * self.shape.hidden * self.shape.item
        read = states * batch.response_share if self.ends[1] else 0.0  # the others are gone
        head = {"gathered": self._gathered_at_head(True), "activations": read}
        if chunk := self._logits(batch):
            head["logits"] = _LOGIT_CHUNKS * chunk + self._head_copy(batch)
        return _fullest({**between, "activations": states}, {**inside, "activations": layers}, head)

    def training(self, batch: MicroBatchPlan) -> MemoryParts:
        """Return the peak of an update, beside what is resident."""
        shape, item = self.shape, self.shape.item
        trained = self.parameters.trained
        shard = 0 if self.offload_parameters else FLOAT32_BYTES * trained / self.shards
        token = shape.compiled if self.compiled else shape.training
        per_layer = token.per_layer + self._prompt_attention_bytes(batch)
        kept = self.micro_batches_held * batch.tokens * per_layer * self.layers
        backward = batch.tokens * token.fixed
        head = item * shape.head.trained if self.ends[1] else 0
        several = batch.count > 1
        if self.is_small:
            before: float = FLOAT32_BYTES * trained if several else 0
            unit = 0.0 if several else head
            # In float32 autograd adds to what is there; in others a second copy takes the new ones.
            end = FLOAT32_BYTES * trained if item == FLOAT32_BYTES else before + item * trained
            given = (FLOAT32_BYTES if several else item) * trained
            reduced = FLOAT32_BYTES * trained + max(given, shard)
        else:
            before = shard if several else 0
            kept_until_end = head if shape.tied else 0
            unit = max(kept_until_end, (item + self.summed) * shape.layer.trained)
            unit += self.summed * self.head.trained  # of its sum, until that of a layer begins
            largest = max(self.root.trained, shape.embedding.trained if self.ends[0] else 0)
            end = reduced = shard + (item + self.summed) * largest
        loss: MemoryParts = {
            "gathered": self._gathered_at_head(False),
            "gradients": before,
            "activations": kept + self._states(batch),
        }
        if chunk := self._logits(batch):
            states = batch.tokens * batch.response_share * shape.hidden * item
            loss["logits"] = _LOGIT_CHUNKS * chunk + states + self._head_copy(batch)
            # Summed in float32 block by block.
            summed_block = self._head_block(batch) if shape.head.trained else 0
            loss["gradients"] += item * shape.head.trained + summed_block
        gathered = self._gathered(forward=False)
        summed = {
            "gathered": self._gathered_at_head(False),
            "gradients": before + (item + self.summed) * self.head.trained,
            "activations": kept + self._states(batch),
        }
        layers = {"gathered": gathered, "gradients": before + unit, "activations": kept + backward}
        layers |= self._brought_back
        step: MemoryParts = {}
        if self.gathered_by_step:
            step = {"gradients": shard, "gathered": self.gathered_by_step}
        if self.offload_optimizer or self.restores:  # those of two units are in use
            largest = max(shape.layer.trained, self.around.trained)
            unit_of_step = trained if self.is_small else largest
            both = min(trained, 2 * unit_of_step)
            step |= {"gradients": shard, "optimizer": 2 * FLOAT32_BYTES * both / self.shards}
        return _fullest(
            loss,
            *([] if self.is_small else [summed]),
            layers,
            {"gathered": gathered, "gradients": end},
            {"gradients": reduced},
            step,
        )

    def _prompt_attention_bytes(self, batch: MicroBatchPlan) -> float:
        """Return the bytes, for each token and layer, that checkpointing keeps of a second call of
        flash attention, in which responses attend to the prompt that they share. Compiled layers
        keep the merged result only."""
        by_operation = self.checkpointing in (SELECTIVE_CHECKPOINTING, BLOCK_CHECKPOINTING)
        keeps = by_operation and not self.compiled
        has_kernel = has_varlen_attention(self.device) and self.shape.item < FLOAT32_BYTES
        if batch.together == 1 or not (keeps and has_kernel):
            return 0.0
        return self.shape.query * self.shape.item * batch.response_share

    def _gathered(self, forward: bool) -> float:
        """Return the bytes of gathered parameters, in the precision of computation."""
        item = self.shape.item
        buffer = self.shards > 1
        if self.is_small:
            return item * self.parameters.all * (1 + (buffer and forward))
        layers = min(self.layers, 2 if buffer else 1)
        return item * (self.root.all + (layers + (buffer and forward)) * self.layer.all)

    def _gathered_at_head(self, forward: bool) -> float:
        """Return the gathered bytes when the last layer is done; where the head is no unit of its
        own, its layers are not freed yet."""
        if self.is_small or not self.head.all:
            return self._gathered(forward=True)
        buffer = forward and self.shards > 1
        return self.shape.item * (self.root.all + (1 + buffer) * self.head.all)

    def _head_copy(self, batch: MicroBatchPlan) -> float:
        """Return the bytes of a float32 copy of a block of the output embedding, needed where the
        device cannot sum half-precision products in float32."""
        exact = self.shape.item == FLOAT32_BYTES or has_mm_out_dtype(self.device)
        return 0.0 if exact else self._head_block(batch)

    def _head_block(self, batch: MicroBatchPlan) -> float:
        """Return the bytes in float32 of a block of the output embedding, as many rows as
        `token_log_probs` multiplies with its tokens at once."""
        tokens = int(batch.tokens * batch.response_share)
        rows = vocabulary_block_size(tokens, self.shape.vocabulary, self.device)
        return FLOAT32_BYTES * self.shape.head.all * rows / self.shape.vocabulary

    def _states(self, batch: MicroBatchPlan) -> float:
        """Return the bytes of the last hidden states, and of those of them that the head reads."""
        if not self.ends[1]:
            return 0.0
        read = batch.tokens * (1 + batch.response_share)
        return read * self.shape.hidden * self.shape.item

    def _logits(self, batch: MicroBatchPlan) -> float:
        """Return the bytes of one chunk of logits in float32."""
        if not self.ends[1] or self.shape.vocabulary == 1:
            return 0.0
        logits = batch.tokens * batch.response_share * self.shape.vocabulary
        return FLOAT32_BYTES * min(logits_per_chunk(self.device), logits)


def _fullest(*moments: MemoryParts) -> MemoryParts:
    return {
        name: size
        for name, size in max(moments, key=lambda parts: sum(parts.values())).items()
        if size
    }
