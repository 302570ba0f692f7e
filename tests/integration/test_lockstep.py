"""Ranks that share an engine: the peers do with theirs what the leader does, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from ranks import run_ranks

from hybridrl.batch.batch import Batch
from hybridrl.rollout.episode_batch import EpisodeSample, build_episode_batch
from hybridrl.rollout.lockstep import LockstepFollower, LockstepRequests
from hybridrl.rollout.rollout_engine import BatchedEngine, EngineOutput, Request, SamplingSettings
from hybridrl.rollout.sample_generator import GenerationTask, SampleGenerator, SampleStream
from hybridrl.rollout.transcript import TokenTranscript

pytestmark = pytest.mark.more


class Noted(BatchedEngine):
    """Notes what it is asked; ends every sample in the poll after the one in which it began."""

    continuous = True

    def __init__(self):
        super().__init__()
        self.asked, self._began = [], []

    def start(self, request):
        self.asked.append(("start", request.key))
        super().start(request)

    def abort(self, keys):
        self.asked.append(("abort", sorted(keys)))
        self._waiting = [request for request in self._waiting if request.key not in keys]

    def poll(self):
        self.asked.append("poll")
        ended, self._began, self._waiting = self._began, self._waiting, []
        return [EngineOutput(r.key, r.prompt_ids, [r.key], [-1.0], "stop") for r in ended]

    def cancel(self):
        self.asked.append("cancel")
        super().cancel()

    def generate(self, batch, sampling, seed):
        raise NotImplementedError

    def load(self, weights):
        raise NotImplementedError


class Plays(SampleGenerator):
    """One turn for each row; begins a request that it drops. In the seventh row it breaks."""

    def begin(self, task):
        return OneTurn(self.requests, task)


class OneTurn(SampleStream):
    def __init__(self, requests, task):
        super().__init__(requests, task.version)
        self.sampling, self.left = task.sampling, list(range(len(task.batch)))

    def _collect(self, least, refresh):
        if len(self.left) == 7:
            raise RuntimeError("broken")
        rows, self.left = self.left[:least], self.left[least:]
        for row in (*rows, 99):
            self._requests.start(Request(row, [1], self.sampling, 0))
        self._requests.abort([99])
        done = []
        while len(done) < len(rows):
            self._refresh(refresh)
            done += self._requests.poll()
        samples = []
        for finished in done:
            transcript = TokenTranscript([1])
            transcript.add_sampled(finished._replace(prompt_ids=[1]))
            samples.append(EpisodeSample([transcript], [], 1.0, "stop"))
        keys = np.array([finished.key for finished in done], dtype=np.int64)
        return build_episode_batch(samples), keys


def play(rank):
    peers, engine, refreshed = dist.group.WORLD, Noted(), []
    if rank == 0:
        rollout = Plays(engine, LockstepRequests(engine, peers))
    else:
        rollout = LockstepFollower(engine, peers)

    def refresh():
        refreshed.append(len(engine.asked))
        return 1

    def rows(count):
        return Batch.from_columns({"prompt_ids": [[1]] * count})

    whole = rollout.generate(rows(3), SamplingSettings(4), 0)
    playing = rollout.begin(GenerationTask(rows(4), SamplingSettings(4), list(range(4))))
    parts = [playing.next_samples(least, refresh)[1].tolist() for least in (1, 3)]
    playing.close()
    broken = ""
    try:
        rollout.generate(rows(7), SamplingSettings(4), 0)
    except RuntimeError as error:
        broken = str(error)
    return engine.asked, refreshed, len(whole), whole["response_ids"].values.tolist(), parts, broken


def test_peers_do_what_the_leader_does(tmp_path):
    leader, *peers = run_ranks(play, tmp_path, 3)
    asked, refreshed, count, tokens, parts, broken = leader
    assert tokens == [0, 1, 2] and parts == [[0], [1, 2, 3]] and broken == "broken"
    assert ("start", 99) not in asked and ("abort", [99]) in asked and len(refreshed) == 4
    for peer in peers:
        assert peer[:3] == (asked, refreshed, count)
        assert peer[3:] == ([], [[], []], "")
