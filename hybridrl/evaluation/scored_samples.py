"""Scored samples of an evaluation set: generated and scored by worker groups, collected as a
table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from hybridrl.batch.batch import MASKS, OUTCOMES, Batch, is_right, outcomes_of, sampled_tokens
from hybridrl.controller import BatchRef, WorkerGroup
from hybridrl.evaluation.answer_extraction import AnswerExtractor
from hybridrl.evaluation.sample_table import SampleTable
from hybridrl.rollout import SamplingSettings

_KEPT_COLUMNS = (
    *("prompt", "answer", "response", "scores", OUTCOMES),
    *("finish_reason", "turns", "episode_rewards"),
)
"""Columns of samples that are kept as they are."""


class ScoredSamplesRef(NamedTuple):
    """A reference to scored samples on the workers, with `samples` neighbouring rows for each
    prompt."""

    rows: BatchRef
    samples: int
    greedy: bool


def sample_and_score(
    actor: WorkerGroup,
    reward: WorkerGroup,
    prompts: BatchRef,
    sampling: SamplingSettings,
    samples: int = 1,
    verifier: str | None = None,
) -> ScoredSamplesRef:
    """Generate responses and score them; return a reference that has `scores`.

    Args:
        samples: Of each prompt.
        verifier: The set whose own functions score them; None: what scores for the job.
    """
    repeated = prompts.repeat(samples) if samples > 1 else prompts
    answers = repeated | actor.generate_sequences(repeated, sampling)
    own = {} if verifier is None else {"verifier": verifier}
    answers |= reward.compute_reward(answers, **own)
    return ScoredSamplesRef(answers, samples, sampling.temperature == 0)


def collect_sample_table(
    drawn: Iterable[ScoredSamplesRef],
    prompts: Batch,
    correct_at: float,
    extract: AnswerExtractor,
    column: str | None = None,
) -> SampleTable:
    """Bring the samples to the driver.

    Args:
        prompts: Those that they are of.
        correct_at: The outcome from which a sample is right.
        extract: How the answer of a response is found.
        column: A further one of the data that is kept.
    """
    keys, columns = compute_prompt_keys(prompts), [column] if column else []
    tables = [_collect_table(one, keys, correct_at, extract, columns) for one in drawn]
    return SampleTable(pa.concat_tables(tables, promote_options="permissive"))


def compute_prompt_keys(prompts: Batch) -> list[str]:
    """Compute keys that identify prompts across evaluations and tokenizers: a hash of text and
    reference answer, or of all data columns where there is no text. Duplicates are numbered."""
    keys, seen = [], Counter[str]()
    for row in prompts.rows_for_users():
        named = [row.get(name) for name in ("prompt", "answer")]
        text = repr(named if named[0] else sorted(row.items()))
        key = hashlib.sha1(text.encode(errors="replace")).hexdigest()[:16]
        seen[key] += 1
        keys.append(f"{key}.{seen[key]}")
    return keys


def counted(batch: Batch) -> Batch:
    """The column `sampled_tokens`. Rows do not depend on each other."""
    return Batch.from_columns({"sampled_tokens": sampled_tokens(batch)})


def _collect_table(
    drawn: ScoredSamplesRef,
    keys: Sequence[str],
    correct_at: float,
    extract: AnswerExtractor,
    columns: Iterable[str],
) -> pa.Table:
    rows, wanted = drawn.rows, [*_KEPT_COLUMNS, *columns]
    if rows.columns.may_have("response_mask"):
        masks = ["response_mask", *rows.columns.certain.intersection(MASKS[1:])]
        rows |= rows.apply(counted, masks, makes=["sampled_tokens"])
        wanted.append("sampled_tokens")
    found = rows.collect(wanted, partial=True)
    number = len(found)
    scores = found["scores"].double()
    made: dict[str, Any] = {
        "row": [index // drawn.samples for index in range(number)],
        "key": [keys[index // drawn.samples] for index in range(number)],
        "sample": [index % drawn.samples for index in range(number)],
        "greedy": pa.array([drawn.greedy] * number, pa.bool_()),
        "score": scores.numpy(),
        "correct": is_right(outcomes_of(found), correct_at).numpy(),
    }
    if "sampled_tokens" in found:
        made["tokens"] = found["sampled_tokens"].numpy()
    if "response" in found:
        made["extracted"] = pa.array([extract(text) for text in found["response"]], pa.string())
    further = [n for n in wanted if n in found and n not in ("scores", "sampled_tokens", *made)]
    return pa.table(made | {name: found.table.column(name) for name in further})
