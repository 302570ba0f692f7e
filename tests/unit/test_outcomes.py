"""What is right: one answer wherever it is asked, from the outcome of a sample."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from settings import configured

from hybridrl.batch.batch import Batch, RaggedColumn, is_right, outcomes_of
from hybridrl.batch.call_record import CallRecord
from hybridrl.config.schema import RewardConfig
from hybridrl.data.samplers.difficulty_sampler import DifficultySampler
from hybridrl.data.samplers.pass_rate_sampler import PassRateSampler
from hybridrl.evaluation.scored_samples import ScoredSamplesRef, collect_sample_table
from hybridrl.rewards.returned_scores import parse_row_score
from hybridrl.rewards.scoring_round import ScoringRound
from hybridrl.trainers.data_feed import DataFeed
from hybridrl.workers.reward_worker import RewardWorker, add_up

NAN = math.nan
# Of three samples: right; wrong, with well-rewarded steps; dropped.
OUTCOMES, SCORES = torch.tensor([0.7, 0.0, NAN]), torch.tensor([0.7, 5.0, NAN])
STEPS = Batch.from_columns({"scores": SCORES, "outcomes": OUTCOMES, "group_id": torch.arange(3)})


@pytest.mark.parametrize("kind", [torch.tensor, np.float32, np.float64])
def test_a_score_at_the_bound_is_right_in_every_precision(kind):
    found = is_right(kind([np.float32(0.7), 0.69, 0.71, NAN]), 0.7)
    assert found.tolist() == [True, False, True, False]
    assert is_right(float(np.float32(0.7)), 0.7) and not is_right(NAN, -math.inf)


def test_outcomes_are_scores_where_nobody_tells_them_apart():
    assert outcomes_of(STEPS).tolist() == pytest.approx([*OUTCOMES.tolist()[:2], NAN], nan_ok=True)
    assert outcomes_of(STEPS.select(["scores"]))[1] == 5.0


class Here(SimpleNamespace):
    """A batch that is looked at as a BatchRef is."""

    def collect(self, names, partial):
        return self.batch.select(filter(self.batch.__contains__, names))


def test_evaluated_samples_are_right_by_their_outcomes():
    rows = Here(batch=STEPS, columns=SimpleNamespace(may_have=lambda name: False))
    prompts = Batch.from_columns({"prompt": [*"abc"]})
    table = collect_sample_table([ScoredSamplesRef(rows, 1, True)], prompts, 0.7, str).table
    assert table["correct"].to_pylist() == [True, False, False]
    assert table["score"].to_pylist()[1] == 5.0 and table["outcomes"].to_pylist()[1] == 0.0


def test_the_sampler_of_the_data_learns_outcomes():
    config = configured(["data.sampler=pass_rate", "reward.correct_at=0.7"])
    data = Batch.from_columns({"difficulty_size": [0, 0, 0]})
    feed = DataFeed(config, "prompts", data, None, None, lambda batch: batch, SimpleNamespace())
    feed._row_of = {0: 0, 1: 1, 2: 2}
    feed.learn_scores(Here(batch=STEPS))
    assert feed.deck.sampler._of_rows.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_samplers_find_right_what_is_at_the_bound():
    config = configured(["reward.correct_at=0.7"])
    data, rows = Batch.from_columns({"difficulty_size": [0, 1]}), np.array([0, 0])
    levels = DifficultySampler(data, 0, config, samples=2)
    levels.update(rows, np.float32([0.7, 0.7]))
    rates = PassRateSampler(data, 0, config)
    rates.update(rows, np.float32([0.7, 0.69]))
    assert levels.level == 1 and rates._of_rows[0].tolist() == [1, 1]


def test_workers_count_what_is_right_at_the_bound():
    worker = SimpleNamespace(_kind="reward", record=CallRecord("reward", 0, "compute_reward"))
    worker.report = lambda **figures: worker.record.metrics.update(figures)
    RewardWorker._report(worker, SCORES, OUTCOMES, RewardConfig(correct_at=0.7))
    assert worker.record.metrics["reward_correct"] == 1
    worker._sources = ["a"]
    rows = Batch.from_columns({"source": ["a"] * 3, "response_ids": [[1]] * 3})
    worker._config = RewardConfig(correct_at=0.7)
    RewardWorker._report_sources(worker, rows, SCORES, OUTCOMES)
    assert worker.record.metrics["source/a/correct"] == 1


def of(*numbers):
    return torch.tensor(numbers)


def test_copies_are_of_one_prompt():
    """Prompts without a text, as those of pictures and tools may be, are known by their number."""
    found = {}
    worker = SimpleNamespace(_kind="reward", report=found.update)
    for row, copies in (({"prompt": "a"}, 2.0), ({}, 1.0)):
        answers = [{**row, "response": "yes"}] * 3
        RewardWorker._report_copies(worker, answers, [0, 0, 1])
        assert found == {"repeated": copies}
    RewardWorker._report_copies(worker, [{"response": "yes"}], None)


def test_scores_and_outcomes_add_up_what_each_part_gave():
    config = RewardConfig(model_weight=0.5)
    config.judge.weight = 3.0
    scores, outcomes = of(5.0, 1.0, NAN), of(2.0, NAN, NAN)  # the second: rewards of steps only
    found = add_up(config, scores, outcomes)
    assert found[0].tolist() == pytest.approx([5, 1, NAN], nan_ok=True)
    assert found[1].tolist() == pytest.approx([2, 1, NAN], nan_ok=True)
    found = add_up(config, scores, outcomes, judge=of(1.0, 0.0, 1.0), model=of(4.0, 6.0, 1.0))
    assert found[0].tolist() == pytest.approx([10, 4, NAN], nan_ok=True)
    assert found[1].tolist() == pytest.approx([7, 3, NAN], nan_ok=True)
    found = add_up(config, scores, outcomes, episodes=of(NAN, 1.0, 1.0))
    assert found[0].tolist() == pytest.approx([NAN, 2, NAN], nan_ok=True)
    assert found[1].tolist() == pytest.approx([NAN, 1, NAN], nan_ok=True)


def test_a_model_that_scores_steps_does_not_say_what_is_right_beside_others():
    config = RewardConfig(model_weight=0.5, model_steps="\n")
    scores, outcomes, model = of(1.0, 0.0), of(1.0, 0.0), of(8.0, 8.0)
    assert [x.tolist() for x in add_up(config, scores, outcomes, model=model)] == [[5, 4], [1, 0]]
    nothing = torch.full((2,), NAN)
    found = add_up(config, torch.zeros(2), nothing, model=model)
    assert [x.tolist() for x in found] == [[4, 4], [4, 4]]
    found = add_up(config, torch.zeros(2), nothing, model=model, episodes=of(1.0, 0.0))
    assert [x.tolist() for x in found] == [[5, 4], [1, 0]]


def test_rewards_of_steps_have_the_weight_of_their_function():
    calls = ScoringRound(
        [{"response": "ab"}], ["reward/mine", "reward/yours"], [(False, "row")] * 2, "fail", 0.0
    )
    for task, end, reward in ((0, 2, 0.5), (1, 1, 4.0)):
        calls.score(task, [parse_row_score({"score": 1.0, "steps": [(end, reward)]}, "ab")])
    found = calls.result([2.0, 0.25])
    assert found.steps == [[(1, 1.0), (2, 1.0)]]
    assert (found.scores, found.outcomes) == ([2 * 1.5 + 0.25 * 5], [2.25])


def test_steps_that_the_reward_model_scores_have_its_weight():
    """Tokens are characters: the first line ends behind the second, the other behind the third."""
    config = RewardConfig(model_weight=0.5, model_steps="\n")
    worker = SimpleNamespace(_config=config, _decoded=lambda ids: "".join(map(chr, ids)))
    ids, steps = [ord("a"), ord("\n"), ord("b")], [[(1, 7.0)]]
    values = RaggedColumn(torch.tensor([9.0, 4.0, 2.0]), torch.tensor([0, 3]))
    assert RewardWorker._by_model(worker, values, ["a\nb"], [ids], steps).tolist() == [6.0]
    assert steps == [[(1, 7.0), (2, 2.0), (3, 1.0)]]
