"""Evaluation sets with their loaded prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config
from hybridrl.data.datasets import load_eval_prompts
from hybridrl.data.held_out import sample_batch_rows
from hybridrl.data.job_data import longest
from hybridrl.data.row_origin import RowOrigin
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name
from hybridrl.evaluation.answer_extraction import AnswerExtractor, resolve_extractor
from hybridrl.evaluation.eval_sets import ResolvedEvalSet, resolve_eval_sets
from hybridrl.rewards.loading import parse_function_list
from hybridrl.rollout import SamplingSettings


@dataclass(frozen=True)
class LoadedEvalSet:
    """An evaluation set of `eval.sets` with its prompts.

    Attributes:
        settings: As they stand, with all that is left out filled in.
        rows: Tokenized prompts; None: the set is a function without data.
        training: How samples are drawn while training.
    """

    settings: ResolvedEvalSet
    rows: Batch | None
    training: SamplingSettings

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def sampling(self) -> SamplingSettings:
        """The sampling parameters of the set."""
        return resolve_set_sampling(self.settings, self.training)

    @cached_property
    def extract(self) -> AnswerExtractor:
        """The function that extracts the answer of a response."""
        settings = self.settings
        functions = parse_function_list(settings.reward.function)
        return resolve_extractor(f"{settings.setting}.extract", settings.own.extract, functions)

    @property
    def verifier(self) -> str | None:
        """The name under which reward workers know the set's own functions; None if it uses those
        of the job."""
        return self.name if self.settings.is_verified else None


def resolve_set_sampling(settings: ResolvedEvalSet, training: SamplingSettings) -> SamplingSettings:
    """Resolve the sampling parameters of a set: those of training where it sets none."""
    own = settings.own
    limit = own.max_tokens or training.max_tokens
    sampling = replace(training, max_tokens=limit, min_tokens=min(training.min_tokens, limit))
    if settings.is_greedy:
        return sampling.greedy()
    named = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return replace(sampling, **{name: one for name, one in named.items() if one is not None})


def load_eval_sets(
    config: Config, tokenizer: Any, held_out: Batch | None
) -> dict[str, Batch | None]:
    """Load the prompts of the sets of `eval.sets`; None for a function that has no data.

    Args:
        held_out: The prompts of sets that name none.

    Raises:
        ConfigError, DataError: if those of a set cannot be read; names its settings.
    """
    found: dict[str, Batch | None] = {}
    rows: Batch | None
    problems = ErrorCollector()
    for name, one in resolve_eval_sets(config).items():
        by, seed = one.own.by_column, config.run.seed
        origin = RowOrigin(one.setting / "data", str(one.setting), one.setting / "prompts")
        with problems.noted():
            if one.data is not None:
                rows = load_eval_prompts(
                    one.data, tokenizer, number=one.prompts, seed=seed, origin=origin
                )
            elif one.own.function is not None:
                rows = held_out
            elif held_out is None:
                raise ConfigError(
                    f"{one.setting} names no data, and none of the job's own rows are held out. "
                    f"Set {one.setting}.data.path=<file>."
                )
            else:
                rows = sample_batch_rows(held_out, one.prompts, seed)
            if by is not None and rows is not None and by not in rows.columns:
                raise ConfigError(
                    f"{one.setting}.by_column is `{by}`, but its rows have no such column; they "
                    f"have {', '.join(rows.columns)}.{suggest_name(by, rows.columns)}"
                )
            found[name] = rows
    problems.raise_if_any()
    return found


def longest_evaluated(config: Config, sets: Mapping[str, Batch | None]) -> int:
    """Return the tokens of the longest prompt of the sets with its response; 0 without sets."""
    found = 0
    for name, one in resolve_eval_sets(config).items():
        rows, response = sets[name], one.own.max_tokens or config.rollout.max_tokens
        prompt = config.data.max_prompt_tokens if rows is None else longest([rows], "prompt_ids")
        found = max(found, prompt + response)
    return found
