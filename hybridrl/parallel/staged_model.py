"""The pipeline stages of a model on one rank: transformers' own modules without those of other
ranks.

Names of parameters stay those of the checkpoint. What lies elsewhere is a module without
parameters, so that transformers' forward, with its rotary embedding and masks, runs unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import decoder_of
from hybridrl.models.lora import has_adapters
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel.pipeline_schedule import check_stages, split_layers

_DECODER_PARTS = ("embed_tokens", "layers", "norm")
"""What a decoder consists of, by the names that Qwen2, Qwen3, Llama and Mistral have for it."""


class AbsentModule(nn.Module):
    """A placeholder for a layer or norm of another stage; returns its input."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


class ReceivedStates(nn.Module):
    """A placeholder for the embedding; returns the states that the previous stage sent."""

    states: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.view(*ids.shape, -1)


class StagedModel(nn.Module):
    """The stages of `model` that one rank of a pipeline runs. `model` is split in place: the
    parameters of other ranks are released.

    With tied embeddings both the first rank, for the embedding, and the last one, for the head,
    hold the parameter under its one name.

    Args:
        model: The whole model, not yet sharded.
        dtype: Precision of computation, in which states travel between stages.
        rank: Place on the `pp` axis.
        ranks: Size of the `pp` axis, at least 2.
        chunks: Stages on each rank.

    Attributes:
        OUTPUTS, shapes, shift, rows: As of `model`.
        tied: Name of the parameter that the first and the last rank share, or None.
        hidden_size: Length of a token's state.
        dtype: As given.

    Raises:
        ConfigError: if the model has too few layers, or parts that are not known here.
    """

    def __init__(
        self, model: PackedModel, dtype: torch.dtype, rank: int, ranks: int, chunks: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.OUTPUTS, self.shift, self.rows = model.OUTPUTS, model.shift, model.rows
        self.multiple = model.multiple
        self.shapes = model.shapes
        inner, base = model.inner, decoder_of(model.inner)
        if has_adapters(inner):
            raise ConfigError(
                "actor.lora.rank does not go with pipelines yet: choose parallel.pp=1, or "
                "actor.lora.rank=null."
            )
        _refuse_unknown_parts(base)
        self.hidden_size = int(inner.config.get_text_config().hidden_size)
        self._stages = ranks * chunks
        layers: list[nn.Module] = list(base.layers)
        check_stages(len(layers), ranks, chunks)
        split = split_layers(len(layers), self._stages)
        mine = range(rank, self._stages, ranks)
        first, last = rank == 0, rank == ranks - 1
        head = inner.get_output_embeddings()
        is_tied = head is not None and head.weight is base.embed_tokens.weight
        shared = (name for name, p in inner.named_parameters() if is_tied and p is head.weight)
        self.tied = next(shared, None)

        received, elsewhere = ReceivedStates(), AbsentModule()
        # Not registered as modules: they would give parameters second names.
        self._parts: dict[int, dict[str, nn.Module]] = {
            stage: {
                "embed_tokens": base.embed_tokens if stage == 0 else received,
                "layers": nn.ModuleList(
                    layer if number in split[stage] else elsewhere
                    for number, layer in enumerate(layers)
                ),
                "norm": base.norm if stage == self._stages - 1 else elsewhere,
            }
            for stage in mine
        }
        held = {number for stage in mine for number in split[stage]}
        base.layers = nn.ModuleList(
            layer if number in held else elsewhere for number, layer in enumerate(layers)
        )
        if not (first or (last and is_tied)):
            base.embed_tokens = received
        if not last:
            base.norm = elsewhere
            for name, module in list(inner.named_children()):
                if base not in module.modules():
                    setattr(inner, name, AbsentModule())

    @property
    def inner(self) -> nn.Module:
        """The transformers model with this rank's stages only."""
        return self.model.inner

    @property
    def head(self) -> nn.Module:
        """The output head of the model, or its placeholder on ranks that do not have it."""
        return self.model.head

    def forward(
        self, samples: PackedSamples, *, stage: int, states: Tensor | None = None, **options: float
    ) -> Tensor | dict[str, Tensor]:
        """Run one stage.

        Args:
            samples: The micro-batch, the same on all stages.
            stage: One of this rank's.
            states: `[tokens, hidden]` from the stage before; None for the first one.
            options: Of the model's forward, for the last stage.

        Returns:
            The outputs of the model from the last stage; `[tokens, hidden]` from others.
        """
        base, parts = decoder_of(self.inner), self._parts[stage]
        whole = {name: getattr(base, name) for name in _DECODER_PARTS}
        if stage:
            parts["embed_tokens"].states = states
        try:
            for name, module in parts.items():
                setattr(base, name, module)
            if stage == self._stages - 1:
                return self.model(samples, **options)
            return self.model.hidden(samples).clone()  # FSDP wants no view
        finally:
            for name, module in whole.items():
                setattr(base, name, module)
            if stage:
                parts["embed_tokens"].states = None


def _refuse_unknown_parts(base: nn.Module) -> None:
    missing = [part for part in _DECODER_PARTS if not hasattr(base, part)]
    others = [
        name
        for name, module in base.named_children()
        if name not in _DECODER_PARTS and any(True for _ in module.parameters())
    ]
    if missing or others:
        wrong = [f"no `{name}`" for name in missing] + [f"`{name}`" for name in others]
        raise ConfigError(
            f"parallel.pp cannot cut a {type(base).__name__}: it has {', '.join(wrong)}. Pipelines "
            f"know decoders of {', '.join(_DECODER_PARTS)}, as Qwen2, Qwen3, Llama and Mistral "
            "have them; choose parallel.pp=1 for this model."
        )
