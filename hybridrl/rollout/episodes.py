"""EpisodeRollout: samples of several turns, with an environment or tools of the user's in between.

It stands around any rollout engine. While a tool runs, the engine goes on with other samples if it
can; otherwise all samples take their turns together. A response is everything after the first
prompt: sampled tokens, and those that the environment gave.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridrl.core.batch import Batch
from hybridrl.core.turn import Episode, Turn
from hybridrl.rollout import tool_loop
from hybridrl.rollout.base import (
    Finished,
    Request,
    RolloutEngine,
    Sampling,
    ragged,
    responses,
    row_seeds,
)
from hybridrl.rollout.tool_loop import Outcome, ToolLoop
from hybridrl.rollout.transcript import Transcript
from hybridrl.rollout.weights import Pieces, WeightWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_OURS = (__file__, tool_loop.__file__)


class EpisodeRollout(RolloutEngine):
    """Plays an episode for each row.

    Args:
        engine: Generates the turns.
        episode: Builds what answers them, one for each sample.
        max_turns: Most turns of the model in a sample.
        max_turn_tokens: Longest of them; None: as long as the whole response may be.
        tool_timeout_s: Longest time for one call of the user's code.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        episode: Callable[[], Episode],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_turns: int,
        max_turn_tokens: int | None,
        tool_timeout_s: float,
    ) -> None:
        super().__init__()
        self._engine = engine
        self.episode = episode
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.max_turn_tokens = max_turn_tokens
        self.tools = ToolLoop(tool_timeout_s)
        self._logged: set[str] = set()

    def generate(self, batch: Batch, sampling: Sampling, seed: int | Sequence[int]) -> Batch:
        """Plays the episodes of all rows; the columns of the data go to their `reset`.

        `sampling.max_tokens` is the limit of the whole response, what the environment says
        included; `sampling.min_tokens` counts sampled tokens.

        Returns:
            Besides `response_ids`, `rollout_log_probs` (0.0 where nothing was sampled) and
            `finish_reason`: `response_mask` (1 where a token was sampled), `turns` (of the model),
            `turn_rewards` (one for each of them) and `episode_rewards` (their sum). A
            `finish_reason` is `stop` (the environment said `done`), `length`, `max_turns`,
            `tool_timeout` or `tool_error`.
        """
        seeds = row_seeds(seed, len(batch))
        playing = _Episodes(self, self._engine, sampling, seeds)
        try:
            samples = playing.play(batch)
        finally:
            self._engine.cancel()
            self.tools.forget()
        transcripts = [sample.transcript for sample in samples]
        rewards = [sample.rewards for sample in samples]
        return responses(
            [transcript.response_ids for transcript in transcripts],
            [transcript.log_probs for transcript in transcripts],
            [str(sample.finish_reason) for sample in samples],
        ).with_columns(
            {
                "response_mask": ragged([t.mask for t in transcripts], torch.uint8),
                "turns": torch.tensor([len(row) for row in rewards], dtype=torch.int64),
                "turn_rewards": ragged(rewards, torch.float32),
                "episode_rewards": torch.tensor([sum(r) for r in rewards], dtype=torch.float32),
            }
        )

    def counts(self) -> dict[str, int]:
        return self._engine.counts()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._engine.load(weights)

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> Pieces | None:
        return self._engine.pieces(shapes)

    def writer(self) -> WeightWriter:
        return self._engine.writer()

    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        return self._engine.differences(weights)

    def wake(self) -> None:
        self._engine.wake()

    def sleep(self) -> None:
        self._engine.sleep()

    @property
    def awaits_weights(self) -> bool:
        return self._engine.awaits_weights

    @property
    def keeps_weights(self) -> bool:
        return self._engine.keeps_weights

    @property
    def takes_adapters(self) -> bool:
        return self._engine.takes_adapters

    def close(self) -> None:
        self.tools.close()
        self._engine.close()

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

    transcript: Transcript
    row: dict[str, Any]
    episode: Episode | None = None
    rewards: list[float] = field(default_factory=list)  # one for each turn of the model
    finish_reason: str | None = None


