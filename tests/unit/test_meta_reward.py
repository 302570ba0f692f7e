"""Reward models that adapt to tasks: a step against plain torch, the table on ranks, how pairs are
read, dealt and split, and what is refused."""

import numpy as np
import pytest
import torch
from test_two_ranks import on_ranks
from tiers import few_of
from transformers import AutoModelForSequenceClassification

from hybridrl.batch.batch import Batch
from hybridrl.config.preference_schema import MetaConfig
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.controller import WorkerContext
from hybridrl.controller.row_selections import PartitionSelection
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.stored_rows import StoredRows
from hybridrl.data.task_blocks import (
    TaskSchedule,
    index_tasks,
    number_task,
    sort_by_task,
    split_tasks,
)
from hybridrl.errors import ConfigError, DataError
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.parallel.sharded_table import ShardedTable
from hybridrl.workers.meta_reward_worker import MetaRewardWorker, load_task_table
from hybridrl.workers.training_engines import ModelSource

RATE, TASK_RATE, STEPS, INNER_RATE = 1e-3, 0.02, 3, 0.7
# By task: which of its pairs are query pairs. One has no query pair, one no support pair, and two
# a single pair.
SPLITS = {11: [0, 0, 1, 0, 1], 4: [0], 7: [1, 1], 25: [0, 1], 8: [1], 9: [0, 0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = build_character_tokenizer("0123456789+=")
    shape = {"hidden_size": 16, "layers": 2, "heads": 2, "context": 64}
    return make_tiny_model(tmp_path_factory.mktemp("model"), tokenizer, seed=3, **shape)


def build_worker(folder, **settings):
    optimizer = OptimizerConfig(
        learning_rate=RATE, max_grad_norm=0.5, warmup_steps=0, schedule="constant"
    )
    config = ActorConfig(optimizer=optimizer, tokens_per_microbatch=40)
    source = ModelSource(str(folder), str(folder), "float32", 64, (1,))
    meta = MetaConfig(
        features=3, inner_steps=STEPS, inner_rate=INNER_RATE, task_rate=TASK_RATE, **settings
    )
    return MetaRewardWorker(WorkerContext("reward_model", 0, 1), source, config, meta, updates=9)


def make_rows(new=(7,)):
    random, columns = torch.Generator().manual_seed(5), {}
    weight = {t: 1 / (sum(s) * 4) if sum(s) else 0.0 for t, s in SPLITS.items()}
    for block, (task, split) in enumerate(SPLITS.items()):
        for is_query in split:
            for _ in range(2):  # chosen and rejected
                lengths = torch.randint(1, 9, (2,), generator=random).tolist()
                tokens = [torch.randint(3, 12, (n,), generator=random) for n in lengths]
                row = dict(zip(("prompt_ids", "response_ids"), tokens, strict=True))
                row |= {"pair_task": task, "task_block": block, "is_query": is_query}
                row |= {"is_new": int(task in new), "query_weights": weight[task] * is_query}
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
    numbers = {n: torch.tensor(columns[n]) for n in columns if not n.endswith("_ids")}
    return Batch.from_columns(columns | numbers)


def plain_step(model, batch, tables, second_order, new=(7,)):
    """The loss, and the gradients of the model and of where tasks begin."""
    ids = [torch.tensor(r["prompt_ids"] + r["response_ids"]) for r in batch.to_pylist()]
    hidden = torch.stack([model.model(row[None]).last_hidden_state[0, -1] for row in ids])
    features = hidden @ model.score.weight.T
    differences, tasks = features[::2] - features[1::2], batch["pair_task"][::2]
    loss, begins = 0.0, {}
    for task, split in SPLITS.items():
        row = tables.get(task, torch.zeros(3)) if task not in new else torch.zeros(3)
        begins[task] = row.detach().clone().requires_grad_()
        w, pairs, query = (
            begins[task] + torch.eye(3)[0],
            differences[tasks == task],
            np.array(split),
        )
        for _ in range(STEPS if not query.all() else 0):
            inner = -torch.nn.functional.logsigmoid(pairs[query == 0] @ w).mean()
            w = (
                w
                - INNER_RATE
                * torch.autograd.grad(inner, w, create_graph=second_order, retain_graph=True)[0]
            )
        if query.any():
            loss = loss - torch.nn.functional.logsigmoid(pairs[query == 1] @ w).mean() / 4
    model.zero_grad()
    loss.backward()
    return loss, {t: b.grad for t, b in begins.items() if t not in new and b.grad is not None}


@pytest.mark.parametrize(
    "second_order", few_of([True, False], [True]), ids=["second order", "first order"]
)
def test_steps_are_those_of_plain_torch(folder, tmp_path, second_order):
    worker, batch = build_worker(folder, second_order=second_order), make_rows()
    worker.save_model(str(tmp_path / "begin"))
    load = AutoModelForSequenceClassification.from_pretrained
    model = load(tmp_path / "begin", dtype=torch.float32)
    rows = {task: torch.zeros(3, requires_grad=True) for task in SPLITS}
    adams = {task: torch.optim.Adam([row], TASK_RATE) for task, row in rows.items()}
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0)
    for _ in range(3):
        metrics = worker.update_tasks(batch | worker.compute_features(batch))
        loss, gradients = plain_step(model, batch, rows, second_order)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        for task, gradient in gradients.items():
            rows[task].grad = gradient
            adams[task].step()
    worker.save_model(str(tmp_path / "end"))
    found = load(tmp_path / "end", dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    fetched = worker._table.fetch(torch.tensor(list(SPLITS)))
    torch.testing.assert_close(fetched, torch.stack(list(rows.values())), atol=1e-5, rtol=1e-5)
    assert metrics["tasks"] == len(SPLITS) and fetched[0].abs().max() > 0.01
    assert not fetched[2].any(), "a new task leaves its row as it is"


def test_a_new_task_begins_at_the_shared_start_whatever_its_row_is(folder, tmp_path):
    """Also where earlier steps knew it, whose row stays as they left it."""
    worker, numbers = build_worker(folder), torch.tensor(list(SPLITS))
    known, new = make_rows(new=()), make_rows(new=(7,))
    worker.update_tasks(known | worker.compute_features(known))
    tables = dict(zip(SPLITS, worker._table.fetch(numbers), strict=True))
    assert tables[7].abs().max() > 0.01
    worker.save_model(str(tmp_path))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    loss, _ = plain_step(model, new, tables, second_order=True)
    metrics = worker.update_tasks(new | worker.compute_features(new))
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert torch.equal(worker._table.fetch(torch.tensor([7]))[0], tables[7])


def test_a_rank_without_rows_changes_nothing(folder):
    worker = build_worker(folder)
    batch = make_rows().take([])
    metrics = worker.update_tasks(batch | worker.compute_features(batch))
    assert metrics["loss"] == metrics["grad_norm"] == 0.0


def test_the_table_of_two_ranks_is_that_of_one(tmp_path):
    """Rows that both ranks ask for, and that only one does; numbers twice on a rank."""
    asked = [torch.tensor([4, 9, 4, 2**62 + 1]), torch.tensor([9, 7])]
    random = torch.Generator().manual_seed(0)
    sent = [torch.randn(len(numbers), 2, generator=random) for numbers in asked]
    numbers, gradients = torch.cat(asked), torch.cat(sent)
    expected = torch.zeros(len(numbers), 2, requires_grad=True)
    expected.grad = torch.stack([gradients[numbers == n].sum(0) for n in numbers])
    adam = torch.optim.Adam([expected], 0.1)
    for _ in range(3):
        adam.step()
    one = ShardedTable(2, 0.1, None, torch.device("cpu"))
    for _ in range(3):
        one.update(numbers, gradients)
    torch.testing.assert_close(one.fetch(numbers), expected := expected.detach())

    def program(rank):
        table = ShardedTable(2, 0.1, torch.distributed.group.WORLD, torch.device("cpu"))
        to_others, exchange = [], table._exchange

        def count(values, to, received):
            to_others.append((sum(to) - to[rank]) * values[:1].nbytes)
            return exchange(values, to, received)

        table._exchange = count
        for _ in range(3):
            table.update(asked[rank], sent[rank])
        return table.fetch(asked[rank]), table.export(), sum(to_others)

    (first, *_), (second, *_) = found = on_ranks(program)
    torch.testing.assert_close(torch.cat([first, second]), expected)
    assert sorted(n for _, part, _ in found for n in part["numbers"].tolist()) == [
        4,
        7,
        9,
        2**62 + 1,
    ]
    alone = ShardedTable(2, 0.1, None, torch.device("cpu"))
    for _, part, _ in found:
        alone.load(**part)
    torch.testing.assert_close(alone.fetch(torch.cat(asked)), expected)
    # Of rank 0: in each update two numbers and two rows that rank 1 holds (9 and 2**62 + 1), in the
    # last fetch the numbers again and rank 1's row of no number of its own.
    assert found[0][2] == 3 * 2 * (8 + 8) + 2 * 8


@pytest.mark.parametrize("sizes", [[3, 1, 5, 2, 1], [4], [1, 9]])
def test_blocks_stay_together_on_ranks(sizes):
    blocks = np.repeat(np.arange(len(sizes)), 2 * np.array(sizes))
    rows = Batch.from_columns(
        {"prompt_ids": list(torch.ones(len(blocks), 3)), "task_block": blocks}
    )
    by = {"balance": "tokens", "together": 2, "group_column": "task_block"}
    parts = [PartitionSelection(n, 2, **by).rows(InlineTable(rows)) for n in (0, 1)]
    assert sorted(np.concatenate(parts)) == list(range(len(blocks)))
    assert not set(blocks[parts[0]]) & set(blocks[parts[1]])


class InlineTable:
    def __init__(self, rows):
        self.num_rows = lambda: len(rows)
        self.tokens = lambda: {"prompt_ids": rows.lengths("prompt_ids")}
        self.read = lambda numbers, names: rows.select(names).take(numbers)


def make_pairs(*names):
    tokens = [torch.tensor([number]) for number in range(len(names))]
    return Batch.from_columns({"prompt_ids": tokens, "pair_task": list(names)})


def test_pairs_are_sorted_by_task_in_the_order_of_the_data():
    found = sort_by_task(make_pairs("b", "a", "b", "c", "a", "c", "b"), drop=False)
    assert found.ragged("prompt_ids").values.tolist() == [0, 2, 6, 1, 4, 3, 5]
    assert found["pair_task"].unique().tolist() == sorted(map(number_task, "abc"))


def test_tasks_with_a_single_pair_are_refused_or_dropped():
    with pytest.raises(DataError, match=r"2 of 3 tasks .* single pair, such as `a`"):
        sort_by_task(make_pairs("b", "a", "b", "c"), drop=False)
    assert len(sort_by_task(make_pairs("b", "a", "b", "c"), drop=True)) == 2
    assert not len(sort_by_task(make_pairs("a", "b"), drop=True))


def test_blocks_of_a_task_are_equal_and_an_epoch_deals_each_once():
    tasks = np.repeat([5, 2, 9], [7, 1, 3])
    assert [tuple(block) for block in index_tasks(tasks, 3)] == [
        *((5, 0, 2), (5, 2, 2), (5, 4, 3), (2, 7, 1), (9, 8, 3))
    ]
    schedule = TaskSchedule(tasks, 3, seed=1)
    dealt = [schedule.deal(4) for _ in range(9)]
    whole, blocks = np.concatenate(dealt), schedule.state()["blocks"]
    assert all(len(rows) >= 4 for rows in dealt)
    assert np.bincount(whole[: blocks // 5 * len(tasks)]).tolist() == [blocks // 5] * len(tasks)
    again = TaskSchedule(tasks, 3, seed=1)
    for _ in dealt[:2]:
        again.deal(4)
    resumed = TaskSchedule(tasks, 3, seed=1)
    resumed.load_state(again.state())
    assert resumed.deal(4).tolist() == dealt[2].tolist()
    with pytest.raises(DataError, match=r"meta\.task_pairs"):
        TaskSchedule(tasks, 4, seed=1).load_state(again.state())


def test_support_and_query_pairs():
    numbers = np.repeat([5, 2, 9, 5], [7, 1, 3, 2])
    pairs = Batch.from_columns({"pair_task": numbers})
    meta = MetaConfig(support_pairs=2, new_share=0.5)
    found = split_tasks(pairs, meta, 0, 3)
    query, weights = found["is_query"].numpy(), found["query_weights"].numpy()
    assert found["task_block"].tolist() == np.repeat(range(4), [7, 1, 3, 2]).tolist()
    assert np.add.reduceat(query, [0, 7, 8, 11]).tolist() == [5, 0, 1, 1]
    assert weights[:7].sum() == pytest.approx(1 / 3) and weights.sum() == pytest.approx(1.0)
    assert (weights > 0).tolist() == query.astype(bool).tolist()
    draws = [split_tasks(pairs, meta, 0, step) for step in range(40)]
    assert found["is_query"].equal(draws[3]["is_query"])
    assert len({tuple(draw["is_query"].tolist()) for draw in draws}) > 20
    assert 0.3 < np.mean([draw["is_new"].numpy() for draw in draws]) < 0.7


def test_large_data_is_sorted_in_a_file(tmp_path, monkeypatch):
    pairs = make_pairs("b", "a", "b", "c", "a", "c", "b")
    expected = sort_by_task(pairs, drop=False)
    monkeypatch.setattr("hybridrl.data.task_blocks.LARGE_BYTES", 0)
    monkeypatch.setattr("hybridrl.data.stored_rows._RECORD_ROWS", 3)
    found = sort_by_task(pairs, False, tmp_path / "tasks")
    assert isinstance(found, StoredRows) and not list((tmp_path / "tasks").iterdir())
    for rows in (range(7), [2, 3, 4, 0, 6, 6], []):
        mine, other = found.take(rows), expected.take(rows)
        assert mine["pair_task"].equal(other["pair_task"])
        assert mine.ragged("prompt_ids").values.equal(other.ragged("prompt_ids").values)


def test_a_table_is_whole_and_replaces_that_of_other_ranks(folder, tmp_path):
    worker = build_worker(folder)
    with pytest.raises(ConfigError, match="has 0 files"):
        load_task_table(tmp_path)
    for part in (1, 2):
        (tmp_path / f"task_table-{part:05d}-of-00002.safetensors").touch()
    worker.save_model(str(tmp_path))
    assert [len(part["numbers"]) for part in load_task_table(tmp_path)] == [0]
    (tmp_path / "task_table-00001-of-00001.safetensors").rename(
        tmp_path / "task_table-00001-of-00003.safetensors"
    )
    with pytest.raises(ConfigError, match="has 1 files"):
        load_task_table(tmp_path)
