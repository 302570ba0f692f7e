"""Sets of prompts to evaluate on, loaded, and how answers to them are sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.batch.batch import Batch
from hybridrl.config.eval_sets import SetSettings
from hybridrl.evaluation.answer_extraction import Extract, extraction
from hybridrl.rewards import function_list
from hybridrl.rollout import Sampling


@dataclass(frozen=True)
class EvalSet:
    """A set of `eval.sets`.

    Attributes:
        settings: As they stand, with all that is left out filled in.
        rows: Tokenized prompts; None: the set is a function without data.
        training: How samples are drawn while training.
    """

    settings: SetSettings
    rows: Batch | None
    training: Sampling

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def sampling(self) -> Sampling:
        """How its answers are drawn."""
        return sampling_of(self.settings, self.training)

    @cached_property
    def extract(self) -> Extract:
        """How the answer of a response is found."""
        settings = self.settings
        functions = function_list(settings.reward.function)
        return extraction(f"{settings.setting}.extract", settings.own.extract, functions)

    @property
    def verifier(self) -> str | None:
        """By which reward workers know its functions; None: it has none of its own."""
        return self.name if self.settings.is_verified else None


def sampling_of(settings: SetSettings, training: Sampling) -> Sampling:
    """How a set's answers are drawn: as while training, where it says nothing."""
    own = settings.own
    limit = own.max_tokens or training.max_tokens
    sampling = replace(training, max_tokens=limit, min_tokens=min(training.min_tokens, limit))
    if settings.is_greedy:
        return sampling.greedy()
    return replace(
        sampling,
        temperature=training.temperature if own.temperature is None else own.temperature,
        top_p=training.top_p if own.top_p is None else own.top_p,
        top_k=training.top_k if own.top_k is None else own.top_k,
    )
