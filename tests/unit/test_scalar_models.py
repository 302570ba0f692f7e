"""Critics and reward models: the packed forward against transformers' own classifier, new heads,
and updates that no split into micro-batches changes."""

import itertools
import types

import pytest
import torch
from small_models import SHAPE, build_seeded
from tiers import few_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
)

from hybridrl.algorithms import BradleyTerryObjective, TokenSegments, token_weights
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import ScalarModel
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.reward_model_worker import compute_sample_scores

CPU = torch.device("cpu")
VOCABULARY = 19
# (prompt, response) lengths of neighbouring answers: three pairs.
LENGTHS = [(3, 4), (3, 9), (1, 1), (1, 5), (6, 12), (6, 2)]
KINDS = [Qwen2Config, LlamaConfig]


def make(auto_class, kind, attention=PACKED_ATTENTION, **settings):
    config = kind(**SHAPE, vocab_size=VOCABULARY, **settings)
    return build_seeded(auto_class, config, attention)


def classifier(kind, attention=PACKED_ATTENTION):
    return make(AutoModelForSequenceClassification, kind, attention, num_labels=1)


def make_batch(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)

    def draw(length):
        return torch.randint(VOCABULARY, (length,), generator=generator)

    columns = {
        "prompt_ids": [draw(prompt) for prompt, _ in lengths],
        "response_ids": [draw(response) for _, response in lengths],
    }
    return Batch.from_columns(columns)


def to_learn_from(batch):
    """The batch with what updates of a critic and of a reward model read."""
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = batch["response_ids"].cu_seqlens
    tokens = int(cu_seqlens[-1])
    mask = torch.ones(tokens).index_fill(0, torch.tensor([5, 6, 25]), 0.0)
    segments = TokenSegments.from_cu_seqlens(cu_seqlens, mask)
    weights = token_weights(segments.mask, "seq-mean-token-mean", segments=segments)
    columns = {"response_mask": mask.to(torch.uint8), "loss_weights": weights}
    columns |= {name: torch.randn(tokens, generator=generator) for name in ("values", "returns")}
    ragged = {name: RaggedColumn(values, cu_seqlens) for name, values in columns.items()}
    return batch.with_columns({"margin": torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0]), **ragged})


def transformers_scores(model, batch):
    """By sample, what transformers' classifier says of each prefix: `[response + 1]` numbers, from
    the prompt alone to the whole sample."""
    rows = zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)
    with torch.no_grad():
        return [
            torch.stack(
                [
                    model(input_ids=torch.cat([prompt, response[:length]])[None]).logits[0, 0]
                    for length in range(len(response) + 1)
                ]
            )
            for prompt, response in rows
        ]


def make_engine(mesh, model, reads, **settings):
    """An engine that learns nothing and records each gradient its optimizer is given."""
    engine = TrainEngine(ScalarModel(model, reads), mesh, "float32", ActorConfig(**settings))
    engine.start_optimizer(OptimizerConfig(learning_rate=0.0, max_grad_norm=0.0), updates=100)
    engine.gradients = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: engine.gradients.append(
            torch.cat([p.grad.full_tensor().flatten().clone() for p in engine.model.parameters()])
        )
    )
    return engine


@pytest.mark.parametrize("kind", few_of(KINDS, [Qwen2Config]))
def test_values_and_scores_are_those_of_transformers(kind):
    batch = make_batch()
    expected = transformers_scores(classifier(kind, "eager"), batch)
    samples = PackedSamples.of(batch, CPU)
    found = {reads: ScalarModel(classifier(kind), reads)(samples) for reads in ("before", "after")}
    for reads, values in found.items():
        assert values.keys() == {"values"} and values["values"].dtype == torch.float32
        # `before` a token is chosen its prefix has been seen, `after` it the token as well.
        wanted = [row[:-1] if reads == "before" else row[1:] for row in expected]
        torch.testing.assert_close(values["values"], torch.cat(wanted), rtol=1e-4, atol=1e-5)


def test_the_score_of_a_sample_is_its_value_at_the_last_token(mesh):
    batch = make_batch([*LENGTHS, (4, 0), (2, 3), (1, 0)])
    engine = make_engine(mesh, classifier(Qwen2Config), "after", tokens_per_microbatch=20)
    scores = compute_sample_scores(engine, batch)
    expected = transformers_scores(classifier(Qwen2Config, "eager"), batch)
    # Of an empty response nothing is said.
    wanted = [float(row[-1]) if len(row) > 1 else 0.0 for row in expected]
    assert scores.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert wanted.count(0.0) == 2
    assert compute_sample_scores(engine, make_batch([(3, 0), (1, 0)])).tolist() == [0.0, 0.0]
    assert compute_sample_scores(engine, batch.slice(0, 0)).shape == (0,)


