"""Which models may be trained on packed samples, which on padded ones, and which on neither."""

import pytest
import torch
from test_models import UNEVEN, assert_packed_equals_alone, make_batch
from tiers import few_of
from transformers import AutoConfig

from hybridrl.batch.batch import Batch
from hybridrl.errors import ConfigError
from hybridrl.models.packed_samples import PackedSamples, SampleLayout
from hybridrl.models.packing_trial import resolve_sample_layout
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.parallel.sequence_parallel import check_rows_divisible

FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
FAMILIES = {
    "qwen3": (SampleLayout.PACKED, {}),
    "qwen3_moe": (SampleLayout.PACKED, {}),
    "llama": (SampleLayout.PACKED, {}),
    "mistral": (SampleLayout.PACKED, {"sliding_window": 4096}),
    "mixtral": (SampleLayout.PACKED, {}),
    "gemma3_text": (SampleLayout.PACKED, {"final_logit_softcapping": 2.0}),
    "phi3": (SampleLayout.PACKED, {}),
    "olmo2": (SampleLayout.PACKED, {}),
    "glm4": (SampleLayout.PACKED, {}),
    "deepseek_v3": (SampleLayout.PACKED, {}),
    "gpt2": (SampleLayout.PACKED, {}),
    "gpt_oss": (SampleLayout.PACKED, {}),
    "qwen3_next": (SampleLayout.PADDED, {}),
    "qwen3_5_text": (SampleLayout.PADDED, {}),
    "bamba": (SampleLayout.PADDED, {}),
    "lfm2": (SampleLayout.PADDED, {"layer_types": ["conv", "full_attention"] * 16}),
    "jamba": (SampleLayout.PADDED, {}),
    "falcon_h1": (SampleLayout.PADDED, {}),
}


@pytest.mark.parametrize("family", few_of(FAMILIES, 6))
def test_a_model_that_is_admitted_scores_and_learns_as_transformers_does(family):
    rows, settings = FAMILIES[family]
    config = AutoConfig.for_model(family, **settings)
    assert resolve_sample_layout(config, family) is rows
    small = shrink_config(config)
    small.initializer_range = 0.1
    assert_packed_equals_alone(small, make_batch(UNEVEN), rows=rows)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gemma2", {}, "its scores have a soft cap, attn_logit_softcapping=50.0"),
        ("cohere", {}, "off by up to .* because it has a scale of the logits .logit_scale in"),
        ("opt", {}, "because it drops out while it is trained, unless .*dropout.* in its conf"),
        ("bloom", {}, "because positions are added to the scores .* .ALiBi"),
        ("phi", {}, "off by up to .* bias of the logits"),
        ("phi3", {"rope_parameters": LONG_ROPE | FACTORS}, "off by up to"),
        ("stablelm", {}, "its attention does not go through"),
        ("t5gemma", {}, "a small copy of it, which would prove .* does not run"),
    ],
)
def test_what_would_be_wrong_is_a_sentence(family, settings, why):
    with pytest.raises(ConfigError, match=rf"mine \({family}\) cannot be trained here: .*{why}"):
        resolve_sample_layout(AutoConfig.for_model(family, **settings), "mine")


def test_models_with_a_scalar_head_are_tried_too():
    assert (
        resolve_sample_layout(AutoConfig.for_model("qwen3"), "critic", scalar=True)
        is SampleLayout.PACKED
    )
    assert (
        resolve_sample_layout(AutoConfig.for_model("qwen3_next"), "critic", scalar=True)
        is SampleLayout.PADDED
    )
    # What only the head does is none of theirs.
    assert (
        resolve_sample_layout(AutoConfig.for_model("phi"), "critic", scalar=True)
        is SampleLayout.PACKED
    )


def test_a_family_without_a_scalar_head_has_no_critic():
    with pytest.raises(ConfigError, match=r"\(granitemoehybrid\) cannot be a critic"):
        resolve_sample_layout(AutoConfig.for_model("granitemoehybrid"), "mine", scalar=True)


def test_a_model_of_one_layer():
    assert (
        resolve_sample_layout(AutoConfig.for_model("qwen2", num_hidden_layers=1), "mine")
        is SampleLayout.PACKED
    )


def test_a_trial_draws_no_random_numbers_of_the_job(monkeypatch):
    monkeypatch.setattr("hybridrl.models.packing_trial._admitted", {})
    before = torch.get_rng_state()
    resolve_sample_layout(AutoConfig.for_model("qwen2"), "mine")
    assert torch.equal(torch.get_rng_state(), before)


def test_sequences_of_a_recurrent_model_are_not_divided():
    check_rows_divisible(SampleLayout.PACKED, ranks=4)
    check_rows_divisible(SampleLayout.PADDED, ranks=1)
    with pytest.raises(ConfigError, match=r"ring=1 and actor\.parallel\.ulysses=1"):
        check_rows_divisible(SampleLayout.PADDED, ranks=2)


def test_padded_samples():
    batch = Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([1, 2]), torch.tensor([5])],
            "response_ids": [torch.tensor([3, 4]), torch.tensor([6])],
        }
    )
    samples = PackedSamples.of(batch, torch.device("cpu"), SampleLayout.PADDED)
    assert samples.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert samples.predictors.tolist() == [1, 2, 4] and samples.targets.tolist() == [3, 4, 6]
    assert samples.packing.position_ids(8).tolist() == [0, 1, 2, 3] * 2
    none = PackedSamples.of(batch.take([]), torch.device("cpu"), SampleLayout.PADDED)
    assert none.input_ids.tolist() == [[0]] and len(none.predictors) == 0
