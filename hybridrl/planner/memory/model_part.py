"""Bytes that a role takes of one device: what stays there, and what each phase adds at its fullest
moment.

A model lies in float32 shards, with Adam's two moments beside them where it is trained. FSDP
gathers a unit (a layer, the embedding, the head, or the whole of a small model) in the precision of
computation, and sums its gradients in float32. `hybridrl.parallel.fsdp` and
`hybridrl.engine.train_engine` do what is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.parallel.weight_gathers import DIFFERENCES
from hybridrl.planner.memory.model_shape import Counts, ModelShape
from hybridrl.planner.step.step_calls import MicroBatches, Sizes
from hybridrl.system.device_traits import (
    SMALL_MODEL_BYTES,
    logits_at_a_time,
    multiplies_into_float32,
)

MASTER = 4
"""Bytes of float32: parameters, their summed gradients and each of Adam's two moments."""
CHECKPOINT = 3 * MASTER
"""Bytes of a trained parameter and its two moments in a checkpoint."""
LOGITS_SCORING, LOGITS_TRAINING = 2, 3
"""Chunks of float32 logits that live at once in `token_log_probs`, forward and backward."""
SAMPLING_COPIES = 4
"""Of `[samples, vocabulary]` logits while `rollout=transformers` chooses tokens."""

NONE = Counts(0, 0)

Parts = dict[str, float]
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
        moment: Bytes of an element of an optimizer's moment.
        by_difference: Weights are gathered as differences (`ParallelConfig.weights`).
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
    moment: int = MASTER
    by_difference: bool = False

    @property
    def around(self) -> Counts:
        """Return the parameters outside of the layers."""
        shape, (first, last) = self.shape, self.ends
        found = Counts(0, 0)
        if first or (last and shape.tied):
            found += shape.embedding
        if last:
            found += shape.norm
            found += Counts(0, 0) if shape.tied else shape.head
        return found

    @property
    def root(self) -> Counts:
        """Return those parameters outside of the layers that stay gathered from their first use to
        their last."""
        shape, (first, last) = self.shape, self.ends
        if shape.tied:
            return self.around
        return self.around - (shape.embedding if first else NONE) - (shape.head if last else NONE)

    @property
    def head(self) -> Counts:
        """Return the parameters of the output embedding where it is a unit of its own."""
        return self.shape.head if self.ends[1] and not self.shape.tied else NONE

    @property
    def parameters(self) -> Counts:
        """Return the parameters of this part before sharding."""
        return self.shape.layer.times(self.layers) + self.around

    @property
    def is_small(self) -> bool:
        """Return whether the part is gathered whole, with its gradients summed once per update."""
        return self.parameters.all * MASTER < SMALL_MODEL_BYTES

    def resident(self) -> Parts:
        """Return the bytes that stay on the device between calls."""
        # The copy of what others hold, in the precision of computation.
        kept = self.shape.item * self.parameters.all if self.by_difference else 0
        if self.offload_parameters:
            return {"gathered": kept} if kept else {}
        shards: Parts = {"parameters": MASTER * self.parameters.all / self.shards + kept}
        if self.trains and not self.offload_optimizer:
            shards["optimizer"] = 2 * self.moment * self.parameters.trained / self.shards
        return shards

    def gathers(self, times: int, updates: bool) -> float:
        """Return the bytes that a rank receives when it gathers all parameters `times` times.

        Args:
            updates: Once since the last update, or never.
        """
        if self.by_difference:
            return float(DIFFERENCES.size(self.parameters.all)) if updates else 0.0
        return float(times * self.shape.item * self.parameters.all)

    def scoring(self, batch: MicroBatches, sizes: Sizes) -> Parts:
        """Return the peak of a forward, beside what is resident."""
        again = 0 if self.is_small or batch.count < 2 else self.shape.item * self.head.all
        between = {"gathered": self._gathered(forward=True) + again}  # the head stays meanwhile
        inside = {"gathered": self._gathered(forward=self.is_small) + again}
        layers = batch.tokens * self.shape.scoring.of(self.layers)
        states = batch.tokens * self.shape.hidden * self.shape.item
        head = {"gathered": self._gathered_at_head(True), "activations": self._states(batch, sizes)}
        if chunk := self._logits(batch, sizes):
            head["logits"] = LOGITS_SCORING * chunk + self._head_copy
        return _fullest({**between, "activations": states}, {**inside, "activations": layers}, head)

    def training(self, batch: MicroBatches, sizes: Sizes) -> Parts:
        """Return the peak of an update, beside what is resident."""
        shape, item = self.shape, self.shape.item
        trained = self.parameters.trained
        shard = 0 if self.offload_parameters else MASTER * trained / self.shards
        kept = self.micro_batches_held * batch.tokens * shape.training.per_layer * self.layers
        backward = batch.tokens * shape.training.fixed
        head = item * shape.head.trained if self.ends[1] else 0
        several = batch.count > 1
        if self.is_small:
            before = MASTER * trained if several else 0
            unit = 0.0 if several else head
            # In float32 autograd adds to what is there; in others a second copy takes the new ones.
            end = MASTER * trained if item == MASTER else before + item * trained
            reduced = (MASTER if several else item) * trained + MASTER * trained
            reduced = max(reduced, MASTER * trained + shard)
        else:
            before = shard if several else 0
            kept_until_end = head if shape.tied else 0
            unit = max(kept_until_end, (item + MASTER) * shape.layer.trained)
            largest = max(self.root.trained, shape.embedding.trained if self.ends[0] else 0)
            end = reduced = shard + (item + MASTER) * largest
        loss: Parts = {
            "gathered": self._gathered_at_head(False),
            "gradients": before,
            "activations": kept + self._states(batch, sizes),
        }
        if chunk := self._logits(batch, sizes):
            states = batch.tokens * sizes.response_share * shape.hidden * item
            loss["logits"] = LOGITS_TRAINING * chunk + states + self._head_copy
            loss["gradients"] += MASTER * shape.head.trained  # summed in float32
        gathered = self._gathered(forward=False)
        summed = {
            "gathered": self._gathered_at_head(False),
            "gradients": before + (item + MASTER) * self.head.trained,
            "activations": kept + self._states(batch, sizes),
        }
        layers = {"gathered": gathered, "gradients": before + unit, "activations": kept + backward}
        step: Parts = {}
        if self.offload_optimizer or self.moment != MASTER:  # those of two units are in use
            largest = max(shape.layer.trained, self.around.trained)
            unit_of_step = trained if self.is_small else largest
            both = min(trained, 2 * unit_of_step)
            step = {"gradients": shard, "optimizer": 2 * MASTER * both / self.shards}
        return _fullest(
            loss,
            *([] if self.is_small else [summed]),
            layers,
            {"gathered": gathered, "gradients": end},
            {"gradients": reduced},
            step,
        )

    def _gathered(self, forward: bool) -> float:
        """Return the bytes of gathered parameters, in the precision of computation."""
        item = self.shape.item
        buffer = self.shards > 1
        if self.is_small:
            return item * self.parameters.all * (1 + (buffer and forward))
        layers = min(self.layers, 2 if buffer else 1)
        return item * (self.root.all + (layers + (buffer and forward)) * self.shape.layer.all)

    def _gathered_at_head(self, forward: bool) -> float:
        """Return the gathered bytes when the last layer is done; where the head is no unit of its
        own, its layers are not freed yet."""
        if self.is_small or not self.head.all:
            return self._gathered(forward=True)
        buffer = forward and self.shards > 1
        return self.shape.item * (self.root.all + (1 + buffer) * self.head.all)

    @property
    def _head_copy(self) -> float:
        """Return the bytes of a float32 copy of the output embedding, needed where the device
        cannot sum half-precision products in float32."""
        exact = self.shape.item == MASTER or multiplies_into_float32(self.device)
        return 0.0 if exact else MASTER * float(self.shape.head.all)

    def _states(self, batch: MicroBatches, sizes: Sizes) -> float:
        """Return the bytes of the last hidden states, and of those of them that the head reads."""
        if not self.ends[1]:
            return 0.0
        read = batch.tokens * (1 + sizes.response_share)
        return read * self.shape.hidden * self.shape.item

    def _logits(self, batch: MicroBatches, sizes: Sizes) -> float:
        """Return the bytes of one chunk of logits in float32."""
        return MASTER * min(logits_at_a_time(self.device), self._all_logits(batch, sizes))

    def _all_logits(self, batch: MicroBatches, sizes: Sizes) -> float:
        """Return the number of logits of a micro-batch."""
        if not self.ends[1] or self.shape.vocabulary == 1:
            return 0.0
        return batch.tokens * sizes.response_share * self.shape.vocabulary


