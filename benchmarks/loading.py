"""Loading a model of 3 GB on four ranks, and saving it: what no rank needs is memory for the whole.

    python benchmarks/loading.py [--layers 21]

The workers that trainers use, cut by FSDP2 over four gloo ranks, or by tensor parallelism: an
actor, one with adapters, and a frozen reference, from a folder of float32 weights that is made
first. Of each the most host memory above what the rank then holds, as the kernel counts it (VmHWM:
mapped files, too), and the bytes that all ranks have read and written, Python's own files included.
Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from figures import report
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.algorithms import negative_log_likelihood
from hybridrl.checkpoint.tensors.tensor_writer import write_tensors
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, ParallelConfig, RolloutConfig
from hybridrl.controller.worker import Rendezvous, WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.parallel.process_group import join_group_world
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.training_engines import ModelSource

RANKS = 4
ALLOWED_BYTES = 500_000_000
"""Of memory above what a rank holds."""


class Case(NamedTuple):
    """A worker, and how its model is cut."""

    parallel: ParallelConfig
    is_frozen: bool = False
    lora: int = 0


CASES = {
    "actor, FSDP": Case(ParallelConfig()),
    "actor, tp=4": Case(ParallelConfig(tp=4)),
    "reference, tp=2 and FSDP": Case(ParallelConfig(tp=2), is_frozen=True),
    "actor with adapters, FSDP": Case(ParallelConfig(), lora=8),
}


class Cost(NamedTuple):
    """What something has cost a rank.

    Attributes:
        seconds: Until all ranks were done.
        memory: The most beyond what it had before, bytes.
        held: Of the model's parameters, bytes.
        read, written: Bytes of files.
    """

    seconds: float
    memory: int
    held: int
    read: int
    written: int


def from_kernel(file: str, name: str) -> int:
    """A number that the kernel counts for this process."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Watch:
    """Counts from where it is made."""

    def __init__(self) -> None:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the highest memory is that of now
        self._memory = from_kernel("status", "VmRSS")
        self._read, self._written = (from_kernel("io", name) for name in ("rchar", "wchar"))
        self._begin = time.perf_counter()

    def cost(self, held: int) -> Cost:
        """Since then."""
        dist.barrier()
        return Cost(
            time.perf_counter() - self._begin,
            1024 * (from_kernel("status", "VmHWM") - self._memory),
            held,
            from_kernel("io", "rchar") - self._read,
            from_kernel("io", "wchar") - self._written,
        )


def make_model(folder: Path, layers: int) -> int:
    """Writes a model of random weights, a tensor at a time; gives its bytes."""
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    read = lru_cache(maxsize=1)(lambda name: torch.randn(shapes[name]).mul_(0.02))
    pieces = {name: make_local_pieces(name, full_box(shape)) for name, shape in shapes.items()}
    write_tensors(folder, TensorLayout(shapes, {0: pieces}), 0, read, torch.float32, None)
    config.save_pretrained(folder)
    build_character_tokenizer().save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def program(
    rank: int, address: str, port: int, listener: socket.socket, folder: Path, name: str
) -> None:
    torch.set_num_threads(1)
    case = CASES[name]
    rendezvous = Rendezvous(address, port, listener if rank == 0 else None)
    context = WorkerContext("actor", rank, RANKS, host=rank, hosts=RANKS, rendezvous=rendezvous)
    join_group_world(context)
    source = ModelSource(str(folder / "model"), str(folder / "model"), "float32", 256, (1,))
    config = ActorConfig(parallel=case.parallel, lora=LoraAdapterConfig(rank=case.lora))
    watch = Watch()
    if case.is_frozen:
        worker = ReferenceWorker(context, source, config, temperature=1.0)
    else:
        worker = ActorWorker(
            *(context, source, config, RolloutConfig(), negative_log_likelihood),
            temperature=1.0,
            updates=1,
            job="loading",
            generates=False,
        )
    parameters = worker.model_engine.local_parameters().values()
    held = sum(parameter.nbytes for parameter in parameters)
    found = {"loading": watch.cost(held)}
    if not (case.is_frozen or case.lora):
        watch = Watch()
        worker.save_model(str(folder / "saved"), "float32")
        found["saving"] = watch.cost(held)
    torch.save({what: tuple(cost) for what, cost in found.items()}, folder / f"{rank}.pt")


def run(folder: Path, name: str, size: int) -> None:
    """Prints the figures of a case."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        torch.multiprocessing.start_processes(
            program,
            args=(*listener.getsockname(), listener, folder, name),
            nprocs=RANKS,
            start_method="forkserver",
        )
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    for what in ranks[0]:
        costs = [Cost(*of_rank[what]) for of_rank in ranks]
        print(f"{name}: {what} took {costs[0].seconds:.1f} s; a rank holds {costs[0].held} bytes")
        if what == "loading":
            above = max(cost.memory - cost.held for cost in costs)
            read = sum(cost.read for cost in costs)
            report(f"{name}: bytes read, against the folder", read, size, "<= 1.05", "bytes")
        else:
            above, written = max(cost.memory for cost in costs), sum(c.written for c in costs)
            report(f"{name}: bytes written, against the folder", written, size, "<= 1.05", "bytes")
        title = f"{name}: most memory of {what} above what a rank holds"
        report(title, above, ALLOWED_BYTES, "<= 1.0", "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=21, help="35 million parameters each")
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["hybridrl.workers.actor_worker"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_model(folder / "model", arguments.layers)
        print(f"{size / 1e9:.2f} GB of weights")
        for case in CASES:
            run(folder, case, size)


if __name__ == "__main__":
    main()
