"""What driver programs have their workers do, step by step, and what they learn from."""

import contextlib
import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from settings import configured
from tiers import few_of

from hybridrl.batch.batch import Batch
from hybridrl.controller import BatchRef
from hybridrl.errors import DataError
from hybridrl.job import worker_groups as roles
from hybridrl.run.step_runner import StepRunner
from hybridrl.trainers import grpo
from hybridrl.trainers.data_feed import DataFeed
from hybridrl.trainers.distillation import teacher_advantages
from hybridrl.trainers.policy_trainer import PolicyTrainer
from hybridrl.trainers.trainer import StepResult

PTX = "algorithm.ptx_coefficient=0.25"


class Notes:
    """A worker group that notes its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return lambda *arguments, **options: self.calls.append(method)


def updates_of(steps, *overrides, critics=()):
    """The actor's updates in each step, of two mini-batches."""
    trainer = SimpleNamespace(
        config=configured(["algorithm=ppo", PTX, *overrides]),
        groups={"actor": Notes(), "critic": Notes()},
        CRITICS={"critic": ("values", "returns")},
        mini_batches=lambda batch, epochs: [SimpleNamespace(select=lambda *names: names)] * 2,
        kl=SimpleNamespace(watch=lambda handle: handle),
        next_examples=lambda coefficient: coefficient,
        steps=0,
    )
    found = []
    for _ in range(steps):
        trainer.groups["actor"].calls.clear()
        PolicyTrainer.learn(trainer, None)
        found.append([*trainer.groups["actor"].calls])
    assert trainer.groups["critic"].calls == ["update_critic"] * 2 * steps
    return found


def test_while_only_the_critic_learns_the_actor_does_not():
    whole = ["update_actor", "update_actor", "update_supervised"]
    assert updates_of(4, "critic.warmup_steps=2") == [[], [], whole, whole]
    assert updates_of(1) == [whole]


def test_the_schedule_of_the_actor_spans_the_updates_that_it_makes(monkeypatch):
    monkeypatch.setattr(roles, "_make_role_source", lambda job, role: SimpleNamespace())
    monkeypatch.setattr(roles, "replace", lambda source, **changed: source)
    monkeypatch.setattr(roles, "_make_training_config", lambda job, role: None)

    def updates(*overrides):
        config = configured(["trainer.steps=10", "actor.updates_per_step=3", *overrides])
        job = SimpleNamespace(
            config=config,
            name="job",
            trainer_class=SimpleNamespace(objective=lambda config: None),
            placement=SimpleNamespace(is_separated=False),
            roles={"actor": SimpleNamespace(generates=True), "critic": None},
        )
        return roles._make_actor_keywords(job, "actor")["updates"], roles._make_critic_keywords(
            job, "critic"
        )["updates"]

    assert updates("algorithm=grpo") == (30, 30)
    assert updates("algorithm=ppo", PTX, "critic.warmup_steps=4") == (24, 30)
    assert updates("algorithm=ppo", PTX, "actor.epochs=2") == (70, 60)
    assert updates("algorithm=ppo", "actor.epochs=2", "critic.epochs=1") == (60, 30)
    assert updates("algorithm=ppo", "critic.warmup_steps=12")[0] == 0


class Table:
    """A batch of which every column is there."""

    columns = SimpleNamespace(may_have=lambda name: False)

    def __or__(self, other):
        return self

    def apply(self, *arguments, **options):
        return self


@pytest.mark.parametrize(
    ("overrides", "a_step"), [([], 3), ([PTX], 4), ([PTX, "actor.epochs=2"], 7)]
)
def test_the_age_of_replayed_samples_is_counted_in_updates(overrides, a_step, monkeypatch):
    drawn, kept = [], []
    monkeypatch.setattr(grpo, "BatchRef", SimpleNamespace(concat=lambda parts: parts))
    settings = ["algorithm.replay_share=0.4", "actor.updates_per_step=3", *overrides]
    trainer = SimpleNamespace(
        config=configured(settings),
        replay=SimpleNamespace(
            draw=lambda version: drawn.append(version) or [],
            keep=lambda batch, version: kept.append(version),
            figures={},
        ),
        samples=Table,
        rewarded=lambda samples: [],
        unfold=lambda samples, judged: (samples, judged),
        score=lambda rows, log_probs: [],
        learn=lambda *arguments: [],
        groups={"actor": None},
        credited=[],
        figures={},
    )
    for step in range(3):
        trainer.steps = step
        grpo.Trainer.step(trainer)
    assert drawn == kept == [0, a_step, 2 * a_step]


