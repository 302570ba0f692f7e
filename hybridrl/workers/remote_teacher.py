"""RemoteTeacher: a teacher behind an endpoint of OpenAI's completions that tells of prompts, as
vLLM's does: asked to continue a sample, it returns the log-probabilities of the sample's tokens."""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.controller import DP, Worker, WorkerContext, transfer
from hybridrl.data.token_spelling import NO_TOKEN
from hybridrl.errors import RemoteModelError
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.rollout.rollout_engine import ragged
from hybridrl.system.daemon_threads import DaemonThreads
from hybridrl.system.redaction import register_secret, without_url_secrets
from hybridrl.workers.generation import SAMPLE_COLUMNS
from hybridrl.workers.reference_worker import list_scored_columns
from hybridrl.workers.teacher_reading import TeacherReading, list_top_tokens, score_responses
from hybridrl.workers.training_engines import ModelSource

_ATTEMPTS = 5
"""Of a request that the server may answer later."""
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_MOST_LOG_PROB = 1e-3
"""Rounding may put a log-probability above 0."""


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Answers of every status as they are. To follow a redirect would send the key, and no samples,
    to another server."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


_OPENER = urllib.request.build_opener(_AnyStatus)


class _HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class ScoredResponse(NamedTuple):
    """The log-probabilities that the teacher gives in the place of each response token.

    Attributes:
        log_probs: Of that token, `[tokens]`.
        top_ids, top_log_probs: Its likeliest tokens, `[tokens x k]`.
        words: The tokens as the server spells them, empty where it does not.
    """

    log_probs: list[float]
    top_ids: list[int]
    top_log_probs: list[float]
    words: list[str]


