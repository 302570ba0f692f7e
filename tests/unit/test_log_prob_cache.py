"""Log-probabilities of a reference from the cache: the same numbers, of fewer forwards, and never
those of another model."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import (
    ActorConfig,
    CacheConfig,
    LoraAdapterConfig,
    ParallelConfig,
    RolloutConfig,
)
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.system import content_cache
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.reference_worker import ReferenceWorker
from hybridrl.workers.training_engines import ModelSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


def write_model(folder, seed):
    tokenizer = build_character_tokenizer("0123456789+=")
    return make_tiny_model(
        folder, tokenizer, seed=seed, hidden_size=16, layers=2, heads=2, context=64
    )


@pytest.fixture
def build(folder, tmp_path):
    def build(model=folder, temperature=1.0, dtype="float32", config=None, use=("log_probs",)):
        source = ModelSource(str(model), str(model), dtype, 64, (1,))
        cache = CacheConfig(use=list(use), folder=str(tmp_path / "cache"))
        worker = ReferenceWorker(
            *(WorkerContext("reference", 0, 1), source, config or ActorConfig()),
            temperature=temperature,
            cache=cache,
        )
        worker.forwards = count_forwards(worker)
        return worker

    return build


def count_forwards(worker):
    """The rows of each forward of a worker's model from now on."""
    seen, forward = [], worker.model_engine.forward

    def counted(batch, **options):
        seen.append(len(batch))
        return forward(batch, **options)

    worker.model_engine.forward = counted
    return seen


