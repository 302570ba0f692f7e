"""Transformers models that return numbers for every response token of packed samples."""

from __future__ import annotations

from functools import cached_property
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridrl.models.language_model import decoder_of
from hybridrl.models.log_probs import VocabularyShard, soft_cap_of, token_log_probs
from hybridrl.models.packed_samples import PackedSamples, SampleLayout
from hybridrl.models.teacher_kl import find_top_tokens, teacher_kl_loss

_TOP_IDS, _TOP_LOG_PROBS = "top_ids", "top_log_probs"


class PackedModel(nn.Module):
    """A transformers model with packed attention whose head returns numbers for response tokens.

    The head is applied inside this module's forward, and by a method of its own (`log_probs`, or
    its forward), so that a sharded model has gathered it.

    Attributes:
        OUTPUTS: Names of what `forward` gives, each `[response tokens]` in float32.
        rows: How its samples are laid out.
        shift: So many places after a response token's predictor it is read: 1 where the token
            itself stands.
        multiple: Its rows have a multiple of so many tokens, see `PackedSamples.of`.
    """

    OUTPUTS: ClassVar[tuple[str, ...]]
    shift: int = 0
    multiple: int = 1

    def __init__(self, inner: PreTrainedModel, rows: SampleLayout = SampleLayout.PACKED) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows
        for module in inner.modules():
            if isinstance(module, nn.Dropout):  # a sample's log-probabilities have to stay the same
                module.p = 0.0

    @property
    def head(self) -> nn.Module:
        """The part of the model that is applied to the last hidden states."""
        raise NotImplementedError

    def shapes(self, **options: Any) -> dict[str, tuple[int, ...]]:
        """Return the names of `forward`'s outputs for these options, with shapes for a token."""
        return dict.fromkeys(self.OUTPUTS, ())

    @cached_property
    def _decoder(self) -> PreTrainedModel:
        return decoder_of(self.inner)

    def hidden(self, samples: PackedSamples) -> torch.Tensor:
        """Return the last hidden states, `[tokens, hidden]` of all rows."""
        ids = samples.input_ids
        return self._decoder(
            input_ids=ids,
            position_ids=samples.packing.position_ids(ids.numel()).view(ids.shape),
            packing=samples.packing,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)


class CausalPolicy(PackedModel):
    """A causal language model that returns log-probabilities. The output embedding is applied in
    chunks: `[tokens, vocabulary]` logits never exist."""

    OUTPUTS = ("log_probs", "entropy")
    vocabulary: VocabularyShard | None = None
    """The part of the vocabulary that this rank has, where it is cut."""

    def __init__(self, inner: PreTrainedModel, rows: SampleLayout = SampleLayout.PACKED) -> None:
        super().__init__(inner, rows)
        self.head.log_probs = MethodType(_log_probs, self.head)  # type: ignore[assignment]
        self.head.soft_cap = soft_cap_of(inner.config)

    @property
    def head(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def shapes(self, top_k: int = 0, **options: Any) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.OUTPUTS, ())
        if top_k:
            width = min(top_k, self.inner.config.get_text_config().vocab_size)
            found |= {_TOP_IDS: (width,), _TOP_LOG_PROBS: (width,)}
        return found

    def forward(
        self,
        samples: PackedSamples,
        temperature: float = 1.0,
        *,
        top_k: int = 0,
        kind: str = "reverse",
    ) -> dict[str, torch.Tensor]:
        """Return `log_probs` of response tokens and `entropy` of the distribution sampled from:
        over the tokens that were kept, where the samples say which (`kept_sets`).

        Args:
            top_k: With a number, so many `top_ids` and `top_log_probs` besides, of the likeliest
                tokens in the place of each.
            kind: Where the samples have `candidates`, of the `teacher_kl_loss` that is given
                besides: see `hybridrl.models.teacher_kl`.
        """
        hidden = self.hidden(samples).index_select(0, samples.predictors)
        (width,) = self.shapes(top_k).get(_TOP_IDS, (0,))
        found: dict[str, torch.Tensor] = self.head.log_probs(
            hidden, samples, temperature, self.vocabulary, width, kind
        )
        return found


class ScalarModel(PackedModel):
    """A model with a scalar head, as transformers' sequence classification with one label.

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
        rows: SampleLayout = SampleLayout.PACKED,
    ) -> None:
        super().__init__(inner, rows)
        self.shift = 1 if reads == "after" else 0

    @property
    def head(self) -> nn.Module:
        return self.inner.score

    def forward(self, samples: PackedSamples) -> dict[str, torch.Tensor]:
        """Return the `values` of the response tokens."""
        # One column; FSDP wants no view.
        return {"values": self.head(self.read_states(samples)).sum(1).float()}

    def read_states(self, samples: PackedSamples) -> torch.Tensor:
        """Return the states that the head reads, `[response tokens, hidden]`: before each token or,
        with `shift`, after it."""
        places = samples.places if self.shift else samples.predictors
        return self.hidden(samples).index_select(0, places)


class FeatureModel(ScalarModel):
    """A scalar model whose head has several outputs, the reward features of each token."""

    def shapes(self, **options: Any) -> dict[str, tuple[int, ...]]:
        return {"values": (self.inner.config.num_labels,)}

    def forward(self, samples: PackedSamples) -> dict[str, torch.Tensor]:
        """Return the `values` of the response tokens, `[response tokens, features]`."""
        return {"values": self.head(self.read_states(samples)).float()}


def _log_probs(
    head: nn.Linear,
    hidden: torch.Tensor,
    samples: PackedSamples,
    temperature: float,
    vocabulary: VocabularyShard | None,
    top_k: int,
    kind: str,
) -> dict[str, torch.Tensor]:
    """Compute the outputs of `CausalPolicy.forward` in the output embedding, in place of logits."""
    weight, cut = head.weight, (temperature, vocabulary, head.soft_cap)
    log_probs, entropy = token_log_probs(hidden, weight, samples.targets, *cut, samples.kept)
    found = {"log_probs": log_probs, "entropy": entropy}
    if samples.candidates is not None:
        found["divergence"] = teacher_kl_loss(hidden, weight, samples.candidates, kind, *cut)
    if top_k:
        ids, best = find_top_tokens(hidden, weight, top_k, *cut)
        found |= {_TOP_IDS: ids.float(), _TOP_LOG_PROBS: best}
    return found
