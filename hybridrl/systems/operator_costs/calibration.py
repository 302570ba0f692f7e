"""Measuring pieces of work on the devices of this machine, for `operator_cost`.

Each piece is measured as a job does it: a layer of transformers' own model over packed samples, a
head through our log-probabilities, a token for many rows with a cache, an update of AdamW, a
gather. All devices of the machine are at work at once.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from hybridrl.models import Packing
from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.packed_attention import NAME
from hybridrl.planner.machine.layer_probe import memory_rate, on_all, sample_bounds, small_op
from hybridrl.planner.memory.model_shape import narrowed, shape_of
from hybridrl.planner.step.operator_work import (
    DECODE,
    FORWARD,
    GATHER,
    HEAD,
    HEAD_TRAIN,
    OPTIMIZER,
    TRAIN,
    Device,
    Sample,
    Table,
    Work,
    chosen,
)
from hybridrl.system.cluster_spec import Cluster
from hybridrl.system.device_traits import make_current, synchronize
from hybridrl.system.dtypes import DTYPES

LAYERS = 2
SECONDS = 0.06
"""Of one measurement, at least."""
REPEATS = 5
LARGE, FEW_ROWS = 512, 8
"""Rows of the matrices of which a probe takes a device's rates."""
WIDTH = 1024
MESSAGE = 8 << 20
VOCABULARY = 512


