"""Models that are built before they are read, and which folders are left to transformers."""

import json
import logging

import pytest
import torch
from engine_cases import make_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2PreTrainedModel,
)

from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import load_model, open_model
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.models.stored_tensors import find_stored_tensors


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def test_parameters_have_no_memory_and_buffers_are_those_of_the_loaded_model(folder):
    before = torch.get_rng_state()
    model, files = open_model(str(folder))
    assert torch.equal(torch.get_rng_state(), before), "adapters draw the numbers they always drew"
    loaded = load_model(str(folder), "float32")
    assert all(parameter.is_meta for parameter in model.parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.named_parameters()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    assert shapes == files.shapes
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(b, buffers[n]) for n, b in loaded.named_buffers())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert model.config.to_dict() == loaded.config.to_dict()


def test_a_new_head_is_zeros_and_a_trained_one_is_read(folder, tmp_path_factory):
    model, _ = open_model(str(folder), scalar=True, needs_head=False)
    assert not model.score.weight.is_meta and not model.score.weight.any()
    trained = tmp_path_factory.mktemp("trained")
    critic = AutoModelForSequenceClassification.from_config(model.config)
    critic.save_pretrained(trained)
    found, _ = open_model(str(trained), scalar=True, needs_head=False)
    assert torch.equal(found.score.weight, critic.score.weight) and critic.score.weight.any()


def no_safetensors(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def other_names(folder):
    """As checkpoints of the model below the head have them."""
    state = load_file(folder / "model.safetensors")
    state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def tied_and_there(folder):
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


LEFT = {
    no_safetensors: "it has no safetensors files",
    tied_and_there: "`lm_head.weight` is tied, and in it besides",
}


@pytest.mark.parametrize("change", LEFT, ids=lambda change: change.__name__)
def test_folders_that_only_transformers_can_read(folder, caplog, change):
    change(folder)
    with caplog.at_level(logging.INFO):
        model, files = open_model(str(folder))
    assert LEFT[change] in caplog.text
    assert (files is None) == (change is no_safetensors), "what they have is saved with the model"
    wanted = make_model().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_names_without_the_prefix_of_the_class_are_read_by_parts(folder):
    other_names(folder)
    model, files = open_model(str(folder))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert all(parameter.is_meta for parameter in model.parameters())
    found = find_stored_tensors(model, shapes, files.shapes)
    assert {name: part.name for name, (part,) in found.items()} == {
        name: name.removeprefix("model.") for name in shapes
    }


def test_a_quantised_folder_is_left_to_transformers(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nobody's"}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO):
        _, files = open_model(str(folder))
    assert "it is quantised" in caplog.text and files is None


def test_a_damaged_folder_is_a_sentence(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged: it should have"):
        open_model(str(folder))


def test_a_buffer_that_the_module_around_it_computes(tmp_path):
    config = shrink_config(
        AutoConfig.for_model("falcon_h1", ssm_multipliers=[0.5, 0.25, 2.0, 1.0, 3.0])
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    buffers = dict(open_model(str(tmp_path))[0].named_buffers())
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_buffers())
    assert any(name.endswith("mup_vector") for name in expected)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in expected.items())


def test_a_buffer_that_nothing_computes_is_left_to_transformers(folder, caplog, monkeypatch):
    monkeypatch.setattr(Qwen2PreTrainedModel, "initialize_weights", lambda self: None)
    caplog.set_level(logging.INFO)
    model, _ = open_model(str(folder))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "`model.rotary_emb.inv_freq` is not computed by its class" in caplog.text
