"""The packed forward: every sample as if it were alone, and logits never held whole."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SHAPE
from tiers import few_of
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.batch.batch import Batch
from hybridrl.models import log_probs
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import (
    MAX_PADDING_RATIO,
    PackedSamples,
    PackingMetadata,
    SampleLayout,
)
from hybridrl.system.device_traits import logits_per_chunk

CPU = torch.device("cpu")
VOCABULARY = 29
# (prompt, response) lengths: one long sample, several of middling length, very short ones, and
# one without a response.
UNEVEN = [(3, 2), (30, 31), (1, 1), (12, 5), (9, 9), (2, 0), (1, 16), (4, 1)]


def both(outputs):
    """Log-probabilities and entropy."""
    return outputs["log_probs"], outputs["entropy"]


def make_config(kind, **settings):
    own = {"vocab_size": VOCABULARY, "head_dim": 4, "max_position_embeddings": 128}
    return kind(**(SHAPE | own | {"attention_dropout": 0.0} | settings))


def make_model(config, attention, seed=0):
    """A random model; the same weights whatever the attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention
        )
        for parameter in model.parameters():  # biases and norms too must matter
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.config.use_cache = False
    return model.eval()


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(VOCABULARY, (n,), generator=generator)

    return Batch.from_columns(
        {
            "prompt_ids": [draw(prompt) for prompt, _ in lengths],
            "response_ids": [draw(response) for _, response in lengths],
        }
    )


def one_by_one(model, batch, temperature=1.0):
    """Log-probabilities and entropy of the responses, each sample in a forward of its own."""
    found = []
    for prompt, response in zip(
        batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True
    ):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        scores = logits[len(prompt) - 1 : -1].float() / temperature
        logs = torch.log_softmax(scores, dim=-1)
        chosen = logs.gather(1, response[:, None]).squeeze(1)
        found.append((chosen, -(logs.exp() * logs).sum(1)))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def gradients(model, outputs):
    """Gradients of a weighted sum of the outputs."""
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(len(out), generator=generator)).sum() for out in outputs)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_same(found, expected, tolerance, terms=1.0):
    """Relative to the largest element: small elements are differences of large ones. Where all
    should be 0 (a window of one token leaves nothing to choose) there is only the rounding of the
    terms that cancel, and these are about as large as `terms`."""
    scale = max(0.01 * terms, float(expected.detach().abs().max()))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


def assert_packed_equals_alone(config, batch, temperature=1.0, rows=SampleLayout.PACKED):
    policy, alone = (
        CausalPolicy(make_model(config, PACKED_ATTENTION), rows),
        make_model(config, "eager"),
    )
    assert policy.inner.config._attn_implementation == PACKED_ATTENTION
    outputs = both(policy(PackedSamples.of(batch, CPU, rows), temperature))
    expected = one_by_one(alone, batch, temperature)
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.dtype == torch.float32
        assert_same(found, wanted, 1e-5)
    found, wanted = gradients(policy.inner, outputs), gradients(alone, expected)
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name in wanted:
        assert_same(found[name], wanted[name], 1e-4, terms=largest)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key_value_heads", few_of([4, 2, 1], [2]))
@pytest.mark.parametrize("kind", [Qwen2Config, LlamaConfig, Qwen3Config])
def test_packed_equals_alone(kind, key_value_heads, tied):
    config = make_config(kind, num_key_value_heads=key_value_heads, tie_word_embeddings=tied)
    batch = make_batch(UNEVEN)
    assert len(PackedSamples.of(batch, CPU).packing.buckets) >= 3
    assert_packed_equals_alone(config, batch)


@pytest.mark.parametrize("lengths", [[(5, 7)], [(4, 4)] * 3, [(1, 60), (1, 1)]])
def test_one_sample_one_rectangle_and_far_apart(lengths):
    assert_packed_equals_alone(make_config(Qwen2Config), make_batch(lengths))


@pytest.mark.parametrize("window", [1, 2, 5, 60, 61])
def test_sliding_windows(window):
    config = make_config(
        Qwen2Config, use_sliding_window=True, sliding_window=window, max_window_layers=1
    )
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert_packed_equals_alone(config, make_batch(UNEVEN))


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature(temperature):
    assert_packed_equals_alone(make_config(Qwen2Config), make_batch(UNEVEN[:4]), temperature)


def test_half_precision_gives_float32_log_probs_near_the_exact_ones():
    config, batch = make_config(Qwen2Config), make_batch(UNEVEN)
    model = make_model(config, PACKED_ATTENTION)
    exact = both(CausalPolicy(model)(PackedSamples.of(batch, CPU)))
    rounded = both(CausalPolicy(model.bfloat16())(PackedSamples.of(batch, CPU)))
    for found, wanted in zip(rounded, exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.2)


