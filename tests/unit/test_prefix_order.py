"""The order of prompts that share prefixes: the tree, the bound of the shuffling error, epochs."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import few_of

from hybridrl.batch.batch import Batch
from hybridrl.checks.settings.rollout_checks import find_order_obstacle
from hybridrl.data import prefix_order, prompt_loader
from hybridrl.data.prefix_order import (
    BLOCK_TOKENS,
    PrefixOrder,
    compare_orders,
    compute_shuffle_error,
    rank_traits,
)
from hybridrl.errors import DataError
from hybridrl.job.config_resolution import KnownJob, load_config, resolve_prompt_order

BLOCK = BLOCK_TOKENS
few_blocks = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=14)
"""Prompts of blocks of which each is one of three."""


def prompts_of(blocks, tail=lambda row: [row]):
    """Prompts whose blocks have one token each, over and over, and then tokens of their own."""
    ids = [[b for b in row for _ in range(BLOCK)] + tail(n) for n, row in enumerate(blocks)]
    return Batch.from_columns({"prompt_ids": [np.array(row, np.int64) for row in ids]})


def library(systems=8, documents=6, questions=8, seed=0, **columns):
    """Prompts of a few system prompts and documents of various lengths, in random order."""
    random = np.random.default_rng(seed)
    rows = []
    for system in range(systems):
        for _document in range(documents):
            middle = random.integers(0, 9, BLOCK * random.integers(1, 5))
            for question in range(questions):
                begin = np.full(BLOCK, 100 + system)
                rows.append(np.concatenate([begin, middle, [question] * (1 + question % 3)]))
    rows = [rows[place] for place in random.permutation(len(rows))]
    return Batch.from_columns({"prompt_ids": rows, **{k: f(len(rows)) for k, f in columns.items()}})


def shared_blocks(ours, others):
    alike = [one == other for one, other in zip(ours, others, strict=False)]
    return [*alike, False].index(False)


@given(few_blocks, st.integers(0, 9))
def test_the_tree_is_that_of_comparing_every_pair(blocks, seed):
    rows, shared = PrefixOrder(prompts_of(blocks), 4, 0.05, 0).traverse(np.random.default_rng(seed))
    assert sorted(rows) == list(range(len(blocks)))
    for before, row, number in zip(rows[:-1], rows[1:], shared[1:], strict=True):
        assert number == shared_blocks(blocks[before], blocks[row])
    for place, row in enumerate(rows):  # whoever stands between two rows has what they share
        for later in range(place + 2, len(rows)):
            alike = shared_blocks(blocks[row], blocks[rows[later]])
            between = rows[place + 1 : later]
            assert all(shared_blocks(blocks[row], blocks[one]) >= alike for one in between)


@given(few_blocks, st.data())
def test_hits_are_those_of_a_cache_that_keeps_a_step(blocks, data):
    order, count = PrefixOrder(prompts_of(blocks), 4, 0.05, 0), len(blocks)
    size = data.draw(st.integers(1, count))
    steps = np.random.default_rng(0).permutation(count)[: count // size * size].reshape(-1, size)
    hits = 0
    for step in steps:
        cache = set()
        for row in step:
            begins = [tuple(blocks[row][: n + 1]) for n in range(len(blocks[row]))]
            hits += sum(one in cache for one in begins)
            cache.update(begins)
    assert order.count_hits(steps) == hits * BLOCK


@settings(deadline=None, max_examples=40)
@given(few_blocks, st.integers(1, 20), st.integers(0, 9), st.sampled_from([0.0, 0.05, 1.0]))
def test_every_row_comes_once_an_epoch_and_the_seed_decides(blocks, step, seed, bound):
    def deal(number):
        order = PrefixOrder(prompts_of(blocks), step, bound, seed)
        loader = prompt_loader.PromptLoader(prompts_of(blocks), step, seed)
        loader.order = order
        with patch.object(prefix_order, "MEASURED_STEPS", 16):
            return np.concatenate([loader.deal() for _ in range(number)])

    count = len(blocks)
    dealt = deal(3 * count)
    for begin in range(0, len(dealt) - count + 1, count):
        assert sorted(dealt[begin : begin + count]) == list(range(count))
    assert deal(3 * count).tolist() == dealt.tolist()


def distance(values, rows):
    """Total variation distance of some rows' values from those of all."""
    shares = [np.mean(values == one) for one in np.unique(values)]
    ours = [np.mean(values[rows] == one) for one in np.unique(values)]
    return np.abs(np.array(shares) - ours).sum() / 2


