"""RewardWorker: scores samples by the user's functions, by a judge and by a reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from hybridrl.algorithms import TokenSegments
from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import (
    MASKS,
    OUTCOMES,
    SOURCE_COLUMN,
    Batch,
    is_right,
    is_user_column,
    sampled_tokens,
)
from hybridrl.config.schema import ActorConfig, CacheConfig, RewardConfig
from hybridrl.config.setting import Setting
from hybridrl.controller import THREE_D, WorkerContext, transfer
from hybridrl.errors import RewardError
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.rewards.builtin_rewards import QUICK_FUNCTIONS
from hybridrl.rewards.loading import needs_groups, resolve_functions
from hybridrl.rewards.response_steps import count_tokens_up_to, step_ends
from hybridrl.rewards.returned_scores import StepRewards
from hybridrl.rewards.signature import TOKEN_IDS_ENTRY, UPDATES_ENTRY
from hybridrl.rewards.source_pools import SourceRewardPools, resolve_source_settings
from hybridrl.rollout.rollout_engine import ragged
from hybridrl.system.content_cache import open_cache
from hybridrl.workers.generation import report_column_sums
from hybridrl.workers.llm_judge import JudgeSetup, LLMJudge
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.training_engines import ModelSource, build_scalar_engine

SCORE_COLUMN = {"reward": "scores", "cost": "costs"}
"""The column of what is maximized (reward), and of what is to stay below a limit (cost)."""

SCORE_PROTOCOL = replace(THREE_D, balance="rows")
"""Rows split over ranks in blocks, which is how generation left them: texts need not move."""


STEP_COLUMNS = ("step_ends", "step_rewards")
"""Further columns where rewards come step by step: of each step how many response tokens there are
up to its end, and its reward."""


class ScoredSources(NamedTuple):
    """The reward functions of rows whose sources have their own.

    Attributes:
        names: Values of the column `source` that figures are told apart by.
        functions: Of sources that have others than the settings of the reward say.
        verifiers: By the names of sets to evaluate on: functions that score those.
    """

    names: Sequence[str] = ()
    functions: Mapping[str, Sequence[str]] = {}
    verifiers: Mapping[str, RewardConfig] = {}


def _is_reward_input(column: str) -> bool:
    beside = ("prompt_ids", "episode_rewards", "group_id", "policy_version", *MASKS)
    return column in beside or is_user_column(column)


def _list_returned_columns(built: Mapping[str, Any]) -> list[str]:
    outcomes = [OUTCOMES] if built["kind"] == "reward" else []
    steps = STEP_COLUMNS if built.get("steps") else ()
    return ["response", SCORE_COLUMN[built["kind"]], *outcomes, *steps]


def _list_optional_columns(built: Mapping[str, Any]) -> list[str]:
    config: RewardConfig | None = built.get("config")
    return [f"{built['kind']}/*", *(["check/*"] if config is not None and config.check else [])]


def _list_function_settings(built: Mapping[str, Any]) -> list[RewardConfig]:
    """List the settings of the functions, one for each source that has its own."""
    config: RewardConfig | None = built.get("config")
    if config is None:
        return []
    names, functions, _ = built.get("sources") or ScoredSources()
    return list(resolve_source_settings(config, functions, names).values())


def _has_group_scores(built: Mapping[str, Any]) -> bool:
    """Return whether the samples of a prompt are scored together."""
    config: RewardConfig | None = built.get("config")
    ranks = config is not None and config.judge.path is not None and config.judge.mode == "rank"
    return ranks or any(map(needs_groups, _list_function_settings(built)))


class RewardWorker(ModelWorker):
    """A worker that scores the rows of its rank: by functions, in child processes so that none can
    stop the job, by a judge and by a model, if there are any.

    A model that is cut over ranks is computed by all of them; functions and the judge are asked by
    the one rank that answers for those rows.

    Args:
        config: Functions, weights, time-outs.
        tokenizer: Folder or hub name.
        model: The reward model.
        model_config: Its micro-batch budget and offload.
        judge: What grades in words.
        kind: What the score is: a reward or a cost.
        sources: The sources of rows, and sets to evaluate on.
        steps: Whether rewards of steps are told of, in the columns `STEP_COLUMNS`.
        cache: Of verdicts and of the judge's answers; None: there is none.
    """

    def __init__(
        self,
        context: WorkerContext,
        config: RewardConfig,
        tokenizer: str,
        model: ModelSource | None,
        model_config: ActorConfig,
        judge: JudgeSetup | None,
        kind: Literal["reward", "cost"],
        sources: ScoredSources | None = None,
        steps: bool = False,
        cache: CacheConfig | None = None,
    ) -> None:
        super().__init__(context)
        self._sources, own_functions, self._verifiers = sources or ScoredSources()
        self._pools: dict[str, SourceRewardPools] = {}
        self._caches = {kind: open_cache(cache, kind) for kind in ("verdicts", "judgements")}
        self._steps = steps
        self._config = config
        self._kind = kind
        self._answers = True
        if model is not None:
            engine = build_scalar_engine(context, model, model_config, "after", trains=False)
            self.model_engine, mesh = engine, engine.mesh.mesh
            places = [mesh.coordinates(rank) for rank in range(mesh.size)]
            self._answers = SCORE_PROTOCOL.speaks(context.rank, places)
        self._group = Setting(kind)
        settings = resolve_source_settings(config, own_functions, self._sources, self._group)
        self._pool = None
        if self._answers and any(resolve_functions(one)[0] for one in settings.values()):
            self._pool = SourceRewardPools(settings, self._group, self._caches["verdicts"])
        self._tokenizer = load_tokenizer(tokenizer)
        self._judge = None
        if judge is not None:
            self._judge = LLMJudge(
                *(context, judge, config.judge, self._group / "judge", self._caches["judgements"])
            )
        if self._pool is not None:
            self._pool.start()

    @classmethod
    def runs_beside(cls, keywords: Mapping[str, Any]) -> bool:
        # A class of the user's may use a device, and says so itself if it does not.
        if cls is not RewardWorker:
            return super().runs_beside(keywords)
        return keywords.get("model") is None and keywords.get("judge") is None

    @classmethod
    def is_quick(cls, keywords: Mapping[str, Any]) -> bool:
        """Return whether all functions are `QUICK_FUNCTIONS`, or there are none."""
        each = map(resolve_functions, _list_function_settings(keywords))
        return all(QUICK_FUNCTIONS.issuperset(functions) for functions, _ in each)

    @property
    def takes_memory(self) -> bool:
        return self.model_engine is not None or self._judge is not None

    @transfer(
        SCORE_PROTOCOL,
        reads=("response_ids",),
        may_read=_is_reward_input,
        makes=_list_returned_columns,
        may_make=_list_optional_columns,
        streams=True,
        copies_together=_has_group_scores,
    )
    def compute_reward(self, batch: Batch, verifier: str | None = None) -> Batch:
        """`scores` and `outcomes`, or `costs` (NaN: dropped), the `response` as text, and a column
        for each function and the model.

        Args:
            verifier: A set to evaluate on whose own functions score in place of all others.
        """
        if verifier is not None:
            return self._verified(batch, verifier)
        with self.phase("score"):
            # First: all ranks of a cut model take part in it, also should a function fail on one.
            engine = self.model_engine
            by_model = None if engine is None else engine.forward(batch).ragged("values")
            ids, texts = self._responses(batch)
            scores = torch.zeros(len(batch), dtype=torch.float32)
            if not self._answers:
                return self._answer(texts, scores, scores, [[] for _ in texts], {})
            rows, groups = _build_function_rows(batch, texts), _list_prompt_numbers(batch)
            steps: list[StepRewards] = [[] for _ in texts]
            columns: dict[str, Any] = {}
            outcomes = torch.full_like(scores, math.nan)
            if self._pool is not None:
                scores, outcomes, chars, columns = self._by_functions(
                    *(self._pool, rows, batch, ids, groups)
                )
                steps = [self._in_tokens(*found) for found in zip(chars, ids, strict=True)]
            if self._judge is not None:
                columns[f"{self._kind}/judge"] = self._graded(rows, groups)
            if by_model is not None:
                columns[f"{self._kind}/model"] = self._by_model(by_model, texts, ids, steps)
            further = {"judge": columns.get(f"{self._kind}/judge")}
            further["model"] = columns.get(f"{self._kind}/model")
            if self._kind == "reward" and "episode_rewards" in batch.columns:
                further["episodes"] = batch["episode_rewards"]
            scores, outcomes = add_up(self._config, scores, outcomes, **further)
        self._report(scores, outcomes, self._config)
        self._report_sources(batch, scores, outcomes)
        report_column_sums(self, columns)
        self._report_copies(rows, groups)
        for cache in filter(None, self._caches.values()):
            self.report_cache(cache)
        return self._answer(texts, scores, outcomes, steps, columns)

    def _verified(self, batch: Batch, verifier: str) -> Batch:
        """Score as `compute_reward` does, by the functions of an evaluation set, in processes that
        start when they are first needed and stay."""
        config = self._verifiers[verifier]
        with self.phase("score"):
            ids, texts = self._responses(batch)
            scores = outcomes = torch.zeros(len(batch), dtype=torch.float32)
            columns: dict[str, Any] = {}
            if self._answers:
                if verifier not in self._pools:
                    group = Setting("eval.sets") / verifier / "reward"
                    self._pools[verifier] = SourceRewardPools(
                        {None: config}, group, self._caches["verdicts"]
                    )
                rows, groups = _build_function_rows(batch, texts), _list_prompt_numbers(batch)
                scores, outcomes, _, columns = self._by_functions(
                    *(self._pools[verifier], rows, batch, ids, groups)
                )
                scores, outcomes = add_up(config, scores, outcomes)
                self._report(scores, outcomes, config)
        return self._answer(texts, scores, outcomes, [[] for _ in texts], columns)

    def _responses(self, batch: Batch) -> tuple[list[list[int]], list[str]]:
        """Return the token ids and the texts of the responses."""
        ids = [row.tolist() for row in batch["response_ids"].rows()]
        # (transformers decodes no rows to one text)
        return ids, self._tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []

    def _answer(
        self,
        texts: list[str],
        scores: torch.Tensor,
        outcomes: torch.Tensor,
        steps: list[StepRewards],
        columns: dict[str, Any],
    ) -> Batch:
        found: dict[str, Any] = {"response": texts, SCORE_COLUMN[self._kind]: scores}
        if self._kind == "reward":
            found[OUTCOMES] = outcomes
        if self._steps:
            ends = ragged([[end for end, _ in row] for row in steps], np.int64)
            rewards = ragged([[reward for _, reward in row] for row in steps], np.float32)
            found |= zip(STEP_COLUMNS, (ends, rewards), strict=True)
        return Batch.from_columns(found | columns)

    def _in_tokens(self, steps: StepRewards, ids: list[int]) -> StepRewards:
        """Convert the ends of steps from characters to tokens."""
        if not (self._steps and ids and steps):
            return []
        ends = count_tokens_up_to([end for end, _ in steps], ids, self._decoded)
        return [(end, reward) for end, (_, reward) in zip(ends, steps, strict=True)]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _by_model(
        self, values: RaggedColumn, texts: list[str], ids: list[list[int]], steps: list[StepRewards]
    ) -> torch.Tensor:
        """Return the reward model's score of each row, `[rows]`: its value at the last token; or
        with `reward.model_steps` the sum of those at the ends of steps, which are added to the
        `steps`, weighted."""
        if self._config.model_steps is None:
            return TokenSegments.from_cu_seqlens(values.cu_seqlens).last(values.values)
        total = torch.zeros(len(texts), dtype=torch.float32)
        for number, (said, text, tokens) in enumerate(zip(values.rows(), texts, ids, strict=True)):
            if not tokens:
                continue
            chars = step_ends(text, self._config.model_steps)
            ends = [*count_tokens_up_to(chars[:-1], tokens, self._decoded), len(tokens)]
            found = [(end, float(said[end - 1])) for end in dict.fromkeys(ends)]
            total[number] = sum(value for _, value in found)
            weight = self._config.model_weight
            steps[number] = sorted([*steps[number], *((end, weight * v) for end, v in found)])
        return total

    def close(self) -> None:
        for pool in (self._pool, *self._pools.values()):
            if pool is not None:
                pool.close()
        if self._judge is not None:
            self._judge.close()

    def _graded(self, rows: list[dict[str, Any]], groups: list[int] | None) -> torch.Tensor:
        """Return the judge's grades; missing ones are treated as `on_error` says."""
        grades = self._judge.grade(rows, groups)  # type: ignore[union-attr]
        missing = torch.isnan(grades)
        self.report(**{f"{self._kind}_ungraded": float(missing.sum())})
        if missing.any() and self._config.on_error == "fail":
            raise RewardError(
                f"The judge gave {int(missing.sum())} of {len(rows)} responses no grade that "
                f"`{self._group}.judge.pattern` ({self._judge.pattern}) finds. Mend the pattern or "  # type: ignore[union-attr]
                f"the template, or set `{self._group}.on_error` to `drop` or `value`."
            )
        if self._config.on_error == "value":
            grades = grades.nan_to_num(self._config.error_value)
        return grades

    def _by_functions(
        self,
        pool: SourceRewardPools,
        rows: list[dict[str, Any]],
        batch: Batch,
        ids: list[list[int]],
        groups: list[int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[StepRewards], dict[str, Any]]:
        """Scores, the same without steps (NaN where there are only those), the steps by characters,
        and a column for each function."""
        updates = batch["policy_version"].tolist() if "policy_version" in batch else None
        if pool.asks_for(TOKEN_IDS_ENTRY):
            rows = [{**row, TOKEN_IDS_ENTRY: tokens} for row, tokens in zip(rows, ids, strict=True)]
        if updates is not None and pool.asks_for(UPDATES_ENTRY):
            rows = [
                {**row, UPDATES_ENTRY: number} for row, number in zip(rows, updates, strict=True)
            ]
        found = pool.score(rows, self.progress, groups=groups)
        self.report(
            **{
                f"{self._kind}_failures": found.failures,
                f"{self._kind}_timeouts": found.timeouts,
            }
        )
        if found.first_failure is not None:
            self.record.notices.append(found.first_failure)
        columns = {
            name.replace("reward/", f"{self._kind}/", 1): column
            for name, column in found.columns.items()
        }
        scores, outcomes = (
            torch.tensor(x, dtype=torch.float32) for x in (found.scores, found.outcomes)
        )
        return scores, outcomes, found.steps, columns

    def _report(self, scores: torch.Tensor, outcomes: torch.Tensor, config: RewardConfig) -> None:
        report_column_sums(self, {self._kind: scores.tolist()})
        right = int(is_right(outcomes, config.correct_at).sum())
        dropped = int(scores.isnan().sum())
        self.report(**{f"{self._kind}_dropped": dropped, f"{self._kind}_correct": right})

    def _report_copies(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int] | None
    ) -> None:
        """Report how many responses repeat an earlier one to the same prompt, among those scored
        together. Prompts without a text are told apart by their numbers."""
        if self._kind == "reward" and rows:
            numbers: Sequence[int | None] = groups or [None] * len(rows)
            different = {
                (row.get("prompt", number), row["response"])
                for row, number in zip(rows, numbers, strict=True)
            }
            self.report(repeated=float(len(rows) - len(different)))

    def _report_sources(self, batch: Batch, scores: torch.Tensor, outcomes: torch.Tensor) -> None:
        """Report sums over the rows of each source, for its metrics of the step."""
        if self._kind != "reward" or not self._sources or SOURCE_COLUMN not in batch.columns:
            return
        of_rows, lengths = batch[SOURCE_COLUMN], sampled_tokens(batch)
        for name in self._sources:
            mine = [place for place, source in enumerate(of_rows) if source == name]
            known = [s for s in (float(scores[place]) for place in mine) if not math.isnan(s)]
            figures = {
                "count": len(known),
                "sum": sum(known),
                "correct": int(is_right(outcomes[mine], self._config.correct_at).sum()),
                "samples": len(mine),
                "tokens": int(lengths[mine].sum()),
            }
            self.report(**{f"source/{name}/{figure}": x for figure, x in figures.items()})