def test_a_student_is_drawn_to_what_its_teacher_finds_likelier():
    mask = torch.tensor([1, 1, 0, 1], dtype=torch.uint8)
    teacher, student = torch.tensor([-1.0, -2.0, 5.0, -3.0]), torch.tensor([-2.0, -2.0, 0.0, -5.0])
    columns = {"ref_log_probs": teacher, "rollout_log_probs": student, "response_mask": mask}
    found = teacher_advantages(Batch.from_columns({name: [x] for name, x in columns.items()}))
    # Gains of 1, 0 and 2, less their mean, over their standard deviation of 1.
    assert found["advantages"].values.tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0], abs=1e-6)


MIXED = {"data.sources": "{one: {task: calculator, weight: 2}, two: {task: calculator}}"}


@cache
def config_of(*overrides):
    return configured([*overrides, "data.prompts_per_step=2"])


def feed_of(rows, examples=None, kind="prompts", **settings):
    config = config_of(*(f"{name}={value}" for name, value in settings.items()))
    beside = SimpleNamespace(doing=lambda kind: contextlib.nullcontext())
    return DataFeed(config, kind, rows, examples, None, lambda batch: batch, beside)


def test_examples_weigh_as_much_as_their_coefficient():
    lengths = [3, 1, 4]
    mask = [torch.ones(n, dtype=torch.uint8) for n in lengths]
    rows = Batch.from_columns({"prompt_ids": mask, "response_mask": mask})
    feed = feed_of(rows, examples=rows)
    found = feed.next_examples(0.25)
    weights = found.ragged("loss_weights").values.tolist()
    assert weights == pytest.approx([0.25 / len(weights)] * len(weights))
    whole = feed.next_examples(1.0).ragged("loss_weights").values
    assert float(whole.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"data.shuffle": "false"}, {"data.order": "prefix"}, MIXED],
    ids=["shuffled", "in order", "by prefixes", "mixed"],
)
@pytest.mark.parametrize("number", few_of([1, 2, 7], [7]))
def test_what_is_prefetched_is_what_would_have_come(settings, number):
    sources = [["one", "two"][row % 2] for row in range(number)]
    if settings == MIXED and len(set(sources)) < 2:
        return
    ids = torch.arange(number)[:, None]
    rows = Batch.from_columns({"prompt_ids": ids, "source": sources})
    plain, ahead = feed_of(rows, **settings), feed_of(rows, **settings)
    for step in range(9):  # over the ends of epochs
        wanted, found = plain.next_batch(), ahead.next_batch()
        assert found.table.equals(wanted.table) and ahead.numbered == plain.numbered
        kept = ahead.state()
        state = json.loads(json.dumps(kept))
        ahead.prefetch()
        ahead.prefetch()  # no second one
        assert ahead.state() == state == plain.state()  # it does not count as dealt
        assert kept == state  # nor does a checkpoint that is being written change
        assert ahead.numbered == 2 * (step + 1)
        resumed = feed_of(rows, **settings)
        resumed.load_state(state)
        assert resumed.next_batch().table.equals(feed_after(plain, settings, rows).table)


def dealt(feed):
    return feed.next_batch()["group_id"].tolist(), feed._deals[-1][1].tolist()


@pytest.mark.parametrize("settings", [{}, MIXED, {"data.sampler": "pass_rate"}])
def test_held_prompts_are_dealt_first_and_once_where_nothing_holds_them_any_more(settings):
    sources = [["one", "two"][row % 2] for row in range(40)]
    rows = Batch.from_columns({"prompt_ids": torch.arange(40)[:, None], "source": sources})
    partial = settings | {"rollout.partial": 0.5}
    before = feed_of(rows, **partial)
    of_group = {}
    for held in ({0, 1}, {0, 1, 3}, {1, 3, 5}):
        of_group.update(zip(*dealt(before), strict=True))
        before.hold(held)
        before.forget_groups(before.numbered)
    if before._learns:
        before._held.discard(0)  # its scores came
    wanted = [of_group[group] for group in (1, 3, 5)]
    state = json.loads(json.dumps(before.state()))
    assert list(state["held"].values()) == wanted
    plain, resumed = feed_of(rows, **settings), feed_of(rows, **settings)
    resumed.load_state(state)
    assert len(resumed.returned) == 3
    resumed.prefetch()
    assert dealt(resumed) == ([6, 7], wanted[:2]) and len(resumed.returned) == 1
    resumed.prefetch()  # it does not count as dealt
    state = json.loads(json.dumps(resumed.state()))
    assert state["returned"] == wanted[2:] and "held" not in state
    plain.deck.load_state(state)
    again = feed_of(rows, **partial)
    again.load_state(state)
    for feed in (resumed, again):
        groups, found = dealt(feed)
        assert groups == [8, 9] and found[0] == wanted[2] and not feed.returned
        if "data.sampler" not in settings and feed is resumed:
            assert found[1] == plain.deck.deal(1)[0]
        assert "returned" not in feed.state()


