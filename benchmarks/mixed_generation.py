"""Generation over unequal devices: the plan that is chosen against others, and against its word.

    python benchmarks/mixed_generation.py [--layers 6] [--hidden 1024] [--dtype float32]
        [--random 20] [--seconds 320]

Two hosts with a core and with half a core (network namespaces and control groups of version 1; see
tests/netlab.py; needs root) generate with one model. Costs are measured on the first, as `hybridrl
plan generation` does it, indicators and KL on the model's own answers. The budget is half of the KL
that 8 bits in all layers have, so that not all can have them. Then each of the random plans, which
keep to that budget, too, has a turn between two of the chosen plan, and so have equal splits in one
precision; what is reported are medians. `--seconds` ends it before all have had theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.controller.worker import Rendezvous
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import load_model, load_model_config, make_tiny_model
from hybridrl.parallel.process_group import join_group_world
from hybridrl.quantization.output_kl import token_kl
from hybridrl.rollout.rollout_engine import EngineSetup, SamplingSettings
from hybridrl.system.cluster_spec import LinkSpec
from hybridrl.systems.unequal_generation.cost_probe import (
    compute_model_sizes,
    measure_phase_costs,
    scale_costs,
)
from hybridrl.systems.unequal_generation.decoder_stage import set_cached_attention
from hybridrl.systems.unequal_generation.generation_plan import (
    FULL_PRECISION_BITS,
    GenerationPlan,
    GenerationStage,
    make_equal_plan,
)
from hybridrl.systems.unequal_generation.generation_planning import (
    calibrate_indicators,
    find_measured_plan,
    make_sampling_step,
)
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationDevice,
    GenerationProblem,
    PhaseCosts,
    predict_generation_time,
    sum_indicators,
)
from hybridrl.systems.unequal_generation.pipeline_engine import PipelineEngine
from hybridrl.systems.unequal_generation.plan_search import search_generation_plan

CPU = torch.device("cpu")
SHARES = (1.0, 0.5)
PERIOD_US = 10_000
SAMPLES, PROMPT, RESPONSE = 48, 32, 24
PORT = 29713
BITS = (4, 8, FULL_PRECISION_BITS)
PING_BYTES = (1 << 10, 1 << 22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=320.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int)  # of the processes that this one starts
    parser.add_argument("--address")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--probe", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rank is not None:
        work = _probe if chosen.probe else _generate
        work(chosen.rank, chosen.address, chosen.folder, chosen.dtype)
        return
    deadline = time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as folder, unequal_hosts() as hosts:
        _compare(Path(folder), hosts, chosen, deadline)
    solving()


def solving() -> None:
    """Seconds of the program at the size of a 7 B model on four kinds of devices."""
    draw = random.Random(0)
    devices = []
    for number, speed in enumerate((1.0, 0.8, 0.5, 0.3)):
        phases = [_invented(per, speed) for per in (4e-3, 4e-4)]
        devices.append(GenerationDevice(f"d{number}", 2.0**34, *phases))
    links = tuple(tuple(LinkSpec(1e9, 1e-4) for _ in devices) for _ in devices)
    indicators = tuple(
        {16: 0.0, 8: 1e-4 * draw.uniform(0.2, 3), 4: 2e-3 * draw.uniform(0.2, 3)} for _ in range(32)
    )
    sizes = {4: 2.0**26, 8: 2.0**27, 16: 2.0**28}
    problem = GenerationProblem(
        *(tuple(devices), links, indicators, 0.01, 64, 128, 128, sizes),
        *(4096.0, 2.0**27, 2.0**27, 2048.0),
    )
    begin = time.process_time()
    search_generation_plan(problem)
    report("plan_32_layers_4_devices", time.process_time() - begin, 5.0, "<= 1", "s of a core")


@contextlib.contextmanager
def unequal_hosts() -> Iterator[list[Host]]:
    """Each on a core of its own, of which it may use its share."""
    with network(hosts=2, rate=None, cpus=[{0}, {1}], cpu_share=1.0) as hosts:
        for host, share in zip(hosts, SHARES, strict=True):
            (group,) = (one for one in host.groups if one.parent.name == "cpu")
            (group / "cpu.cfs_quota_us").write_text("-1")
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
        yield hosts


def _compare(folder: Path, hosts: list[Host], chosen: Any, deadline: float) -> None:
    tokenizer = build_character_tokenizer()
    heads = max(1, chosen.hidden // 64)
    path = make_tiny_model(
        folder / "model",
        tokenizer,
        seed=0,
        hidden_size=chosen.hidden,
        layers=chosen.layers,
        heads=heads,
        context=2 * (PROMPT + RESPONSE),
    )
    model = load_model(str(path), "float32")
    set_cached_attention(model)
    with torch.inference_mode():
        answers = [_drawn(model, prompt) for prompt in _prompts(8)]
    answers = [answer.clone() for answer in answers]
    indicators = calibrate_indicators(model, answers)
    budget = 0.5 * token_kl(model, answers, dict.fromkeys(range(chosen.layers), 8))
    _start(folder, hosts, chosen.dtype, probe=True)
    problem = _problem(folder, path, chosen.dtype, indicators, budget)
    plan = find_measured_plan(problem, model, answers)
    plans = {"chosen": plan, "equal, whole": make_equal_plan(chosen.layers, 2)}
    draw = random.Random(0)
    for number in range(chosen.random):
        plans[f"random {number}"] = _random_plan(problem, draw)
    (folder / "plans.json").write_text(
        json.dumps({"plans": {n: asdict(p) for n, p in plans.items()}, "deadline": deadline})
    )
    _start(folder, hosts, chosen.dtype, probe=False)
    seconds = json.loads((folder / "seconds.json").read_text())
    _report(problem, plans, {name: statistics.median(found) for name, found in seconds.items()})


def _report(
    problem: GenerationProblem, plans: dict[str, GenerationPlan], took: dict[str, float]
) -> None:
    tokens = SAMPLES * RESPONSE
    rate = {name: tokens / seconds for name, seconds in took.items()}
    others = {name: value for name, value in rate.items() if name.startswith("random")}
    unit = "tokens/s"
    report("mixed_against_equal_split", rate["chosen"], rate["equal, whole"], ">= 1.25", unit)
    if others:
        best = max(others.values())
        report("mixed_against_best_random_plan", rate["chosen"], best, ">= 0.95", unit)
    predicted = predict_generation_time(problem, plans["chosen"]).total
    report("mixed_predicted_seconds", predicted, took["chosen"], "0.88 to 1.12", "s")
    off = [
        abs(predict_generation_time(problem, plans[name]).total / took[name] - 1) for name in took
    ]
    report("mixed_predictions_off", statistics.median(off), 0.12, "<= 1", "share, all plans")
    stages = [
        (s.device, len(s.bits), s.bits.count(8), s.bits.count(4)) for s in plans["chosen"].stages
    ]
    said = {
        "device, layers, in 8, in 4 bits": stages,
        "micro_batches": plans["chosen"].decode_micro_batches,
        "pieces": plans["chosen"].prefill_pieces,
        "kl": plans["chosen"].kl,
        "max_kl": problem.max_kl,
        "random plans": len(others),
    }
    print(json.dumps(said), flush=True)
    for name, plan in plans.items():
        if name in took:
            seconds = predict_generation_time(problem, plan)
            layers = [
                (s.device, len(s.bits), s.bits.count(8), s.bits.count(4)) for s in plan.stages
            ]
            row = [layers, plan.decode_micro_batches, plan.prefill_pieces, took[name], *seconds]
            print(json.dumps([name, *row]), file=sys.stderr, flush=True)


def _problem(
    folder: Path, path: Path, dtype: str, indicators: tuple[dict[int, float], ...], budget: float
) -> GenerationProblem:
    found = json.loads((folder / "costs.json").read_text())
    prefill, decode = (_costs(found[name]) for name in ("prefill", "decode"))
    devices = tuple(
        GenerationDevice(
            f"{share} cores", 2.0**33, scale_costs(prefill, share), scale_costs(decode, share)
        )
        for share in SHARES
    )
    latency, per_byte = found["link"]
    link = LinkSpec(1 / max(per_byte, 1e-18), latency)
    return GenerationProblem(
        *(devices, ((link, link), (link, link)), indicators, budget, SAMPLES, PROMPT, RESPONSE),
        **compute_model_sizes(load_model_config(str(path)), dtype),
    )


def _costs(data: dict[str, Any]) -> PhaseCosts:
    def curve(points: list[list[float]]) -> tuple[tuple[int, float], ...]:
        return tuple((int(rows), seconds) for rows, seconds in points)

    layer = {int(bits): curve(points) for bits, points in data["layer"].items()}
    return PhaseCosts(layer, curve(data["head"]), curve(data["stage"]))


def _invented(per_row: float, speed: float) -> PhaseCosts:
    def curve(factor: float) -> tuple[tuple[int, float], ...]:
        return tuple((rows, (1e-4 + factor * per_row * rows) / speed) for rows in (1, 16, 64))

    return PhaseCosts(
        {4: curve(0.45), 8: curve(0.6), 16: curve(1.0)}, curve(0.5), ((1, 1e-4 / speed),)
    )


def _random_plan(problem: GenerationProblem, draw: random.Random) -> GenerationPlan:
    """Any that keeps to the budget."""
    while True:
        cut = draw.randrange(1, problem.layers)
        low = draw.random()
        bits = [
            draw.choice((4, 8)) if draw.random() < low else FULL_PRECISION_BITS
            for _ in range(problem.layers)
        ]
        order = draw.sample(range(2), 2)
        stages = (
            GenerationStage(order[0], tuple(bits[:cut])),
            GenerationStage(order[1], tuple(bits[cut:])),
        )
        plan = GenerationPlan(stages, draw.choice((1, 2, 3, 4)), draw.choice((1, 2)))
        if sum_indicators(problem, plan) <= problem.max_kl:
            return plan


def _start(folder: Path, hosts: list[Host], dtype: str, *, probe: bool) -> None:
    command = [sys.executable, __file__, "--address", hosts[0].address, "--folder", str(folder)]
    command += ["--dtype", dtype]
    command += ["--probe"] if probe else []
    started = [host.popen([*command, "--rank", str(n)]) for n, host in enumerate(hosts)]
    try:
        for process in started:
            if process.wait(timeout=600):
                raise SystemExit(f"A generator ended with {process.returncode}.")
    finally:
        for process in started:
            process.kill()


def _meet(rank: int, address: str) -> None:
    import os
    import socket

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    listener = socket.create_server((address, PORT)) if rank == 0 else None
    join_group_world(
        WorkerContext(
            "generator", rank, 2, host=rank, hosts=2, rendezvous=Rendezvous(address, PORT, listener)
        )
    )


def _probe(rank: int, address: str, folder: Path, dtype: str) -> None:
    import torch.distributed as dist

    _meet(rank, address)
    seconds = []
    for size in PING_BYTES:
        block, turns = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(20):
            begin = time.perf_counter()
            (dist.send if rank == 0 else dist.recv)(block, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(block, 1 - rank)
            turns.append((time.perf_counter() - begin) / 2)
        seconds.append(statistics.median(turns))
    if rank == 0:
        rows = sorted({-(-SAMPLES // count) for count in (1, 2, 4, 8, 16)})
        config = load_model_config(str(folder / "model"))
        prefill, decode = measure_phase_costs(
            config, dtype, CPU, rows, PROMPT, RESPONSE, make_sampling_step, BITS
        )
        per_byte = max(0.0, (seconds[1] - seconds[0]) / (PING_BYTES[1] - PING_BYTES[0]))
        found = {"prefill": asdict(prefill), "decode": asdict(decode)}
        found["link"] = [seconds[0], per_byte]
        (folder / "costs.json").write_text(json.dumps(found))
    dist.barrier()


def _generate(rank: int, address: str, folder: Path, dtype: str) -> None:
    """Each plan in turns with the chosen one."""
    import torch.distributed as dist

    _meet(rank, address)
    data = json.loads((folder / "plans.json").read_text())
    engines = {name: _engine(folder, plan, dtype, rank) for name, plan in data["plans"].items()}
    for engine in engines.values():
        _seconds(engine, 2, samples=4)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    others = [name for name in engines if name.startswith("random")]
    rounds = [["equal, whole"], *([name] for name in others)]
    rounds[4::5] = [[*names, "equal, whole"] for names in rounds[4::5]]
    for names in rounds:
        for name in ("chosen", *names):
            seconds[name].append(_seconds(engines[name], RESPONSE))
        late = torch.tensor([time.monotonic() > data["deadline"]])
        dist.broadcast(late, 0)
        if late:
            break
    if rank == 0:
        done = {name: found for name, found in seconds.items() if found}
        (folder / "seconds.json").write_text(json.dumps(done))
    dist.barrier()


def _engine(folder: Path, data: dict[str, Any], dtype: str, rank: int) -> PipelineEngine | None:
    """None: this host has no part in the plan."""
    stages = tuple(GenerationStage(s["device"], tuple(s["bits"])) for s in data["stages"])
    if rank not in [stage.device for stage in stages]:
        return None
    plan = GenerationPlan(stages, data["decode_micro_batches"], data["prefill_pieces"])
    return PipelineEngine(
        EngineSetup(
            str(folder / "model"), str(folder / "model"), dtype, eos_token_ids=[1], device=CPU
        ),
        RolloutConfig(max_sequences=SAMPLES),
        plan.renumbered(),
    )


def _seconds(engine: PipelineEngine | None, tokens: int, samples: int = SAMPLES) -> float:
    import torch.distributed as dist

    prompts = Batch.from_columns({"prompt_ids": _prompts(samples)})
    dist.barrier()
    begin = time.perf_counter()
    if engine is not None:
        engine.generate(prompts, SamplingSettings(tokens, min_tokens=tokens), seed=0)
    dist.barrier()
    return time.perf_counter() - begin


def _prompts(number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 40, (PROMPT,), generator=draw) for _ in range(number)]


def _drawn(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=RESPONSE,
        do_sample=True,
        top_k=0,
    )[0]


if __name__ == "__main__":
    main()
