"""Reward models for annotators who differ: `algorithm=meta_reward_model` against one reward model
for all, and against that model fine-tuned on the pairs of each.

    python benchmarks/meta_reward_models.py [--seeds 0 1 2] [--steps 150] [--only rates]

Made up are annotators who like a response by its length, its share of low digits, its number of
sevens and its first digit, each with weights of its own around common ones. Both models learn from
20 pairs of each of 200 annotators in equally many steps of equally many pairs, from the same
random model. Then come annotators that neither has seen: accuracy is that on 20 further pairs of
each, after five pairs that the meta model adapts to. Fine-tuning takes the best of several rates
and numbers of steps, for all weights and for the head alone, by what it reaches on those further
pairs, which flatters it. Then the bytes that an outer step sends are counted, and rows read from a
file that is not in memory: task by task, as they are stored, and one by one in any order.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import SMOKE, report
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hybridrl.algorithms.meta_learning import InnerLoop
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.stored_rows import StoredRows, store_rows
from hybridrl.data.task_blocks import (
    TaskSchedule,
    number_task,
)
from hybridrl.job.config_resolution import load_config
from hybridrl.job.reward_adaptation import compute_differences
from hybridrl.main import run
from hybridrl.models.model_loading import load_tokenizer, make_tiny_model
from hybridrl.parallel.sharded_table import ShardedTable

DIGITS = "0123456789"
ANNOTATORS, PAIRS, NEW, SUPPORT, QUERY = 200, 20, 60, 5, 20
SIDES = ("chosen_ids", "rejected_ids")
COMMON, SPREAD = np.array([0.4, 0.4, 0.0, 0.0]), 1.0
"""Weights of the four qualities that all annotators share, and how far each is from them."""
PER_STEP = 400
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 32}
TUNING = (
    *product([False], (3e-4, 1e-3, 3e-3), (3, 10)),
    *product([True], (3e-3, 1e-2, 3e-2), (3, 10)),
)
"""Of fine-tuning: the head alone, learning rates, steps."""
SHARED = ("executor=inline", "data=jsonl", "observe.samples_every=0", "observe.show_every=0")
SHARED += (f"data.prompts_per_step={PER_STEP}", "eval.every=0", "eval.prompts=40")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--only", choices=("accuracy", "bytes", "rates"))
    options = parser.parse_args()
    if options.only in (None, "accuracy"):
        compare_accuracy(options.seeds, options.steps, options.rate)
    if options.only in (None, "bytes"):
        count_bytes()
    if options.only in (None, "rates"):
        compare_reading()


def compare_accuracy(seeds: list[int], steps: int, rate: float) -> None:
    """Report the accuracy on new annotators, mean of seeds."""
    found: list[dict[str, float]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            found.append(train_and_measure(Path(name), seed, steps, rate))
        print("#", json.dumps({"seed": seed, **found[-1]}), flush=True)
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    for arm in ("shared", "fine-tuned"):
        figure = mean["adapted"] - mean[arm]
        name = f"accuracy on new annotators after {SUPPORT} pairs, above the {arm} model"
        print(
            "#", json.dumps({"name": name, "gain": figure, "goal": ">= 0.05", **mean}), flush=True
        )
        report(name, mean["adapted"], mean[arm], "report", "accuracy")


def train_and_measure(folder: Path, seed: int, steps: int, rate: float) -> dict[str, float]:
    """Train both models on one draw of annotators and return their accuracies."""
    model, data = folder / "model", folder / "pairs.jsonl"
    make_tiny_model(model, build_character_tokenizer(DIGITS + "+="), seed=seed, **SHAPE)
    random = np.random.default_rng(seed)
    rows = [row for n in range(ANNOTATORS) for row in make_annotator(random, f"a{n}", PAIRS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = [make_annotator(random, f"new{n}", SUPPORT + QUERY) for n in range(NEW)]
    models: dict[str, Any] = {}
    for algorithm in ("meta_reward_model", "reward_model"):
        directory = folder / algorithm
        overrides = (f"data.path={data}", f"model.path={model}", f"run.directory={directory}")
        overrides += (f"trainer.steps={steps}", f"actor.optimizer.learning_rate={rate}")
        run(load_config([f"algorithm={algorithm}", *SHARED, *overrides, f"run.seed={seed}"]))
        load = AutoModelForSequenceClassification.from_pretrained
        models[algorithm] = load(directory / "model", dtype=torch.float32)
    tokenizer = load_tokenizer(str(model))
    pairs = [read_pairs(folder / f"{n}.jsonl", one, tokenizer) for n, one in enumerate(new)]
    adapted, start = zip(*(adapt(models["meta_reward_model"], one) for one in pairs), strict=True)
    shared = [compute_differences(models["reward_model"], one)[SUPPORT:, 0] for one in pairs]
    tuned = [[tune(models["reward_model"], one, *how) for one in pairs] for how in TUNING]
    best = max(statistics.mean(map(accuracy, one)) for one in tuned)
    means = {"adapted": adapted, "shared": shared, "start of all": start}
    return {n: statistics.mean(map(accuracy, one)) for n, one in means.items()} | {
        "fine-tuned": best
    }


def make_annotator(random: np.random.Generator, name: str, number: int) -> list[dict[str, str]]:
    """Make pairs of an annotator with weights of their own."""
    weights, rows = COMMON + SPREAD * random.standard_normal(4), []
    while len(rows) < number:
        texts = ["".join(random.choice(list(DIGITS), random.integers(1, 9))) for _ in range(2)]
        liked = [float(describe(text) @ weights) for text in texts]
        if liked[0] != liked[1]:
            worse, better = np.argsort(liked)
            pair = {"chosen": texts[better], "rejected": texts[worse]}
            rows.append({"prompt": "1+1=", **pair, "annotator": name})
    return rows


def describe(text: str) -> np.ndarray:
    """Return the qualities of a response, each with a variance of about 1."""
    low = sum(digit in "01234" for digit in text) / len(text)
    return np.array(
        [
            (len(text) - 4.5) / 2.3,
            (low - 0.5) / 0.28,
            text.count("7") / 0.65,
            (int(text[0]) - 4.5) / 2.9,
        ]
    )


def read_pairs(file: Path, rows: list[dict[str, str]], tokenizer: Any) -> Batch:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(file))
    return load_rows("pairs", config, tokenizer, held_out=0, seed=0).training


def adapt(model: Any, pairs: Batch) -> tuple[Tensor, Tensor]:
    """Return the margins of query pairs after adapting to the support pairs, and before."""
    differences = compute_differences(model, pairs)
    inner = InnerLoop(3, 1.0)
    support = torch.zeros(SUPPORT, dtype=torch.int64)
    start = torch.zeros(1, differences.shape[1])
    weights = inner.adapt(start, differences[:SUPPORT], support).detach()
    return differences[SUPPORT:] @ weights[0], differences[SUPPORT:, 0]


def tune(model: Any, pairs: Batch, head_only: bool, rate: float, steps: int) -> Tensor:
    """Return the margins of query pairs after fine-tuning on the support pairs."""
    model, rows = copy.deepcopy(model).eval(), pairs.to_pylist()
    parameters = [model.score.weight] if head_only else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    for _ in range(steps):
        chosen, rejected = (hidden(model, rows[:SUPPORT], side) for side in SIDES)
        F.softplus(-model.score(chosen - rejected)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        chosen, rejected = (hidden(model, rows[SUPPORT:], side) for side in SIDES)
        return model.score(chosen - rejected)[:, 0]  # type: ignore[no-any-return]


def hidden(model: Any, rows: list[dict[str, Any]], side: str) -> Tensor:
    """Return the states at the last tokens of rows, which what pads them after these leaves as they
    are."""
    ids = [torch.tensor(row["prompt_ids"] + row[side]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    found: Tensor = model.model(input_ids=padded).last_hidden_state
    return found[torch.arange(len(ids)), torch.tensor([len(one) - 1 for one in ids])]


def accuracy(margins: Tensor) -> float:
    return float((margins > 0).float().mean() + 0.5 * (margins == 0).float().mean())


def count_bytes(ranks: int = 4, tasks: int = 256, hidden: int = 1024, features: int = 8) -> None:
    """Report the bytes of an outer step, all ranks together: the table's all-to-alls and the ring
    all-reduce of the head's gradient, against gathering each task's adapted head in one place,
    which sends the new head back. What the rest of the model sends is the same for both."""
    with tempfile.TemporaryDirectory() as name:
        arguments = (ranks, tasks, features, f"{name}/store", f"{name}/sent")
        torch.multiprocessing.spawn(exchange_rows, arguments, nprocs=ranks)
        of_table = sum(int(Path(f"{name}/sent{rank}").read_text()) for rank in range(ranks))
    head = 4 * features * hidden
    ours = of_table + 2 * (ranks - 1) * head
    gathered = tasks * (ranks - 1) / ranks * 4 * hidden + (ranks - 1) * head
    print("#", json.dumps({"table": of_table, "head": 2 * (ranks - 1) * head}))
    name = f"bytes of an outer step of {tasks} tasks on {ranks} ranks"
    report(name, ours, gathered, "<= 1", "bytes")


def exchange_rows(rank: int, ranks: int, tasks: int, features: int, store: str, sent: str) -> None:
    """Fetch and update the rows of this rank's share of a step's tasks."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    table = ShardedTable(features, 0.1, torch.distributed.group.WORLD, torch.device("cpu"))
    numbers = torch.tensor([number_task(f"{n}") for n in range(rank, tasks, ranks)])
    to_others, exchange = [], table._exchange

    def count(values: torch.Tensor, to: list[int], received: list[int]) -> torch.Tensor:
        to_others.append((sum(to) - to[rank]) * values[:1].nbytes)
        return exchange(values, to, received)

    table._exchange = count
    table.fetch(numbers)
    table.update(numbers, torch.ones(len(numbers), features))
    Path(f"{sent}{rank}").write_text(str(sum(to_others)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def compare_reading(tasks: int = 10000 if not SMOKE else 40, tokens: int = 200) -> None:
    """Report the rows per second of steps of whole tasks and of steps of single rows, each from a
    file that is not in memory, of which both read a part."""
    bounds = torch.arange(tasks * PAIRS + 1) * tokens
    side = RaggedColumn(torch.arange(int(bounds[-1])), bounds)
    numbers = np.arange(tasks * PAIRS) // PAIRS
    columns = {"prompt_ids": side, "chosen_ids": side, "rejected_ids": side, "task": numbers}
    schedule = TaskSchedule(numbers, PAIRS, seed=0)
    order = np.random.default_rng(0).permutation(tasks * PAIRS)
    steps = {"row by row": np.array_split(order[: 10 * PER_STEP], 10)}
    steps["task by task"] = [schedule.deal(PER_STEP) for _ in range(10)]
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        store_rows(Batch.from_columns(columns), np.arange(tasks * PAIRS), file)  # type: ignore[arg-type]
        print("#", json.dumps({"file MiB": Path(file.name).stat().st_size >> 20}))
        rates: dict[str, list[float]] = {}
        for _, (name, dealt) in product(range(3), steps.items()):
            drop_from_memory(file.fileno())
            stored = StoredRows(file)  # type: ignore[arg-type]
            begin = time.perf_counter()
            count = sum(len(read_whole(stored.take(rows))) for rows in dealt)
            rates.setdefault(name, []).append(count / (time.perf_counter() - begin))
            del stored
    print("#", json.dumps(rates))
    medians = {name: statistics.median(one) for name, one in rates.items()}
    by_task, by_row = medians["task by task"], medians["row by row"]
    report("reading cold rows task by task", by_task, by_row, ">= 3", "rows/s")


def read_whole(batch: Batch) -> Batch:
    for name in batch.columns:
        batch.array(name)
    return batch


def drop_from_memory(file: int) -> None:
    """Write what is pending, and let the system forget the file's pages."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
