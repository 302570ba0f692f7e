"""vLLM's own options: which ones a job may set."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.rollout.vllm_options import OURS, TAKEN, check_engine_options, engine_options

GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def test_every_name_here_is_one_of_the_installed_engine():
    known = engine_options().keys()
    assert not set(OURS) - known and not TAKEN.keys() - known
    assert {"max_num_batched_tokens", "kv_cache_dtype", "async_scheduling", *GUESSES} <= known


def test_what_is_left_to_the_user_passes():
    options = {"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8", "async_scheduling": True}
    check_engine_options(options, temperature=0.7)
    check_engine_options(GUESSES, temperature=1.0)
    check_engine_options({}, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "half"}, "engine_options.dtype: set model.dtype instead"),
        ({"quantization": "fp8"}, "engine_options.quantization: set rollout.quantization instead"),
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
    check_engine_options({"kv_cache_dtype": "fp8", "compilation_config": {"level": 3}}, 1.0)
