"""Saving and loading 0.5 GiB of training state on four ranks: what it costs those who train.

    python benchmarks/checkpoint.py [--rounds 5]

A model of 42 million parameters, cut by FSDP2 over four gloo ranks, with AdamW's moments, float32.
Against torch's distributed checkpoints (DCP): how long training waits for a save. Then how well the
writing is divided, what the plan of who writes what costs the second time, and training while a
save is written. Last, loading into another cut (two data-parallel times two tensor-parallel),
against a first rank that reads everything and sends each rank its part, without any checks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import report
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.algorithms import TokenSegments, negative_log_likelihood, token_weights
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.checkpoint.engine_state.state_files import MOMENTS_STEM
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.checkpoint.tensors import tensor_reader as reading
from hybridrl.checkpoint.tensors.file_plan import MODEL_STEM
from hybridrl.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
from hybridrl.controller.worker import Rendezvous, WorkerContext
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh, join_group_world

RANKS = 4
SAMPLES, TOKENS = 4, 48
CPU = torch.device("cpu")
CONFIG = Qwen2Config(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=11,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
CUTS = {"saved": ParallelConfig(), "loaded": ParallelConfig(tp=2)}


def make_engine(parallel: ParallelConfig) -> TrainEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=PACKED_ATTENTION)
    model.config.use_cache = False
    mesh = ParallelMesh(build_training_mesh(RANKS, parallel), CPU)
    config = ActorConfig(parallel=parallel)
    engine = TrainEngine(CausalPolicy(model), mesh, "float32", config)
    engine.start_optimizer(OptimizerConfig(learning_rate=1e-4), updates=1000)
    return engine


def make_batch() -> Batch:
    """Random rows of one rank."""
    bounds = torch.arange(SAMPLES + 1) * TOKENS
    mask = torch.ones(SAMPLES * TOKENS, dtype=torch.uint8)
    weights = token_weights(mask, "token-mean", segments=TokenSegments.from_cu_seqlens(bounds))
    draw = lambda n: [torch.randint(CONFIG.vocab_size, (n,)) for _ in range(SAMPLES)]  # noqa: E731
    return Batch.from_columns(
        {
            "prompt_ids": draw(4),
            "response_ids": draw(TOKENS),
            "response_mask": RaggedColumn(mask, bounds),
            "loss_weights": RaggedColumn(weights / RANKS, bounds),
        }
    )


def loss(outputs, columns, segments):  # type: ignore[no-untyped-def]
    return negative_log_likelihood(outputs["log_probs"])


def timed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def emptied(rank: int, folder: Path) -> Path:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def saving(rank: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """How long training waits for each way to save, the times of plans, and bytes."""
    engine = make_engine(CUTS["saved"])
    engine.update(make_batch(), loss)
    engine.layout()
    saver, found = EngineStateSaver(engine), {}
    found["plans"] = [timed(lambda: saver.parts), timed(lambda: saver.parts)]
    modules, optimizers = get_state_dict(engine.model, engine.optimizer)
    state = {"model": modules, "optimizer": optimizers}
    seconds: dict[str, list[float]] = {"ours": [], "dcp": [], "dcp async": []}
    for _ in range(rounds + 1):  # the first takes memory
        place = emptied(rank, folder / "saved")
        seconds["ours"].append(timed(lambda at=place: saver.start(at, {}, {})))
        saved = saver.finish(wait=True)
        place = emptied(rank, folder / "dcp")
        seconds["dcp"].append(timed(lambda at=place: dcp.save(state, checkpoint_id=str(at))))
        place, running = emptied(rank, folder / "dcp"), []
        seconds["dcp async"].append(
            timed(
                lambda at=place, into=running: into.append(
                    dcp.async_save(state, checkpoint_id=str(at))
                )
            )
        )
        running[0].result()
    found |= {name: values[1:] for name, values in seconds.items()}
    found["bytes"] = [float(saved.bytes)]
    found["undisturbed"], found["disturbed"] = training(rank, engine, saver, folder, rounds)
    return found


def training(
    rank: int, engine: TrainEngine, saver: EngineStateSaver, folder: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of a step, without and with a save under way; in turns."""
    batch, plain, beside = make_batch(), [], []
    for _ in range(rounds):
        plain += [timed(lambda: engine.update(batch, loss)) for _ in range(2)]
        place = emptied(rank, folder / "beside")
        saver.start(place, {}, {})
        while True:
            beside.append(timed(lambda: engine.update(batch, loss)))
            under_way = torch.tensor(float(saver.finish(wait=False) is None))
            dist.all_reduce(under_way)
            if not under_way:
                break
    return plain, beside


