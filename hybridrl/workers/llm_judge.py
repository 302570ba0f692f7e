"""Judge: a language model that reads answers and writes grades, or puts them in order."""

from __future__ import annotations

import math
import random
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import JudgeConfig, RolloutConfig, RolloutParallelConfig
from hybridrl.config.setting import Setting
from hybridrl.controller import WorkerContext
from hybridrl.conversations.rendering import TemplateContext, render_chat
from hybridrl.models.model_loading import find_local_folder, load_tokenizer
from hybridrl.parallel.process_group import join_group_world
from hybridrl.rewards.rubrics import load_rubric, read_row_rubric, rubric_score
from hybridrl.rewards.scoring_round import group_neighbors
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import RolloutEngine
from hybridrl.system.content_cache import ContentCache, compute_key, hash_plain
from hybridrl.workers.engine_process import EngineProcess
from hybridrl.workers.rollout_engines import build_inference_engine, setup_of
from hybridrl.workers.training_engines import ModelSource


def parse_grade(text: str, pattern: str, scale: float) -> float:
    """Return the last grade in the judge's text, scaled to 0 to 1; NaN if there is none."""
    found = re.findall(pattern, text)
    try:
        grade = float(_group(found[-1])) / scale
    except (IndexError, ValueError):
        return math.nan
    return min(max(grade, 0.0), 1.0)


def parse_ranking(text: str, pattern: str, answers: int) -> list[float]:
    """Return the score of each response by the last ranking in the judge's text, such as `3 > 1 =
    2`: 1 for the best of all, 0 for the worst, with equal steps between; responses that are equally
    good share the mean of their ranks. All NaN if it does not name each response once."""
    found = re.findall(pattern, text)
    nobody = [math.nan] * answers
    if not found:
        return nobody
    places = [part.split("=") for part in _group(found[-1]).strip(" >=").split(">")]
    try:
        ranked = [[int(number) for number in tied] for tied in places]
    except ValueError:
        return nobody
    named = [number for tied in ranked for number in tied]
    if sorted(named) != list(range(1, answers + 1)):
        return nobody
    scores, place = nobody, 0
    for tied in ranked:
        mean = place + (len(tied) - 1) / 2
        for number in tied:
            scores[number - 1] = 1.0 - mean / max(1, answers - 1)
        place += len(tied)
    return scores


def _group(match: str | tuple[str, ...]) -> str:
    """Return the first group of a match of a pattern with several groups."""
    return match if isinstance(match, str) else match[0]


GRADE_TEMPLATE = """Grade the answer to a question.

Question:
{prompt}

Answer:
{response}

Right answer, for comparison:
{answer}

Say in one sentence what is right and wrong about the answer. Then write, on a line of its own,
"Score: " and a number from 0 (worthless) to 10 (perfect).
"""


RUBRIC_TEMPLATE = """Does the answer to a question meet a criterion?

Question:
{prompt}

Answer:
{response}

Criterion:
{criterion}

Say in one sentence how far the answer meets this criterion, and nothing else. Then write, on a line
of its own, "Score: " and a number from 0 (not at all) to 10 (wholly).
"""
RANKING_TEMPLATE = """Compare answers to a question.

Question:
{prompt}

{responses}

Right answer, for comparison:
{answer}

Say in a few sentences what is right and wrong about the answers. Then write, on a line of its own,
"Ranking: " and the numbers of all answers from the best to the worst, with > between them, or with
= between two that are equally good, such as "Ranking: 3 > 1 = 2".
"""
DEFAULT_TEMPLATES = {"grade": GRADE_TEMPLATE, "rubric": RUBRIC_TEMPLATE, "rank": RANKING_TEMPLATE}
DEFAULT_PATTERNS = {"grade": r"[Ss]core:\s*(-?[0-9.]+)", "rank": r"[Rr]anking:\s*([0-9 >=]+)"}


class JudgeSetup(NamedTuple):
    """The model that grades.

    Attributes:
        rollout: How it generates; sizes and sampling are the judge's own.
        job: A name that no other job on this machine has.
    """

    source: ModelSource
    rollout: RolloutConfig
    job: str


