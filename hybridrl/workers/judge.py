"""Judge: a language model that reads an answer and writes a grade."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.schema import JudgeConfig, RolloutConfig, RolloutParallelConfig
from hybridrl.controller import Context
from hybridrl.core.batch import Batch
from hybridrl.models import load_tokenizer
from hybridrl.parallel.process_group import join
from hybridrl.rollout import Sampling
from hybridrl.workers.engines import ModelSource
from hybridrl.workers.rollout_engines import build_generator

TEMPLATE = """Grade the answer to a question.

Question:
{prompt}

Answer:
{response}

Right answer, for comparison:
{answer}

Say in one sentence what is right and wrong about the answer. Then write, on a line of its own,
"Score: " and a number from 0 (worthless) to 10 (perfect).
"""


class Judge:
    """Grades texts by generating.

    Args:
        source: The model.
        config: Template, pattern of the grade, scale.
        rollout: How it generates; sizes and sampling are the judge's own.
    """

    def __init__(
        self,
        context: Context,
        source: ModelSource,
        config: JudgeConfig,
        rollout: RolloutConfig,
        job: str,
    ) -> None:
        self._config = config
        self._template = Path(config.template).read_text() if config.template else TEMPLATE
        self._tokenizer = load_tokenizer(source.tokenizer)
        self._context_length = source.context_length
        self._sampling = Sampling(config.max_tokens, temperature=0.0)
        # It keeps its weights, so it never sleeps, and takes no tools.
        settings = replace(
            rollout,
            episode=None,
            parallel=RolloutParallelConfig(),
            stop=[],
            engine_options={},
            quantization="none",
            # A pipeline is for the policy: its plan, and decoders that can be divided.
            engine="transformers" if rollout.engine == "pipeline" else rollout.engine,
            plan=None,
            memory_share=config.memory_share,
        )
        self._engine = build_generator(source, settings, join(context), 0, f"{job}-judge")

    def grade(self, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """One number for each row of `prompt`, `response` and further columns, 1 at best; NaN where
        the judge wrote no grade, or the text was too long for it."""
        prompts = [self._encode(row) for row in rows]
        fits = [n for n, ids in enumerate(prompts) if len(ids) <= self._longest_prompt]
        batch = Batch.from_columns({"prompt_ids": [prompts[n] for n in fits]})
        grades = torch.full((len(rows),), math.nan)
        if fits:
            answers = self._engine.generate(batch, self._sampling, seed=0)
            texts = self._tokenizer.batch_decode(
                [ids.tolist() for ids in answers["response_ids"].rows()], skip_special_tokens=True
            )
            grades[fits] = torch.tensor([read_grade(text, self._config) for text in texts])
        return grades

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    @property
    def _longest_prompt(self) -> int:
        return self._context_length - self._config.max_tokens

    def _encode(self, row: Mapping[str, Any]) -> torch.Tensor:
        known = {"answer": "", **{name: str(value) for name, value in row.items()}}
        return torch.tensor(encode_request(self._tokenizer, self._template, known))


def encode_request(tokenizer: Any, template: str, parts: Mapping[str, str]) -> list[int]:
    """The tokens of a request to the judge.

    Only the template and the tokenizer's own chat template may hold special tokens. The parts come
    from data and from a model: a `<|im_end|>` in an answer is characters, and ends nobody's turn.

    Args:
        parts: Texts for the `{names}` of the template.
    """
    mark = secrets.token_hex(16)  # that no text holds
    # Not str.format: a brace in an answer is a brace.
    text = re.sub(r"\{(\w+)\}", lambda m: mark + m[0] + mark if m[1] in parts else m[0], template)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
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
        *before, last = re.split(special_tokens_of(tokenizer), piece)
        for plain, special in zip(before[::2], before[1::2], strict=True):
            ids += _plain(tokenizer, pending + plain)
            ids.append(tokenizer.convert_tokens_to_ids(special))
            pending = ""
        pending += last
    return ids + _plain(tokenizer, pending)


def special_tokens_of(tokenizer: Any) -> str:
    """A pattern, with one group, of every token that is more to this tokenizer than characters."""
    tokens = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    any_of_them = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return f"({any_of_them})" if tokens else "((?!))"  # which nothing matches


def _plain(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text in which no characters are a special token."""
    if not text:
        return []
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def read_grade(text: str, config: JudgeConfig) -> float:
    """The last grade in what the judge wrote, from 0 to 1; NaN if there is none."""
    found = re.findall(config.pattern, text)
    try:
        grade = float(found[-1]) / config.scale
    except (IndexError, ValueError):
        return math.nan
    return min(max(grade, 0.0), 1.0)
