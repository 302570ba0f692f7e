"""Training with a rank of half the speed: which layers have to compute in fewer bits.

    python benchmarks/mixed_devices.py [--layers 8] [--hidden 512] [--tokens 2048] [--rounds 5]

Two hosts of one core each, the second with half of its time (tests/netlab.py; control groups; needs
root), train a model in float32 with data parallelism. `precision_planning` measures and
plans; then updates of four arms take turns: the first rank alone, both with whole layers, both
with all layers of the second in 8 bits, and by the plan. Figures: the plan's step against that of
the first rank alone, the share of layers that are lowered, the predicted time against the measured
one, how much of the model's KL the indicator explains (rank correlation), and the loss after as
many updates against that of whole layers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from figures import report
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network

from hybridrl.algorithms import TokenLoss
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.controller.worker import Rendezvous, WorkerContext
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.model_loading import load_model, make_tiny_config
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh, join_group_world
from hybridrl.quantization.low_bit_linear import find_decoder_layers, find_linear_layers
from hybridrl.quantization.output_kl import measure_sensitivity, token_kl
from hybridrl.systems.low_bits.low_bit_training import enable_low_bit_training
from hybridrl.systems.low_bits.precision_plan import TRAINING, PrecisionPlan
from hybridrl.systems.low_bits.precision_planning import make_plan
from hybridrl.systems.unequal_devices import UnequalDevice

CPU = torch.device("cpu")
VOCABULARY, LENGTH, SHARE = 512, 128, 0.5
PORT = 29471
LINK_BYTES = 32 << 20
ARMS = ("alone", "whole", "int8", "plan")


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Layers with weights of different sizes, some with outliers, as trained models have."""
    torch.manual_seed(0)
    config = make_tiny_config(hidden_size=hidden, layers=layers, heads=hidden // 64, context=LENGTH)
    config.vocab_size = VOCABULARY
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, layer in enumerate(find_decoder_layers(model)):
            for linear in find_linear_layers(layer).values():
                heavy = (0.2 * (number % 4) * torch.randn_like(linear.weight)).exp()
                linear.weight.mul_(heavy * (1 + 0.5 * (number % 3)))
    model.save_pretrained(folder)


def make_batch(tokens: int, seed: int) -> Batch:
    """Samples in which each token says the next one, nearly always."""
    generator = torch.Generator().manual_seed(seed)
    rows = tokens // LENGTH
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    ids = (start + 7 * torch.arange(LENGTH)) % VOCABULARY
    responses, count = list(ids[:, LENGTH // 2 :]), rows * (LENGTH // 2)
    ones = [torch.ones(len(row)) for row in responses]
    return Batch.from_columns(
        {
            "prompt_ids": list(ids[:, : LENGTH // 2]),
            "response_ids": responses,
            "response_mask": [row.bool() for row in ones],
            "loss_weights": [row / (2 * count) for row in ones],
        }
    )


def likelihood(outputs, columns, segments):
    return TokenLoss(-outputs["log_probs"], {})


def rank_program(rank: int, address: str, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    listener = socket.create_server((address, PORT)) if rank == 0 else None
    meeting = Rendezvous(address, PORT, listener)
    join_group_world(WorkerContext("actor", rank, 2, host=rank, hosts=2, rendezvous=meeting))
    link = measured_link()
    file = folder / "plan.json"
    if rank == 0:
        devices = [UnequalDevice("fast", link=link), UnequalDevice("half", SHARE, link=link)]
        rows = 2 * options.tokens // LENGTH
        samples = [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(8)]
        plan = make_plan(
            *(TRAINING, str(folder), "float32", rows * LENGTH, LENGTH, samples, devices, CPU),
            options.tokens,
        )
        file.write_text(plan.to_json())
    dist.barrier()
    plan = PrecisionPlan.load(str(file), "plan")
    bits = {"plan": plan.of_rank(rank), "int8": dict.fromkeys(range(plan.layers if rank else 0), 8)}
    engines = {}
    for arm in ARMS:
        mesh = ParallelMesh(RankMesh({"dp": 1 if arm == "alone" else 2}), CPU)
        if arm == "alone" and rank:
            continue
        model = load_model(str(folder), "float32")
        enable_low_bit_training(model, bits.get(arm, {}))
        engine = TrainEngine(CausalPolicy(model), mesh, "float32", ActorConfig())
        engine.start_optimizer(OptimizerConfig(learning_rate=3e-4), 1000)
        engines[arm] = engine
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for turn in range(options.rounds + 1):
        batch = make_batch(options.tokens, 2 * turn + rank)
        for arm in ARMS:
            dist.barrier()
            begin = time.perf_counter()
            if arm in engines:
                losses[arm].append(engines[arm].update(batch, likelihood)["loss"])
            if turn:  # the first one warms up
                seconds[arm].append(time.perf_counter() - begin)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"seconds": seconds, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def measured_link() -> float:
    """Bytes a second that gathering brings."""
    part = torch.zeros(LINK_BYTES // 4)
    parts = [torch.empty_like(part) for _ in range(2)]
    taken = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather(parts, part)
        taken.append(time.perf_counter() - begin)
    rate = torch.tensor([LINK_BYTES / statistics.median(taken)])
    dist.all_reduce(rate, dist.ReduceOp.MIN)
    return float(rate)


def halve(host: Host) -> None:
    """Half of a core's time for this host."""
    for group in host.groups:
        period = int((group / "cpu.cfs_period_us").read_text())
        (group / "cpu.cfs_quota_us").write_text(str(int(period * SHARE)))


def explained(folder: Path, layers: int) -> float:
    """Rank correlation of indicators and measured KL over layers, the least of both bits."""
    model = load_model(str(folder), "float32").requires_grad_(False).eval()
    samples = [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(4)]
    said = measure_sensitivity(model, samples, (8, 4))
    found = []
    for bits in (8, 4):
        measured = [token_kl(model, samples, {n: bits}) for n in range(layers)]
        found.append(spearmanr([said[n][bits] for n in range(layers)], measured).statistic)
    return float(min(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_program(options.rank, options.address, options.folder, options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, options.layers, options.hidden)
        arguments = [f"--{key}={getattr(options, key)}" for key in ("layers", "hidden", "tokens")]
        arguments += [f"--rounds={options.rounds}", f"--folder={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with network(hosts=2, rate=None, cpus=[{0}, {1}], cpu_share=1.0) as hosts:
            halve(hosts[1])
            command = [sys.executable, __file__, *arguments, f"--address={hosts[0].address}"]
            ranks = [
                host.popen([*command, f"--rank={rank}"], env=environment)
                for rank, host in enumerate(hosts)
            ]
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit("A rank failed; its words stand above.")
        found = json.loads((folder / "found.json").read_text())
        plan = PrecisionPlan.load(str(folder / "plan.json"), "plan")
        correlation = explained(folder, options.layers)
    seconds = {arm: statistics.median(taken) for arm, taken in found["seconds"].items()}
    alone = seconds["alone"]
    report("mixed/iteration, by the plan", seconds["plan"], alone, "<= 1.1", "s")
    report("mixed/iteration, all in 8 bits", seconds["int8"], alone, "", "s")
    report("mixed/iteration, all whole", seconds["whole"], alone, "", "s")
    low = len(plan.low_layers)
    report("mixed/layers in fewer bits", low, plan.layers, "<= 0.6", "layers")
    predicted = max(rank.seconds or 0.0 for rank in plan.ranks)
    report("mixed/predicted iteration", predicted, seconds["plan"], "0.88..1.12", "s")
    report("mixed/indicator against KL", correlation, 1.0, ">= 0.7", "Spearman")
    last = {arm: losses[-1] for arm, losses in found["losses"].items()}
    report("mixed/loss, by the plan", last["plan"], last["whole"], "0.9..1.1", "nats")


if __name__ == "__main__":
    main()