def loading(rank: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds, and the bytes read and needed by this rank."""
    engine = make_engine(CUTS["loaded"])
    layout, count, true = engine.layout(), [0], reading.os.preadv

    def counted(*arguments: object) -> int:
        got = true(*arguments)
        count[0] += got
        return got

    def scatter() -> None:
        """The first rank reads all files and sends everybody's parts, which are received where they
        are to be."""
        weights, read = engine.local_parameters(), {}
        targets = dict(weights)
        for kind in ("exp_avg", "exp_avg_sq"):
            targets |= {f"{kind}/{name}": torch.empty_like(w) for name, w in weights.items()}
        if rank == 0:
            for stem in (MODEL_STEM, MOMENTS_STEM):
                read |= load_file(folder / "saved" / f"{stem}.safetensors")
        for stored, target in targets.items():
            if rank:
                dist.recv(target, 0)
                continue
            sent = []
            for other in range(RANKS):
                (piece,) = layout.pieces[other][stored.rpartition("/")[2]]
                part = read[stored][tuple(slice(*side) for side in piece.box)]
                if other:
                    sent.append(dist.isend(part.contiguous(), other))
                else:
                    target.copy_(part)
            for sending in sent:
                sending.wait()

    held = sum(tensor.nbytes for tensor in engine.local_parameters().values())
    seconds: dict[str, list[float]] = {"boxes": [], "scatter": []}
    reading.os.preadv = counted
    for _ in range(rounds):
        count[0] = 0
        seconds["boxes"].append(timed(lambda: load_training_state(engine, folder / "saved")))
        seconds["scatter"].append(timed(scatter))
    return seconds | {"read": [float(count[0])], "needed": [3.0 * held]}


def program(rank: int, address: str, port: int, listener: socket.socket, folder: Path) -> None:
    torch.set_num_threads(1)
    rounds = torch.load(folder / "settings.pt")["rounds"]
    rendezvous = Rendezvous(address, port, listener if rank == 0 else None)
    join_group_world(
        WorkerContext("actor", rank, RANKS, host=rank, hosts=RANKS, rendezvous=rendezvous)
    )
    found = saving(rank, folder, rounds) | loading(rank, folder, rounds)
    torch.save(found, folder / f"{rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["hybridrl.engine"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"rounds": arguments.rounds}, folder / "settings.pt")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            torch.multiprocessing.start_processes(
                program,
                args=(*listener.getsockname(), listener, folder),
                nprocs=RANKS,
                start_method="forkserver",
            )
        ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
        files = [*folder.glob("saved/model*.safetensors"), *folder.glob("saved/mom*.safetensors")]
        written = sum(file.stat().st_size for file in files)
    first = {name: statistics.median(values) for name, values in ranks[0].items()}
    plans, sizes = ranks[0]["plans"], [rank["bytes"][0] for rank in ranks]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    one_copy = 12 * sum(parameter.numel() for parameter in model.parameters())
    print(f"{written / 2**20:.0f} MiB; training waits {first['ours']:.2f} s for a save")
    report("stall, against DCP", first["ours"], first["dcp"], "<= 0.25", "s")
    report("stall, against DCP async", first["ours"], first["dcp async"], "<= 1.0", "s")
    report("bytes written, against one copy", written, one_copy, "<= 1.01", "bytes")
    report("bytes of the busiest rank", max(sizes), one_copy / RANKS, "<= 1.15", "bytes")
    report("second plan, against the first", plans[1], plans[0], "<= 0.2", "s")
    speed = [1 / statistics.fmean(ranks[0][name]) for name in ("disturbed", "undisturbed")]
    report("training during a save", *speed, ">= 0.9", "steps/s")
    read, needed = (sum(rank[name][0] for rank in ranks) for name in ("read", "needed"))
    report("loading in another cut, bytes read", read, needed, "<= 1.05", "bytes")
    report("loading, against scattering", first["boxes"], first["scatter"], "<= 0.6", "s")


if __name__ == "__main__":
    main()
