"""New weights for a generator of its own: bytes and seconds of each `rollout.weight_sync`.

    python benchmarks/weight_sync.py [--updates 50] [--rates 100mbit,400mbit] [--hidden 256]

A tiny model that generates in bfloat16 learns by GRPO from its own samples, at learning rates of
1e-6, 1e-5 and 1e-4. Its weights after each update are kept, and all methods in turn bring them:
from a process that trains to one that generates, as the trainers' workers do, over this machine's
loopback, and between hosts with a link of a limited rate (network namespaces; see
tests/netlab.py; needs root). There `auto` begins without knowing anything.

Bytes are compared with those of `full`, seconds of `auto` with those of the best other method that
is exact, and those of the others with `full`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from figures import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network

from hybridrl.algorithms import PolicyObjective, group_relative
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig, Config, OptimizerConfig, RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.controller.worker import Rendezvous
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.model_loading import load_model, make_tiny_model
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh, join_group_world, join_world
from hybridrl.placement.disaggregated_actor import choose_weight_transport
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.system.cluster_spec import DeviceSlot
from hybridrl.weights.weight_channel import WeightChannel
from hybridrl.weights.weight_sync import WeightSync

CPU = torch.device("cpu")
METHODS = ("full", "delta", "int8", "int4_delta", "auto")
RATES = (1e-6, 1e-5, 1e-4)
PROMPTS, SAMPLES, TOKENS = 4, 4, 8
PORT = 29617
LOOPBACK = "127.0.0.1"


def train_engine(folder: Path, learning_rate: float, updates: int) -> TrainEngine:
    config = ActorConfig(optimizer=OptimizerConfig(learning_rate=learning_rate))
    mesh = ParallelMesh(RankMesh({"dp": 1}), CPU)
    engine = TrainEngine(CausalPolicy(load_model(str(folder), "float32")), mesh, "bfloat16", config)
    engine.start_optimizer(config.optimizer, updates)
    return engine


def rollout_engine(folder: Path) -> TransformersEngine:
    tokenizer = build_character_tokenizer()
    return TransformersEngine(
        EngineSetup(
            str(folder), str(folder), "bfloat16", eos_token_ids=[tokenizer.eos_token_id], device=CPU
        ),
        RolloutConfig(max_sequences=PROMPTS * SAMPLES),
    )


def learn(folder: Path, learning_rate: float, updates: int) -> None:
    """Keeps the weights after each update, as the generator would have them, in a file."""
    join_group_world(WorkerContext("actor", 0, 1))
    train, rollout = train_engine(folder, learning_rate, updates), rollout_engine(folder)
    sync = WeightSync.between(train, rollout, torch.bfloat16)
    sampling, versions = SamplingSettings(max_tokens=TOKENS), []
    generator = torch.Generator().manual_seed(0)
    for update in range(updates):
        sync.run()
        prompts = torch.randint(3, 40, (PROMPTS, 6), generator=generator)
        prompts = prompts.repeat_interleave(SAMPLES, 0)
        batch = Batch.from_columns({"prompt_ids": list(prompts)})
        batch |= rollout.generate(batch, sampling, seed=update * 1000)
        responses = batch.ragged("response_ids")
        scores = torch.tensor([float((row % 2).sum()) for row in responses.rows()])
        groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
        mask = torch.ones_like(responses.values, dtype=torch.uint8)
        weights = torch.full((len(mask),), 1 / len(mask))
        batch = batch.with_columns(
            {
                "response_mask": responses._replace(values=mask),
                "loss_weights": responses._replace(values=weights),
                "advantages": group_relative(scores, groups),
            }
        )
        train.update(batch, PolicyObjective())
        versions.append(
            {name: tensor.bfloat16() for name, tensor in train.local_parameters().items()}
        )
    torch.save(versions, folder / "versions.pt")


def end_of_link(rank: int, folder: Path, address: str) -> None:
    """One side: brings, or takes, all versions by all methods; the generator tells the figures."""
    torch.set_num_threads(1)
    listener = socket.create_server((address, PORT)) if rank == 0 else None
    versions = torch.load(folder / "versions.pt")
    join_group_world(WorkerContext("actor", 0, 1))
    train = rollout = None
    if rank == 0:
        train = train_engine(folder, 0.0, 1)
    else:
        rollout = rollout_engine(folder)
    group = join_world("weights", rank, 2, Rendezvous(address, PORT, listener), "cpu")
    ends = [DeviceSlot("cpu", "0", 0), DeviceSlot("cpu", "0" if address == LOOPBACK else "1", 0)]
    channels = {}
    for method in METHODS:
        setting = Config(rollout=RolloutConfig(weight_sync=method))
        chosen = choose_weight_transport(setting, ends)[1]
        channels[method] = WeightChannel(group, torch.bfloat16, CPU, train, rollout, method=chosen)
    seconds, sizes = dict.fromkeys(METHODS, 0.0), dict.fromkeys(METHODS, 0)
    for version, weights in enumerate(versions):
        if train is not None:
            with torch.no_grad():
                for name, tensor in train.local_parameters().items():
                    tensor.copy_(weights[name])
        for method, channel in channels.items():  # in turn, so that a slow moment is one for all
            torch.distributed.barrier(group)
            begin = time.perf_counter()
            if rank == 0:
                channel.send(version)
                continue
            cost = channel.receive()[1]
            seconds[method] += time.perf_counter() - begin
            sizes[method] += cost.received
            if method in ("full", "delta", "auto"):
                held = dict(rollout._model.named_parameters())
                assert all(torch.equal(held[name], weights[name]) for name in weights)
    if rank == 1:
        for method in METHODS:
            print(json.dumps([method, sizes[method], seconds[method]]), flush=True)
    torch.distributed.barrier(group)


def measure(folder: Path, hosts: Sequence[Host]) -> dict[str, tuple[int, float]]:
    """Bytes and seconds of all versions, by method, over the link between two hosts (none: over
    loopback)."""
    address = hosts[0].address if hosts else LOOPBACK
    # Namespaces share the machine's host name, by which gloo would look for an address.
    interface = {"GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo", "OMP_NUM_THREADS": "1"}
    ends = []
    for rank in range(2):
        command = [sys.executable, __file__, "--end", str(rank), str(folder), address]
        start = hosts[rank].popen if hosts else subprocess.Popen
        ends.append(
            start(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **interface})
        )
    said = [end.communicate()[0] for end in ends]
    if any(end.returncode for end in ends):
        raise SystemExit("A side of the link ended with an error, which stands above.")
    lines = [json.loads(line) for line in said[1].splitlines() if line.startswith("[")]
    return {method: (size, seconds) for method, size, seconds in lines}


def tell(link: str, rate: float, found: dict[str, tuple[int, float]]) -> None:
    full = found["full"]
    for method, (size, seconds) in found.items():
        name = f"weight_sync.{link}.lr_{rate:g}.{method}"
        exact = method == "delta" and rate == RATES[0]
        report(f"{name}.bytes", size, full[0], "<= 0.2" if exact else "as it is", "bytes")
        if method == "auto":
            best = min(found["full"][1], found["delta"][1])
            report(f"{name}.seconds", seconds, best, "<= 1.05", "s")
        else:
            report(f"{name}.seconds", seconds, full[1], "as it is", "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--rates", default="100mbit,400mbit", help="of links; empty: loopback only")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model")
    parser.add_argument("--end", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.end:
        rank, folder, address = options.end
        end_of_link(int(rank), Path(folder), address)
        return
    for learning_rate in RATES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = make_tiny_model(
                Path(temporary),
                build_character_tokenizer(),
                seed=0,
                hidden_size=options.hidden,
                layers=4,
                heads=options.hidden // 64,
                context=64,
            )
            learn(folder, learning_rate, options.updates)
            for link in ["loopback", *filter(None, options.rates.split(","))]:
                limited = contextlib.nullcontext([])
                if link != "loopback":
                    limited = network(2, link)
                with limited as hosts:
                    tell(link, learning_rate, measure(folder, hosts))


if __name__ == "__main__":
    main()