def rows(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(3, 12, (length,), generator=generator)

    return Batch.from_columns(
        {
            "prompt_ids": [tokens(3) for _ in lengths],
            "response_ids": [tokens(length) for length in lengths],
        }
    )


def scored(worker, batch):
    return worker.compute_ref_log_prob(batch).ragged("ref_log_probs").values


BATCH = rows(4, 7, 1, 5)


def test_a_second_run_computes_nothing_and_has_the_same_bits(build):
    plain, first, second = build(use=()), build(), build()
    expected = scored(plain, BATCH)
    assert torch.equal(scored(first, BATCH), expected)
    assert torch.equal(scored(second, BATCH), expected)
    assert (plain.forwards, first.forwards, second.forwards) == ([4], [4], [])
    assert second.record.metrics == {"cache_log_probs_asked": 4, "cache_log_probs_hits": 4}


def test_only_what_is_missing_is_computed_in_any_order(build):
    worker = build()
    expected = scored(build(use=()), BATCH)
    scored(worker, BATCH.take([2, 0]))
    found = scored(worker, BATCH)
    assert worker.forwards == [2, 2]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    parts = worker.compute_ref_log_prob(BATCH.take([3, 0, 3])).ragged("ref_log_probs").rows()
    assert worker.forwards == [2, 2] and [len(part) for part in parts] == [5, 4, 5]
    torch.testing.assert_close(parts[1], expected[:4], atol=1e-6, rtol=0)


@pytest.mark.parametrize("lengths", [(), (3,), (0, 2), (0,)])
def test_odd_sizes(build, lengths):
    batch = rows(*lengths)
    expected = scored(build(use=()), batch)
    for _ in range(2):
        worker = build()
        assert torch.equal(scored(worker, batch), expected)
    assert worker.forwards == []


def test_a_prompt_and_its_response_are_told_apart(build):
    worker = build()
    ids = torch.tensor([3, 4, 5, 6])
    scored(worker, Batch.from_columns({"prompt_ids": [ids[:2]], "response_ids": [ids[2:]]}))
    scored(worker, Batch.from_columns({"prompt_ids": [ids[:1]], "response_ids": [ids[1:]]}))
    assert worker.forwards == [1, 1]


def with_another_weight(folder, target):
    write_model(target, seed=0)
    weights = load_file(target / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1e-3
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def with_another_setting(folder, target):
    write_model(target, seed=0)
    said = (target / "config.json").read_text()
    changed = said.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    assert changed != said
    (target / "config.json").write_text(changed)
    return target


STALE = {
    "other weights": lambda folder, target: {"model": write_model(target, seed=1)},
    "one other weight": lambda folder, target: {"model": with_another_weight(folder, target)},
    "other configuration": lambda folder, target: {"model": with_another_setting(folder, target)},
    "other dtype": lambda *_: {"dtype": "bfloat16"},
    "other temperature": lambda *_: {"temperature": 0.7},
}


@pytest.mark.parametrize("what", STALE)
def test_what_the_numbers_depend_on_is_in_the_key(build, folder, tmp_path, what):
    options = STALE[what](folder, tmp_path / "other")
    expected = scored(build(use=(), **options), BATCH)
    scored(build(), BATCH)
    worker = build(**options)
    assert torch.equal(scored(worker, BATCH), expected)
    assert worker.forwards == [4]
    again = build()
    scored(again, BATCH)
    assert again.forwards == []


@pytest.mark.parametrize("other", [{"compile": "true"}, {"parallel": ParallelConfig(tp=2)}])
def test_how_it_is_computed_is_in_the_key(build, other):
    scored(build(), BATCH)
    worker = build()
    worker.model_engine.config = replace(worker.model_engine.config, **other)
    scored(worker, BATCH)
    assert worker.forwards == [4]


def test_the_same_model_elsewhere_is_the_same_model(build, tmp_path):
    scored(build(), BATCH)
    worker = build(model=write_model(tmp_path / "copy", seed=0))
    scored(worker, BATCH)
    assert worker.forwards == []


def test_another_version_of_the_code_computes_anew(build, monkeypatch):
    scored(build(), BATCH)
    monkeypatch.setattr(content_cache, "hash_installed_code", lambda: b"another")
    worker = build()
    scored(worker, BATCH)
    assert worker.forwards == [4]


def test_weights_that_are_loaded_later_count(build, folder, tmp_path):
    other = write_model(tmp_path / "other", seed=1)
    worker = build()
    before = scored(worker, BATCH)
    worker.load_weights(str(other))
    after = scored(worker, BATCH)
    assert torch.equal(after, scored(build(model=other, use=()), BATCH))
    assert not torch.equal(after, before)
    assert worker.forwards == [4, 4]
    worker.load_weights(str(folder), 0.5)  # a moving average, which nothing else has
    average = scored(worker, BATCH)
    assert worker.forwards == [4, 4, 4]
    assert not torch.equal(average, before) and not torch.equal(average, after)
    worker.load_weights(str(folder))
    assert torch.equal(scored(worker, BATCH), before) and worker.forwards == [4, 4, 4]


def test_a_folder_that_cannot_be_written_is_told_once(build, tmp_path):
    (tmp_path / "cache").write_text("")
    worker = build()
    expected = scored(build(use=()), BATCH)
    assert torch.equal(scored(worker, BATCH), expected)
    assert torch.equal(scored(worker, BATCH), expected)
    assert worker.forwards == [4]
    scored(worker, rows(2, seed=9))
    (notice,) = worker.record.remarks
    assert "cache.folder" in notice


def build_adapted(folder, tmp_path, seed=0, use=("log_probs",)):
    source = ModelSource(str(folder), str(folder), "float32", 64, (1,), seed=seed)
    config = replace(ActorConfig(), lora=LoraAdapterConfig(rank=4))
    worker = ActorWorker(
        *(WorkerContext("actor", 0, 1), source, config, RolloutConfig(), lambda *_: None),
        temperature=1.0,
        updates=1,
        job="test",
        generates=False,
        cache=CacheConfig(use=list(use), folder=str(tmp_path / "cache")),
    )
    worker.forwards = count_forwards(worker)
    return worker


def test_an_actor_with_adapters_is_its_own_reference(build, folder, tmp_path):
    """However its adapters have learned, what is cached is of the model without them."""
    expected = scored(build_adapted(folder, tmp_path, use=()), BATCH)
    worker = build_adapted(folder, tmp_path)
    assert torch.equal(scored(worker, BATCH), expected)
    with torch.no_grad():
        for name, parameter in worker.model_engine.model.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.1)
    assert torch.equal(scored(worker, BATCH), expected)
    other = build_adapted(folder, tmp_path, seed=1)
    assert torch.equal(scored(other, BATCH), expected)
    assert (worker.forwards, other.forwards) == ([4], [])
    assert not torch.equal(worker.compute_log_prob(BATCH).ragged("log_probs").values, expected)