def test_a_likely_token_keeps_its_log_prob_in_half_precision():
    """The states and the embedding are rounded, the logits are not: a logit of 20, rounded, would
    be off by up to 0.06."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 64, generator=generator).bfloat16().requires_grad_()
    targets = torch.arange(20)
    states = (0.3 * weight[:20]).detach().requires_grad_()
    exact = torch.log_softmax(states.double() @ weight.double().T, 1)
    wanted = exact.gather(1, targets[:, None]).squeeze(1)
    found, _ = token_log_probs(states, weight, targets)
    assert float(wanted.detach().min()) > -0.1, "peaked"
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    gradients = (torch.autograd.grad(each.sum(), (states, weight)) for each in (found, wanted))
    for gradient, value in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, value, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 7, 8, 100])
def test_logits_never_exist_whole(tokens_per_chunk, monkeypatch):
    seen, compute_products = [], log_probs.compute_products

    def watched(*arguments):
        products = compute_products(*arguments)
        seen.append(products.numel())
        return products

    monkeypatch.setattr(log_probs, "compute_products", watched)
    at_a_time = tokens_per_chunk * VOCABULARY + 5
    monkeypatch.setattr(log_probs, "logits_per_chunk", lambda _: at_a_time)
    hidden, weight = (torch.randn(n, 6, requires_grad=True) for n in (8, VOCABULARY))
    sum(token_log_probs(hidden, weight, torch.arange(8), 0.7)).sum().backward()
    assert max(seen) <= at_a_time
    assert sum(seen) == 16 * VOCABULARY, "each logit once forward and once backward"


def test_an_accelerator_takes_enough_tokens_at_a_time_to_be_worth_reading_the_embedding():
    assert logits_per_chunk("cuda") // 152_000 >= 1024
    assert logits_per_chunk("cpu") == 1 << 22


def test_no_response_tokens():
    policy = CausalPolicy(make_model(make_config(Qwen2Config), PACKED_ATTENTION))
    outputs = both(policy(PackedSamples.of(make_batch([(3, 0), (1, 0)]), CPU)))
    assert [out.shape for out in outputs] == [(0,), (0,)]
    assert all((grad == 0).all() for grad in gradients(policy.inner, outputs).values())


def test_no_samples():
    policy = CausalPolicy(make_model(make_config(Qwen2Config), PACKED_ATTENTION))
    samples = PackedSamples.of(make_batch(UNEVEN).slice(0, 0), CPU)
    outputs = both(policy(samples))
    assert [out.shape for out in outputs] == [(0,), (0,)]
    assert samples.response_bounds.tolist() == [0]
    assert all((grad == 0).all() for grad in gradients(policy.inner, outputs).values())


def test_position_ids_begin_anew_in_each_sample():
    packing = PackingMetadata.of(torch.tensor([0, 3, 4, 6]), CPU)
    assert packing.position_ids(6).tolist() == [0, 1, 2, 0, 0, 1]
    assert packing.longest == 3 and packing.cu_seqlens.dtype == torch.int32


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_buckets_hold_each_token_once_and_little_padding(lengths):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    packing = PackingMetadata.of(bounds, CPU)
    sources = torch.cat([bucket.source for bucket in packing.buckets])
    assert sorted(sources.tolist()) == list(range(sum(lengths)))
    assert sum(bucket.rows for bucket in packing.buckets) == len(lengths)
    sample_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for rows, longest, source, target in packing.buckets:
        assert len(source) == len(target) == len(set(target.tolist()))
        assert rows * longest <= max(longest, MAX_PADDING_RATIO * len(source))
        row, place = target // max(longest, 1), target % max(longest, 1)
        starts = bounds[sample_of[source]]
        assert torch.equal(place, source - starts), "left-aligned"
        assert len(set(zip(row.tolist(), sample_of[source].tolist(), strict=True))) == len(
            set(row.tolist())
        ), "one sample a row"
        assert not len(row) or int(row.max()) < rows


def test_samples_of_one_length_are_one_rectangle():
    packing = PackingMetadata.of(torch.arange(0, 61, 5), CPU)
    assert [(bucket.rows, bucket.longest) for bucket in packing.buckets] == [(12, 5)]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_packed_samples_know_where_each_token_is(lengths, seed):
    batch = make_batch(lengths, seed)
    samples = PackedSamples.of(batch, CPU)
    rows = [
        torch.cat(pair)
        for pair in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)
    ]
    assert torch.equal(samples.input_ids, torch.cat(rows)[None])
    assert torch.equal(samples.targets, batch["response_ids"].values)
    assert torch.equal(samples.input_ids[0, samples.predictors + 1], samples.targets)
    expected = []
    for (prompt, response), start in zip(
        lengths, samples.packing.cu_seqlens.tolist(), strict=False
    ):
        expected.extend(range(start + prompt - 1, start + prompt - 1 + response))
    assert samples.predictors.tolist() == expected
    assert torch.equal(samples.response_bounds, batch["response_ids"].cu_seqlens)


@pytest.mark.parametrize("heads", range(1, 13))
def test_tiny_heads_share_keys_evenly(heads):
    config = make_tiny_config(hidden_size=8 * heads, layers=1, heads=heads, context=8)
    config.vocab_size = 16
    model = AutoModelForCausalLM.from_config(config)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 16)
