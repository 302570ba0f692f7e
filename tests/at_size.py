"""Large jobs, rehearsed: what one rank of many allocates, sends and waits for.

    python tests/at_size.py --write         # all of JOBS, and into docs/sizing.md
    python tests/at_size.py llama3-70b-1024 # one of them, also with --write
    python tests/at_size.py --json
    python tests/at_size.py qwen3-8b-8 --held train   # what lives at the fullest moment

The real engine, models and plans run as one rank of a job of the planner's, with simulated devices
(see `simulated`), and beside each figure stands what the planner foresees. It needs neither the
devices nor the memory, nor any weights: half a minute for each ten billion parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
PAGE = Path(__file__).parents[1] / "docs" / "sizing.md"
TOKENS = 16384
"""Of a micro-batch on a device."""
SAMPLES = 2
"""Of a prompt."""


@dataclass(frozen=True)
class Job:
    """A job to rehearse one rank of.

    Attributes:
        kind: Class of the model's configuration in transformers.
        model: Its values.
        devices: How many.
        settings: Of the job.
        lengths: Tokens of a prompt and of a response.
    """

    kind: str
    model: dict
    devices: int
    settings: tuple[str, ...] = ()
    lengths: tuple[int, int] = (1024, 3072)

    def size(self, axis: str, usual: int = 1) -> int:
        """Of the actor's cut."""
        name = f"actor.parallel.{axis}="
        found = (int(s.removeprefix(name)) for s in self.settings if s.startswith(name))
        return next(found, usual)


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
LLAMA3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SMALL = QWEN3_8B | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 4096}
TP8 = ("actor.parallel.tp=8", "rollout.parallel.tp=8")
LONG = ("actor.parallel.ulysses=8", "rollout.parallel.tp=8")
JOBS = {
    "qwen3-8b-8": Job("Qwen3Config", QWEN3_8B, 8),
    "qwen3-8b-8-128k": Job(
        *("Qwen3Config", QWEN3_8B | {"max_position_embeddings": 131_072}, 8, LONG),
        lengths=(1024, 130_048),
    ),
    "qwen3-30b-a3b-16": Job("Qwen3MoeConfig", QWEN3_30B_A3B, 16, ("rollout.parallel.tp=2",)),
    "qwen3-32b-64": Job("Qwen3Config", QWEN3_32B, 64, ("rollout.parallel.tp=2",)),
    "qwen3-30b-a3b-128": Job("Qwen3MoeConfig", QWEN3_30B_A3B, 128, ("rollout.parallel.tp=2",)),
    "llama3-70b-64": Job("LlamaConfig", LLAMA3_70B, 64, TP8),
    "llama3-70b-128": Job("LlamaConfig", LLAMA3_70B, 128, TP8),
    "llama3-70b-1024": Job("LlamaConfig", LLAMA3_70B, 1024, TP8),
}
OTHERS = {
    "small-8": Job("Qwen3Config", SMALL, 8),
    "small-16-tp2": Job("Qwen3Config", SMALL, 16, ("actor.parallel.tp=2", "rollout.parallel.tp=2")),
    "small-8-apart": Job("Qwen3Config", SMALL, 8, ("actor.share_prefixes=false",)),
    "small-8-whole": Job("Qwen3Config", SMALL, 8, ("actor.gradient_checkpointing=false",)),
    "small-8-bfloat16": Job(
        *("Qwen3Config", SMALL, 8, ("actor.parallel.gradients=bfloat16", "actor.parallel.shards=4"))
    ),
}
"""Quick ones, for tests."""
SETTINGS = (
    "algorithm=grpo",
    "devices=cuda",
    "model.dtype=bfloat16",
    "actor.gradient_checkpointing=block",
    "rollout.partial=0.5",
    "actor.compile=false",  # what is not there cannot be compiled for
    f"actor.tokens_per_microbatch={TOKENS}",
    f"rollout.samples_per_prompt={SAMPLES}",
)


