"""Measuring pieces of work on the devices of this machine, for `cost_model`.

Each piece is measured as a job does it: a layer of transformers' own model over packed samples, a
head through our log-probabilities, a token for many rows with a cache, an update of AdamW, a
gather. All devices of the machine are at work at once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.model_shape import compute_model_shape, narrow_config
from hybridrl.planner.machine.device_probe import measure_on_all
from hybridrl.planner.machine.layer_probe import PROBED_LAYERS, build_layers, packed_run
from hybridrl.planner.step.operator_work import (
    DECODE,
    FORWARD,
    GATHER,
    HEAD,
    HEAD_TRAIN,
    OPTIMIZER,
    TRAIN,
    OperatorWork,
)
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.timing import measure_seconds
from hybridrl.systems.operator_costs.cost_model import (
    CostSample,
    CostTable,
    DeviceProfile,
    choose_representative,
)

_MIN_SECONDS = 0.06
"""Of one measurement, at least."""
TURNS = 5
_VOCABULARY_SIZE = 512


class ModelFamily(NamedTuple):
    """An architecture whose models differ in size only.

    Attributes:
        kind: As transformers calls it.
        wide: Width of the MLP, in those of the states.
        head: Elements of an attention head.
        groups: Queries for each key.
    """

    kind: str
    wide: float
    head: int
    groups: int


MODEL_FAMILIES = {
    "llama": ModelFamily("llama", 2.7, 64, 1),
    "llama, grouped": ModelFamily("llama", 3.5, 32, 4),
    "qwen2": ModelFamily("qwen2", 5.0, 64, 4),
    "qwen3": ModelFamily("qwen3", 3.0, 128, 2),
    "gemma2": ModelFamily("gemma2", 4.0, 64, 2),
    "mistral": ModelFamily("mistral", 3.5, 64, 2),
    "phi3": ModelFamily("phi3", 2.7, 32, 1),
    "olmo2": ModelFamily("olmo2", 2.7, 64, 1),
}
HIDDEN_SIZES = (128, 256, 512, 768)
"""Widths of states."""
_MICRO_BATCHES = ((64, 64), (256, 32), (512, 256), (2048, 128))
"""Tokens of a micro-batch, and of a sample."""
_DECODE_BATCHES = ((1, 64), (8, 64), (32, 256), (64, 64))
"""Rows that are generated together, and tokens in their cache."""


class CalibrationCase(NamedTuple):
    """A piece of work with the model to measure it on; None if it needs no model."""

    work: OperatorWork
    model: PretrainedConfig | None


def build_family_config(family: ModelFamily, hidden: int) -> PretrainedConfig:
    """Build the configuration of a model of this family with this hidden size."""
    heads = max(family.groups, hidden // family.head)
    return AutoConfig.for_model(
        family.kind,
        hidden_size=hidden,
        intermediate_size=round(family.wide * hidden / 32) * 32,
        num_hidden_layers=PROBED_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // family.groups,
        head_dim=family.head,
        vocab_size=_VOCABULARY_SIZE,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_logit_softcapping=None,  # Gemma 2's is refused, and costs nothing to speak of
    )


def list_calibration_cases(config: PretrainedConfig, dtype: str) -> list[CalibrationCase]:
    """List the work of training, scoring and generating with a model, in several sizes."""
    shape = compute_model_shape(config, dtype)
    layer = OperatorWork(
        FORWARD,
        *(1.0, 1.0, shape.hidden, shape.active_of_layer, shape.query, shape.key_value, shape.item),
    )
    found = [
        CalibrationCase(replace(layer, op=op, tokens=tokens, length=length), config)
        for op in (FORWARD, TRAIN)
        for tokens, length in _MICRO_BATCHES
    ]
    found += [
        CalibrationCase(replace(layer, op=DECODE, tokens=rows, length=length), config)
        for rows, length in _DECODE_BATCHES
    ]
    for op in (HEAD, HEAD_TRAIN):
        for tokens, words in ((128, 2048), (1024, 8192)):
            parameters = float(words * shape.hidden)
            found.append(
                CalibrationCase(
                    OperatorWork(op, tokens, 1.0, shape.hidden, parameters, item=shape.item), None
                )
            )
    found.append(CalibrationCase(OperatorWork(OPTIMIZER, float(shape.layer.all)), None))
    found.append(CalibrationCase(OperatorWork(GATHER, float(shape.item * shape.layer.all)), None))
    return found


def measure_operators(
    cluster: ClusterSpec,
    dtype: str,
    families: Sequence[str] = tuple(MODEL_FAMILIES),
    sizes: Sequence[int] = HIDDEN_SIZES,
    limit: int | None = None,
) -> CostTable:
    """Measure the devices of this machine, all at once, and return the mean over devices.

    Args:
        cluster: These devices, with the rates that a probe of them has found.
        dtype: Name of the precision of computation.
        limit: So many samples, those that stand for the rest; None: all.
    """
    profile = DeviceProfile.of_cluster(cluster, dtype)
    pieces = [
        piece
        for family in families
        for size in sizes
        for piece in list_calibration_cases(
            build_family_config(MODEL_FAMILIES[family], size), dtype
        )
        if len(cluster.devices) > 1 or piece.work.op != GATHER
    ]
    if limit is not None:
        works = [piece.work for piece in pieces]
        pieces = [pieces[n] for n in choose_representative(works, profile, limit)]
    found = torch.tensor(measure_on_all(_measure, cluster, dtype, pieces)).double().mean(0)
    samples = [CostSample(piece.work, float(s)) for piece, s in zip(pieces, found, strict=True)]
    return CostTable(profile, samples)


def _measure(
    device: torch.device, world: int, dtype: str, pieces: Sequence[CalibrationCase]
) -> list[float]:
    return [_seconds(piece, dtype, device, world) for piece in pieces]


def _seconds(piece: CalibrationCase, dtype: str, device: torch.device, world: int) -> float:
    """Measure a piece of work; of one that has several layers return the seconds of one."""
    work, config = piece
    tokens, layers = int(work.tokens), 1
    if work.op == OPTIMIZER:
        weight = torch.zeros(tokens, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        once: Callable[[], object] = torch.optim.AdamW([weight], lr=1e-4).step
    elif work.op == GATHER:
        once = _gather(torch.zeros(max(1, tokens // 4 // world), device=device), world)
    elif work.op in (HEAD, HEAD_TRAIN):
        once = _head(work, DTYPES[dtype], device)
    else:
        assert config is not None  # for it is a layer's
        layers = PROBED_LAYERS
        if work.op == DECODE:
            once = _decode(config, work, DTYPES[dtype], device)
        else:
            body = build_layers(config, dtype, device)
            once = packed_run(body, device, tokens, int(work.length), work.op == TRAIN)
    # Of a collective all ranks make as many.
    least = 0.0 if work.op == GATHER else _MIN_SECONDS
    (seconds,) = measure_seconds([once], device, world=world, turns=TURNS, least=least)
    return seconds / layers


def _head(work: OperatorWork, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    trains = work.op == HEAD_TRAIN
    hidden, words = int(work.hidden), int(work.parameters / work.hidden)
    states = torch.ones(int(work.tokens), hidden, dtype=dtype, device=device)
    table = torch.zeros(words, hidden, dtype=dtype, device=device)
    targets = torch.zeros(len(states), dtype=torch.int64, device=device)
    states.requires_grad_(trains)
    table.requires_grad_(trains)

    def once() -> None:
        with contextlib.nullcontext() if trains else torch.no_grad():
            found: Tensor = token_log_probs(states, table, targets)[0]
        if trains:
            found.sum().backward()

    return once


def _decode(
    config: PretrainedConfig, work: OperatorWork, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a function that generates one token for each row and then crops the cache to its
    length before."""
    with device:
        model: Any = build_language_model(
            narrow_config(config, 1, PROBED_LAYERS), dtype=dtype, attn_implementation="sdpa"
        ).eval()
    rows, length = int(work.tokens), int(work.length)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    one = ids[:, :1]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, past_key_values=DynamicCache()).past_key_values

    def once() -> None:
        with torch.no_grad():
            decoder_of(model)(input_ids=one, past_key_values=cache, use_cache=True)
        cache.crop(-1)  # the token that came

    return once


def _gather(part: Tensor, world: int) -> Callable[[], None]:
    def once() -> None:
        with warnings.catch_warnings():  # newer versions of torch prefer names that older ones lack
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_gather_into_tensor(torch.empty(len(part) * world, device=part.device), part)

    return once