def generation_copy(shape: ModelShape, quantization: str = "none") -> float:
    """Return the bytes of the generator's weights on one device: in the precision of computation,
    or with `rollout.quantization` one byte per value of a layer and a scale per row, which is about
    as long as the states between layers are wide."""
    if quantization == "none":
        return float(shape.item * shape.parameters.all)
    layers = shape.layer.all * shape.layers
    rest = shape.item * (shape.parameters.all - layers)
    return rest + layers * (1 + MASTER / shape.hidden)


def cache_bytes(shape: ModelShape, tokens: float) -> float:
    """Return the bytes of the keys and values of this many tokens on one device."""
    return tokens * shape.layers * shape.key_value * shape.item


def generating_with_transformers(shape: ModelShape, sizes: Sizes, rows: int) -> Parts:
    """Estimate the memory that generating `rows` samples at a time adds with
    `rollout=transformers`."""
    cache = cache_bytes(shape, rows * sizes.sample_tokens)
    prompts = rows * sizes.prompt_tokens * shape.scoring.of(shape.layers)
    choosing = SAMPLING_COPIES * rows * shape.vocabulary * MASTER
    # A layer's cache grows by copying; both copies live until the layer is done.
    return {"kv_cache": cache + cache / shape.layers, "activations": max(prompts, choosing)}


def _fullest(*moments: Parts) -> Parts:
    return {
        name: size
        for name, size in max(moments, key=lambda parts: sum(parts.values())).items()
        if size
    }
