"""Mixtures: what sources are, in which proportions they are dealt, how their rows are scored."""

import json
from collections import Counter

import numpy as np
import pytest
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.mixture import (
    SourceProportions,
    find_source_rewards,
    list_source_names,
    load_mixture,
    parse_sources,
)
from hybridrl.data.prompt_loader import MixtureSchedule
from hybridrl.errors import ConfigError, DataError, RewardError
from hybridrl.rewards.source_pools import SourceRewardPools, resolve_source_settings
from hybridrl.trainers.data_feed import SourceMetrics, compute_source_metrics

MIXED = ("data=mixture", "data.sources.a.path=a.jsonl", "data.sources.a.weight=3")
MIXED += ("data.sources.b.task=reasoning_gym", "data.sources.b.tasks=[gcd]")


def rows(a=6, b=4):
    sources = ["a"] * a + ["b"] * b
    return Batch.from_columns({"source": sources, "prompt_ids": [np.arange(3)] * (a + b)})


def deck(*overrides, of=None):
    config = configured([*MIXED, *overrides])
    return MixtureSchedule(config, rows() if of is None else of, parse_sources(config.data))


@pytest.mark.parametrize("weights", [[1.0], [3, 1], [5, 3, 1.5, 0.25]])
def test_shares_are_exact_at_any_time(weights):
    proportions, counts = SourceProportions(weights), Counter()
    for number in (1, 7, 0, 32, 5, 200):
        counts.update(proportions.next(number))
        total = counts.total()
        wanted = [weight / sum(weights) * total for weight in weights]
        assert max(abs(counts[i] - wanted[i]) for i in range(len(weights))) < len(weights)


def test_a_position_stays_what_it_was():
    proportions = SourceProportions([1.0, 2.0])
    before = proportions.state()
    proportions.next(5)
    assert before["drawn"] == [0, 0]


def test_each_source_has_epochs_of_its_own_and_goes_on_where_it_stopped():
    first, second = deck(), deck()
    dealt = np.concatenate([first.deal(8) for _ in range(4)])
    assert Counter(dealt[dealt < 6].tolist()) == dict.fromkeys(range(6), 4), "24 rows of a"
    assert Counter(dealt[dealt >= 6].tolist()) == dict.fromkeys(range(6, 10), 2), "8 rows of b"
    first.deal(5)
    second.load_state(json.loads(json.dumps(first.state())))
    for _ in range(3):
        assert np.array_equal(first.deal(5), second.deal(5))
    state = first.state()
    state["sources"] = {"a": state["sources"]["a"]}
    with pytest.raises(DataError, match="with the sources a and this run has a, b"):
        second.load_state(state)


def test_the_sampler_chooses_within_the_source_that_the_weights_chose():
    mixed = deck("data.sampler=pass_rate")
    dealt = np.concatenate([mixed.deal(4) for _ in range(5)])
    assert (dealt < 6).sum() == 15
    # Of each source one row is neither always right nor never.
    for _ in range(6):
        samples = np.repeat(np.arange(10), 8)
        scores = np.where(np.isin(samples, [2, 7]), np.tile([0, 1], 40), 1).astype(np.float32)
        mixed.learn(samples, scores)
        dealt = np.concatenate([mixed.deal(4) for _ in range(10)])
    counts = Counter(dealt.tolist())
    assert counts[2] > counts[0] and counts[7] > counts[8] and (dealt < 6).sum() == 30


