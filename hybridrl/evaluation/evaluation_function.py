"""User-defined evaluation functions, called on the driver:

    def evaluate(generate, score, tokenizer, step, rows):
        responses = generate(["2+2=", "2+3="], temperature=0)
        return {"mean": sum(score(["2+2=", "2+3="], responses, ["4", "5"])) / 2}

They name of these five what they want.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import fault_of_name, number_of
from hybridrl.config.schema import DataConfig
from hybridrl.controller import BatchRef, WorkerGroup
from hybridrl.data.message_cells import add_system_message
from hybridrl.data.prompts import PROMPT_MESSAGES_COLUMN, tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.data.table_columns import table_of
from hybridrl.errors import ConfigError, DataError, HybridRLError, suggest_name
from hybridrl.rollout import SamplingSettings
from hybridrl.system import user_code

FUNCTION_ARGUMENTS = ("generate", "score", "tokenizer", "step", "rows")
"""What such a function may ask for, by these names."""
_PromptLike = str | list[dict[str, Any]] | Mapping[str, Any]


def check_evaluation_function(setting: str, spec: str) -> None:
    """Check that the function exists and its parameters are known, without importing its file.

    Raises:
        ConfigError: if there is no such function, or it asks for what it is not given.
    """
    user_code.check_user_code(setting, spec)
    for one in user_code.parse_parameters(setting, spec) or ():
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) or one.default is not one.empty:
            continue
        if one.name not in FUNCTION_ARGUMENTS or one.kind is one.POSITIONAL_ONLY:
            raise ConfigError(
                f"{setting}={spec} asks for `{one.name}`, and an evaluation is given by name what "
                "it wants of "
                f"{', '.join(FUNCTION_ARGUMENTS)}.{suggest_name(one.name, FUNCTION_ARGUMENTS)}"
            )


def run_evaluation_function(setting: str, spec: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Call the function; return its metrics.

    Args:
        given: Values of `FUNCTION_ARGUMENTS`.

    Raises:
        ConfigError: if it raises, or returns no figures.
    """
    function = user_code.load_user_code(setting, spec)
    wanted = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
    try:
        found = function(**{k: v for k, v in given.items() if takes_all or k in wanted})
    except HybridRLError:
        raise
    except Exception as error:  # it is the user's
        frames = error.__traceback__ and error.__traceback__.tb_next  # without this one
        lines = traceback.format_exception(type(error), error, frames)
        raise ConfigError(
            f"{setting}={spec} raised {type(error).__name__}: {error}\n{''.join(lines)}"
        ) from error
    if not isinstance(found, Mapping) or any(number_of(value) is None for value in found.values()):
        raise ConfigError(
            f"{setting}={spec} returned {found!r:.200}: it must return a dictionary of names and "
            "numbers."
        )
    if fault := next(filter(None, map(fault_of_name, found)), ""):
        raise ConfigError(f"{setting}={spec} returned a figure {fault}.")
    return {name: float(value) for name, value in found.items()}


class EvaluatedModel:
    """The model as a user's evaluation function uses it: `generate` and `score`.

    Args:
        actor, reward: The worker groups.
        put: Hands a batch to them.
        sampling: Where the function says nothing else: greedy, if `temperature` is not said.
        data: How prompts are read.
        verifier: As of `hybridrl.evaluation.scored_samples.sample_and_score`.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        reward: WorkerGroup,
        put: Callable[[Batch], BatchRef],
        tokenizer: Any,
        sampling: SamplingSettings,
        data: DataConfig,
        verifier: str | None = None,
    ) -> None:
        self._actor, self._reward, self._put = actor, reward, put
        self._tokenizer, self._sampling, self._data = tokenizer, sampling, data
        self._verifier = verifier
        self._calls = 0

    def generate(self, prompts: Sequence[_PromptLike], **sampling: Any) -> list[str]:
        """Generate a response to each prompt: a text, chat messages, or a row of the data. Repeat a
        prompt for several responses.

        Args:
            sampling: `temperature` (0 is greedy), `top_p`, `top_k`, `max_tokens`, `stop`.
        """
        if not prompts:
            return []
        batch, how = self._put(self._rows(prompts)), self._how(sampling)
        self._calls += 1
        how = replace(how, series=f"{how.series} {self._calls}")
        samples = self._actor.generate_sequences(batch, how)
        ids = [row.tolist() for row in samples.collect(["response_ids"])["response_ids"].rows()]
        return list(self._tokenizer.batch_decode(ids, skip_special_tokens=True))

    def score(
        self,
        prompts: Sequence[_PromptLike],
        responses: Sequence[str],
        answers: Sequence[str] | None = None,
    ) -> list[float]:
        """Score each response with the reward; NaN if it has no score.

        Args:
            answers: The right ones; None: those of the rows, if the prompts are rows.
        """
        if not len(prompts) == len(responses) == len(prompts if answers is None else answers):
            raise DataError("`score` needs as many responses, and answers, as prompts.")
        if not prompts:
            return []
        encode = self._tokenizer.encode
        ids = [encode(response, add_special_tokens=False) for response in responses]
        rows = self._rows(prompts, answers).with_columns(
            {"response_ids": pa.array(ids, pa.large_list(pa.int64()))}
        )
        own = {} if self._verifier is None else {"verifier": self._verifier}
        scored = self._reward.compute_reward(self._put(rows), **own)
        return [float(score) for score in scored.collect(["scores"])["scores"]]

    def _rows(self, prompts: Sequence[_PromptLike], answers: Sequence[str] | None = None) -> Batch:
        """Tokenize prompts as the data is tokenized; prompts of rows are already rendered."""
        rows = [
            dict(one) if isinstance(one, Mapping) else {"prompt": self._asked(one)}
            for one in prompts
        ]
        given: Sequence[str | None] = answers or [None] * len(rows)
        for row, answer in zip(rows, given, strict=True):
            row["answer"] = row.get("answer", "") if answer is None else answer
        has_answers = all(str(row["answer"]).strip() for row in rows)
        table = table_of(rows, "The prompts must all be of one kind", DataError)
        how = DataConfig(
            max_prompt_tokens=self._data.max_prompt_tokens,
            chat_template_options=self._data.chat_template_options,
            date=self._data.date,
            tools_column=None,
        )
        rendered = [
            isinstance(one, Mapping) and bool(one.get(PROMPT_MESSAGES_COLUMN)) for one in prompts
        ]
        return tokenize_prompts(
            RowReader(self._tokenizer, how),
            table,
            "prompt",
            "answer" if has_answers else None,
            rendered,
        )

    def _asked(self, prompt: Any) -> Any:
        """Return a text, or messages, following `data.chat` and `data.system_prompt`."""
        data = self._data
        if isinstance(prompt, str) and not data.chat:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return add_system_message(data.system_prompt, messages)

    def _how(self, asked: Mapping[str, Any]) -> SamplingSettings:
        known = ("temperature", "top_p", "top_k", "max_tokens", "stop")
        for name in asked:
            if name not in known:
                raise DataError(
                    f"`generate` takes {', '.join(known)}, not `{name}`.{suggest_name(name, known)}"
                )
        if asked.get("max_tokens", 0) > self._sampling.max_tokens:
            raise DataError(
                f"`generate` was asked for max_tokens={asked['max_tokens']}, and the model has "
                f"room for {self._sampling.max_tokens}: set max_tokens of the set to as many."
            )
        if "stop" in asked:
            stop = asked["stop"]
            asked = {**asked, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        return replace(self._sampling, **asked)