def test_the_error_is_what_rows_drawn_at_random_do_not_have():
    kinds = np.repeat([0, 1, 2], [50, 30, 20])
    prompts = prompts_of([[]] * 100).with_columns({"difficulty_kind": kinds})
    random = np.random.default_rng(0)
    drawn = np.stack([random.permutation(100)[:10] for _ in range(4000)])
    expected = np.mean([distance(kinds, rows) for rows in drawn])
    steps = np.arange(100).reshape(10, 10)
    (_, bins) = rank_traits(prompts)
    found = [compute_shuffle_error(bins, rows[None]) for rows in steps]
    wanted = [distance(kinds, rows) - expected for rows in steps]
    assert found == pytest.approx(wanted, abs=0.005)
    assert compute_shuffle_error(bins, steps) == pytest.approx(np.mean(wanted), abs=0.005)


@pytest.mark.parametrize("step", few_of([8, 32, 100], [32]))
@pytest.mark.parametrize("bound", [0.0, 0.05])
def test_steps_are_like_the_whole_data_within_the_bound(step, bound):
    prompts = library(source=lambda n: [f"s{k % 3}" for k in range(n)])
    order = PrefixOrder(prompts, step, bound, seed=3)
    random = np.random.default_rng(0)
    lengths, source = prompts.lengths("prompt_ids"), np.array(prompts["source"])
    bins = np.searchsorted(np.quantile(lengths, np.linspace(0, 1, 17)[1:-1]), lengths, "right")
    epochs = 1 + 600 * step // len(source)
    ours = np.concatenate([order.rows(random) for _ in range(epochs)])
    theirs = np.concatenate([random.permutation(len(source)) for _ in range(epochs)])
    for values in (bins, source):
        apart, by_chance = (
            np.mean([distance(values, rows) for rows in dealt[: 600 * step].reshape(600, step)])
            for dealt in (ours, theirs)
        )
        assert apart <= by_chance + bound + 0.01


def test_a_wider_bound_lets_more_be_shared():
    prompts = library()
    hits = []
    for bound in (0.0, 0.05, 1.0):
        order = PrefixOrder(prompts, 32, bound, seed=0)
        steps = order.rows(np.random.default_rng(1)).reshape(-1, 32)
        hits.append(order.count_hits(steps))
    random = np.random.default_rng(1).permutation(len(prompts)).reshape(-1, 32)
    assert order.count_hits(random) < hits[0] <= hits[1] < hits[2]
    assert hits[1] > 2 * order.count_hits(random)


def test_branches_are_cut_where_neighbours_share_least():
    order = PrefixOrder(prompts_of([[0], *([n] for n in range(1, 21) for _ in range(6))]), 12, 1, 0)
    order.load_state({"step": 12, "branch": 6})
    place = np.argsort(order.rows(np.random.default_rng(0)))
    documents = place[1:].reshape(20, 6)
    assert (documents.max(1) - documents.min(1) == 5).all(), "none is in two branches"


@pytest.mark.parametrize(
    ("prompts", "response", "step", "pays"),
    [
        (library(), 16, 32, True),
        (library(), 400, 32, False),  # most is sampled
        (library(), 16, 384, False),  # a step has all, in any order
        (prompts_of([[n, n + 1] for n in range(0, 80, 2)]), 16, 8, False),  # nothing is shared
        (prompts_of([[1, 2]] * 40), 16, 8, False),  # all is shared, in any order
        (prompts_of([[]]), 16, 8, False),
        (prompts_of([[1]], tail=lambda row: []), 16, 8, False),
    ],
)
def test_auto_takes_the_order_where_much_is_spared(prompts, response, step, pays):
    found, said = compare_orders(prompts, response, step, 0.05, 0)
    assert found == pays and "% of the tokens of prompts in prefix order" in said


def settings_of(*further):
    return load_config(["data=jsonl", "data.path=p", *further])