class RemoteTeacher(Worker):
    """One rank's connection to the server.

    Args:
        source: Of the student's tokenizer.
        top_k, alignment, system_prompt: As of `ReferenceWorker`.
        url, model, tokenizer, api_key, timeout, concurrency: See `RemoteModelConfig`.
    """

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        url: str,
        model: str | None = None,
        tokenizer: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        concurrency: int = 16,
        top_k: int = 0,
        alignment: str = "tokens",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(context)
        self._url, self._timeout, self._top_k = url.rstrip("/"), timeout, top_k
        self._setting = f"models.{context.role}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            register_secret(api_key)
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pool = ThreadPoolExecutor(concurrency)
        self._tokenizer = load_tokenizer(tokenizer or source.tokenizer)
        self._reading = None
        if alignment == "bytes" and tokenizer is not None:
            self._reading = TeacherReading(source, tokenizer, system_prompt)
        self._model, self._is_known = model, False

    @classmethod
    def runs_beside(cls, keywords: Mapping[str, Any]) -> bool:
        return True

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    @transfer(DP, reads=SAMPLE_COLUMNS, makes=list_scored_columns, streams=True)
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """Compute what `ReferenceWorker.compute_ref_log_prob` does."""
        with self.phase("score"):
            return score_responses(self._reading, batch, lambda read: self._ask(read, 1)[0])

    @transfer(DP, reads=SAMPLE_COLUMNS, makes=(TEACHER_IDS, TEACHER_LOG_PROBS), streams=True)
    def compute_top_log_probs(self, batch: Batch) -> Batch:
        """Compute what `ReferenceWorker.compute_top_log_probs` does."""
        with self.phase("score"):
            top_k = self._top_k
            return list_top_tokens(self._reading, batch, partial(self._ask, top_k=top_k), top_k)

    def _ask(self, batch: Batch, top_k: int) -> list[RaggedColumn]:
        """Return the columns of `ScoredResponse` for samples in the teacher's tokens."""
        prompts, responses = (
            [row.tolist() for row in batch.ragged(name).rows()] for name in SAMPLE_COLUMNS
        )
        asked = zip(prompts, responses, [top_k] * len(prompts), strict=True)
        found = list(self._pool.map(lambda one: self._score(*one), asked))
        if not self._is_known:
            words = [word for one in found for word in one.words]
            self._check_words([token for row in responses for token in row], words)
        names = ("log_probs", "top_ids", "top_log_probs")
        return [ragged([getattr(one, name) for one in found], np.float32) for name in names]

    def _score(self, prompt: list[int], response: list[int], top_k: int) -> ScoredResponse:
        if not response:
            return ScoredResponse([], [], [], [])
        answer = self._request(prompt + response, top_k)
        try:
            places = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            places = None
        if not isinstance(places, list):
            raise self._error(
                "its answer has no `prompt_logprobs`. The server must tell the log-probabilities "
                "of a prompt, as vLLM's /v1/completions does"
            )
        if len(places) != len(prompt) + len(response):
            raise self._error(
                f"it tells of {len(places)} tokens where {len(prompt) + len(response)} were sent. "
                "A server that changes prompts cannot be a teacher"
            )
        return self._parse(places[len(prompt) :], response, top_k)

    def _parse(self, places: Sequence[Any], response: Sequence[int], top_k: int) -> ScoredResponse:
        found = ScoredResponse([], [], [], [])
        for place, token in zip(places, response, strict=True):
            try:
                listed = {int(number): float(one["logprob"]) for number, one in place.items()}
                word = str(place[str(token)].get("decoded_token") or "") if token in listed else ""
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
                raise self._error(
                    f"of token {token} it tells {str(place)[:80]}, which is no list of tokens with "
                    "their `logprob`, as vLLM's /v1/completions gives it"
                ) from error
            if token not in listed:
                raise self._error(
                    f"it does not tell the log-probability of token {token}, which it was sent"
                )
            wrong = [value for value in listed.values() if not value <= _MOST_LOG_PROB]
            if wrong or math.isinf(listed[token]):
                raise self._error(
                    f"of token {token} it tells the log-probability {(wrong or [-math.inf])[0]:g}, "
                    "of which nothing can be learned"
                )
            found.log_probs.append(listed[token])
            best = sorted(listed, key=lambda n: -listed[n])[:top_k]
            short = top_k - len(best)
            found.top_ids.extend([*best, *[NO_TOKEN] * short])
            found.top_log_probs.extend(listed[number] for number in best)
            found.top_log_probs.extend([-math.inf] * short)
            found.words.append(word.strip())
        return found

    def _check_words(self, ids: Sequence[int], words: Sequence[str]) -> None:
        """Refuse a server to which most tokens are other words. Only letters and digits are
        compared: white space and parts of characters are spelled in several ways."""
        plain = [(token, word) for token, word in zip(ids, words, strict=True) if word.isalnum()]
        alike = sum(str(self._tokenizer.decode([token])).strip() == word for token, word in plain)
        if 2 * alike < len(plain):
            raise self._error(
                "most of the tokens that it was sent are other words there: it has another "
                "tokenizer. Set distillation.alignment=bytes and the server's tokenizer by "
                f"{self._setting}.tokenizer"
            )
        self._is_known = bool(plain)

    def _request(self, ids: list[int], top_k: int) -> Any:
        """Return the JSON answer, after some attempts if the server is busy or not there."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        body |= {} if self._model is None else {"model": self._model}
        content, url = json.dumps(body).encode(), f"{self._url}/completions"
        until, pause, said = time.monotonic() + self._timeout, 0.0, ""
        for attempt in range(1, _ATTEMPTS + 1):
            time.sleep(pause)
            pause = 2.0 ** (attempt - 1)
            request = urllib.request.Request(url, content, self._headers)
            try:
                answer = _exchange(request, until - time.monotonic())
                if 200 <= answer.status < 300:
                    return json.loads(answer.content)
                said = self._read_refusal(answer)
                pause = max(pause, _parse_pause(answer.headers.get("Retry-After")))
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                why = getattr(error, "reason", None) or error
                is_late = isinstance(why, TimeoutError)
                said = "a time-out" if is_late else str(why) or type(why).__name__
            if time.monotonic() + (pause if attempt < _ATTEMPTS else 0.0) >= until:
                raise self._error(
                    f"attempt {attempt} of {_ATTEMPTS} has failed with {said}, and "
                    f"{self._setting}.timeout={self._timeout:g} seconds leave no time for another. "
                    f"Raise that, or lower {self._setting}.concurrency"
                )
        raise self._error(f"{_ATTEMPTS} attempts have failed, the last with {said}")

    def _read_refusal(self, answer: _HttpAnswer) -> str:
        """Return what a server says that may answer later.

        Raises:
            RemoteModelError: if it will not.
        """
        said = f"status {answer.status}: {answer.content[:2000].decode(errors='replace').strip()}"
        if to := answer.headers.get("Location"):
            raise self._error(f"it redirects to {without_url_secrets(to)}. Name that address")
        if answer.status not in _TRANSIENT:
            cure = (
                f". If it tells of fewer tokens than distillation.top_k={self._top_k}, "
                "lower that or raise the server's limit (vLLM: --max-logprobs)"
            )
            cure = cure if answer.status in (400, 422) else ""
            raise self._error(f"it refuses a request with {said}{cure}")
        return said

    def _error(self, said: str) -> RemoteModelError:
        return RemoteModelError(f"{self._setting}.url={self._url}: {said}.")


def _exchange(request: urllib.request.Request, seconds: float) -> _HttpAnswer:
    """Return the whole answer.

    Raises:
        TimeoutError: if it has not come within these seconds.
    """

    def read() -> _HttpAnswer:
        with _OPENER.open(request, timeout=seconds) as answer:
            return _HttpAnswer(answer.status, answer.headers, answer.read())

    # In a thread: the time-out of a socket begins anew with every byte.
    return DaemonThreads().submit(read).result(seconds)


def _parse_pause(told: str | None) -> float:
    """Return the seconds of a `Retry-After`, which may be a date; 0 if there is none."""
    try:
        return float(told or 0)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(str(told)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