def rehearse(name: str, spy: tuple[str, int] | None = None) -> dict:
    """What is seen of rank 0 of a job, and what its plan says: by phase, bytes of the device at the
    fullest moment, `seen` and `planned`; the collectives; seconds of planning. Once in a process.

    Args:
        spy: See `simulated.Accelerator`.
    """
    import transformers

    job = (JOBS | OTHERS)[name]
    with tempfile.TemporaryDirectory(prefix="hybridrl-at-size-") as folder:
        getattr(transformers, job.kind)(**job.model).save_pretrained(folder)
        # Two full micro-batches for each rank that has rows of its own.
        sharing, (prompt, response) = job.size("ulysses"), job.lengths
        rows = 2 * (TOKENS * sharing // (prompt + response))
        rows *= job.devices // (job.size("tp") * sharing)
        sizes = [f"data.max_prompt_tokens={prompt}", f"rollout.max_tokens={response}"]
        prompts = f"data.prompts_per_step={rows // SAMPLES}"
        overrides = [*SETTINGS, *job.settings, *sizes, prompts, f"model.path={folder}"]
        return _rehearse(job, folder, overrides, spy)


def _rehearse(job: Job, folder: str, overrides: list[str], spy: tuple[str, int] | None) -> dict:
    import torch
    from layouts_at_size import generation_layout_of, memory_of, training_layout_of
    from settings import configured
    from simulated import DEVICE, Accelerator, join_as
    from transformers import AutoModelForCausalLM

    from hybridrl.algorithms import PolicyObjective
    from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
    from hybridrl.engine.train_engine import TrainEngine
    from hybridrl.layout.training_mesh import build_training_mesh
    from hybridrl.models.model_loading import load_model_config
    from hybridrl.models.packed_attention import PACKED_ATTENTION
    from hybridrl.models.packed_models import CausalPolicy
    from hybridrl.parallel.process_group import ParallelMesh
    from hybridrl.weights.weight_sync import WeightSync

    config = configured(overrides)
    planned, synced, rows = _planned(config, job.devices)
    join_as(0, job.devices)
    batch = _batch(rows * job.size("ulysses"), *job.lengths)
    objective = PolicyObjective("ppo_clip", {}, kl_coefficient=0.1, entropy_coefficient=0.0)
    seconds = {}
    with Accelerator(spy) as device:
        began = time.perf_counter()
        share = config.rollout.parallel.tp
        at = build_training_mesh(job.devices, config.actor.parallel, share)
        mesh = ParallelMesh(
            at, DEVICE, config.actor.parallel.shards, config.actor.parallel.gradients
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                load_model_config(folder), dtype=torch.float32, attn_implementation=PACKED_ATTENTION
            )
        model.config.use_cache = False
        for module in model.modules():
            for buffer, value in module.named_buffers(recurse=False):
                setattr(module, buffer, torch.empty(value.shape, dtype=value.dtype, device=DEVICE))
        files = _Files(model)
        with device.phase("load"):
            engine = TrainEngine(CausalPolicy(model), mesh, config.model.dtype, config.actor, files)
        engine.start_optimizer(config.actor.optimizer, 10)
        seconds["load"] = time.perf_counter() - began
        with device.phase("score"):
            engine.forward(batch)
        with device.phase("first update"):
            engine.update(batch, objective)
        with device.phase("train"):
            engine.update(batch, objective)
        with device.phase("sync"):
            began = time.perf_counter()
            engine.model.reshard()
            engine._layout = training_layout_of(engine)
            seconds["layout"] = time.perf_counter() - began
            target = generation_layout_of(engine.layout().shapes, job.devices, share)
            copy = memory_of(target.pieces[0], torch.bfloat16, DEVICE)
            began = time.perf_counter()
            sync = WeightSync(
                engine.layout(),
                target,
                torch.bfloat16,
                DEVICE,
                mesh.group(),
                engine,
                _Rollout(copy),
            )
            seconds["sync"] = time.perf_counter() - began
            lacking = _lacking(engine.layout(), target, min(2 * share, job.devices))
            cost = sync.run()
            del copy, sync
        with device.phase("save"):
            began = time.perf_counter()
            parts = EngineStateSaver(engine).parts
            seconds["saving"] = time.perf_counter() - began
    first = device.phases.pop("first update")
    assert first.peak <= device.phases["train"].peak
    return {
        "devices": job.devices,
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "bytes_read": files.bytes_read,
        "synced": {
            "received": cost.received,
            "sent": cost.sent,
            "most": 2 * lacking,
            "planned": synced,
        },
        "bytes_written": sum(part.size for part in parts),
        "phases": {
            phase: {
                "seen": found.peak,
                "planned": planned[phase],
                "collectives": dict(found.collectives),
                "host_collectives": dict(found.host_collectives),
                "waits": found.waits,
            }
            for phase, found in device.phases.items()
        },
        "seconds": seconds,
        "held": dict(device.held.most_common()),
    }


def _planned(config, devices):
    """Bytes of the actor on its first device, by phase, as the planner has it; and rows of a rank
    in an update."""
    from hybridrl.checks.machine.placement_checks import resolve_placement, resolve_roles
    from hybridrl.planner.job_roles import JobRoles
    from hybridrl.planner.machine.device_catalog import parse_cluster
    from hybridrl.planner.memory.device_memory import _generating
    from hybridrl.planner.step.step_calls import compute_step_sizes

    cluster = parse_cluster(f"{devices}xH100")
    memory = cluster.memory_of(0)
    placement = resolve_placement(config, cluster, None)
    planner = JobRoles(
        config, cluster, placement, compute_step_sizes(config), resolve_roles(config, None)
    )
    part, train = planner.part("actor", 0), planner.batches["actor", "train"]
    there = part.resident()
    parameters = there.get("parameters", 0.0)  # the moments come with the first update
    found = {
        "load": parameters,
        "score": parameters + sum(part.scoring(train).values()),
        "train": sum(there.values()) + sum(part.training(train).values()),
        "sync": sum(there.values()) + sum(_generating(planner, "actor", "sync", memory).values()),
        "save": sum(there.values()),
    }
    return (
        found,
        planner.sync_bytes("actor"),
        train.total * train.response_share / planner.sizes.response_tokens,
    )


def _lacking(source, target, ranks):
    """Elements that the busiest of so many ranks has to receive."""
    from hybridrl.layout.tensor_layout import TensorLayout, compute_peak_elements

    few = [TensorLayout(x.shapes, {n: x.pieces[n] for n in range(ranks)}) for x in (source, target)]
    both, held = compute_peak_elements(*few), compute_peak_elements(few[0])
    return max(both[rank] - held[rank] for rank in range(ranks))


def _batch(rows: float, prompt: int, response: int):
    import torch

    from hybridrl.batch.batch import Batch, RaggedColumn

    rows = round(rows)
    bounds = torch.arange(rows + 1) * response

    def column(value):
        return RaggedColumn(torch.full((rows * response,), value), bounds)

    return Batch.from_columns(
        {
            "prompt_ids": [torch.full((prompt,), row // SAMPLES) for row in range(rows)],
            "response_ids": column(1),
            "response_mask": column(True),
            "loss_weights": column(1e-4),
            "advantages": torch.ones(rows),
            **dict.fromkeys(("log_probs", "ref_log_probs", "rollout_log_probs"), column(-1.0)),
        }
    )


class _Rollout:
    """Stands for the rollout engine: its weights."""

    def __init__(self, tensors):
        self.tensors = tensors

    def writer(self):
        return self

    def write_boxes(self, table, values):
        from hybridrl.layout.tensor_layout import make_tensor_sink

        make_tensor_sink(self.tensors)(table, values)

    def finish(self):
        pass


class _Files:
    """Stands for the tensors of a model's folder in bfloat16."""

    folder = Path("a folder of bfloat16")

    def __init__(self, model):
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.bytes_read = 0

    def read(self, name, box, into):
        self.bytes_read += 2 * into.numel()


def in_a_process(name: str, *spy: str) -> dict:
    """`rehearse` in a process of its own."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, "--here", name, *spy],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS | OTHERS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="the tables, into docs/sizing.md")
    parser.add_argument("--here", action="store_true", help="one job, in this process, as JSON")
    parser.add_argument("--held", metavar="PHASE")
    chosen = parser.parse_args()
    if chosen.here:
        name, *spy = chosen.jobs
        print(json.dumps(rehearse(name, (spy[0], int(spy[1])) if spy else None)), flush=True)
        os._exit(0)  # threads of autograd do not end well with a device that is none
    found = {name: in_a_process(name) for name in chosen.jobs or JOBS}
    print(json.dumps(found, indent=2) if chosen.json else table(found))
    if chosen.write:
        PAGE.write_text(written(PAGE.read_text(), found))
    for name, job in found.items() if chosen.held else ():
        again = in_a_process(name, chosen.held, str(job["phases"][chosen.held]["seen"]))
        for what, size in again["held"].items():
            if size > 0.001 * GIB:
                print(f"{name} {chosen.held}: {size / GIB:8.3f} GiB of {what}")


def table(found: dict) -> str:
    """The figures as Markdown."""
    return "\n\n".join(tables(found).values())


def tables(found: dict) -> dict[str, str]:
    """Memory, traffic and planning."""
    phases = [
        (name, phase, figures)
        for name, job in found.items()
        for phase, figures in job["phases"].items()
    ]
    memory = [
        "| job | phase | seen, GiB | planned, GiB | planned / seen |",
        "|---|---|---|---|---|",
    ]
    for name, phase, figures in phases:
        seen, planned = figures["seen"] / GIB, figures["planned"] / GIB
        memory.append(f"| {name} | {phase} | {seen:.2f} | {planned:.2f} | {planned / seen:.2f} |")
    traffic = ["| job | phase | collective | calls | GiB |", "|---|---|---|---|---|"]
    for name, phase, figures in phases:
        for kind, (calls, size) in figures["collectives"].items():
            traffic.append(f"| {name} | {phase} | {kind} | {calls} | {size / GIB:.2f} |")
    kinds = list(next(iter(found.values()))["seconds"])
    planning = [
        f"| job | {' | '.join(f'{kind}, s' for kind in kinds)} | reads | receives | writes |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for name, job in found.items():
        sizes = (job["bytes_read"], job["synced"]["received"], job["bytes_written"])
        cells = [f"{job['seconds'][kind]:.1f}" for kind in kinds]
        cells += [f"{size / GIB:.2f}" for size in sizes]
        planning.append(f"| {name} | {' | '.join(cells)} |")
    return {
        "memory": "\n".join(memory),
        "traffic": "\n".join(traffic),
        "planning": "\n".join(planning),
    }


def written(page: str, found: dict) -> str:
    """The page with the tables as they are now, each between its marks. Rows of jobs that were not
    rehearsed this time stay."""
    numbers = {f"| {name} ": number for number, name in enumerate(JOBS)}
    others = tuple(start for start in numbers if start.strip("| ") not in found)
    for name, lines in tables(found).items():
        begin, end = f"<!-- {name}: written by tests/at_size.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        old, _, after = rest.partition(end)
        first, second, *rows = lines.splitlines()
        rows += [row for row in old.splitlines() if row.startswith(others)]
        rows.sort(key=lambda row: next(n for start, n in numbers.items() if row.startswith(start)))
        lines = "\n".join([first, second, *rows])
        page = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    main()
