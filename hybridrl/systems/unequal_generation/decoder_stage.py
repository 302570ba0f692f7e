"""A stage of a decoder: some neighbouring layers of a transformers model, some in fewer bits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import full_box
from hybridrl.models.language_model import architecture_key, decoder_of
from hybridrl.models.model_loading import open_model
from hybridrl.models.model_trial import TOLERANCE, ModelTrial, trial_seed
from hybridrl.models.stored_tensors import StoredTensor, find_stored_tensors
from hybridrl.quantization.low_bit_linear import (
    LowBitLinear,
    apply_layer_bits,
    check_linear_layers,
    find_decoder_layers,
)
from hybridrl.system.dtypes import DTYPES
from hybridrl.systems.unequal_generation.generation_plan import FULL_PRECISION_BITS

_REQUIRED_PARTS = ("embed_tokens", "layers", "norm")


class DecoderStage(nn.Module):
    """The layers `first` to ``first + len(bits)`` of `model`, which is cut in place; with the
    embedding if they are the first, with norm and head if they are the last.

    Args:
        model: With parameters on the meta device if there are `files`.
        files: Where they are read from.
        bits: Of each layer; see `quantization.low_bit_linear`.

    Attributes:
        is_first, is_last: Whether it has the embedding, and the head.
        layers: How many it has.
        hidden_size: Length of a token's state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        files: TensorReader | None,
        first: int,
        bits: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        base = decoder_of(model)
        every, stop = list(find_decoder_layers(model)), first + len(bits)
        self.is_first, self.is_last = first == 0, stop == len(every)
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        names = dict(model.named_parameters())
        parts: dict[str, tuple[StoredTensor, ...]] = {}
        if files is not None:
            shapes = {name: tuple(parameter.shape) for name, parameter in names.items()}
            parts = find_stored_tensors(model, shapes, files.shapes)
        set_cached_attention(model)
        _renumber(base, every[first:stop], first)
        if not self.is_first:
            base.embed_tokens = nn.Identity()
        if not self.is_last:
            base.norm = nn.Identity()
        self.base, self.layers = base, len(bits)
        self.head = model.get_output_embeddings() if self.is_last else None
        self._places = self._placed(names)
        # A layer at a time, so that no more than one is here in all its bits.
        for number, wanted in [(None, FULL_PRECISION_BITS), *enumerate(bits)]:
            for name in self._names_of(number):
                own = names[name].detach()
                values = torch.empty(own.shape, dtype=dtype, device=device)
                if files is None:
                    values.copy_(own)
                else:
                    for stored in parts[name]:
                        place = tuple(slice(*side) for side in stored.box)
                        files.read(stored.name, full_box(stored.shape), values[place])
                for path, attribute in self._places[name]:
                    parameter = nn.Parameter(values, requires_grad=False)
                    setattr(self.get_submodule(path), attribute, parameter)
            if number is not None:
                apply_layer_bits(self.base, {number: wanted})
        self.to(device)  # what is no parameter
        self.eval()

    def tensors(self) -> dict[str, Tensor | LowBitLinear]:
        """Return this stage's parameters by checkpoint name; for rounded ones their layer."""
        found: dict[str, Tensor | LowBitLinear] = {}
        for name, ((path, attribute), *_) in self._places.items():
            module = self.get_submodule(path)
            if isinstance(module, LowBitLinear) and attribute == "weight":
                found[name] = module
            else:
                found[name] = getattr(module, attribute)
        return found

    def forward(
        self,
        ids: Tensor | None,
        states: Tensor | None,
        mask: Tensor | None,
        positions: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Run the stage's layers.

        Args:
            ids: ``[samples, tokens]``, for the first stage.
            states: ``[samples, tokens, hidden]``, for others.
            mask: ``[samples, tokens with those in the cache]``; None: all count.
            positions: ``[samples, tokens]``.
            cache: Of these layers, counted from 0.

        Returns:
            States; of the last stage the logits ``[samples, vocabulary]`` after the last token.
        """
        found: Tensor = self.base(
            input_ids=ids,
            inputs_embeds=states,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        if self.head is not None:
            found = self.head(found[:, -1])
        return found

    def _placed(self, names: Mapping[str, nn.Parameter]) -> dict[str, list[tuple[str, str]]]:
        """Return module and attribute of each parameter that is here; two of each if tied."""
        called = {id(parameter): name for name, parameter in names.items()}
        found: dict[str, list[tuple[str, str]]] = {}
        for path, module in self.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                found.setdefault(called[id(parameter)], []).append((path, attribute))
        return found

    def _names_of(self, layer: int | None) -> list[str]:
        """Return the parameters of a layer; with None those outside of all layers."""
        above = f"base.layers.{'' if layer is None else f'{layer}.'}"
        return [
            name
            for name, ((path, _), *_) in self._places.items()
            if path.startswith(above) == (layer is not None)
        ]


def load_stage(
    path: str, first: int, bits: Sequence[int], dtype: str, device: torch.device
) -> DecoderStage:
    """Load a stage of the model at `path`, reading no other parameters where that is possible."""
    model, files = open_model(path)
    unread = any(parameter.is_meta for parameter in model.parameters())
    return DecoderStage(model, files if unread else None, first, bits, DTYPES[dtype], device)


def check_decoder_stages(config: PretrainedConfig, setting: str, path: str) -> None:
    """Refuse models that cannot be divided into stages, by their parts and by a trial.

    Raises:
        ConfigError: begins with `setting`.
    """
    check_linear_layers(config, setting, path, "Set rollout=vllm.")
    if (key := architecture_key(config)) not in _odd:
        _odd[key] = _tried(config)
    if found := _odd[key]:
        raise ConfigError(
            f"{setting} cannot divide {path} ({config.model_type}) into stages: {found}. It is "
            "for plain decoders, as Qwen2, Qwen3, Llama and Mistral are. Set rollout=vllm."
        )


_odd: dict[str, str] = {}


@torch.no_grad()
def _tried(config: PretrainedConfig) -> str:
    with trial_seed():
        try:
            trial = ModelTrial(config, (21, 21))
            model, ids = trial.model, torch.stack(trial.samples)
            lacking = [part for part in _REQUIRED_PARTS if not hasattr(decoder_of(model), part)]
            if lacking:
                return f"it has no `{lacking[0]}`"
            expected = trial.reference(ids, use_cache=False).logits[:, -1]
            layers = len(find_decoder_layers(model))
            stages = [
                DecoderStage(copy.deepcopy(model), None, *part, torch.float32, torch.device("cpu"))
                for part in ((0, [FULL_PRECISION_BITS]), (1, [FULL_PRECISION_BITS] * (layers - 1)))
            ]
            found, caches = None, [DynamicCache(), DynamicCache()]
            for start, stop in ((0, 20), (20, 21)):  # with what is in the cache, too
                positions = torch.arange(start, stop).expand(2, -1)
                states = stages[0](ids[:, start:stop], None, None, positions, caches[0])
                found = stages[1](None, states, None, positions, caches[1])
        except Exception as error:  # of whatever kind: nobody knows what models will come
            return f"a small copy of it does not run so ({type(error).__name__}: {error})"
    off = float((found - expected).abs().max() / expected.abs().max())
    return "" if off <= TOLERANCE else f"the logits of a small copy are off by {off:.1%}"


def set_cached_attention(model: PreTrainedModel) -> None:
    """Set an attention that supports KV caches."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # its attention does what the fused one does not know
        model.set_attn_implementation("eager")


def _renumber(base: PreTrainedModel, layers: Sequence[nn.Module], first: int) -> None:
    """Make these the only layers of the model, with caches and layer types counted from 0."""
    for layer in layers:
        for module in layer.modules():
            numbered: Any = module
            if isinstance(number := getattr(module, "layer_idx", None), int):
                numbered.layer_idx = number - first
    base.layers = nn.ModuleList(layers)
    base.config = copy.deepcopy(base.config)
    base.config.num_hidden_layers = len(layers)
    if (kinds := getattr(base.config, "layer_types", None)) is not None:
        base.config.layer_types = kinds[first : first + len(layers)]
