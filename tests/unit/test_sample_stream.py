"""SingleTurnStream: samples as they finish, dealt out to replicas, from weights that change."""

import itertools
from collections import defaultdict

import pytest
import torch
from tiers import few_of

from hybridrl.batch.batch import Batch
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    RolloutEngine,
    SamplingSettings,
    build_response_batch,
)
from hybridrl.rollout.sample_generator import GenerationTask, ReplicaShare, SingleTurnStream

SAMPLING = SamplingSettings(max_tokens=100)


class Engine(RolloutEngine):
    """Generates a token per sample and poll; a sample of a prompt of n tokens is n tokens long, and
    tells its seed as its first token."""

    def __init__(self):
        self.running, self.most, self.order = {}, 0, []

    def start(self, request):
        self.order.append(request.key)
        for number in range(request.samples):
            self.running[request.key + number] = [request, request.seed + number, 0]
        self.most = max(self.most, len(self.running))

    def poll(self):
        done = []
        for key, sample in list(self.running.items()):
            sample[2] += 1
            request, seed, tokens = sample
            if tokens == len(request.prompt_ids):
                del self.running[key]
                ids = [seed] * tokens
                done.append(EngineOutput(key, request.prompt_ids, ids, [0.0] * tokens, "stop"))
        return done

    def progress(self):
        return {key: tokens for key, (_, _, tokens) in self.running.items()}

    def abort(self, keys):
        raise NotImplementedError

    def cancel(self):
        self.running.clear()

    def load(self, weights):
        raise NotImplementedError


def count_up():
    """A claim: the next number of each queue."""
    queues = defaultdict(itertools.count)
    return lambda queue: next(queues[queue])


def stream(
    engine, lengths, *, index=0, replicas=1, claim=None, at_a_time=100, copies=1, neighbours=False
):
    prompts = [[n] * n for n in lengths for _ in range(copies)]
    share = ReplicaShare(index, replicas, claim or count_up(), neighbours)
    seeds = range(1000, 1000 + len(prompts))
    engine.max_sequences = at_a_time
    batch = Batch.from_columns({"prompt_ids": [*prompts, [1]]}).take(range(len(prompts)))  # typed
    return SingleTurnStream(engine, GenerationTask(batch, SAMPLING, seeds, 3, share))


def test_each_row_has_its_own_seed_wherever_it_runs():
    samples, rows = stream(Engine(), [2, 3, 1], copies=2).next_samples(6)
    assert sorted(rows) == list(range(6))
    for row, ids in zip(rows, samples["response_ids"].rows(), strict=True):
        assert set(ids.tolist()) == {1000 + row}


def test_samples_come_in_the_order_in_which_they_finish():
    samples = stream(Engine(), [5, 1, 3])
    first, rows = samples.next_samples(1)
    assert rows.tolist() == [1] and len(first) == 1
    assert samples.next_samples(2)[1].tolist() == [2, 0]
    rest, rows = samples.next_samples(1)
    assert len(rest) == 0 and len(rows) == 0, "nothing is left"


def test_the_longest_begin_first_and_no_more_than_fit_run():
    engine = Engine()
    stream(engine, [1, 5, 2, 4, 3], at_a_time=2).next_samples(5)
    assert engine.order == [1, 3, 4, 2, 0]
    assert engine.most == 2


def test_a_group_larger_than_what_fits_still_runs():
    engine = Engine()
    assert len(stream(engine, [2], copies=8, at_a_time=4).next_samples(8)[1]) == 8


def test_replicas_share_the_rows_and_the_faster_one_takes_more():
    claim = count_up()
    lengths = [9, 9, *[1] * 10]
    slow, fast = (
        stream(Engine(), lengths, index=i, replicas=2, claim=claim, at_a_time=1) for i in (0, 1)
    )
    found = {"slow": [], "fast": []}
    for _ in range(30):
        found["slow"] += slow.next_samples(1)[1].tolist()
        for _ in range(4):
            found["fast"] += fast.next_samples(1)[1].tolist()
    assert sorted(found["slow"] + found["fast"]) == list(range(12))
    assert len(found["fast"]) > 2 * len(found["slow"])


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("replicas", few_of([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize("at_a_time", [2, 6, 100])
def test_each_prompt_is_on_one_replica_which_helps_others_at_the_end(
    replicas, at_a_time, neighbours
):
    claim, lengths = count_up(), [3, 9, 1, 4, 6, 2, 8, 5, 1, 7]
    engines = [Engine() for _ in range(replicas)]
    common = {"claim": claim, "at_a_time": at_a_time, "copies": 2, "neighbours": neighbours}
    streams = [
        stream(engine, lengths, index=index, replicas=replicas, **common)
        for index, engine in enumerate(engines)
    ]
    found = {}
    for _ in range(100):
        for one in streams:
            samples, rows = one.next_samples(1)
            found |= zip(rows.tolist(), samples["response_ids"].rows(), strict=True)
    assert sorted(found) == list(range(20)), "each row on one replica"
    assert all(set(ids.tolist()) == {1000 + row} for row, ids in found.items())
    begun = [engine.order for engine in engines]
    assert sorted(itertools.chain(*begun)) == list(range(0, 20, 2))
    if at_a_time < 100:
        return
    if neighbours:  # and as they come, so that what one has computed is still there for the next
        assert list(itertools.chain(*begun)) == list(range(0, 20, 2))
        assert max(map(len, begun)) - min(map(len, begun)) <= 1
    else:
        longest_first = [2, 12, 18, 8, 14, 6, 0, 10, 4, 16]
        assert begun == [longest_first[index::replicas] for index in range(replicas)]


def test_neighbours_are_divided_by_their_tokens():
    engines = [Engine(), Engine()]
    for index, engine in enumerate(engines):
        one = stream(engine, [400, 1, 2, 3, 4, 5], index=index, replicas=2, neighbours=True)
        one.next_samples(6)
    assert [engine.order for engine in engines] == [[0], [1, 2, 3, 4, 5]]


def test_a_replica_without_prompts():
    for neighbours in (False, True):
        samples = stream(Engine(), [], index=1, replicas=3, neighbours=neighbours)
        assert len(samples.next_samples(1)[0]) == 0


def test_tokens_tell_which_weights_made_them():
    versions = iter([3, 3, 4, 4, 5, 5, 5])
    engine = Engine()
    samples, rows = stream(engine, [2, 6]).next_samples(2, lambda: next(versions))
    made = dict(zip(rows.tolist(), samples["token_versions"].rows(), strict=True))
    assert made[0].tolist() == [3, 3]
    assert made[1].tolist() == [3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_batched_engine_gives_every_sample_of_a_request(samples):
    class Whole(BatchedEngine):
        load = None

        def generate(self, batch, sampling, seed):
            ids = [[s] * len(p) for s, p in zip(seed, batch["prompt_ids"].rows(), strict=True)]
            return build_response_batch(
                [EngineOutput(0, [], i, [0.0] * len(i), "stop") for i in ids]
            )

    found, rows = stream(Whole(), [2, 1], copies=samples).next_samples(2 * samples)
    assert sorted(rows) == list(range(2 * samples))
    firsts = [int(ids[0]) for ids in found["response_ids"].rows()]
    assert firsts == [1000 + row for row in rows]
    assert torch.equal(found["token_versions"].values.unique(), torch.tensor([3]))
