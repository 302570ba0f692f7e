"""Partial rollouts: the samples of prompts that a step did not wait for continue in the next."""

from __future__ import annotations

import base64
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.batch.begun_responses import begin_rows, find_complete_groups, list_begun_columns
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.errors import ConfigError
from hybridrl.rollout import PartialRollout, SamplingSettings
from hybridrl.trainers.data_feed import DataFeed


class PartialRollouts:
    """Draws samples for steps that do not wait for the last of them (`rollout.partial`). Prompts
    are trained whole: those that lack samples are kept with all that they have, and stay with the
    workers.

    Args:
        actor: The group that generates.
        feed: Is told which prompts are kept.
    """

    def __init__(self, config: Config, actor: Any, feed: DataFeed) -> None:
        rollout = config.rollout
        self._per_prompt = rollout.samples_per_prompt
        assert rollout.partial is not None
        self._limits = PartialRollout(rollout.partial, rollout.partial_steps)
        self._actor, self._feed = actor, feed
        self._columns = list_begun_columns(rollout)
        self._kept: BatchRef | None = None

    def draw(self, prompts: BatchRef, sampling: SamplingSettings) -> BatchRef:
        """Generate for the kept prompts and for new ones, and return the samples of those that are
        complete. Waits for the generation.

        Args:
            prompts: New ones, each as often as it has samples.
        """
        fresh = begin_rows(len(prompts)).select(self._columns)
        begun = prompts | self._feed.put(fresh)
        if self._kept is not None:
            order = self._spread(len(self._kept), len(begun))
            begun = BatchRef.concat([self._kept, begun]).take(order, copies=self._per_prompt)
        sampling = replace(sampling, partial=self._limits)
        samples: BatchRef = begun | self._actor.generate_sequences(begun, sampling)
        known = samples.collect(["group_id", "finish_reason"])
        groups = known["group_id"].tolist()
        complete = find_complete_groups(groups, known["finish_reason"])
        self._kept = None
        if not complete.all():
            # Tables of their own, so that nothing else of the step stays in memory.
            rest, of = samples.take(np.flatnonzero(~complete)), sorted(prompts.columns.certain)
            copy = partial(rest.apply, on=self._actor, together=self._per_prompt)
            self._kept = copy(_keep_prompts, of, makes=of)
            self._kept |= copy(_carry, self._columns, makes=self._columns)
        self._feed.hold({g for g, done in zip(groups, complete, strict=True) if not done})
        return samples.take(np.flatnonzero(complete))

    def _spread(self, kept: int, new: int) -> np.ndarray:
        """Return the order of rows in which kept prompts are spread evenly among new ones, so that
        each replica has its part of both."""
        counts = kept // self._per_prompt, new // self._per_prompt
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        prompts = np.argsort(places, kind="stable")
        rows: np.ndarray = prompts[:, None] * self._per_prompt + np.arange(self._per_prompt)
        return rows.reshape(-1)

    def state(self) -> dict[str, Any]:
        """Return the kept samples as plain data."""
        if self._kept is None:
            return {}
        sink, table = pa.BufferOutputStream(), self._kept.collect().table
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return {"kept": base64.b64encode(sink.getvalue()).decode()}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue with the samples that `state` returned.

        Raises:
            ConfigError: if a prompt had another number of them.
        """
        if kept := (state or {}).get("kept"):
            rows = Batch(pa.ipc.open_stream(base64.b64decode(kept)).read_all())
            prompts = len(set(rows["group_id"].tolist()))
            if len(rows) != prompts * self._per_prompt:
                raise ConfigError(
                    f"rollout.samples_per_prompt={self._per_prompt}: the checkpoint has samples "
                    f"that are not finished (rollout.partial), {len(rows) // prompts} of each of "
                    f"{prompts} prompts. Resume or fork with rollout.samples_per_prompt="
                    f"{len(rows) // prompts}."
                )
            if any(name not in rows for name in self._columns):
                raise ConfigError(
                    "rollout.top_p, top_k, min_p and min_tokens: the checkpoint has samples that "
                    "are not finished (rollout.partial), and none of these was set when they "
                    "began. Resume or fork without them."
                )
            of = [name for name in rows.columns if name not in self._columns]
            self._kept = self._feed.put(rows.select(of)) | self._feed.put(
                rows.select(self._columns)
            )


def _keep_prompts(rows: Batch) -> Batch:
    return rows


def _carry(rows: Batch) -> Batch:
    return rows.with_columns({"carried": rows["carried"] + 1})
