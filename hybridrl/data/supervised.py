"""Turning rows of prompts and responses into the token ids that supervised training reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from hybridrl.core.batch import Batch
from hybridrl.data.prompts import column_of, render_prompts
from hybridrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize_examples(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str,
    response_column: str,
    *,
    chat: bool | None = None,
    system_prompt: str | None = None,
) -> Batch:
    """Tokenizes each prompt, and each response followed by the end-of-sequence token.

    `chat` and `system_prompt` mean what they mean in `tokenize_prompts`.

    Returns:
        A batch with the token-level columns `prompt_ids`, `response_ids` and `response_mask` (all
        ones: every response token is learned, the end included).

    Raises:
        DataError: if a column is missing, a prompt or response is not usable, or the tokenizer has
            no end-of-sequence token; names the row.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer `{tokenizer.name_or_path}` has no end-of-sequence token, so a model "
            "trained with it would never stop. Set `eos_token` in its tokenizer_config.json."
        )
    responses = column_of(rows, response_column, "data.response_column").to_pylist()
    for number, response in enumerate(responses, start=1):
        if not isinstance(response, str):
            raise DataError(
                f"Row {number} of the data has {response!r} in the column `{response_column}` "
                "(`data.response_column`), expected a string."
            )
    prompts = render_prompts(
        rows, tokenizer, prompt_column=prompt_column, chat=chat, system_prompt=system_prompt
    )
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    response_ids = [np.asarray(ids + end, dtype=np.int64) for ids in encoded]
    return Batch.from_columns(
        {
            "prompt_ids": prompts.token_ids,
            "response_ids": response_ids,
            "response_mask": [np.ones(len(ids), dtype=np.uint8) for ids in response_ids],
        }
    )