def test_a_resumed_run_goes_on_though_its_steps_have_another_size():
    prompts = library()
    config = settings_of("data.order=prefix", "data.prompts_per_step=16")
    whole = prompt_loader.build_row_schedule(config, prompts)
    first, rest = whole.deal(48), whole.deal(len(prompts))
    schedule = prompt_loader.build_row_schedule(config, prompts)
    assert schedule.deal(48).tolist() == first.tolist()
    state = json.loads(json.dumps(schedule.state()))
    other = settings_of("data.order=prefix", "data.prompts_per_step=64")
    resumed = prompt_loader.build_row_schedule(other, prompts)
    resumed.load_state(state)
    assert resumed.deal(len(prompts)).tolist() == rest.tolist()
    with pytest.raises(DataError, match=r"prefix as `data.order` and this run has random"):
        prompt_loader.build_row_schedule(settings_of(), prompts).load_state(state)


def test_a_mixture_orders_the_rows_of_each_source():
    prompts = library(source=lambda n: ["a" if k < n // 4 else "b" for k in range(n)])
    config = settings_of("data.order=prefix", "data.path=null", "data.prompts_per_step=32")
    config.data.sources = {"a": {"path": "x", "weight": 1}, "b": {"path": "y", "weight": 3}}
    schedule = prompt_loader.build_row_schedule(config, prompts)
    dealt = np.concatenate([schedule.deal(32) for _ in range(len(prompts) // 32)])
    assert sorted(dealt) == list(range(len(prompts)))
    order = PrefixOrder(prompts, 32, 0.05, 0)
    random = np.random.default_rng(1).permutation(len(prompts)).reshape(-1, 32)
    assert order.count_hits(dealt.reshape(-1, 32)) > 1.5 * order.count_hits(random)


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ("data.sampler=pass_rate", "data.sampler=pass_rate chooses"),
        ("data.shuffle=false", "data.shuffle=false keeps"),
        ("rollout=transformers", "rollout=transformers computes"),
        ("rollout.engine_options.enable_prefix_caching=false", "forgets prefixes"),
        ("algorithm=sft", "trainer.name=sft learns from no samples"),
    ],
)
def test_what_it_cannot_be_together_with_is_refused(further, said):
    assert said in find_order_obstacle(settings_of(further))
    assert find_order_obstacle(settings_of()) == ""


def resolve(*further, training=None, device="cpu"):
    """The order that is chosen, the options of vLLM, and what is said."""
    cluster, training = SimpleNamespace(kind=device), training or library()
    job = KnownJob(cluster, {}, "model", None, training)
    config, said = resolve_prompt_order(settings_of(*further), job)
    return config.data.order, config.rollout.engine_options, said


def test_the_chosen_order_reaches_the_job_and_vllm_keeps_prefixes_for_it():
    caching = {"enable_prefix_caching": True, "block_size": BLOCK_TOKENS}
    assert resolve() == ("random", {}, "")
    order, options, said = resolve(
        "data.order=auto", "data.prompts_per_step=16", "rollout.max_tokens=4"
    )
    assert (order, options) == ("prefix", caching) and said.startswith("data.order=prefix: an ")
    assert resolve("data.order=prefix", device="cuda")[:2] == ("prefix", {})
    own = "rollout.engine_options.block_size=64"
    assert resolve("data.order=prefix", own)[1] == caching | {"block_size": 64}


def test_auto_stays_with_random_where_nothing_is_gained():
    alone = prompts_of([[n] for n in range(40)])
    assert resolve("data.order=auto", training=alone)[:2] == ("random", {})
    order, options, said = resolve("rollout=transformers", "data.order=auto")
    assert order == "random" and not options and "rollout=transformers computes" in said
    order, _, said = resolve("data.order=prefix", training=alone)
    assert order == "prefix" and "0% of the tokens" in said


def test_other_prompts_are_refused_for_their_order_is_another():
    config = settings_of("data.order=prefix", "data.prompts_per_step=16")
    state = prompt_loader.build_row_schedule(config, library()).state()
    with pytest.raises(DataError, match="CRC-32 of the rows' tokens"):
        prompt_loader.build_row_schedule(config, library(seed=1)).load_state(state)


def test_no_rows_are_an_error_of_the_data():
    config = settings_of("data.order=prefix")
    with pytest.raises(DataError, match="no rows"):
        prompt_loader.build_row_schedule(config, library().slice(0, 0))
