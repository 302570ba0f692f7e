"""PartialStream: responses of which some stay unfinished, and some were begun in earlier steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from hybridrl.batch.begun_responses import UNFINISHED
from hybridrl.batch.kept_sets import KEPT_SETS, decode_kept_sets
from hybridrl.rollout.rollout_engine import (
    EngineOutput,
    PartialRollout,
    Request,
    RolloutEngine,
    build_response_batch,
    ragged,
)
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    NumberedSamples,
    Refresh,
    SampleStream,
    SingleTurnGenerator,
)


class PromptQuota:
    """Counts prompts that lack samples, until few enough are left.

    Args:
        groups: The prompt of each row.
        unfinished: Rows that have no complete sample yet.
        carried: How often each row was kept.
    """

    def __init__(
        self,
        groups: Sequence[int],
        unfinished: Collection[int],
        carried: Sequence[int],
        limits: PartialRollout,
    ) -> None:
        self._groups = groups
        self._lacking: dict[int, set[int]] = {}
        for row in unfinished:
            self._lacking.setdefault(groups[row], set()).add(row)
        self._due = {groups[row] for row in unfinished if carried[row] >= limits.steps}
        prompts = len(set(groups))
        # A relative tolerance: of a tiny share there is still one prompt.
        self._may_lack = prompts - math.ceil(limits.share * prompts * (1 - 1e-9))

    def is_met_with(self, row: int) -> bool:
        """Note that the sample of a row is complete, and return whether enough prompts are."""
        group = self._groups[row]
        if (rows := self._lacking.get(group)) is not None:
            rows.discard(row)
            if not rows:
                del self._lacking[group]
        return self.is_met

    @property
    def is_met(self) -> bool:
        """Return whether the generation may stop."""
        return len(self._lacking) <= self._may_lack and self._due.isdisjoint(self._lacking)


class PartialStream(SampleStream):
    """The responses to a replica's own block of rows. They end when enough prompts have all their
    samples; the last samples that it gives include the unfinished ones, as they are. Which these
    are depends on no other replica, so a run that resumes keeps the same."""

    def __init__(self, engine: RolloutEngine, task: GenerationTask) -> None:
        super().__init__(engine, task.version)
        task, self._first_row = task.block()
        batch, sampling = task.batch, task.sampling
        assert sampling.partial is not None
        self._keeps_sets = engine.keeps_sets
        names = ("response_ids", "rollout_log_probs", "token_versions")
        begun = [[row.tolist() for row in batch.ragged(name).rows()] for name in names]
        self._made: list[EngineOutput] = []  # of each row, so far
        for row, (*made, reason) in enumerate(zip(*begun, batch["finish_reason"], strict=True)):
            tokens, log_probs, versions = made
            # A run that is resumed with other settings may have a lower limit than it began with.
            is_over = reason == UNFINISHED and len(tokens) >= sampling.max_tokens
            output = EngineOutput(row, [], tokens, log_probs, "length" if is_over else reason)
            self._made.append(output._replace(versions=versions))
        if engine.keeps_sets:
            rows = zip(self._made, batch.ragged(KEPT_SETS).rows(), strict=True)
            self._made = [
                one._replace(kept=next(decode_kept_sets(sets, [len(one.token_ids)])))
                for one, sets in rows
            ]
        carried = batch["carried"].tolist()
        left = [one.key for one in self._made if one.finish_reason == UNFINISHED]
        self._quota = PromptQuota(batch["group_id"].tolist(), left, carried, sampling.partial)
        self._ended = sorted(set(range(len(batch))).difference(left))  # since the last call
        prompts = batch.ragged("prompt_ids").rows()
        for row in sorted(left, key=lambda row: -carried[row]):  # the oldest first
            tokens = self._made[row].token_ids
            most, least = sampling.max_tokens - len(tokens), sampling.min_tokens - len(tokens)
            limits = replace(sampling, max_tokens=most, min_tokens=max(0, least))
            ids = prompts[row].tolist() + tokens
            self._requests.start(Request(row, ids, limits, task.seeds[row]))
            self._versions.begin([row])

    def _collect(self, least: int, refresh: Refresh | None) -> NumberedSamples:
        while len(self._ended) < least and not self._quota.is_met:
            self._refresh(refresh)
            for output in self._requests.poll(self._quota.is_met_with):
                self._continue(output)
                if output.finish_reason != UNFINISHED:
                    self._quota.is_met_with(output.key)
        if self._quota.is_met:
            for output in self._requests.interrupt():
                self._continue(output)
        rows, self._ended = self._ended, []
        done = [self._made[row] for row in rows]
        samples = build_response_batch(done, keeps_sets=self._keeps_sets)
        versions = ragged([one.versions for one in done], np.int64)
        samples = samples.with_columns({"token_versions": versions})
        return samples, np.array(rows, dtype=np.int64) + self._first_row

    def _continue(self, output: EngineOutput) -> None:
        """Append to a row's response what was generated for it now."""
        output, before = self._versions.end(output), self._made[output.key]
        if before.kept is not None and output.kept is not None:
            before.kept.extend(output.kept)
        self._made[output.key] = before._replace(
            token_ids=before.token_ids + output.token_ids,
            log_probs=before.log_probs + output.log_probs,
            versions=[*before.versions, *output.versions],
            finish_reason=output.finish_reason,
        )
        self._ended.append(output.key)


class PartialGenerator(SingleTurnGenerator):
    """Makes responses, one turn each, which stay unfinished where the sampling settings say so."""

    def begin(self, task: GenerationTask) -> SampleStream:
        if task.sampling.partial is None:
            return super().begin(task)
        return PartialStream(self.engine, task)
