"""Real gloo: samples of a model that generates over 1, 2 and 4 stages are those of a whole one."""

import pytest
import torch
from engine_cases import CPU
from ranks import run_ranks
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.rollout.rollout_engine import EngineSetup, SamplingSettings
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.systems.unequal_generation.generation_plan import (
    GenerationPlan,
    GenerationStage,
    make_equal_plan,
)
from hybridrl.systems.unequal_generation.pipeline_engine import PipelineEngine

pytestmark = pytest.mark.more

WORLD, LAYERS, EOS = 4, 5, 1
LOW = (16, 8, 4, 8, 16)
PLANS = {
    "one": make_equal_plan(LAYERS, 1),
    "two": GenerationPlan((GenerationStage(1, (16,) * 3), GenerationStage(0, (16,) * 2)), 3, 2),
    "two, in turns": GenerationPlan(
        (GenerationStage(0, (16,) * 2), GenerationStage(1, (16,) * 3)), 1, 1
    ),
    "four": GenerationPlan(
        tuple(GenerationStage(n, (16,) * (1 + (n == 2))) for n in (2, 0, 3, 1)), 5, 1
    ),
    "one, low": GenerationPlan((GenerationStage(0, LOW),), 2),
    "two, low": GenerationPlan((GenerationStage(1, LOW[:2]), GenerationStage(0, LOW[2:])), 2),
}
SAMPLINGS = {
    "drawn": SamplingSettings(12),
    "greedy": SamplingSettings(9).greedy(),
    "narrow": SamplingSettings(7, temperature=0.7, top_p=0.8, top_k=9),
    "bounded": SamplingSettings(16, min_tokens=6, stop=("4",)),
    "stopped": SamplingSettings(14, stop=("1", "4+")),
    "one token": SamplingSettings(1),
}
ROWS = {"drawn": (0, 1, 2, 11), "one token": (2,)}


def make_folder(folder, tied):
    tokenizer = build_character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # else all logits are about equal
        parameter.data.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def prompts(rows):
    draw = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, 9, (rows,), generator=draw).tolist()
    found = [torch.randint(3, 20, (length,), generator=draw) for length in lengths]
    return Batch.from_columns({"prompt_ids": found}) if rows else empty()


def empty():
    return Batch.from_columns({"prompt_ids": [torch.tensor([3])]}).take([])


def samples(engine, whole=True):
    found = {}
    for name, sampling in SAMPLINGS.items():
        for rows in ROWS.get(name, (11,)) if whole else (2,):
            batch = engine.generate(prompts(rows), sampling, seed=5)
            found[name, rows] = (
                [row.tolist() for row in batch["response_ids"].rows()],
                [row.tolist() for row in batch["rollout_log_probs"].rows()],
                list(batch["finish_reason"]),
            )
    return found


def new_weights(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    draw = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        yield name, parameter.detach() + 0.05 * noise


def options():
    return {"eos_token_ids": [EOS], "device": CPU}


def rank_program(rank, folder, tokenizer):
    torch.set_num_threads(1)
    found = {}
    for tied in (True, False):
        path = str(folder / str(tied))
        for name, plan in PLANS.items():
            engine = PipelineEngine(
                EngineSetup(path, path, "float32", **options()),
                RolloutConfig(max_sequences=8),
                plan,
            )
            before = engine.differences(new_weights(path))
            found[tied, name, "before"] = samples(engine, whole=tied)
            shapes = {n: tuple(t.shape) for n, t in new_weights(path)}
            if tied:
                engine.load(new_weights(path))
            else:  # in boxes, as syncs bring them
                writer = engine.writer()
                for n, whole in new_weights(path):
                    for piece in engine.pieces(shapes)[n]:
                        cut = whole.shape[0] // 3
                        tail = (cut, *[0] * (whole.ndim - 1))
                        writer.write(piece.tensor, tail, whole[cut:])
                        writer.write(piece.tensor, piece.start, whole[:cut])
                writer.finish()
            found[tied, name, "after"] = samples(engine, whole=not tied)
            held = [n for n, pieces in engine.pieces(shapes).items() if pieces]
            left = engine.differences(new_weights(path))
            found[tied, name, "weights"] = held, len(before), left
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        make_folder(folder / str(tied), tied)
    return folder


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    tokenizer = build_character_tokenizer()
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD, folder, tokenizer)


@pytest.fixture(scope="module")
def expected(folder):
    whole = {}
    for tied in (True, False):
        path = str(folder / str(tied))
        engine = TransformersEngine(
            EngineSetup(path, path, "float32", **options()), RolloutConfig(max_sequences=8)
        )
        whole[tied, "before"] = samples(engine, whole=tied)
        engine.load(new_weights(path))
        whole[tied, "after"] = samples(engine, whole=not tied)
    return whole


def assert_same(these, others):
    for key, (tokens, log_probs, reasons) in others.items():
        assert these[key][0] == tokens, key
        assert these[key][2] == reasons, key
        for one, other in zip(these[key][1], log_probs, strict=True):
            assert one == pytest.approx(other, abs=2e-4), key


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name in PLANS if "low" not in name])
def test_stages_say_what_the_whole_says(found, expected, name, tied):
    for of_rank in found:
        for when in ("before", "after"):
            assert_same(of_rank[tied, name, when], expected[tied, when])


def test_cases_are_what_they_are_called(expected):
    for sampling in ("drawn", "stopped", "bounded"):
        reasons = expected[True, "before"][sampling, 11][2]
        assert {"stop", "length"} == set(reasons), sampling
    lengths = [len(row) for row in expected[True, "before"]["bounded", 11][0]]
    assert min(lengths) >= 6


@pytest.mark.parametrize("tied", [True, False])
def test_low_bits_are_the_same_wherever_they_are(found, expected, tied):
    for of_rank in found:
        for when in ("before", "after"):
            assert_same(of_rank[tied, "two, low", when], found[0][tied, "one, low", when])
    log_probs = found[0][tied, "one, low", "after"]["greedy", 2 if tied else 11][1]
    assert log_probs != expected[tied, "after"]["greedy", 2 if tied else 11][1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_each_rank_holds_its_layers_only(found, name, tied):
    stages = PLANS[name].stages
    names = set()
    for rank, of_rank in enumerate(found):
        held, before, after = of_rank[tied, name, "weights"]
        number = [stage.device for stage in stages].index(rank % len(stages))
        first = PLANS[name].first_layer(number)
        layers = {int(one.split(".")[2]) for one in held if ".layers." in one}
        assert layers == set(range(first, first + len(stages[number].bits)))
        ends = {one for one in held if ".layers." not in one}
        assert ("model.embed_tokens.weight" in ends) == (
            number == 0 or (tied and number == len(stages) - 1)
        )
        assert ("model.norm.weight" in ends) == (number == len(stages) - 1)
        assert before == len(held)
        assert after == []
        names |= set(held)
    assert len(names) == LAYERS * 12 + 2 + (not tied)
