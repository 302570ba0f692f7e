"""A config.json that transformers refuses is a sentence that names the setting."""

import json

import pytest

from hybridrl.errors import ConfigError
from hybridrl.models.loading import load_config


def test_a_value_of_the_wrong_kind_is_named(tmp_path):
    settings = {"model_type": "qwen2", "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path=.*could not be read.*hidden_size.*wide"):
        load_config(str(tmp_path))
