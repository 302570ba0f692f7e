"""EpisodeGenerator: samples of several turns, between which a class of the user's answers.

While a tool runs, the engine goes on with other samples if it can; otherwise all samples take their
turns together. A response is everything after the first prompt: sampled tokens, and those that the
environment gave.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.batch.turn import Episode, Turn
from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import ConfigError
from hybridrl.rollout import user_code_loop as tool_loop
from hybridrl.rollout.episode_batch import EpisodeSample, build_episode_batch
from hybridrl.rollout.rollout_engine import EngineOutput, Request, RequestQueue, RolloutEngine
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    NumberedSamples,
    Refresh,
    SampleGenerator,
    SampleStream,
)
from hybridrl.rollout.transcript import TokenTranscript
from hybridrl.rollout.user_code_loop import CoroutineResult, UserCodeLoop
from hybridrl.system import user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_OURS = (__file__, tool_loop.__file__)


def load_episode_class(spec: str) -> Callable[[], Episode]:
    """Import the class that `rollout.episode` names, which is built without arguments for each
    sample.

    Raises:
        ConfigError: if it cannot be imported, or lacks `async def reset` or `async def step`.
    """
    found = user_code.load_user_code("rollout.episode", spec)
    if not inspect.isclass(found):
        raise ConfigError(
            f"`rollout.episode` names `{spec}`, which is a {type(found).__name__}; it must be a "
            "class."
        )
    for name in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, name, None)):
            raise ConfigError(
                f"`rollout.episode` names `{spec}`, which has no `async def {name}`. An episode "
                "has `async def reset(self, row)` and `async def step(self, response_text, "
                "response_ids)`; see hybridrl.Episode."
            )
    return found  # type: ignore[no-any-return]


class EpisodeGenerator(SampleGenerator):
    """Plays an episode for each row.

    Args:
        engine: Generates the turns.
        episode: Builds what answers them, one for each sample.
        config: Limits of turns and of calls of the user's code.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        episode: Callable[[], Episode],
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        requests: RequestQueue | None = None,
    ) -> None:
        super().__init__(engine, requests)
        self.episode = episode
        self.tokenizer = tokenizer
        self.config = config
        self.tools = UserCodeLoop(config.tool_timeout_s)
        self._logged: set[str] = set()

    def begin(self, task: GenerationTask) -> SampleStream:
        """Begin the episodes of all rows; the columns of the data go to their `reset`.

        `sampling.max_tokens` is the limit of the whole response, what the environment says
        included; `sampling.min_tokens` counts sampled tokens. A `finish_reason` is `stop` (the
        environment said `done`), `length`, `max_turns`, `tool_timeout` or `tool_error`.
        """
        return EpisodeStream(self, task)

    def close(self) -> None:
        self.tools.close()
        super().close()

    def log_once(self, error: BaseException) -> None:
        """Writes the traceback of the user's code to the log, once for each line that raises."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
        if place in self._logged:
            return
        self._logged.add(place)
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename in _OURS and frame.tb_next:
            frame = frame.tb_next  # tells the user nothing
        lines = "".join(traceback.format_exception(error.with_traceback(frame)))
        _log.error("An episode ended because `rollout.episode` raised:\n%s", lines)


@dataclass
class _Sample:
    """An episode under way."""

    transcript: TokenTranscript
    row: dict[str, Any]
    episode: Episode | None = None
    rewards: list[float] = field(default_factory=list)  # one for each turn of the model
    finish_reason: str | None = None


class EpisodeStream(SampleStream):
    """The episodes of one generation. All of it runs in the caller's thread, except for the
    coroutines of the user's."""

    def __init__(self, generator: EpisodeGenerator, task: GenerationTask) -> None:
        super().__init__(generator.requests, task.version)
        self._generator, self._tools = generator, generator.tools
        task, self._first_row = task.block()
        self._sampling, self._seeds = task.sampling, task.seeds
        self._generating = 0
        self._ended: list[int] = []  # since the last `next_samples`
        prompts = task.batch.ragged("prompt_ids").rows()
        self._samples = [
            _Sample(TokenTranscript(ids.tolist()), row)
            for ids, row in zip(prompts, task.batch.rows_for_users(), strict=True)
        ]
        self._left = len(self._samples)
        for key, sample in enumerate(self._samples):
            self._tools.submit(partial(self._reset, sample), partial(self._answered, key))

    def _collect(self, least: int, refresh: Refresh | None) -> NumberedSamples:
        continuous = self._requests.continuous
        while self._tools.pending or self._generating:
            if self._left and len(self._ended) >= least:
                break  # at the end, what closes episodes is waited for as well
            self._refresh(refresh)
            together = not continuous and self._tools.pending > 0
            self._tools.deliver(wait=together or not self._generating)
            if self._generating and (continuous or not self._tools.pending):
                for finished in self._requests.poll():
                    self._generated(finished)
        rows, self._ended = self._ended, []
        samples = [
            EpisodeSample(
                [sample.transcript], sample.rewards, sum(sample.rewards), str(sample.finish_reason)
            )
            for sample in map(self._samples.__getitem__, rows)
        ]
        numbers = np.array(rows, dtype=np.int64) + self._first_row
        keeps_sets = self._generator.engine.keeps_sets
        return build_episode_batch(samples, keeps_sets=keeps_sets), numbers

    def close(self) -> None:
        super().close()
        self._tools.forget()

    async def _reset(self, sample: _Sample) -> Turn:
        sample.episode = self._generator.episode()
        turn = await sample.episode.reset(sample.row)
        return Turn() if turn is None else _checked("reset", turn)

    async def _step(self, sample: _Sample, text: str, token_ids: list[int]) -> Turn:
        assert sample.episode is not None
        return _checked("step", await sample.episode.step(text, token_ids))

    def _generated(self, finished: EngineOutput) -> None:
        """The model has ended a turn: the environment answers, unless the turn was cut short."""
        self._generating -= 1
        sample = self._samples[finished.key]
        sample.transcript.add_sampled(self._versions.end(finished))
        sample.rewards.append(0.0)
        if finished.finish_reason == "length":
            self._end(finished.key, "length")
            return
        text = self._generator.tokenizer.decode(finished.token_ids, skip_special_tokens=True)
        step = partial(self._step, sample, text, finished.token_ids)
        self._tools.submit(step, partial(self._answered, finished.key))

    def _answered(self, key: int, outcome: CoroutineResult) -> None:
        """The environment has answered: the model goes on, unless the episode is over."""
        sample = self._samples[key]
        if outcome.timed_out:
            self._end(key, "tool_timeout")
            return
        if outcome.error is not None:
            self._generator.log_once(outcome.error)
            self._end(key, "tool_error")
            return
        turn: Turn = outcome.value
        if sample.rewards:  # otherwise it was the reset
            sample.rewards[-1] = float(turn.reward)
            if turn.done or len(sample.rewards) == self._generator.config.max_turns:
                self._end(key, "stop" if turn.done else "max_turns")
                return
        given = self._token_ids(turn)
        if len(sample.transcript) + len(given) >= self._sampling.max_tokens:
            self._end(key, "length")
            return
        sample.transcript.add_given(given)
        self._generate(key)

    def _generate(self, key: int) -> None:
        transcript, turn = self._samples[key].transcript, len(self._samples[key].rewards)
        left = self._sampling.max_tokens - len(transcript)
        limit = min(left, self._generator.config.max_turn_tokens or left)
        least = min(limit, max(0, self._sampling.min_tokens - transcript.sampled))
        sampling = replace(self._sampling, max_tokens=limit, min_tokens=least)
        seed = hash((self._seeds[key], turn)) % 2**63
        self._requests.start(Request(key, transcript.token_ids, sampling, seed))
        self._versions.begin([key])
        self._generating += 1

    def _token_ids(self, turn: Turn) -> list[int]:
        """Only the turn's own text is tokenized: what came before it stays as it was sampled."""
        if turn.token_ids is not None:
            return [int(token_id) for token_id in turn.token_ids]
        if not turn.text:
            return []
        return list(self._generator.tokenizer(turn.text, add_special_tokens=False)["input_ids"])

    def _end(self, key: int, reason: str) -> None:
        sample = self._samples[key]
        sample.finish_reason = reason
        self._ended.append(key)
        self._left -= 1
        close = getattr(sample.episode, "close", None)
        if close is not None:
            self._tools.submit(close, self._closed)

    def _closed(self, outcome: CoroutineResult) -> None:
        if outcome.error is not None:
            self._generator.log_once(outcome.error)


def _checked(method: str, turn: Any) -> Turn:
    if not isinstance(turn, Turn):
        raise TypeError(
            f"`{method}` of `rollout.episode` returned a {type(turn).__name__}; it must return a "
            "hybridrl.Turn."
        )
    return turn
