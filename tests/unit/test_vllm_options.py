"""vLLM's own options: which ones a job may set."""

import pytest
from transformers import AutoConfig

from hybridrl.composition.secrets import SecretStr
from hybridrl.errors import ConfigError
from hybridrl.rollout.vllm_options import (
    FIXED_OPTIONS,
    OPTIONS_WITH_SETTINGS,
    check_engine_options,
    check_served,
    known_architectures,
    read_engine_options,
)

GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def test_every_name_here_is_one_of_the_installed_engine():
    known = read_engine_options().keys()
    assert not set(FIXED_OPTIONS) - known and not OPTIONS_WITH_SETTINGS.keys() - known
    assert {"max_num_batched_tokens", "kv_cache_dtype", "async_scheduling", *GUESSES} <= known


def test_what_is_left_to_the_user_passes():
    options = {"max_num_batched_tokens": 4096, "block_size": 32, "async_scheduling": True}
    check_engine_options(options, temperature=0.7)
    check_engine_options(GUESSES, temperature=1.0)
    check_engine_options({"hf_token": SecretStr("hunter2")}, temperature=1.0)
    check_engine_options({}, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "half"}, "engine_options.dtype: set model.dtype instead"),
        ({"quantization": "fp8"}, "engine_options.quantization: set rollout.quantization instead"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: set rollout.kv_cache instead"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode: cannot be set"),
        ({"max_num_batchd_tokens": 1}, "no such option. Did you mean `max_num_batched_tokens`"),
        (GUESSES, "speculative_config with rollout.temperature=0.7: .* Set rollout.temperature=1"),
    ],
)
def test_what_is_not_is_a_sentence(options, said):
    with pytest.raises(ConfigError, match=said):
        check_engine_options(options, temperature=0.7)


def test_weights_between_tokens_need_to_know_which_token():
    with pytest.raises(ConfigError, match=r"in_flight=true: .* Choose one"):
        check_engine_options({"async_scheduling": True}, temperature=1.0, in_flight=True)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_num_batched_tokens", "many", "=many: must be a whole number, or null"),
        ("max_num_batched_tokens", 4096.5, "=4096.5: must be a whole number, or null"),
        ("enable_prefix_caching", 1, "=1: must be true or false, or null"),
    ],
)
def test_an_option_of_another_type_is_refused(option, value, words):
    with pytest.raises(ConfigError, match=rf"rollout\.engine_options\.{option}{words}"):
        check_engine_options({option: value}, 1.0)


def test_numbers_may_be_whole_and_other_types_are_vllm_s_affair():
    check_engine_options({"cpu_offload_gb": 0, "max_num_batched_tokens": None}, 1.0)
    check_engine_options({"block_size": 32, "compilation_config": {"level": 3}}, 1.0)


def test_classes_of_today_are_known_to_the_installed_engine():
    kinds = ("Qwen3_5", "Qwen3VL", "Gemma3", "Gemma4", "Mistral3", "Glm4v")
    assert {f"{kind}ForConditionalGeneration" for kind in kinds} <= known_architectures()
    assert {"GptOssForCausalLM", "DeepseekV3ForCausalLM"} <= known_architectures()
    assert "MptForCausalLM" not in known_architectures()  # was, once


def served(config, kind="cpu", dtype="float32", is_known=False):
    check_served(config, "a folder", kind, dtype, is_known=lambda: is_known)


def config_of(kind, architecture, **settings):
    config = AutoConfig.for_model(kind, **settings)
    config.architectures = [architecture]
    return config


def test_a_class_that_vllm_does_not_have_is_refused_before_the_start():
    config = config_of("qwen3", "NewForCausalLM")
    with pytest.raises(ConfigError, match=r"no class NewForCausalLM for a folder\. "):
        served(config)
    served(config, is_known=True)


def test_linear_attention_on_cpus_is_served_in_bfloat16_with_wide_heads():
    config = config_of("qwen3_5", "Qwen3_5ForConditionalGeneration")
    with pytest.raises(ConfigError, match=r"Set model.dtype=bfloat16; or rollout=transformers"):
        served(config)
    served(config, dtype="bfloat16")
    served(config, kind="cuda")
    config.text_config.linear_key_head_dim = 64
    with pytest.raises(ConfigError, match="heads of 128 dimensions, and a folder has 64"):
        served(config, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kind", "architecture", "settings", "width"),
    [
        ("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}, 16),
        ("gemma3", "Gemma3ForConditionalGeneration", {"text_config": {"head_dim": 40}}, 40),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"kv_lora_rank": 64}, 128),
    ],
)
def test_heads_that_no_cpu_kernel_takes_are_refused(kind, architecture, settings, width):
    config = config_of(kind, architecture, **settings)
    with pytest.raises(ConfigError, match=f"has {width}. rollout=transformers"):
        served(config)
    served(config, kind="cuda")
