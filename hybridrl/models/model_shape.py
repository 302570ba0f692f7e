"""The shape of a model as a planner sees it: its parameters, and a token's costs on its way.

Both are counted on torch's meta device, without memory. The transformers model is built whole, so
that every layer counts as what it is, and once more a few layers deep, to run forward and backward
(`measure_token_bytes`). No table per architecture is needed, and what autograd saves is what it
will save.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.compress.dynamic_codes import BLOCK
from hybridrl.config.schema import NF4_FORMAT, LoraAdapterConfig
from hybridrl.errors import HybridRLError, NotPlannedError
from hybridrl.models.activation_checkpointing import (
    BLOCK_CHECKPOINTING,
    FULL_CHECKPOINTING,
    NO_CHECKPOINTING,
    OFFLOAD_CHECKPOINTING,
    SELECTIVE_CHECKPOINTING,
    set_activation_checkpointing,
)
from hybridrl.models.hidden_matrices import list_hidden_matrices
from hybridrl.models.language_model import (
    architecture_key,
    build_meta_language_model,
    class_of,
    decoder_of,
)
from hybridrl.models.lora import add_adapters, find_frozen_linears
from hybridrl.models.tensor_plan import read_tensor_plan
from hybridrl.models.token_bytes import (
    META_ATTENTION,
    UNIFORM_LAYER_TYPES,
    TokenBytes,
    find_row_tokens,
    measure_product_bytes,
    measure_token_bytes,
    split_tokens_between,
)
from hybridrl.system.dtypes import DTYPES

_COUNTED_DEPTHS = (2, 3)
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVE_EXPERT_FIELDS = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
"""What configurations call the number of experts, and of those that a token goes to."""
_SHARDED_WIDTH_FIELDS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""What they call the widths that are cut over tensor-parallel ranks."""
WITHOUT_CACHE = ("linear_attention", "mamba", "conv")
"""Kinds of layers whose states do not grow with a sample."""
_WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers whose attention looks back a fixed way."""
_ATTENTION_SLOWDOWN = 2.0
"""Times as long as a matrix product that attention takes for an operation, as FlashAttention 2 does
on an H100 (350 of 620 TFLOP/s)."""
REPEATED = 0.9
"""Share of the layers that have their like a period later where a model counts as periodic."""


@dataclass(frozen=True)
class ParameterCounts:
    """A number of parameters: all of them, and those that are trained."""

    all: int
    trained: int

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.all + other.all, self.trained + other.trained)

    def __sub__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.all - other.all, self.trained - other.trained)

    def times(self, number: float) -> ParameterCounts:
        return ParameterCounts(round(self.all * number), round(self.trained * number))


class TrainedKinds(NamedTuple):
    """Numbers of trained elements by kind of tensor, for what optimizers remember of them.

    Attributes:
        hidden: Of `list_hidden_matrices`.
        vectors: Of tensors with one dim.
        lines: Rows and columns of all matrices.
        blocks: Of their rows, as `hybridrl.compress.dynamic_codes` cuts them.
    """

    hidden: int
    vectors: int
    lines: int
    blocks: int


@dataclass(frozen=True)
class ModelShape:
    """The part of a model that one tensor-parallel rank holds.

    Attributes:
        layers: Of the whole model. What is of one layer is an average over all of them.
        hidden: Width of the states between layers.
        vocabulary: Rows of the output embedding that this rank has; 1 for a scalar head.
        key_value: Elements of keys and values of a token in one layer.
        query: Elements of the queries of a token in one layer.
        layer, embedding, head, norm: Parameters of one layer, and of what is around the layers;
            `head` is that of the output, whether it is the embedding's own tensor or not.
        tied: Whether output and input embedding are one.
        tensor_sizes: Elements of each parameter tensor of a layer.
        trained_kinds: What of one layer is trained, by kind of tensor.
        active_of_layer: Parameters of one layer that a token is multiplied with: of experts, as
            many as it goes to.
        crosswise: Parameters of one layer that a tensor-parallel cut divides along another dim than
            the first, along which shards are cut.
        quantized, largest_quantized: Parameters of one layer that are kept in NF4
            (`LoraAdapterConfig.base_format`), all of them and those of the largest matrix.
        item: Bytes of an element in computation.
        training, scoring: Memory of a token in forward and backward, and in a forward alone.
        compiled: As `training`, of layers that are compiled.
    """

    layers: int
    hidden: int
    vocabulary: int
    key_value: int
    query: int
    layer: ParameterCounts
    embedding: ParameterCounts
    head: ParameterCounts
    norm: ParameterCounts
    tied: bool
    tensor_sizes: tuple[int, ...]
    trained_kinds: TrainedKinds
    active_of_layer: int
    crosswise: int
    quantized: int
    largest_quantized: int
    item: int
    training: TokenBytes
    scoring: TokenBytes
    compiled: TokenBytes

    @property
    def tensors(self) -> int:
        """Return the number of parameter tensors of a layer."""
        return len(self.tensor_sizes)

    @property
    def parameters(self) -> ParameterCounts:
        """Return the parameters of this rank, over all layers and what is around them."""
        return self.layer.times(self.layers) + self._around

    @property
    def active(self) -> int:
        """Return the parameters that a token is multiplied with."""
        return self.active_of_layer * self.layers + self._around.all

    @property
    def _around(self) -> ParameterCounts:
        return self.embedding + self.norm + (ParameterCounts(0, 0) if self.tied else self.head)


_counted: dict[str, ModelShape] = {}


def compute_model_shape(
    config: PretrainedConfig,
    dtype: str,
    *,
    tp: int = 1,
    scalar: bool = False,
    checkpointing: str = NO_CHECKPOINTING,
    lora: LoraAdapterConfig | None = None,
    splits_tokens: bool = False,
) -> ModelShape:
    """Compute the shape of the part that one of `tp` ranks holds; cached by configuration.

    Args:
        config: Of the whole model.
        dtype: Name of the precision of computation.
        scalar: With a scalar head instead of logits.
        checkpointing: As `actor.gradient_checkpointing`.
        lora: Adapters; None trains all.
        splits_tokens: Between attention and MLPs each of the ranks has its own tokens, if the
            model's plan cuts whole layers.
    """
    lora = lora if lora and lora.rank else None
    key = architecture_key(config, dtype, tp, scalar, checkpointing, lora, splits_tokens)
    if key not in _counted:
        try:
            _counted[key] = _count(
                *(config, dtype, tp, scalar, checkpointing, lora), tp if splits_tokens else 1
            )
        except HybridRLError:
            raise
        except Exception as error:  # of whatever kind: nobody knows what models will come
            raise NotPlannedError(
                f"What a token of a {config.model_type} model takes cannot be counted, so nothing "
                f"can be planned ({type(error).__name__}: {error})."
            ) from error
    return _counted[key]


def _count(
    config: PretrainedConfig,
    dtype: str,
    tp: int,
    scalar: bool,
    checkpointing: str,
    lora: LoraAdapterConfig | None,
    token_parts: int,
) -> ModelShape:
    number = config.get_text_config().num_hidden_layers
    whole = narrow_config(config, tp, number)
    item = DTYPES[dtype].itemsize
    # The products of experts can be counted in this precision only.
    if _first(whole, _EXPERT_COUNT_FIELDS) > 1:
        dtype = "bfloat16"
    model = _build(whole, dtype, scalar, lora)
    layers = _layers(model, number)
    kinds = [_kind_of(layer, n, whole) for n, layer in enumerate(layers)]
    depths = _depths(kinds)
    plan = read_tensor_plan(decoder_of(model), whole.get_text_config().base_model_tp_plan or {})
    if not plan.cuts_whole_layers(decoder_of(model)):
        token_parts = 1
    text = whole.get_text_config()
    states = text.hidden_size * DTYPES[dtype].itemsize / token_parts  # between layers
    layer = _counts(p for one in layers for p in one.parameters()).times(1 / number)
    embedding = model.get_input_embeddings().weight
    output = model.score if scalar else model.get_output_embeddings()
    head = output.weight if hasattr(output, "weight") else next(output.parameters())
    tied = head is embedding
    known = _counts([embedding] if tied else [embedding, head])
    on_host = checkpointing == OFFLOAD_CHECKPOINTING
    kept = FULL_CHECKPOINTING if on_host else checkpointing
    few = _find_few_layers(whole, dtype, lora, depths, token_parts)
    written, touched = few.products
    training = few.measure_training(kept)
    size = DTYPES[dtype].itemsize
    share = item / size
    is_rounded = lora is not None and lora.base_format == NF4_FORMAT
    rounded = [linear.weight for linear in find_frozen_linears(model)] if is_rounded else []
    if on_host:
        training = training.without(states)
    types = getattr(text, "layer_types", None) or ()
    attends = 1 - sum(kind in WITHOUT_CACHE for kind in types) / number
    query = attends * _query_width(text) * _heads(text)
    keys = attends * _query_width(text) * _key_value_heads(text)
    # What compiled layers keep: attention its queries, keys, values and results, and the parts
    # around it what products read and write (attention's among it), what they write, or their own
    # inputs. Products write queries and keys only before these are rotated. Parts are a norm, the
    # products of its result, that of attention's results, and what follows.
    compiled = {
        NO_CHECKPOINTING: min(touched, training.per_layer),
        SELECTIVE_CHECKPOINTING: written + size * (2 * query + keys),
        BLOCK_CHECKPOINTING: size * (2 * query + 2 * keys) + 3 * states,
    }.get(checkpointing, training.per_layer)
    return ModelShape(
        layers=number,
        hidden=text.hidden_size,
        vocabulary=1 if scalar else head.shape[0],
        key_value=round(attends * _key_value(text)),
        query=round(query),
        layer=layer,
        embedding=_counts([embedding]),
        head=_counts([head]),
        norm=_counts(model.parameters()) - layer.times(number) - known,
        tied=tied,
        tensor_sizes=tuple(p.numel() for p in layers[-1].parameters() if p not in {*rounded}),
        trained_kinds=_count_kinds(model, layers),
        active_of_layer=layer.all - round(_idle(model) / number),
        crosswise=round(_count_crosswise(model) / number),
        quantized=round(sum(p.numel() for p in rounded) / number),
        largest_quantized=max((p.numel() for p in rounded), default=0),
        item=item,
        training=training.times(share),
        compiled=replace(training, per_layer=compiled).times(share),
        scoring=few.scoring.times(share),
    )


class _FewLayers:
    """Two models of few layers, whose difference is what a token takes in a layer, whatever head is
    on them.

    Args:
        config: Of the whole model, as wide as a rank's part.
        depths: The numbers of layers of the two.
        token_parts: Ranks that share out the tokens between attention and MLPs.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: str,
        lora: LoraAdapterConfig | None,
        depths: tuple[int, int],
        token_parts: int,
    ) -> None:
        self._of_model = config, dtype, lora, token_parts
        self._depths = depths
        self._training: dict[str, TokenBytes] = {}
        pair = self._build_pair()
        self._tokens = find_row_tokens(*pair)
        self.products = measure_product_bytes(*pair, depths, self._tokens)
        self.scoring = measure_token_bytes(*pair, depths, self._tokens, trains=False)

    def measure_training(self, checkpointing: str) -> TokenBytes:
        """Measure the memory of a token in forward and backward."""
        if checkpointing not in self._training:
            pair = self._build_pair()
            for few in pair:
                set_activation_checkpointing(few, checkpointing)
            self._training[checkpointing] = measure_token_bytes(
                *pair, self._depths, self._tokens, trains=True
            )
        return self._training[checkpointing]

    def _build_pair(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        config, dtype, lora, parts = self._of_model
        scalar = class_of(config) is None  # of a few types that have no other class
        shallow, deep = (
            _build(narrow_config(config, 1, n), dtype, scalar, lora) for n in self._depths
        )
        if parts > 1:
            for few, depth in zip((shallow, deep), self._depths, strict=True):
                split_tokens_between(few, _layers(few, depth), parts)
        return shallow, deep


_few_layers: dict[str, _FewLayers] = {}


def _find_few_layers(
    config: PretrainedConfig,
    dtype: str,
    lora: LoraAdapterConfig | None,
    depths: tuple[int, int],
    token_parts: int,
) -> _FewLayers:
    key = architecture_key(config, dtype, lora, token_parts)
    if key not in _few_layers:
        _few_layers[key] = _FewLayers(config, dtype, lora, depths, token_parts)
    return _few_layers[key]


def find_attention_length(model: PreTrainedModel) -> float:
    """Return the length of a sample, in tokens, whose attention takes as long as its products with
    parameters: about 25,000 for Qwen3-8B. Infinite for models without attention over all tokens.

    Args:
        model: Whole; its parameters may be on the meta device.
    """
    text = model.config.get_text_config()
    types = getattr(text, "layer_types", None) or ("full_attention",) * text.num_hidden_layers
    layers = sum(kind not in (*WITHOUT_CACHE, *_WINDOWED) for kind in types)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    tied = head is not None and head.weight is embedding
    looked_up = 0 if tied else embedding.numel()
    rounded = (m for m in model.modules() if hasattr(m, "dequantised"))  # no parameters any more
    used = sum(m.in_features * m.out_features for m in rounded)
    used += sum(p.numel() for p in model.parameters()) - _idle(model) - looked_up
    # Causal: a token is compared with half of a sample, in scores and in values.
    compared = _ATTENTION_SLOWDOWN * layers * _query_width(text) * _heads(text)
    return used / compared if compared else math.inf


def _layers(model: PreTrainedModel, number: int) -> Sequence[nn.Module]:
    """The decoder's layers, by the list that is as long as there are."""
    lists = (m for m in decoder_of(model).modules() if isinstance(m, nn.ModuleList))
    return next(list(found) for found in lists if len(found) == number)


def _kind_of(layer: nn.Module, number: int, config: PretrainedConfig) -> tuple[object, ...]:
    """Return a key that is equal for layers of equal cost: kind of states, shapes of parameters."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    kind = types[number] if number < len(types) and types[number] not in UNIFORM_LAYER_TYPES else ""
    return kind, *((name, p.shape) for name, p in layer.named_parameters())


def _first(config: PretrainedConfig, names: Sequence[str]) -> int:
    """Return the value of the configuration under the first of these names that it has; else 1."""
    text = config.get_text_config()
    return next((value for name in names if (value := getattr(text, name, None))), 1)


def _idle(model: nn.Module) -> float:
    """Count the parameters of experts that a token is not sent to."""
    here = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return here * (
        1 - _first(model.config, _ACTIVE_EXPERT_FIELDS) / _first(model.config, _EXPERT_COUNT_FIELDS)
    )


def _count_crosswise(model: PreTrainedModel) -> int:
    """Count the parameters of matrices whose columns tensor-parallel ranks share, and of experts,
    which are cut one by one."""
    base, plan = decoder_of(model), model.config.get_text_config().base_model_tp_plan or {}
    patterns = [f"{path}*" for path, style in plan.items() if style == "rowwise"]
    return sum(
        parameter.numel()
        for name, parameter in base.named_parameters()
        if parameter.ndim == 3
        or (parameter.ndim == 2 and any(fnmatch(name, pattern) for pattern in patterns))
    )


def _depths(kinds: Sequence[object]) -> tuple[int, int]:
    """Return the depths of the two models whose difference is the cost of a layer: where layers
    differ, on average over as many as come again and again. The first few layers may be others."""
    number = len(kinds)
    for period in range(1, number):
        again = sum(kinds[n] == kinds[n + period] for n in range(number - period))
        if again >= REPEATED * (number - period):
            return _COUNTED_DEPTHS if period == 1 else (period, 2 * period)
    return (number, 2 * number) if number > 1 else _COUNTED_DEPTHS


def _head_width(text: PretrainedConfig) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // _heads(text)


def _query_width(text: PretrainedConfig) -> float:
    """Return the width of a head: the mean of what its scores and its values multiply."""
    if width := getattr(text, "qk_head_dim", None):
        return (width + text.v_head_dim) / 2
    return _head_width(text)


def _key_value(text: PretrainedConfig) -> int:
    """Elements of the cache that an attending layer has of a token; latent ones where there are."""
    if rank := getattr(text, "kv_lora_rank", None):
        return rank + text.qk_rope_head_dim
    return 2 * _head_width(text) * _key_value_heads(text)


def _heads(text: PretrainedConfig) -> int:
    return getattr(text, "num_attention_heads", None) or 1  # without attention


def _key_value_heads(text: PretrainedConfig) -> int:
    return getattr(text, "num_key_value_heads", None) or _heads(text)


def narrow_config(config: PretrainedConfig, tp: int, layers: int) -> PretrainedConfig:
    """A model of so many layers, the last of all, that is as wide as a rank's part: its matrices
    are those of a narrower model."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = text.num_hidden_layers - layers
    if tp > 1:
        text.head_dim = _head_width(text)
        text.num_key_value_heads = max(1, _key_value_heads(text) // tp)
        text.num_attention_heads //= tp
        for name in _SHARDED_WIDTH_FIELDS:
            if width := getattr(text, name, None):
                setattr(text, name, math.ceil(width / tp))
        text.vocab_size = math.ceil(text.vocab_size / tp)
    text.pad_token_id = 0  # some models compute with it
    text.bos_token_id = text.eos_token_id = None
    if not before:
        return config
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(text, name, None):
            with contextlib.suppress(AttributeError):  # it follows from others
                setattr(text, name, [kinds[n % len(kinds)] for n in range(before, before + layers)])
    text.num_hidden_layers = layers
    if dense := getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = max(0, dense - max(0, before))
    if dense := getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = [n - before for n in dense if n >= before]
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0  # whose own are among those left out
    return config


def _build(
    config: PretrainedConfig, dtype: str, scalar: bool, lora: LoraAdapterConfig | None
) -> PreTrainedModel:
    if scalar:
        config = copy.deepcopy(config)
        config.num_labels = 1
    model = build_meta_language_model(
        config, scalar=scalar, dtype=DTYPES[dtype], attn_implementation=META_ATTENTION
    )
    if not scalar:
        model.tie_weights()
    model.config.use_cache = False
    if lora is not None:
        with torch.device("meta"):
            add_adapters(model, lora)
    return model.train()


def count_row_blocks(width: int) -> int:
    """Return the number of blocks of a row of a matrix whose moments are in 8 bits."""
    return -(-width // BLOCK)


def _count_kinds(model: PreTrainedModel, layers: Sequence[nn.Module]) -> TrainedKinds:
    hidden = list_hidden_matrices(model)
    own = {p for layer in layers for p in layer.parameters()}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p in own}
    matrices = [p for p in trained.values() if p.ndim > 1]
    found = (
        sum(p.numel() for name, p in trained.items() if name in hidden),
        sum(p.numel() for p in trained.values() if p.ndim == 1),
        sum(p.numel() // p.shape[-1] + p.numel() // p.shape[-2] for p in matrices),
        sum(p.numel() // p.shape[-1] * count_row_blocks(p.shape[-1]) for p in matrices),
    )
    return TrainedKinds(*(round(count / len(layers)) for count in found))


def _counts(parameters: Any) -> ParameterCounts:
    parameters = list(parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return ParameterCounts(sum(p.numel() for p in parameters), trained)