def test_sources_are_loaded_one_after_the_other(tmp_path):
    lines = [{"question": f"{n}?", "answer": str(n), "level": n} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [f"data.sources.a.path={tmp_path}/a.jsonl", "data.sources.a.prompt_column=question"]
    of_task = ["data.sources.b.rows=20", "data.sources.b.eval_prompts=3"]
    config = configured([*MIXED, *own, *of_task]).data
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS)

    def load(data, origin, number):
        return load_rows("prompts", data, tokenizer, held_out=number, seed=0, origin=origin)

    found = load_mixture(config, load, 8)
    assert Counter(found.training["source"]) == {"a": 34, "b": 20}
    assert Counter(found.held_out["source"]) == {"a": 6, "b": 3}
    assert len(found.examples) == 20, "only a task brings right responses"
    assert found.training.to_pylist()[-1]["level"] is None
    config.sources["a"]["prompt_column"] = "quest"
    with pytest.raises(DataError, match=r"Source `a`: .*data\.sources\.a\.prompt_column.*question"):
        load_mixture(config, load, 8)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("data.sources.a.weight=0", r"data\.sources\.a\.weight=0: must be a number, more than 0"),
        ("data.sources.a.wait=2", r"no setting `data\.sources\.a\.wait`.*Did you mean `weight`"),
        ("data.sources.a.task=arithmetic", r"data\.sources\.a must have either .* has both"),
        ("data.sources.a.prompts_per_step=2", r"no setting `data\.sources\.a\.prompts_per_step`"),
        ("data.sources.a.chat=maybe", r"data\.sources\.a\.chat=maybe: must be true or false"),
        ("data.sources.a.reward=[]", r"data\.sources\.a\.reward"),
    ],
)
def test_what_is_no_source_is_a_sentence(setting, words):
    with pytest.raises(ConfigError, match=words):
        parse_sources(configured([*MIXED, setting]).data)


def test_rows_are_scored_by_the_functions_of_their_source():
    config = configured(
        [*MIXED, "data.sources.b.reward=[numeric,length]", "reward.options.length.limit=1"]
    )
    own = find_source_rewards(config.data)
    settings = resolve_source_settings(config.reward, own, list_source_names(config.data))
    assert {name: one.options for name, one in settings.items()} == {
        None: {},
        "b": {"length": {"limit": 1}},
    }
    samples = [
        {"prompt": "", "answer": "5", "response": "5.0", "source": source}
        for source in ("a", "b", "a")
    ]
    pools = SourceRewardPools(settings)
    try:
        found = pools.score(samples)
        of_one = pools.score(samples[:1])
    finally:
        pools.close()
    assert found.scores == [0.0, 0.0, 0.0] and found.columns["reward/numeric"][1] == 1.0
    assert np.isnan(found.columns["reward/numeric"][0])
    assert set(of_one.columns) == set(found.columns), "on every rank the same"
    config.reward.options["lenght"] = {}
    with pytest.raises(ConfigError, match=r"lenght.*Did you mean `length`"):
        resolve_source_settings(config.reward, own, list_source_names(config.data))
    config.reward.options.clear()
    only = SourceRewardPools(resolve_source_settings(config.reward, {"b": ["numeric"]}, ["b"]))
    try:
        with pytest.raises(RewardError, match="of the source 'a', which has no reward"):
            only.score(samples)
    finally:
        only.close()


def test_figures_of_sources():
    figures = SourceMetrics(configured(MIXED), rows())
    of_rows = np.array([0, 0, 1, 1, 7, 7, 8, 8])
    groups = np.array([10, 10, 11, 11, 12, 12, 13, 13])
    scores = np.array([0, 1, 1, 1, 0, np.nan, np.nan, np.nan], np.float32)
    found = figures.of_groups(of_rows, groups, scores)
    assert found == {
        "source/a/groups": 2,
        "source/a/zero_variance": 0.5,
        "source/b/groups": 1,
        "source/b/zero_variance": 1.0,
    }
    total = {"source/a/count": 4, "source/a/sum": 3.0, "source/a/correct": 2}
    total |= {"source/a/samples": 5, "source/a/tokens": 20}
    assert compute_source_metrics(total) == {
        "source/a/reward/mean": 0.75,
        "source/a/accuracy": 0.5,
        "source/a/response/length_mean": 4.0,
    }
    assert not SourceMetrics(configured([]), rows()).names


def test_sources_of_as_many_rows_are_dealt_in_orders_of_their_own():
    mixed = deck("data.shuffle=true", of=rows(8, 8))
    of_a, of_b = (one.deal(8).tolist() for one in mixed._decks.values())
    assert sorted(of_a) == sorted(of_b) == list(range(8)) and of_a != of_b
    drawn = deck("data.sampler=pass_rate", of=rows(8, 8))
    of_a, of_b = (one.deal(8).tolist() for one in drawn._decks.values())
    assert of_a != of_b