class _Episodes:
    """The episodes of one call of `generate`. All of it runs in the caller's thread, except for
    the coroutines of the user's."""

    def __init__(
        self, rollout: EpisodeRollout, engine: RolloutEngine, sampling: Sampling, seeds: list[int]
    ) -> None:
        self._rollout = rollout
        self._tools = rollout.tools
        self._engine = engine
        self._sampling = sampling
        self._seeds = seeds
        self._samples: list[_Sample] = []
        self._generating = 0

    def play(self, batch: Batch) -> list[_Sample]:
        """Plays to the end of every episode."""
        prompts = batch.ragged("prompt_ids").rows()
        self._samples = [
            _Sample(Transcript(ids.tolist()), row)
            for ids, row in zip(prompts, batch.rows_for_users(), strict=True)
        ]
        for key, sample in enumerate(self._samples):
            self._tools.submit(partial(self._reset, sample), partial(self._answered, key))
        while self._tools.pending or self._generating:
            together = not self._engine.continuous and self._tools.pending > 0
            self._tools.deliver(wait=together or not self._generating)
            if self._generating and (self._engine.continuous or not self._tools.pending):
                for finished in self._engine.poll():
                    self._generated(finished)
        return self._samples

    async def _reset(self, sample: _Sample) -> Turn:
        sample.episode = self._rollout.episode()
        turn = await sample.episode.reset(sample.row)
        return Turn() if turn is None else _checked("reset", turn)

    async def _step(self, sample: _Sample, text: str, token_ids: list[int]) -> Turn:
        assert sample.episode is not None
        return _checked("step", await sample.episode.step(text, token_ids))

    def _generated(self, finished: Finished) -> None:
        """The model has ended a turn: the environment answers, unless the turn was cut short."""
        self._generating -= 1
        sample = self._samples[finished.key]
        sample.transcript.add_sampled(finished.prompt_ids, finished.token_ids, finished.log_probs)
        sample.rewards.append(0.0)
        if finished.finish_reason == "length":
            self._end(sample, "length")
            return
        text = self._rollout.tokenizer.decode(finished.token_ids, skip_special_tokens=True)
        step = partial(self._step, sample, text, finished.token_ids)
        self._tools.submit(step, partial(self._answered, finished.key))

    def _answered(self, key: int, outcome: Outcome) -> None:
        """The environment has answered: the model goes on, unless the episode is over."""
        sample = self._samples[key]
        if outcome.timed_out:
            self._end(sample, "tool_timeout")
            return
        if outcome.error is not None:
            self._rollout.log_once(outcome.error)
            self._end(sample, "tool_error")
            return
        turn: Turn = outcome.value
        if sample.rewards:  # otherwise it was the reset
            sample.rewards[-1] = float(turn.reward)
            if turn.done or len(sample.rewards) == self._rollout.max_turns:
                self._end(sample, "stop" if turn.done else "max_turns")
                return
        given = self._token_ids(turn)
        if len(sample.transcript) + len(given) >= self._sampling.max_tokens:
            self._end(sample, "length")
            return
        sample.transcript.add_given(given)
        self._generate(key)

    def _generate(self, key: int) -> None:
        transcript, turn = self._samples[key].transcript, len(self._samples[key].rewards)
        left = self._sampling.max_tokens - len(transcript)
        limit = min(left, self._rollout.max_turn_tokens or left)
        least = min(limit, max(0, self._sampling.min_tokens - transcript.sampled))
        sampling = replace(self._sampling, max_tokens=limit, min_tokens=least)
        seed = hash((self._seeds[key], turn)) % 2**63
        self._engine.start(Request(key, transcript.token_ids, sampling, seed))
        self._generating += 1

    def _token_ids(self, turn: Turn) -> list[int]:
        """Only the turn's own text is tokenized: what came before it stays as it was sampled."""
        if turn.token_ids is not None:
            return [int(token_id) for token_id in turn.token_ids]
        if not turn.text:
            return []
        return list(self._rollout.tokenizer(turn.text, add_special_tokens=False)["input_ids"])

    def _end(self, sample: _Sample, reason: str) -> None:
        sample.finish_reason = reason
        close = getattr(sample.episode, "close", None)
        if close is not None:
            self._tools.submit(close, self._closed)

    def _closed(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._rollout.log_once(outcome.error)


def _checked(method: str, turn: Any) -> Turn:
    if not isinstance(turn, Turn):
        raise TypeError(
            f"`{method}` of `rollout.episode` returned a {type(turn).__name__}; it must return a "
            "hybridrl.Turn."
        )
    return turn
