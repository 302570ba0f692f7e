"""Layers of the job's own model, timed forward and backward on samples as long as the job's: what
is measured is what training will do, products, attention and what lies between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.model_loading import load_model_config
from hybridrl.models.model_shape import ModelShape, compute_model_shape, narrow_config
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_samples import PackingMetadata
from hybridrl.planner.machine.device_probe import collectives, measure_memory_rate, measure_small_op
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.timing import measure_seconds

PROBED_LAYERS = 2
_MAX_OPERATIONS = 1e10
"""Operations of the longest run: the tokens of a whole micro-batch if that is no more, because what
fits into a cache is quicker by token than what does not."""


class LayerRuns(NamedTuple):
    """Runs of layers to time: on one sample, and on as many tokens as `many`.

    Attributes:
        path: Of the model's folder.
        dtype: Name of the precision of computation.
        length: Tokens of a sample.
        many: Tokens of the longer run.
    """

    path: str
    dtype: str
    length: int
    many: int

    @classmethod
    def of_job(cls, path: str, dtype: str, tokens: int, length: float) -> LayerRuns:
        """Return the runs for micro-batches of so many tokens."""
        few, shape = max(1, round(length)), compute_model_shape(load_model_config(path), dtype)
        work = PROBED_LAYERS * 3 * _operations(shape, few)
        longest = max(8 * few, 512, round(_MAX_OPERATIONS / work))
        return cls(path, dtype, few, max(2, min(tokens, longest) // few) * few)


def measure_layers(device: torch.device, world: int, runs: LayerRuns) -> dict[str, float]:
    """Return the rates of one of several devices that measure at once, as `DeviceRates` has
    them."""
    config = load_model_config(runs.path)
    body = build_layers(config, runs.dtype, device)
    shape, few, many = compute_model_shape(config, runs.dtype), runs.length, runs.many
    operations = _operations(shape, few)
    timed = [
        packed_run(body, device, number, few, trains)
        for trains in (False, True)
        for number in (few, many)
    ]
    seconds = [found / PROBED_LAYERS for found in measure_seconds(timed, device, world=world)]
    found = {}
    for name, (low, high), passes in (("forward", seconds[:2], 1), ("training", seconds[2:], 3)):
        low = min(low, high)
        per_token = max(1e-12, (high - low) / (many - few))
        if per_token * many > high:
            per_token = high / many
        found[name] = passes * operations / per_token
        found[f"{name}_overhead"] = max(0.0, low - per_token * few)
    del body, timed
    found["memory"] = measure_memory_rate(device, world)
    found["small_op"] = measure_small_op(world)
    return found | collectives(device, world, shape.item * shape.layer.all)


def _operations(shape: ModelShape, length: int) -> float:
    """Return the floating-point operations of a token in a layer's forward."""
    return 2 * shape.layer.all + 2 * length * shape.query


def build_layers(config: PretrainedConfig, dtype: str, device: torch.device) -> Any:
    """Return `PROBED_LAYERS` layers of a model, in training mode."""
    few = narrow_config(config, 1, PROBED_LAYERS)
    few.get_text_config().vocab_size = min(few.get_text_config().vocab_size, 1024)
    with device:
        model = build_language_model(few, dtype=DTYPES[dtype], attn_implementation=PACKED_ATTENTION)
    return decoder_of(model).train()


def packed_run(
    body: Any, device: torch.device, tokens: int, length: int, trains: bool
) -> Callable[[], None]:
    """Return what runs layers forward over packed samples, and backward if it trains."""
    bounds = _sample_bounds(tokens, length)
    packing = PackingMetadata.of(bounds, device)
    ids = torch.zeros(1, int(bounds[-1]), dtype=torch.int64, device=device)
    positions = packing.position_ids(ids.numel())[None]

    def once() -> None:
        with contextlib.nullcontext() if trains else torch.no_grad():
            states = body(
                input_ids=ids, position_ids=positions, packing=packing, use_cache=False
            ).last_hidden_state
        if trains:
            states.sum().backward()

    return once


def _sample_bounds(tokens: int, length: int) -> torch.Tensor:
    """Return the bounds of packed samples from half to one and a half times this length, as a
    step's differ."""
    shares = (torch.arange(tokens // length) + 0.5) / (tokens // length)
    lengths = (length * (0.5 + shares)).round().long().clamp(min=1)
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
