"""What `hybridrl plan` predicts, beside what is measured: memory of each role and phase, and steps.

    python benchmarks/plan.py [name of a setting ...]

Each setting runs in processes of its own: once under torch's profiler, which hears of every tensor
that is allocated or freed; once for the resident memory of its processes; once for the time of its
steps. A figure is predicted / measured; of memory, for the role and phase that are farthest off.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.planner.step.step_calls import SampleLengths

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

STEPS = 3
TIMED_STEPS = 5
KEPT_FROM = 2
"""The first steps make what later ones find."""
MODES = (
    ("tensors", "0.85-1.15", "GiB"),
    ("resident", "0.85-1.15", "GiB"),
    ("time", "0.75-1.25", "s"),
)

SMALL = {"hidden_size": 384, "layers": 8, "heads": 6, "vocabulary": 512}  # 20 M parameters
LARGE = {"hidden_size": 768, "layers": 8, "heads": 12, "vocabulary": 512}  # 73 M
WORDY = {"hidden_size": 512, "layers": 6, "heads": 8, "vocabulary": 32000}  # 39 M

INLINE = ["executor=inline", "rollout=transformers"]
KL = "algorithm.kl_coefficient=0.05"
PPO = ["algorithm=ppo", KL]


def shaped(prompts: int, samples: int, tokens: int, budget: int) -> list[str]:
    """Prompts, samples of each, tokens of all responses, tokens of a micro-batch."""
    return [
        f"data.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={samples}",
        f"rollout.max_tokens={tokens}",
        f"rollout.min_tokens={tokens}",
        "guard.most_mismatch=10",
        f"actor.tokens_per_microbatch={budget}",
    ]


SETTINGS: dict[str, tuple[dict[str, int], list[str]]] = {
    "grpo, small model, one micro-batch": (SMALL, [*INLINE, *shaped(4, 6, 56, 4096)]),
    "grpo, layer by layer, reference": (LARGE, [*INLINE, KL, *shaped(4, 4, 24, 256)]),
    "ppo, critic, reference, checkpointing": (
        SMALL,
        [*INLINE, *PPO, "actor.gradient_checkpointing=true", *shaped(4, 4, 56, 512)],
    ),
    "ppo, a large vocabulary": (WORDY, [*INLINE, *PPO, *shaped(4, 4, 24, 256)]),
    "lora, layer by layer": (
        LARGE,
        [*INLINE, KL, "actor.lora.rank=8", *shaped(4, 4, 24, 256)],
    ),
    "grpo, vllm with a cache of 0.5 GiB": (
        LARGE,
        ["executor=inline", "rollout.kv_cache_gib=0.5", *shaped(4, 4, 24, 256)],
    ),
    "ppo, two devices over Ray": (
        SMALL,
        ["num_devices=2", "rollout=transformers", *PPO, *shaped(4, 4, 56, 512)],
    ),
    "grpo, two devices over Ray, vllm": (
        LARGE,
        ["num_devices=2", "rollout.kv_cache_gib=0.5", *shaped(4, 4, 24, 256)],
    ),
}
DEFAULT = "the default job"


def main() -> None:
    from figures import report

    for name in sys.argv[1:] or [*SETTINGS, DEFAULT]:
        for mode, goal, unit in MODES:
            found = run(name, mode)
            for key, (predicted, measured) in found.items():
                print(f"    {name}: {mode}: {key}: {predicted:.3f} / {measured:.3f} {unit}")
            if found:
                key = "step" if mode == "time" else max(found, key=lambda k: _off(*found[k]))
                report(f"{name}: {mode}: {key}", *found[key], goal, unit)


def _off(predicted: float, measured: float) -> float:
    return max(predicted / measured, measured / predicted)


def run(name: str, mode: str) -> dict[str, tuple[float, float]]:
    """Predicted and measured figures of a setting, run in processes of its own."""
    overrides = SETTINGS.get(name, ({}, []))[1]
    # vLLM packs its weights outside of torch's allocator, and Ray's workers are not profiled.
    if mode == "tensors" and not {"executor=inline", "rollout=transformers"} <= set(overrides):
        return {}
    if name == DEFAULT and mode != "time":
        return {}
    command = [sys.executable, __file__, "--child", mode, name]
    # Without it the C library keeps what was freed in blocks below 32 MiB for the next of its
    # kind, and every phase seems to take what the fullest one took.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if mode == "resident" else {}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=280, env=os.environ | environment
    )
    if done.returncode:
        raise SystemExit(f"{name} failed")
    return json.loads(done.stdout.splitlines()[-1])


def child(mode: str, name: str) -> None:
    """Runs a setting and prints what was predicted and what was measured."""
    from hybridrl import Job, load_config
    from hybridrl.planner.step.step_calls import SampleLengths

    model, overrides = SETTINGS.get(name, ({}, []))
    with tempfile.TemporaryDirectory() as folder:
        if model:
            overrides = [*overrides, f"model.path={make_model(Path(folder) / 'model', **model)}"]
        overrides = [*overrides, f"run.root={folder}/runs", "warmup.steps=0", "eval.prompts=8"]
        overrides = ["model.dtype=float32", *overrides]  # the same on every processor
        seconds, records = [], []
        with profiled(mode == "tensors") as seen, Job(load_config(overrides)) as job:
            trainer = job.make_trainer()
            for _ in range(TIMED_STEPS if mode == "time" else STEPS):
                begin = time.perf_counter()
                batch, handles = trainer.step()
                for handle in handles:
                    handle.get()
                seconds.append(time.perf_counter() - begin)
                records.append(job.executor.take_records())
            table = batch.collect(["prompt_ids", "response_ids"])
            prompts, responses = (table.lengths(n) for n in ("prompt_ids", "response_ids"))
            lengths = SampleLengths(prompts.mean(), responses.mean(), responses.max())
        if mode == "time":
            found = times(job, lengths, seconds, records)
        else:
            measured = seen() if mode == "tensors" else peaks(records)
            predicted = predict(job, lengths, mode)
            found = {k: (predicted[k] / 2**30, measured[k] / 2**30) for k in measured}
    print(json.dumps(found))


def make_model(folder: Path, vocabulary: int, **shape: int) -> Path:
    """A model of random weights with the character tokenizer of the built-in task."""
    import torch
    from transformers import AutoModelForCausalLM

    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.data.tasks.arithmetic import CHARACTERS
    from hybridrl.models.model_loading import make_tiny_config

    tokenizer = build_character_tokenizer(CHARACTERS)
    config = make_tiny_config(context=256, **shape)
    config.vocab_size = vocabulary
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def peaks(records: list[list[Any]]) -> dict[str, float]:
    """The greatest of all ranks and steps."""
    found: defaultdict[str, float] = defaultdict(float)
    for step in records[KEPT_FROM:]:
        for record in step:
            for phase, size in record.peaks.items():
                key = f"{record.role}/{phase}"
                found[key] = max(found[key], size)
    return found


@contextlib.contextmanager
def profiled(wanted: bool) -> Iterator[Any]:
    """Bytes of all tensors at the fullest moment of each role and phase, from the profiler."""
    if not wanted:
        yield None
        return
    import torch

    from hybridrl.controller import worker

    spans: list[tuple[str, str, int, int]] = []
    usual = worker.Worker.phase

    @contextlib.contextmanager
    def phase(self: Any, name: str) -> Iterator[None]:
        begin = time.time_ns()
        with usual(self, name):
            yield
        spans.append((self.context.role, name, begin, time.time_ns()))

    worker.Worker.phase = phase
    profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
    with profile:
        yield lambda: _tensor_peaks(profile, spans)


def _tensor_peaks(profile: Any, spans: list[tuple[str, str, int, int]]) -> dict[str, float]:
    events = []
    waiting = list(profile.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        size = getattr(event.extra_fields, "alloc_size", None)
        if size is not None:
            events.append((event.start_time_ns, size))
    events.sort()
    found: defaultdict[str, float] = defaultdict(float)
    spans = sorted(spans, key=lambda span: span[2])
    at, now = 0, 0
    first = spans[len(spans) * KEPT_FROM // STEPS :]
    for role, name, begin, end in first:
        while at < len(events) and events[at][0] < begin:
            now += events[at][1]
            at += 1
        top = now
        while at < len(events) and events[at][0] < end:
            now += events[at][1]
            at += 1
            top = max(top, now)
        key = f"{role}/{name}"
        found[key] = max(found[key], top)
    return found


def predict(job: Any, lengths: SampleLengths, mode: str) -> dict[str, float]:
    """Bytes of the fullest device by role and phase; of tensors alone without the process."""
    from dataclasses import replace

    from hybridrl.planner.job_plan import build_job_plan
    from hybridrl.planner.machine.device_catalog import add_device_memory

    config = replace(job.config, model=replace(job.config.model, path=job.model_path))
    plan = build_job_plan(config, add_device_memory(job.executor.cluster), job.placement, lengths)
    found: dict[str, float] = {}
    for device in plan.memory:
        for phase in device.phases:
            size = phase.bytes - (phase.parts["process"] if mode == "tensors" else 0)
            key = f"{phase.role}/{phase.phase}"
            found[key] = max(found.get(key, 0), size)
            if mode == "tensors" and os.environ.get("EXPLAIN"):
                print(key, {k: round(v / 2**20) for k, v in phase.parts.items()}, file=sys.stderr)
    return found


def times(job: Any, lengths: SampleLengths, seconds: list[float], records: Any) -> dict[str, Any]:
    """Seconds of a step and of each role's phases, predicted and measured (the median)."""
    from dataclasses import replace

    from hybridrl.planner.job_plan import build_job_plan
    from hybridrl.planner.machine.device_catalog import add_device_memory
    from hybridrl.planner.machine.device_probe import mean_of_all
    from hybridrl.planner.machine.device_rates import DeviceRates
    from hybridrl.planner.machine.layer_probe import LayerRuns, measure_layers

    config = replace(job.config, model=replace(job.config.model, path=job.model_path))
    cluster = add_device_memory(job.executor.cluster)
    plan = build_job_plan(config, cluster, job.placement, lengths)
    batch = plan.batches["actor", "train"]
    begin = time.perf_counter()
    length = plan.sizes.sample_tokens
    runs = LayerRuns.of_job(job.model_path, config.model.dtype, batch.tokens, length)
    rates = DeviceRates(**mean_of_all(measure_layers, cluster, runs), source="a probe")
    print(f"probe: {time.perf_counter() - begin:.1f} s {rates}", file=sys.stderr)
    each = [rates] * len(cluster.devices)
    plan = build_job_plan(config, cluster, job.placement, lengths, each)
    found = {"step": (plan.times.step, statistics.median(seconds[KEPT_FROM:]))}
    for (role, phase), predicted in plan.times.phases.items():
        of_steps = []
        for step in records[KEPT_FROM:]:
            ranks: defaultdict[int, float] = defaultdict(float)
            for record in step:
                if record.role == role:
                    ranks[record.rank] += record.phases.get(phase, 0.0)
            of_steps.append(max(ranks.values(), default=0.0))
        found[f"{role}/{phase}"] = (predicted, statistics.median(of_steps))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
