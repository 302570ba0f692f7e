"""What is said of a folder that has more than what is trained: it is kept, or it is not."""

import pytest
import torch
from engine_cases import make_model
from safetensors.torch import load_file, save_file

from hybridrl.models.model_loading import load_model_config
from hybridrl.models.trained_parts import trained_parts


@pytest.fixture
def folder(tmp_path):
    """A model with a head for a further token beside its own."""
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(3, 5)}, file, {"format": "pt"})
    return tmp_path


def said_of(folder, adapters=False):
    return trained_parts(str(folder), load_model_config(str(folder)), adapters=adapters)


def test_what_is_not_trained_is_kept(folder):
    assert "Frozen, and saved with it as they are: mtp (15 parameters)." in said_of(folder)
    assert "Frozen: mtp (15 parameters)." in said_of(folder, adapters=True)


def test_what_is_in_files_of_torch_save_is_said_to_be_lost(folder):
    file = folder / "model.safetensors"
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    torch.save(load_file(file) | computed, folder / "pytorch_model.bin")
    file.unlink()
    said = said_of(folder)
    assert "Not saved with it" in said and ": mtp (15 parameters). To keep them" in said
    assert "Frozen: mtp (15 parameters)." in said_of(folder, adapters=True)


def test_a_class_that_is_saved_in_another_form_loses_the_rest_with_a_sentence(folder, monkeypatch):
    monkeypatch.setitem(trained_parts.__globals__, "find_storage_format", lambda *_: None)
    assert "is left out" in said_of(folder)
