"""Planning a weight sync of 1,024 ranks: what it costs one of them before the first one.

    python benchmarks/plan_at_size.py

A rank reads what all ranks say of the boxes that they train, plans its own moves and cuts them into
rounds. Seconds, and the most memory that this takes, in a process of its own for each case and
figure (tracing memory takes time). The exchange of the boxes between ranks is not in it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import torch
from figures import SMOKE, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from weight_transitions import Parameter, shard_box

from hybridrl.layout.boxes import Piece, RankPieces, box_shape, full_box, make_local_pieces
from hybridrl.layout.tensor_layout import (
    TensorLayout,
    compute_peak_elements,
    compute_redundant_elements,
)
from hybridrl.layout.transfer_planner import plan_transfer
from hybridrl.parallel.parameter_layout import PackedRankPieces, merge_rank_pieces
from hybridrl.system.device_traits import default_bucket_bytes
from hybridrl.weights.parcel_transfer import (
    RankLoad,
    compute_rank_loads,
    compute_round_capacity,
    group_into_streams,
    schedule,
    split_stream,
)

ALLOWED_BYTES = 200_000_000
HEAD_DIM = 128
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class Llama(NamedTuple):
    """Sizes of a model."""

    layers: int
    hidden: int
    key_value: int
    intermediate: int
    vocabulary: int

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter, and the dim that tensor parallelism cuts."""
        h, kv, wide = self.hidden, self.key_value * HEAD_DIM, self.intermediate
        layer = {
            "input_layernorm": Parameter((h,)),
            "self_attn.q_proj": Parameter((h, h), 0),
            "self_attn.k_proj": Parameter((kv, h), 0),
            "self_attn.v_proj": Parameter((kv, h), 0),
            "self_attn.o_proj": Parameter((h, h), 1),
            "post_attention_layernorm": Parameter((h,)),
            "mlp.gate_proj": Parameter((wide, h), 0),
            "mlp.up_proj": Parameter((wide, h), 0),
            "mlp.down_proj": Parameter((h, wide), 1),
        }
        return {
            "model.embed_tokens": Parameter((self.vocabulary, h), 0),
            **{
                f"model.layers.{number}.{name}": parameter
                for number in range(self.layers)
                for name, parameter in layer.items()
            },
            "model.norm": Parameter((h,)),
            "lm_head": Parameter((self.vocabulary, h), 0),
        }


class Case(NamedTuple):
    """Ranks that train (FSDP x tp) and that generate (replicas of tp), and the seconds that
    planning may take one of them."""

    model: Llama
    ranks: int
    tp: int
    rollout_tp: int
    separated: bool = False
    seconds: float = 5

    @property
    def trainers(self) -> int:
        return self.ranks // 2 if self.separated else self.ranks


LLAMA_70B = Llama(80, 8192, 8, 28672, 128256)
LLAMA_7B = Llama(32, 4096, 32, 11008, 32000)
CASES = {
    "70B on 1,024 ranks, tp8 to tp8": Case(LLAMA_70B, 1024, 8, 8),
    "70B from 512 ranks to 512 others, tp8 to tp8": Case(LLAMA_70B, 1024, 8, 8, separated=True),
    "70B on 1,024 ranks, FSDP to tp8": Case(LLAMA_70B, 1024, 1, 8, seconds=10),
    "7B on 64 ranks, FSDP to tp1": Case(LLAMA_7B, 64, 1, 1),
    "7B on 256 ranks, FSDP to tp1": Case(LLAMA_7B, 256, 1, 1),
}


def all_said(case: Case, parameters: dict[str, Parameter]) -> list[PackedRankPieces]:
    """What all ranks say of what they train, as it reaches each of them."""
    found = []
    for rank in range(case.trainers):
        known: dict[Parameter, tuple[Piece, ...]] = {}
        for each in parameters.values():
            if each not in known:
                tp = [] if each.dim is None else [(each.dim, rank % case.tp, case.tp)]
                shards = [*tp, (0, rank // case.tp, case.trainers // case.tp)]
                known[each] = make_local_pieces("", shard_box(each.shape, shards))
        said = PackedRankPieces.of_pieces({name: known[each] for name, each in parameters.items()})
        found.append(pickle.loads(pickle.dumps(said)))
    return found


def pieces_generated(parameters: dict[str, Parameter], index: int, count: int) -> RankPieces:
    """What one of `count` tensor-parallel ranks of a replica holds, fused as vLLM does it."""
    found, rows = {}, {}
    for name, (shape, dim, _) in parameters.items():
        box = full_box(shape) if dim is None else shard_box(shape, [(dim, index, count)])
        layer, _, leaf = name.rpartition(".")
        tensor = f"{layer}.{FUSED.get(leaf, leaf)}"
        first = rows.get(tensor, 0)
        rows[tensor] = first + box_shape(box)[0]
        found[name] = (Piece(box, tensor, (first, *(0 for _ in shape[1:]))),)
    return found


def prepare(
    case: Case, rank: int, said: list[PackedRankPieces], generated: list[RankPieces]
) -> None:
    """What `WeightSync` and `Reshard` do of a rank's own before the first sync."""
    shapes = {name: each.shape for name, each in case.model.parameters().items()}
    source = merge_rank_pieces([shapes] * case.trainers, said)
    first = case.trainers if case.separated else 0
    receivers = range(first, first + case.trainers)
    target = TensorLayout(shapes, {r: generated[(r - first) % case.rollout_tp] for r in receivers})
    own = plan_transfer(source, target, rank)
    compute_peak_elements(source.of(rank), target.of(rank))
    compute_redundant_elements(source.of(rank), target.of(rank))
    streams = group_into_streams(own.moves)
    load = compute_rank_loads(streams).get(rank, RankLoad())
    cut = schedule(load, compute_round_capacity(default_bucket_bytes("cuda"), torch.bfloat16))
    for stream in streams:
        split_stream(stream, cut)


def measure(name: str, traces: bool, results: multiprocessing.Queue) -> None:
    """Seconds of this process's work, or the most bytes."""
    case = CASES[name]
    if traces:
        tracemalloc.start()  # what others say counts, too
    parameters = case.model.parameters()
    said = all_said(case, parameters)
    generated = [pieces_generated(parameters, i, case.rollout_tp) for i in range(case.rollout_tp)]
    ranks = [0, case.ranks - 1]  # of separated groups one of each
    worst = 0.0
    for rank in ranks:
        if traces:
            tracemalloc.reset_peak()
            prepare(case, rank, said, generated)
            worst = max(worst, tracemalloc.get_traced_memory()[1])
        else:
            begin = time.process_time()
            prepare(case, rank, said, generated)
            worst = max(worst, time.process_time() - begin)
    results.put(worst)


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    for name in [*CASES][-2:-1] if SMOKE else CASES:
        found = []
        for traces in (False, True):
            results = spawn.Queue()
            process = spawn.Process(target=measure, args=(name, traces, results))
            process.start()
            found.append(results.get())
            process.join()
        report(f"{name}, time", found[0], CASES[name].seconds, "<= 1", "s")
        report(f"{name}, memory", found[1], ALLOWED_BYTES, "<= 1", "bytes")


if __name__ == "__main__":
    main()
