"""Whole jobs whose model is cut over two devices run, and have the losses of data parallelism."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from settings import SHORT

from hybridrl import load_config
from hybridrl.batch.batch import RaggedColumn
from hybridrl.config.schema import ParallelConfig
from hybridrl.controller import WorkerGroup
from hybridrl.job.worker_groups import resolve_worker

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.vllm]
CUTS = ("dp", "tp", "pp", "ring", "ulysses")


def test_the_main_job_runs(run):
    directory = run(*SHORT, "actor.parallel.tp=2", "algorithm.kl_coefficient=0.1")
    assert "sync/received_bytes" in (directory / "metrics.jsonl").read_text()


def test_the_same_samples_give_the_same_losses(hosts, tmp_path):
    config = load_config([f"run.directory={tmp_path / 'run'}", *SHORT])
    with hosts.job(config, roles=["actor"]) as job:
        samples = generate(job)
        found = {cut: losses(job, cut, samples) for cut in CUTS}
    scored, wanted = found["dp"]
    assert wanted[0, 0] != wanted[2, 0]
    for cut, (said, steps) in found.items():
        assert said == pytest.approx(scored, abs=1e-4), cut
        assert steps == pytest.approx(wanted, rel=1e-4, abs=1e-5), cut


def generate(job):
    """What vLLM says, with advantages made up."""
    batch = job.next_batch().repeat(4)
    batch |= job.groups["actor"].generate_sequences(batch, job.sampling)
    batch = batch.collect()
    tokens = batch["response_ids"]
    advantages = np.random.default_rng(0).standard_normal(len(batch))
    weights = torch.full((len(tokens.values),), 1 / len(tokens.values))
    return batch.with_columns(
        {
            "log_probs": batch["rollout_log_probs"],
            "advantages": advantages.astype(np.float32),
            "loss_weights": RaggedColumn(weights, tokens.cu_seqlens),
        }
    )


def losses(job, cut, samples):
    """What a policy cut in two says of the samples, and losses and gradient norms of three updates
    on them."""
    worker_class, keywords = resolve_worker("actor", job)
    actor = replace(job.config.actor, parallel=ParallelConfig(**{cut: 2}))
    group = WorkerGroup(
        job.executor, cut, worker_class, [0, 1], **{**keywords, "config": actor, "generates": False}
    ).ready()
    said = group.compute_log_prob(samples).collect(["log_probs"])["log_probs"].values.numpy()
    updates = [group.update_actor(samples).get() for _ in range(3)]
    return said, np.array([(update["loss"], update["grad_norm"]) for update in updates])
