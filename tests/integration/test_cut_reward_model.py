"""Real gloo: a reward model that is cut over ranks scores as in one process, and what stands beside
it is asked once for each sample."""

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForSequenceClassification, LlamaConfig

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import (
    ActorConfig,
    JudgeConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)
from hybridrl.controller.worker import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.workers.llm_judge import JudgeSetup
from hybridrl.workers.reward_worker import RewardWorker
from hybridrl.workers.training_engines import ModelSource

pytestmark = pytest.mark.more

ROWS = 8
COUNTS = (8, 3, 1, 0)
CUTS = {
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "ring2": ParallelConfig(ring=2),
    "dp2": ParallelConfig(),
}
FUNCTION = """
import pathlib

def score(prompt, response, answer, **row):
    with (pathlib.Path(__file__).parent / "asked.txt").open("a") as file:
        file.write(prompt + "\\n")
    return float(len(response))
"""


def make_models(folder):
    """A reward model, a judge that writes nonsense, and a function that notes what it is asked."""
    config = LlamaConfig(
        vocab_size=49,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=0,
        num_labels=1,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    shape = {"hidden_size": 16, "layers": 1, "heads": 2, "context": 256}
    make_tiny_model(folder / "judge", build_character_tokenizer(), seed=0, **shape)
    (folder / "grade.py").write_text(FUNCTION)
    (folder / "template.txt").write_text("{prompt}{response}")
    return folder


def make_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [4, 1, 9, 3, 2, 7, 5, 6]
    ids = [torch.randint(3, 49, (n,), generator=generator) for n in lengths]
    return Batch.from_columns(
        {
            "prompt": [f"prompt {row}" for row in range(ROWS)],
            "answer": ["1"] * ROWS,
            "prompt_ids": [torch.tensor([5, 6, 7])] * ROWS,
            "response_ids": ids,
        }
    )


def make_worker(rank, world, folder, parallel):
    source = ModelSource(str(folder / "reward"), str(folder / "judge"), "float32", 64, (1,))
    judge = ModelSource(str(folder / "judge"), str(folder / "judge"), "float32", 256, (1,))
    config = RewardConfig(
        function=f"{folder}/grade.py:score",
        judge=JudgeConfig(
            path=str(folder / "judge"),
            template=str(folder / "template.txt"),
            pattern="()",
            max_tokens=4,
        ),
        on_error="value",
        error_value=0.25,
    )
    return RewardWorker(
        WorkerContext("actor", rank, world),
        config=config,
        tokenizer=str(folder / "judge"),
        model=source,
        model_config=ActorConfig(parallel=parallel, tokens_per_microbatch=40),
        judge=JudgeSetup(judge, RolloutConfig(engine="transformers"), "test"),
        kind="reward",
    )


def score(rank, world, folder, parallel):
    """The part of each table that the protocol gives this rank, and whether it answers."""
    worker = make_worker(rank, world, folder, parallel)
    protocol = RewardWorker.compute_reward.__transfer__.protocol
    mesh = build_training_mesh(world, parallel)
    assert dict(worker.coordinates()) == mesh.coordinates(rank)
    speaks = protocol.speaks(rank, [mesh.coordinates(other) for other in range(world)])
    part, parts = protocol.part(worker.coordinates())
    found = {}
    for count in COUNTS:
        start, stop = count * part // parts, count * (part + 1) // parts
        worker.record.metrics.clear()
        worker.enter()
        batch = worker.compute_reward(make_batch().slice(start, stop))
        assert len(batch) == stop - start
        found[count] = {
            "speaks": speaks,
            "scores": batch.to_pylist() if speaks else None,
            "metrics": dict(worker.record.metrics),
        }
    worker.close()
    return found


def program(rank, folder):
    return {name: score(rank, 2, folder, parallel) for name, parallel in CUTS.items()}


def alone(rank, folder):
    return score(rank, 1, folder, ParallelConfig())


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (expected,) = run_ranks(alone, tmp_path_factory.mktemp("one"), 1, folder)
    asked = len((folder / "asked.txt").read_text().splitlines())
    ranks = run_ranks(program, tmp_path_factory.mktemp("two"), 2, folder)
    total = len((folder / "asked.txt").read_text().splitlines())
    return expected, ranks, asked, total - asked


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cut", CUTS)
def test_scores_are_those_of_one_process(scored, cut, count):
    expected, ranks, _, _ = scored
    found = [rank[cut][count] for rank in ranks]
    assert sum(rank["speaks"] for rank in found) == (2 if cut == "dp2" else 1)
    rows = [row for rank in found if rank["speaks"] for row in rank["scores"]]
    wanted = expected[count]["scores"]
    assert len(rows) == count
    for mine, theirs in zip(rows, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("scores", "reward/model", "reward/score", "reward/judge"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cut", CUTS)
def test_every_sample_is_counted_once(scored, cut, count):
    expected, ranks, _, _ = scored
    assert sum(rank[cut][count]["metrics"].get("reward_count", 0) for rank in ranks) == count
    for name, value in expected[count]["metrics"].items():
        total = sum(rank[cut][count]["metrics"].get(name, 0) for rank in ranks)
        assert total == pytest.approx(value, rel=1e-4), name


def test_functions_are_asked_once_for_each_sample(scored):
    _, _, asked, of_all_cuts = scored
    assert asked == sum(COUNTS)
    assert of_all_cuts == len(CUTS) * asked
