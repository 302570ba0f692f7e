"""Models that cannot be trained, or cannot score, are refused by their folders. More of them are
tried by `make campaign`."""

import shutil
import threading

import pytest
from campaigns.models import base, changed, classify, cut, deeper, renamed, sound, split
from campaigns.models import settings as described
from campaigns.models import tensors as stored
from settings import configured

from hybridrl.checks.models.model_folder_checks import check_hub_model, check_model
from hybridrl.checks.models.tokenizer_checks import check_tokenizer
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model, load_model_config


@pytest.fixture
def folder(tmp_path):
    """Copies a sound model and changes it."""

    def make(change):
        path = shutil.copytree(base(), tmp_path / "model")
        change(path)
        return str(path)

    return make


def check(path, scalar=False, learns=True):
    check_model(path, "model.path", scalar=scalar, learns=learns)


@pytest.mark.parametrize("change", [sound, split("nothing")])
def test_a_sound_folder_passes(folder, change):
    path = folder(change)
    check(path)
    check(path, scalar=True)  # a critic gets a new head


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(0.9), "damaged: it should have"),
        (deeper, r"lack 24 of the tensors .*layers\.2"),
        (stored(renamed), "They have `module.core"),
        (described(intermediate_size=80), r"has the shape \[32, 128\] .* and \[32, 80\]"),
        (described(quantization_config={"quant_method": "awq"}), r"is quantised \(awq\)"),
        (described(model_type="mine", auto_map={}), "Python code of its own"),
        (described(model_type="qwen22"), "Did you mean `qwen2"),
        (classify(1), "what is needed is a causal language model"),
    ],
)
def test_what_is_wrong_with_a_folder_is_a_sentence(folder, change, words):
    with pytest.raises(ConfigError, match=words):
        check(folder(change))


def test_what_scores_has_a_head_of_one_label(folder, tmp_path):
    with pytest.raises(ConfigError, match="without a scalar head"):
        check(folder(sound), scalar=True, learns=False)
    with pytest.raises(ConfigError, match="without a scalar head"):
        load_model(str(base()), "float32", scalar=True)
    for labels in (1, 2):
        shutil.rmtree(tmp_path / "model")
        path = folder(classify(labels))
        if labels == 1:
            check(path, scalar=True, learns=False)
        else:
            with pytest.raises(ConfigError, match="classifies into 2 labels"):
                check(path, scalar=True, learns=False)


def test_no_parameter_is_made_up_where_transformers_loads(folder):
    with pytest.raises(ConfigError, match=r"lack 24 of the tensors"):
        load_model(folder(deeper), "float32")


def test_a_tokenizer_speaks_to_its_model(folder):
    path = folder(sound)
    config, model = configured([f"model.path={path}"]), load_model_config(path)
    check_tokenizer(config, build_character_tokenizer(), model, path)
    more = build_character_tokenizer()
    more.add_tokens(["A"])
    with pytest.raises(ConfigError, match=r"has 50 tokens and the model 49.*seen 'A'"):
        check_tokenizer(config, more, model, path)
    padded = build_character_tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    check_tokenizer(config, padded, model, path)  # nothing is padded here


def test_a_name_that_the_hub_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model.path=ours/nope: there is no such folder .*OFFL"):
        check_hub_model("ours/nope", "model.path")
    with pytest.raises(ConfigError, match="has no such names"):
        check_hub_model("two words", "model.path")


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    from hybridrl.system import hub_access as hub

    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.05)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_info", lambda *_, **__: threading.Event().wait(5)
    )
    with pytest.raises(ConfigError, match=r"has not answered within 0\.05 s"):
        check_hub_model("ours/nope", "model.path")


def test_the_checks_of_a_start_look_at_the_folders(tmp_path):
    from hybridrl.checks.check_list import check as check_settings

    with pytest.raises(ConfigError, match="damaged"):
        check_settings(configured(changed(cut(0.9))(tmp_path)))
