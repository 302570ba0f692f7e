"""Models that mix attention with convolutions and recurrent states, through the whole job with
vLLM: the same model on both sides, or a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from settings import LEARNS, SHORT
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks import load_task
from hybridrl.errors import TrainingError

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]
SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "tie_word_embeddings": True,
}
FAMILIES = {
    "falcon_h1": {
        **{"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32},
        **{"mamba_d_state": 16, "mamba_n_groups": 1},
    },
    "granitemoehybrid": {
        **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
        **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "num_local_experts": 0},
        "shared_intermediate_size": 128,
    },
    "lfm2": {
        **{"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_dim": 64},
        **{"conv_dim_out": 64, "block_dim": 64, "block_ff_dim": 128},
        "block_auto_adjust_ff_dim": False,
    },
}


def made(family, folder):
    tokenizer = build_character_tokenizer(load_task("arithmetic").CHARACTERS)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ENDS}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), **SHAPE, **FAMILIES[family], **ends
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ENDS = ("bos", "eos", "pad")


def steps_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize(
    "family", ["falcon_h1", pytest.param("granitemoehybrid", marks=pytest.mark.long)]
)
def test_it_learns_with_the_generator_of_the_same_model(run, tmp_path, family):
    """On two ranks, with every element compared after each sync."""
    settings = [*SHORT, *LEARNS, "trainer.steps=6", "warmup.steps=0"]
    folder = run(
        *settings, f"model.path={made(family, tmp_path / 'model')}", "rollout.verify_weights=true"
    )
    steps = steps_of(folder)
    assert len(steps) == 6 and all(row["mismatch/k3"] < 1e-9 for row in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]


def test_a_generator_that_is_another_model_is_a_sentence(run, tmp_path):
    """vLLM's LFM2 on CPUs is."""
    with pytest.raises(TrainingError, match=r"not the model .* rollout=transformers"):
        run(*SHORT, "warmup.steps=0", f"model.path={made('lfm2', tmp_path / 'model')}")
