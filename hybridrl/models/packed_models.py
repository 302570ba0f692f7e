"""Models over packed samples: what the engine trains. Each wraps a transformers model and answers
with a number, or a few, for every response token."""

from __future__ import annotations

from types import MethodType
from typing import ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridrl.models.log_probs import Vocabulary, token_log_probs
from hybridrl.models.packing import PackedSamples, Rows


class PackedModel(nn.Module):
    """Wraps `inner`, whose attention is ours.

    The head is applied inside this module's forward, and by a method of its own (`log_probs`, or
    its forward), so that a sharded model has gathered it.

    Attributes:
        OUTPUTS: Names of what `forward` gives, each `[response tokens]` in float32.
        rows: How its samples are laid out.
        shift: So many places after a response token's predictor it is read: 1 where the token
            itself stands.
    """

    OUTPUTS: ClassVar[tuple[str, ...]]
    shift: int = 0

    def __init__(self, inner: PreTrainedModel, rows: Rows = Rows.PACKED) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows
        for module in inner.modules():
            if isinstance(module, nn.Dropout):  # a sample's log-probabilities have to stay the same
                module.p = 0.0

    @property
    def head(self) -> nn.Module:
        """The part of the model that is applied to the last hidden states."""
        raise NotImplementedError

    def hidden(self, samples: PackedSamples) -> torch.Tensor:
        """The last hidden states, `[tokens, hidden]` of all rows."""
        ids = samples.input_ids
        return self.inner.base_model(
            input_ids=ids,
            position_ids=samples.packing.position_ids(ids.numel()).view(ids.shape),
            packing=samples.packing,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)


class CausalPolicy(PackedModel):
    """A causal language model that answers with log-probabilities. The output embedding is applied
    in chunks: `[tokens, vocabulary]` logits never exist."""

    OUTPUTS = ("log_probs", "entropy")
    vocabulary: Vocabulary | None = None
    """The part of the vocabulary that this rank has, where it is cut."""

    def __init__(self, inner: PreTrainedModel, rows: Rows = Rows.PACKED) -> None:
        super().__init__(inner, rows)
        self.head.log_probs = MethodType(_log_probs, self.head)  # type: ignore[assignment]

    @property
    def head(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, samples: PackedSamples, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """`log_probs` of the response tokens and `entropy`, of the distribution sampled from."""
        hidden = self.hidden(samples).index_select(0, samples.predictors)
        log_probs, entropy = self.head.log_probs(
            hidden, samples.targets, temperature, self.vocabulary
        )
        return {"log_probs": log_probs, "entropy": entropy}


class ScalarModel(PackedModel):
    """A model with a scalar head, as transformers' sequence classification with one label has it.

    Args:
        reads: `before`: a token's value is read where it is about to be chosen, which is what a
            critic estimates. `after`: where it stands, so that the value of the last token has
            seen the whole sample, which is what a reward model scores.
    """

    OUTPUTS = ("values",)

    def __init__(
        self,
        inner: PreTrainedModel,
        reads: Literal["before", "after"],
        rows: Rows = Rows.PACKED,
    ) -> None:
        super().__init__(inner, rows)
        self.shift = 1 if reads == "after" else 0

    @property
    def head(self) -> nn.Module:
        return self.inner.score

    def forward(self, samples: PackedSamples) -> dict[str, torch.Tensor]:
        """`values` of the response tokens."""
        hidden = self.hidden(samples).index_select(0, samples.predictors + self.shift)
        return {"values": self.head(hidden).sum(1).float()}  # one column; FSDP wants no view


def _log_probs(
    head: nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocabulary: Vocabulary | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An output embedding's answer in place of logits; see `token_log_probs`."""
    return token_log_probs(hidden, head.weight, targets, temperature, vocabulary)
