"""CausalPolicy: a transformers causal language model that answers with log-probabilities."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.packing import PackedSamples


class CausalPolicy(nn.Module):
    """Wraps `model` so that one forward gives the log-probabilities of the response tokens.

    The output embedding is applied inside this module's forward, in chunks, so that a sharded
    model has gathered it by then and `[tokens, vocabulary]` logits never exist.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, samples: PackedSamples, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log_probs and entropy `[response tokens]`, float32, of the distribution sampled from."""
        hidden = self.model.base_model(
            input_ids=samples.input_ids[None],
            position_ids=samples.packing.position_ids()[None],
            packing=samples.packing,
            use_cache=False,
        ).last_hidden_state.squeeze(0)
        head = self.model.get_output_embeddings()
        return token_log_probs(
            hidden.index_select(0, samples.predictors), head.weight, samples.targets, temperature
        )
