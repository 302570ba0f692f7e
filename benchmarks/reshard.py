"""From training to generation: what the ways to change the layout of weights cost.

    python benchmarks/reshard.py [--rounds 5] [--no-vllm]

Four ranks train a model of 100 million parameters in four tensor-parallel parts, and generate as
two replicas of two parts each. Three ways, of the same code: each rank gets what it lacks
(HybridFlow's engine), the training replica gathers the whole model (HybridFlow-V), and all ranks
gather ZeRO shards of the whole model (DeepSpeed-Chat); and a plain exchange of as many bytes. Then
into vLLM itself: boxes straight into its parameters, against whole tensors through its loaders.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from figures import report
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from weight_transitions import (
    HybridMesh,
    Parameter,
    Transition,
    VanillaMesh,
    count_received,
    gather_all,
    nested,
    vanilla,
)

from hybridrl.config.schema import ActorConfig, ParallelConfig, RolloutConfig
from hybridrl.config.schema import RolloutParallelConfig as RolloutParallel
from hybridrl.controller.worker import Rendezvous, WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.boxes import box_shape
from hybridrl.layout.tensor_layout import TensorLayout, make_tensor_sink
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.model_loading import load_model
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh, join_group_world
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.system.shared_memory import remove_shared_memory
from hybridrl.weights.collective_reshard import CollectiveReshard
from hybridrl.weights.weight_sync import WeightSync

RANKS, TRAIN_TP, ROLLOUT_TP = 4, 4, 2
CPU = torch.device("cpu")
CONFIG = Qwen2Config(
    vocab_size=16384,
    hidden_size=768,
    intermediate_size=2560,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
)
JOB = "hybridrl-benchmark"


def parameters() -> dict[str, Parameter]:
    """Every matrix of the model and how tensor parallelism cuts it."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(CONFIG)
    cuts = {"o_proj": 1, "down_proj": 1, "norm": None, "layernorm": None}
    return {
        name: Parameter(
            tuple(p.shape), next((dim for part, dim in cuts.items() if part in name), 0)
        )
        for name, p in model.named_parameters()
    }


def tensors(layout: TensorLayout, rank: int) -> dict[str, torch.Tensor]:
    """Memory for what a rank holds."""
    return {
        piece.tensor: torch.zeros(box_shape(piece.box))
        for pieces in layout.pieces[rank].values()
        for piece in pieces
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


class Change:
    """One way from training to generation: gather, then keep what generation needs."""

    def __init__(self, transition: Transition, rank: int) -> None:
        self._old = tensors(transition.training, rank)
        self._gathered = tensors(transition.gathered, rank)
        self._gather = CollectiveReshard(transition.gather(), torch.float32, CPU)
        self._keep = None
        if transition.gathered is not transition.generation:
            self._new = tensors(transition.generation, rank)
            self._keep = CollectiveReshard(transition.keep(), torch.float32, CPU)
        self.received = count_received(transition.gather())[rank] * 4

    def __call__(self) -> None:
        self._gather(self._old.__getitem__, make_tensor_sink(self._gathered))
        if self._keep is not None:
            self._keep(self._gathered.__getitem__, make_tensor_sink(self._new))


def layouts(rank: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Median seconds of each way, and the bytes that a rank receives."""
    sizes = {"pp": 1, "tp": TRAIN_TP, "dp": RANKS // TRAIN_TP, "rollout_tp": ROLLOUT_TP}
    model = parameters()
    arms = {
        "nested": Change(nested(HybridMesh(**sizes), model), rank),
        "vanilla": Change(vanilla(VanillaMesh(**sizes), model), rank),
        "gather_all": Change(gather_all(VanillaMesh(**sizes), model), rank),
    }
    share = arms["nested"].received // RANKS
    out, back = torch.zeros(share * RANKS, dtype=torch.uint8), torch.empty(share * RANKS).byte()
    seconds = {name: [] for name in (*arms, "plain")}
    for _ in range(rounds + 1):
        for name, arm in arms.items():
            seconds[name].append(timed(arm))
        seconds["plain"].append(timed(lambda: dist.all_to_all_single(back, out)))
    found = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    received = {name: arm.received for name, arm in arms.items()} | {"plain": share * RANKS}
    return {name: (found[name], received[name]) for name in found}


def into_vllm(folder: Path, rounds: int) -> dict[str, tuple[float, int]]:
    """As `layouts`, for an engine that trains and one of vLLM that generates."""
    from hybridrl.rollout.vllm_engine import VLLMEngine

    parallel = ParallelConfig(tp=TRAIN_TP)
    mesh = ParallelMesh(build_training_mesh(RANKS, parallel, ROLLOUT_TP), CPU)
    policy = CausalPolicy(load_model(str(folder), "float32"))
    train = TrainEngine(policy, mesh, "float32", ActorConfig(parallel=parallel))
    rollout = VLLMEngine(
        EngineSetup(
            str(folder),
            str(folder),
            "float32",
            context_length=64,
            eos_token_ids=[1],
            device=CPU,
            seed=0,
            job=JOB,
        ),
        RolloutConfig(parallel=RolloutParallel(ROLLOUT_TP), kv_cache_gib=0.05, max_sequences=8),
    )
    sync = WeightSync.between(train, rollout, torch.float32)
    received = sync.run().received
    boxes, whole = [], []
    with torch.no_grad():
        for _ in range(rounds + 1):
            boxes.append(timed(sync.run))
            whole.append(timed(lambda: rollout.load(train.full_weights())))
    rollout.close()
    return {
        "boxes": (statistics.median(boxes[1:]), received),
        "whole tensors": (statistics.median(whole[1:]), 0),
    }


def program(rank: int, address: str, port: int, listener: socket.socket, folder: Path) -> None:
    torch.set_num_threads(1)
    settings = torch.load(folder / "settings.pt")
    rendezvous = Rendezvous(address, port, listener if rank == 0 else None)
    join_group_world(
        WorkerContext("actor", rank, RANKS, host=rank, hosts=RANKS, rendezvous=rendezvous)
    )
    found = layouts(rank, settings["rounds"])
    if settings["vllm"]:
        found |= into_vllm(folder / "model", settings["rounds"])
    torch.save(found, folder / f"{rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-vllm", action="store_true")
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["hybridrl.engine"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(
            {"rounds": arguments.rounds, "vllm": not arguments.no_vllm}, folder / "settings.pt"
        )
        if not arguments.no_vllm:
            Qwen2ForCausalLM(CONFIG).save_pretrained(folder / "model")
            build_character_tokenizer().save_pretrained(folder / "model")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            torch.multiprocessing.start_processes(
                program,
                args=(*listener.getsockname(), listener, folder),
                nprocs=RANKS,
                start_method="forkserver",
            )
        found = torch.load(folder / "0.pt")
    remove_shared_memory(JOB)
    for name, (seconds, received) in found.items():
        print(f"{name:14} {seconds * 1e3:8.0f} ms   {received / 1e6:7.1f} MB received by a rank")
    seconds = {name: value for name, (value, _) in found.items()}
    other = min(seconds["vanilla"], seconds["gather_all"])
    report("tp4 to tp2, against the best other way", seconds["nested"], other, "<= 0.6", "s")
    report("tp4 to tp2, against a plain exchange", seconds["nested"], seconds["plain"], "<= 3", "s")
    if "boxes" in seconds:
        whole = seconds["whole tensors"]
        report("into vLLM, boxes against whole tensors", seconds["boxes"], whole, "<= 0.6", "s")


if __name__ == "__main__":
    main()