def add_up(
    config: RewardConfig,
    scores: torch.Tensor,
    outcomes: torch.Tensor,
    judge: torch.Tensor | None = None,
    model: torch.Tensor | None = None,
    episodes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and outcomes, `[rows]`, NaN where a sample is dropped.

    Args:
        scores, outcomes: Of functions; an outcome is NaN where they gave rewards of steps only,
            which decide what is right if nothing else does.
        judge, model, episodes: What these gave, before weights; None: there is none.
    """
    by_steps = model is not None and config.model_steps is not None
    of_model = None if model is None else config.model_weight * model
    said = (None if judge is None else config.judge.weight * judge, of_model, episodes)
    scores = sum((one for one in said if one is not None), scores)
    whole = [one for one in said if one is not None and not (by_steps and one is of_model)]
    if whole:
        outcomes = sum(whole, outcomes.nan_to_num())
    outcomes = torch.where(outcomes.isnan(), scores, outcomes)
    return scores, torch.where(scores.isnan(), scores, outcomes)


def _list_prompt_numbers(batch: Batch) -> list[int] | None:
    """Return the prompt number of each row; None where it is not known."""
    return batch["group_id"].tolist() if "group_id" in batch else None


def _build_function_rows(batch: Batch, texts: list[str]) -> list[dict[str, Any]]:
    """Return the rows, with their responses, that reward functions are called with."""
    rows = batch.rows_for_users()
    for row, text in zip(rows, texts, strict=True):
        row["response"] = text
    return rows