class LLMJudge:
    """A language model that grades responses by generating.

    Args:
        config: Template, pattern of the grade, scale.
        cache: Of its answers; None: it is asked each time.

    Attributes:
        pattern: Of what is looked for in its texts.
    """

    def __init__(
        self,
        context: WorkerContext,
        setup: JudgeSetup,
        config: JudgeConfig,
        setting: Setting = Setting("reward.judge"),
        cache: ContentCache | None = None,
    ) -> None:
        source, rollout, job = setup
        self._config, self._setting = config, setting
        by_rubric = config.rubric is not None or config.rubric_column is not None
        usual = DEFAULT_TEMPLATES["rubric" if by_rubric else config.mode]
        self._template = Path(config.template).read_text() if config.template else usual
        self.pattern = config.pattern or DEFAULT_PATTERNS[config.mode]
        self._rubric = (
            None if config.rubric is None else load_rubric(config.rubric, setting / "rubric")
        )
        self._tokenizer, self._context = load_tokenizer(source.tokenizer), source.template
        self._context_length = source.context_length
        self._sampling = SamplingSettings(config.max_tokens, temperature=0.0)
        # It keeps its weights, so it never sleeps, and takes no tools.
        settings = replace(
            rollout,
            episode=None,
            serve=False,
            parallel=RolloutParallelConfig(),
            stop=[],
            engine_options={},
            quantization="none",
            # A pipeline is for the policy: its plan, and decoders that can be divided.
            engine="transformers" if rollout.engine == "pipeline" else rollout.engine,
            plan=None,
            memory_share=config.memory_share,
        )
        options = [settings, self._sampling, context.device_kind]
        known = None if cache is None else _identify_model(source, options)
        of_engine = setup_of(source, join_group_world(context), 0, f"{job}-judge")
        self._engine: EngineProcess | RolloutEngine
        if settings.engine == "vllm" and context.device_kind != "cpu":
            self._engine = EngineProcess(context, of_engine, settings)
        else:
            self._engine = build_inference_engine(of_engine, settings)
        # Files that have changed meanwhile were read as they are, or as they were.
        is_same = known is not None and known == _identify_model(source, options)
        self._cache, self._model = cache if is_same else None, known

    def grade(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return one grade for each row of `prompt`, `response` and further columns, at most 1; NaN
        where the judge wrote none, or the text was too long for it.

        Args:
            groups: The prompt of each row, the rows of one next to each other; None: each row has
                its own. It counts where answers are put in order.
        """
        if self._config.mode == "rank":
            return torch.tensor(self._ranked(rows, groups))
        if self._rubric is not None or self._config.rubric_column is not None:
            return torch.tensor(self._by_criteria(rows))
        scale = self._config.scale
        texts = self._asked([{**row} for row in rows])
        return torch.tensor([parse_grade(text, self.pattern, scale) for text in texts])

    def _by_criteria(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Grade each row by its rubric, with one request for each criterion."""
        column, scale = self._config.rubric_column, self._config.scale
        rubrics = [self._rubric or []] * len(rows)
        if column is not None:
            setting = self._setting / "rubric_column"
            rubrics = [read_row_rubric(row, column, setting) for row in rows]
        requests = [
            {**row, "criterion": criterion.text}
            for row, rubric in zip(rows, rubrics, strict=True)
            for criterion in rubric
        ]
        texts = iter(self._asked(requests))
        return [
            rubric_score(rubric, [parse_grade(next(texts), self.pattern, scale) for _ in rubric])
            for rubric in rubrics
        ]

    def _ranked(
        self, rows: Sequence[Mapping[str, Any]], groups: Sequence[int] | None
    ) -> list[float]:
        """Rank the responses of each prompt with one request. A single response gets the neutral
        grade 0.5."""
        grades = [0.5] * len(rows)
        together = group_neighbors(range(len(rows)) if groups is None else groups)
        orders = [_shuffle_by_content(members, rows) for members in together if len(members) > 1]
        requests = [_format_ranking_request([rows[row] for row in order]) for order in orders]
        for order, text in zip(orders, self._asked(requests), strict=True):
            ranked = parse_ranking(text, self.pattern, len(order))
            for row, grade in zip(order, ranked, strict=True):
                grades[row] = grade
        return grades

    def _asked(self, requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what the judge writes to each request; empty where the request is too long for
        it."""
        prompts = [self._encode(parts) for parts in requests]
        longest = self._context_length - self._config.max_tokens
        fits = [n for n, ids in enumerate(prompts) if len(ids) <= longest]
        written = [""] * len(requests)
        found, unknown = dict[int, bytes](), [[place] for place in range(len(fits))]
        if self._cache is not None:  # it never samples, so equal requests have equal answers
            keys = [compute_key(self._model, prompts[n].numpy().tobytes()) for n in fits]
            found, unknown = self._cache.recall(keys)
        for place, value in found.items():
            written[fits[place]] = value.decode()
        if unknown:
            batch = Batch.from_columns({"prompt_ids": [prompts[fits[one[0]]] for one in unknown]})
            answers = self._engine.generate(batch, self._sampling, seed=0)
            ids = [row.tolist() for row in answers["response_ids"].rows()]
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            for places, text in zip(unknown, texts, strict=True):
                for place in places:
                    written[fits[place]] = text
            if self._cache is not None:
                new = zip(unknown, texts, strict=True)
                self._cache.put_many({keys[places[0]]: text.encode() for places, text in new})
        return written

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _encode(self, row: Mapping[str, Any]) -> torch.Tensor:
        known = {"answer": "", **{name: str(value) for name, value in row.items()}}
        return torch.tensor(
            encode_judge_prompt(self._tokenizer, self._template, known, self._context)
        )


def _identify_model(source: ModelSource, options: Sequence[Any]) -> bytes | None:
    """Hash the files of a model, with the times of their last change, which programs cannot set,
    and all that its answers depend on beside them. None if the files are not on this machine."""
    found = [source.dtype, source.context_length, source.eos_token_ids, *options]
    for folder in (find_local_folder(path) for path in (source.path, source.tokenizer)):
        if folder is None:
            return None
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            stat = path.stat()
            found += [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return hash_plain("judgements", repr(found))


def _shuffle_by_content(members: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Shuffle rows in an order that depends on their contents only, so that it is the same wherever
    and whenever they are judged."""
    said = "\0".join(str(rows[row]["response"]) for row in members)
    return random.Random(zlib.crc32(said.encode(errors="replace"))).sample(members, len(members))


def _format_ranking_request(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the request for several responses to one prompt, numbered from 1."""
    answers = [f"Answer {number}:\n{row['response']}" for number, row in enumerate(rows, start=1)]
    return {**rows[0], "responses": "\n\n".join(answers)}


def encode_judge_prompt(
    tokenizer: Any,
    template: str,
    parts: Mapping[str, str],
    context: TemplateContext | None = None,
) -> list[int]:
    """Return the tokens of a request to the judge.

    Only the template and the tokenizer's own chat template may hold special tokens. The parts come
    from data and from a model: a `<|im_end|>` in an answer is characters, and ends nobody's turn.

    Args:
        parts: Texts for the `{names}` of the template.
        context: What the chat template reads beside the message.
    """
    mark = secrets.token_hex(16)  # that no text holds
    # Not str.format: a brace in an answer is a brace.
    text = re.sub(r"\{(\w+)\}", lambda m: mark + m[0] + mark if m[1] in parts else m[0], template)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = render_chat(tokenizer, message, context or TemplateContext(), ask=True)
    # One text from one special token of the templates to the next, with the parts in it: so words
    # are cut into tokens as usual. Only there do special tokens count.
    ids: list[int] = []
    pieces = text.split(mark)
    pieces[1::2] = [parts[piece[1:-1]] for piece in pieces[1::2]]
    pending = ""
    for number, piece in enumerate(pieces):
        if number % 2:
            pending += piece
            continue
        *before, last = re.split(_build_special_token_pattern(tokenizer), piece)
        for plain, special in zip(before[::2], before[1::2], strict=True):
            ids += _encode_plain_text(tokenizer, pending + plain)
            ids.append(tokenizer.convert_tokens_to_ids(special))
            pending = ""
        pending += last
    return ids + _encode_plain_text(tokenizer, pending)


def _build_special_token_pattern(tokenizer: Any) -> str:
    """Return a pattern, with one group, of every text that this tokenizer reads as a special
    token."""
    tokens = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    any_of_them = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return f"({any_of_them})" if tokens else "((?!))"  # which nothing matches


def _encode_plain_text(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, none of whose characters are read as a special token."""
    if not text:
        return []
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
