"""What the content cache saves: updates with cached log-probabilities of the reference, and
programs that are judged once.

    python benchmarks/content_cache.py

1. Updates of DPO (pairs of which the reference has scored all before, as from the second epoch on,
   or in a second run) per second, against the same without a cache.
2. The same of GRPO with a KL, on samples that are kept: with one update a step, and with several
   (`actor.updates_per_step`), where both arms also compute the policy's own log-probabilities. Then
   a sample costs five times its forward pass, and without the reference four: at most 1.25.
3. Verdicts per second where each program is one of eight, with other words around it, against the
   same without a cache; the cache is empty when a round begins.
4. The largest difference of a cached log-probability that was computed among other rows.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import SMOKE, interleave, report

from hybridrl.batch.batch import Batch
from hybridrl.composition.load import compose_config
from hybridrl.config.schema import CacheConfig
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.system.content_cache import ContentCache
from hybridrl.trainers.objectives import build_policy_objective, build_preference_objective
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.training_engines import ModelSource

ROWS, TOKENS = (4, 16) if SMOKE else (16, 128)
ROUNDS, UPDATES = 5, 1 if SMOKE else 3
SHAPE = {"hidden_size": 32 if SMOKE else 256, "layers": 2 if SMOKE else 6, "heads": 4}
PROGRAMS = 8 if SMOKE else 64


def random_rows(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(TOKENS // 2, TOKENS, (ROWS,), generator=generator).tolist()
    draw = [torch.randint(3, 12, (length,), generator=generator) for length in lengths]
    weights = [torch.full((length,), 1.0 / sum(lengths)) for length in lengths]
    return Batch.from_columns(
        {
            "prompt_ids": [row[: TOKENS // 4] for row in draw],
            "response_ids": draw,
            "response_mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
            "loss_weights": weights,
            "advantages": [torch.full((length,), (-1.0) ** length) for length in lengths],
            "rollout_log_probs": [torch.full((length,), -2.0) for length in lengths],
        }
    )


class Job:
    """An actor and its reference, on one device."""

    def __init__(
        self, folder: Path, algorithm: str, cache: CacheConfig, needs_log_probs: bool = False
    ) -> None:
        config = compose_config([f"algorithm={algorithm}"])[0]
        source = ModelSource(str(folder), str(folder), "float32", 4 * TOKENS, (1,))
        build = build_preference_objective if config.preference else build_policy_objective
        self.reference = ReferenceWorker(
            WorkerContext("reference", 0, 1), source, config.actor, temperature=1.0, cache=cache
        )
        self.actor = ActorWorker(
            *(WorkerContext("actor", 0, 1), source, config.actor, config.rollout, build(config)),
            temperature=1.0,
            updates=1000,
            job="benchmark",
            generates=False,
        )
        self.is_dpo, self.needs_log_probs = config.preference is not None, needs_log_probs

    def update(self, batch: Batch) -> None:
        batch |= self.reference.compute_ref_log_prob(batch)
        if self.is_dpo:
            self.actor.update_preference(batch)
            return
        if self.needs_log_probs:
            batch |= self.actor.compute_log_prob(batch)
        self.actor.update_actor(batch)

    def updates_per_second(self, batches: list[Batch]) -> float:
        begin = time.perf_counter()
        for batch in batches:
            self.update(batch)
        return len(batches) / (time.perf_counter() - begin)


def measure_updates(folder: Path, algorithm: str, needs_log_probs: bool = False) -> None:
    batches = [random_rows(seed) for seed in range(UPDATES)]
    cache = CacheConfig(["log_probs"], str(folder / algorithm))
    cached = Job(folder, algorithm, cache, needs_log_probs)
    plain = Job(folder, algorithm, CacheConfig(), needs_log_probs)
    for job in (cached, plain):
        job.updates_per_second(batches)  # the cache is filled
    cached.reference.record.metrics.clear()
    ours, baseline = interleave(
        lambda: cached.updates_per_second(batches),
        lambda: plain.updates_per_second(batches),
        ROUNDS,
    )
    counts = cached.reference.record.metrics
    if counts["cache_log_probs_hits"] != counts["cache_log_probs_asked"]:
        raise RuntimeError(f"not every row was in the cache: {counts}")
    name, goal = f"{algorithm}: updates with a cached reference", ">= 1.3"
    if needs_log_probs:
        name, goal = f"{name}, several a step", "report"
    report(name, ours, baseline, goal, "updates/s")


def measure_difference(folder: Path) -> None:
    job, plain = (
        Job(folder, "dpo", cache)
        for cache in (CacheConfig(["log_probs"], str(folder / "parts")), CacheConfig())
    )
    batch = random_rows(99)
    for rows in (range(0, ROWS, 2), range(ROWS)):
        found = job.reference.compute_ref_log_prob(batch.take(list(rows)))["ref_log_probs"]
    expected = plain.reference.compute_ref_log_prob(batch)["ref_log_probs"]
    worst = float((found.values - expected.values).abs().max())
    report("largest difference of a log-probability", worst, 1.0, "<= 1e-6", "nats")


def measure_verdicts(folder: Path) -> None:
    bodies = [f"def f(x):\n    return x * {factor}" for factor in range(1, 9)]
    rows = [
        {
            "prompt": "p",
            "response": f"Attempt {number}:\n```python\n{body}\n```",
            "tests": ["assert f(2) == 4", "assert f(3) == 6"],
        }
        for number, body in zip(range(PROGRAMS), itertools.cycle(bodies), strict=False)
    ]
    fresh = itertools.count()

    def per_second(build: Callable[[], ContentCache | None]) -> float:
        with RewardPool(["hybridrl.rewards.code:passes_tests"], processes=2, cache=build()) as pool:
            pool.start()
            begin = time.perf_counter()
            scores = pool.score(rows).scores
            seconds = time.perf_counter() - begin
        if scores != [float(number % 8 == 1) for number in range(PROGRAMS)]:
            raise RuntimeError(f"wrong verdicts: {scores}")
        return len(rows) / seconds

    def empty_cache() -> ContentCache:
        return ContentCache(CacheConfig(folder=str(folder / str(next(fresh)))), "verdicts")

    ours, baseline = interleave(
        lambda: per_second(empty_cache), lambda: per_second(lambda: None), ROUNDS
    )
    report(f"verdicts: {PROGRAMS} answers, 8 programs", ours, baseline, ">= 2", "verdicts/s")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(
            folder, build_character_tokenizer("0123456789+="), seed=0, context=4 * TOKENS, **SHAPE
        )
        for algorithm in ("dpo", "grpo"):
            measure_updates(folder, algorithm)
        measure_updates(folder, "grpo", needs_log_probs=True)
        measure_verdicts(folder)
        measure_difference(folder)


if __name__ == "__main__":
    main()
