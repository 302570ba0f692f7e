"""ModelTrial: a small copy of a model beside transformers' own, by which it is tried whether the
model may be packed, cut or divided: by what it computes, not by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.models.language_model import (
    build_language_model,
    build_meta_language_model,
    decoder_of,
)
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.shrunk_config import SHRUNK_VOCABULARY, shrink_config

TOLERANCE = 1e-3
"""Of a log-probability. Rounding is below 1e-4, what is wrong above 1e-2."""
MOST_PARAMETERS = 50_000_000
"""A copy with more would cost seconds."""


@contextmanager
def trial_seed() -> Iterator[None]:
    """Make random numbers the same for every trial inside the block; those of the process stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class ModelTrial:
    """Two models of the same random weights, and samples for them.

    Args:
        config: Of the model; see `shrink_config` for the architecture of the copies.
        lengths: Tokens of the samples.
        scalar: The model has a scalar head instead of logits.
        cut: See `shrink_config`.

    Attributes:
        model: With packed attention, to be packed, cut or divided.
        reference: As transformers has it, with eager attention.
        samples: Token ids of each.
    """

    @torch.no_grad()
    def __init__(
        self, config: PretrainedConfig, lengths: Sequence[int], scalar: bool = False, **cut: int
    ) -> None:
        self.samples = [torch.randint(SHRUNK_VOCABULARY, (length,)) for length in lengths]
        small = shrink_config(config, **cut)
        if scalar:
            small.num_labels = 1
        meta = build_meta_language_model(small, scalar=scalar, attn_implementation="eager")
        if (size := sum(p.numel() for p in meta.parameters())) > MOST_PARAMETERS:
            raise ValueError(f"it would still have {size:,} parameters")
        options = {"scalar": scalar, "dtype": torch.float32}
        self.model, self.reference = (
            build_language_model(small, attn_implementation=attention, **options).eval()
            for attention in (PACKED_ATTENTION, "eager")
        )
        for parameter in self.model.parameters():  # biases, norms, caps and scales must matter, too
            if parameter.ndim > 1:
                parameter *= 5
            else:
                parameter += 0.3 * torch.randn_like(parameter)
        self.reference.load_state_dict(self.model.state_dict())

    def batch(self) -> Batch:
        """Return the samples as rows to learn from: the first token of each is its prompt."""
        bounds = torch.tensor([0, *(len(sample) - 1 for sample in self.samples)]).cumsum(0)
        ones = torch.ones(int(bounds[-1]))
        return Batch.from_columns(
            {
                "prompt_ids": [sample[:1] for sample in self.samples],
                "response_ids": [sample[1:] for sample in self.samples],
                "response_mask": RaggedColumn(ones.bool(), bounds),
                "loss_weights": RaggedColumn(ones, bounds),
            }
        )

    def reference_outputs(self) -> Tensor:
        """Return what transformers says of each sample alone: log-probabilities of its tokens after
        the first, or the values before these. Gradients flow through it."""
        return torch.cat([self._alone(sample[None]) for sample in self.samples])

    def _alone(self, row: Tensor) -> Tensor:
        model = self.reference
        if model.get_output_embeddings() is None:
            states = decoder_of(model)(row, use_cache=False).last_hidden_state
            return model.score(states[0, :-1])[:, 0]
        scores = torch.log_softmax(model(row, use_cache=False).logits[0, :-1], 1)
        return scores.gather(1, row[0, 1:, None])[:, 0]
