"""A config.json that transformers refuses is a sentence that names the setting."""

import json

import pytest

from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model_config, load_tokenizer


def test_a_value_of_the_wrong_kind_is_named(tmp_path):
    settings = {"model_type": "qwen2", "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path=.*could not be read.*hidden_size.*wide"):
        load_model_config(str(tmp_path))


def test_what_is_missing_of_rotary_positions_is_named(tmp_path):
    settings = {"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path=.*could not be read"):
        load_model_config(str(tmp_path))


def test_a_tokenizer_that_is_none_is_a_sentence(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="No tokenizer could be loaded from"):
        load_tokenizer(str(tmp_path))