@pytest.mark.parametrize("kind", few_of(KINDS, [Qwen2Config]))
def test_a_language_model_gets_a_head_of_zeros(kind, tmp_path):
    language_model = make(AutoModelForCausalLM, kind)
    language_model.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "float32", scalar=True, needs_head=False)
    assert model.score.weight.shape == (1, 16) and (model.score.weight == 0).all()
    body = dict(language_model.base_model.named_parameters())
    for name, parameter in model.base_model.named_parameters():
        assert torch.equal(parameter, body[name])
    values = ScalarModel(model, "before")(PackedSamples.of(make_batch(), CPU))["values"]
    assert (values == 0).all()


@pytest.mark.parametrize("kind", few_of(KINDS, [Qwen2Config]))
def test_a_saved_scalar_model_is_the_model(kind, mesh, tmp_path):
    batch = make_batch()
    engine = make_engine(mesh, classifier(kind), "after")
    engine.start_optimizer(OptimizerConfig(learning_rate=0.03), updates=10)
    engine.update(to_learn_from(batch), BradleyTerryObjective(), rows_together=2)
    scores = compute_sample_scores(engine, batch)
    engine.save(tmp_path)
    loaded, found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert loaded.config.num_labels == 1
    assert not found["missing_keys"] and not found["unexpected_keys"]
    expected = [float(row[-1]) for row in transformers_scores(loaded, batch)]
    assert scores.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    before = [float(row[-1]) for row in transformers_scores(classifier(kind, "eager"), batch)]
    assert scores.tolist() != pytest.approx(before, rel=0.01)
    again = make_engine(
        mesh, load_model(str(tmp_path), "float32", scalar=True, needs_head=False), "after"
    )
    assert torch.equal(compute_sample_scores(again, batch), scores)


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    make(AutoModelForSequenceClassification, Qwen2Config, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"classifies into 2 labels.*num_labels=1"):
        load_model(str(tmp_path), "float32", scalar=True, needs_head=False)


def critic_loss(outputs, columns, segments):
    """The loss of `CriticWorker`."""
    worker = types.SimpleNamespace(_prefix="", _value_clip=0.3)
    return CriticWorker._value_loss(worker, outputs, columns, segments)


UPDATES = {
    "critic": ("before", critic_loss, 1),
    "reward_model": ("after", BradleyTerryObjective(centre=0.1), 2),
}


def plain_gradient(batch, reads, loss):
    """Of the whole mini-batch at once, without an engine."""
    model = ScalarModel(classifier(Qwen2Config), reads)
    samples = PackedSamples.of(batch, CPU)
    columns = {
        name: batch[name].values for name in batch.columns if isinstance(batch[name], RaggedColumn)
    }
    lengths = batch["response_ids"].lengths
    columns["margin"] = batch["margin"].repeat_interleave(lengths)
    segments = TokenSegments.from_cu_seqlens(samples.response_bounds, columns["response_mask"])
    per_token = loss(model(samples), columns, segments).loss
    value = (columns["loss_weights"] * per_token)[segments.mask].sum()
    value.backward()
    return float(value.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("role", UPDATES)
def test_any_budget_and_order_gives_one_gradient(role, mesh):
    reads, loss, together = UPDATES[role]
    batch = to_learn_from(make_batch())
    value, expected = plain_gradient(batch, reads, loss)
    engine = make_engine(mesh, classifier(Qwen2Config), reads)
    seen = []

    def watched(outputs, columns, segments):
        seen.append(segments.rows)
        return loss(outputs, columns, segments)

    longest = max(map(sum, LENGTHS)) if together == 1 else 26
    metrics = []
    for budget, order in itertools.product(
        (longest, 40, 10_000), ([0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3])
    ):
        engine.config.tokens_per_microbatch = budget
        metrics.append(engine.update(batch.take(order), watched, rows_together=together))
    assert all(rows % together == 0 for rows in seen) and {together, 6} <= set(seen)
    for gradient, found in zip(engine.gradients, metrics, strict=True):
        assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())
        assert found["loss"] == pytest.approx(value, rel=1e-5)
        assert found == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    if together == 2:
        assert {"pair_margin", "pair_accuracy"} <= metrics[0].keys()
        assert 0 < metrics[0]["pair_accuracy"] < 1


def test_pairs_of_which_one_is_too_long_are_named(mesh):
    engine = make_engine(mesh, classifier(Qwen2Config), "after", tokens_per_microbatch=25)
    with pytest.raises(ConfigError, match=r"has 26 tokens.*`actor\.tokens_per_microbatch`"):
        engine.update(to_learn_from(make_batch()), BradleyTerryObjective(), rows_together=2)


def test_a_critic_learns_its_returns(mesh):
    batch = to_learn_from(make_batch())
    engine = make_engine(mesh, classifier(Qwen2Config), "before")
    engine.start_optimizer(OptimizerConfig(learning_rate=0.02), updates=20)
    losses = []
    for _ in range(15):
        old = engine.forward(batch).ragged("values")
        losses.append(engine.update(batch.with_columns({"values": old}), critic_loss)["loss"])
    assert losses[-1] < 0.5 * losses[0]