class Family(NamedTuple):
    """Models that differ in size alone.

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


FAMILIES = {
    "llama": Family("llama", 2.7, 64, 1),
    "llama, grouped": Family("llama", 3.5, 32, 4),
    "qwen2": Family("qwen2", 5.0, 64, 4),
    "qwen3": Family("qwen3", 3.0, 128, 2),
    "gemma2": Family("gemma2", 4.0, 64, 2),
    "mistral": Family("mistral", 3.5, 64, 2),
    "phi3": Family("phi3", 2.7, 32, 1),
    "olmo2": Family("olmo2", 2.7, 64, 1),
}
SIZES = (128, 256, 512, 768)
"""Widths of states."""
TOKENS = ((64, 64), (256, 32), (512, 256), (2048, 128))
"""Tokens of a micro-batch, and of a sample."""
ROWS = ((1, 64), (8, 64), (32, 256), (64, 64))
"""Rows that are generated together, and tokens in their cache."""


class Piece(NamedTuple):
    """Work, and the model that it is done with; None: any."""

    work: Work
    model: PretrainedConfig | None


def config_of(family: Family, hidden: int) -> PretrainedConfig:
    """A model of a family."""
    heads = max(family.groups, hidden // family.head)
    return AutoConfig.for_model(
        family.kind,
        hidden_size=hidden,
        intermediate_size=round(family.wide * hidden / 32) * 32,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // family.groups,
        head_dim=family.head,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def pieces_of(config: PretrainedConfig, dtype: str) -> list[Piece]:
    """The work of training, scoring and generating with a model, in some sizes."""
    shape = shape_of(config, dtype)
    layer = Work(
        FORWARD,
        *(1.0, 1.0, shape.hidden, shape.active_of_layer, shape.query, shape.key_value, shape.item),
    )
    found = [
        Piece(replace(layer, op=op, tokens=tokens, length=length), config)
        for op in (FORWARD, TRAIN)
        for tokens, length in TOKENS
    ]
    found += [
        Piece(replace(layer, op=DECODE, tokens=rows, length=length), config)
        for rows, length in ROWS
    ]
    for op in (HEAD, HEAD_TRAIN):
        for tokens, words in ((128, 2048), (1024, 8192)):
            parameters = float(words * shape.hidden)
            found.append(
                Piece(Work(op, tokens, 1.0, shape.hidden, parameters, item=shape.item), None)
            )
    found.append(Piece(Work(OPTIMIZER, float(shape.layer.all)), None))
    found.append(Piece(Work(GATHER, float(shape.item * shape.layer.all)), None))
    return found


def calibrate(
    cluster: Cluster,
    dtype: str,
    families: Sequence[str] = tuple(FAMILIES),
    sizes: Sequence[int] = SIZES,
    limit: int | None = None,
) -> Table:
    """Measures the devices of this machine, all at once; the mean of what they found.

    Args:
        dtype: Name of the precision of computation.
        limit: So many samples, those that stand for the rest; None: all.
    """
    found = on_all(_measure, cluster, dtype, tuple(families), tuple(sizes), limit)
    tables = [Table.of_data(one) for one in found]  # type: ignore[arg-type]
    first = tables[0]
    samples = [
        Sample(rows[0].work, statistics.fmean(row.seconds for row in rows))
        for rows in zip(*(table.samples for table in tables), strict=True)
    ]
    return Table(first.device, samples)


def _measure(
    rank: int,
    world: int,
    kind: str,
    threads: int,
    dtype: str,
    families: Sequence[str],
    sizes: Sequence[int],
    limit: int | None,
) -> Any:
    device = make_current(kind, rank)
    if world > 1:
        torch.set_num_threads(threads)
    known = device_of(device, world, dtype)
    if world > 1:  # that all ranks measure the same, they go by what the first one knows
        told: list[Any] = [known]
        dist.broadcast_object_list(told, src=0)
        (known,) = told
    pieces = [
        piece
        for family in families
        for size in sizes
        for piece in pieces_of(config_of(FAMILIES[family], size), dtype)
        if world > 1 or piece.work.op != GATHER
    ]
    if limit is not None:
        pieces = [pieces[n] for n in chosen([piece.work for piece in pieces], known, limit)]
    samples = [Sample(piece.work, _seconds(piece, dtype, device, world)) for piece in pieces]
    return Table(known, samples).to_data()


def device_of(device: torch.device, world: int, dtype: str) -> Device:
    """What a few seconds tell of a device."""
    a = torch.ones(LARGE, WIDTH, dtype=DTYPES[dtype], device=device)
    b = torch.ones(WIDTH, WIDTH, dtype=DTYPES[dtype], device=device)
    large = _time(lambda: a @ b, device, world)
    small = _time(lambda: a[:FEW_ROWS] @ b, device, world)
    link = 1e12
    if world > 1:
        part = torch.zeros(MESSAGE // 4 // world, device=device)
        link = MESSAGE / _time(lambda: _gather(part, world), device, world)
    return Device(
        2 * LARGE * WIDTH**2 / large,
        2 * FEW_ROWS * WIDTH**2 / small,
        memory_rate(device, world),
        link,
        small_op(world),
        torch.get_num_threads() if device.type == "cpu" else 1,
    )


def _seconds(piece: Piece, dtype: str, device: torch.device, world: int) -> float:
    with _prepared(piece, dtype, device, world) as (once, layers):
        return _time(once, device, world) / layers


@contextlib.contextmanager
def _prepared(
    piece: Piece, dtype: str, device: torch.device, world: int
) -> Iterator[tuple[Callable[[], object], int]]:
    """What does the work once, and for how many layers."""
    work, config = piece
    tokens = int(work.tokens)
    kind = DTYPES[dtype]
    if work.op == OPTIMIZER:
        weight = torch.zeros(tokens, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        yield torch.optim.AdamW([weight], lr=1e-4).step, 1
        return
    if work.op == GATHER:
        part = torch.zeros(max(1, tokens // 4 // world), device=device)
        yield lambda: _gather(part, world), 1
        return
    if work.op in (HEAD, HEAD_TRAIN):
        yield _head(work, kind, device), 1
        return
    assert config is not None  # for it is a layer's
    with device:
        model = build_language_model(
            narrowed(config, 1, LAYERS),
            dtype=kind,
            attn_implementation="sdpa" if work.op == DECODE else NAME,
        )
    if work.op == DECODE:
        yield _decode(model.eval(), work, kind, device), LAYERS
        return
    bounds = sample_bounds(tokens, int(work.length))
    packing = Packing.of(bounds, device)
    ids = torch.zeros(1, int(bounds[-1]), dtype=torch.int64, device=device)
    positions = packing.position_ids(ids.numel())[None]
    body = decoder_of(model).train()

    def layers() -> None:
        with contextlib.nullcontext() if work.op == TRAIN else torch.no_grad():
            states = body(
                input_ids=ids, position_ids=positions, packing=packing, use_cache=False
            ).last_hidden_state
        if work.op == TRAIN:
            states.sum().backward()

    yield layers, LAYERS


def _head(work: Work, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
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


def _decode(model: Any, work: Work, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A token more for each row. The cache is set back each time."""
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


def _gather(part: Tensor, world: int) -> None:
    with warnings.catch_warnings():  # newer versions of torch prefer names that older ones lack
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(torch.empty(len(part) * world, device=part.device), part)


def _time(once: Callable[[], object], device: torch.device, world: int) -> float:
    """The median of some rounds; ranks go through as many."""
    once()
    synchronize(device)
    begin = time.perf_counter()
    once()
    synchronize(device)
    least = time.perf_counter() - begin
    number = max(1, int(SECONDS / REPEATS / max(least, 1e-6)))
    if world > 1:
        told = torch.tensor(float(number), device=device)
        dist.broadcast(told, 0)
        number = int(told)
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(number):
            once()
        synchronize(device)
        found.append((time.perf_counter() - begin) / number)
    return statistics.median(found)