def test_a_held_prompt_that_is_left_out_is_not_dealt_again():
    rows = Batch.from_columns({"prompt_ids": torch.arange(9)[:, None]})
    before = feed_of(rows, **{"rollout.partial": 0.5})
    groups, of_groups = dealt(before)
    before.hold(set(groups))
    state = before.state()
    feed = feed_of(rows)
    feed.load_state(state)
    assert dealt(feed) == ([2, 3], of_groups)
    assert feed.leave_out([2]) == 1
    feed.load_state(state)
    assert len(feed.returned) == 1 and dealt(feed)[1][0] == of_groups[1]


def feed_after(feed, settings, rows):
    """The next batch of a feed, which stays as it is."""
    copy = feed_of(rows, **settings)
    copy.load_state(feed.state())
    return copy.next_batch()


def test_rows_that_are_left_out_leave_a_prefetched_batch_too():
    rows = Batch.from_columns({"prompt_ids": torch.arange(4)[:, None]})
    feed = feed_of(rows, **{"data.shuffle": "false"})
    feed.next_batch(), feed.next_batch()
    feed.prefetch()  # rows 0 and 1 again
    assert feed.leave_out([0]) == 1
    assert [row.tolist() for row in feed.next_batch()["prompt_ids"].rows()] == [[1]]


def test_nothing_is_prefetched_that_outcomes_decide_or_nobody_wants():
    rows = Batch.from_columns({"prompt_ids": torch.arange(4)[:, None]})
    feed = feed_of(rows)
    feed.prefetch()
    assert feed._ahead is None  # no batch was asked for
    learns = feed_of(rows, **{"data.sampler": "pass_rate"})
    learns.next_batch()
    learns.prefetch()
    assert learns._ahead is None


@pytest.mark.parametrize("is_busy", [True, False])
def test_the_next_batch_is_prefetched_while_workers_are_busy(is_busy):
    done = []
    job = SimpleNamespace(
        feed=SimpleNamespace(numbered=0, prefetch=lambda: done.append("prefetch")),
        executor=SimpleNamespace(is_busy=is_busy, end_step=lambda: done.append("end")),
    )
    result = StepResult(BatchRef(None, None), [])
    trainer = SimpleNamespace(step=lambda: done.append("step") or result)
    runner = SimpleNamespace(job=job, trainer=trainer)
    StepRunner.begin(runner, 1)
    assert done == ["step", *(["prefetch"] if is_busy else []), "end"]


def test_pairs_are_prefetched_as_samples():
    columns = ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")
    rows = Batch.from_columns({name: torch.ones(4, 2, dtype=torch.uint8) for name in columns})
    rows = rows.with_columns({"prompt_ids": torch.arange(4)[:, None]})
    plain, ahead = (feed_of(rows, kind="pairs") for _ in range(2))
    for step in range(3):
        assert ahead.next_batch().table.equals(plain.next_batch().table)
        ahead.prefetch()
        assert ahead.numbered == 2 * (step + 1)  # pairs, not samples


def test_a_prefetch_without_rows_waits_until_they_are_wanted():
    rows = Batch.from_columns({"prompt_ids": torch.arange(2)[:, None]})
    feed = feed_of(rows)
    feed.next_batch()
    feed.leave_out([0, 1])
    state = feed.state()
    feed.prefetch()
    assert feed.state() == state
    with pytest.raises(DataError, match="are left out"):
        feed.next_batch()


def test_groups_are_numbered_on_after_a_resume():
    rows = Batch.from_columns({"prompt_ids": torch.arange(8)[:, None]})
    first, second = feed_of(rows), feed_of(rows)
    before = [*first.next_batch()["group_id"].tolist(), *first.next_batch()["group_id"].tolist()]
    second.load_state(first.state())
    assert before == [0, 1, 2, 3] and second.numbered == 4
    batch = second.next_batch()
    assert batch["group_id"].tolist() == [4, 5]
    # A step of before the resume that turns out bad leaves out none of the rows dealt since.
    assert second.leave_out(before) == 0 and second.leave_out([5]) == 1
    dealt = np.concatenate([second.next_batch()["prompt_ids"].values.numpy() for _ in range(20)])
    assert int(batch["prompt_ids"].rows()[1]) not in dealt
